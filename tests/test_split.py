"""Split products: in Triton's interpreter and on a GPU, against their contract by element."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusedlib
from fusedlib.launch import launch
from fusedlib.launch.config import Config
from fusedlib.ops.linear import route
from fusedlib.ops.linear.split import mm, parts
from fusedlib.ops.linear.split import product as products
from interpreter import INTERPRETED, passed_in_the_interpreter
from rewritten import rewritten
from split_families import FAMILIES, cut_for_the_interpreter, drawn, misses

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
SHAPE = (140, 300, 134)  # m, k, n: ragged, more than one 128-tile each way
# On a GPU of one span and of five.
SHAPES = [SHAPE] if INTERPRETED else [(2050, 300, 2054), (1500, 4100, 2900)]
TURNS = [(False, False), (False, True), (True, False), (True, True)]


def test_in_the_interpreter():
    assert passed_in_the_interpreter("test_split.py") > 60


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    """Sums are of five blocks in the interpreter."""
    if INTERPRETED:
        cut_for_the_interpreter(monkeypatch)


def product(a: Tensor, b: Tensor, turned_a: bool = False, turned_b: bool = False) -> Tensor:
    """A B split, each factor stored as asked, however small they are."""
    a = a.mT.contiguous().mT if turned_a else a.contiguous()
    b = b.mT.contiguous().mT if turned_b else b.contiguous()
    return products.split_product(a, b)


def errors(actual: Tensor, a: Tensor, b: Tensor) -> tuple[float, float]:
    """In norm, and the largest of an element relative to |A||B|."""
    true, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    off = (actual.double() - true).abs()
    norm = (off.norm() / true.norm().clamp_min(2.0**-1000)).item()
    return norm, (off / sizes.clamp_min(2.0**-1000)).max().item()


def check_family(name: str, device: str, shape=SHAPE, turned=(False, False)) -> None:
    a, b = (t.to(device) for t in FAMILIES[name](*drawn(shape)))
    assert misses(product(a, b, *turned), a, b) == []


def check_not_finite(device: str, shape=SHAPE) -> None:
    """Beside zeros, faint elements, denormals, and each other."""
    a, b = (t.to(device) for t in drawn(shape))
    inf = float("inf")
    for place, value in (((3, 7), inf), ((4, 9), 0.0), ((5, 9), 1e-30), ((6, 9), inf),
                         ((7, 9), -1e-44), ((8, -1), -inf), ((9, 2), inf), ((9, 3), -inf),
                         ((-1, -1), inf), ((11, 5), float("nan"))):  # fmt: skip
        a[place] = value
    for place, value in (((7, 5), 0.0), ((9, 9), -inf), ((100, 20), float("nan")),
                         ((-1, -1), 1e-38), ((12, 30), inf)):  # fmt: skip
        b[place] = value
    a[20] = 0.0
    usual = (a.cpu() @ b.cpu()).to(device)
    for turned in TURNS:
        actual = product(a, b, *turned)
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(actual), kind(usual)), (turned, kind)


# --- against the contract ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_product_vs_the_contract(device, name, shape):
    for turned in TURNS if device == "cuda" else TURNS[:1]:
        check_family(name, device, shape, turned)


# On a GPU a long sum, too.
OTHER_SHAPES = [(1, 256, 1), (3, 57, 129), (129, 1, 2), (20, 700, 24)]
OTHER_SHAPES += [] if INTERPRETED else [(129, 385, 2), (130, 40000, 136)]


@pytest.mark.parametrize("turned", [(False, True), (True, False)])
@pytest.mark.parametrize("shape", OTHER_SHAPES, ids=str)
def test_product_at_other_shapes_vs_the_contract(device, shape, turned):
    check_family("normal", device, shape, turned)


@pytest.mark.interpreter
def test_small_blocks(device, monkeypatch):
    """Several of a tile, as on a GPU."""
    monkeypatch.setattr(products, "INTERPRETER", Config(64, 32, 32, 4, 1, group_m=2))
    monkeypatch.setattr(parts, "INTERPRETED", Config(num_warps=4, lines=16))
    for turned in TURNS:
        check_family("normal", device, (130, 140, 72), turned)


@pytest.mark.interpreter
@pytest.mark.parametrize("shares", [2, 3])
def test_shares_of_a_sum(device, monkeypatch, shares):
    monkeypatch.setattr(products, "MIN_K_PER_SPLIT", 64)
    monkeypatch.setattr(products, "choose_k_splits", lambda *_: shares)
    for turned in TURNS:
        check_family("terms that differ by 2^30", device, turned=turned)
    check_not_finite(device)
    check_family("normal", device, (3, 70, 5))


@pytest.mark.gpu
@pytest.mark.parametrize("turned", TURNS)
def test_shares_of_a_sum_on_a_gpu(turned):
    shape = (1024, 10300, 2560)
    assert products.choose_k_splits(1024, 2560, 10300, 132) == 4
    for name in ("normal", "positive", "terms that differ by 2^30"):
        check_family(name, "cuda", shape, turned)


@pytest.mark.interpreter
def test_few_results_are_shared(device):
    """On 132 multiprocessors: into rounds that all of them compute, where writing pays."""
    shapes = (1024, 2560, 10240), (1024, 1024, 4096), (4096, 4096, 4096), (20480, 2560, 1024)
    assert [products.choose_k_splits(*shape, 132) for shape in shapes] == [4, 2, 1, 1]


@pytest.mark.interpreter
@given(
    m=st.integers(1, 40), k=st.integers(1, 300), n=st.integers(1, 40),
    scales=st.tuples(st.integers(-149, 120), st.integers(-149, 120)), spread=st.integers(0, 60),
    zeros=st.sampled_from([0.0, 0.3, 0.99]), positive=st.booleans(), seed=st.integers(0, 1000),
    turned=st.sampled_from(TURNS),
)  # fmt: skip
@settings(
    max_examples=int(os.environ.get("SPLIT_EXAMPLES", "30")),
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the same for all
)
def test_drawn_products_vs_the_contract(
    device, m, k, n, scales, spread, zeros, positive, seed, turned
):
    a, b = drawn((m, k, n), seed)
    generator = torch.Generator().manual_seed(seed)
    a = a * torch.exp2(-spread * torch.rand(a.shape, generator=generator))
    a = torch.where(torch.rand(a.shape, generator=generator) < zeros, 0.0, a)
    a, b = (t.abs() if positive else t for t in (a, b))
    a, b = (t * 2.0 ** (s // 2) * 2.0 ** (s - s // 2) for t, s in zip((a, b), scales, strict=True))
    assert misses(product(a, b, *turned), a, b) == []


@pytest.mark.gpu
@pytest.mark.parametrize("turned", TURNS)
def test_the_kernel_of_tl_vs_the_contract(monkeypatch, turned):
    """As on a card that is no Hopper."""
    monkeypatch.setattr(products, "hopper", None)
    monkeypatch.setattr(launch, "LAUNCHES", {})
    for name in ("normal", "positive", "terms that differ by 2^30"):
        check_family(name, "cuda", SHAPES[1], turned)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_not_finite_in_the_same_places(device, shape):
    check_not_finite(device, shape)


def test_strides(device):
    a, b = (t.to(device) for t in drawn(SHAPE))
    wanted = product(a, b)
    wide = torch.cat([a, -a], dim=1)[:, : a.shape[1]]
    turned = b.mT.contiguous().mT
    every_other = torch.stack([a, -a], dim=-1).flatten(-2)[:, ::2]
    unaligned = torch.cat([a[:, :1], a], dim=1)[:, 1:]
    for left, right in ((wide, b), (a, turned), (every_other, turned), (unaligned, b)):
        assert torch.equal(products.split_product(left, right), wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_that_fp32_holds_are_exact(device, shape):
    """Sums that fp32 holds, of factors that fp16 holds."""
    a, b = (t.to(device) for t in drawn(shape))
    for left, right in ((torch.ones_like(a), torch.ones_like(b)),
                        ((8 * a).round(), (8 * b).round())):  # fmt: skip
        assert torch.equal(product(left, right).double(), left.double() @ right.double())


@pytest.mark.interpreter
@pytest.mark.parametrize("by_columns", [False, True])
def test_parts_add_up(device, by_columns):
    """By spans of 128, of which there are two, the second ragged."""
    a = torch.randn(130, 200) * 3e-4 * torch.exp2(torch.randint(-30, 30, (130, 1)).float())
    a[3, :150], a[4], a[5, 7], a[6] = 0.0, 0.0, 1e-42, torch.randn(200) * 1e-41
    split, factors = parts.FactorSplitter(a.device, a, by_columns)(a)
    assert split.shape == (2 * 256, 256) and factors.shape == (2 * 2, 256)
    parted = split.double().chunk(2)
    assert not any(p[130:].any() or p[:, 200:].any() for p in parted)
    high, low = (p[:130, :200] for p in parted)
    a, high, low = (t.mT if by_columns else t for t in (a.double(), high, low))
    assert ((high != 0) == (a != 0)).all()
    for i, span in enumerate((slice(0, 128), slice(128, None))):
        unit = (
            (factors[2 * i : 2 * i + 2, : len(a)] & -2)
            .view(torch.float32)
            .double()
            .prod(0)[:, None]
        )
        largest = a[:, span].abs().amax(1, True)
        off = ((high + low)[:, span] * unit - a[:, span]).abs()
        assert (off <= torch.maximum(2.0**-23 * a[:, span].abs(), 2.0**-39 * largest)).all()
        scaled = (largest / unit)[largest > 2.0**-112]
        assert ((scaled >= 2**14) & (scaled < 2**15)).all()
        assert not off[(largest < 2.0**-112).expand_as(off)].any()


@pytest.mark.interpreter
def test_low_bits_are_seen(device):
    """Of integers there are none, nor of bf16, and their sums may be exact."""
    a = torch.arange(300.0).reshape(3, 100)
    a[1] = (a[1] / 3).bfloat16().float()
    for row, value, wanted in ((0, 1.0, [0, 0, 0]), (2, 1 + 2.0**-10, [0, 0, 0]),
                               (2, 1 + 2.0**-11, [0, 0, 1])):  # fmt: skip
        a[row, 7] = value
        for by_columns, stored in ((False, a), (True, a.mT.contiguous())):
            _, factors = parts.FactorSplitter(stored.device, stored, by_columns)(stored)
            assert (factors[1, :3] & 1).tolist() == wanted


@pytest.mark.interpreter
def test_small_products_are_torchs_and_others_are_split(device, monkeypatch):
    a, b = drawn(SHAPE)
    assert torch.equal(mm.split_mm(a, b), a @ b)
    for least in ("MIN_SPLIT_SIZE", "MIN_SPLIT_RESULTS", "MIN_SPLIT_WORK"):
        monkeypatch.setattr(route, least, 1)
    assert torch.equal(mm.split_mm(a, b), product(a, b))
    monkeypatch.setattr(route, "SPLITTING_ALLOWED", False)  # FUSEDLIB_SPLIT=0
    assert torch.equal(mm.split_mm(a, b), a @ b)
    monkeypatch.setattr(route, "SPLITTING_ALLOWED", True)
    for m, k, n in ((0, 300, 5), (5, 300, 0), (5, 0, 7)):
        c = mm.split_mm(torch.ones(m, k), torch.ones(k, n))
        assert c.shape == (m, n) and not c.any()


@pytest.mark.interpreter
def test_what_does_not_fit_is_refused(device):
    for a, b in ((torch.zeros(3), torch.zeros(3, 4)), (torch.zeros(3, 4), torch.zeros(3, 4)),
                 (torch.zeros(3, 4), torch.zeros(4, 5, dtype=torch.float64))):  # fmt: skip
        with pytest.raises(ValueError, match=r"A must be \(m, k\) and B \(k, n\), float32"):
            mm.split_mm(a, b)


# --- teeth ---------------------------------------------------------------------------------------

LAST = "((i == m - 1)[:, None] & (j == n - 1)[None, :])"
DOTS = "tl.dot(al, bh, tl.dot(ah, bl))"
BROKEN = {
    "dropped K block": ("range(begin, end", "range(begin + BLOCK_K, end"),
    "dropped ragged K block": ("k_per_split, k)", "k_per_split, k // 64 * 64)"),
    "first span lost": ("total += acc *", "total = acc *"),
    "span added twice": ("            acc = tl.zeros_like(acc)\n", ""),
    "low part of A left out": (DOTS, "tl.dot(ah, bl)"),
    "low part of B left out": (DOTS, "tl.dot(al, bh)"),
    "wrong last element": ("n + j[None, :], total,",
                           f"n + j[None, :], total + tl.where({LAST}, 1e-3, 0.0),"),
    "first row's scale": ("2 * span * a_lines + i)", "2 * span * a_lines + i * 0)"),
    "first column's scale": ("2 * span * b_lines + j)", "2 * span * b_lines + j * 0)"),
    "half of a scale": ("((a2 & -2).to(tl.float32, bitcast=True) * second)", "second"),
    "every span scaled as the first of A": ("2 * span * a_lines", "0 * a_lines"),
    "every span scaled as the first of B": ("2 * span * b_lines", "0 * b_lines"),
    "lines scaled by the largest of all": (
        "tl.max(magnitudes, axis=axis) >>",
        "tl.max(magnitudes * 0 + tl.max(magnitudes), axis=axis) >>",
    ),
    "low parts cut": ("(v - high.to(tl.float32)).to", "(v * 0.0).to"),
    "the sign of faint elements lost": ("tl.where(a == 0.0, 0.0,", "tl.where(a == a, 0.0,"),
    "inf in the high part": ("tl.minimum(tl.maximum(tl.abs(v), least), 32768.0)",
                             "tl.maximum(tl.abs(v), least)"),
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_rejected(device, monkeypatch, tmp_path, fault):
    right, wrong = BROKEN[fault]
    modules = products, parts
    [module] = [m for m in modules if right in Path(m.__file__).read_text(encoding="utf-8")]
    broken = rewritten(monkeypatch, tmp_path, module, right, wrong)
    if module is products:
        monkeypatch.setattr(products, "split_product", broken.split_product)
    else:
        monkeypatch.setattr(broken, "SPAN", 128)
        monkeypatch.setattr(products, "FactorSplitter", broken.FactorSplitter)
    with pytest.raises(AssertionError):
        for turned in ((False, True), (True, False)):
            check_family("terms that differ by 2^30", device, turned=turned)
        check_family("rows that differ by 2^30", device)
        check_family("columns that differ by 2^30", device)
        check_not_finite(device)


BROKEN_ON_HOPPER = {
    "a span lost": ("total += _scaled", "total = _scaled"),
    "the last rows not stored": ("(i < m)[:, None]", "(i < m - 1)[:, None]"),
    "the right half on the left": ("row, column + half, m", "row, column, m"),
    "the low part of B left out": ("warpgroup_mma(ah, bl, zeros", "warpgroup_mma(al, bl, zeros"),
    "the first row's scale": ("row, a_lines, rows)", "row * 0, a_lines, rows)"),
    "half of a scale": ("((a2 & -2).to(gl.float32, bitcast=True) * second)", "second"),
}  # fmt: skip


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


@pytest.mark.gpu
@pytest.mark.parametrize("fault", BROKEN_ON_HOPPER)
def test_a_broken_kernel_of_hopper_is_rejected(broken, fault):
    if not HOPPER:
        pytest.skip("this kernel is Hopper's")
    a, b = FAMILIES["rows that differ by 2^30"](*drawn(SHAPES[1]))
    a, b = a.cuda(), b.cuda()
    assert misses(product(a, b), a, b) == []
    broken(products.hopper, *BROKEN_ON_HOPPER[fault])
    torch.use_deterministic_algorithms(True)  # memory begins as NaN: no row is right by luck
    try:
        actual = product(a, b)
    finally:
        torch.use_deterministic_algorithms(False)
    assert misses(actual, a, b) != []


@pytest.mark.gpu
def test_what_is_cut_off_is_made_good(broken):
    """Of sums of one sign."""
    if not HOPPER:
        pytest.skip("this is measured of Hopper's tensor core")
    a, b = (t.cuda().abs() for t in drawn((2050, 2048, 2054)))
    true = a.double() @ b.double()

    def short() -> float:
        return ((true - product(a, b).double()).sum() / true.sum()).item()

    assert abs(short()) < 1.2e-7
    broken(parts, "axis=axis) != 0)", "axis=axis) < 0)")
    assert short() > 1.2e-7


# --- on a GPU alone ------------------------------------------------------------------------------

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


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 256, 4096), (2050, 4100, 2054), (2048, 16384, 2560)])
@pytest.mark.parametrize("name", USUAL)
def test_errors_in_norm_vs_ieee_fp32(name, shape):
    """Half of cuBLAS's for signed numbers; no more than a few of fp32's roundoffs of one sign."""
    a, b = (t.cuda() for t in drawn(shape))
    a, b = USUAL[name](a), b if name in ("normal", "silu") else b.abs()
    own, its = (errors(c, a, b)[0] for c in (product(a, b, False, True), a @ b))
    assert own <= max(0.7 * its if name in ("normal", "silu") else its, 3e-7), (own, its)


def plain_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    gate, up = (x @ w_gate_up.mT).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ w_down.mT


def with_gradients(mlp, leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in leaves]
    y = mlp(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["gate_up", "input"])
@pytest.mark.parametrize("shape", [(2048, 2048, 2048), (1024, 1040, 4112)])
def test_an_mlp_vs_ieee_fp32(save, shape):
    """Errors in norm of y and every gradient; twice, the second time with kept launches."""
    tokens, hidden, inner = shape
    generator = torch.Generator().manual_seed(3)
    sizes = (tokens, hidden), (2 * inner, hidden), (hidden, inner), (tokens, hidden)
    scales = 1.0, hidden**-0.5, inner**-0.5, 1.0
    of = zip(sizes, scales, strict=True)
    *leaves, dy = ((torch.randn(s, generator=generator) * f).cuda() for s, f in of)
    true = with_gradients(plain_mlp, [t.double() for t in leaves], dy.double())

    def norms(results) -> list[float]:
        return [((r - t).norm() / t.norm()).item() for r, t in zip(results, true, strict=True)]

    usual = norms(with_gradients(plain_mlp, leaves, dy))
    for _ in range(2):
        actual = norms(
            with_gradients(lambda *own: fusedlib.swiglu_mlp(*own, save=save), leaves, dy)
        )
        assert all(f < 0.7 * u for f, u in zip(actual, usual, strict=True)), (actual, usual)


@pytest.mark.gpu
def test_an_mlp_near_the_end_of_the_range_is_finite_where_torch_s_is():
    """Whatever is true below 1e38, in outputs and gradients: no partial sum of ours ends sooner."""
    torch.manual_seed(0)
    layer = fusedlib.SwiGLUMLP(1024, 2816, device="cuda")
    x = (1e18 * torch.randn(1536, 1024, device="cuda")).requires_grad_()
    weights = torch.cat([layer.gate_proj.weight, layer.up_proj.weight]), layer.down_proj.weight
    wide = [t.detach().double().requires_grad_() for t in (x, *weights)]
    true = plain_mlp(*wide)
    dy = torch.randn_like(x)
    of = {"y": true, "d_x": torch.autograd.grad(true, wide[0], dy.double())[0]}

    def lost(y):
        """How many are not finite though the true ones are below 1e38."""
        results = {"y": y, "d_x": torch.autograd.grad(y, x, dy)[0]}
        return {n: int((~r.isfinite() & (of[n].abs() < 1e38)).sum()) for n, r in results.items()}

    ours, torchs = lost(layer(x)), lost(plain_mlp(x, *weights))
    assert fusedlib.ops.mlp.function.path_of(x, weights[0], weights[1]) == "split fp32"
    assert all(ours[name] <= torchs[name] for name in of), (ours, torchs)


@pytest.mark.gpu
def test_other_streams_find_the_same():
    a, b = (t.cuda() for t in drawn(SHAPES[0]))
    wanted = product(a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = [product(a, b) for _ in range(3)]
    stream.synchronize()
    assert all(torch.equal(f, wanted) for f in actual)


@pytest.mark.gpu
def test_captured_in_a_graph():
    """Replayed over other values, inf among them."""
    a, b = (t.cuda() for t in drawn(SHAPES[0]))
    product(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = products.split_product(a, b)
    for name in ("normal", "rows that differ by 2^70", "outlier channels"):
        for ours, theirs in zip((a, b), FAMILIES[name](*drawn(SHAPES[0], 7)), strict=True):
            ours.copy_(theirs)
        a[5, 5] = float("inf")
        graph.replay()
        assert misses(c, a, b) == []


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """Rows past 2³¹ elements of a factor and of the result."""
    m, k, n = 2**22 + 130, 520, 520  # 2.2e9 elements each
    a = torch.randn(256, k, device="cuda").repeat(m // 256 + 1, 1)[:m]
    b = torch.randn(k, n, device="cuda")
    c = products.split_product(a, b)
    for rows in (slice(0, 256), slice(m - 200, m)):
        assert misses(c[rows].clone(), a[rows], b) == []


@pytest.mark.gpu
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
