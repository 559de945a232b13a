# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""The epilogue's two warps of `fusedlib.ops.mlp.hopper`, and the one that fetches for them.

They take a tile's product, rounded, out of shared memory, in parts of 32·64, and store

    forward     h and, if saved, gate and up
    backward    d_gate, d_up and, if wanted, h; gate and up come by TMA, some parts ahead

with 16 bytes a thread and 128 contiguous ones a row. The consumers are at the next tile by then.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fusedlib.ops.gluon_blocks import barrier, fetch, reinterpret
from fusedlib.ops.mlp import activation_kernels
from fusedlib.ops.mlp.hopper.schedule import count_units, unit_corner

activate, slope = gluon.jit(activation_kernels.activate.fn), gluon.jit(activation_kernels.slope.fn)

# Of a part in registers: two warps, 16 bytes a thread, 128 a row.
PART_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0]))


@gluon.jit
def _inside(row, column, tokens, inner):  # type: ignore[no-untyped-def]
    i = row + gl.arange(0, 32, gl.SliceLayout(1, PART_LAYOUT))
    j = column + gl.arange(0, 64, gl.SliceLayout(0, PART_LAYOUT))
    return i.to(gl.int64)[:, None], j[None, :], (i < tokens)[:, None] & (j < inner)[None, :]


@gluon.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + 2^(-x log2 e)) in four instructions: what exp and division add for subnormal numbers
    and the last bit is half of the epilogue's arithmetic.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 e;
        mul.ftz.f32 e, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 e, e;
        add.ftz.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 $0, e;
        }""",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _part_corner(row, column, group, part):  # type: ignore[no-untyped-def]
    """Row and column where a part of a group's 64 rows begins: two down, then 64 columns on."""
    return row + group * 64 + part % 2 * 32, column + part // 2 * 64


@gluon.jit
def _fwd_part(  # type: ignore[no-untyped-def]
    gate, up, h, gate_up, row, column, tokens, inner,
    ACTIVATION: gl.constexpr, SAVE: gl.constexpr,
):  # fmt: skip
    i, j, inside = _inside(row, column, tokens, inner)
    dtype: gl.constexpr = gate.dtype
    if SAVE:
        target = gate_up + i * (2 * inner) + j
        gl.store(target, gate, mask=inside)
        gl.store(target + inner, up, mask=inside)
    gate, up = gate.to(gl.float32), up.to(gl.float32)
    activated, _ = activate(gate, _sigmoid, ACTIVATION)
    gl.store(h + i * inner + j, (activated * up).to(dtype), mask=inside)


@gluon.jit
def _fwd_tile(  # type: ignore[no-untyped-def]
    h, gate_up, parts, ready, free, row, column, tokens, inner, turn,
    ACTIVATION: gl.constexpr, SAVE: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Of each group's parts the first half is gate, the other up."""
    gate_parts: gl.constexpr = 4 // PIECES
    for group in range(2):
        mbarrier.wait(ready.index(group), turn)
        for part in range(gate_parts):
            gate = parts.index(8 * group + part).load(PART_LAYOUT)
            up = parts.index(8 * group + gate_parts + part).load(PART_LAYOUT)
            i, j = _part_corner(row, column, group, part)
            _fwd_part(gate, up, h, gate_up, i, j, tokens, inner, ACTIVATION, SAVE)
        barrier()
        mbarrier.arrive(free.index(group))


@gluon.jit
def _bwd_part(  # type: ignore[no-untyped-def]
    dh, gate, up, d_gate_up, h, row, column, tokens, inner,
    ACTIVATION: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    i, j, inside = _inside(row, column, tokens, inner)
    dtype: gl.constexpr = dh.dtype
    dh, gate, up = dh.to(gl.float32), gate.to(gl.float32), up.to(gl.float32)
    activated, s = activate(gate, _sigmoid, ACTIVATION)
    if OUTPUT:
        gl.store(h + i * inner + j, (activated * up).to(dtype), mask=inside)
    target = d_gate_up + i * (2 * inner) + j
    gl.store(target + inner, (dh * activated).to(dtype), mask=inside)
    d_gate = dh * up * slope(gate, activated, s, ACTIVATION)
    gl.store(target, d_gate.to(dtype), mask=inside)


@gluon.jit
def _release_reads():  # type: ignore[no-untyped-def]
    """Both warps have what they loaded, and TMA may write over it.

    Loads are of another proxy than TMA's writes: without the fence a late one can find the next
    part there. (Triton puts it only where one warp does both.)
    """
    fence_async_shared()
    barrier()


@gluon.jit
def _load_gates(fetched, gates_ready, part, wanted):  # type: ignore[no-untyped-def]
    """gate and up of a tile's part, once they are there; anything where they are not wanted."""
    slot = part % 2
    mbarrier.wait(gates_ready.index(slot), part // 2 % 2, pred=wanted)
    return fetched.index(2 * slot).load(PART_LAYOUT), fetched.index(2 * slot + 1).load(PART_LAYOUT)


@gluon.jit
def _bwd_tile(  # type: ignore[no-untyped-def]
    d_gate_up, h, parts, ready, free, fetched, gates_ready, gates_free,
    row, column, tokens, inner, turn,
    ACTIVATION: gl.constexpr, OUTPUT: gl.constexpr, PIECES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    group_parts: gl.constexpr = 8 // PIECES
    if AHEAD:
        first = 0
        gate, up = _load_gates(fetched, gates_ready, first, True)
        _release_reads()
        mbarrier.arrive(gates_free.index(first))
    for part in range(2 * group_parts):
        group = part // group_parts
        if AHEAD:
            after, more = part + 1, part + 1 < 2 * group_parts
            next_gate, next_up = _load_gates(fetched, gates_ready, after, more)
        else:
            after, more = part, True
            gate, up = _load_gates(fetched, gates_ready, part, True)
        mbarrier.wait(ready.index(group), turn)
        dh = parts.index(8 * group + part % group_parts).load(PART_LAYOUT)
        _release_reads()
        mbarrier.arrive(gates_free.index(after % 2), pred=more)
        mbarrier.arrive(free.index(group), pred=part % group_parts == group_parts - 1)
        i, j = _part_corner(row, column, group, part % group_parts)
        _bwd_part(dh, gate, up, d_gate_up, h, i, j, tokens, inner, ACTIVATION, OUTPUT)
        if AHEAD:
            gate, up = next_gate, next_up


@gluon.jit
def _fetch_tile(  # type: ignore[no-untyped-def]
    gates, fetched, gates_ready, gates_free, row, column, inner, PIECES: gl.constexpr
):
    """gate and up of the parts that `_bwd_tile` takes, in its order."""
    group_parts: gl.constexpr = 8 // PIECES
    for part in range(2 * group_parts):
        slot = part % 2
        i, j = _part_corner(row, column, part // group_parts, part % group_parts)
        mbarrier.wait(gates_free.index(slot), part // 2 % 2 ^ 1)
        mbarrier.expect(gates_ready.index(slot), 2 * 32 * 64 * 2)
        # Past inner and past the last token nothing of it is stored.
        fetch(gates, [i, j], gates_ready.index(slot), fetched.index(2 * slot))
        fetch(gates, [i, inner + j], gates_ready.index(slot), fetched.index(2 * slot + 1))


@gluon.jit
def fetch_gates(  # type: ignore[no-untyped-def]
    gates, fetched, gates_ready, gates_free, tokens, inner,
    FORWARD: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Fetch gate and up for the backward's epilogue, up to two parts ahead of it."""
    if not FORWARD:
        for pieces in gl.static_range(1, 3):
            end = count_units(tokens, inner, FORWARD, pieces)
            for unit in range(gl.program_id(0), end, gl.num_programs(0)):
                row, column = unit_corner(unit, tokens, inner, FORWARD, pieces, GROUP_M)
                _fetch_tile(gates, fetched, gates_ready, gates_free, row, column, inner, pieces)


@gluon.jit
def epilogue(  # type: ignore[no-untyped-def]
    gate_up, h, products, ready, free, fetched, gates_ready, gates_free, tokens, inner,
    ACTIVATION: gl.constexpr, FORWARD: gl.constexpr, STORE: gl.constexpr, GROUP_M: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """All tiles of this program, for the forward or the backward."""
    parts = reinterpret(products, products.dtype, [16, 32, 64], products.layout)
    turn = 0
    for pieces in gl.static_range(1, 3):
        end = count_units(tokens, inner, FORWARD, pieces)
        for unit in range(gl.program_id(0), end, gl.num_programs(0)):
            row, column = unit_corner(unit, tokens, inner, FORWARD, pieces, GROUP_M)
            if FORWARD:
                _fwd_tile(
                    h, gate_up, parts, ready, free, row, column, tokens, inner, turn,
                    ACTIVATION, STORE, pieces,
                )  # fmt: skip
            else:
                _bwd_tile(
                    gate_up, h, parts, ready, free, fetched, gates_ready, gates_free, row, column,
                    tokens, inner, turn, ACTIVATION, STORE, pieces, AHEAD,
                )  # fmt: skip
            turn ^= 1
