# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""The split product for Hopper: warps with fixed roles, in Gluon. Equations: `split_product`.

One producer warp fetches a K block of the four parts by TMA into a ring of `STAGES` buffers, 64 KiB
each. Two consumer warpgroups, not tied to each other, each multiply 64 rows of a 128·128 tile by
wgmma: both products of a block are issued at once, the first joins the accumulator while the second
runs, and while the second joins, the other group has the tensor cores. The accumulator and both
products take 192 registers a thread.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fusedlib.kernels.launch import multiprocessors
from fusedlib.kernels.split import TILE, WHOLE, Split

# The name of one operation in Triton 3.6 and in later ones.
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

BLOCK_K = 64
STAGES = 3
GROUP_M = 8
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24


@gluon.jit
def _place(tile, row_tiles, column_tiles, GROUP_M: gl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column tile of the tile-th, down GROUP_M rows before the next column, for the L2."""
    width = GROUP_M * column_tiles
    first = tile // width * GROUP_M
    height = gl.minimum(row_tiles - first, GROUP_M)
    return first + tile % width % height, tile % width // height


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    a_high, a_low, b_high, b_low, ah_ring, al_ring, bh_ring, bl_ring, full, empty,
    row_tiles, column_tiles, tiles, k,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr,
    TILE: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile, column_tile = _place(tile, row_tiles, column_tiles, GROUP_M)
        row, column = row_tile * TILE, column_tile * TILE
        for start in range(0, k, K):
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(arrived, 4 * TILE * K * 2)
            if A_TURNED:
                _fetch(a_high, [start, row], arrived, ah_ring.index(stage))
                _fetch(a_low, [start, row], arrived, al_ring.index(stage))
            else:
                _fetch(a_high, [row, start], arrived, ah_ring.index(stage))
                _fetch(a_low, [row, start], arrived, al_ring.index(stage))
            if B_TURNED:
                _fetch(b_low, [column, start], arrived, bl_ring.index(stage))
                _fetch(b_high, [column, start], arrived, bh_ring.index(stage))
            else:
                _fetch(b_low, [start, column], arrived, bl_ring.index(stage))
                _fetch(b_high, [start, column], arrived, bh_ring.index(stage))
            stage += 1
            if stage == STAGES:
                stage, phase = 0, phase ^ 1


@gluon.jit
def _rows(ring, stage, ROW: gl.constexpr, ROWS: gl.constexpr, TURNED: gl.constexpr):  # type: ignore[no-untyped-def]
    """A group's rows of a block of A."""
    if TURNED:
        block = ring.index(stage).slice(ROW, ROWS, 1).permute((1, 0))
    else:
        block = ring.index(stage).slice(ROW, ROWS)
    return block


@gluon.jit
def _columns(ring, stage, TURNED: gl.constexpr):  # type: ignore[no-untyped-def]
    """A block of B, K first."""
    block = ring.index(stage)
    if TURNED:
        block = block.permute((1, 0))
    return block


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    ah_ring, al_ring, bh_ring, bl_ring, full, empty, a_factors, b_factors,
    a_factor_m, a_factor_k, b_factor_n, b_factor_k, c, m, n, c_row,
    row_tiles, column_tiles, tiles, k,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, GROUP: gl.constexpr,
    TILE: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    rows: gl.constexpr = TILE // 2
    first: gl.constexpr = GROUP * rows
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    zeros = gl.zeros([rows, TILE], gl.float32, layout)
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile, column_tile = _place(tile, row_tiles, column_tiles, GROUP_M)
        acc = gl.zeros([rows, TILE], gl.float32, layout)
        for start in range(0, k, K):
            of_a = gl.load(a_factors + row_tile * a_factor_m + start // TILE * a_factor_k)
            of_b = gl.load(b_factors + column_tile * b_factor_n + start // TILE * b_factor_k)
            factor = of_a * of_b
            mbarrier.wait(full.index(stage), phase)
            ah = _rows(ah_ring, stage, first, rows, A_TURNED)
            al = _rows(al_ring, stage, first, rows, A_TURNED)
            bh = _columns(bh_ring, stage, B_TURNED)
            bl = _columns(bl_ring, stage, B_TURNED)
            cross = warpgroup_mma(ah, bl, zeros, use_acc=False, is_async=True)
            cross = warpgroup_mma(al, bh, cross, is_async=True)
            main = warpgroup_mma(ah, bh, zeros, use_acc=False, is_async=True)
            cross = warpgroup_mma_wait(1, deps=[cross])
            acc = gl.fma(cross, gl.full_like(cross, factor * 0.00048828125), acc)  # 2⁻¹¹
            main = warpgroup_mma_wait(0, deps=[main])
            mbarrier.arrive(empty.index(stage))
            acc = gl.fma(main, gl.full_like(main, factor), acc)
            stage += 1
            if stage == STAGES:
                stage, phase = 0, phase ^ 1
        i = row_tile * TILE + first + gl.arange(0, rows, gl.SliceLayout(1, layout))
        j = column_tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))
        inside = (i < m)[:, None] & (j < n)[None, :]
        gl.store(c + i.to(gl.int64)[:, None] * c_row + j[None, :], acc, mask=inside)


@gluon.jit
def _hopper_split_product_kernel(  # type: ignore[no-untyped-def]
    a_high, a_low, b_high, b_low, a_factors, b_factors, a_shares, b_shares, c, m, n, k,
    a_factor_m, a_factor_k, b_factor_n, b_factor_k, c_row,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr,
    TILE: gl.constexpr, WHOLE: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, CONSUMER: gl.constexpr, PRODUCER: gl.constexpr,
):  # fmt: skip
    a_shape: gl.constexpr = [STAGES, K, TILE] if A_TURNED else [STAGES, TILE, K]
    b_shape: gl.constexpr = [STAGES, TILE, K] if B_TURNED else [STAGES, K, TILE]
    ah_ring = gl.allocate_shared_memory(gl.float16, a_shape, a_high.layout)
    al_ring = gl.allocate_shared_memory(gl.float16, a_shape, a_low.layout)
    bh_ring = gl.allocate_shared_memory(gl.float16, b_shape, b_high.layout)
    bl_ring = gl.allocate_shared_memory(gl.float16, b_shape, b_low.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    a_along: gl.constexpr = 1 if A_TURNED else 0
    b_along: gl.constexpr = 0 if B_TURNED else 1
    one = gl.load(a_shares + a_along) + gl.load(b_shares + 2 + b_along)
    two = gl.load(a_shares + 2 + a_along) + gl.load(b_shares + b_along)
    row_tiles, column_tiles = gl.cdiv(m, TILE), gl.cdiv(n, TILE)
    tiles = gl.where(gl.maximum(one, two) < WHOLE, row_tiles * column_tiles, 0)
    gl.warp_specialize(
        [
            (_consume, (ah_ring, al_ring, bh_ring, bl_ring, full, empty, a_factors, b_factors,
                        a_factor_m, a_factor_k, b_factor_n, b_factor_k, c, m, n, c_row,
                        row_tiles, column_tiles, tiles, k,
                        A_TURNED, B_TURNED, 0, TILE, K, STAGES, GROUP_M)),
            (_consume, (ah_ring, al_ring, bh_ring, bl_ring, full, empty, a_factors, b_factors,
                        a_factor_m, a_factor_k, b_factor_n, b_factor_k, c, m, n, c_row,
                        row_tiles, column_tiles, tiles, k,
                        A_TURNED, B_TURNED, 1, TILE, K, STAGES, GROUP_M)),
            (_produce, (a_high, a_low, b_high, b_low, ah_ring, al_ring, bh_ring, bl_ring,
                        full, empty, row_tiles, column_tiles, tiles, k,
                        A_TURNED, B_TURNED, TILE, K, STAGES, GROUP_M)),
        ],
        [4, 1],
        [CONSUMER, PRODUCER],
    )  # fmt: skip


def block_layout(block: list[int]) -> Any:
    """How a block of a part lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(block, gl.float16)


def _parts(parts: Tensor, block: list[int]) -> list[TensorDescriptor]:
    layout = block_layout(block)
    return [TensorDescriptor.from_tensor(part, block, layout) for part in parts]


def launch(a: Split, b: Split, c: Tensor, k: int, turned_a: bool, turned_b: bool) -> None:
    """Fill c (m, n) with op(a) op(b) if they are certified."""
    (m, n), a_factors, b_factors = c.shape, a.factors.stride(), b.factors.stride()
    programs = min(triton.cdiv(m, TILE) * triton.cdiv(n, TILE), multiprocessors(c.device))
    _hopper_split_product_kernel[(programs,)](
        *_parts(a.parts, [BLOCK_K, TILE] if turned_a else [TILE, BLOCK_K]),
        *_parts(b.parts, [TILE, BLOCK_K] if turned_b else [BLOCK_K, TILE]),
        a.factors, b.factors, a.shares, b.shares, c, m, n, k,
        a_factors[1 if turned_a else 0], a_factors[0 if turned_a else 1],
        b_factors[0 if turned_b else 1], b_factors[1 if turned_b else 0], c.stride(0),
        A_TURNED=turned_a, B_TURNED=turned_b, TILE=TILE, WHOLE=WHOLE, K=BLOCK_K, STAGES=STAGES,
        GROUP_M=GROUP_M, CONSUMER=CONSUMER_REGISTERS, PRODUCER=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
