# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""The two fused kernels of the SwiGLU and the GeGLU MLP, by tiles.

    gate = x Wgᵀ    up = x Wuᵀ    h = silu(gate) ⊙ up    y = h Wdᵀ              (Shazeer 2020)

or with another activation than silu: `fusedlib.ops.mlp.activation_kernels`.

forward     both products and h in one kernel; gate|up is stored when the backward wants it
backward    dh = dy Wd, and in its epilogue, with s = sigmoid(gate),
                d_up   = dh ⊙ gate ⊙ s
                d_gate = dh ⊙ up ⊙ s ⊙ (1 + gate ⊙ (1 − s))
                h      = gate ⊙ s ⊙ up, recomputed for d_Wd = dyᵀ h

| tensor                            | shape             |
|-----------------------------------|-------------------|
| x, dy                             | (tokens, hidden)  |
| w_gate, w_up: or packed w_gate_up | (inner, hidden)   |
| w_down                            | (hidden, inner)   |
| gate_up, d_gate_up: columns       | (tokens, 2·inner) |
| h, dh                             | (tokens, inner)   |

All are contiguous, at 16 bytes. Sums over K and the activation are fp32. Blocks come through
pointers, or through tensor descriptors (TMA) where the configuration asks for them. A packed weight
(2·inner, hidden) has the gate rows above the up rows; it is passed twice, as both weights, and
`up_row`, where up begins in the second of them, is `inner` for it and 0 for a pair.

Error bound, element by element and to first order, where nothing overflows or underflows. v is the
dtype's unit roundoff: 2⁻⁸ bf16, 2⁻¹¹ fp16, 2⁻²⁴ fp32 at torch's "highest". A sum of n terms errs by
n 2⁻²² of their magnitudes' at most, in any order, by truncating tensor cores too; one of split fp32
factors has a bound of its own (`ops.matmul.kernels`): (18 + n/4096) 2⁻²² of them, before Hopper
30 for 18, and 2⁻³⁹ (max|a| Σ|b| + max|b| Σ|a|) more. silu and its derivative err by
t = (8 + |gate|) 2⁻²², silu relatively; |silu'| < 1.1 and |silu''| ≤ 1/2. With [d] = [d_gate|d_up]

    Δgate, Δup   hidden 2⁻²² |x||W|ᵀ + v |gate|, v |up|
    Δh           1.1 |up| Δgate + |silu| (Δup + t |up|) + v |h|
    Δy           (Δh + inner 2⁻²² |h|) |Wd|ᵀ + v |y|
    Δdh          hidden 2⁻²² |dy||Wd| + v |dh|
    Δd_up        |silu| Δdh + |dh| (1.1 Δgate + t |silu|) + v |d_up|
    Δd_gate      |up silu'| Δdh + |dh| (|silu'| Δup + |up| (Δgate / 2 + t)) + v |d_gate|
    Δd_x         (Δd + 2·inner 2⁻²² |d|) |Wgu| + v |d_x|
    Δd_Wgu       (Δd + tokens 2⁻²² |d|)ᵀ |x| + v |d_Wgu|
    Δd_Wd        |dy|ᵀ (Δh + tokens 2⁻²² |h|) + v |d_Wd|

Of a pair of weights d_x in half precision is a sum of two products, the first of them rounded:
+ v |d_gate Wg|. It counts gate, up and dh as rounded before the activation, as some kernels and
unfused code do, and torch.mm's sums as fp32: cuBLAS may add parts of one in half precision, which
torch allows unless `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` (or fp16's)
is off.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from fusedlib.launch import Config, Launch, cdiv, multiprocessors
from fusedlib.ops.blocks import load_block, store_block, tile_position
from fusedlib.ops.mlp.activation_kernels import activate, slope
from fusedlib.ops.mlp.configs import POINTWISE, choose_config

try:
    from fusedlib.ops.mlp import hopper
except (ImportError, AttributeError):  # Gluon is experimental: other releases may name it otherwise
    hopper = None  # type: ignore[assignment]


def _grid(
    config: Config, device: torch.device, tokens: int, inner: int
) -> tuple[int, int, int]:  # fmt: skip
    """One program a tile; persistent ones no more than the device has multiprocessors."""
    tiles = cdiv(tokens, config.block_m) * cdiv(inner, config.block_n)
    if not config.persistent:
        return (tiles, 1, 1)
    return (min(tiles, multiprocessors(device)), 1, 1)


@triton.jit
def _left_and_right(block, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Left and right half of a [HEIGHT, WIDTH] block.

    An epilogue that takes a tile by halves needs registers for half of its reads and writes: on
    sm_90 the backward of a 128·128 tile then spills nothing, where the whole one spilled 336 bytes.
    """
    return block.reshape(HEIGHT, 2, WIDTH // 2).permute(0, 2, 1).split()


@triton.jit
def _fwd_epilogue(  # type: ignore[no-untyped-def]
    gate, up, h_ptr, gate_up_ptr, row, column, tokens, inner,
    ACTIVATION: tl.constexpr, SAVE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    activated, _ = activate(gate, tl.sigmoid, ACTIVATION)
    h = activated * up
    store_block(h_ptr, h, row, column, tokens, inner, inner, HEIGHT, WIDTH)
    if SAVE:
        wide = 2 * inner
        store_block(gate_up_ptr, gate, row, column, tokens, inner, wide, HEIGHT, WIDTH)
        store_block(gate_up_ptr + inner, up, row, column, tokens, inner, wide, HEIGHT, WIDTH)


@triton.jit(do_not_specialize=("tokens", "up_row"))  # a binary for packed weights and for pairs
def _swiglu_fwd_kernel(  # type: ignore[no-untyped-def]
    x, w_gate, w_up, gate_up_ptr, h_ptr, tokens, hidden, inner, up_row,
    ACTIVATION: tl.constexpr, SAVE: tl.constexpr, DESCRIPTORS: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    if not DESCRIPTORS:  # blocks of gate and of up then share their offsets and masks
        w_up += up_row.to(tl.int64) * hidden
        up_row = 0
    row_tiles, column_tiles = tl.cdiv(tokens, BLOCK_M), tl.cdiv(inner, BLOCK_N)
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, row_tiles * column_tiles, step, flatten=FLATTEN):
        row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, GROUP_M)
        row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, hidden, BLOCK_K):
            a = load_block(x, row, k, tokens, hidden, hidden, BLOCK_M, BLOCK_K, DESCRIPTORS)
            # By descriptor rows past inner may be up's: their columns are never stored.
            b = load_block(w_gate, column, k, inner, hidden, hidden, BLOCK_N, BLOCK_K, DESCRIPTORS)
            c = load_block(
                w_up, up_row + column, k, up_row + inner, hidden, hidden,
                BLOCK_N, BLOCK_K, DESCRIPTORS,
            )  # fmt: skip
            gate = tl.dot(a, b.T, gate)
            up = tl.dot(a, c.T, up)
        gate, gate_right = _left_and_right(gate, BLOCK_M, BLOCK_N)
        up, up_right = _left_and_right(up, BLOCK_M, BLOCK_N)
        half: tl.constexpr = BLOCK_N // 2
        _fwd_epilogue(
            gate, up, h_ptr, gate_up_ptr, row, column, tokens, inner,
            ACTIVATION, SAVE, BLOCK_M, half,
        )  # fmt: skip
        _fwd_epilogue(
            gate_right, up_right, h_ptr, gate_up_ptr, row, column + half, tokens, inner,
            ACTIVATION, SAVE, BLOCK_M, half,
        )  # fmt: skip


def fwd_launch(
    device: torch.device, tokens: int, hidden: int, inner: int, up_row: int, save: bool,
    activation: str = "silu", config: Config | None = None,
) -> Launch:  # fmt: skip
    """The launch of the forward kernel for x (tokens, hidden) and h (tokens, inner).

    It takes x, w_gate, w_up, gate_up, or h in its place, and h.
    """
    config = config or choose_config("forward", device, tokens, hidden, inner)
    m, n, k = config.block_m, config.block_n, config.block_k
    scalars = tokens, hidden, inner, up_row
    constants = {"ACTIVATION": activation, "SAVE": save, "FLATTEN": config.persistent}
    programs, blocks = _grid(config, device, tokens, inner), ([m, k], [n, k], [n, k])
    return Launch(_swiglu_fwd_kernel, config, programs, blocks, scalars, constants)


def disable_hopper_kernels(error: TritonError) -> None:
    """From now on; what did not compile has written nothing."""
    global hopper
    if hopper is not None:
        warnings.warn(
            f"fusedlib's MLP for Hopper does not compile with Triton {triton.__version__}; a "
            f"slower kernel runs instead. {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
    hopper = None  # type: ignore[assignment]


@triton.jit
def _bwd_epilogue(  # type: ignore[no-untyped-def]
    dh, gate_up_ptr, d_gate_up_ptr, h_ptr, row, column, tokens, inner,
    ACTIVATION: tl.constexpr, GRADIENT: tl.constexpr, OUTPUT: tl.constexpr, IN_PLACE: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    wide = 2 * inner
    gate = load_block(gate_up_ptr, row, column, tokens, inner, wide, HEIGHT, WIDTH, False)
    up = load_block(gate_up_ptr + inner, row, column, tokens, inner, wide, HEIGHT, WIDTH, False)
    if IN_PLACE:  # d(gate|up) goes where other threads of the program read gate and up
        tl.debug_barrier()
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    activated, s = activate(gate, tl.sigmoid, ACTIVATION)
    if OUTPUT:
        store_block(h_ptr, activated * up, row, column, tokens, inner, inner, HEIGHT, WIDTH)
    if GRADIENT:
        d_gate = dh * up * slope(gate, activated, s, ACTIVATION)
        store_block(d_gate_up_ptr, d_gate, row, column, tokens, inner, wide, HEIGHT, WIDTH)
        d_up = dh * activated
        store_block(d_gate_up_ptr + inner, d_up, row, column, tokens, inner, wide, HEIGHT, WIDTH)


@triton.jit(do_not_specialize=("tokens",))
def _swiglu_bwd_kernel(  # type: ignore[no-untyped-def]
    upstream, w_down, gate_up_ptr, d_gate_up_ptr, h_ptr, tokens, hidden, inner,
    ACTIVATION: tl.constexpr, PRODUCT: tl.constexpr, GRADIENT: tl.constexpr, OUTPUT: tl.constexpr,
    IN_PLACE: tl.constexpr, DESCRIPTORS: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(tokens, BLOCK_M), tl.cdiv(inner, BLOCK_N)
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, row_tiles * column_tiles, step, flatten=FLATTEN):
        row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, GROUP_M)
        row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
        dh = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if PRODUCT:
            for k in range(0, hidden, BLOCK_K):
                a = load_block(
                    upstream, row, k, tokens, hidden, hidden, BLOCK_M, BLOCK_K, DESCRIPTORS
                )
                b = load_block(
                    w_down, k, column, hidden, inner, inner, BLOCK_K, BLOCK_N, DESCRIPTORS
                )
                dh = tl.dot(a, b, dh)
        elif GRADIENT:
            dh = load_block(upstream, row, column, tokens, inner, inner, BLOCK_M, BLOCK_N, False)
            dh = dh.to(tl.float32)
        left, right = _left_and_right(dh, BLOCK_M, BLOCK_N)
        half: tl.constexpr = BLOCK_N // 2
        _bwd_epilogue(
            left, gate_up_ptr, d_gate_up_ptr, h_ptr, row, column, tokens, inner, ACTIVATION,
            GRADIENT, OUTPUT, IN_PLACE, BLOCK_M, half,
        )  # fmt: skip
        _bwd_epilogue(
            right, gate_up_ptr, d_gate_up_ptr, h_ptr, row, column + half, tokens, inner, ACTIVATION,
            GRADIENT, OUTPUT, IN_PLACE, BLOCK_M, half,
        )  # fmt: skip


class Variant(NamedTuple):
    """What the backward kernel does.

    Attributes:
        product: dh = dy Wd is computed; otherwise dh is given, if anything is.
        gradient: d(gate|up) is computed.
        output: h is computed.
        in_place: d(gate|up) is written over gate|up.
    """

    product: bool
    gradient: bool
    output: bool
    in_place: bool


def bwd_launch(
    device: torch.device, tokens: int, hidden: int, inner: int, variant: Variant,
    activation: str = "silu", config: Config | None = None,
) -> Launch:  # fmt: skip
    """The launch of the backward kernel for dy (tokens, hidden) and h (tokens, inner).

    It takes dy, or dh (tokens, inner) where there is no product, w_down, gate_up, d_gate_up and h,
    gate_up in place of each that it neither reads nor writes.
    """
    product, gradient, output, in_place = variant
    config = config or (
        choose_config("backward", device, tokens, hidden, inner) if product else POINTWISE
    )
    m, n, k = config.block_m, config.block_n, config.block_k
    scalars = tokens, hidden if product else inner, inner
    # In a flattened loop a barrier would keep loads from being pipelined; elsewhere it costs
    # nothing, and one binary serves both.
    in_place = in_place or (gradient and not config.persistent)
    constants = {
        "ACTIVATION": activation, "PRODUCT": product, "GRADIENT": gradient, "OUTPUT": output,
        "IN_PLACE": in_place, "FLATTEN": config.persistent and not in_place,
    }  # fmt: skip
    programs = _grid(config, device, tokens, inner)
    return Launch(_swiglu_bwd_kernel, config, programs, ([m, k], [k, n]), scalars, constants)
