# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""Blocks of matrices in kernels: read, written, in which order programs take them, and how products
of few tokens are cut.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from fusedlib.launch import INTERPRETED, Config, architecture, cdiv
from fusedlib.ops.arguments import FEW_TOKENS

# Small enough that a test's shape has several tiles each way, in Triton's interpreter.
INTERPRETER = Config(32, 32, 32, 4, 1, group_m=2)


@triton.jit
def load_block(  # type: ignore[no-untyped-def]
    source, row, column, rows, columns, row_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """[HEIGHT, WIDTH] at (row, column) of a (rows, columns) matrix, zeros outside."""
    i = row + tl.arange(0, HEIGHT)
    j = column + tl.arange(0, WIDTH)
    # Offsets in 64 bits: a matrix may have more than 2³¹ elements.
    offsets = i.to(tl.int64)[:, None] * row_stride + j[None, :]
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(source + offsets, mask=inside, other=0.0)


@triton.jit
def store_block(  # type: ignore[no-untyped-def]
    target, block, row, column, rows, columns, row_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the part of a block that lies inside (rows, columns); columns are contiguous."""
    i = row + tl.arange(0, HEIGHT)
    j = column + tl.arange(0, WIDTH)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    offsets = i.to(tl.int64)[:, None] * row_stride + j[None, :]
    tl.store(target + offsets, block.to(target.dtype.element_ty), mask=inside)


@triton.jit
def tile_position(tile, row_tiles, column_tiles, GROUP_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column tile of the tile-th, down GROUP_M rows before the next column, for the L2."""
    width = GROUP_M * column_tiles
    first = tile // width * GROUP_M
    height = tl.minimum(row_tiles - first, GROUP_M)
    return first + tile % width % height, tile % width // height


@triton.jit
def outer_product(  # type: ignore[no-untyped-def]
    a, b, c, tile, tokens, rows, columns,
    TOKENS: tl.constexpr, SIDE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The tile-th [SIDE, SPAN·SIDE] of c (rows, columns) = aᵀ b, summed over tokens, ≤ TOKENS."""
    spans = tl.cdiv(columns, SIDE * SPAN)
    row, first = tile // spans * SIDE, tile % spans * SPAN * SIDE
    left = load_block(a, 0, row, tokens, rows, rows, TOKENS, SIDE).T
    # The next block of b is on its way while this one's product is stored.
    for column in tl.range(first, tl.minimum(first + SPAN * SIDE, columns), SIDE, num_stages=2):
        right = load_block(b, 0, column, tokens, columns, columns, TOKENS, SIDE)
        acc = tl.dot(left, right)
        store_block(c, acc, row, column, rows, columns, columns, SIDE, SIDE)


# --- how products of few tokens are cut ----------------------------------------------------------

# An H200 reads weights fastest with a program a multiprocessor, all its shared memory in flight: by
# the smallest tile of which there are no more than so many.
ONE_WAVE = 132
# Of d_x, from small to large. A ring of 9 holds no more than one of 4 twice as deep, and two
# programs still fit. One H200, in a graph with a cold L2, all gradients of an MLP of 64 tokens by
# one launch and by cuBLAS, at 512, 2048, 4096, 8192 and 16384: 7.9, 23.0, 60.0, 198, 737 µs and
# 14.6, 28.2, 69.9, 205, 734 µs.
D_X_CONFIGS = {90: (Config(64, 32, 64, 4, 9), Config(64, 64, 64, 4, 6), Config(128, 64, 64, 8, 5))}
# Elsewhere, of any product: shared memory of an RTX 4090.
DEFAULT_CONFIGS = (Config(FEW_TOKENS, 32, 64, 4, 4),)
# Sides of the tiles of a weight's gradient. 128² would spill the registers of a B200.
GRADIENT_SIDE, DEFAULT_GRADIENT_SIDE = {90: 128}, 64
MANY_TILES = 8192


def gradient_tiles(
    device: torch.device, tokens: int, rows: int, columns: int
) -> tuple[Config, dict[str, int]]:
    """How one launch for d_x (tokens, columns) and the gradients of weights, of so many rows in
    all, is cut: the tile of d_x, and the constants of `outer_product`.

    Several tiles of a weight's gradient that a program writes one after the other share a block of
    its upstream and hide their loads, as long as there are programs enough: at 4096 one, two, four
    and eight take 69.8, 62.8, 63.3 and 71.1 µs, at 512 one takes 7.9 and two 8.9, at 8192 two and
    four 225 and 216 (H200).
    """
    depth = max(FEW_TOKENS, 1 << (tokens - 1).bit_length())  # a block of all tokens
    programs = ONE_WAVE if depth <= 128 else ONE_WAVE // 2  # which leaves room for the weights'
    config = few_tokens_config(D_X_CONFIGS, device, depth, columns, programs=programs)
    if INTERPRETED:
        return config, {"SIDE": config.block_n, "SPAN": 2, "TOKENS": depth}
    side = GRADIENT_SIDE.get(architecture(device), DEFAULT_GRADIENT_SIDE)
    tiles = cdiv(rows, side) * cdiv(columns, side)
    span = 1 if tiles <= ONE_WAVE else 2 if tiles <= MANY_TILES else 4
    return config, {"SIDE": side, "SPAN": span, "TOKENS": depth}


def few_tokens_config(
    table: Mapping[int, tuple[Config, ...]], device: torch.device, tokens: int, *widths: int,
    programs: int = ONE_WAVE,
) -> Config:  # fmt: skip
    """The table's smallest tile that runs at once over (tokens, width) of each width."""
    if INTERPRETED:
        return INTERPRETER
    configs = table.get(architecture(device), DEFAULT_CONFIGS)
    return smallest_config(configs, tokens, *widths, programs=programs)


def smallest_config(
    configs: tuple[Config, ...], tokens: int, *widths: int, programs: int = ONE_WAVE
) -> Config:
    """The smallest that cuts (tokens, width) into at most so many tiles; else the largest.

    None is larger than 64 columns of all tokens: a wide weight is read faster by more programs.
    """
    usable = [c for c in configs if c.block_m * c.block_n < 64 * (tokens + 64)]
    return next((c for c in usable if count_tiles(c, tokens, *widths) <= programs), usable[-1])


def count_tiles(config: Config, tokens: int, *widths: int) -> int:
    """How many tiles cover (tokens, width) of each of the widths."""
    return cdiv(tokens, config.block_m) * sum(cdiv(width, config.block_n) for width in widths)
