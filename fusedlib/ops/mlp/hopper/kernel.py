# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""Both fused kernels of the SwiGLU MLP for Hopper: warps with fixed roles, in Gluon.

| warps | role     | what it does                                                              |
|-------|----------|---------------------------------------------------------------------------|
| 1     | producer | fetches blocks of both factors by TMA into a ring of `STAGES` buffers     |
| 2 · 4 | consumer | 64 rows each of a 128·256 product by wgmma, 128 accumulators a thread;    |
|       |          | rounds them and leaves them in shared memory                              |
| 2     | epilogue | takes them from there: activation, and everything that memory wants,      |
|       |          | while the consumers are at the next tile                                  |
| 1     | fetcher  | in the backward: gate and up for the epilogue, by TMA                     |

A tile of 256 columns is 128 of gate beside 128 of up in the forward, 256 of dh in the backward.
gate and up, or dh, are thus rounded to their dtype before the activation, as in unfused code.
Equations and tensors as in `fusedlib.ops.mlp.tiles`.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fusedlib.launch import HopperLaunch, multiprocessors, with_roles
from fusedlib.ops.gluon_blocks import barrier, fetch
from fusedlib.ops.mlp.hopper.epilogue import epilogue, fetch_gates
from fusedlib.ops.mlp.hopper.schedule import count_units, unit_corner

# Three warpgroups share 504 registers a thread: consumers need 154; the epilogue with 168 spilled
# 48 bytes. Groups of 16 instead of 8 gain up to 1.4 % of the forward, nothing in the backward.
FORWARD = with_roles(160, 184, group_m=16)
BACKWARD = with_roles(160, 184)
# The backward's epilogue takes gate and up out of shared memory a part ahead: a gain of 2.5 % at a
# hidden size of 2048, a loss of up to 1 % from 4096 on. With other activations it spills.
MAX_HIDDEN_TO_PREFETCH = 2048


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
