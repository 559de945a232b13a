"""The split products in Triton's interpreter: `tests/test_split.py` runs this file in a process of
its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import os
from pathlib import Path

import pytest
import split_checks as checks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rewritten import rewritten

from fusedlib.kernels import split as splitting
from fusedlib.kernels import split_configs, split_exact, split_mlp, split_product, split_words

assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    """Sums are of three or five blocks here."""
    monkeypatch.setattr(split_configs, "SPAN", 2)


@pytest.fixture
def whole_tiles(monkeypatch):
    checks.whole_tiles(monkeypatch)


TURNS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize("name", checks.FAMILIES)
def test_product_vs_ieee_fp32(whole_tiles, name):
    checks.check_family(name, "cpu")


@pytest.mark.parametrize("turned", TURNS)
@pytest.mark.parametrize("name", ["normal", "large elements meet zeros"])
def test_turned_product_vs_ieee_fp32(name, turned):
    checks.check_family(name, "cpu", turned=turned)


@pytest.mark.parametrize("shape", [(1, 256, 1), (3, 257, 129), (129, 385, 2)])
def test_product_at_other_shapes_vs_ieee_fp32(shape):
    checks.check_family("normal", "cpu", shape)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_not_finite_in_the_same_places(whole_tiles, value):
    checks.check_not_finite("cpu", value)


@given(
    rows=st.integers(20, 40), columns=st.integers(20, 40), inner=st.integers(256, 300),
    scales=st.tuples(st.integers(-70, 60), st.integers(-70, 60)), spread=st.integers(0, 40),
    zeros=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 1000),
)  # fmt: skip
@settings(
    max_examples=int(os.environ.get("SPLIT_EXAMPLES", "10")),
    deadline=None,
    database=None,
    derandomize=True,
)
def test_drawn_products_vs_ieee_fp32(rows, columns, inner, scales, spread, zeros, seed):
    a, b = checks.drawn((rows, inner, columns), seed)
    generator = torch.Generator().manual_seed(seed)
    a = a * torch.exp2(-spread * torch.rand(a.shape, generator=generator))
    a = torch.where(torch.rand(a.shape, generator=generator) < zeros, 0.0, a) * 2.0 ** scales[0]
    b = b * 2.0 ** scales[1]
    # Few elements: torch's own roundings may be luckier. Its luck changes with the terms' order.
    slack = 1.5 if checks.by_parts(a, b).any() else 1.0
    assert checks.misses(checks.product(a, b), a, b, slack, orders=4) == []


def test_strides(whole_tiles):
    checks.check_strides("cpu")


def test_empty():
    checks.check_empty("cpu")


def test_short_sums_are_torchs():
    a, b = torch.randn(5, split_product.LEAST_INNER - 1), torch.randn(255, 7)
    assert torch.equal(checks.product(a, b), a @ b)


def test_product_of_matrices_splits_them(monkeypatch, whole_tiles):
    a, b = checks.drawn(checks.SHAPE)
    assert torch.equal(split_product.split_mm(a, b), a @ b)  # too small
    for least in ("LEAST_OUTER", "LEAST_RESULTS", "LEAST_WORK"):
        monkeypatch.setattr(split_product, least, 1)
    wanted = checks.product(a, b)
    for left, right in ((a, b.mT.contiguous().mT), (a.mT.contiguous().mT, b)):
        assert torch.equal(split_product.split_mm(left, right), wanted)


def test_parts_add_up():
    a, other = torch.randn(130, 200) * 3e-4, torch.randn(3, 130)
    parts, _ = splitting.split(a, other)
    assert torch.equal(parts.parts, splitting.split(a)[0].parts)
    assert parts.parts.shape == (2 * 256, 256) and parts.tiles.shape == (2, 2, 2)
    high, low = parts.parts.double().chunk(2)
    assert not any(p[130:].any() or p[:, 200:].any() for p in (high, low))
    factors = torch.exp2(((parts.tiles[:, :, 0] & 0x7F) + split_words.BIAS.value - 127).double())
    whole = (high + low * 2.0**-11) * factors.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert ((whole[:130, :200] - a).abs() <= 2.0**-22 * a.abs()).all()
    assert high.abs().max() < 2**15 + 1


def words(a: torch.Tensor) -> list[list[int]]:
    """First and second share of the only tile, along rows and columns."""
    [parts] = splitting.split(a)
    return [[(word >> 7) & 0x7F, (word >> 15) & 0x7F] for word in parts.tiles[0, 0].tolist()]


def terms(a: torch.Tensor) -> list[list[int]]:
    """Of the first tile's segments: near and heard elements, the fewest of one."""
    [parts] = splitting.split(a)
    found = parts.tiles[0, 0].tolist()
    places = ((24, 0xF), (28, 0x3), (30, 0x3))
    return [[(word >> place) & mask for place, mask in places] for word in found]


def is_deep(a: torch.Tensor) -> bool:
    [first, second] = splitting.split(a)[0].tiles[0, 0].tolist()
    assert (first >> 14) & 1 == (second >> 14) & 1
    return bool((first >> 14) & 1)


@pytest.mark.parametrize("scale", [2.0**-48, 1e-9, 1.0, 2.0**56])
def test_a_tile_is_deep_of_elements_that_thirds_cannot_hold(scale):
    a = torch.ones(130, 3)
    a[1, 1] = 0.0
    assert not is_deep(a * scale) and not is_deep(a * 0)
    a[2, 1] = 2.0**-62  # in units of the tile's factor 2⁻⁴⁸
    assert not is_deep(a * scale)
    a[2, 1] = 2.0**-63
    assert is_deep(a * scale)
    a[2, 1] = 1.0
    for value in (float("inf"), float("nan"), 2.0**57 / scale):
        a[0, 0] = value
        assert is_deep(a * scale)
    assert is_deep(torch.full((3, 3), 2.0**-49))


def test_which_path():
    """Tokens that a model has learned by thirds, half of the elements faint still by parts."""
    for name, wanted in (("half of the elements faint", checks.PARTS),
                         ("learned tokens", checks.THIRDS)):  # fmt: skip
        make, _ = checks.FAMILIES[name]
        assert (checks.paths(*make(*checks.drawn(checks.SHAPE))) == wanted).all()


def test_certificate_counts():
    a = torch.ones(2, 128)
    a[0, :32] = 2.0**-12  # short of 2⁻¹¹ of the tile's largest, a quarter of the row
    assert words(a) == [[32, 0], [64, 0]]
    a[1, :3] = 2.0**-40
    assert [w[1] for w in words(a)] == [3, 127]
    a[1, 3:5] = 2.0**-40  # five faint elements in a row: one more index must be left
    assert words(a)[0][1] == 6
    a[1, :104] = 2.0**-40
    assert words(a)[0][1] == 127  # 104 + 26 - 1, at most all, which is written 127
    a[0, 0] = 2.0**57
    assert words(a) == [[127, 127]] * 2
    a = torch.ones(3, 5)
    a[1] = 0.0  # a row of zeros is short of nothing
    assert words(a) == [[0, 0], [43, 0]]
    assert words(torch.zeros(3, 5)) == [[0, 0]] * 2


def test_terms_are_counted():
    a = torch.ones(2, 130)
    assert terms(a) == [[15, 3, 3], [15, 3, 0]]  # no gap outside the matrix
    a[0, :64] = 2.0**-40  # not heard beside the others, and elements all the same
    assert terms(a) == [[12, 2, 3], [12, 2, 0]]
    a[0, 12:] = 0.0
    assert terms(a) == [[8, 2, 1], [8, 2, 0]]
    a[0] = 0.0  # shares are of rows that have any
    assert terms(a) == [[15, 3, 2], [8, 2, 0]]
    a[:, 5] = 0.0
    assert terms(a) == [[15, 3, 2], [8, 2, 0]]
    a[1, 7:] = 0.0
    assert terms(a) == [[1, 0, 0], [8, 2, 0]]
    a[1, 7:20] = 1.0  # beside a row of zeros
    assert terms(a)[0][2] == 0
    a[0] = 1.0
    assert terms(a)[0][2] == 1
    assert terms(torch.zeros(3, 5)) == [[15, 3, 2]] * 2


def sums(a: torch.Tensor) -> list[list[int]]:
    """Whether the first tile is plain, and of one sign."""
    [parts] = splitting.split(a)
    return [[(word >> 22) & 1, (word >> 23) & 1] for word in parts.tiles[0, 0].tolist()]


def test_low_parts_are_seen():
    """Of integers there are none, nor of bf16, and their sums may be exact."""
    a = torch.randint(-(2**11), 2**11 + 1, (64, 100), generator=torch.Generator().manual_seed(0))
    assert sums(a * 2.0**-20) == sums(torch.zeros(3, 5)) == [[0, 0]] * 2
    assert sums((a / 3).bfloat16().float()) == [[0, 0]] * 2
    assert sums(a / 3) == sums(a.mT / 3) == [[1, 0]] * 2


def test_one_sign_is_seen():
    a, _ = checks.drawn((128, 128, 1))
    assert sums(a) == [[1, 0]] * 2
    assert sums(a.abs()) == sums(-a.abs()) == sums(a + 1) == [[1, 1]] * 2
    assert sums(a.relu()) == sums((a - 0.01).relu()) == [[1, 1]] * 2
    negative = torch.arange(128) % 8 > 4  # three eighths of a segment may have the other sign
    assert sums(torch.where(negative, -a.abs(), a.abs())) == [[1, 1]] * 2
    negative[3] = True
    assert sums(torch.where(negative, -a.abs(), a.abs())) == [[1, 0], [1, 1]]
    some = torch.arange(128)[:, None] < 96  # three quarters of the segments
    assert sums(torch.where(some, a.abs(), 8 * a))[0] == [1, 1]
    assert sums(torch.where(some.roll(1, 0) & some, a.abs(), 8 * a))[0] == [1, 0]
    assert sums(torch.where(a > 0.0, a, -0.0)) == sums(-torch.where(a > 0.0, a, -0.0))
    assert sums(torch.where(a.roll(1, 1) > 0, a, -0.0)) == [[1, 0]] * 2
    signs = torch.where(torch.arange(128) % 2 == 0, 1.0, -1.0)[:, None]
    assert sums(a.abs()[:, :15] * signs) == [[1, 0], [1, 0]]
    assert sums(a.abs()[:, :16] * signs) == [[1, 1], [1, 0]]


def test_one_sign_by_weight_is_seen():
    a, _ = checks.drawn((128, 128, 1))
    gelu = torch.nn.functional.gelu(a)
    assert sums(gelu) == sums(-gelu) == sums(gelu.mT) == [[1, 1]] * 2
    assert sums(a + 0.2) == [[1, 0]] * 2
    large = torch.arange(128) % 70 == 0  # a sample of the others says nothing
    assert sums(torch.where(large, a.abs(), a * 2.0**-9)) == [[1, 0]] * 2
    some = torch.arange(128) % 8 < 3  # 96 of the sample
    assert sums(torch.where(some, gelu, 0.0)) == [[1, 1]] * 2
    some[0] = False
    assert sums(torch.where(some, gelu, 0.0)) == [[1, 0]] * 2
    assert sums(gelu[:2]) == sums(gelu[:, :2]) == [[1, 1]] * 2
    assert sums(gelu[:2, :127]) == sums(gelu[:9, :28]) == [[1, 0]] * 2  # repeated by the sample


def test_peaked_is_seen():
    """Where few terms make most of a sum, a tile of one sign is not plain."""
    a, _ = checks.drawn((128, 128, 1))
    for rare, plain in ((4, 1), (70, 0)):
        large = torch.arange(128) % rare == 0
        assert sums(torch.where(large, a, a * 2.0**-9)) == [[1, 0]] * 2
        assert sums(torch.where(large, a, a * 2.0**-9).abs()) == [[plain, 1]] * 2
    assert sums(a.abs() * a.abs()) == [[1, 1]] * 2
    assert sums(torch.exp(2.5 * a)) == [[0, 1]] * 2


def test_the_certificate_at_its_edge():
    checks.check_edge("cpu")
    checks.check_beyond_edge("cpu")


def test_a_ragged_segment_counts_in_its_own_length():
    a = torch.ones(2, 40)
    a[0, :32] = 2.0**-40  # short of 32, wants 8 indices: 39 of 40
    assert words(a)[0] == [103, 125]


@given(faint=st.integers(1, 127), missing=st.integers(0, 126), length=st.integers(1, 128))
@settings(max_examples=300, deadline=None, database=None, derandomize=True)
def test_what_is_certified_has_a_quarter_as_many_indices(faint, missing, length):
    """The kernel's arithmetic on shares, any segment's length."""
    faint, missing = min(faint, length), min(missing, length)
    second = min(faint + (faint + 3) // 4 - 1, length)
    shares = [-(-each * 128 // length) for each in (second, missing)]
    assert sum(shares) >= 128 or faint <= 4 * (length - faint - missing)


def test_mlp_and_gradients_vs_ieee_fp32(monkeypatch, whole_tiles):
    monkeypatch.setattr(split_product, "LEAST_INNER", 1)
    found, usual = checks.mlp_errors("cpu", (70, 83, 101))
    assert all(found[name] <= 1.5 * usual[name] for name in usual), (found, usual)


def test_only_wanted_gradients():
    x, w_gate_up, w_down = torch.randn(9, 20), torch.randn(12, 20), torch.randn(20, 6)
    dy, gate_up = torch.randn(9, 20), x @ w_gate_up.mT
    whole = split_mlp.split_mlp_bwd(dy, x, w_gate_up, w_down, gate_up)
    for wants in [(True, False, False), (False, True, False), (False, False, True)]:
        operands = [x if wants[1] else None, w_gate_up if wants[0] else None]
        some = split_mlp.split_mlp_bwd(
            dy, *operands, None if wants[2] else w_down, gate_up, wants
        )  # fmt: skip
        for want, one, other in zip(wants, some, whole, strict=True):
            assert (one is not None) == want and (one is None or torch.equal(one, other))
    with pytest.raises(ValueError, match="lacking"):
        split_mlp.split_mlp_bwd(dy, None, w_gate_up, w_down, gate_up)


def test_rows_too_far_apart_are_copied():
    far = torch.zeros(2**24 + 300).as_strided((2, 300), (2**24, 1))
    assert splitting.split(far)[0].source.stride() == (300, 1)


def test_what_does_not_fit_is_refused():
    for wrong in (torch.zeros(3), torch.zeros(3, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="only a float32 matrix"):
            splitting.split(wrong)
    with pytest.raises(ValueError, match="shorter than 16777216, got 16777216"):
        splitting.split(torch.empty(2, 2**24, device="meta"))
    a, b = splitting.split(torch.zeros(3, 300), torch.zeros(299, 4))
    with pytest.raises(ValueError, match=r"\(3, 300\) on cpu and \(299, 4\)"):
        split_product.split_product(a, b)


# --- teeth ---------------------------------------------------------------------------------------

LAST = "((i == m - 1)[:, None] & (j == n - 1)[None, :])"
FAST_BLOCKS = "range(0, k, BLOCK_K):\n        ah"
FAST_STORE = "acc, mask=inside)"
EXACT_BLOCKS = "range(k, 0, -BLOCK_K)"
FEW_TERMS = "nineteen of twenty zero"
FAR_ROWS = "every other row 2^-34 of the others"
BROKEN = {
    "dropped K block": ("normal", FAST_BLOCKS, FAST_BLOCKS.replace("(0,", "(BLOCK_K,")),
    "dropped ragged K block": ("normal", FAST_BLOCKS, FAST_BLOCKS.replace("k,", "k // 64 * 64,")),
    "first span lost": ("normal", "total += acc", "total = tl.zeros_like(acc)"),
    "span added twice": ("normal", "            acc = tl.zeros_like(acc)\n", ""),
    "low part of A left out": ("normal", "tl.dot(al, bh, tl.dot(ah, bl))", "tl.dot(ah, bl)"),
    "low part of B left out": ("normal", "tl.dot(al, bh, tl.dot(ah, bl))", "tl.dot(al, bh)"),
    "wrong last element": (
        "normal", FAST_STORE, FAST_STORE.replace("acc,", f"acc + tl.where({LAST}, 1e-3, 0.0),"),
    ),
    "neighbouring tile's factor": ("outlier channels", "tile * a_step) & 0x7F", "0) & 0x7F"),
    "certificate ignored": (FAR_ROWS, "axis=1) >= 128", "axis=1) >= 512"),
    "number of terms ignored": (FEW_TERMS, "where(few | (", "where((few & (k < 0)) | ("),
    "short rows ignored": ("rows of one element", "* 64) < OF_ROW", "* 64) < 0"),
    "exact path drops a block": (
        FAR_ROWS, EXACT_BLOCKS, EXACT_BLOCKS.replace("0,", "BLOCK_K,"),
    ),
    "exact path of the first block only": (FAR_ROWS, "range(LOOKED):", "range(1):"),
}  # fmt: skip


LAX = {
    "faint elements not counted": ("short + (faint + 3) // 4 - 1", "short"),
    "eight times as many": ("(faint + 3) // 4", "(faint + 31) // 32"),
    "faint elements unseen": ("tl.where(faint > 0, allowing, 0)", "0 * faint"),
}


@pytest.mark.parametrize("fault", LAX)
def test_a_lax_certificate_is_rejected(monkeypatch, tmp_path, fault):
    broken = rewritten(monkeypatch, tmp_path, splitting, *LAX[fault])
    monkeypatch.setattr(splitting, "split", broken.split)
    with pytest.raises(AssertionError):
        checks.check_beyond_edge("cpu")


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_rejected(monkeypatch, tmp_path, fault):
    family, right, wrong = BROKEN[fault]
    modules = split_product, split_exact
    [module] = [m for m in modules if right in Path(m.__file__).read_text(encoding="utf-8")]
    broken = rewritten(monkeypatch, tmp_path, module, right, wrong)
    if module is split_product:
        monkeypatch.setattr(split_product, "split_product", broken.split_product)
    else:
        monkeypatch.setattr(split_product, "split_exact", broken)
    make, _ = checks.FAMILIES[family]
    a, b = make(*checks.drawn(checks.SHAPE))
    assert checks.misses(checks.product(a, b), a, b) != []
