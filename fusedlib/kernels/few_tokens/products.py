"""The products of `fusedlib.kernels.few_tokens.kernels`, launches kept by length."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

from torch import Tensor

from fusedlib.kernels.few_tokens import kernels
from fusedlib.kernels.host import products as plain
from fusedlib.kernels.host.launch import Launch, allocator, contiguous_layout
from fusedlib.kernels.host.problem import MLPProblem
from fusedlib.kernels.host.products import Gradients, WantedGradients
from fusedlib.kernels.swiglu_configs import FEW_TOKENS


class Products(plain.Products):
    """The plain products of an MLP of even sizes: y in one launch, all gradients in another.

    y takes up to FEW_TOKENS tokens, more go to torch.

    At most 256 tokens (`route.max_one_launch_tokens`), so that there are few launches to keep.
    """

    def __init__(self, problem: MLPProblem, new: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self._device, self._dtype = problem.device, problem.dtype
        _, self._hidden, self._inner = problem.sizes
        self._up_row = 0 if problem.pair else problem.inner
        self._new = new or allocator(problem.device)
        self._w_gate_up = contiguous_layout((2 * problem.inner, problem.hidden), problem.dtype)
        self._w_down = contiguous_layout((problem.hidden, problem.inner), problem.dtype)
        self._launches: dict[Hashable, Launch] = {}

    def output(self, h: Tensor, w_down: Tensor, like: Tensor) -> Tensor:
        """y = h Wdᵀ, of like's shape."""
        if h.shape[0] > FEW_TOKENS:
            return super().output(h, w_down, like)
        y = self._new(tuple(like.shape), like.stride(), self._dtype)
        tokens = h.shape[0]
        launch = self._launches.get(tokens) or self._cache_launch(
            tokens, tokens, kernels.down_launch
        )
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
        tokens = upstream.numel() // self._hidden
        name = wants, tokens
        launch = self._launches.get(name)
        wants_x, wants_w_gate, wants_w_up, wants_w_down = wants
        wants_w_gate_up = wants_w_gate or wants_w_up
        if launch is None:
            computed = wants_x, wants_w_gate_up, wants_w_down
            make = partial(kernels.gradients_launch, computed, up_row=self._up_row)
            launch = self._cache_launch(name, tokens, make)
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

    def _cache_launch(self, name: Hashable, tokens: int, make: Callable[..., Launch]) -> Launch:
        launch = self._launches[name] = make(self._device, tokens, self._hidden, self._inner)
        return launch
