# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""fp32 products on tensor cores, from split factors, at least as accurate as IEEE fp32 but for the
rare inputs that `NOTES.md`, step 15, tells of.

C = A B from the parts of A (m, k) and B (k, n), either one stored transposed. Over K blocks of 64,
with the factors f = 2ᵉ of the tiles that a block lies in:

    cross = high(A) low(B) + low(A) high(B)        main = high(A) high(B)
    block = main + 2⁻¹¹ cross                      acc  = acc + f block

Both products are summed from zero on the tensor core, whose own fp32 sum truncates, and join by
ordinary fused multiply-adds, so that acc is rounded once a block. A rounding is as large as acc is
by then: long sums are cut into spans of blocks (`split_configs.span`), each with an acc of its own.
low(A) low(B), 2⁻²² of a product at most, is left out.

A second kernel, `split_exact`, then looks at each tile of C, and does it over where the parts are
not good enough, or has `split_thirds` do it. Nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.kernels import split_configs, split_exact
from fusedlib.kernels.launch import Launch, kept_launch
from fusedlib.kernels.split import LONGEST_ROW, TILE, Split, split
from fusedlib.kernels.split_words import words
from fusedlib.kernels.swiglu import _place

try:
    from fusedlib.kernels import split_hopper
except (ImportError, AttributeError):  # Gluon is experimental: other releases may name it otherwise
    split_hopper = None  # type: ignore[assignment]

# A sum of one K block has the tensor core's own error, about that of 256 terms in IEEE fp32.
LEAST_INNER = 256
# Below this, and below the numbers that follow, splitting costs what the tensor cores save.
LEAST_OUTER = 256
# Of fewer results cuBLAS shares a long sum among programs, and its largest element errs less: of
# 1100·2000 results of 4096 terms 0.59e-7, of 1024·2048 of 14336 with half of them zero 0.89e-7;
# here 0.67e-7 and 0.92e-7. Of 2048·2048 of 14336 terms 3.9e-7, with zeros too; here 0.6e-7, 1e-7.
LEAST_RESULTS = 2**22
# Three launches take the host 60 to 80 µs, cuBLAS's one 18. Of 2³¹ multiplications cuBLAS needs the
# device for 98 µs, of 2³² for 185; here 40 to 75 and 66 to 80.
LEAST_WORK = 2**32

_words = triton.jit(words)


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    parts, row, column, width,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """[HEIGHT, WIDTH] at (row, column) of a part, which is stored transposed if TURNED."""
    if TURNED:
        i, j = column + tl.arange(0, WIDTH), row + tl.arange(0, HEIGHT)
        block = tl.load(parts + i.to(tl.int64)[:, None] * width + j[None, :]).T
    else:
        i, j = row + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
        block = tl.load(parts + i.to(tl.int64)[:, None] * width + j[None, :])
    return block


@triton.jit
def _low(parts, rows, columns, TURNED: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The low part of op(A) (rows, columns), and how wide the parts are stored."""
    row_tiles, column_tiles = tl.cdiv(rows, TILE), tl.cdiv(columns, TILE)
    width = (row_tiles if TURNED else column_tiles) * TILE
    return parts + (row_tiles * TILE).to(tl.int64) * (column_tiles * TILE), width


@triton.jit(do_not_specialize=("m", "k"))  # a binary for every number of tokens
def _split_product_kernel(  # type: ignore[no-untyped-def]
    a_high, b_high, a_tiles, b_tiles, c, m, n, k,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row_tile, column_tile = _place(
        tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M
    )
    row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
    a_low, a_width = _low(a_high, m, k, A_TURNED, TILE)
    b_low, b_width = _low(b_high, k, n, B_TURNED, TILE)
    k_tiles = tl.cdiv(k, TILE)
    a_words, a_step = _words(a_tiles, row // TILE, tl.cdiv(m, TILE), k_tiles, 1 if A_TURNED else 0)
    b_words, b_step = _words(
        b_tiles, column // TILE, tl.cdiv(n, TILE), k_tiles, 0 if B_TURNED else 1
    )
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total = tl.zeros_like(acc)
    for start in range(0, k, BLOCK_K):
        ah = _part(a_high, row, start, a_width, BLOCK_M, BLOCK_K, A_TURNED)
        al = _part(a_low, row, start, a_width, BLOCK_M, BLOCK_K, A_TURNED)
        bh = _part(b_high, start, column, b_width, BLOCK_K, BLOCK_N, B_TURNED)
        bl = _part(b_low, start, column, b_width, BLOCK_K, BLOCK_N, B_TURNED)
        tile = start // TILE
        of_a = tl.load(a_words + tile * a_step) & 0x7F
        of_b = tl.load(b_words + tile * b_step) & 0x7F
        factor = ((of_a + of_b + 1) << 23).to(tl.float32, bitcast=True)
        cross = tl.dot(al, bh, tl.dot(ah, bl))
        block = tl.fma(cross, 0.00048828125, tl.dot(ah, bh))  # 2⁻¹¹
        acc = tl.fma(block, factor, acc)
        if (start + BLOCK_K) % (SPAN * BLOCK_K) == 0:
            total += acc
            acc = tl.zeros_like(acc)
    i, j = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    inside = (i < m)[:, None] & (j < n)[None, :]
    tl.store(c + i.to(tl.int64)[:, None] * n + j[None, :], total + acc, mask=inside)


def split_product(
    a: Split, b: Split, *, transpose_a: bool = False, transpose_b: bool = False
) -> Tensor:
    """op(a) op(b), fp32 (m, n), by tensor cores, and exactly where the parts are not good enough.

    Sums of fewer than `LEAST_INNER` terms are torch's, in its own fp32 precision.

    Args:
        a: a split matrix (m, k), or (k, m) with `transpose_a`.
        b: a split matrix (k, n), or (n, k) with `transpose_b`.

    Raises:
        ValueError: inner sizes or devices that differ.
    """
    left = a.source.mT if transpose_a else a.source
    right = b.source.mT if transpose_b else b.source
    if left.shape[1] != right.shape[0] or left.device != right.device:
        raise ValueError(
            "op(a) must be (m, k) and op(b) (k, n) on one device, got "
            f"{tuple(left.shape)} on {left.device} and {tuple(right.shape)} on {right.device}"
        )
    if left.shape[1] < LEAST_INNER or 0 in (left.shape[0], right.shape[1]):
        return torch.mm(left, right)
    c = left.new_empty((left.shape[0], right.shape[1]))
    turned = transpose_a, transpose_b
    operands = a.parts, b.parts, a.tiles, b.tiles, c
    product_launch(left.shape[1], turned, *operands)(*operands)
    split_exact.mend(c, left, right, a.tiles, b.tiles, turned)
    return c


def product_launch(k: int, turned: tuple[bool, bool], *operands: Tensor) -> Launch:
    """What multiplies these operands: both factors' parts, their tiles, and C (m, n)."""
    c = operands[-1]
    sizes = *c.shape, k

    def made() -> Launch:
        return _launch(c, sizes, turned)

    return kept_launch(made, ("split product", sizes, turned, c.device), *operands)


def _launch(c: Tensor, sizes: tuple[int, int, int], turned: tuple[bool, bool]) -> Launch:
    if split_hopper is not None and split_hopper.takes(c):
        return split_hopper.launch(c, sizes, turned)
    config = split_configs.fast(c)
    programs = triton.cdiv(sizes[0], config.block_m) * triton.cdiv(sizes[1], config.block_n)
    constants = {
        "A_TURNED": turned[0], "B_TURNED": turned[1], "SPAN": split_configs.SPAN, "TILE": TILE,
    }  # fmt: skip
    return Launch(_split_product_kernel, config, (programs, 1, 1), (), sizes, constants)


def split_pays(m: int, n: int, k: int) -> bool:
    """Whether (m, k) by (k, n) of split factors is faster than cuBLAS's, and no worse."""
    return (
        min(m, n) >= LEAST_OUTER
        and m * n >= LEAST_RESULTS
        and k >= LEAST_INNER
        and m * n * k >= LEAST_WORK
        and max(m, n, k) < LONGEST_ROW
    )


def split_mm(a: Tensor, b: Tensor) -> Tensor:
    """A B (m, n) of fp32 A (m, k) and B (k, n), split here; torch's own product where small.

    A factor stored transposed is taken as it lies; other strides are copied.

    Raises:
        ValueError: a factor that is not a float32 matrix, or sizes and devices that do not fit.
    """
    if not split_pays(a.shape[0], b.shape[1], a.shape[1]):
        return torch.mm(a, b)
    turned_a, turned_b = (t.stride(0) == 1 and t.stride(1) != 1 for t in (a, b))
    left, right = split(a.mT if turned_a else a, b.mT if turned_b else b)
    return split_product(left, right, transpose_a=turned_a, transpose_b=turned_b)


@torch.library.custom_op("fusedlib::split_mm", mutates_args=())
def split_mm_operator(a: Tensor, b: Tensor) -> Tensor:
    """`split_mm` as an operator, for torch.compile and whatever else watches operators."""
    return split_mm(a, b)


@split_mm_operator.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))
