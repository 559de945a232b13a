# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""Three linear layers of one x at few tokens: all results by one launch, all gradients by another.

One H100, bf16, in a graph with cold weights, µs, here and by torch (its better way), x of 896, 2048
and 4096, weights of as many rows and an eighth, a quarter and a quarter of it:

| tokens | forward: 896 | 2048        | 4096       | gradients: 896 | 2048       | 4096       |
|--------|--------------|-------------|------------|----------------|------------|------------|
| 64     | 4.6, 12.7    | 8.1, 18.7   | 23.3, 34.4 | 5.9, 12.7      | 13.6, 25.7 | 44.3, 62.8 |
| 128    | 4.5, 12.6    | 9.9, 18.6   | 25.7, 35.4 | 5.9, 12.5      | 17.5, 27.9 | 50.5, 68.0 |
| 256    | 5.9, 13.1    | 12.4, 19.4  | 32.3, 41.1 | 7.6, 14.8      | 24.4, 32.0 | 89.5, 80.3 |
| 512    | 7.1, 13.6    | 17.3, 23.5  | 61.3, 49.2 |                |            |            |

    forward     y_i = x W_iᵀ + b_i
    backward    d_x = Σ dy_i W_i        d_W_i = dy_iᵀ x

| tensor          | shape               |
|-----------------|---------------------|
| x, d_x          | (tokens, inputs)    |
| W_i, d_W_i      | (outputs_i, inputs) |
| b_i             | (outputs_i,)        |
| y_i, dy_i       | (tokens, outputs_i) |

All are contiguous, at 16 bytes, of one dtype of 16 bits. Sums are fp32, rounded once: that of d_x
too, over all three. Of n terms each errs by at most n 2⁻²² of their magnitudes' sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedlib.launch import INTERPRETED, Config, Launch, architecture, cdiv
from fusedlib.ops.arguments import FEW_TOKENS
from fusedlib.ops.blocks import (
    ONE_WAVE,
    count_tiles,
    few_tokens_config,
    gradient_tiles,
    load_block,
    outer_product,
    store_block,
)

# From small to large, of a result: `few_tokens_config`.
PRODUCT_CONFIGS = {
    90: (
        Config(64, 16, 128, 4, 8), Config(64, 32, 128, 4, 6), Config(64, 64, 128, 8, 5),
        Config(128, 64, 64, 8, 6), Config(128, 128, 64, 8, 5),
    ),
}  # fmt: skip
# The most tokens of which gradients come by one launch: of weights of SMALL elements in all, and of
# larger ones.
SMALL_WEIGHTS, MAX_TOKENS_OF_SMALL, MAX_TOKENS_OF_LARGE = 1 << 23, 256, 128

# Pointers and sizes are chosen, not code: with a loop for each of the three, each would have shared
# memory of its own.


@triton.jit
def row_product(  # type: ignore[no-untyped-def]
    a, b, bias, c, tile, tokens, depth, width, BIASED: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The tile-th [HEIGHT, WIDTH] of c (tokens, width) = a bᵀ, plus a bias (width,) if BIASED."""
    row_tiles = tl.cdiv(tokens, HEIGHT)
    row, column = tile % row_tiles * HEIGHT, tile // row_tiles * WIDTH
    acc = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    for k in range(0, depth, DEPTH):
        left = load_block(a, row, k, tokens, depth, depth, HEIGHT, DEPTH)
        right = load_block(b, column, k, width, depth, depth, WIDTH, DEPTH)
        acc = tl.dot(left, right.T, acc)
    if BIASED:
        j = column + tl.arange(0, WIDTH)
        acc += tl.load(bias + j, mask=j < width, other=0.0).to(tl.float32)[None, :]
    store_block(c, acc, row, column, tokens, width, width, HEIGHT, WIDTH)


@triton.jit(do_not_specialize=("tokens", "q_programs", "k_programs"))
def _few_projections_kernel(  # type: ignore[no-untyped-def]
    x, w_q, w_k, w_v, b_q, b_k, b_v, q, k, v, tokens, inputs, q_width, k_width, v_width,
    q_programs, k_programs, BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The first `q_programs` programs are q's, `k_programs` more k's, the rest v's."""
    program = tl.program_id(0)
    is_q, is_k = program < q_programs, program < q_programs + k_programs
    tile = program - tl.where(is_q, 0, tl.where(is_k, q_programs, q_programs + k_programs))
    weight = tl.where(is_q, w_q, tl.where(is_k, w_k, w_v))
    result = tl.where(is_q, q, tl.where(is_k, k, v))
    width = tl.where(is_q, q_width, tl.where(is_k, k_width, v_width))
    bias = tl.where(is_q, b_q, tl.where(is_k, b_k, b_v))
    row_product(
        x, weight, bias, result, tile, tokens, inputs, width, BIASED, BLOCK_M, BLOCK_N, BLOCK_K
    )  # fmt: skip


@triton.jit
def _sum_of_products(  # type: ignore[no-untyped-def]
    d_q, d_k, d_v, w_q, w_k, w_v, d_x, tile, tokens, inputs, q_width, k_width, v_width,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The tile-th [HEIGHT, WIDTH] of d_x (tokens, inputs) = d_q w_q + d_k w_k + d_v w_v."""
    row_tiles = tl.cdiv(tokens, HEIGHT)
    row, column = tile % row_tiles * HEIGHT, tile // row_tiles * WIDTH
    acc = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    q_blocks, k_blocks = tl.cdiv(q_width, DEPTH), tl.cdiv(k_width, DEPTH)
    v_blocks = tl.cdiv(v_width, DEPTH)
    for block in range(0, q_blocks + k_blocks + v_blocks):
        is_q, is_k = block < q_blocks, block < q_blocks + k_blocks
        k = (block - tl.where(is_q, 0, tl.where(is_k, q_blocks, q_blocks + k_blocks))) * DEPTH
        upstream = tl.where(is_q, d_q, tl.where(is_k, d_k, d_v))
        weight = tl.where(is_q, w_q, tl.where(is_k, w_k, w_v))
        depth = tl.where(is_q, q_width, tl.where(is_k, k_width, v_width))
        left = load_block(upstream, row, k, tokens, depth, depth, HEIGHT, DEPTH)
        right = load_block(weight, k, column, depth, inputs, inputs, DEPTH, WIDTH)
        acc = tl.dot(left, right, acc)
    store_block(d_x, acc, row, column, tokens, inputs, inputs, HEIGHT, WIDTH)


@triton.jit(do_not_specialize=("tokens", "x_programs", "q_programs", "k_programs"))
def _few_projections_gradients_kernel(  # type: ignore[no-untyped-def]
    x, w_q, w_k, w_v, d_q, d_k, d_v, d_x, d_w_q, d_w_k, d_w_v,
    tokens, inputs, q_width, k_width, v_width, x_programs, q_programs, k_programs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SIDE: tl.constexpr,
    SPAN: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The first `x_programs` programs are d_x's, then those of the weights of q, k and v."""
    program = tl.program_id(0)
    if program < x_programs:
        _sum_of_products(
            d_q, d_k, d_v, w_q, w_k, w_v, d_x, program, tokens, inputs, q_width, k_width, v_width,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        program -= x_programs
        is_q, is_k = program < q_programs, program < q_programs + k_programs
        tile = program - tl.where(is_q, 0, tl.where(is_k, q_programs, q_programs + k_programs))
        upstream = tl.where(is_q, d_q, tl.where(is_k, d_k, d_v))
        result = tl.where(is_q, d_w_q, tl.where(is_k, d_w_k, d_w_v))
        width = tl.where(is_q, q_width, tl.where(is_k, k_width, v_width))
        outer_product(upstream, x, result, tile, tokens, width, inputs, TOKENS, SIDE, SPAN)


def projections_launch(
    device: torch.device, tokens: int, inputs: int, widths: tuple[int, ...], biased: bool
) -> Launch | None:
    """The launch of all three, or None where their tiles do not run at once.

    It takes x, the three weights, the biases, or anything, and the results.
    """
    config = few_tokens_config(PRODUCT_CONFIGS, device, tokens, *widths)
    programs = count_tiles(config, tokens, *widths)
    if tokens > FEW_TOKENS and not (_has_larger_tiles(device) and programs <= ONE_WAVE):
        return None
    scalars = tokens, inputs, *widths, *(count_tiles(config, tokens, width) for width in widths[:2])
    grid = programs, 1, 1
    return Launch(_few_projections_kernel, config, grid, scalars, {"BIASED": biased})


def gradients_launch(
    device: torch.device, tokens: int, inputs: int, widths: tuple[int, ...]
) -> Launch | None:
    """The launch of d_x and of all weights' gradients, or None where torch is faster.

    It takes x, the three weights, what flows back to each result, and the gradients.
    """
    most = MAX_TOKENS_OF_SMALL if inputs * sum(widths) <= SMALL_WEIGHTS else MAX_TOKENS_OF_LARGE
    if tokens > (most if _has_larger_tiles(device) else FEW_TOKENS):
        return None
    config, constants = gradient_tiles(device, tokens, sum(widths), inputs)
    side, span = constants["SIDE"], constants["SPAN"]
    x_programs = count_tiles(config, tokens, inputs)
    weight_programs = [cdiv(width, side) * cdiv(inputs, side * span) for width in widths]
    scalars = tokens, inputs, *widths, x_programs, *weight_programs[:2]
    grid = x_programs + sum(weight_programs), 1, 1
    return Launch(_few_projections_gradients_kernel, config, grid, scalars, constants)


def _has_larger_tiles(device: torch.device) -> bool:
    """True if the device has configurations for more than FEW_TOKENS tokens."""
    return INTERPRETED or architecture(device) in PRODUCT_CONFIGS
