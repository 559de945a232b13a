# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""An fp32 factor of a product as two fp16 parts for the tensor cores, scaled along the sum.

A factor has lines, the rows of A and the columns of B, each as long as the sum. A line is scaled
span by span, of 1024 terms, so that a factor is read once and split at once. With the e that brings
the largest magnitude of a span into [2¹⁴, 2¹⁵) when it is multiplied by 2⁻ᵉ, an element becomes

    v = a 2⁻ᵉ        high = fp16(v)        low = fp16(v − high)        a ≈ 2ᵉ (high + low)

**Error.** At most 2⁻²³ of the element, or 2⁻³⁹ of its span's largest where that is more: where the
element is below 2⁻¹⁶ of it. A span whose largest is below 2⁻¹¹² has e = −126 and loses nothing, as
fp32 itself is no finer there.

**inf and nan.** A nonzero element has a nonzero high part, of 2⁻²⁴ at least; one that is not finite
has high = ±2¹⁵ and low = ±inf or nan. So high(A) low(B) + low(A) high(B) + high(A) high(B) is inf
or nan where IEEE arithmetic has them: inf by a nonzero number is inf of its sign, inf by 0 nan.

A span's 2ᵉ is stored as two factors, for with another's it may be no number of fp32, and a sum
times it none where the sum times both is one: 2^⌊e/2⌋ and 2^⌈e/2⌉, whose last bit is set if some
element has more bits than fp16 (see `product`).

The rows of a matrix may lie in two tensors, `source` with its first `upper_rows` and `lower_half`
with the rest: so an MLP's weights of gate and up are split as one matrix, without a copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.fixed import kept_of_fixed
from fusedlib.launch import Config, Launch, allocator, cdiv, contiguous_layout

# The parts are filled up with zeros to multiples of it, so that no product masks its loads.
TILE = 128
SPAN = 1024  # terms
# Lines of which a program splits a span. One H100, 16384·3072 and 3072·8192, TB/s, where a copy has
# 3.0: 2 rows of 4 warps 2.92 and 2.78; 16 columns of 8 warps 2.45 and 2.30, of 16 2.31 and 2.18, 32
# of 32 2.07 and 1.90.
ROWS, COLUMNS = Config(num_warps=4, lines=2), Config(num_warps=8, lines=16)
INTERPRETED = Config(num_warps=4, lines=TILE)  # fewer operations are faster there


@triton.jit
def _span_factors(magnitudes, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of both factors of each span along an axis, and 2⁻ᵉ, of magnitudes' bits.

    As integers magnitudes are in the same order, inf and nan above all numbers.
    """
    biased = tl.max(magnitudes, axis=axis) >> 23
    has_more_bits = (tl.max(magnitudes & 0x1FFF, axis=axis) != 0).to(tl.int32)
    e = tl.maximum(biased - 141, -126)
    scale = ((127 - e) << 23).to(tl.float32, bitcast=True)
    # Beside inf and nan no share of a sum may overflow, whatever it is.
    e = tl.where(biased == 255, -60, e)
    half = e >> 1
    return (half + 127) << 23, ((e - half + 127) << 23) | has_more_bits, scale


@triton.jit
def _parts(a, scale):  # type: ignore[no-untyped-def]
    v = a * scale
    least = tl.where(a == 0.0, 0.0, 5.9604644775390625e-08)  # 2⁻²⁴
    high = tl.minimum(tl.maximum(tl.abs(v), least), 32768.0)
    high = tl.where(a < 0.0, -high, high).to(tl.float16)
    return high, (v - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _block(source, lower_half, i, j, rows, columns, stride, upper_rows):  # type: ignore[no-untyped-def]
    """Rows i and columns j of a matrix, zeros outside."""
    first = tl.where(i < upper_rows, source, lower_half - upper_rows.to(tl.int64) * stride)
    places = i.to(tl.int64)[:, None] * stride + j[None, :]
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(first[:, None] + places, mask=inside, other=0.0)


@triton.jit(do_not_specialize=("rows", "upper_rows"))
def _split_kernel(  # type: ignore[no-untyped-def]
    source, lower_half, parts, factors, rows, columns, stride, upper_rows,
    BY_COLUMNS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """A program has a span of some LINES, which are rows, or columns."""
    height: tl.constexpr = SPAN if BY_COLUMNS else LINES
    width: tl.constexpr = LINES if BY_COLUMNS else SPAN
    tall, wide = tl.cdiv(rows, TILE) * TILE, tl.cdiv(columns, TILE) * TILE
    blocks = tl.cdiv(wide, width)
    row, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i, j = row * height + tl.arange(0, height), column * width + tl.arange(0, width)
    a = _block(source, lower_half, i, j, rows, columns, stride, upper_rows)
    magnitudes = a.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if BY_COLUMNS:
        first, second, scale = _span_factors(magnitudes, 0)
        factors += 2 * row.to(tl.int64) * wide + j
        tl.store(factors, first, mask=j < wide)
        tl.store(factors + wide, second, mask=j < wide)
        scale = scale[None, :]
    else:
        first, second, scale = _span_factors(magnitudes, 1)
        factors += 2 * column.to(tl.int64) * tall + i
        tl.store(factors, first, mask=i < tall)
        tl.store(factors + tall, second, mask=i < tall)
        scale = scale[:, None]
    high, low = _parts(a, scale)
    places = i.to(tl.int64)[:, None] * wide + j[None, :]
    inside = (i < tall)[:, None] & (j < wide)[None, :]
    tl.store(parts + places, high, mask=inside)
    tl.store(parts + tall.to(tl.int64) * wide + places, low, mask=inside)


class FactorSplitter:
    """Splits matrices like one, of its sizes and strides.

    Args:
        device: where they lie.
        like: (rows, columns) fp32, the elements of a row side by side.
        by_columns: the sum runs down columns, not along rows.
        has_lower_half: as many rows lie in another tensor, below it.
    """

    def __init__(
        self, device: torch.device, like: Tensor, by_columns: bool, has_lower_half: bool = False
    ) -> None:  # fmt: skip
        upper_rows, columns = like.shape
        rows = 2 * upper_rows if has_lower_half else upper_rows
        tall, wide = cdiv(rows, TILE) * TILE, cdiv(columns, TILE) * TILE
        self._new, self._by_columns = allocator(device), by_columns
        parts = contiguous_layout((2 * tall, wide), torch.float16)
        length, lines = (tall, wide) if by_columns else (wide, tall)
        spans = cdiv(length, SPAN)
        self.results = parts, contiguous_layout((2 * spans, lines), torch.int32)
        config = (COLUMNS if by_columns else ROWS) if device.type == "cuda" else INTERPRETED
        programs = spans * cdiv(lines, config.lines), 1, 1
        sizes = rows, columns, like.stride(0), upper_rows
        constants = {"BY_COLUMNS": by_columns, "TILE": TILE, "SPAN": SPAN}
        self.launch = Launch(_split_kernel, config, programs, (), sizes, constants)

    def __call__(self, source: Tensor, lower_half: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The parts, (2·rows, columns) fp16 with both sizes filled up to multiples of 128, the high
        rows above the low ones; and the factors of its lines, two rows of them for each span.

        `lower_half`, where half of the rows are there, has source's strides.
        """
        return kept_of_fixed(self._split_now, self._by_columns, source, lower_half)

    def _split_now(self, source: Tensor, lower_half: Tensor | None) -> tuple[Tensor, Tensor]:
        parts, factors = self._new(*self.results[0]), self._new(*self.results[1])
        self.launch(source, source if lower_half is None else lower_half, parts, factors)
        return parts, factors
