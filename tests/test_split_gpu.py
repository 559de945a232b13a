"""The split products on a GPU."""

import pytest
import split_checks as checks
import torch

import fusedlib
from fusedlib.kernels import split_product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TURNS = [(False, False), (False, True), (True, False), (True, True)]
# More than 2²² results, fewer than which are torch's: ragged, and of several tiles each way.
SHAPES = [(2050, 300, 2054), (1500, 4100, 2900)]


@pytest.mark.parametrize("turned", TURNS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", checks.FAMILIES)
def test_product_vs_ieee_fp32(name, shape, turned):
    checks.check_family(name, "cuda", shape, turned)


@pytest.mark.parametrize("shape", [checks.SHAPE, (1, 256, 1), (129, 385, 2)])
def test_few_results_vs_ieee_fp32(shape):
    """cuBLAS shares such sums among programs and errs less: the library leaves them to it."""
    a, b = (t.cuda() for t in checks.drawn(shape))
    assert not split_product.split_pays(shape[0], shape[2], shape[1])
    assert checks.misses(checks.product(a, b), a, b, 4.0) == []


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_not_finite_in_the_same_places(value):
    checks.check_not_finite("cuda", value, SHAPES[0])


@pytest.mark.parametrize("check", [checks.check_strides, checks.check_empty])
def test_holds(check):
    check("cuda")


@pytest.mark.parametrize("shape", [(1024, 1040, 1032), (1024, 1024, 2048)])
def test_mlp_and_gradients_vs_ieee_fp32(shape):
    found, usual = checks.mlp_errors("cuda", shape)
    assert all(found[name] <= usual[name] for name in usual), (found, usual)


@pytest.mark.parametrize("save", ["gate_up", "input"])
def test_the_public_function_vs_ieee_fp32(save):
    """Twice, the second time with kept launches."""
    for _ in range(2):
        found, usual = checks.public_errors("cuda", (2048, 2048, 2048), fusedlib.swiglu_mlp, save)
        assert all(found[name] < 0.6 * usual[name] for name in usual), (found, usual)


def test_other_streams_and_threads_find_the_same():
    a, b = (t.cuda() for t in checks.drawn(SHAPES[0]))
    wanted = checks.product(a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [checks.product(a, b) for _ in range(3)]
    stream.synchronize()
    assert all(torch.equal(f, wanted) for f in found)


def test_captured_in_a_graph():
    """Replayed over other values, ones that take the other path among them."""
    a, b = (t.cuda() for t in checks.drawn(SHAPES[0]))
    checks.product(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = checks.product(a, b)
    for name in ("normal", "large elements meet zeros", "outlier channels"):
        make, _ = checks.FAMILIES[name]
        for ours, drawn in zip((a, b), make(*checks.drawn(SHAPES[0], 7)), strict=True):
            ours.copy_(drawn)
        graph.replay()
        assert checks.misses(c, a, b) == []


def test_more_than_2_to_the_31_elements():
    """Rows past 2³¹ elements of a factor and of the result, against torch's own."""
    m, k, n = 2**22 + 130, 520, 520  # 2.2e9 elements each
    a = torch.randn(256, k, device="cuda").repeat(m // 256 + 1, 1)[:m]
    b = torch.randn(k, n, device="cuda")
    c = checks.product(a, b)
    for rows in (slice(0, 256), slice(m - 200, m)):
        assert checks.misses(c[rows].clone(), a[rows], b, 1.5) == []
