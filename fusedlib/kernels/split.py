# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""An fp32 matrix as two fp16 parts for the tensor cores, and a certificate of how good they are.

The matrix is cut into 128·128 tiles. In a tile whose largest magnitude is M, with e such that
2¹⁴ ≤ M 2⁻ᵉ < 2¹⁵, each element a becomes

    v = a 2⁻ᵉ    high = fp16(v)    low = fp16(2¹¹ (v − high))    a ≈ 2ᵉ (high + 2⁻¹¹ low)

(Ootomo and Yokota 2022, whose scale is the tensor's). A product of split matrices promotes each
K block by itself, so the tiles' factors 2ᵉ cost nothing there: `fusedlib.kernels.split_product`.

**Representation.** Where |v| ≥ 2⁻¹⁴ both parts together are within 2⁻²² of v, most within 2⁻²³. A
nonzero element below that, 2⁻²⁹ of its tile's largest, is *faint*: its error is absolute, up to
2⁻⁵⁰ M. Zeros are exact. Of normal numbers 6 in 10⁹ are faint, so a faint element alone must not
send a matrix to the exact path.

**Certificate.** A segment is 128 elements along the sum, of a row of A or a column of B.
Let one of A's hold at most 4 faint elements: its error in a product with B's segment b is at most
4·2⁻⁵⁰ M max|b|. If some index has both |a| ≥ 2⁻¹² M and |b| ≥ 2⁻¹⁰ max|b|, then Σ|a||b| over the
segment is at least 2⁻²² M max|b|, and the error at most 2⁻²⁶ of it, a quarter of fp32's roundoff.
Such an index exists when those that fall short, counted in A and in B, are together fewer than the
segment is long. So the pass keeps four numbers of a matrix, each a largest share over its segments:

    short of 2⁻¹⁰ of their segment's largest (zero segments: none)        rows' segments, columns'
    short of 2⁻¹² M, in segments with faint elements; all if more than 4  rows' segments, columns'

and a product is certified when first(A) + second(B) < 1 and second(A) + first(B) < 1, along the
sum's direction. A tile that holds inf or nan, or whose M lies outside 2⁻⁴⁸ ≤ M < 2⁵⁷ (so that
neither factors nor sums overflow), makes every share 1. All of it stays on the device: a product
reads the numbers there and leaves its work to the exact kernel when they do not certify it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.kernels.launch import current_device, rows_contiguous

TILE = 128
PAD = 16  # elements to which rows of the parts are filled up, so that they start at 32 bytes
WHOLE = 65_536  # a share of 1, in the integers that the device keeps shares in
NUM_WARPS = 16  # eight spill


@dataclass(frozen=True)
class Split:
    """A matrix (rows, columns) fp32 and its parts.

    `parts` is (2, rows, columns filled up to a multiple of 16) fp16, high before low; `factors`
    (tile rows, tile columns) fp32, powers of two; `shares` (4) int32, in units of 1 / 65536: what
    falls short by rows' segments and by columns', then the same beside faint elements.
    """

    source: Tensor
    parts: Tensor
    factors: Tensor
    shares: Tensor


@triton.jit
def _largest_share(short, length, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest of short / length, rounded up."""
    return (tl.max(short) * WHOLE + length - 1) // length


@triton.jit
def _counts(bits, largest, faint, length, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each segment: elements short of 2⁻¹⁰ of its largest, and faint ones."""
    # 2⁻¹⁰ is 10 steps of the exponent; near the denormals, where it is not, only the largest count.
    least = tl.where(largest > (11 << 23), largest - (10 << 23), largest)
    near = (bits >= tl.expand_dims(least, AXIS)).to(tl.int32)
    both = tl.sum(near + (faint.to(tl.int32) << 16), axis=AXIS)  # two counts in one reduction
    return tl.where(largest > 0, length - (both & 0xFFFF), 0), both >> 16


@triton.jit
def _short_of_tile(near, faint, length, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements short of 2⁻¹² M of segments with faint ones; all if more than 4 are."""
    short = length - tl.sum(near.to(tl.int32), axis=AXIS)
    return tl.where(faint > 4, length, tl.where(faint > 0, short, 0))


@triton.jit
def _certify(  # type: ignore[no-untyped-def]
    bits, of_rows, of_columns, power, usable, row_length, column_length, shares,
    WHOLE: tl.constexpr,
):  # fmt: skip
    if usable:
        faint = (bits > 0) & (bits < ((power - 14) << 23))  # |v| < 2⁻¹⁴
        short, faint_of_rows = _counts(bits, of_rows, faint, row_length, 1)
        # Relaxed: an atomic that orders memory would wait for all of the tile's stores.
        tl.atomic_max(shares, _largest_share(short, row_length, WHOLE), sem="relaxed")
        short, faint_of_columns = _counts(bits, of_columns, faint, column_length, 0)
        tl.atomic_max(shares + 1, _largest_share(short, column_length, WHOLE), sem="relaxed")
        if tl.max(faint_of_rows) > 0:
            near = bits >= ((power + 3) << 23)  # |v| ≥ 2³, for M up to 2¹⁵
            short = _short_of_tile(near, faint_of_rows, row_length, 1)
            tl.atomic_max(shares + 2, _largest_share(short, row_length, WHOLE), sem="relaxed")
            short = _short_of_tile(near, faint_of_columns, column_length, 0)
            tl.atomic_max(shares + 3, _largest_share(short, column_length, WHOLE), sem="relaxed")
    else:
        for i in tl.static_range(4):
            tl.atomic_max(shares + i, WHOLE, sem="relaxed")


@triton.jit
def _split_kernel(  # type: ignore[no-untyped-def]
    source, high, low, factors, shares, rows, columns, row_stride, width,
    TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    i, j = row + tl.arange(0, TILE), column + tl.arange(0, TILE)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    # Offsets in 64 bits: a matrix may have more than 2³¹ elements.
    offsets = i.to(tl.int64)[:, None] * row_stride + j[None, :]
    a = tl.load(source + offsets, mask=inside, other=0.0)
    # As integers, magnitudes are in the same order, and inf and nan above all numbers. What lies
    # outside the matrix is zero: no count below takes it for near or faint.
    bits = a.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    of_rows, of_columns = tl.max(bits, axis=1), tl.max(bits, axis=0)
    largest = tl.max(of_rows)
    exponent = largest >> 23
    usable = ((exponent >= 127 - 48) & (exponent < 127 + 57)) | (largest == 0)
    power = tl.where(usable & (largest > 0), exponent - 14, 127)  # of the factor, biased
    v = a * ((254 - power) << 23).to(tl.float32, bitcast=True)
    upper = v.to(tl.float16)
    lower = ((v - upper.to(tl.float32)) * 2048.0).to(tl.float16)
    tl.store(
        factors + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1),
        (power << 23).to(tl.float32, bitcast=True),
    )
    kept = (i < rows)[:, None] & (j < width)[None, :]
    places = i.to(tl.int64)[:, None] * width + j[None, :]
    tl.store(high + places, upper, mask=kept)
    tl.store(low + places, lower, mask=kept)
    row_length, column_length = tl.minimum(columns - column, TILE), tl.minimum(rows - row, TILE)
    _certify(
        bits, of_rows, of_columns, power, usable, row_length, column_length, shares, WHOLE
    )  # fmt: skip


def split(source: Tensor) -> Split:
    """Two fp16 parts of a matrix, in one pass: 4 bytes read and 4 written an element.

    Args:
        source: (rows, columns) fp32; copied unless the elements of a row are contiguous.

    Raises:
        ValueError: another shape or dtype.
    """
    if source.ndim != 2 or source.dtype != torch.float32:
        raise ValueError(
            f"only a float32 matrix can be split, got {source.dtype} {tuple(source.shape)}"
        )
    source = rows_contiguous(source)
    rows, columns = source.shape
    width = triton.cdiv(columns, PAD) * PAD
    tiles = triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)
    parts = source.new_empty((2, rows, width), dtype=torch.float16)
    factors = source.new_empty(tiles)
    shares = source.new_zeros(4, dtype=torch.int32)
    if rows and columns:
        with current_device(source):
            _split_kernel[tiles](
                source, parts[0], parts[1], factors, shares, rows, columns, source.stride(0), width,
                TILE=TILE, WHOLE=WHOLE, num_warps=NUM_WARPS,
            )  # fmt: skip
    return Split(source, parts, factors, shares)
