# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""fp32 products on tensor cores: at least as accurate as IEEE fp32, from split factors.

C = A B from the parts of A (m, k) and B (k, n), either one stored transposed. Over K blocks of 64,
with the factors f = 2ᵉ of the tiles that a block lies in:

    cross = high(A) low(B) + low(A) high(B)        main = high(A) high(B)
    acc   = acc + 2⁻¹¹ f cross                     acc  = acc + f main

Both products are summed from zero on the tensor core, whose own fp32 sum truncates, and join acc by
an ordinary fused multiply-add. low(A) low(B), 2⁻²² of a product at most, is left out.

A second kernel then looks at each tile of C. It is done over where a pair of tiles that it is made
of lacks the certificate of `fusedlib.kernels.split`, and where its sums have fewer than
`LEAST_TERMS` + k / `LEAST_SHARE` terms that are not short. So few IEEE additions err less than the
parts do, which cost 7e-8 in norm however short a sum is, and every promotion adds to it. The tile
is then the product of the fp32 matrices themselves, summed in fp64 where that has tensor cores,
else in IEEE fp32 a K block at a time. Nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.kernels import split_configs
from fusedlib.kernels.launch import Launch, kept_launch, multiprocessors
from fusedlib.kernels.split import LONGEST_ROW, TILE, Split, split, words
from fusedlib.kernels.swiglu import _place

try:
    from fusedlib.kernels import split_hopper
except (ImportError, AttributeError):  # Gluon is experimental: other releases may name it otherwise
    split_hopper = None  # type: ignore[assignment]

# H200, errors in norm of dense sums of 256, 1024 and 4096 terms: 1.4e-7, 1.7e-7 and 2.4e-7, cuBLAS
# 2.9e-7, 5.7e-7 and 1.15e-6. With nine of ten terms zero: 1.1e-7, 1.4e-7, 2.3e-7 and 0.9e-7,
# 1.8e-7, 3.6e-7.
LEAST_INNER = 256
LEAST_TERMS, LEAST_SHARE = 64, 16
LOOK = 16, 32  # blocks of C and tiles of their sums that the exact kernel looks at together
LEAST_OUTER = 256
# Of fewer results cuBLAS shares a long sum among programs, and errs less: 1024·1024 results of 8192
# terms, the largest element's error 1.3e-7, with four of five terms zero 0.9e-7; here 0.7e-7 and
# 1.5e-7. Of 2048·2048 results of 14336 terms 3.9e-7 and 4.4e-7; here 0.6e-7 and 1.6e-7.
LEAST_RESULTS = 2**21
# Three launches take the host 60 to 80 µs, cuBLAS's one 18. Of 2³¹ multiplications cuBLAS needs the
# device for 98 µs, of 2³² for 185; here 40 to 75 and 66 to 80.
LEAST_WORK = 2**32


_words = triton.jit(words)


@triton.jit
def _part(parts, row, column, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
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
    TILE: tl.constexpr,
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
    for start in range(0, k, BLOCK_K):
        ah = _part(a_high, row, start, a_width, BLOCK_M, BLOCK_K, A_TURNED)
        al = _part(a_low, row, start, a_width, BLOCK_M, BLOCK_K, A_TURNED)
        bh = _part(b_high, start, column, b_width, BLOCK_K, BLOCK_N, B_TURNED)
        bl = _part(b_low, start, column, b_width, BLOCK_K, BLOCK_N, B_TURNED)
        tile = start // TILE
        of_a = tl.load(a_words + tile * a_step) & 0xFF
        of_b = tl.load(b_words + tile * b_step) & 0xFF
        factor = ((of_a + of_b - 127) << 23).to(tl.float32, bitcast=True)
        cross = tl.dot(al, bh, tl.dot(ah, bl))
        acc = tl.fma(cross, factor * 0.00048828125, acc)  # 2⁻¹¹
        acc = tl.fma(tl.dot(ah, bh), factor, acc)
    i, j = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    inside = (i < m)[:, None] & (j < n)[None, :]
    tl.store(c + i.to(tl.int64)[:, None] * n + j[None, :], acc, mask=inside)


@triton.jit
def _wanting(  # type: ignore[no-untyped-def]
    a_words, a_step, b_words, b_step, k, least_terms,
    BLOCKS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """1 for each of BLOCKS blocks of C that is not accurate as the parts give it, else 0."""
    k_tiles = tl.cdiv(k, TILE)
    worst = tl.zeros((BLOCKS, TILES), tl.int32)
    terms = tl.zeros((BLOCKS, TILES), tl.int32)
    for start in range(0, k_tiles, TILES):
        tile = start + tl.arange(0, TILES)[None, :]
        # What lies outside is certified and has no terms.
        a = tl.load(a_words[:, None] + tile * a_step, mask=tile < k_tiles, other=0)
        b = tl.load(b_words[:, None] + tile * b_step, mask=tile < k_tiles, other=0)
        faint_a, faint_b = (a >> 16) & 0xFF, (b >> 16) & 0xFF
        worst = tl.maximum(worst, tl.where(faint_a > 0, faint_a + ((b >> 8) & 0xFF), 0))
        worst = tl.maximum(worst, tl.where(faint_b > 0, faint_b + ((a >> 8) & 0xFF), 0))
        length = tl.minimum(k - tile * TILE, TILE)
        terms += ((a >> 24) & 0xFF) * ((b >> 24) & 0xFF) * length >> 14
    few = tl.sum(terms, axis=1) < least_terms
    return ((tl.max(worst, axis=1) >= 128) | few).to(tl.int32)


@triton.jit
def _exact_block(  # type: ignore[no-untyped-def]
    a, b, c, row, column, m, n, k, a_row, a_column, b_row, b_column, one,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    i, j, s = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_K)
    a += row.to(tl.int64) * a_row
    b += column.to(tl.int64) * b_column
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float64 if DOUBLE else tl.float32)
    for left_over in range(k, 0, -BLOCK_K):
        inside = s < left_over
        left = tl.load(
            a + (i * a_row + s[None, :] * a_column), mask=(i < m - row) & inside[None, :], other=0.0
        )  # fmt: skip
        right = tl.load(
            b + (s[:, None] * b_row + j * b_column), mask=inside[:, None] & (j < n - column),
            other=0.0,
        )  # fmt: skip
        if DOUBLE:
            acc = tl.dot(left.to(tl.float64), right.to(tl.float64), acc, out_dtype=tl.float64)
        else:
            # `one` keeps the compiler from folding the addition into the product: accumulate.py.
            acc = tl.fma(tl.dot(left, right, input_precision="ieee"), one, acc)
        a += BLOCK_K * a_column
        b += BLOCK_K * b_row
    c += row.to(tl.int64) * n + column
    tl.store(c + (i * n + j), acc.to(tl.float32), mask=(i < m - row) & (j < n - column))


@triton.jit(do_not_specialize=("m", "n", "k", "least_terms"))
def _exact_product_kernel(  # type: ignore[no-untyped-def]
    a, b, a_tiles, b_tiles, c, m, n, k, least_terms, a_row, a_column, b_row, b_column, one,
    A_ALONG: tl.constexpr, B_ALONG: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr, TILES: tl.constexpr, DOUBLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Looks at BLOCKS blocks of C at once: mostly, that is all there is to do."""
    column_blocks, k_tiles = tl.cdiv(n, BLOCK_N), tl.cdiv(k, TILE)
    blocks = tl.cdiv(m, BLOCK_M) * column_blocks
    programs = tl.num_programs(0)
    which = tl.arange(0, BLOCKS)
    for first in range(tl.program_id(0), blocks, programs * BLOCKS):
        block = tl.minimum(first + which * programs, blocks - 1)
        row_tile = block // column_blocks * BLOCK_M // TILE
        column_tile = block % column_blocks * BLOCK_N // TILE
        a_words, a_step = _words(a_tiles, row_tile, tl.cdiv(m, TILE), k_tiles, A_ALONG)
        b_words, b_step = _words(b_tiles, column_tile, tl.cdiv(n, TILE), k_tiles, B_ALONG)
        wanting = _wanting(a_words, a_step, b_words, b_step, k, least_terms, BLOCKS, TILES, TILE)
        wanting = tl.where(first + which * programs < blocks, wanting, 0)
        if tl.max(wanting) > 0:
            for nth in range(BLOCKS):
                if tl.sum(tl.where(which == nth, wanting, 0)) > 0:
                    chosen = first + nth * programs
                    _exact_block(
                        a, b, c, chosen // column_blocks * BLOCK_M,
                        chosen % column_blocks * BLOCK_N, m, n, k,
                        a_row, a_column, b_row, b_column, one, BLOCK_M, BLOCK_N, BLOCK_K, DOUBLE,
                    )  # fmt: skip


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
    sizes = *c.shape, left.shape[1]
    turned = transpose_a, transpose_b
    shared = sizes, turned, c.device

    def made() -> Launch:
        return _launch(c, sizes, turned)

    operands = a.parts, b.parts, a.tiles, b.tiles, c
    kept_launch(made, ("split product", *shared), *operands)(*operands)

    def made_exact() -> Launch:
        strides = *left.stride(), *right.stride()
        return _launch_exact(c, (*sizes, least_terms(sizes[2]), *strides), turned)

    operands = left, right, a.tiles, b.tiles, c
    key = "exact product", *shared, left.stride(), right.stride()
    kept_launch(made_exact, key, *operands)(*operands)
    return c


def _launch(c: Tensor, sizes: tuple[int, int, int], turned: tuple[bool, bool]) -> Launch:
    if split_hopper is not None and split_hopper.takes(c):
        return split_hopper.launch(c, sizes, turned)
    config = split_configs.fast(c)
    programs = triton.cdiv(sizes[0], config.block_m) * triton.cdiv(sizes[1], config.block_n)
    constants = {"A_TURNED": turned[0], "B_TURNED": turned[1], "TILE": TILE}
    return Launch(_split_product_kernel, config, (programs, 1, 1), None, sizes, constants)


def _launch_exact(c: Tensor, scalars: tuple[int, ...], turned: tuple[bool, bool]) -> Launch:
    config = split_configs.EXACT
    blocks = triton.cdiv(c.shape[0], config.block_m) * triton.cdiv(c.shape[1], config.block_n)
    programs = min(blocks, split_configs.EXACT_PROGRAMS * multiprocessors(c.device))
    constants = {
        "A_ALONG": int(turned[0]), "B_ALONG": int(not turned[1]),
        "BLOCKS": LOOK[0], "TILES": LOOK[1],
        "DOUBLE": split_configs.double(c), "TILE": TILE,
    }  # fmt: skip
    return Launch(
        _exact_product_kernel, config, (programs, 1, 1), None, (*scalars, 1.0), constants
    )  # fmt: skip


def least_terms(k: int) -> int:
    """How many terms that are not short sums over k must have."""
    return LEAST_TERMS + k // LEAST_SHARE


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
