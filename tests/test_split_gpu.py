"""The split products on a GPU."""

from functools import partial

import pytest
import torch

import fusedlib
import split_checks as checks
from fusedlib.launch import launch
from fusedlib.ops.linear.split import parts
from fusedlib.ops.linear.split import product as products
from rewritten import rewritten

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
# Ragged, of several tiles each way; of one span and of five.
SHAPES = [(2050, 300, 2054), (1500, 4100, 2900)]


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """Gives `product` another module for one it uses, a few characters of whose text differ."""

    def put(module, right, wrong, times=1):
        copy = rewritten(monkeypatch, tmp_path, module, right, wrong, times)
        if module is parts:
            monkeypatch.setattr(products, "FactorSplitter", copy.FactorSplitter)
        else:
            monkeypatch.setattr(products, "hopper", copy)
        monkeypatch.setattr(launch, "LAUNCHES", {})

    return put


@pytest.mark.parametrize("turned", checks.TURNS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", checks.FAMILIES)
def test_product_vs_the_contract(name, shape, turned):
    checks.check_family(name, "cuda", shape, turned)


@pytest.mark.parametrize("turned", checks.TURNS)
@pytest.mark.parametrize("shape", [checks.SHAPE, (1, 256, 1), (129, 385, 2), (130, 40000, 136)])
def test_other_shapes_vs_the_contract(shape, turned):
    checks.check_family("normal", "cuda", shape, turned)


@pytest.mark.parametrize("turned", checks.TURNS)
def test_the_kernel_of_tl_vs_the_contract(monkeypatch, turned):
    """As on a card that is no Hopper."""
    monkeypatch.setattr(products, "hopper", None)
    monkeypatch.setattr(launch, "LAUNCHES", {})
    for name in ("normal", "positive", "terms that differ by 2^30"):
        checks.check_family(name, "cuda", SHAPES[1], turned)


@pytest.mark.parametrize("turned", checks.TURNS)
def test_shares_of_a_sum_vs_the_contract(turned):
    shape = (1024, 10300, 2560)
    assert products.choose_k_splits(1024, 2560, 10300, 132) == 4
    for name in ("normal", "positive", "terms that differ by 2^30"):
        checks.check_family(name, "cuda", shape, turned)


# Numbers as training has them, and sums of one sign, in which what is cut off adds up.
USUAL = {
    "normal": lambda t: t,
    "silu": lambda t: torch.nn.functional.silu(3 * t) * torch.randn_like(t),
    "uniform": torch.rand_like,
    "magnitudes": torch.abs,
    "half of them zero": torch.relu,
    "lognormal": torch.exp,
    "gelu": torch.nn.functional.gelu,
}


@pytest.mark.parametrize("shape", [(4096, 256, 4096), (2050, 4100, 2054), (2048, 16384, 2560)])
@pytest.mark.parametrize("name", USUAL)
def test_errors_in_norm_vs_ieee_fp32(name, shape):
    """Half of cuBLAS's for signed numbers; no more than a few of fp32's roundoffs of one sign."""
    a, b = (t.cuda() for t in checks.drawn(shape))
    a, b = USUAL[name](a), b if name in ("normal", "silu") else b.abs()
    own, its = (checks.errors(c, a, b)[0] for c in (checks.product(a, b, False, True), a @ b))
    assert own <= max(0.7 * its if name in ("normal", "silu") else its, 3e-7), (own, its)


def test_what_is_cut_off_is_made_good(broken):
    """Of sums of one sign."""
    if not HOPPER:
        pytest.skip("this is measured of Hopper's tensor core")
    a, b = (t.cuda().abs() for t in checks.drawn((2050, 2048, 2054)))
    true = a.double() @ b.double()

    def short() -> float:
        return ((true - checks.product(a, b).double()).sum() / true.sum()).item()

    assert abs(short()) < 1.2e-7
    broken(parts, "axis=axis) != 0)", "axis=axis) < 0)")
    assert short() > 1.2e-7


CHECKS = (
    checks.check_strides,
    *(partial(check, shape=shape) for shape in SHAPES
      for check in (checks.check_exact, checks.check_not_finite)),
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_holds(check):
    check("cuda")


def test_an_mlp_near_the_end_of_the_range_is_finite_where_torch_s_is():
    """Whatever is true below 1e38, in outputs and gradients: no partial sum of ours ends sooner."""
    torch.manual_seed(0)
    layer = fusedlib.SwiGLUMLP(1024, 2816, device="cuda")
    x = (1e18 * torch.randn(1536, 1024, device="cuda")).requires_grad_()
    weights = torch.cat([layer.gate_proj.weight, layer.up_proj.weight]), layer.down_proj.weight
    wide = [t.detach().double().requires_grad_() for t in (x, *weights)]
    true = checks._plain_mlp(*wide)
    dy = torch.randn_like(x)
    of = {"y": true, "d_x": torch.autograd.grad(true, wide[0], dy.double())[0]}

    def lost(y):
        """How many are not finite though the true ones are below 1e38."""
        results = {"y": y, "d_x": torch.autograd.grad(y, x, dy)[0]}
        return {n: int((~r.isfinite() & (of[n].abs() < 1e38)).sum()) for n, r in results.items()}

    ours, torchs = lost(layer(x)), lost(checks._plain_mlp(x, *weights))
    assert fusedlib.ops.mlp.function.path_of(x, weights[0], weights[1]) == "split fp32"
    assert all(ours[name] <= torchs[name] for name in of), (ours, torchs)


WRONG = {
    "a span lost": ("total += _scaled", "total = _scaled"),
    "the last rows not stored": ("(i < m)[:, None]", "(i < m - 1)[:, None]"),
    "the right half on the left": ("row, column + half, m", "row, column, m"),
    "the low part of B left out": ("warpgroup_mma(ah, bl, zeros", "warpgroup_mma(al, bl, zeros"),
    "the first row's scale": ("row, a_lines, rows)", "row * 0, a_lines, rows)"),
    "half of a scale": ("((a2 & -2).to(gl.float32, bitcast=True) * second)", "second"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_broken_kernels_are_rejected(broken, fault):
    if not HOPPER:
        pytest.skip("this kernel is Hopper's")
    a, b = checks.FAMILIES["rows that differ by 2^30"](*checks.drawn(SHAPES[1]))
    a, b = a.cuda(), b.cuda()
    assert checks.misses(checks.product(a, b), a, b) == []
    broken(products.hopper, *WRONG[fault])
    torch.use_deterministic_algorithms(True)  # memory begins as NaN: no row is right by luck
    try:
        product = checks.product(a, b)
    finally:
        torch.use_deterministic_algorithms(False)
    assert checks.misses(product, a, b) != []


@pytest.mark.parametrize("save", ["gate_up", "input"])
@pytest.mark.parametrize("shape", [(2048, 2048, 2048), (1024, 1040, 4112)])
def test_the_public_function_vs_ieee_fp32(save, shape):
    """Twice, the second time with kept launches."""
    for _ in range(2):
        found, usual = checks.public_errors("cuda", shape, fusedlib.swiglu_mlp, save)
        assert all(found[name] < 0.7 * usual[name] for name in usual), (found, usual)


def test_other_streams_find_the_same():
    a, b = (t.cuda() for t in checks.drawn(SHAPES[0]))
    wanted = checks.product(a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [checks.product(a, b) for _ in range(3)]
    stream.synchronize()
    assert all(torch.equal(f, wanted) for f in found)


def test_captured_in_a_graph():
    """Replayed over other values, inf among them."""
    a, b = (t.cuda() for t in checks.drawn(SHAPES[0]))
    checks.product(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = products.split_product(a, b)
    for name in ("normal", "rows that differ by 2^70", "outlier channels"):
        for ours, drawn in zip(
            (a, b), checks.FAMILIES[name](*checks.drawn(SHAPES[0], 7)), strict=True
        ):
            ours.copy_(drawn)
        a[5, 5] = float("inf")
        graph.replay()
        assert checks.misses(c, a, b) == []


def test_more_than_2_to_the_31_elements():
    """Rows past 2³¹ elements of a factor and of the result."""
    m, k, n = 2**22 + 130, 520, 520  # 2.2e9 elements each
    a = torch.randn(256, k, device="cuda").repeat(m // 256 + 1, 1)[:m]
    b = torch.randn(k, n, device="cuda")
    c = products.split_product(a, b)
    for rows in (slice(0, 256), slice(m - 200, m)):
        assert checks.misses(c[rows].clone(), a[rows], b) == []


@pytest.mark.parametrize("by_columns", [False, True])
def test_parts_of_more_than_2_to_the_31_elements(by_columns):
    shape = (2**22 + 130, 520)
    a = torch.ones(shape, device="cuda")
    a[-1, -1] = 3.0
    split, factors = parts.FactorSplitter(a.device, a, by_columns)(a)
    rows = split.shape[0] // 2
    line = shape[1] - 1 if by_columns else shape[0] - 1
    unit = factors[-2:, line].view(torch.float32).double().prod().item()
    assert split[shape[0] - 1, shape[1] - 1].item() * unit == 3.0
    assert not split[rows:].any() and not split[shape[0] : rows].any()
