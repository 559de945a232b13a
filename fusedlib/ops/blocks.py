# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""Blocks of matrices in kernels: read, written, and in which order programs take them."""

import triton
import triton.language as tl


@triton.jit
def load_block(  # type: ignore[no-untyped-def]
    source, row, column, rows, columns, row_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """[HEIGHT, WIDTH] at (row, column) of a (rows, columns) matrix, zeros outside."""
    if DESCRIPTORS:
        block = source.load([row, column])
    else:
        i = row + tl.arange(0, HEIGHT)
        j = column + tl.arange(0, WIDTH)
        # Offsets in 64 bits: a matrix may have more than 2³¹ elements.
        offsets = i.to(tl.int64)[:, None] * row_stride + j[None, :]
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        block = tl.load(source + offsets, mask=inside, other=0.0)
    return block


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
