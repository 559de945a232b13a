# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""What the epilogue's two warps do in `fusedlib.kernels.hopper`.

They take a tile's product, rounded, out of shared memory, in parts of 32·64, and store

    forward     h and, if saved, gate and up
    backward    d_gate, d_up and, if wanted, h, while gate and up of the next part are fetched

with 16 bytes a thread and 128 contiguous ones a row. The consumers are at the next tile by then.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.7 renamed it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Triton 3.8 renamed it.
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

# Of a part in registers: two warps, 16 bytes a thread, 128 a row.
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0]))


@gluon.jit
def place(tile, row_tiles, column_tiles, GROUP_M: gl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column tile of the tile-th, down GROUP_M rows before the next column, for the L2."""
    width = GROUP_M * column_tiles
    first = tile // width * GROUP_M
    height = gl.minimum(row_tiles - first, GROUP_M)
    return first + tile % width % height, tile % width // height


@gluon.jit
def _halved(tiles, TAIL: gl.constexpr):  # type: ignore[no-untyped-def]
    """How many tiles are left for a last round that would keep at most half of the programs: their
    left and right halves are computed apart.
    """
    left = tiles % gl.num_programs(0)
    return gl.where(2 * left <= gl.num_programs(0), left, 0) if TAIL else 0


@gluon.jit
def units(tokens, inner, FORWARD: gl.constexpr, PIECES: gl.constexpr, TAIL: gl.constexpr):  # type: ignore[no-untyped-def]
    """How many whole tiles there are, or how many halves."""
    tiles = gl.cdiv(tokens, 128) * gl.cdiv(inner, 128 if FORWARD else 256)
    halved = _halved(tiles, TAIL)
    return tiles - halved if PIECES == 1 else 2 * halved


@gluon.jit
def corner(unit, tokens, inner, FORWARD: gl.constexpr, PIECES: gl.constexpr, GROUP_M: gl.constexpr):  # type: ignore[no-untyped-def]
    """First row and first column of h, or of dh, of a tile or of half of one."""
    width: gl.constexpr = 128 if FORWARD else 256
    row_tiles, column_tiles = gl.cdiv(tokens, 128), gl.cdiv(inner, width)
    tiles = row_tiles * column_tiles
    whole = 0 if PIECES == 1 else tiles - _halved(tiles, True)
    row_tile, column_tile = place(whole + unit // PIECES, row_tiles, column_tiles, GROUP_M)
    return row_tile * 128, column_tile * width + unit % PIECES * (width // PIECES)


@gluon.jit
def _inside(row, column, tokens, inner, ROWS: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    i = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    j = column + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    return i.to(gl.int64)[:, None], j[None, :], (i < tokens)[:, None] & (j < inner)[None, :]


@gluon.jit
def _fwd_part(  # type: ignore[no-untyped-def]
    saved_gate, saved_up, h, gate_up, row, column, tokens, inner,
    SAVE: gl.constexpr, CACHE: gl.constexpr,
):  # fmt: skip
    i, j, inside = _inside(row, column, tokens, inner, saved_gate.shape[0], LAYOUT)
    if SAVE:
        target = gate_up + i * (2 * inner) + j
        gl.store(target, saved_gate, mask=inside, cache_modifier=CACHE)
        gl.store(target + inner, saved_up, mask=inside, cache_modifier=CACHE)
    gate, up = saved_gate.to(gl.float32), saved_up.to(gl.float32)
    activated = gate / (1.0 + gl.exp(-gate)) * up
    gl.store(h + i * inner + j, activated.to(saved_gate.dtype), mask=inside)


@gluon.jit
def _take(parts, done, free, group, turn):  # type: ignore[no-untyped-def]
    """Two parts of gate and of up, out of shared memory: the consumers may hand over the next."""
    mbarrier.wait(done.index(group), turn)
    gate, gate_below = parts.index(4 * group).load(LAYOUT), parts.index(4 * group + 1).load(LAYOUT)
    up, up_below = parts.index(4 * group + 2).load(LAYOUT), parts.index(4 * group + 3).load(LAYOUT)
    barrier()
    mbarrier.arrive(free.index(group))
    return gate, gate_below, up, up_below


@gluon.jit
def _fwd_tiles(  # type: ignore[no-untyped-def]
    h, gate_up, handed, done, free, tokens, inner, turn, SAVE: gl.constexpr,
    GROUP_M: gl.constexpr, PIECES: gl.constexpr, TURNS: gl.constexpr, CACHE: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    parts = handed._reinterpret(handed.dtype, [16 // TURNS, 32, 64], handed.layout)
    for unit in range(
        gl.program_id(0), units(tokens, inner, True, PIECES, TAIL), gl.num_programs(0)
    ):
        row, column = corner(unit, tokens, inner, True, PIECES, GROUP_M)
        if TURNS == 2:
            for one in range(4 // PIECES):
                half, group = one // 2, one % 2
                gate, gate_below, up, up_below = _take(parts, done, free, group, turn ^ half)
                i, j = row + group * 64, column + half * 64
                _fwd_part(gate, up, h, gate_up, i, j, tokens, inner, SAVE, CACHE)
                _fwd_part(gate_below, up_below, h, gate_up, i + 32, j, tokens, inner, SAVE, CACHE)
        else:
            for group in range(2):
                mbarrier.wait(done.index(group), turn)
                for part in range(4 // PIECES):
                    gate = parts.index(8 * group + part).load(LAYOUT)
                    up = parts.index(8 * group + 4 // PIECES + part).load(LAYOUT)
                    _fwd_part(
                        gate, up, h, gate_up, row + group * 64 + part % 2 * 32,
                        column + part // 2 * 64, tokens, inner, SAVE, CACHE,
                    )  # fmt: skip
                barrier()
                mbarrier.arrive(free.index(group))
            turn ^= 1
    return turn


@gluon.jit
def _fwd_epilogue(  # type: ignore[no-untyped-def]
    h, gate_up, handed, done, free, tokens, inner, SAVE: gl.constexpr,
    GROUP_M: gl.constexpr, TURNS: gl.constexpr, CACHE: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    turn = 0
    turn = _fwd_tiles(
        h, gate_up, handed, done, free, tokens, inner, turn, SAVE, GROUP_M, 1, TURNS, CACHE, TAIL
    )
    _fwd_tiles(
        h, gate_up, handed, done, free, tokens, inner, turn, SAVE, GROUP_M, 2, TURNS, CACHE, TAIL
    )


@gluon.jit
def _bwd_part(  # type: ignore[no-untyped-def]
    dh, gate, up, d_gate_up, h, row, column, tokens, inner,
    OUTPUT: gl.constexpr, CACHE: gl.constexpr,
):  # fmt: skip
    i, j, inside = _inside(row, column, tokens, inner, 32, LAYOUT)
    dtype: gl.constexpr = dh.dtype
    dh, gate, up = dh.to(gl.float32), gate.to(gl.float32), up.to(gl.float32)
    s = 1.0 / (1.0 + gl.exp(-gate))
    silu = gate * s
    if OUTPUT:
        gl.store(h + i * inner + j, (silu * up).to(dtype), mask=inside, cache_modifier=CACHE)
    target = d_gate_up + i * (2 * inner) + j
    gl.store(target + inner, (dh * silu).to(dtype), mask=inside, cache_modifier=CACHE)
    d_gate = dh * up * (s + silu * (1.0 - s))
    gl.store(target, d_gate.to(dtype), mask=inside, cache_modifier=CACHE)


@gluon.jit
def _fetch_part(  # type: ignore[no-untyped-def]
    gate_up, fetched, arrived, part, row, column, inner, wanted, PARTS: gl.constexpr
):
    """Ask for gate and up of a tile's part; past inner and past the last token it is not used."""
    i, j = row + part // PARTS * 64 + part % 2 * 32, column + part % PARTS // 2 * 64
    slot = part % 2
    mbarrier.expect(arrived.index(slot), 2 * 32 * 64 * 2, pred=wanted)
    fetch(gate_up, [i, j], arrived.index(slot), fetched.index(2 * slot), pred=wanted)
    fetch(gate_up, [i, inner + j], arrived.index(slot), fetched.index(2 * slot + 1), pred=wanted)


@gluon.jit
def _bwd_tiles(  # type: ignore[no-untyped-def]
    gates, d_gate_up, h, handed, done, free, fetched, arrived, tokens, inner, turn,
    OUTPUT: gl.constexpr, GROUP_M: gl.constexpr, PIECES: gl.constexpr, CACHE: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    group_parts: gl.constexpr = 8 // PIECES
    parts = handed._reinterpret(handed.dtype, [16, 32, 64], handed.layout)
    first, end, step = (
        gl.program_id(0),
        units(tokens, inner, False, PIECES, TAIL),
        gl.num_programs(0),
    )
    row, column = corner(first, tokens, inner, False, PIECES, GROUP_M)
    for early in gl.static_range(2):
        _fetch_part(gates, fetched, arrived, early, row, column, inner, first < end, group_parts)
    for unit in range(first, end, step):
        after = unit + step
        next_row, next_column = corner(after, tokens, inner, False, PIECES, GROUP_M)
        for part in range(2 * group_parts):
            group, slot = part // group_parts, part % 2
            mbarrier.wait(done.index(group), turn)
            mbarrier.wait(arrived.index(slot), part // 2 % 2)
            dh = parts.index(group * 8 + part % group_parts).load(LAYOUT)
            gate = fetched.index(2 * slot).load(LAYOUT)
            up = fetched.index(2 * slot + 1).load(LAYOUT)
            barrier()
            mbarrier.arrive(free.index(group), pred=part % group_parts == group_parts - 1)
            here = part < 2 * group_parts - 2
            _fetch_part(
                gates, fetched, arrived, (part + 2) % (2 * group_parts),
                gl.where(here, row, next_row), gl.where(here, column, next_column), inner,
                here | (after < end), group_parts,
            )  # fmt: skip
            _bwd_part(
                dh, gate, up, d_gate_up, h, row + group * 64 + part % 2 * 32,
                column + part % group_parts // 2 * 64, tokens, inner, OUTPUT, CACHE,
            )  # fmt: skip
        row, column = next_row, next_column
        turn ^= 1
    return turn


@gluon.jit
def _bwd_epilogue(  # type: ignore[no-untyped-def]
    gates, d_gate_up, h, handed, done, free, fetched, arrived, tokens, inner,
    OUTPUT: gl.constexpr, GROUP_M: gl.constexpr, CACHE: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    turn = 0
    turn = _bwd_tiles(
        gates, d_gate_up, h, handed, done, free, fetched, arrived, tokens, inner, turn,
        OUTPUT, GROUP_M, 1, CACHE, TAIL,
    )  # fmt: skip
    _bwd_tiles(
        gates, d_gate_up, h, handed, done, free, fetched, arrived, tokens, inner, turn,
        OUTPUT, GROUP_M, 2, CACHE, TAIL,
    )  # fmt: skip


@gluon.jit
def epilogue(  # type: ignore[no-untyped-def]
    gates, gate_up, h, handed, done, free, fetched, arrived, tokens, inner,
    FORWARD: gl.constexpr, STORE: gl.constexpr, GROUP_M: gl.constexpr, TURNS: gl.constexpr,
    CACHE: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """All tiles of this program, for the forward or the backward."""
    if FORWARD:
        _fwd_epilogue(
            h, gate_up, handed, done, free, tokens, inner, STORE, GROUP_M, TURNS, CACHE, TAIL
        )
    else:
        _bwd_epilogue(
            gates, gate_up, h, handed, done, free, fetched, arrived, tokens, inner,
            STORE, GROUP_M, CACHE, TAIL,
        )  # fmt: skip
