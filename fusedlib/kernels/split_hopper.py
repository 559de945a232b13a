# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""The split product for Hopper: warps with fixed roles, in Gluon. Equations: `split_product`.

One producer warp fetches a K block of the four parts by TMA into a ring of `STAGES` buffers, 64 KiB
each. Two consumer warpgroups, not tied to each other, each multiply 64 rows of a 128·128 tile by
wgmma: both products of a block are issued at once, and while they join the accumulator the other
group has the tensor cores. The accumulator and both products take 192 registers a thread, so that
the sum of several spans lies in C.

wgmma truncates: H200, sums of 64 normal terms lose 0.9e-7 of what they come to, of positive ones
2e-7, of integers that fp32 holds nothing. So where both tiles have low parts their factor is the
next number above it, 1 + 2⁻²³ times as large.
"""

from __future__ import annotations

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

from fusedlib.kernels.hopper_launch import HopperLaunch
from fusedlib.kernels.hopper_tiles import place
from fusedlib.kernels.launch import multiprocessors
from fusedlib.kernels.split import TILE
from fusedlib.kernels.split_configs import Warps, span
from fusedlib.kernels.split_words import words
from fusedlib.kernels.swiglu_configs import architecture

# The name of one operation in Triton 3.6 and in later ones.
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

BLOCK_K = 64
CONFIG = Warps(
    4,
    (("K", BLOCK_K), ("STAGES", 3), ("GROUP_M", 8), ("CONSUMER", 240), ("PRODUCER", 24)),
    descriptors=True,
)
_words = gluon.jit(words)


@gluon.jit
def _fetch_both(  # type: ignore[no-untyped-def]
    parts, high_ring, low_ring, stage, outer, inner, low, arrived, TURNED: gl.constexpr,
):  # fmt: skip
    """Fetch a block of the high rows of the parts, and the same of the low ones."""
    row, column = (inner, outer) if TURNED else (outer, inner)
    _fetch(parts, [row, column], arrived, high_ring.index(stage))
    _fetch(parts, [low + row, column], arrived, low_ring.index(stage))


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    a, b, ah_ring, al_ring, bh_ring, bl_ring, full, empty, m, n, k,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr,
    TILE: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = gl.cdiv(m, TILE), gl.cdiv(n, TILE)
    a_low = gl.cdiv(k if A_TURNED else m, TILE) * TILE
    b_low = gl.cdiv(n if B_TURNED else k, TILE) * TILE
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place(tile, row_tiles, column_tiles, GROUP_M)
        row, column = row_tile * TILE, column_tile * TILE
        for start in range(0, k, K):
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(arrived, 4 * TILE * K * 2)
            _fetch_both(a, ah_ring, al_ring, stage, row, start, a_low, arrived, A_TURNED)
            _fetch_both(b, bh_ring, bl_ring, stage, column, start, b_low, arrived, not B_TURNED)
            stage += 1
            if stage == STAGES:
                stage, phase = 0, phase ^ 1


@gluon.jit
def _rows(ring, stage, ROW: gl.constexpr, ROWS: gl.constexpr, TURNED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of a block, ROWS from ROW on; it is stored transposed if TURNED."""
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
def _join(c, acc, begin, row, column, m, n, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """Add a span of the sum to a block of C; the first, which begins at 0, is stored.

    WIDTH columns at a time: what is there needs registers, and so do its addresses.
    """
    if acc.shape[1] > WIDTH:
        half: gl.constexpr = acc.shape[1] // 2
        left, right = acc.reshape([acc.shape[0], 2, half]).permute((0, 2, 1)).split()
        _join(c, left, begin, row, column, m, n, WIDTH)
        _join(c, right, begin, row, column + half, m, n, WIDTH)
    else:
        layout: gl.constexpr = acc.type.layout
        i = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
        j = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
        inside = (i < m)[:, None] & (j < n)[None, :]
        c += i.to(gl.int64)[:, None] * n + j[None, :]
        before = gl.load(c, mask=inside & (begin > 0), other=0.0)
        gl.store(c, before + acc, mask=inside)


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    ah_ring, al_ring, bh_ring, bl_ring, full, empty, a_tiles, b_tiles, c, m, n, k, span,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, GROUP: gl.constexpr,
    TILE: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    rows: gl.constexpr = TILE // 2
    first: gl.constexpr = GROUP * rows
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    zeros = gl.zeros([rows, TILE], gl.float32, layout)
    row_tiles, column_tiles, k_tiles = gl.cdiv(m, TILE), gl.cdiv(n, TILE), gl.cdiv(k, TILE)
    stage, phase = 0, 0
    spans, programs = gl.cdiv(k, span), gl.num_programs(0)
    own = gl.cdiv(row_tiles * column_tiles - gl.program_id(0), programs)
    # One loop, so that nothing of C's addresses is kept through the inner one.
    for nth in range(0, own * spans):
        tile, begin = gl.program_id(0) + nth // spans * programs, nth % spans * span
        row_tile, column_tile = place(tile, row_tiles, column_tiles, GROUP_M)
        a_words, a_step = _words(a_tiles, row_tile, row_tiles, k_tiles, 1 if A_TURNED else 0)
        b_words, b_step = _words(b_tiles, column_tile, column_tiles, k_tiles, 0 if B_TURNED else 1)
        acc = gl.zeros([rows, TILE], gl.float32, layout)
        for start in range(begin, gl.minimum(begin + span, k), K):
            of_a = gl.load(a_words + start // TILE * a_step)
            of_b = gl.load(b_words + start // TILE * b_step)
            power = (of_a & 0x7F) + (of_b & 0x7F) + 1
            factor = ((power << 23) | (of_a & of_b) >> 22 & 1).to(gl.float32, bitcast=True)
            mbarrier.wait(full.index(stage), phase)
            ah = _rows(ah_ring, stage, first, rows, A_TURNED)
            al = _rows(al_ring, stage, first, rows, A_TURNED)
            bh = _columns(bh_ring, stage, B_TURNED)
            bl = _columns(bl_ring, stage, B_TURNED)
            cross = warpgroup_mma(ah, bl, zeros, use_acc=False, is_async=True)
            cross = warpgroup_mma(al, bh, cross, is_async=True)
            main = warpgroup_mma(ah, bh, zeros, use_acc=False, is_async=True)
            cross, main = warpgroup_mma_wait(0, deps=[cross, main])
            mbarrier.arrive(empty.index(stage))
            block = gl.fma(cross, gl.full_like(cross, 0.00048828125), main)  # 2⁻¹¹
            acc = gl.fma(block, gl.full_like(block, factor), acc)
            stage += 1
            if stage == STAGES:
                stage, phase = 0, phase ^ 1
        _join(c, acc, begin, row_tile * TILE + first, column_tile * TILE, m, n, TILE // 2)


@gluon.jit(do_not_specialize=("m", "k", "span"))  # a binary for every number of tokens
def _hopper_split_product_kernel(  # type: ignore[no-untyped-def]
    a, b, a_tiles, b_tiles, c, m, n, k, span,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, TILE: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, CONSUMER: gl.constexpr, PRODUCER: gl.constexpr,
):  # fmt: skip
    a_shape: gl.constexpr = [STAGES, K, TILE] if A_TURNED else [STAGES, TILE, K]
    b_shape: gl.constexpr = [STAGES, TILE, K] if B_TURNED else [STAGES, K, TILE]
    ah_ring = gl.allocate_shared_memory(gl.float16, a_shape, a.layout)
    al_ring = gl.allocate_shared_memory(gl.float16, a_shape, a.layout)
    bh_ring = gl.allocate_shared_memory(gl.float16, b_shape, b.layout)
    bl_ring = gl.allocate_shared_memory(gl.float16, b_shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_consume, (ah_ring, al_ring, bh_ring, bl_ring, full, empty, a_tiles, b_tiles, c,
                        m, n, k, span, A_TURNED, B_TURNED, 0, TILE, K, STAGES, GROUP_M)),
            (_consume, (ah_ring, al_ring, bh_ring, bl_ring, full, empty, a_tiles, b_tiles, c,
                        m, n, k, span, A_TURNED, B_TURNED, 1, TILE, K, STAGES, GROUP_M)),
            (_produce, (a, b, ah_ring, al_ring, bh_ring, bl_ring, full, empty,
                        m, n, k, A_TURNED, B_TURNED, TILE, K, STAGES, GROUP_M)),
        ],
        [4, 1],
        [CONSUMER, PRODUCER],
    )  # fmt: skip


def takes(c: Tensor) -> bool:
    """Whether this kernel runs for such a result."""
    return c.is_cuda and architecture(c.device) == 90


def launch(c: Tensor, sizes: tuple[int, int, int], turned: tuple[bool, bool]) -> HopperLaunch:
    """For products of these sizes (m, n, k), with which factors stored transposed."""
    programs = min(triton.cdiv(sizes[0], TILE) * triton.cdiv(sizes[1], TILE),
                   multiprocessors(c.device))  # fmt: skip
    k = dict(CONFIG.constants)["K"]
    blocks = [[k, TILE] if turned[0] else [TILE, k], [TILE, k] if turned[1] else [k, TILE]]
    constants = {"A_TURNED": turned[0], "B_TURNED": turned[1], "TILE": TILE}
    scalars = *sizes, span(c, sizes[2], k)
    return HopperLaunch(_hopper_split_product_kernel, CONFIG, programs, blocks, scalars, constants)
