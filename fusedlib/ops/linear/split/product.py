# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""The product of two split factors: C = A B, of A (m, k) and B (k, n), either stored transposed.

    block = high(A) low(B) + low(A) high(B) + high(A) high(B)      over 64 terms, on the tensor core
    span  = Σ block, of 16 blocks          C = Σ 2ᵉ span, with the sum of a row's and a column's e

The tensor core adds 16 terms at a time, keeps 26 bits of the largest and cuts off the rest, so the
small products come first. A block falls short by 0.9e-7 of itself for normal numbers and 2e-7 for
positive ones (H200). Where both lines have elements of more than fp16's bits a span's factor is
therefore the next number above 2ᵉ, 1 + 2⁻²³ times as large; of integers and the like, whose sums
may be exact, it is not.

**Error**, in units of 2⁻²² Σ|a||b|, at most: 2 of the parts, of which low(A) low(B), left out, is
one; 10.5 cut off, 17 numbers 2⁻²⁵ of the largest each and a result 2⁻²³ of itself, four times a
block; k/4096 + 4 of rounding spans and their sum, ½ of the factor and ¼ of the result. Together
18 + k/4096, and 2⁻³⁹ (max|a| Σ|b| + max|b| Σ|a|) of elements that are small in their span, the
largest being that of each span. Below 2⁻¹²⁶ a span's rounding is 2⁻¹⁵⁰ at most. Older tensor cores
add eight terms and keep 25 bits: 30 + k/4096 there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.launch import (
    Config,
    Launch,
    allocator,
    architecture,
    cdiv,
    contiguous_layout,
    current_device,
    current_index,
    launch_for,
    multiprocessors,
    rows_contiguous,
    without_memory,
)
from fusedlib.ops.blocks import tile_position
from fusedlib.ops.linear.split import parts
from fusedlib.ops.linear.split.parts import TILE, FactorSplitter

try:
    from fusedlib.ops.linear.split import hopper
except (ImportError, AttributeError):  # Gluon is experimental: other releases may name it otherwise
    hopper = None  # type: ignore[assignment]

# Where Hopper's own kernel is not: three tiles of fp32 live at once.
CONFIGS = {
    80: Config(64, 64, 32, 4, 4),
    89: Config(64, 64, 32, 4, 3),
    90: Config(128, 64, 64, 8, 3),
    100: Config(128, 64, 64, 8, 3),
}
INTERPRETER = Config(64, 32, 64, 4, 1, group_m=2)  # fewer operations are faster there
# Few results are shared among programs along the sum.
MAX_K_SPLITS, MIN_K_PER_SPLIT = 4, 1024


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    parts, row, column, width,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """[HEIGHT, WIDTH] at (row, column) of a part, which is stored transposed if TRANSPOSED."""
    if TRANSPOSED:
        i, j = column + tl.arange(0, WIDTH), row + tl.arange(0, HEIGHT)
        block = tl.load(parts + i.to(tl.int64)[:, None] * width + j[None, :]).T
    else:
        i, j = row + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
        block = tl.load(parts + i.to(tl.int64)[:, None] * width + j[None, :])
    return block


@triton.jit
def _low_part(parts, rows, columns, TRANSPOSED: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The low part of op(A) (rows, columns), and how wide the parts are stored."""
    row_tiles, column_tiles = tl.cdiv(rows, TILE), tl.cdiv(columns, TILE)
    width = (row_tiles if TRANSPOSED else column_tiles) * TILE
    return parts + (row_tiles * TILE).to(tl.int64) * (column_tiles * TILE), width


@triton.jit(do_not_specialize=("m", "k", "k_per_split"))  # a binary for every number of tokens
def _split_product_kernel(  # type: ignore[no-untyped-def]
    a_high, b_high, a_factors, b_factors, c, m, n, k, k_per_split,
    A_T: tl.constexpr, B_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row_tile, column_tile = tile_position(
        tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M
    )
    row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
    a_low, a_width = _low_part(a_high, m, k, A_T, TILE)
    b_low, b_width = _low_part(b_high, k, n, B_T, TILE)
    i, j = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    a_lines, b_lines = tl.cdiv(m, TILE) * TILE, tl.cdiv(n, TILE) * TILE
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total = tl.zeros_like(acc)
    begin = tl.multiple_of(tl.program_id(1) * k_per_split, BLOCK_K)
    end = tl.minimum(begin + k_per_split, k)
    for start in range(begin, end, BLOCK_K):
        ah = _part(a_high, row, start, a_width, BLOCK_M, BLOCK_K, A_T)
        al = _part(a_low, row, start, a_width, BLOCK_M, BLOCK_K, A_T)
        bh = _part(b_high, start, column, b_width, BLOCK_K, BLOCK_N, B_T)
        bl = _part(b_low, start, column, b_width, BLOCK_K, BLOCK_N, B_T)
        acc += tl.dot(ah, bh, tl.dot(al, bh, tl.dot(ah, bl)))
        if (start + BLOCK_K) % SPAN == 0 or start + BLOCK_K >= end:
            span = start // SPAN
            a1 = tl.load(a_factors + 2 * span * a_lines + i)[:, None]
            a2 = tl.load(a_factors + (2 * span + 1) * a_lines + i)[:, None]
            b1 = tl.load(b_factors + 2 * span * b_lines + j)[None, :]
            b2 = tl.load(b_factors + (2 * span + 1) * b_lines + j)[None, :]
            # A row's and a column's together: a large one alone may take the sum out of the range.
            acc *= a1.to(tl.float32, bitcast=True) * b1.to(tl.float32, bitcast=True)
            second = (b2 & (a2 | -2)).to(tl.float32, bitcast=True)
            total += acc * ((a2 & -2).to(tl.float32, bitcast=True) * second)
            acc = tl.zeros_like(acc)
    inside = (i < m)[:, None] & (j < n)[None, :]
    c += tl.program_id(1).to(tl.int64) * m * n
    tl.store(c + i.to(tl.int64)[:, None] * n + j[None, :], total, mask=inside)


class SplitProduct:
    """C = A B at the sizes and strides of two factors.

    Args:
        device: where they lie.
        a: (m, k) as it is stored, (k, m) if transposed; elements of a row side by side.
        b: (k, n), or (n, k) if transposed.
        transposed: whether A, whether B is stored transposed.
        has_lower_half: b is the upper half of B's rows as they are stored.
    """

    def __init__(
        self, device: torch.device, a: Tensor, b: Tensor, transposed: tuple[bool, bool],
        has_lower_half: bool = False,
    ) -> None:  # fmt: skip
        (m, k), n = a.shape, b.shape[not transposed[1]]
        if transposed[0]:
            m, k = k, m
        if has_lower_half and transposed[1]:
            n *= 2
        self._split_a = FactorSplitter(device, a, by_columns=transposed[0])
        self._split_b = FactorSplitter(device, b, not transposed[1], has_lower_half)
        k_splits = choose_k_splits(m, n, k, multiprocessors(device))
        k_per_split = cdiv(k, k_splits * MIN_K_PER_SPLIT) * MIN_K_PER_SPLIT
        k_splits = cdiv(k, k_per_split)
        self._c = contiguous_layout((m, n) if k_splits == 1 else (k_splits, m, n), torch.float32)
        self._new = allocator(device)
        self._multiply = _launch(device, (m, n, k, k_per_split), transposed)

    def launches(self, a: Tensor, b: Tensor) -> Iterator[tuple[Launch, tuple[Tensor, ...]]]:
        """Each launch, of factors without memory, and matrices like those that it takes."""
        a_parts, a_factors = without_memory(*self._split_a.results)
        b_parts, b_factors = without_memory(*self._split_b.results)
        yield self._split_a.launch, (a, a, a_parts, a_factors)
        yield self._split_b.launch, (b, b, b_parts, b_factors)
        c = without_memory(self._c)
        yield self._multiply, (a_parts, b_parts, a_factors, b_factors, *c)

    def __call__(self, a: Tensor, b: Tensor, lower_half: Tensor | None = None) -> Tensor:
        """C (m, n), fp32; `lower_half` is the lower half of B's rows. On the current device."""
        a_parts, a_factors = self._split_a(a)
        b_parts, b_factors = self._split_b(b, lower_half)
        c = self._new(*self._c)
        self._multiply(a_parts, b_parts, a_factors, b_factors, c)
        if c.ndim == 2:
            return c
        del a_parts, b_parts  # before the sum allocates
        return c[0] + c[1] if len(c) == 2 else c.sum(0)  # 10 µs for 19, 1024·3072 on an H100


def choose_k_splits(m: int, n: int, k: int, programs: int) -> int:
    """Into how many shares the sum is cut, so that there is no last round of few tiles.

    In rounds of whole tiles; shares are written and read again, 8 bytes a result, by a launch more.
    A round takes 17 ns a term on an H200, as long as 4 MB.
    """
    tiles = cdiv(m, TILE) * cdiv(n, TILE)

    def rounds(k_splits: int) -> float:
        more = (tiles / programs * 250 * k_splits + 300) / k if k_splits > 1 else 0
        return cdiv(tiles * k_splits, programs) / k_splits + more

    return min(range(1, max(1, min(MAX_K_SPLITS, k // MIN_K_PER_SPLIT)) + 1), key=rounds)


def _launch(
    device: torch.device, sizes: tuple[int, int, int, int], transposed: tuple[bool, bool]
) -> Launch:
    if hopper is not None and hopper.supports(device):
        return hopper.launch(device, sizes, transposed)
    config = CONFIGS[architecture(device)] if device.type == "cuda" else INTERPRETER
    tiles = cdiv(sizes[0], config.block_m) * cdiv(sizes[1], config.block_n)
    grid = tiles, cdiv(sizes[2], sizes[3]), 1
    constants = {
        "A_T": transposed[0], "B_T": transposed[1], "SPAN": parts.SPAN, "TILE": TILE,
    }  # fmt: skip
    return Launch(_split_product_kernel, config, grid, (), sizes, constants)


def split_product(a: Tensor, b: Tensor) -> Tensor:
    """A B (m, n) of fp32 A (m, k) and B (k, n) on one device, no size zero.

    A factor stored transposed is taken as it lies; other strides are copied.
    """
    transposed = _is_stored_transposed(a), _is_stored_transposed(b)
    a = rows_contiguous(a.mT if transposed[0] else a)
    b = rows_contiguous(b.mT if transposed[1] else b)
    return split_product_of_stored(a, b, transposed)


def _is_stored_transposed(factor: Tensor) -> bool:
    return factor.stride(0) == 1 and factor.stride(1) != 1


def split_product_of_stored(
    a: Tensor, b: Tensor, transposed: tuple[bool, bool], lower_half: Tensor | None = None
) -> Tensor:
    """A B (m, n) of fp32 factors as they are stored.

    A `SplitProduct` is kept where its binaries serve again: on a GPU, for addresses of 16 bytes.

    Args:
        a: A, its elements of a row side by side.
        b: B likewise.
        transposed: whether A, whether B is stored transposed.
        lower_half: the lower half of B's rows as they are stored, of b's shape and strides; b is
            the upper one then.
    """
    if a.is_cuda and current_index() != a.get_device():
        with current_device(a):
            return split_product_of_stored(a, b, transposed, lower_half)
    has_lower_half = lower_half is not None
    sizes = a.shape, b.shape, a.stride(0), b.stride(0)
    key = "split", sizes, transposed, a.get_device(), has_lower_half
    make = partial(SplitProduct, a.device, a, b, transposed, has_lower_half)
    lowest = b if lower_half is None else lower_half
    # A product costs an H200's host 25 µs where it is kept, 75 where all is looked up anew, torch's
    # 17.
    product: Callable[..., Tensor] = launch_for(key, make, a, b, lowest)
    return product(a, b, lower_half)
