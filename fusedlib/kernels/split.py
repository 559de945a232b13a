# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""An fp32 matrix as two fp16 parts for the tensor cores, and what is known of how good they are.

The matrix is cut into 128·128 tiles. In a tile whose largest magnitude is M, with e such that
2¹⁴ ≤ M 2⁻ᵉ < 2¹⁵, each element a becomes

    v = a 2⁻ᵉ    high = fp16(v)    low = fp16(2¹¹ (v − high))    a ≈ 2ᵉ (high + 2⁻¹¹ low)

(Ootomo and Yokota 2022, whose scale is the tensor's). A product of split matrices promotes each
K block by itself, so the tiles' factors 2ᵉ cost nothing there: `fusedlib.kernels.split_product`.

**Representation.** Where |v| ≥ 2⁻¹⁴ both parts together are within 2⁻²² of v, most within 2⁻²³. A
nonzero element below that, 2⁻²⁹ of its tile's largest, is *faint*: its error is absolute, up to
2⁻⁵⁰ M. Zeros are exact. Of normal numbers 6 in 10⁹ are faint, so a faint element alone must not
send a product to the exact path.

**Certificate.** A segment is the tile's part of a row of A or of a column of B, L = 128 elements
along the sum, fewer at the matrix's edge. Let one of A's hold f faint elements, in a tile whose
largest is M, and N be the largest of B's tile. In their product each costs up to 2⁻⁵⁰ M N, and as
much again by low(A) low(B), which is left out: f 2⁻⁴⁹ M N together. If c indices have both
|a| ≥ 2⁻¹¹ M and |b| ≥ 2⁻¹¹ N, then Σ|a||b| over the segment is at least c 2⁻²² M N. So f ≤ 4c keeps
the error within 2⁻²⁵ of it, and with the faint elements of B, likewise, within fp32's roundoff. A
segment is *short* of as many elements as are below 2⁻¹¹ of their tile's largest, p in A and q in B.
As c ≥ L − p − q, ⌈f/4⌉ ≤ L − p − q suffices, that is p + ⌈f/4⌉ − 1 + q < L. So a tile keeps, along
rows and along columns, two shares of a segment's length, in 128ths and rounded up:

    first     the largest that a segment is short of (segments of zeros: none)
    second    the largest p + ⌈f/4⌉ − 1 of a segment with faint elements, at most L

and two tiles may be multiplied when second(A) + first(B) < 128 or second(A) = 0, and the same with
A and B exchanged. A tile that holds inf or nan, or whose M lies outside 2⁻⁴⁸ ≤ M < 2⁵⁷ (so that
neither factors nor sums overflow), has `second` at 128, and nothing certifies 127.

**Terms.** A sum of few terms errs less in IEEE arithmetic than by parts: see `split_exact`. Of the
segments that are not all zero a tile keeps which shares of their elements are not short, and are
*heard* beside the largest (2⁻²¹ of it, by a sample), how many nonzero ones each has at least, and
whether there is a *gap*, a segment of zeros.

**One sign.** Tensor cores sum towards zero: a block falls short, which Hopper's kernel makes good
on the whole (`split_hopper`), but for tiles without low parts, as of integers, whose sums may be
exact. Where terms are of one sign what is left adds up, and so do roundings. So a tile says whether
three quarters of its segments have one sign, but for three eighths of their elements at most, or a
sample's sum is half of its magnitudes' and more (as of GELU's results, most of them negative and
small); and whether it is *plain*: with low parts, and not *peaked*, a few elements far above the
mean, of which a sample's sum says nothing.

**Beyond.** What is not certified is computed from the matrices themselves, in thirds where that can
be (`split_thirds`), else exactly (`split_exact`). Thirds want elements that are zero or have
|v| ≥ 2⁻⁴⁸: a tile with others is *deep*, and so is one that could not be split at all. All of it
stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.kernels.launch import Launch, kept_launch, rows_contiguous
from fusedlib.kernels.split_configs import splitting
from fusedlib.kernels.split_words import BIAS, add_up, kind, terms_of, word_of

TILE = 128
# Tiles whose mean is less than a 32nd of their largest element are peaked.
PEAKED = tl.constexpr(32)
# Fewer of 256 say nothing of their sum's sign: of 96 normal ones it is one in 6 of 10⁵ samples.
LEAST_SAMPLED = tl.constexpr(96)
LONGEST_ROW = 2**24  # elements; offsets within a tile are 32 bits


@dataclass(frozen=True)
class Split:
    """A matrix (rows, columns) fp32 and its parts.

    `parts` is (2·rows, columns) fp16, both sizes first filled up to a multiple of 128 with zeros,
    the high rows above the low ones. `tiles` (tile rows, tile columns, 2) int32 holds a tile's
    words for products along rows (0) and along columns (1): see `split_words`.
    """

    source: Tensor
    parts: Tensor
    tiles: Tensor


@triton.jit
def _rows_of_tile(start, i, j, rows, columns, row_stride, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows i and columns j of a tile, zeros outside the matrix, and their magnitudes as bits."""
    if EVEN:
        a = tl.load(start + (i * row_stride + j))
    else:
        inside = (i < rows) & (j < columns)
        a = tl.load(start + (i * row_stride + j), mask=inside, other=0.0)
    # As integers, magnitudes are in the same order, and inf and nan above all numbers.
    return a, a.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _falls_short(counts, length):  # type: ignore[no-untyped-def]
    """Of segments: elements below 2⁻¹¹ of their tile's largest, and those of `second`."""
    near, faint, nonzero = counts & 0xFF, (counts >> 8) & 0xFF, (counts >> 16) & 0xFF
    short = tl.where(nonzero > 0, length - near, 0)
    allowing = tl.minimum(short + (faint + 3) // 4 - 1, length)
    return short, tl.where(faint > 0, allowing, 0)


@triton.jit
def _largest(first, second):  # type: ignore[no-untyped-def]
    """The largest of each, by one reduction."""
    return tl.split(tl.max(tl.join(first, second), axis=0))


@triton.jit
def _kind(counts):  # type: ignore[no-untyped-def]
    return kind((counts >> 16) & 0xFF, (counts >> 24) & 0xFF)


@triton.jit
def _sample(  # type: ignore[no-untyped-def]
    start, rows, columns, row_stride, EVEN: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Elements of a tile, of each row and column two, neighbours in a row as memory gives them
    together: spread evenly over diagonals both ways, which the pattern of a matrix may follow.
    """
    place = tl.arange(0, 2 * TILE)
    i = place // 2
    j = (i * 27 + i // 64) % 64 * 2 + place % 2
    return _rows_of_tile(start, i % rows, j % columns, rows, columns, row_stride, EVEN)


@triton.jit
def _of_sample(a, bits, largest, scale, elements):  # type: ignore[no-untyped-def]
    """How many are nonzero, how many of them are heard, at least 2⁻²¹ of the tile's largest;
    whether any has a low part, whether they are peaked, and whether they are of one sign by weight.
    """
    v = tl.minimum(tl.abs(a) * scale, 32767.0).to(tl.int32) >> 5  # 1023 of inf and nan
    nonzero, low = bits > 0, (bits & 0x1FFF) != 0
    heard = nonzero & (bits >= largest - (21 << 23))
    counts = nonzero.to(tl.int32) | (heard.to(tl.int32) << 9) | (low.to(tl.int32) << 18)
    # 27 bits of counts, 18 of magnitudes, 19 of what they are with their signs.
    sums = counts.to(tl.int64) + (v.to(tl.int64) << 27)
    sums = tl.sum(sums + (tl.where(a < 0, -v, v).to(tl.int64) << 45))
    counts, magnitudes = sums.to(tl.int32) & 0x7FFFFFF, (sums >> 27).to(tl.int32) & 0x3FFFF
    nonzero, heard, low = counts & 0x1FF, (counts >> 9) & 0x1FF, (counts >> 18 != 0).to(tl.int32)
    most = tl.minimum(largest.to(tl.float32, bitcast=True) * scale, 32767.0).to(tl.int32) >> 5
    peaked = magnitudes * PEAKED < nonzero * most
    one_sign = (2 * tl.abs((sums >> 45).to(tl.int32)) >= magnitudes) & ~peaked
    one_sign &= (nonzero >= LEAST_SAMPLED) & (elements >= 256)  # else the sample repeats itself
    return nonzero, heard, low, peaked.to(tl.int32), one_sign.to(tl.int32)


@triton.jit
def _split_tile(  # type: ignore[no-untyped-def]
    tile, source, parts, tiles, rows, columns, row_stride,
    EVEN: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(rows, TILE), tl.cdiv(columns, TILE)
    row, column = tile // column_tiles * TILE, tile % column_tiles * TILE
    # Offsets of tiles in 64 bits: a matrix may have more than 2³¹ elements.
    source += row.to(tl.int64) * row_stride + column
    width = column_tiles * TILE
    high = parts + (row.to(tl.int64) * width + column)
    low = high + (row_tiles * TILE).to(tl.int64) * width
    rows, columns = tl.minimum(rows - row, TILE), tl.minimum(columns - column, TILE)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, TILE)[None, :]
    sample, sample_bits = _sample(source, rows, columns, row_stride, EVEN, TILE)
    # The tile is read twice, the second time from a cache: held, it would take all registers.
    most = tl.zeros((CHUNK, TILE), dtype=tl.int32)
    for top in range(0, TILE, CHUNK):
        _, bits = _rows_of_tile(source, top + i, j, rows, columns, row_stride, EVEN)
        most = tl.maximum(most, bits)
    largest = tl.max(most)
    exponent = largest >> 23
    usable = ((exponent >= 127 - 48) & (exponent < 127 + 57)) | (largest == 0)
    power = tl.where(usable, tl.maximum(exponent - 14, BIAS), 127)  # of the factor, biased
    scale = ((254 - power) << 23).to(tl.float32, bitcast=True)
    of_columns = tl.zeros((CHUNK, TILE), dtype=tl.int32)
    first = tl.zeros((CHUNK,), dtype=tl.int32)
    second, kinds = tl.zeros_like(first), tl.zeros_like(first)
    for top in range(0, TILE, CHUNK):
        a, bits = _rows_of_tile(source, top + i, j, rows, columns, row_stride, EVEN)
        v = a * scale
        upper = v.to(tl.float16)
        lower = ((v - upper.to(tl.float32)) * 2048.0).to(tl.float16)
        places = (top + i) * width + j
        tl.store(high + places, upper)
        tl.store(low + places, lower)
        # Near, faint, nonzero and negative elements, four counts in one sum. 2⁻¹¹ is 11 steps of
        # the exponent, |v| < 2⁻¹⁴ are faint.
        counts = tl.where(bits >= largest - (11 << 23), 0x10001, 0x10000)
        counts = tl.where(bits < ((power - 14) << 23), 0x10100, counts)
        counts += (a.to(tl.int32, bitcast=True) >> 7) & 0x1000000
        counts = tl.where(bits > 0, counts, 0)
        of_columns += counts
        of_rows = tl.sum(counts, axis=1)
        short, short_beside = _falls_short(of_rows, columns)
        first, second = tl.maximum(first, short), tl.maximum(second, short_beside)
        kinds += _kind(of_rows)
    of_tile = tl.sum(of_columns, axis=0)
    near, heard, of_columns = add_up(of_tile & 0xFF, (of_tile >> 16) & 0xFF, _kind(of_tile))
    sampled, of_them, low, peaked, one_sign = _of_sample(
        sample, sample_bits, largest, scale, rows * columns
    )
    heard = tl.where(sampled > 0, heard * of_them // tl.maximum(sampled, 1), heard)
    short, short_beside = _largest(*_falls_short(of_tile, rows))
    deep = tl.where(usable, 0, 1)
    if short_beside > 0:  # few tiles hold faint elements: a look of their own is free
        for top in range(0, TILE, CHUNK):
            _, bits = _rows_of_tile(source, top + i, j, rows, columns, row_stride, EVEN)
            far = (bits > 0) & (bits < ((power - 48) << 23))
            deep = tl.maximum(deep, tl.max(far.to(tl.int32)))
    terms = terms_of(near, heard, tl.sum(kinds), rows, columns, TILE) | one_sign
    first, second = _largest(first, second)
    word = word_of(first, second, terms, columns, power, usable, deep, low, peaked, EVEN)
    tl.store(tiles + 2 * tile, word)
    terms = terms_of(near, heard, of_columns, columns, rows, TILE) | one_sign
    word = word_of(short, short_beside, terms, rows, power, usable, deep, low, peaked, EVEN)
    tl.store(tiles + 2 * tile + 1, word)


@triton.jit(do_not_specialize=("a_rows", "a_columns", "b_rows", "b_columns", "tiles_of_a"))
def _split_kernel(  # type: ignore[no-untyped-def]
    a, b, a_parts, b_parts, a_tiles, b_tiles,
    a_rows, a_columns, a_stride, b_rows, b_columns, b_stride, tiles_of_a,
    EVEN: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One tile a program, those of a before those of b."""
    program = tl.program_id(0)
    of_b = program >= tiles_of_a
    _split_tile(
        tl.where(of_b, program - tiles_of_a, program), tl.where(of_b, b, a),
        tl.where(of_b, b_parts, a_parts), tl.where(of_b, b_tiles, a_tiles),
        tl.where(of_b, b_rows, a_rows), tl.where(of_b, b_columns, a_columns),
        tl.where(of_b, b_stride, a_stride), EVEN, TILE, CHUNK,
    )  # fmt: skip


def split(*sources: Tensor) -> list[Split]:
    """Two fp16 parts of one matrix or two, in one pass: 4 bytes read and 4 written an element.

    Args:
        sources: each (rows, columns) fp32, of one device; copied unless a row's elements are
            contiguous and rows start less than 2²⁴ elements apart.

    Raises:
        ValueError: another shape or dtype, or rows of 2²⁴ or more elements.
    """
    made = [_unfilled(_checked(source)) for source in sources]
    filled = [s for s in made if s.source.numel()]
    if filled:
        _fill(filled[0], filled[-1], len(filled) == 2)
    return made


def _checked(source: Tensor) -> Tensor:
    if source.ndim != 2 or source.dtype != torch.float32:
        raise ValueError(
            f"only a float32 matrix can be split, got {source.dtype} {tuple(source.shape)}"
        )
    if source.shape[1] >= LONGEST_ROW:
        raise ValueError(f"rows must be shorter than {LONGEST_ROW}, got {source.shape[1]}")
    far = source.stride(0) >= LONGEST_ROW
    return source.contiguous() if far else rows_contiguous(source)


def _unfilled(source: Tensor) -> Split:
    rows, columns = (-(-size // TILE) for size in source.shape)
    parts = source.new_empty((2 * rows * TILE, columns * TILE), dtype=torch.float16)
    return Split(source, parts, source.new_empty((rows, columns, 2), dtype=torch.int32))


def _fill(a: Split, b: Split, both: bool) -> None:
    splitting_launch(a, b, both)(a.source, b.source, a.parts, b.parts, a.tiles, b.tiles)


def splitting_launch(a: Split, b: Split, both: bool) -> Launch:
    """What fills `a`, and `b` if `both`; it takes both sources, parts and tiles, by turns."""
    sizes = (*a.source.shape, a.source.stride(0), *b.source.shape, b.source.stride(0))
    key = "split", sizes, both, a.source.device

    def made() -> Launch:
        tiles = [s.tiles.numel() // 2 for s in (a, b)]
        even = all(size % TILE == 0 for s in (a, b) for size in s.source.shape)
        programs = (tiles[0] + tiles[1] * both, 1, 1)
        constants = {"EVEN": even, "TILE": TILE}
        config = splitting(a.source)
        return Launch(_split_kernel, config, programs, (), (*sizes, tiles[0]), constants)

    operands = a.source, b.source, a.parts, b.parts, a.tiles, b.tiles
    return kept_launch(made, key, *operands)
