"""The whole MLP of more than few tokens, where y, d_x, d_Wgu and d_Wd are cuBLAS's products.

    forward     gate|up = x Wguᵀ    h = silu(gate) ⊙ up            y = h Wdᵀ
    backward    dh = dy Wd          d_gate|up, h                   d_x, d_Wgu, d_Wd

So are the first of each line on Hopper up to where the fused kernels' tiles fill it, 1024·4096 and
256·8192 say (`swiglu_calls._apart`), and a pointwise kernel runs between. The device needs 26 to
150 µs for such a forward, less than the host when every size and address is looked at anew.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusedlib.kernels import swiglu, swiglu_calls
from fusedlib.kernels.backward_order import PLAIN, Multiplication, products
from fusedlib.kernels.few_tokens_plan import Gradients, Plan
from fusedlib.kernels.swiglu_calls import BACKWARD_N, FORWARD_N, unchecked_bwd, unchecked_fwd


class CublasPlan(Plan):
    """The MLP for operands of a kind and class of these."""

    def __init__(self, x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> None:
        super().__init__(x, w_gate_up, w_down)
        _, tokens, _, inner = self.sizes
        self._fused_forward = not swiglu_calls._apart(x, tokens, inner, FORWARD_N)
        # fp32 is not fused.
        half = x.dtype.itemsize == 2
        self._fused_backward = half and not swiglu_calls._apart(x, tokens, inner, BACKWARD_N)
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
        return (y if x.ndim == 2 else y.view(x.shape)), gate_up

    def _activated(self, x: Tensor, w_gate_up: Tensor, save: bool) -> tuple[Tensor, Tensor | None]:
        if x.ndim != 2:
            x = x.view(-1, self._hidden)
        if self._fused_forward:
            return unchecked_fwd(x, w_gate_up, save)
        gate_up = self._to_gate_up(x, w_gate_up)
        h = self._rows(x.shape[0], self._inner)
        self._pointwise((False, False, True, False), gate_up, gate_up, gate_up, h)
        return h, gate_up if save else None

    def _differentiated(
        self, dy: Tensor, w_down: Tensor | None, gate_up: Tensor, gradient: bool, output: bool,
        in_place: bool,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        dh = gate_up
        if gradient:
            assert w_down is not None
            dy = dy if dy.ndim == 2 else dy.view(-1, self._hidden)
            if self._fused_backward:
                return unchecked_bwd(dy, w_down, gate_up, output, in_place)
            dh = self._to_dh(dy, w_down)
        d_gate_up, h = self._targets(gate_up, gradient, output, in_place)
        target, output_to = gate_up if d_gate_up is None else d_gate_up, gate_up if h is None else h
        variant = False, gradient, output, gradient and in_place
        self._pointwise(variant, dh, gate_up, target, output_to)
        return d_gate_up, h

    def _pointwise(
        self, variant: tuple[bool, bool, bool, bool], dh: Tensor, gate_up: Tensor, *results: Tensor
    ) -> None:
        name = variant, gate_up.shape[0]
        launch = self._launches.get(name)
        if launch is None:
            made = swiglu.bwd_launch(gate_up, gate_up, gate_up, variant)
            launch = self._kept(name, made)
        launch(gate_up, gate_up, dh, gate_up, *results)

    def _products(
        self, wants: tuple[bool, bool, bool], dy: Tensor, x: Tensor | None,
        held: list[Tensor | None], w_gate_up: Tensor | None,
    ) -> Gradients:  # fmt: skip
        if dy.ndim == 2:
            return products(wants, held, dy, x, w_gate_up, self._multiply)
        matrix = None if x is None else x.view(-1, self._hidden)
        rows = dy.view(-1, self._hidden)
        found = products(wants, held, rows, matrix, w_gate_up, self._multiply)
        d_x = found[0]
        return None if d_x is None else d_x.view(dy.shape), found[1], found[2]
