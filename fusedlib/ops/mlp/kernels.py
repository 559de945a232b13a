# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""The two fused kernels of the SwiGLU and the GeGLU MLP, by tiles.

    gate = x Wgᵀ    up = x Wuᵀ    h = silu(gate) ⊙ up    y = h Wdᵀ              (Shazeer 2020)

or with another activation than silu, act(g) = g s(g), act'(g) = s + g s'(g):

| name      | s                        | s'           |
|-----------|--------------------------|--------------|
| silu      | σ(g)                     | s (1 − s)    |
| gelu_tanh | σ(z), z = g (a + b g²)   | s (1 − s) z' |
| gelu      | Φ(g) = ½ (1 + erf(g/√2)) | φ(g)         |

a = 2 √(2/π), b = 0.044715 a: σ(z) = ½ (1 + tanh(z/2)). Φ and φ are the normal distribution's.
`fusedlib.ops.mlp.activation` has the same in plain PyTorch.

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

All are contiguous, at 16 bytes. Sums over K and the activation are fp32. A packed weight
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

All of this is for silu. It holds of gelu with 1.13 for 1.1 and 0.8 for ½; by tanh with |z| for
|gate| in t, and exact gelu errs by 2⁻²² |gate| and its derivative by 2·2⁻²² in place of t |silu|
and t.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fusedlib.invariant import is_batch_invariant
from fusedlib.launch import Config, Launch, architecture, cdiv
from fusedlib.ops import blocks
from fusedlib.ops.arguments import ALIGNMENT, FEW_TOKENS
from fusedlib.ops.blocks import (
    load_block,
    smallest_config,
    store_block,
    tile_position,
)


@triton.jit
def activate(gate, sigmoid: tl.constexpr, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """act(gate) and s of fp32 numbers; `sigmoid` is a function of the kernel's language."""
    if ACTIVATION == "gelu":
        s = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        s = sigmoid(gate * (1.5957691216057308 + 0.07135481627260025 * (gate * gate)))
    else:
        tl.static_assert(ACTIVATION == "silu", "an activation that the kernels do not know")
        s = sigmoid(gate)
    return gate * s, s


@triton.jit
def slope(gate, activated, s, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """act'(gate), of what `activate` gave."""
    if ACTIVATION == "gelu":
        result = s + gate * (0.3989422804014327 * tl.exp(-0.5 * gate * gate))
    elif ACTIVATION == "gelu_tanh":
        # From |gate| = 16 on s is 0 or 1, whatever z' is, which must not overflow.
        inner = 1.5957691216057308 + 0.21406444881780074 * tl.minimum(gate * gate, 256.0)
        result = s + activated * (1 - s) * inner
    else:
        tl.static_assert(ACTIVATION == "silu", "an activation that the kernels do not know")
        result = s + activated * (1 - s)
    return result


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
    ACTIVATION: tl.constexpr, SAVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    w_up += up_row.to(tl.int64) * hidden  # blocks of gate and of up then share offsets and masks
    row_tiles, column_tiles = tl.cdiv(tokens, BLOCK_M), tl.cdiv(inner, BLOCK_N)
    row_tile, column_tile = tile_position(tl.program_id(0), row_tiles, column_tiles, GROUP_M)
    row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, hidden, BLOCK_K):
        a = load_block(x, row, k, tokens, hidden, hidden, BLOCK_M, BLOCK_K)
        b = load_block(w_gate, column, k, inner, hidden, hidden, BLOCK_N, BLOCK_K)
        c = load_block(w_up, column, k, inner, hidden, hidden, BLOCK_N, BLOCK_K)
        gate = tl.dot(a, b.T, gate)
        up = tl.dot(a, c.T, up)
    gate, gate_right = _left_and_right(gate, BLOCK_M, BLOCK_N)
    up, up_right = _left_and_right(up, BLOCK_M, BLOCK_N)
    half: tl.constexpr = BLOCK_N // 2
    _fwd_epilogue(
        gate, up, h_ptr, gate_up_ptr, row, column, tokens, inner, ACTIVATION, SAVE, BLOCK_M, half
    )  # fmt: skip
    _fwd_epilogue(
        gate_right, up_right, h_ptr, gate_up_ptr, row, column + half, tokens, inner,
        ACTIVATION, SAVE, BLOCK_M, half,
    )  # fmt: skip


@triton.jit
def _bwd_epilogue(  # type: ignore[no-untyped-def]
    dh, gate_up_ptr, d_gate_up_ptr, h_ptr, row, column, tokens, inner,
    ACTIVATION: tl.constexpr, GRADIENT: tl.constexpr, OUTPUT: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    wide = 2 * inner
    gate = load_block(gate_up_ptr, row, column, tokens, inner, wide, HEIGHT, WIDTH)
    up = load_block(gate_up_ptr + inner, row, column, tokens, inner, wide, HEIGHT, WIDTH)
    if GRADIENT:  # which may go where other threads of the program read gate and up
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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(tokens, BLOCK_M), tl.cdiv(inner, BLOCK_N)
    row_tile, column_tile = tile_position(tl.program_id(0), row_tiles, column_tiles, GROUP_M)
    row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
    dh = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if PRODUCT:
        for k in range(0, hidden, BLOCK_K):
            a = load_block(upstream, row, k, tokens, hidden, hidden, BLOCK_M, BLOCK_K)
            b = load_block(w_down, k, column, hidden, inner, inner, BLOCK_K, BLOCK_N)
            dh = tl.dot(a, b, dh)
    elif GRADIENT:
        dh = load_block(upstream, row, column, tokens, inner, inner, BLOCK_M, BLOCK_N)
        dh = dh.to(tl.float32)
    left, right = _left_and_right(dh, BLOCK_M, BLOCK_N)
    half: tl.constexpr = BLOCK_N // 2
    _bwd_epilogue(
        left, gate_up_ptr, d_gate_up_ptr, h_ptr, row, column, tokens, inner, ACTIVATION,
        GRADIENT, OUTPUT, BLOCK_M, half,
    )  # fmt: skip
    _bwd_epilogue(
        right, gate_up_ptr, d_gate_up_ptr, h_ptr, row, column + half, tokens, inner, ACTIVATION,
        GRADIENT, OUTPUT, BLOCK_M, half,
    )  # fmt: skip


# --- how kernels are cut -------------------------------------------------------------------------
#
# On Hopper kernels with roles run instead, whose tiles are fixed (`hopper`): its entries here are
# for uneven sizes, few tokens, and a Triton that does not compile those.
#
# A configuration belongs to an architecture, and is for half precision: in fp32 the interpreter
# alone multiplies by these kernels. `tests/test_kernels_ahead.py` compiles every entry for its
# architecture: nothing spilled, shared memory within the card's. Those of 9.0 were measured on an
# H200, those of other cards nowhere.

# Two accumulators of [block_m, block_n] live at once, so the tile is half of a plain product's.
FORWARD = {
    80: Config(128, 64, 32, 8, 4),
    89: Config(128, 64, 32, 8, 4),
    90: Config(128, 64, 64, 8, 4),
    100: Config(128, 64, 64, 8, 4),
}

# One accumulator, and an epilogue that reads two tiles and writes three.
BACKWARD = {
    80: Config(128, 128, 32, 8, 3),
    89: Config(128, 128, 32, 8, 3),
    90: Config(128, 128, 64, 8, 3),
    100: Config(128, 128, 64, 8, 3),
}

# No product: a thread has 16 bytes of a row in each half of the tile.
POINTWISE = Config(16, 128, 16, 4, 1)

# Rows that do not start at multiples of 16 elements are read an element at a time, which takes an
# address each: only a small tile has the registers, on every architecture.
UNALIGNED = Config(64, 64, 32, 8, 2)

# The smallest of which there are no more than ONE_WAVE. One H200, 64 tokens in a graph with a cold
# L2, µs, here and by cuBLAS's product and a pointwise kernel: forward at 512, 2048, 4096, 8192
# and 16384: 7.1, 12.7, 28.4, 76.6, 261 and 9.0, 14.8, 31.3, 78.6, 261; backward: 8.2, 12.5, 22.9,
# 47.7, 146 and 9.2, 13.3, 21.8, 48.2, 137.
FEW_TOKENS_CONFIGS = {
    ("forward", 90): (
        Config(64, 16, 128, 4, 6), Config(64, 32, 128, 4, 6), Config(64, 64, 64, 4, 6),
    ),
    ("backward", 90): (
        Config(64, 16, 128, 4, 6), Config(64, 32, 128, 4, 6), Config(64, 64, 128, 8, 5),
    ),
}  # fmt: skip


def few_tokens_configs(direction: str, arch: int) -> tuple[Config, ...]:
    """The configurations for at most FEW_TOKENS tokens, from small to large.

    No taller than those, and more, smaller programs than for many.
    """
    table = FORWARD if direction == "forward" else BACKWARD
    config = table[arch]
    small = replace(config, block_m=FEW_TOKENS, block_n=32, num_warps=4)
    return FEW_TOKENS_CONFIGS.get((direction, arch), (small,))


def choose_config(
    direction: str, device: torch.device, tokens: int, hidden: int, inner: int
) -> Config:
    """The configuration of a kernel that multiplies x or dy (tokens, hidden): "forward" is gate and
    up, "backward" dy Wd.
    """
    if device.type != "cuda":
        return blocks.INTERPRETER
    if hidden % ALIGNMENT or inner % ALIGNMENT:
        return UNALIGNED
    arch = architecture(device)
    if tokens <= FEW_TOKENS and not is_batch_invariant():
        return smallest_config(few_tokens_configs(direction, arch), tokens, inner)
    return (FORWARD if direction == "forward" else BACKWARD)[arch]


# --- launches ------------------------------------------------------------------------------------


def _grid(config: Config, tokens: int, inner: int) -> tuple[int, int, int]:
    """One program a tile of h."""
    return cdiv(tokens, config.block_m) * cdiv(inner, config.block_n), 1, 1


def fwd_launch(
    device: torch.device, tokens: int, hidden: int, inner: int, up_row: int, save: bool,
    activation: str = "silu", config: Config | None = None,
) -> Launch:  # fmt: skip
    """The launch of the forward kernel for x (tokens, hidden) and h (tokens, inner).

    It takes x, w_gate, w_up, gate_up, or h in its place, and h.
    """
    config = config or choose_config("forward", device, tokens, hidden, inner)
    scalars = tokens, hidden, inner, up_row
    constants = {"ACTIVATION": activation, "SAVE": save}
    return Launch(_swiglu_fwd_kernel, config, _grid(config, tokens, inner), scalars, constants)


class Variant(NamedTuple):
    """What the backward kernel does.

    Attributes:
        product: dh = dy Wd is computed; otherwise dh is given, if anything is.
        gradient: d(gate|up) is computed.
        output: h is computed.
    """

    product: bool
    gradient: bool
    output: bool


def bwd_launch(
    device: torch.device, tokens: int, hidden: int, inner: int, variant: Variant,
    activation: str = "silu", config: Config | None = None,
) -> Launch:  # fmt: skip
    """The launch of the backward kernel for dy (tokens, hidden) and h (tokens, inner).

    It takes dy, or dh (tokens, inner) where there is no product, w_down, gate_up, d_gate_up, which
    may be gate_up, and h; gate_up in place of each that it neither reads nor writes.
    """
    product, gradient, output = variant
    config = config or (
        choose_config("backward", device, tokens, hidden, inner) if product else POINTWISE
    )
    scalars = tokens, hidden if product else inner, inner
    constants = {
        "ACTIVATION": activation, "PRODUCT": product, "GRADIENT": gradient, "OUTPUT": output,
    }  # fmt: skip
    return Launch(_swiglu_bwd_kernel, config, _grid(config, tokens, inner), scalars, constants)
