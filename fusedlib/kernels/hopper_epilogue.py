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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Triton 3.7 renamed it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def place(tile, row_tiles, column_tiles, GROUP_M: gl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column tile of the tile-th, down GROUP_M rows before the next column, for the L2."""
    width = GROUP_M * column_tiles
    first = tile // width * GROUP_M
    height = gl.minimum(row_tiles - first, GROUP_M)
    return first + tile % width % height, tile % width // height


@gluon.jit
def _inside(row, column, tokens, inner, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    i = row + gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    j = column + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    return i.to(gl.int64)[:, None], j[None, :], (i < tokens)[:, None] & (j < inner)[None, :]


@gluon.jit
def _fwd_part(  # type: ignore[no-untyped-def]
    gates, ups, h, gate_up, row, column, tokens, inner, SAVE: gl.constexpr
):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    i, j, inside = _inside(row, column, tokens, inner, layout)
    saved_gate, saved_up = gates.load(layout), ups.load(layout)
    if SAVE:
        target = gate_up + i * (2 * inner) + j
        gl.store(target, saved_gate, mask=inside)
        gl.store(target + inner, saved_up, mask=inside)
    gate, up = saved_gate.to(gl.float32), saved_up.to(gl.float32)
    activated = gate / (1.0 + gl.exp(-gate)) * up
    gl.store(h + i * inner + j, activated.to(saved_gate.dtype), mask=inside)


@gluon.jit
def _fwd_epilogue(  # type: ignore[no-untyped-def]
    h, gate_up, handed, done, free, tokens, inner, SAVE: gl.constexpr, GROUP_M: gl.constexpr
):
    row_tiles, column_tiles = gl.cdiv(tokens, 128), gl.cdiv(inner, 128)
    parts = handed._reinterpret(handed.dtype, [16, 32, 64], handed.layout)
    turn = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place(tile, row_tiles, column_tiles, GROUP_M)
        for group in range(2):
            row, column = row_tile * 128 + group * 64, column_tile * 128
            mbarrier.wait(done.index(group), turn)
            for part in range(4):
                _fwd_part(
                    parts.index(8 * group + part), parts.index(8 * group + 4 + part), h, gate_up,
                    row + part % 2 * 32, column + part // 2 * 64, tokens, inner, SAVE,
                )  # fmt: skip
            barrier()
            mbarrier.arrive(free.index(group))
        turn ^= 1


@gluon.jit
def _bwd_part(  # type: ignore[no-untyped-def]
    dh, gate, up, d_gate_up, h, row, column, tokens, inner, OUTPUT: gl.constexpr
):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    i, j, inside = _inside(row, column, tokens, inner, layout)
    dtype: gl.constexpr = dh.dtype
    dh, gate, up = dh.to(gl.float32), gate.to(gl.float32), up.to(gl.float32)
    s = 1.0 / (1.0 + gl.exp(-gate))
    silu = gate * s
    if OUTPUT:
        gl.store(h + i * inner + j, (silu * up).to(dtype), mask=inside)
    target = d_gate_up + i * (2 * inner) + j
    gl.store(target + inner, (dh * silu).to(dtype), mask=inside)
    gl.store(target, (dh * up * (s + silu * (1.0 - s))).to(dtype), mask=inside)


@gluon.jit
def _read(source, row, column, tokens, inner):  # type: ignore[no-untyped-def]
    """Part of gate and of up."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    i, j, inside = _inside(row, column, tokens, inner, layout)
    gate = source + i * (2 * inner) + j
    return gl.load(gate, mask=inside, other=0.0), gl.load(gate + inner, mask=inside, other=0.0)


@gluon.jit
def _bwd_epilogue(  # type: ignore[no-untyped-def]
    gate_up, d_gate_up, h, handed, done, free, tokens, inner,
    OUTPUT: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    row_tiles, column_tiles = gl.cdiv(tokens, 128), gl.cdiv(inner, 256)
    parts = handed._reinterpret(handed.dtype, [16, 32, 64], handed.layout)
    turn = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place(tile, row_tiles, column_tiles, GROUP_M)
        for group in range(2):
            row, column = row_tile * 128 + group * 64, column_tile * 256
            gate, up = _read(gate_up, row, column, tokens, inner)
            mbarrier.wait(done.index(group), turn)
            for part in range(8):
                dh = parts.index(8 * group + part).load(layout)
                after = part + 1
                next_gate, next_up = _read(
                    gate_up, row + after % 2 * 32, column + after // 2 * 64,
                    gl.where(part < 7, tokens, 0), inner,
                )  # fmt: skip
                _bwd_part(
                    dh, gate, up, d_gate_up, h,
                    row + part % 2 * 32, column + part // 2 * 64, tokens, inner, OUTPUT,
                )  # fmt: skip
                gate, up = next_gate, next_up
            barrier()
            mbarrier.arrive(free.index(group))
        turn ^= 1


@gluon.jit
def epilogue(  # type: ignore[no-untyped-def]
    gate_up, d_gate_up, h, handed, done, free, tokens, inner,
    FORWARD: gl.constexpr, STORE: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """All tiles of this program, for the forward or the backward."""
    if FORWARD:
        _fwd_epilogue(h, gate_up, handed, done, free, tokens, inner, STORE, GROUP_M)
    else:
        _bwd_epilogue(gate_up, d_gate_up, h, handed, done, free, tokens, inner, STORE, GROUP_M)
