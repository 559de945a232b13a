# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""Which tile a program of `fusedlib.ops.mlp.hopper` is at: the same for each of its roles.

Whole tiles go round all programs. What would be left for a last round that occupies at most half of
them is cut in halves, one a program, so that the round takes half as long.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fusedlib.ops.gluon_blocks import tile_position


@gluon.jit
def _count(tokens, inner, FORWARD: gl.constexpr):  # type: ignore[no-untyped-def]
    """Tiles in all, and how many of them are cut."""
    tiles = gl.cdiv(tokens, 128) * gl.cdiv(inner, 128 if FORWARD else 256)
    left = tiles % gl.num_programs(0)
    return tiles, gl.where(2 * left <= gl.num_programs(0), left, 0)


@gluon.jit
def count_units(tokens, inner, FORWARD: gl.constexpr, PIECES: gl.constexpr):  # type: ignore[no-untyped-def]
    """How many whole tiles there are (PIECES is 1), or how many halves (2)."""
    tiles, cut = _count(tokens, inner, FORWARD)
    return tiles - cut if PIECES == 1 else 2 * cut


@gluon.jit
def unit_corner(  # type: ignore[no-untyped-def]
    unit, tokens, inner, FORWARD: gl.constexpr, PIECES: gl.constexpr, GROUP_M: gl.constexpr
):
    """First row and first column, in h or dh, of a whole tile or of half of one."""
    width: gl.constexpr = 128 if FORWARD else 256
    row_tiles, column_tiles = gl.cdiv(tokens, 128), gl.cdiv(inner, width)
    tile = unit
    if PIECES == 2:
        tiles, cut = _count(tokens, inner, FORWARD)
        tile = tiles - cut + unit // 2
    row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, GROUP_M)
    return row_tile * 128, column_tile * width + unit % PIECES * (width // PIECES)
