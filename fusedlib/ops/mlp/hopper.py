# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""Both fused kernels of the SwiGLU MLP for Hopper: warps with fixed roles, in Gluon.

| warps | role     | what it does                                                              |
|-------|----------|---------------------------------------------------------------------------|
| 1     | producer | fetches blocks of both factors by TMA into a ring of `STAGES` buffers     |
| 2 · 4 | consumer | 64 rows each of a 128·256 product by wgmma, 128 accumulators a thread;    |
|       |          | rounds them and leaves them in shared memory                              |
| 2     | epilogue | takes them from there, in parts of 32·64, 16 bytes a thread: activation,  |
|       |          | and everything that memory wants, while the consumers are at the next tile|
| 1     | fetcher  | in the backward: gate and up for the epilogue, by TMA                     |

A tile of 256 columns is 128 of gate beside 128 of up in the forward, 256 of dh in the backward.
gate and up, or dh, are thus rounded to their dtype before the activation, as in unfused code. Whole
tiles go round all programs; what would be left for a last round that occupies at most half of them
is cut in halves, one a program, so that the round takes half as long.

Equations and tensors as in `fusedlib.ops.mlp.kernels`, for large even sizes in half precision:
`route` has the table. Importing it fails where Triton's Gluon, which is experimental, is another
than that of 3.6 and 3.7.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fusedlib.launch import HopperLaunch, multiprocessors, with_roles
from fusedlib.ops.gluon_blocks import barrier, fetch, reinterpret, tile_position
from fusedlib.ops.mlp import kernels

activate, slope = gluon.jit(kernels.activate.fn), gluon.jit(kernels.slope.fn)

# Of a part in registers: two warps, 16 bytes a thread, 128 a row.
PART_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0]))
# Three warpgroups share 504 registers a thread: consumers need 154; the epilogue with 168 spilled
# 48 bytes. Groups of 16 instead of 8 gain up to 1.4 % of the forward, nothing in the backward.
FORWARD = with_roles(160, 184, group_m=16)
BACKWARD = with_roles(160, 184)
# The backward's epilogue takes gate and up out of shared memory a part ahead: a gain of 2.5 % at a
# hidden size of 2048, a loss of up to 1 % from 4096 on. With other activations it spills.
MAX_HIDDEN_TO_PREFETCH = 2048


# --- which tile a program is at ------------------------------------------------------------------


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


# --- the epilogue, and who fetches for it --------------------------------------------------------


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


# --- the products --------------------------------------------------------------------------------


@gluon.jit
def _produce_block(  # type: ignore[no-untyped-def]
    a, b, c, left, right, arrived, row, column, k, up_row,
    FORWARD: gl.constexpr, PIECES: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Blocks of both factors, as wide as a whole tile needs or half of one."""
    columns: gl.constexpr = 256 // PIECES
    mbarrier.expect(arrived, (128 + columns) * BLOCK_K * 2)
    fetch(a, [row, k], arrived, left)
    for part in gl.static_range(2 // PIECES):
        if FORWARD:
            # Rows past inner are zeros, or up's in a packed weight: nothing of them is stored.
            j = column + part * 64
            fetch(b, [j, k], arrived, right.slice(part * 64, 64))
            fetch(c, [up_row + j, k], arrived, right.slice(columns // 2 + part * 64, 64))
        else:
            fetch(b, [k, column + part * 128], arrived, right.slice(part * 128, 128, 1))


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    a, b, c, a_ring, b_ring, full, empty, tokens, hidden, inner, up_row,
    FORWARD: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    stage, phase = 0, 1
    for pieces in gl.static_range(1, 3):
        end = count_units(tokens, inner, FORWARD, pieces)
        for unit in range(gl.program_id(0), end, gl.num_programs(0)):
            row, column = unit_corner(unit, tokens, inner, FORWARD, pieces, GROUP_M)
            for k in range(0, hidden, BLOCK_K):
                mbarrier.wait(empty.index(stage), phase)
                _produce_block(
                    a, b, c, a_ring.index(stage), b_ring.index(stage), full.index(stage),
                    row, column, k, up_row, FORWARD, pieces, BLOCK_K,
                )  # fmt: skip
                stage += 1
                if stage == STAGES:
                    stage, phase = 0, phase ^ 1


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    a_ring, b_ring, full, empty, hidden, stage, phase, FORWARD: gl.constexpr,
    PIECES: gl.constexpr, GROUP: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A group's 64 rows of a tile's product, [64, 256 // PIECES]."""
    columns: gl.constexpr = 256 // PIECES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    acc = gl.zeros([64, columns], gl.float32, layout)
    for k in range(0, hidden, BLOCK_K):
        mbarrier.wait(full.index(stage), phase)
        left = a_ring.index(stage).slice(GROUP * 64, 64)
        if FORWARD:
            right = b_ring.index(stage).slice(0, columns).permute((1, 0))
        else:
            right = b_ring.index(stage).slice(0, columns, 1)
        acc = warpgroup_mma(left, right, acc, is_async=True)
        # One product stays in flight; the one before it has read its blocks. (A variable that names
        # the last stage is not carried around the loop by Triton 3.6.)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), pred=k > 0)
        stage += 1
        if stage == STAGES:
            stage, phase = 0, phase ^ 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES))
    return acc, stage, phase


@gluon.jit
def _left_and_right(block, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """Left and right half of a [HEIGHT, WIDTH] block, in its threads' own registers."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH // 2, 16])
    left, right = block.reshape([HEIGHT, 2, WIDTH // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def _store_product(acc, products, GROUP: gl.constexpr, PIECES: gl.constexpr):  # type: ignore[no-untyped-def]
    """In chunks of 64 columns."""
    dtype: gl.constexpr = products.dtype
    left, right = _left_and_right(acc, 64, 256 // PIECES)
    if PIECES == 2:
        products.index(4 * GROUP).store(left.to(dtype))
        products.index(4 * GROUP + 1).store(right.to(dtype))
    else:
        chunk_0, chunk_1 = _left_and_right(left, 64, 128)
        chunk_2, chunk_3 = _left_and_right(right, 64, 128)
        products.index(4 * GROUP).store(chunk_0.to(dtype))
        products.index(4 * GROUP + 1).store(chunk_1.to(dtype))
        products.index(4 * GROUP + 2).store(chunk_2.to(dtype))
        products.index(4 * GROUP + 3).store(chunk_3.to(dtype))


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    a_ring, b_ring, full, empty, products, ready, free, tokens, hidden, inner,
    FORWARD: gl.constexpr, GROUP: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    stage, phase, turn = 0, 0, 1
    for pieces in gl.static_range(1, 3):
        end = count_units(tokens, inner, FORWARD, pieces)
        for _ in range(gl.program_id(0), end, gl.num_programs(0)):
            acc, stage, phase = _multiply(
                a_ring,
                b_ring,
                full,
                empty,
                hidden,
                stage,
                phase,
                FORWARD,
                pieces,
                GROUP,
                BLOCK_K,
                STAGES,
            )
            mbarrier.wait(free.index(GROUP), turn)
            _store_product(acc, products, GROUP, pieces)
            barrier()
            mbarrier.arrive(ready.index(GROUP))
            turn ^= 1


@gluon.jit
def _allocate_shared(  # type: ignore[no-untyped-def]
    a, b, FORWARD: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr
):
    """The rings of both factors, what is handed over, and the barriers of each."""
    dtype: gl.constexpr = a.dtype
    b_shape: gl.constexpr = [STAGES, 256, BLOCK_K] if FORWARD else [STAGES, BLOCK_K, 256]
    chunk: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    a_ring = gl.allocate_shared_memory(dtype, [STAGES, 128, BLOCK_K], a.layout)
    b_ring = gl.allocate_shared_memory(dtype, b_shape, b.layout)
    products = gl.allocate_shared_memory(dtype, [8, 64, 64], chunk)
    # Two parts of gate and of up; the forward has no use for them.
    fetched = gl.allocate_shared_memory(dtype, [1 if FORWARD else 4, 32, 64], chunk)
    gates_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    gates_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    for group in gl.static_range(2):
        mbarrier.init(ready.index(group), count=1)
        mbarrier.init(free.index(group), count=1)
        mbarrier.init(gates_ready.index(group), count=1)
        mbarrier.init(gates_free.index(group), count=1)
    return a_ring, b_ring, products, full, empty, ready, free, fetched, gates_ready, gates_free


@gluon.jit(do_not_specialize=("tokens", "up_row"))
def _hopper_swiglu_kernel(  # type: ignore[no-untyped-def]
    a, b, c, gate_up, h, tokens, hidden, inner, up_row,
    ACTIVATION: gl.constexpr, FORWARD: gl.constexpr, STORE: gl.constexpr, AHEAD: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Forward: x, w_gate, w_up to h and, with STORE, gate_up; up begins at row `up_row` of w_up.
    Backward: dy, w_down, gate_up to d_gate_up and, with STORE, h.
    """
    a_ring, b_ring, products, full, empty, ready, free, fetched, gates_ready, gates_free = (
        _allocate_shared(a, b, FORWARD, BLOCK_K, STAGES)
    )
    gl.warp_specialize(
        [
            (_consume, (a_ring, b_ring, full, empty, products, ready, free, tokens, hidden, inner,
                        FORWARD, 0, BLOCK_K, STAGES)),
            (_consume, (a_ring, b_ring, full, empty, products, ready, free, tokens, hidden, inner,
                        FORWARD, 1, BLOCK_K, STAGES)),
            (epilogue, (gate_up, h, products, ready, free, fetched, gates_ready, gates_free,
                        tokens, inner, ACTIVATION, FORWARD, STORE, GROUP_M, AHEAD)),
            (_produce, (a, b, c, a_ring, b_ring, full, empty, tokens, hidden, inner, up_row,
                        FORWARD, BLOCK_K, STAGES, GROUP_M)),
            (fetch_gates, (c, fetched, gates_ready, gates_free, tokens, inner, FORWARD, GROUP_M)),
        ],
        [4, 2, 1, 1],
        [CONSUMER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS],
    )  # fmt: skip


def forward_launch(
    device: torch.device, tokens: int, hidden: int, inner: int, up_row: int, store: bool,
    activation: str = "silu",
) -> HopperLaunch:  # fmt: skip
    """The launch for x (tokens, hidden) of 16-bit numbers; rows begin at multiples of 16 elements.

    It takes x, w_gate, w_up, gate_up and h; gate_up is written if stored. A packed weight
    (2·inner, hidden) stands for both, with `up_row` inner; of a pair that is 0.
    """
    k = FORWARD.block_k
    blocks = [[128, k], [64, k], [64, k]]
    constants = {"ACTIVATION": activation, "FORWARD": True, "STORE": store, "AHEAD": False}
    scalars = tokens, hidden, inner, up_row
    return HopperLaunch(
        _hopper_swiglu_kernel, FORWARD, multiprocessors(device), blocks, scalars, constants
    )


def backward_launch(
    device: torch.device, tokens: int, hidden: int, inner: int, store: bool,
    activation: str = "silu",
) -> HopperLaunch:  # fmt: skip
    """The launch for dy (tokens, hidden) of 16-bit numbers; rows begin as those of x.

    It takes dy, w_down, gate_up, d_gate_up, h; d_gate_up may be gate_up, h is written if stored.
    """
    k = BACKWARD.block_k
    ahead = hidden <= MAX_HIDDEN_TO_PREFETCH and activation == "silu"
    blocks = [[128, k], [k, 128], [32, 64]]
    constants = {"ACTIVATION": activation, "FORWARD": False, "STORE": store, "AHEAD": ahead}
    scalars = tokens, hidden, inner, 0
    return HopperLaunch(
        _hopper_swiglu_kernel, BACKWARD, multiprocessors(device), blocks, scalars, constants
    )
