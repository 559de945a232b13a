"""The whole MLP where its products are cuBLAS's and a pointwise kernel runs between them.

    forward     gate|up = x Wguᵀ    h = silu(gate) ⊙ up            y = h Wdᵀ
    backward    dh = dy Wd          d_gate|up, h                   d_x, d_Wgu, d_Wd

That is on Hopper from 65 tokens up to where the fused kernels' tiles fill it, 1024·4096 and
256·8192 say (`swiglu_calls._apart`). The device needs 26 to 150 µs for such a forward, less than
the host when every size and address is looked at anew.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusedlib.kernels import swiglu, swiglu_calls
from fusedlib.kernels.backward_order import PLAIN, Multiplication, products
from fusedlib.kernels.few_tokens_plan import Gradients, Plan
from fusedlib.kernels.swiglu_calls import FORWARD_N, unchecked_fwd


class CublasPlan(Plan):
    """The MLP at the sizes of these operands; at the largest its forward is one fused kernel."""

    def __init__(self, x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> None:
        super().__init__(x, w_gate_up, w_down)
        _, tokens, self._hidden, inner = self.sizes
        self._deep = x.ndim != 2
        self._fused_forward = not swiglu_calls._apart(x, tokens, inner, FORWARD_N)
        # gate|up from x and Wgu, y from h and Wd, dh from dy and Wd, and the gradients.
        self._to_gate_up: Multiplication = linear
        self._to_y: Multiplication = linear
        self._to_dh: Multiplication = torch.mm
        self._multiply = PLAIN

    def forward(
        self, x: Tensor, w_gate_up: Tensor, w_down: Tensor, save: bool
    ) -> tuple[Tensor, Tensor | None]:
        """y, of x's shape, and gate|up (tokens, 2·inner) if saved."""
        h, gate_up = self._activated(x, w_gate_up, save)
        y = self._to_y(h, w_down)
        # In place: autograd lets nobody write to a view that a Function returns.
        return (y.resize_(x.shape) if self._deep else y), gate_up

    def _activated(self, x: Tensor, w_gate_up: Tensor, save: bool) -> tuple[Tensor, Tensor | None]:
        if self._deep:
            x = x.view(-1, self._hidden)
        if self._fused_forward:
            return unchecked_fwd(x, w_gate_up, save)
        gate_up = self._to_gate_up(x, w_gate_up)
        h = self._new(*self._h)
        self._pointwise((False, False, True, False), gate_up, gate_up, gate_up, h)
        return h, gate_up if save else None

    def _differentiated(
        self, dy: Tensor, w_down: Tensor | None, gate_up: Tensor, gradient: bool, output: bool,
        in_place: bool,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        dh, d_gate_up = gate_up, None
        if gradient:
            assert w_down is not None
            dh = self._to_dh(dy.view(-1, self._hidden) if self._deep else dy, w_down)
            d_gate_up = gate_up if in_place else self._new(*self._gate_up)
        h = self._new(*self._h) if output else None
        target, output_to = gate_up if d_gate_up is None else d_gate_up, gate_up if h is None else h
        variant = False, gradient, output, gradient and in_place
        self._pointwise(variant, dh, gate_up, target, output_to)
        return d_gate_up, h

    def _pointwise(
        self, variant: tuple[bool, bool, bool, bool], dh: Tensor, gate_up: Tensor, *results: Tensor
    ) -> None:
        launch = self._launches.get(variant)
        if launch is None:
            made = swiglu.bwd_launch(gate_up, gate_up, gate_up, variant)
            launch = self._kept(variant, made)
        launch(gate_up, gate_up, dh, gate_up, *results)

    def _products(
        self, wants: tuple[bool, bool, bool], dy: Tensor, x: Tensor | None,
        held: list[Tensor | None], w_gate_up: Tensor | None,
    ) -> Gradients:  # fmt: skip
        if not self._deep:
            return products(wants, held, dy, x, w_gate_up, self._multiply)
        matrix = None if x is None else x.view(-1, self._hidden)
        dy = dy.view(-1, self._hidden)
        found = products(wants, held, dy, matrix, w_gate_up, self._multiply)
        d_x = found[0]
        return None if d_x is None else d_x.view(self._x[0]), found[1], found[2]
