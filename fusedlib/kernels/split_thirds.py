# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""Tiles of a product from fp32 factors cut into thirds: Hopper's warps with fixed roles, in Gluon.

    a = a₁ + a₂ + a₃, exactly        a₁ = bf16(a)    a₂ = bf16(a − a₁)    a₃ = a − a₁ − a₂

bf16 has fp32's exponents, so that three of it hold all of fp32's 24 bits whatever the size of the
neighbours: what two parts in fp16 cannot (`fusedlib.kernels.split`). Of the nine products a₂b₃,
a₃b₂ and a₃b₃ are left out, 2⁻²⁴ of |a||b| together at most; the others are summed on the tensor
core from the smallest up, a K block at a time, and join the accumulator of a span of blocks by a
fused multiply-add:

    acc += f (a₃b₁ + a₁b₃ + a₂b₂ + a₂b₁ + a₁b₂ + a₁b₁)

Factors are taken in units of their tiles' 2ᵉ, whose product is f. No element is below 2⁻⁴⁸ of that
(`split`), so that neither sums nor the smallest thirds leave fp32's range.

One warpgroup fetches and cuts A into a ring of `STAGES` K blocks, one B, and two multiply 64 rows
of a 128·128 tile each. A tile is computed where its flag says so: see `split_exact`.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fusedlib.kernels.hopper_epilogue import barrier
from fusedlib.kernels.launch import Launch, kept_launch, multiprocessors
from fusedlib.kernels.split import TILE
from fusedlib.kernels.split_configs import SHARED_RESULTS, Warps
from fusedlib.kernels.split_hopper import _join, _rows
from fusedlib.kernels.split_words import words
from fusedlib.kernels.swiglu_configs import architecture

BLOCK_K = 32
CONFIG = Warps(
    4, (("K", BLOCK_K), ("STAGES", 3), ("LOOK", 128), ("CONSUMER", 144), ("PRODUCER", 112))
)
# Blocks that are summed before they join C, where cuBLAS shares a sum among programs and elsewhere.
# H200, 1024·8192·4096, joining after 2048, 1024, 512 and 256 terms: 1042, 1114, 1190 and 1359 µs.
SPANS = {"few results": 16, "many": 128}
_words = gluon.jit(words)


@gluon.jit
def _fetch(  # type: ignore[no-untyped-def]
    source, outer, start, outers, k, stride,
    TILE: gl.constexpr, K: gl.constexpr, K_FIRST: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """A K block of a factor's tile as it is stored, zeros outside."""
    height: gl.constexpr = K if K_FIRST else TILE
    width: gl.constexpr = TILE if K_FIRST else K
    row, column = (start, outer) if K_FIRST else (outer, start)
    rows, columns = (k, outers) if K_FIRST else (outers, k)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // width, width // 4], [4, 1], [1, 0])
    i = gl.arange(0, height, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
    source += row.to(gl.int64) * stride + column
    if EVEN:
        block = gl.load(source + (i * stride + j))
    else:
        inside = (i < rows - row) & (j < columns - column)
        block = gl.load(source + (i * stride + j), mask=inside, other=0.0)
    return block


@gluon.jit
def _cut(block, power, ring, stage):  # type: ignore[no-untyped-def]
    """Store the thirds of a block in units of its tile's factor, whose exponent is a word's."""
    block *= ((190 - power) << 23).to(gl.float32, bitcast=True)
    first = block.to(gl.bfloat16)
    ring.index(stage * 3).store(first)
    block -= first.to(gl.float32)
    second = block.to(gl.bfloat16)
    ring.index(stage * 3 + 1).store(second)
    ring.index(stage * 3 + 2).store((block - second.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    source, tiles, flags, ring, full, empty, count, columns, outers, k, stride,
    OF_B: gl.constexpr, ALONG: gl.constexpr, K_FIRST: gl.constexpr, EVEN: gl.constexpr,
    TILE: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Of A, or of B: the blocks of its tiles."""
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        if gl.load(flags + tile) != 0:
            place = tile % columns if OF_B else tile // columns
            word, step = _words(tiles, place, gl.cdiv(outers, TILE), gl.cdiv(k, TILE), ALONG)
            outer, last = place * TILE, (gl.cdiv(k, K) - 1) * K
            if EVEN:
                block = _fetch(source, outer, outer * 0, outers, k, stride, TILE, K, K_FIRST, EVEN)
            for start in range(0, k, K):
                # After the last, that one again, for nobody.
                if EVEN:
                    following = _fetch(
                        source, outer, gl.minimum(start + K, last), outers, k, stride,
                        TILE, K, K_FIRST, EVEN,
                    )  # fmt: skip
                else:
                    block = _fetch(source, outer, start, outers, k, stride, TILE, K, K_FIRST, EVEN)
                power = gl.load(word + start // TILE * step) & 0x7F
                mbarrier.wait(empty.index(stage), phase)
                _cut(block, power, ring, stage)
                fence_async_shared()
                barrier()
                mbarrier.arrive(full.index(stage))
                if EVEN:
                    block = following
                stage += 1
                if stage == STAGES:
                    stage, phase = 0, phase ^ 1


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    a_ring, b_ring, full, empty, a_tiles, b_tiles, flags, c, count, m, n, k,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, GROUP: gl.constexpr,
    SPAN: gl.constexpr, TILE: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    rows: gl.constexpr = TILE // 2
    first: gl.constexpr = GROUP * rows
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    zeros = gl.zeros([rows, TILE], gl.float32, layout)
    row_tiles, columns, k_tiles = gl.cdiv(m, TILE), gl.cdiv(n, TILE), gl.cdiv(k, TILE)
    stage, phase = 0, 0
    spans, programs = gl.cdiv(k, SPAN * K), gl.num_programs(0)
    own = gl.cdiv(count - gl.program_id(0), programs)
    for nth in range(0, own * spans):
        tile, begin = gl.program_id(0) + nth // spans * programs, nth % spans * (SPAN * K)
        if gl.load(flags + tile) != 0:
            row, column = tile // columns, tile % columns
            a_words, a_step = _words(a_tiles, row, row_tiles, k_tiles, 1 if A_TURNED else 0)
            b_words, b_step = _words(b_tiles, column, columns, k_tiles, 0 if B_TURNED else 1)
            acc = gl.zeros([rows, TILE], gl.float32, layout)
            for start in range(begin, gl.minimum(begin + SPAN * K, k), K):
                of_a = gl.load(a_words + start // TILE * a_step) & 0x7F
                of_b = gl.load(b_words + start // TILE * b_step) & 0x7F
                factor = ((of_a + of_b + 1) << 23).to(gl.float32, bitcast=True)
                mbarrier.wait(full.index(stage), phase)
                a1 = _rows(a_ring, stage * 3, first, rows, A_TURNED)
                a2 = _rows(a_ring, stage * 3 + 1, first, rows, A_TURNED)
                a3 = _rows(a_ring, stage * 3 + 2, first, rows, A_TURNED)
                b1 = _rows(b_ring, stage * 3, 0, K, B_TURNED)
                b2 = _rows(b_ring, stage * 3 + 1, 0, K, B_TURNED)
                b3 = _rows(b_ring, stage * 3 + 2, 0, K, B_TURNED)
                part = warpgroup_mma(a3, b1, zeros, use_acc=False, is_async=True)
                part = warpgroup_mma(a1, b3, part, is_async=True)
                part = warpgroup_mma(a2, b2, part, is_async=True)
                part = warpgroup_mma(a2, b1, part, is_async=True)
                part = warpgroup_mma(a1, b2, part, is_async=True)
                part = warpgroup_mma(a1, b1, part, is_async=True)
                part = warpgroup_mma_wait(0, deps=[part])
                mbarrier.arrive(empty.index(stage))
                acc = gl.fma(part, gl.full_like(part, factor), acc)
                stage += 1
                if stage == STAGES:
                    stage, phase = 0, phase ^ 1
            _join(c, acc, begin, row * TILE + first, column * TILE, m, n, TILE // 4)


@gluon.jit
def _any(flags, count, LOOK: gl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a flag of this program's tiles is set."""
    which = gl.arange(0, LOOK, gl.BlockedLayout([1], [32], [4], [0])) * gl.num_programs(0)
    most = which * 0
    for first in range(gl.program_id(0), count, gl.num_programs(0) * LOOK):
        most = gl.maximum(most, gl.load(flags + first + which, mask=first + which < count, other=0))
    return gl.max(most, 0)


@gluon.jit(do_not_specialize=("m", "n", "k"))
def _thirds_kernel(  # type: ignore[no-untyped-def]
    a, b, a_tiles, b_tiles, flags, c, m, n, k, a_stride, b_stride,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, EVEN: gl.constexpr, SPAN: gl.constexpr,
    TILE: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, LOOK: gl.constexpr,
    CONSUMER: gl.constexpr, PRODUCER: gl.constexpr,
):  # fmt: skip
    along: gl.constexpr = [1 if A_TURNED else 0, 0 if B_TURNED else 1]
    a_shape: gl.constexpr = [K, TILE] if A_TURNED else [TILE, K]
    b_shape: gl.constexpr = [TILE, K] if B_TURNED else [K, TILE]
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(a_shape, gl.bfloat16)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(b_shape, gl.bfloat16)
    columns = gl.cdiv(n, TILE)
    count = gl.cdiv(m, TILE) * columns
    if _any(flags, count, LOOK) == 0:
        count = 0
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [3 * STAGES, a_shape[0], a_shape[1]], a_layout)
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [3 * STAGES, b_shape[0], b_shape[1]], b_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_consume, (a_ring, b_ring, full, empty, a_tiles, b_tiles, flags, c, count, m, n, k,
                        A_TURNED, B_TURNED, 0, SPAN, TILE, K, STAGES)),
            (_consume, (a_ring, b_ring, full, empty, a_tiles, b_tiles, flags, c, count, m, n, k,
                        A_TURNED, B_TURNED, 1, SPAN, TILE, K, STAGES)),
            (_produce, (a, a_tiles, flags, a_ring, full, empty, count, columns, m, k, a_stride,
                        False, along[0], A_TURNED, EVEN, TILE, K, STAGES)),
            (_produce, (b, b_tiles, flags, b_ring, full, empty, count, columns, n, k, b_stride,
                        True, along[1], not B_TURNED, EVEN, TILE, K, STAGES)),
        ],
        [4, 4, 4],
        [CONSUMER, PRODUCER, PRODUCER],
    )  # fmt: skip


def takes(c: Tensor) -> bool:
    """Whether this kernel runs for such a result."""
    return c.is_cuda and architecture(c.device) == 90


def thirds_launch(turned: tuple[bool, bool], *operands: Tensor) -> Launch:
    """What computes flagged tiles of these: A (m, k), B (k, n), their tiles, flags and C.

    As they are stored, transposed if `turned`, A and B have the elements of a row side by side.
    """
    a, b, _, _, flags, c = operands
    sizes = *c.shape, a.shape[1]
    strides = a.stride(1 if turned[0] else 0), b.stride(1 if turned[1] else 0)

    def made() -> Launch:
        even = sizes[0] % TILE == sizes[1] % TILE == sizes[2] % BLOCK_K == 0
        # A constant: an argument spills.
        span = SPANS["few results" if c.numel() < SHARED_RESULTS else "many"]
        constants = {
            "A_TURNED": turned[0], "B_TURNED": turned[1], "EVEN": even, "SPAN": span, "TILE": TILE,
        }  # fmt: skip
        programs = min(flags.numel(), multiprocessors(c.device))
        return Launch(_thirds_kernel, CONFIG, (programs, 1, 1), (), (*sizes, *strides), constants)

    return kept_launch(made, ("thirds", sizes, strides, turned, c.device), *operands)
