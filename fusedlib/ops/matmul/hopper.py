# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""The split product for Hopper: warps with fixed roles, in Gluon. Equations: `kernels`.

One producer warp fetches a K block of the four parts by TMA into a ring of `STAGES` buffers, 64 KiB
each. Two consumer warpgroups, not tied to each other, each multiply 64 rows of a 128·128 tile by
wgmma; while the products of a block join their span's sum, and a span's C, the other group has the
tensor cores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fusedlib.ops.gluon_blocks import fetch, tile_position


@gluon.jit
def _fetch_both(  # type: ignore[no-untyped-def]
    parts, high_ring, low_ring, stage, outer, inner, low, arrived, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Fetch a block of the high rows of the parts, and the same of the low ones."""
    row, column = (inner, outer) if TRANSPOSED else (outer, inner)
    fetch(parts, [row, column], arrived, high_ring.index(stage))
    fetch(parts, [low + row, column], arrived, low_ring.index(stage))


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    a, b, ah_ring, al_ring, bh_ring, bl_ring, full, empty, m, n, k, k_per_split,
    A_T: gl.constexpr, B_T: gl.constexpr,
    TILE: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = gl.cdiv(m, TILE), gl.cdiv(n, TILE)
    tiles = row_tiles * column_tiles
    a_low = gl.cdiv(k if A_T else m, TILE) * TILE
    b_low = gl.cdiv(n if B_T else k, TILE) * TILE
    stage, phase = 0, 1
    for unit in range(gl.program_id(0), tiles * gl.cdiv(k, k_per_split), gl.num_programs(0)):
        row_tile, column_tile = tile_position(unit % tiles, row_tiles, column_tiles, GROUP_M)
        row, column = row_tile * TILE, column_tile * TILE
        begin = unit // tiles * k_per_split
        for start in range(begin, gl.minimum(begin + k_per_split, k), BLOCK_K):
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(arrived, 4 * TILE * BLOCK_K * 2)
            _fetch_both(a, ah_ring, al_ring, stage, row, start, a_low, arrived, A_T)
            _fetch_both(b, bh_ring, bl_ring, stage, column, start, b_low, arrived, not B_T)
            stage += 1
            if stage == STAGES:
                stage, phase = 0, phase ^ 1


@gluon.jit
def _rows(ring, stage, ROW: gl.constexpr, ROWS: gl.constexpr, TRANSPOSED: gl.constexpr):  # type: ignore[no-untyped-def]
    """ROWS rows of a block, from row ROW on; the block is stored transposed if TRANSPOSED."""
    if TRANSPOSED:
        block = ring.index(stage).slice(ROW, ROWS, 1).permute((1, 0))
    else:
        block = ring.index(stage).slice(ROW, ROWS)
    return block


@gluon.jit
def _load_factors(factors, line, lines, COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Both factors of a span of COUNT lines: an element or two a thread, so that they take no
    registers while they are on their way.
    """
    factors += line + gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(factors), gl.load(factors + lines)


@gluon.jit
def _scaled(acc, a1, a2, b1, b2):  # type: ignore[no-untyped-def]
    """A span's sum times both factors of its row and of its column.

    A row's and a column's together: a large one alone may take the sum out of fp32's range.
    """
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    a1, a2 = gl.convert_layout(a1, rows)[:, None], gl.convert_layout(a2, rows)[:, None]
    b1, b2 = gl.convert_layout(b1, columns)[None, :], gl.convert_layout(b2, columns)[None, :]
    acc = acc * (a1.to(gl.float32, bitcast=True) * b1.to(gl.float32, bitcast=True))
    second = (b2 & (a2 | -2)).to(gl.float32, bitcast=True)
    return acc * ((a2 & -2).to(gl.float32, bitcast=True) * second)


@gluon.jit
def _store(c, total, row, column, m, n, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store a block of C, WIDTH columns at a time: addresses take registers."""
    if total.shape[1] > WIDTH:
        half: gl.constexpr = total.shape[1] // 2
        left, right = total.reshape([total.shape[0], 2, half]).permute((0, 2, 1)).split()
        _store(c, left, row, column, m, n, WIDTH)
        _store(c, right, row, column + half, m, n, WIDTH)
    else:
        layout: gl.constexpr = total.type.layout
        i = row + gl.arange(0, total.shape[0], gl.SliceLayout(1, layout))
        j = column + gl.arange(0, total.shape[1], gl.SliceLayout(0, layout))
        inside = (i < m)[:, None] & (j < n)[None, :]
        gl.store(c + (i.to(gl.int64)[:, None] * n + j[None, :]), total, mask=inside)


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    ah_ring, al_ring, bh_ring, bl_ring, full, empty, a_factors, b_factors, c,
    m, n, k, k_per_split,
    A_T: gl.constexpr, B_T: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr,
    BLOCK_K: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    rows: gl.constexpr = TILE // 2
    first: gl.constexpr = GROUP * rows
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    zeros = gl.zeros([rows, TILE], gl.float32, layout)
    row_tiles, column_tiles = gl.cdiv(m, TILE), gl.cdiv(n, TILE)
    tiles = row_tiles * column_tiles
    a_lines, b_lines = row_tiles * TILE, column_tiles * TILE
    stage, phase = 0, 0
    for unit in range(gl.program_id(0), tiles * gl.cdiv(k, k_per_split), gl.num_programs(0)):
        row_tile, column_tile = tile_position(unit % tiles, row_tiles, column_tiles, GROUP_M)
        row, column = row_tile * TILE + first, column_tile * TILE
        first_term = unit // tiles * k_per_split
        end = gl.minimum(first_term + k_per_split, k)
        total = gl.zeros([rows, TILE], gl.float32, layout)
        for begin in range(first_term, end, SPAN * BLOCK_K):
            span = 2 * (begin // (SPAN * BLOCK_K))
            a1, a2 = _load_factors(a_factors + span * a_lines, row, a_lines, rows)
            b1, b2 = _load_factors(b_factors + span * b_lines, column, b_lines, TILE)
            acc = gl.zeros([rows, TILE], gl.float32, layout)
            for _ in range(begin, gl.minimum(begin + SPAN * BLOCK_K, end), BLOCK_K):
                mbarrier.wait(full.index(stage), phase)
                ah = _rows(ah_ring, stage, first, rows, A_T)
                al = _rows(al_ring, stage, first, rows, A_T)
                bh = _rows(bh_ring, stage, 0, BLOCK_K, B_T)
                bl = _rows(bl_ring, stage, 0, BLOCK_K, B_T)
                block = warpgroup_mma(ah, bl, zeros, use_acc=False, is_async=True)
                block = warpgroup_mma(al, bh, block, is_async=True)
                block = warpgroup_mma(ah, bh, block, is_async=True)
                block = warpgroup_mma_wait(0, deps=[block])
                mbarrier.arrive(empty.index(stage))
                acc += block
                stage += 1
                if stage == STAGES:
                    stage, phase = 0, phase ^ 1
            total += _scaled(acc, a1, a2, b1, b2)
        result = c + (unit // tiles).to(gl.int64) * m * n
        _store(result, total, row, column, m, n, TILE // 4)


@gluon.jit(do_not_specialize=("m", "k", "k_per_split"))  # a binary for every number of tokens
def _hopper_split_product_kernel(  # type: ignore[no-untyped-def]
    a, b, a_factors, b_factors, c, m, n, k, k_per_split,
    A_T: gl.constexpr, B_T: gl.constexpr, TILE: gl.constexpr, BLOCK_K: gl.constexpr,
    SPAN: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_shape: gl.constexpr = [STAGES, BLOCK_K, TILE] if A_T else [STAGES, TILE, BLOCK_K]
    b_shape: gl.constexpr = [STAGES, TILE, BLOCK_K] if B_T else [STAGES, BLOCK_K, TILE]
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
            (_consume, (ah_ring, al_ring, bh_ring, bl_ring, full, empty, a_factors, b_factors,
                        c, m, n, k, k_per_split, A_T, B_T, 0, TILE, BLOCK_K, SPAN, STAGES,
                        GROUP_M)),
            (_consume, (ah_ring, al_ring, bh_ring, bl_ring, full, empty, a_factors, b_factors,
                        c, m, n, k, k_per_split, A_T, B_T, 1, TILE, BLOCK_K, SPAN, STAGES,
                        GROUP_M)),
            (_produce, (a, b, ah_ring, al_ring, bh_ring, bl_ring, full, empty,
                        m, n, k, k_per_split, A_T, B_T, TILE, BLOCK_K, STAGES, GROUP_M)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, OTHER_REGISTERS],
    )  # fmt: skip
