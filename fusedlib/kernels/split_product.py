# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""fp32 products on tensor cores: at least as accurate as IEEE fp32, from split factors.

C = A B from the parts of A (m, k) and B (k, n), either one stored transposed. Over K blocks of 64,
with the factors f = 2ᵉ of the tiles that a block lies in:

    cross = high(A) low(B) + low(A) high(B)        main = high(A) high(B)
    acc   = acc + 2⁻¹¹ f cross                     acc  = acc + f main

Both products are summed from zero on the tensor core, whose own fp32 sum truncates, and join acc by
an ordinary fused multiply-add. low(A) low(B), 2⁻²² of a product at most, is left out.

Two kernels are started, and one of them finds nothing to do: this one unless the certificate (see
`fusedlib.kernels.split`) holds; if it does, the exact one, which multiplies the fp32 matrices
themselves in IEEE arithmetic. Nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedlib.kernels.launch import current_device, multiprocessors
from fusedlib.kernels.split import TILE, WHOLE, Split, split
from fusedlib.kernels.split_configs import EXACT, Config, choose

# A sum of one K block has the tensor core's own error, about that of 256 terms in IEEE fp32.
LEAST_INNER = 256
# Below this, splitting costs what the tensor cores save.
LEAST_OUTER = 256
LEAST_WORK = 2**30


@triton.jit
def _certified(  # type: ignore[no-untyped-def]
    a_shares, b_shares, A_ALONG: tl.constexpr, B_ALONG: tl.constexpr, WHOLE: tl.constexpr
):
    """Whether the parts are good enough, the sum along rows' (0) or columns' (1) segments."""
    first = tl.load(a_shares + A_ALONG) + tl.load(b_shares + 2 + B_ALONG)
    second = tl.load(a_shares + 2 + A_ALONG) + tl.load(b_shares + B_ALONG)
    return tl.maximum(first, second) < WHOLE


@triton.jit
def _place(tile, row_tiles, column_tiles, GROUP_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column tile of the tile-th, down GROUP_M rows before the next column, for the L2."""
    width = GROUP_M * column_tiles
    first = tile // width * GROUP_M
    height = tl.minimum(row_tiles - first, GROUP_M)
    return first + tile % width % height, tile % width // height


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    source, row, column, rows, columns, row_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """[HEIGHT, WIDTH] at (row, column) of a part, zeros outside."""
    if DESCRIPTORS:
        block = source.load([row, column])
    else:
        i, j = row + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        offsets = i.to(tl.int64)[:, None] * row_stride + j[None, :]
        block = tl.load(source + offsets, mask=inside, other=0.0)
    return block


@triton.jit
def _oriented(  # type: ignore[no-untyped-def]
    source, row, column, rows, columns, row_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """[HEIGHT, WIDTH] at (row, column) of a factor (rows, columns) that may be stored turned."""
    if TURNED:
        block = _part(source, column, row, columns, rows, row_stride, WIDTH, HEIGHT, DESCRIPTORS).T
    else:
        block = _part(source, row, column, rows, columns, row_stride, HEIGHT, WIDTH, DESCRIPTORS)
    return block


@triton.jit
def _split_product_kernel(  # type: ignore[no-untyped-def]
    a_high, a_low, b_high, b_low, a_factors, b_factors, a_shares, b_shares, c, m, n, k,
    a_row, b_row, a_factor_m, a_factor_k, b_factor_n, b_factor_k, c_row,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, DESCRIPTORS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row_tile, column_tile = _place(
        tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M
    )
    row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
    a_factors += row // TILE * a_factor_m
    b_factors += column // TILE * b_factor_n
    # Not certified: no blocks, and no rows to store. A branch would keep the loop from pipelining.
    turn = _certified(a_shares, b_shares, 1 if A_TURNED else 0, 0 if B_TURNED else 1, WHOLE)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, tl.where(turn, k, 0), BLOCK_K):
        ah = _oriented(a_high, row, start, m, k, a_row, BLOCK_M, BLOCK_K, A_TURNED, DESCRIPTORS)
        al = _oriented(a_low, row, start, m, k, a_row, BLOCK_M, BLOCK_K, A_TURNED, DESCRIPTORS)
        bh = _oriented(b_high, start, column, k, n, b_row, BLOCK_K, BLOCK_N, B_TURNED, DESCRIPTORS)
        bl = _oriented(b_low, start, column, k, n, b_row, BLOCK_K, BLOCK_N, B_TURNED, DESCRIPTORS)
        tile = start // TILE
        factor = tl.load(a_factors + tile * a_factor_k) * tl.load(b_factors + tile * b_factor_k)
        cross = tl.dot(al, bh, tl.dot(ah, bl))
        acc = tl.fma(cross, factor * 0.00048828125, acc)  # 2⁻¹¹
        acc = tl.fma(tl.dot(ah, bh), factor, acc)
    i, j = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    inside = (i < tl.where(turn, m, 0))[:, None] & (j < n)[None, :]
    tl.store(c + i.to(tl.int64)[:, None] * c_row + j[None, :], acc, mask=inside)


@triton.jit
def _exact_product_kernel(  # type: ignore[no-untyped-def]
    a, b, a_shares, b_shares, c, m, n, k, a_row, a_column, b_row, b_column, c_row, one,
    A_ALONG: tl.constexpr, B_ALONG: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tiles = row_tiles * column_tiles
    tiles = tl.where(_certified(a_shares, b_shares, A_ALONG, B_ALONG, WHOLE), 0, tiles)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row_tile, column_tile = _place(tile, row_tiles, column_tiles, GROUP_M)
        i = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        j = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        i_far, j_far = i.to(tl.int64), j.to(tl.int64)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, k, BLOCK_K):
            s = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
            a_places = i_far[:, None] * a_row + s[None, :] * a_column
            b_places = s[:, None] * b_row + j_far[None, :] * b_column
            left = tl.load(a + a_places, mask=(i < m)[:, None] & (s < k)[None, :], other=0.0)
            right = tl.load(b + b_places, mask=(s < k)[:, None] & (j < n)[None, :], other=0.0)
            # `one` keeps the compiler from folding the addition into the product: accumulate.py.
            acc = tl.fma(tl.dot(left, right, input_precision="ieee"), one, acc)
        inside = (i < m)[:, None] & (j < n)[None, :]
        tl.store(c + i_far[:, None] * c_row + j[None, :], acc, mask=inside)


def split_product(
    a: Split, b: Split, *, transpose_a: bool = False, transpose_b: bool = False
) -> Tensor:
    """op(a) op(b), fp32 (m, n), by tensor cores, or exactly where the parts are not certified.

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
    with current_device(c):
        _launch_fast(a, b, c, left.shape[1], transpose_a, transpose_b)
        _launch_exact(left, right, c, a.shares, b.shares, transpose_a, transpose_b)
    return c


def split_pays(m: int, n: int, k: int) -> bool:
    """Whether splitting both factors of an (m, k) by (k, n) product costs less than it saves."""
    return min(m, n) >= LEAST_OUTER and k >= LEAST_INNER and m * n * k >= LEAST_WORK


def split_mm(a: Tensor, b: Tensor) -> Tensor:
    """A B (m, n) of fp32 A (m, k) and B (k, n), split here; torch's own product where small.

    A factor stored transposed is taken as it lies; other strides are copied.

    Raises:
        ValueError: a factor that is not a float32 matrix, or sizes and devices that do not fit.
    """
    if not split_pays(a.shape[0], b.shape[1], a.shape[1]):
        return torch.mm(a, b)
    turned_a, turned_b = (t.stride(0) == 1 and t.stride(1) != 1 for t in (a, b))
    left, right = split(a.mT if turned_a else a), split(b.mT if turned_b else b)
    return split_product(left, right, transpose_a=turned_a, transpose_b=turned_b)


@torch.library.custom_op("fusedlib::split_mm", mutates_args=())
def split_mm_operator(a: Tensor, b: Tensor) -> Tensor:
    """`split_mm` as an operator, for torch.compile and whatever else watches operators."""
    return split_mm(a, b)


@split_mm_operator.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _parts(config: Config, parts: Tensor, block: tuple[int, int]) -> list[Any]:
    """High and low as the kernel takes them."""
    if not config.descriptors:
        return [parts[0], parts[1]]
    return [TensorDescriptor.from_tensor(part, list(block)) for part in parts]


def _launch_fast(a: Split, b: Split, c: Tensor, k: int, turned_a: bool, turned_b: bool) -> None:
    (m, n), config = c.shape, choose(c)
    if config.gluon:
        from fusedlib.kernels import split_hopper

        return split_hopper.launch(a, b, c, k, turned_a, turned_b)
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    a_factors, b_factors = a.factors.stride(), b.factors.stride()
    _split_product_kernel[(triton.cdiv(m, bm) * triton.cdiv(n, bn),)](
        *_parts(config, a.parts, (bk, bm) if turned_a else (bm, bk)),
        *_parts(config, b.parts, (bn, bk) if turned_b else (bk, bn)),
        a.factors, b.factors, a.shares, b.shares, c, m, n, k,
        a.parts.shape[2], b.parts.shape[2],
        a_factors[1 if turned_a else 0], a_factors[0 if turned_a else 1],
        b_factors[0 if turned_b else 1], b_factors[1 if turned_b else 0], c.stride(0),
        A_TURNED=turned_a, B_TURNED=turned_b, DESCRIPTORS=config.descriptors,
        TILE=TILE, WHOLE=WHOLE, **config.launch(),
    )  # fmt: skip


def _launch_exact(
    left: Tensor, right: Tensor, c: Tensor, a_shares: Tensor, b_shares: Tensor,
    turned_a: bool, turned_b: bool,
) -> None:  # fmt: skip
    (m, n), k = c.shape, left.shape[1]
    tiles = triton.cdiv(m, EXACT.block_m) * triton.cdiv(n, EXACT.block_n)
    _exact_product_kernel[(min(tiles, EXACT.waves * multiprocessors(c.device)),)](
        left, right, a_shares, b_shares, c, m, n, k, *left.stride(), *right.stride(), c.stride(0),
        1.0, A_ALONG=int(turned_a), B_ALONG=int(not turned_b), WHOLE=WHOLE, **EXACT.launch(),
    )  # fmt: skip
