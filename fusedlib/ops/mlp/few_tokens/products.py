"""The products of `fusedlib.ops.mlp.few_tokens.kernels`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fusedlib.launch import (
    Launch,
    PlannedLaunch,
    allocator,
    contiguous_layout,
    prepared,
    without_memory,
)
from fusedlib.ops.arguments import FEW_TOKENS
from fusedlib.ops.mlp import products as plain
from fusedlib.ops.mlp.few_tokens import kernels
from fusedlib.ops.mlp.problem import MLPProblem
from fusedlib.ops.mlp.products import Gradients, WantedGradients


class Products(plain.Products):
    """The plain products of an MLP of even sizes: y in one launch, all gradients in another.

    y takes up to FEW_TOKENS tokens, more go to torch.
    """

    def __init__(self, problem: MLPProblem) -> None:
        super().__init__()
        self._device, self._dtype = problem.device, problem.dtype
        _, self._hidden, self._inner = problem.sizes
        self._up_row = 0 if problem.pair else problem.inner
        self._new = allocator(problem.device)
        self._w_gate_up = contiguous_layout((2 * problem.inner, problem.hidden), problem.dtype)
        self._w_down = contiguous_layout((problem.hidden, problem.inner), problem.dtype)

    def launches(self, problem: MLPProblem) -> Iterator[PlannedLaunch]:
        """One launch of y, where few tokens have it, and one of all gradients."""
        tokens, dtype = problem.tokens, self._dtype
        sizes = (tokens, self._hidden), (tokens, self._inner), (tokens, 2 * self._inner)
        x, h, gate_up = without_memory(*(contiguous_layout(size, dtype) for size in sizes))
        w_gate_up, w_down = without_memory(self._w_gate_up, self._w_down)
        if tokens <= FEW_TOKENS:
            yield PlannedLaunch("y", plain.EITHER_SAVE, self._y_launch(tokens), (h, w_down, x))
        launch = self._gradients_launch(True, True, True, tokens)
        matrices = x, x, h, gate_up, w_gate_up, w_gate_up, x, w_gate_up, w_down
        yield PlannedLaunch("gradients", plain.EITHER_SAVE, launch, matrices)

    def _y_launch(self, tokens: int) -> Launch:
        return kernels.down_launch(self._device, tokens, self._hidden, self._inner)

    def _gradients_launch(self, x: bool, w_gate_up: bool, w_down: bool, tokens: int) -> Launch:
        sizes = tokens, self._hidden, self._inner, self._up_row
        return kernels.gradients_launch((x, w_gate_up, w_down), self._device, *sizes)

    def output(self, h: Tensor, w_down: Tensor, like: Tensor) -> Tensor:
        """y = h Wdᵀ, of like's shape."""
        if h.shape[0] > FEW_TOKENS:
            return super().output(h, w_down, like)
        y = self._new(tuple(like.shape), like.stride(), self._dtype)
        tokens = h.shape[0]
        prepared((self, "y", tokens), self._y_launch, tokens)(h, w_down, y)
        return y

    def gradients(
        self, wants: WantedGradients, pair: bool, buffers: list[Tensor | None], upstream: Tensor,
        x: Tensor | None, w_gate: Tensor | None, w_up: Tensor | None,
    ) -> Gradients:  # fmt: skip
        """The wanted ones of d_x, d_w_gate_up and d_w_down, in one launch.

        d_x has upstream's shape. Both gradients of a pair are computed where one is wanted.
        """
        h, d_gate_up = buffers
        tokens = upstream.numel() // self._hidden
        wants_x, wants_w_gate, wants_w_up, wants_w_down = wants
        wants_w_gate_up = wants_w_gate or wants_w_up
        computed = wants_x, wants_w_gate_up, wants_w_down, tokens
        launch = prepared((self, *computed), self._gradients_launch, *computed)
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
