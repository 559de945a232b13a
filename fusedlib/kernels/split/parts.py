# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""An fp32 factor of a product as two fp16 parts for the tensor cores, scaled along the sum.

A factor has lines, the rows of A and the columns of B, each as long as the sum. With the e that
brings a line's largest magnitude into [2¹⁴, 2¹⁵) when it is multiplied by 2⁻ᵉ, an element becomes

    v = a 2⁻ᵉ        high = fp16(v)        low = fp16(v − high)        a ≈ 2ᵉ (high + low)

**Error.** At most 2⁻²³ of the element, or 2⁻³⁹ of its line's largest where that is more: where the
element is below 2⁻¹⁶ of it. A line whose largest is below 2⁻¹¹² has e = −126 and loses nothing, as
fp32 itself is no finer there.

**inf and nan.** A nonzero element has a nonzero high part, of 2⁻²⁴ at least; one that is not finite
has high = ±2¹⁵ and low = ±inf or nan. So high(A) low(B) + low(A) high(B) + high(A) high(B) is inf
or nan where IEEE arithmetic has them: inf by a nonzero number is inf of its sign, inf by 0 nan.

A line's exponent is stored as 2e, plus 1 if some element has more bits than fp16: see `product`.

The rows of a matrix may lie in two tensors, `source` with its first `upper_rows` and `lower_half`
with the rest: so an MLP's weights of gate and up are split as one matrix, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.kernels.host.launch import Launch, allocator, contiguous_layout

# The parts are filled up with zeros to multiples of it, so that no product masks its loads.
TILE = 128
# Programs that look for the largest of columns, four a multiprocessor of an H200.
SUMMARY_PROGRAMS = 528


@dataclass(frozen=True)
class Blocks:
    """How a kernel is cut that goes through a matrix in blocks of [height, width]."""

    num_warps: int
    height: int
    width: int
    descriptors: bool = False

    def launch(self) -> dict[str, int]:
        """The keyword arguments of a kernel's launch."""
        return {"HEIGHT": self.height, "WIDTH": self.width, "num_warps": self.num_warps}


# Where lines are rows a program has as many as its blocks are high, each from end to end.
ROWS, COLUMNS = Blocks(4, 1, 1024), Blocks(8, 32, TILE)
INTERPRETED_ROWS, INTERPRETED_COLUMNS = Blocks(4, TILE, 512), Blocks(8, TILE, TILE)


@triton.jit
def _line_summary(largest, bits):  # type: ignore[no-untyped-def]
    """Of a line: twice the biased exponent of its largest magnitude, plus 1 for bits beyond fp16's,
    of which `bits` has one if any element does.
    """
    return ((largest >> 23) << 1) | (bits != 0).to(tl.int32)


@triton.jit
def _line_exponent(summary):  # type: ignore[no-untyped-def]
    """A line's word, and 2⁻ᵉ."""
    e = tl.maximum((summary >> 1) - 141, -126)
    scale = ((127 - e) << 23).to(tl.float32, bitcast=True)
    # Beside inf and nan no share of a sum may overflow, whatever it is.
    e = tl.where(summary >> 1 == 255, -60, e)
    return (e << 1) | (summary & 1), scale


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


@triton.jit
def _update_summary(largest, bits, a):  # type: ignore[no-untyped-def]
    """With a block a of its lines: the largest magnitudes so far, and the bits beyond fp16's.

    As integers magnitudes are in the same order, inf and nan above all numbers.
    """
    a = a.to(tl.int32, bitcast=True)
    return tl.maximum(largest, a & 0x7FFFFFFF), bits | (a & 0x1FFF)


@triton.jit
def _store_parts(parts, low, a, i, j, width, scale):  # type: ignore[no-untyped-def]
    """Store both parts of a block, the low one `low` elements after the high one."""
    high, lower = _parts(a, scale)
    places = i.to(tl.int64)[:, None] * width + j[None, :]
    tl.store(parts + places, high, mask=(j < width)[None, :])
    tl.store(parts + low + places, lower, mask=(j < width)[None, :])


@triton.jit(do_not_specialize=("rows", "upper_rows"))
def _split_rows_kernel(  # type: ignore[no-untyped-def]
    source, lower_half, parts, exponents, rows, columns, stride, upper_rows,
    TILE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Lines are rows, read twice, the second time from a cache."""
    i, j = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT), tl.arange(0, WIDTH)
    width = tl.cdiv(columns, TILE) * TILE
    low = (tl.num_programs(0) * HEIGHT).to(tl.int64) * width
    largest = tl.zeros((HEIGHT, WIDTH), dtype=tl.int32)
    bits = tl.zeros_like(largest)
    for start in range(0, columns, WIDTH):
        a = _block(source, lower_half, i, start + j, rows, columns, stride, upper_rows)
        largest, bits = _update_summary(largest, bits, a)
    exponent, scale = _line_exponent(_line_summary(tl.max(largest, axis=1), tl.max(bits, axis=1)))
    tl.store(exponents + i, exponent)
    for start in range(0, width, WIDTH):
        a = _block(source, lower_half, i, start + j, rows, columns, stride, upper_rows)
        _store_parts(parts, low, a, i, start + j, width, scale[:, None])


@triton.jit(do_not_specialize=("rows", "upper_rows", "chunk"))
def _summarize_columns_kernel(  # type: ignore[no-untyped-def]
    source, lower_half, summaries, rows, columns, stride, upper_rows, chunk,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Lines are columns: what is seen of each in `chunk` rows, (chunks, columns filled up)."""
    nth, column = tl.program_id(0) % tl.cdiv(rows, chunk), tl.program_id(0) // tl.cdiv(rows, chunk)
    first, j = nth * chunk, column * WIDTH + tl.arange(0, WIDTH)
    largest = tl.zeros((HEIGHT, WIDTH), dtype=tl.int32)
    bits = tl.zeros_like(largest)
    for top in range(first, tl.minimum(first + chunk, rows), HEIGHT):
        i = top + tl.arange(0, HEIGHT)
        a = _block(source, lower_half, i, j, rows, columns, stride, upper_rows)
        largest, bits = _update_summary(largest, bits, a)
    summary = _line_summary(tl.max(largest, axis=0), tl.max(bits, axis=0))
    tl.store(summaries + nth.to(tl.int64) * tl.cdiv(columns, WIDTH) * WIDTH + j, summary)


@triton.jit(do_not_specialize=("rows", "upper_rows", "chunks"))
def _split_columns_kernel(  # type: ignore[no-untyped-def]
    source, lower_half, summaries, parts, exponents, rows, columns, stride, upper_rows, chunks,
    TILE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Lines are columns: TILE rows a program."""
    tall = tl.cdiv(rows, TILE)
    tile, j = tl.program_id(0) % tall, tl.program_id(0) // tall * WIDTH + tl.arange(0, WIDTH)
    width = tl.cdiv(columns, WIDTH) * WIDTH
    summary = tl.load(summaries + j)
    for nth in range(1, chunks):
        other = tl.load(summaries + nth * width + j)
        summary = tl.maximum(summary | (other & 1), other | (summary & 1))
    exponent, scale = _line_exponent(summary)
    if tile == 0:
        tl.store(exponents + j, exponent)
    low = (tall * TILE).to(tl.int64) * width
    for top in range(tile * TILE, (tile + 1) * TILE, HEIGHT):
        i = top + tl.arange(0, HEIGHT)
        a = _block(source, lower_half, i, j, rows, columns, stride, upper_rows)
        _store_parts(parts, low, a, i, j, width, scale[None, :])


class FactorSplitter:
    """Splits matrices like one: its sizes, strides and device.

    Args:
        like: (rows, columns) fp32, the elements of a row side by side.
        by_columns: the sum runs down columns, not along rows.
        new: allocates; None is the device's allocator.
        doubled: as many rows lie in another tensor, below it.
    """

    def __init__(
        self, like: Tensor, by_columns: bool, new: Callable[..., Tensor] | None = None,
        has_lower_half: bool = False,
    ) -> None:  # fmt: skip
        upper_rows, columns = like.shape
        rows = 2 * upper_rows if has_lower_half else upper_rows
        tall, wide = -(-rows // TILE), -(-columns // TILE)
        sizes, constants = (rows, columns, like.stride(0), upper_rows), {"TILE": TILE}
        self._new = new or allocator(like.device)
        self._parts = contiguous_layout((2 * tall * TILE, wide * TILE), torch.float16)
        self._exponents = contiguous_layout(((wide if by_columns else tall) * TILE,), torch.int32)
        by_rows_blocks, by_columns_blocks = ROWS, COLUMNS
        if not like.is_cuda:
            by_rows_blocks, by_columns_blocks = INTERPRETED_ROWS, INTERPRETED_COLUMNS
        config = by_columns_blocks if by_columns else by_rows_blocks
        self._summarize: Launch | None = None
        if not by_columns:
            grid = tall * TILE // config.height, 1, 1
            self._split = Launch(_split_rows_kernel, config, grid, (), sizes, constants)
            return
        chunk = -(-tall * wide // SUMMARY_PROGRAMS) * TILE
        chunks = -(-rows // chunk)
        self._summaries = contiguous_layout((chunks, wide * TILE), torch.int32)
        self._summarize = Launch(
            _summarize_columns_kernel, config, (chunks * wide, 1, 1), (), (*sizes, chunk), constants
        )
        self._split = Launch(
            _split_columns_kernel, config, (tall * wide, 1, 1), (), (*sizes, chunks), constants
        )

    def __call__(self, source: Tensor, lower_half: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The parts, (2·rows, columns) fp16 with both sizes filled up to multiples of 128, the high
        rows above the low ones; and the words of its lines.

        `lower_half`, where half of the rows are there, has source's strides.
        """
        parts, exponents = self._new(*self._parts), self._new(*self._exponents)
        lower_half = source if lower_half is None else lower_half
        if self._summarize is None:
            self._split(source, lower_half, parts, exponents)
        else:
            summaries = self._new(*self._summaries)
            self._summarize(source, lower_half, summaries)
            self._split(source, lower_half, summaries, parts, exponents)
        return parts, exponents
