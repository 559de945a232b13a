# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""All gradients of an MLP's x and weights at few tokens, in one launch.

    d_x = d_gate Wg + d_up Wu    d_Wgu = d_gate|upᵀ x    d_Wd = dyᵀ h

With t tokens a pass moves weights and their gradients and does little else: t multiply-adds for
every number read or written. So a launch, some 5 µs of the host, is worth as much as 20 MB, and
the products share one: the programs that read Wg and Wu for d_x run beside those that write d_Wgu
and d_Wd. Those sum over tokens alone, one or two blocks, and only write.

| tensor                     | shape             | strides                     |
|----------------------------|-------------------|-----------------------------|
| x, dy                      | (tokens, hidden)  | contiguous                  |
| w_gate, w_up               | (inner, hidden)   | contiguous                  |
| d_w_gate_up                | (2·inner, hidden) | contiguous                  |
| d_w_down                   | (hidden, inner)   | contiguous                  |
| h                          | (tokens, inner)   | contiguous                  |
| d_gate_up                  | (tokens, 2·inner) | contiguous                  |

Sums are fp32. A packed weight is passed twice, as both, and up begins at its row `up_row` = inner;
of a pair that is 0. Factors of any strides and more tokens are torch.mm's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.launch import (
    Launch,
    PlannedLaunch,
    allocator,
    cdiv,
    contiguous_layout,
    without_memory,
)
from fusedlib.ops.blocks import (
    count_tiles,
    gradient_tiles,
    load_block,
    outer_product,
    store_block,
)
from fusedlib.ops.mlp.products import EITHER_SAVE, Products
from fusedlib.ops.mlp.route import Gradients, MLPProblem, WantedGradients


@triton.jit
def _sum_of_products(  # type: ignore[no-untyped-def]
    a, b_left, b_right, c, tile, tokens, depth, right_row, width,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The tile-th [HEIGHT, WIDTH] of c (tokens, width): the left columns of a (tokens, 2·depth) by
    b_left's first rows, and the right ones by b_right's from `right_row` on, in one sum.
    """
    row_tiles = tl.cdiv(tokens, HEIGHT)
    row, column = tile % row_tiles * HEIGHT, tile // row_tiles * WIDTH
    acc = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    # One loop over both, so that loads do not run dry between them: the address jumps from the end
    # of the left weight to the right one. Neither half may see the other's, not even times zero:
    # that would be nan beside inf.
    blocks = tl.cdiv(depth, DEPTH)
    overlap = blocks * DEPTH - depth  # where the left half ends within a block
    first_row = right_row.to(tl.int64) - depth
    size: tl.constexpr = b_left.dtype.element_ty.primitive_bitwidth // 8
    gap = ((b_right + first_row * width).to(tl.int64) - b_left.to(tl.int64)) // size
    gap = tl.multiple_of(gap, 8)  # elements, of 16 bits: weights begin at 16 bytes
    for block in range(0, 2 * blocks):
        right = block >= blocks
        k = block * DEPTH - tl.where(right, overlap, 0)
        end = tl.where(right, 2 * depth, depth)
        a_block = load_block(a, row, k, tokens, end, 2 * depth, HEIGHT, DEPTH)
        weight = b_left + tl.where(right, gap, 0)
        b_block = load_block(weight, k, column, end, width, width, DEPTH, WIDTH)
        acc = tl.dot(a_block, b_block, acc)
    store_block(c, acc, row, column, tokens, width, width, HEIGHT, WIDTH)


@triton.jit(do_not_specialize=("tokens", "up_row", "x_programs", "gate_up_programs"))
def _few_gradients_kernel(  # type: ignore[no-untyped-def]
    dy, x, h, d_gate_up, w_gate, w_up, d_x, d_w_gate_up, d_w_down, tokens, hidden, inner, up_row,
    x_programs, gate_up_programs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SIDE: tl.constexpr,
    SPAN: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """`x_programs` programs compute d_x, then `gate_up_programs` d_w_gate_up, the rest d_w_down."""
    # The longest first: programs of d_x sum over 2·inner, all others over the tokens.
    program = tl.program_id(0)
    wide = 2 * inner
    if program < x_programs:
        _sum_of_products(
            d_gate_up, w_gate, w_up, d_x, program, tokens, inner, up_row, hidden,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    elif program < x_programs + gate_up_programs:
        tile = program - x_programs
        outer_product(d_gate_up, x, d_w_gate_up, tile, tokens, wide, hidden, TOKENS, SIDE, SPAN)
    else:
        tile = program - x_programs - gate_up_programs
        outer_product(dy, h, d_w_down, tile, tokens, hidden, inner, TOKENS, SIDE, SPAN)


def gradients_launch(
    wants: tuple[bool, bool, bool], device: torch.device, tokens: int, hidden: int, inner: int,
    up_row: int = 0,
) -> Launch:  # fmt: skip
    """The launch of the wanted ones of d_x, d_w_gate_up and d_w_down, over all tokens at once.

    Its matrices are dy, x, h, d_gate_up, w_gate, w_up and the three results, anything for what is
    not wanted.
    """
    config, constants = gradient_tiles(device, tokens, 3 * inner, hidden)
    side, span = constants["SIDE"], constants["SPAN"]
    x_programs = wants[0] * count_tiles(config, tokens, hidden)
    gate_up_programs = wants[1] * cdiv(2 * inner, side) * cdiv(hidden, side * span)
    down_programs = wants[2] * cdiv(hidden, side) * cdiv(inner, side * span)
    programs = x_programs + gate_up_programs + down_programs, 1, 1
    scalars = tokens, hidden, inner, up_row, x_programs, gate_up_programs
    return Launch(_few_gradients_kernel, config, programs, scalars, constants)


class FewTokensProducts(Products):
    """The plain products of an MLP of even sizes: torch's, but for all gradients in one launch."""

    def __init__(self, problem: MLPProblem) -> None:
        super().__init__()
        self._device, self._dtype = problem.device, problem.dtype
        self._tokens, self._hidden, self._inner = problem.sizes
        self._launches: dict[Hashable, Launch] = {}
        self._up_row = 0 if problem.pair else problem.inner
        self._new = allocator(problem.device)
        self._w_gate_up = contiguous_layout((2 * problem.inner, problem.hidden), problem.dtype)
        self._w_down = contiguous_layout((problem.hidden, problem.inner), problem.dtype)

    def launches(self, problem: MLPProblem) -> Iterator[PlannedLaunch]:
        """The launch of all gradients."""
        tokens, dtype = self._tokens, self._dtype
        sizes = (tokens, self._hidden), (tokens, self._inner), (tokens, 2 * self._inner)
        x, h, gate_up = without_memory(*(contiguous_layout(size, dtype) for size in sizes))
        w_gate_up, w_down = without_memory(self._w_gate_up, self._w_down)
        launch = self._gradients_launch(True, True, True)
        matrices = x, x, h, gate_up, w_gate_up, w_gate_up, x, w_gate_up, w_down
        yield PlannedLaunch("gradients", EITHER_SAVE, launch, matrices)

    def _gradients_launch(self, x: bool, w_gate_up: bool, w_down: bool) -> Launch:
        sizes = self._tokens, self._hidden, self._inner, self._up_row
        return gradients_launch((x, w_gate_up, w_down), self._device, *sizes)

    def gradients(
        self, wants: WantedGradients, pair: bool, buffers: list[Tensor | None], upstream: Tensor,
        x: Tensor | None, w_gate: Tensor | None, w_up: Tensor | None,
    ) -> Gradients:  # fmt: skip
        """The wanted ones of d_x, d_w_gate_up and d_w_down, in one launch.

        d_x has upstream's shape. Both gradients of a pair are computed where one is wanted.
        """
        h, d_gate_up = buffers
        wants_x, wants_w_gate, wants_w_up, wants_w_down = wants
        wants_w_gate_up = wants_w_gate or wants_w_up
        computed = wants_x, wants_w_gate_up, wants_w_down
        launch = self._launches.get(computed)
        if launch is None:
            launch = self._launches[computed] = self._gradients_launch(*computed)
        # What is not wanted is neither read nor written: any matrix will do.
        dy = upstream
        d_x = self._new(tuple(dy.shape), dy.stride(), self._dtype) if wants_x else dy
        d_w_gate_up = self._new(*self._w_gate_up) if wants_w_gate_up else dy
        d_w_down = self._new(*self._w_down) if wants_w_down else dy
        launch(
            dy, dy if x is None else x, dy if h is None else h,
            dy if d_gate_up is None else d_gate_up, dy if w_gate is None else w_gate,
            (dy if w_gate is None else w_gate) if w_up is None else w_up,
            d_x, d_w_gate_up, d_w_down,
        )  # fmt: skip
        if pair and wants_w_gate != wants_w_up:
            d_w_gate_up = d_w_gate_up[: self._inner] if wants_w_gate else d_w_gate_up[self._inner :]
        return (
            d_x if wants_x else None,
            d_w_gate_up if wants_w_gate_up else None,
            d_w_down if wants_w_down else None,
        )
