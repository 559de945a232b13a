"""The split products on a GPU."""

import pytest
import split_checks as checks
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TURNS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize("turned", TURNS)
@pytest.mark.parametrize("shape", [checks.SHAPE, (500, 4100, 330), (1, 256, 1)])
@pytest.mark.parametrize("name", checks.FAMILIES)
def test_product_vs_ieee_fp32(name, shape, turned):
    checks.check_family(name, "cuda", shape, turned)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_not_finite_in_the_same_places(value):
    checks.check_not_finite("cuda", value)


@pytest.mark.parametrize("check", [checks.check_strides, checks.check_empty])
def test_holds(check):
    check("cuda")


@pytest.mark.parametrize("shape", [(300, 520, 264), (1024, 1024, 1024)])
def test_mlp_and_gradients_vs_ieee_fp32(shape):
    found, usual = checks.mlp_errors("cuda", shape)
    assert all(found[name] <= usual[name] for name in usual), (found, usual)


def test_captured_in_a_graph():
    """Replayed over other values, ones that take the other path among them."""
    a, b = (t.cuda() for t in checks.drawn(checks.SHAPE))
    checks.product(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = checks.product(a, b)
    for name in ("normal", "large elements meet zeros", "outlier channels"):
        make, _ = checks.FAMILIES[name]
        for ours, drawn in zip((a, b), make(*checks.drawn(checks.SHAPE, 7)), strict=True):
            ours.copy_(drawn)
        graph.replay()
        assert checks.misses(c, a, b, 2.0) == []
