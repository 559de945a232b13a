"""The split products in Triton's interpreter: `tests/test_split.py` runs this file in a process of
its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import split_checks as checks
from fusedlib.launch.config import Config
from fusedlib.ops.linear import route as linear_route
from fusedlib.ops.linear.split import mm, parts
from fusedlib.ops.linear.split import product as products
from rewritten import rewritten


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    """Sums are of five blocks here."""
    checks.cut_for_the_interpreter(monkeypatch)


@pytest.mark.parametrize("name", checks.FAMILIES)
def test_product_vs_the_contract(name):
    checks.check_family(name, "cpu")


@pytest.mark.parametrize("turned", checks.TURNS)
@pytest.mark.parametrize("name", ["normal", "terms that differ by 2^30"])
def test_turned_product_vs_the_contract(name, turned):
    checks.check_family(name, "cpu", turned=turned)


@pytest.mark.parametrize("turned", [(False, True), (True, False)])
@pytest.mark.parametrize("shape", [(1, 256, 1), (3, 57, 129), (129, 1, 2), (20, 700, 24)])
def test_product_at_other_shapes_vs_the_contract(shape, turned):
    checks.check_family("normal", "cpu", shape, turned)


def test_small_blocks(monkeypatch):
    """Several of a tile, as on a GPU."""
    monkeypatch.setattr(products, "INTERPRETER", Config(64, 32, 32, 4, 1, group_m=2))
    monkeypatch.setattr(parts, "INTERPRETED", Config(num_warps=4, lines=16))
    for turned in checks.TURNS:
        checks.check_family("normal", "cpu", (130, 140, 72), turned)


@pytest.mark.parametrize("shares", [2, 3])
def test_shares_of_a_sum(monkeypatch, shares):
    monkeypatch.setattr(products, "MIN_K_PER_SPLIT", 64)
    monkeypatch.setattr(products, "choose_k_splits", lambda *_: shares)
    for turned in checks.TURNS:
        checks.check_family("terms that differ by 2^30", "cpu", turned=turned)
    checks.check_not_finite("cpu")
    checks.check_family("normal", "cpu", (3, 70, 5))


def test_few_results_are_shared():
    """On 132 multiprocessors: into rounds that all of them compute, where writing pays."""
    shapes = (1024, 2560, 10240), (1024, 1024, 4096), (4096, 4096, 4096), (20480, 2560, 1024)
    assert [products.choose_k_splits(*shape, 132) for shape in shapes] == [4, 2, 1, 1]


@given(
    m=st.integers(1, 40), k=st.integers(1, 300), n=st.integers(1, 40),
    scales=st.tuples(st.integers(-149, 120), st.integers(-149, 120)), spread=st.integers(0, 60),
    zeros=st.sampled_from([0.0, 0.3, 0.99]), positive=st.booleans(), seed=st.integers(0, 1000),
    turned=st.sampled_from(checks.TURNS),
)  # fmt: skip
@settings(
    max_examples=int(os.environ.get("SPLIT_EXAMPLES", "30")),
    deadline=None,
    database=None,
    derandomize=True,
)
def test_drawn_products_vs_the_contract(m, k, n, scales, spread, zeros, positive, seed, turned):
    a, b = checks.drawn((m, k, n), seed)
    generator = torch.Generator().manual_seed(seed)
    a = a * torch.exp2(-spread * torch.rand(a.shape, generator=generator))
    a = torch.where(torch.rand(a.shape, generator=generator) < zeros, 0.0, a)
    a, b = (t.abs() if positive else t for t in (a, b))
    a, b = (t * 2.0 ** (s // 2) * 2.0 ** (s - s // 2) for t, s in zip((a, b), scales, strict=True))
    assert checks.misses(checks.product(a, b, *turned), a, b) == []


def test_not_finite_in_the_same_places():
    checks.check_not_finite("cpu")


def test_strides():
    checks.check_strides("cpu")


def test_sums_that_fp32_holds_are_exact():
    checks.check_exact("cpu")


@pytest.mark.parametrize("by_columns", [False, True])
def test_parts_add_up(by_columns):
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


def test_low_bits_are_seen():
    """Of integers there are none, nor of bf16, and their sums may be exact."""
    a = torch.arange(300.0).reshape(3, 100)
    a[1] = (a[1] / 3).bfloat16().float()
    for row, value, wanted in ((0, 1.0, [0, 0, 0]), (2, 1 + 2.0**-10, [0, 0, 0]),
                               (2, 1 + 2.0**-11, [0, 0, 1])):  # fmt: skip
        a[row, 7] = value
        for by_columns, stored in ((False, a), (True, a.mT.contiguous())):
            _, factors = parts.FactorSplitter(stored.device, stored, by_columns)(stored)
            assert (factors[1, :3] & 1).tolist() == wanted


def test_small_products_are_torchs_and_others_are_split(monkeypatch):
    a, b = checks.drawn(checks.SHAPE)
    assert torch.equal(mm.split_mm(a, b), a @ b)
    for least in ("MIN_SPLIT_SIZE", "MIN_SPLIT_RESULTS", "MIN_SPLIT_WORK"):
        monkeypatch.setattr(linear_route, least, 1)
    assert torch.equal(mm.split_mm(a, b), checks.product(a, b))
    monkeypatch.setattr(linear_route, "SPLITTING_ALLOWED", False)  # FUSEDLIB_SPLIT=0
    assert torch.equal(mm.split_mm(a, b), a @ b)
    monkeypatch.setattr(linear_route, "SPLITTING_ALLOWED", True)
    for m, k, n in ((0, 300, 5), (5, 300, 0), (5, 0, 7)):
        c = mm.split_mm(torch.ones(m, k), torch.ones(k, n))
        assert c.shape == (m, n) and not c.any()


def test_what_does_not_fit_is_refused():
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


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_rejected(monkeypatch, tmp_path, fault):
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
            checks.check_family("terms that differ by 2^30", "cpu", turned=turned)
        checks.check_family("rows that differ by 2^30", "cpu")
        checks.check_family("columns that differ by 2^30", "cpu")
        checks.check_not_finite("cpu")
