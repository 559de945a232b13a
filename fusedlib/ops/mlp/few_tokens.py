# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""The plain products of the SwiGLU MLP at few tokens, in as few launches as there can be.

    forward     y = h Wdᵀ
    backward    d_x = d_gate Wg + d_up Wu    d_Wgu = d_gate|upᵀ x    d_Wd = dyᵀ h      (one kernel)

With t tokens both passes move weights and their gradients and do little else: t multiply-adds for
every number read or written. So a launch, some 5 µs of the host, is worth as much as 20 MB, and
the products of the backward share one: the programs that read Wg and Wu for d_x run beside those
that write d_Wgu and d_Wd. Those sum over tokens alone, one or two blocks, and only write.

| tensor                     | shape             | strides                     |
|----------------------------|-------------------|-----------------------------|
| x, dy                      | (tokens, hidden)  | contiguous                  |
| w_gate, w_up               | (inner, hidden)   | contiguous                  |
| d_w_gate_up                | (2·inner, hidden) | contiguous                  |
| w_down, d_w_down           | (hidden, inner)   | contiguous                  |
| h                          | (tokens, inner)   | contiguous                  |
| d_gate_up                  | (tokens, 2·inner) | contiguous                  |

Sums are fp32. A packed weight is passed twice, as both, and up begins at its row `up_row` = inner;
of a pair that is 0. Factors of any strides and more tokens are torch.mm's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.launch import (
    Config,
    Launch,
    PlannedLaunch,
    allocator,
    architecture,
    cdiv,
    contiguous_layout,
    without_memory,
)
from fusedlib.ops.arguments import FEW_TOKENS
from fusedlib.ops.blocks import load_block, store_block
from fusedlib.ops.mlp import plan as plain
from fusedlib.ops.mlp import route
from fusedlib.ops.mlp.route import (
    ONE_WAVE,
    Gradients,
    MLPProblem,
    WantedGradients,
    count_tiles,
    smallest_config,
)

# From small to large: `route.smallest_config`. One H200, in a graph with a cold L2, µs,
# here and cuBLAS: y at 512, 2048, 4096, 8192 and 16384: 6.0, 9.2, 18.2, 44.4, 144 and 6.2, 9.9,
# 18.6, 46.2, 141; the three products of the backward: 7.9, 23.0, 60.0, 198, 737 and 14.6, 28.2,
# 69.9, 205, 734. A ring of 9 holds no more than one of 4 twice as deep, and two programs still fit.
ROW_PRODUCT_CONFIGS = {
    90: (
        Config(64, 16, 128, 4, 8), Config(64, 32, 128, 4, 6), Config(64, 64, 128, 8, 5),
        Config(128, 64, 64, 8, 6), Config(128, 128, 64, 8, 5),
    ),
}  # fmt: skip
D_X_CONFIGS = {90: (Config(64, 32, 64, 4, 9), Config(64, 64, 64, 4, 6), Config(128, 64, 64, 8, 5))}
# The products over tokens have tiles of OUTER_TILE_SIDE²; for more than MAX_DEPTH tokens those need
# too much shared memory.
OUTER_TILE_SIDE, MAX_DEPTH = {90: 128}, 128
# Elsewhere: shared memory of an RTX 4090, and registers of a B200, where tiles of 128² spill.
DEFAULT_CONFIGS, DEFAULT_TILE_SIDE = (Config(FEW_TOKENS, 32, 64, 4, 4),), 64
MANY_TILES = 8192
# Triton's interpreter has tiles so small that a test's shape has several each way.
INTERPRETED = triton.knobs.runtime.interpret


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
        left = load_block(a, row, k, tokens, depth, depth, HEIGHT, DEPTH, False)
        right = load_block(b, column, k, width, depth, depth, WIDTH, DEPTH, False)
        acc = tl.dot(left, right.T, acc)
    if BIASED:
        j = column + tl.arange(0, WIDTH)
        acc += tl.load(bias + j, mask=j < width, other=0.0).to(tl.float32)[None, :]
    store_block(c, acc, row, column, tokens, width, width, HEIGHT, WIDTH)


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
        a_block = load_block(a, row, k, tokens, end, 2 * depth, HEIGHT, DEPTH, False)
        weight = b_left + tl.where(right, gap, 0)
        b_block = load_block(weight, k, column, end, width, width, DEPTH, WIDTH, False)
        acc = tl.dot(a_block, b_block, acc)
    store_block(c, acc, row, column, tokens, width, width, HEIGHT, WIDTH)


@triton.jit
def _outer_product(  # type: ignore[no-untyped-def]
    a, b, c, tile, tokens, rows, columns,
    TOKENS: tl.constexpr, SIDE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The tile-th [SIDE, SPAN·SIDE] of c (rows, columns) = aᵀ b, summed over tokens, ≤ TOKENS."""
    spans = tl.cdiv(columns, SIDE * SPAN)
    row, first = tile // spans * SIDE, tile % spans * SPAN * SIDE
    left = load_block(a, 0, row, tokens, rows, rows, TOKENS, SIDE, False).T
    # The next block of b is on its way while this one's product is stored.
    for column in tl.range(first, tl.minimum(first + SPAN * SIDE, columns), SIDE, num_stages=2):
        right = load_block(b, 0, column, tokens, columns, columns, TOKENS, SIDE, False)
        acc = tl.dot(left, right)
        store_block(c, acc, row, column, rows, columns, columns, SIDE, SIDE)


@triton.jit(do_not_specialize=("tokens",))
def _few_down_kernel(  # type: ignore[no-untyped-def]
    h, w_down, y, tokens, hidden, inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row_product(
        h, w_down, h, y, program, tokens, inner, hidden, False, BLOCK_M, BLOCK_N, BLOCK_K
    )  # fmt: skip


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
        _outer_product(d_gate_up, x, d_w_gate_up, tile, tokens, wide, hidden, TOKENS, SIDE, SPAN)
    else:
        tile = program - x_programs - gate_up_programs
        _outer_product(dy, h, d_w_down, tile, tokens, hidden, inner, TOKENS, SIDE, SPAN)


def down_launch(device: torch.device, tokens: int, hidden: int, inner: int) -> Launch:
    """The launch of y = h Wdᵀ; it takes h, w_down and y."""
    config = choose_config(ROW_PRODUCT_CONFIGS, device, tokens, hidden)
    programs = count_tiles(config, tokens, hidden), 1, 1
    return Launch(_few_down_kernel, config, programs, (), (tokens, hidden, inner), {})


def tiles_per_program(tiles: int) -> int:
    """How many tiles of a weight's gradient a program writes one after the other.

    More share a block of d(gate|up) or dy and hide their loads, as long as there are programs
    enough: at 4096 one, two, four and eight take 69.8, 62.8, 63.3 and 71.1 µs, at 512 one takes 7.9
    and two 8.9, at 8192 two and four 225 and 216 (H200).
    """
    return 1 if tiles <= ONE_WAVE else 2 if tiles <= MANY_TILES else 4


def token_block(tokens: int) -> int:
    """Rows of the block in which a product over tokens takes all of them."""
    return max(FEW_TOKENS, 1 << (tokens - 1).bit_length())


def gradients_launch(
    wants: tuple[bool, bool, bool], device: torch.device, tokens: int, hidden: int, inner: int,
    up_row: int = 0,
) -> Launch:  # fmt: skip
    """The launch of the wanted ones of d_x, d_w_gate_up and d_w_down, over all tokens at once.

    Its matrices are dy, x, h, d_gate_up, w_gate, w_up and the three results, anything for what is
    not wanted.
    """
    config = choose_d_x_config(device, tokens, hidden)
    depth = token_block(tokens)
    side = (
        config.block_n
        if INTERPRETED
        else OUTER_TILE_SIDE.get(architecture(device), DEFAULT_TILE_SIDE)
    )
    if depth > MAX_DEPTH:
        side = DEFAULT_TILE_SIDE
    span = 2 if INTERPRETED else tiles_per_program(3 * cdiv(inner, side) * cdiv(hidden, side))
    x_programs = wants[0] * count_tiles(config, tokens, hidden)
    gate_up_programs = wants[1] * cdiv(2 * inner, side) * cdiv(hidden, side * span)
    down_programs = wants[2] * cdiv(hidden, side) * cdiv(inner, side * span)
    programs = x_programs + gate_up_programs + down_programs, 1, 1
    constants = {"SIDE": side, "SPAN": span, "TOKENS": depth}
    scalars = tokens, hidden, inner, up_row, x_programs, gate_up_programs
    return Launch(_few_gradients_kernel, config, programs, (), scalars, constants)


def choose_d_x_config(device: torch.device, tokens: int, width: int) -> Config:
    """The tile of d_x (tokens, width), whose programs leave room for those of the weights.

    One for all numbers of tokens that a product over them takes as one.
    """
    depth = token_block(tokens)
    share = 1 if depth <= MAX_DEPTH else 2
    return choose_config(D_X_CONFIGS, device, depth, width, programs=ONE_WAVE // share)


def choose_config(
    table: Mapping[int, tuple[Config, ...]], device: torch.device, tokens: int, *widths: int,
    programs: int = ONE_WAVE,
) -> Config:  # fmt: skip
    """The table's smallest tile that runs at once over (tokens, width) of each width."""
    if INTERPRETED:
        return route.INTERPRETER
    configs = table.get(architecture(device), DEFAULT_CONFIGS)
    return smallest_config(configs, tokens, *widths, programs=programs)


class Products(plain.Products):
    """The plain products of an MLP of even sizes: y in one launch, all gradients in another.

    y takes up to FEW_TOKENS tokens, more go to torch.
    """

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
        """One launch of y, where few tokens have it, and one of all gradients."""
        tokens, dtype = self._tokens, self._dtype
        sizes = (tokens, self._hidden), (tokens, self._inner), (tokens, 2 * self._inner)
        x, h, gate_up = without_memory(*(contiguous_layout(size, dtype) for size in sizes))
        w_gate_up, w_down = without_memory(self._w_gate_up, self._w_down)
        if tokens <= FEW_TOKENS:
            yield PlannedLaunch("y", plain.EITHER_SAVE, self._y_launch(), (h, w_down, x))
        launch = self._gradients_launch(True, True, True)
        matrices = x, x, h, gate_up, w_gate_up, w_gate_up, x, w_gate_up, w_down
        yield PlannedLaunch("gradients", plain.EITHER_SAVE, launch, matrices)

    def _y_launch(self) -> Launch:
        return down_launch(self._device, self._tokens, self._hidden, self._inner)

    def _gradients_launch(self, x: bool, w_gate_up: bool, w_down: bool) -> Launch:
        sizes = self._tokens, self._hidden, self._inner, self._up_row
        return gradients_launch((x, w_gate_up, w_down), self._device, *sizes)

    def output(self, h: Tensor, w_down: Tensor, like: Tensor) -> Tensor:
        """y = h Wdᵀ, of like's shape."""
        if h.shape[0] > FEW_TOKENS:
            return super().output(h, w_down, like)
        y = self._new(tuple(like.shape), like.stride(), self._dtype)
        launch = self._launches.get("y")
        if launch is None:
            launch = self._launches["y"] = self._y_launch()
        launch(h, w_down, y)
        return y

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
