"""Split products against their contract by element: of factors of every kind, and not finite.

They are asked for as linear layers: of A and B, y is A B where the weight is Bᵀ.
"""

from collections.abc import Callable, Iterator

import hypothesis
import operations
import pytest
import torch
from bounds import split_product
from copied import library_with
from hypothesis import strategies
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import gelu, silu

import fusedlib
from fusedlib import tuning
from fusedlib.launch import Config
from interpreter import INTERPRETED

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
SHAPE = (140, 300, 134)  # m, k, n: ragged, more than one 128-tile each way
# On a GPU of one span and of five, and of sums that programs share.
SHAPES = [SHAPE] if INTERPRETED else [(2050, 300, 2054), (1500, 4100, 2900), (1024, 10300, 2560)]
TURNS = [(False, False), (False, True), (True, False), (True, True)]
SPAN = 128 if INTERPRETED else 1024
ALL_SPLIT = {name: 1 for name in operations.SPLIT if "least" in name}


@pytest.fixture(autouse=True)
def _split():
    """Products of any size are; in the interpreter by spans of one tile."""
    with tuning.override(**operations.SPLIT if INTERPRETED else ALL_SPLIT):
        yield


def drawn(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    m, k, n = shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)


def product(a: Tensor, b: Tensor, turned: tuple[bool, bool] = (False, False)) -> Tensor:
    """A B split, either stored as it is or transposed."""
    a, b = (t.mT.contiguous().mT if turn else t.contiguous()
            for t, turn in zip((a, b), turned, strict=True))  # fmt: skip
    return fusedlib.linear(a, b.mT)


# --- kinds of factors ----------------------------------------------------------------------------

Pair = tuple[Tensor, Tensor]


def i_of(t: Tensor) -> Tensor:
    return torch.arange(t.shape[0])[:, None]


def j_of(t: Tensor) -> Tensor:
    return torch.arange(t.shape[1])


def powers(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.exp2(torch.randint(-15, 16, (count,), generator=generator).float())


def some(share: float, a: Tensor, other: float = 0.0) -> Tensor:
    kept = torch.rand(a.shape, generator=torch.Generator().manual_seed(2)) < share
    return torch.where(kept, a, other)


def with_faint(a: Tensor) -> Tensor:
    a = a.clone()
    a[3, 7], a[-1, -1] = 2.0**-40, -(2.0**-37)
    return a


def seesaw(a: Tensor, b: Tensor) -> Pair:
    scale = torch.where(j_of(a) % 2 == 0, 2.0**12, 2.0**-12)
    return a * scale, b / scale[:, None]


def times(of_a: float, of_b: float) -> Callable[[Tensor, Tensor], Pair]:
    return lambda a, b: (a * of_a, b * of_b)


def where(kept: Callable[[Tensor, Tensor], Tensor], other: float) -> Callable[..., Pair]:
    """A times `other` where rows i and columns j are not kept."""
    return lambda a, b: (torch.where(kept(i_of(a), j_of(a)), a, a * other), b)


def positive(a: Tensor, b: Tensor) -> Pair:
    return a.abs(), b.abs()


FAMILIES: dict[str, Callable[[Tensor, Tensor], Pair]] = {
    "normal": times(1, 1), "small weights": times(1, 2e-2), "gradients of 1e-9": times(1e-9, 1),
    "weights of 1e-20": times(1, 1e-20), "weights of 1e20": times(1, 1e20),
    "both of 1e20": times(1e20, 1e20), "denormals": times(1e-40, 1), "all zero": times(0, 1),
    "near the end of the range by small weights": times(2.0**124, 2.0**-12),
    "small weights by near the end of the range": times(2.0**-12, 2.0**124),
    "outlier channels": lambda a, b: (torch.where(j_of(a) % 97 == 5, 100 * a, a), b),
    "dropout": lambda a, b: (some(0.5, a), b),
    "nineteen of twenty zero": lambda a, b: (some(0.05, a), b),
    "zero rows": where(lambda i, j: i % 3 != 0, 0.0),
    "six of seven zero": where(lambda i, j: (i + j) % 7 == 0, 0.0),
    "rows of one element": where(lambda i, j: (i % 5 != 2) | (j == 7 * i % 120), 0.0),
    "columns of eight elements": lambda a, b: (
        a, torch.where((j_of(b) % 7 == 3) & ((i_of(b) + j_of(b)) % (len(b) // 8) != 0), 0.0, b)),
    "few large terms": where(lambda i, j: j % 32 == 0, 2.0**-16),
    "one of fourteen heard": where(lambda i, j: j % 14 == 0, 2.0**-25),
    "one term a row heard": where(lambda i, j: j == 7 * i % 120, 2.0**-35),
    "a few faint elements": lambda a, b: (with_faint(a), b),
    "half of the elements faint": where(lambda i, j: (i + j) % 2 == 0, 2.0**-40),
    "every other row 2^-34 of the others": where(lambda i, j: i % 2 == 0, 2.0**-34),
    "rows that differ by 2^70": where(lambda i, j: i % 3 != 1, 2.0**-70),
    "large elements meet zeros": lambda a, b: (
        torch.where(j_of(a) % 2 == 0, a, a * 2.0**-34), torch.where(i_of(b) % 2 == 0, 0.0, b)),
    "rows that differ by 2^30": lambda a, b: (a * powers(len(a))[:, None], b),
    "columns that differ by 2^30": lambda a, b: (a, b * powers(b.shape[1])),
    "terms that differ by 2^30": lambda a, b: (a * powers(a.shape[1]), b),
    "learned tokens": lambda a, b: (a * torch.exp2(-5.0 * (i_of(a) % 6)), b),
    "large where the other is small": seesaw,
    "positive": positive, "positive by signed": lambda a, b: (a.abs(), b),
    "half positive, half zero": lambda a, b: (a.relu(), b.abs()),
    "signs by row": lambda a, b: (a.abs() * (1 - 2.0 * (i_of(a) % 2)), b.relu()),
    "positive by weight": lambda a, b: (gelu(a), b.relu()),
    "mostly positive": lambda a, b: (a + 1, b + 1),
    "negative zeros": lambda a, b: (some(0.5, a, -0.0), b.abs()),
    "positive and peaked": lambda a, b: (
        torch.where(j_of(a) % 25 == 0, 1.0, 2.0**-15) * a.abs(), b.abs()),
    "integers": lambda a, b: ((8 * a).round(), (8 * b).round()),
    "positive integers": lambda a, b: positive((8 * a).round(), (8 * b).round()),
    "lognormal": lambda a, b: ((4 * a).exp(), (4 * b).exp()),
    "all 0.1": lambda a, b: (a * 0 + 0.1, b * 0 + 0.1),
}  # fmt: skip


# --- the contract --------------------------------------------------------------------------------


def misses(found: Tensor, a: Tensor, b: Tensor) -> list[str]:
    """What breaks the contract: an error above it, or inf and nan elsewhere than IEEE has them.

    fp32 sums of another order may overflow or not on the way to a number near the largest.
    """
    usual, true = a @ b, (a.double() @ b.double()).float()
    near_the_end = (a.abs().double() @ b.abs().double()) > 2.0**126
    missed = []
    for name, kind in (("nan", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        if ((kind(found) != kind(usual)) & ~near_the_end).any():
            missed.append(f"{name}: not where IEEE has it")
    rows, columns = a.isfinite().all(1), b.isfinite().all(0)
    a, b, found, true = a[rows], b[:, columns], found[rows][:, columns], true[rows][:, columns]
    finite = found.isfinite() & true.isfinite()
    if (found.isfinite() != true.isfinite()).any() and not near_the_end.any():
        missed.append("finite or not where the true one is otherwise")
    a, b = a.double(), b.double()
    allowed = split_product(a, b) + -(-a.shape[1] // SPAN) * 2.0**-150
    share = ((found.double() - a @ b).abs() / allowed)[finite]
    if share.numel() and not share.max() <= 1:
        missed.append(f"{share.max():.2f} of what is allowed")
    return missed


def misses_of(
    family: str, device: str, shape: tuple[int, ...] = SHAPE, turned: tuple[bool, bool] = TURNS[0]
) -> list[str]:  # fmt: skip
    a, b = (t.to(device) for t in FAMILIES[family](*drawn(shape)))
    return misses(product(a, b, turned), a, b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_products_vs_the_contract(device, family, shape):
    for turned in TURNS if device == "cuda" else TURNS[:1]:
        assert misses_of(family, device, shape, turned=turned) == []


FEW = ["rows that differ by 2^30", "terms that differ by 2^30", "positive", "learned tokens"]


@pytest.mark.parametrize("family", FEW if INTERPRETED else FAMILIES)
def test_gradients_vs_the_contract(device, family):
    """dy by the weight, and dyᵀ by x."""
    m, k, n = SHAPES[0]
    x, weight_t = FAMILIES[family](*drawn((m, k, n), 1))
    dy, _ = FAMILIES[family](*drawn((m, n, k), 2))
    x, weight, dy = (t.to(device).contiguous() for t in (x, weight_t.mT, dy))
    own = [t.requires_grad_() for t in (x, weight)]
    d_x, d_weight = grad(fusedlib.linear(*own), own, dy)
    x, weight = x.detach(), weight.detach()
    assert misses(d_x, dy, weight) + misses(d_weight, dy.mT, x) == []


# On a GPU long sums, too.
OTHERS = [(1, 256, 1), (3, 57, 129), (129, 1, 2), (20, 700, 24)]
OTHERS += [] if INTERPRETED else [(129, 385, 2), (130, 40000, 136)]


@pytest.mark.parametrize("turned", [(False, True), (True, False)])
@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_other_shapes_vs_the_contract(device, shape, turned):
    assert misses_of("normal", device, shape, turned=turned) == []


def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Other kernels and tiles than a call of this size takes here."""
    from fusedlib.ops.matmul import function as matmul

    if INTERPRETED:
        with tuning.override(split_interpreter_config=Config(64, 32, 32, 4, 1, group_m=2)):
            yield "small blocks, several of a tile"
        monkeypatch.setattr(matmul, "MIN_K_PER_SPLIT", 64)
        for shares in (2, 3):
            monkeypatch.setattr(matmul, "choose_k_splits", lambda *_, n=shares: n)
            tuning.forget()
            yield f"{shares} programs share a sum"
    else:
        monkeypatch.setattr(matmul, "has_hopper_kernel", lambda: False)
        tuning.forget()
        yield "as on a card that is no Hopper"


def test_other_tiles_and_kernels_vs_the_contract(device, monkeypatch):
    for way in ways(monkeypatch):
        for turned in TURNS:
            assert misses_of("terms that differ by 2^30", device, turned=turned) == [], way
        assert misses_of("positive", device, SHAPES[-1]) == [], way
        check_not_finite(device, SHAPE, TURNS[:1])


@hypothesis.settings(
    max_examples=30, deadline=None, database=None, derandomize=True,
    suppress_health_check=[*hypothesis.HealthCheck],
)  # fmt: skip
@hypothesis.given(data=strategies.data())
def test_drawn_products_vs_the_contract(device, data):
    """Of any scale, down to denormals, of elements that differ, and of few that are not zero."""
    whole, one_of = strategies.integers, strategies.sampled_from
    shape = [data.draw(whole(1, most)) for most in (40, 300, 40)]
    a, b = drawn(shape, data.draw(whole(0, 1000)))
    a = some(1 - data.draw(one_of([0.0, 0.3, 0.99])), a)
    a = a * torch.exp2(-data.draw(whole(0, 60)) * torch.rand(a.shape))
    a, b = positive(a, b) if data.draw(strategies.booleans()) else (a, b)
    scales = [data.draw(whole(-149, 120)) for _ in "ab"]
    a, b = (t * 2.0 ** (s // 2) * 2.0 ** (s - s // 2) for t, s in zip((a, b), scales, strict=True))
    a, b = a.to(device), b.to(device)
    assert misses(product(a, b, data.draw(one_of(TURNS))), a, b) == []


def check_not_finite(device: str, shape: tuple[int, ...], turns: list[tuple[bool, bool]]) -> None:
    a, b = drawn(shape)
    inf = float("inf")
    for place, value in (((3, 7), inf), ((4, 9), 0.0), ((5, 9), 1e-30), ((6, 9), inf),
                         ((7, 9), -1e-44), ((8, -1), -inf), ((9, 2), inf), ((9, 3), -inf),
                         ((-1, -1), inf), ((11, 5), float("nan"))):  # fmt: skip
        a[place] = value
    for place, value in (((7, 5), 0.0), ((9, 9), -inf), ((100, 20), float("nan")),
                         ((-1, -1), 1e-38), ((12, 30), inf)):  # fmt: skip
        b[place] = value
    a[20] = 0.0
    usual = (a @ b).to(device)
    for turned in turns:
        found = product(a.to(device), b.to(device), turned)
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(found), kind(usual)), (turned, kind)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_not_finite_in_the_same_places(device, shape):
    """Beside zeros, faint elements, denormals, and each other."""
    check_not_finite(device, shape, TURNS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_that_fp32_holds_are_exact(device, shape):
    """Of factors that fp16 holds."""
    a, b = (t.to(device) for t in drawn(shape))
    for left, right in ((torch.ones_like(a), torch.ones_like(b)),
                        ((8 * a).round(), (8 * b).round())):  # fmt: skip
        assert torch.equal(product(left, right).double(), left.double() @ right.double())


def test_sums_of_nothing_are_zero(device):
    for m, k, n in ((0, 300, 5), (5, 300, 0), (5, 0, 7)):
        c = product(torch.ones(m, k, device=device), torch.ones(k, n, device=device))
        assert c.shape == (m, n) and not c.any()


# --- on a GPU alone ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="this is measured of Hopper's tensor core")
def test_what_is_cut_off_is_made_good(tmp_path):
    """Of sums of one sign."""
    a, b = (t.cuda().abs() for t in drawn((2050, 2048, 2054)))
    true = a.double() @ b.double()

    def short(library) -> float:
        found = library.linear(a, b.mT).double()
        return ((true - found).sum() / true.sum()).item()

    assert abs(short(fusedlib)) < 1.2e-7
    text = "ops/matmul/kernels.py", "axis=axis) != 0)", "axis=axis) < 0)"
    with library_with(*text, tmp_path) as without:
        assert short(without) > 1.2e-7


# Numbers as training has them, and sums of one sign, in which what is cut off adds up.
SIGNED = {
    "normal": lambda t: t,
    "silu": lambda t: silu(3 * t) * torch.randn_like(t),
}
POSITIVE = {
    "uniform": torch.rand_like, "magnitudes": torch.abs, "half of them zero": torch.relu,
    "lognormal": torch.exp, "gelu": gelu,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 256, 4096), (2050, 4100, 2054), (2048, 16384, 2560)])
@pytest.mark.parametrize("name", SIGNED | POSITIVE)
def test_errors_in_norm_vs_ieee_fp32(name, shape):
    """0.7 of cuBLAS's for signed numbers; no more than a few of fp32's roundoffs of one sign."""
    a, b = (t.cuda() for t in drawn(shape))
    a, b = (SIGNED | POSITIVE)[name](a), b if name in SIGNED else b.abs()
    true = a.double() @ b.double()
    ours, its = (
        ((c.double() - true).norm() / true.norm()).item() for c in (product(a, b), a @ b)
    )  # fmt: skip
    assert ours <= max(0.7 * its if name in SIGNED else its, 3e-7), (ours, its)


@pytest.mark.gpu
@pytest.mark.alone
def test_sums_over_more_than_2_to_the_31_elements():
    """Of a weight's gradient, whose terms are all zero but the last."""
    x = torch.ones(2**22 + 130, 520, device="cuda")
    dy, weight = torch.zeros_like(x), torch.ones(520, 520, device="cuda", requires_grad=True)
    dy[-1], x[-1] = torch.arange(520.0), 3.0
    [d_weight] = grad(fusedlib.linear(x, weight), weight, dy)
    assert torch.equal(d_weight, (3 * dy[-1])[:, None].expand(520, 520))
