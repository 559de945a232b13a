"""The products of `fusedlib.kernels.few_tokens.kernels`, launches kept by length."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor

from fusedlib.kernels import products as plain
from fusedlib.kernels.few_tokens import kernels
from fusedlib.kernels.launch import Launch, allocator, laid_out
from fusedlib.kernels.products import Gradients, Wants


class Products(plain.Products):
    """Of one MLP, even sizes: y by one launch, the gradients by another.

    At most FEW_TOKENS tokens, so that there are few launches to keep.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, hidden: int, inner: int,
        new: Callable[..., Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._device, self._hidden, self._inner, self._dtype = device, hidden, inner, dtype
        self._new = new or allocator(device)
        self._w_gate_up, self._w_down = (
            laid_out(shape, dtype) for shape in ((2 * inner, hidden), (hidden, inner))
        )
        self._launches: dict[Hashable, Launch] = {}

    def output(self, h: Tensor, w_down: Tensor, like: Tensor) -> Tensor:
        """y = h Wdᵀ, of like's shape."""
        y = self._new(tuple(like.shape), like.stride(), self._dtype)
        tokens = h.shape[0]
        launch = self._launches.get(tokens) or self._made(tokens, tokens, kernels.down_launch)
        launch(h, w_down, y)
        return y

    def gradients(
        self, wants: Wants, held: list[Tensor | None], upstream: Tensor, x: Tensor | None,
        w_gate_up: Tensor | None,
    ) -> Gradients:  # fmt: skip
        """Those of d_x, of upstream's shape, d_w_gate_up and d_w_down that are wanted."""
        h, d_gate_up = held
        tokens = upstream.numel() // self._hidden
        name = wants, tokens
        launch = self._launches.get(name)
        if launch is None:
            launch = self._made(name, tokens, partial(kernels.gradients_launch, wants))
        wants_x, wants_w_gate_up, wants_w_down = wants
        # What is not wanted is neither read nor written: any matrix will do.
        dy = upstream
        d_x = self._new(tuple(dy.shape), dy.stride(), self._dtype) if wants_x else dy
        d_w_gate_up = self._new(*self._w_gate_up) if wants_w_gate_up else dy
        d_w_down = self._new(*self._w_down) if wants_w_down else dy
        launch(
            dy, dy if x is None else x, dy if h is None else h,
            dy if d_gate_up is None else d_gate_up, dy if w_gate_up is None else w_gate_up,
            d_x, d_w_gate_up, d_w_down,
        )  # fmt: skip
        return (
            d_x if wants_x else None,
            d_w_gate_up if wants_w_gate_up else None,
            d_w_down if wants_w_down else None,
        )

    def _made(self, name: Hashable, tokens: int, make: Callable[..., Launch]) -> Launch:
        launch = self._launches[name] = make(self._device, tokens, self._hidden, self._inner)
        return launch
