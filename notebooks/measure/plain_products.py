"""The matrix products of a problem by themselves: what is left when all else costs nothing.

Gate and up rows are packed, so a forward is two products and a backward four (two with frozen
weights), each `torch.mm` into a tensor that exists already. The operands are the problem's own
(gate|up, h and their gradients computed once, outside the clock): power, and with it the clock,
depends on the data.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from measure.problems import Inputs


@dataclass(frozen=True)
class PlainProducts:
    """Operands and results of the products, all in the problem's dtype.

    x, dy, y, d_x (tokens, hidden); gate_up and its gradient (tokens, 2·intermediate); h and its
    gradient (tokens, intermediate); weights and their gradients as in `fusedlib.functional`.
    """

    x: Tensor
    dy: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    h: Tensor
    d_gate_up: Tensor
    gate_up: Tensor
    y: Tensor
    d_h: Tensor
    d_x: Tensor
    d_w_gate_up: Tensor
    d_w_down: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, inputs: Inputs) -> "PlainProducts":
        """The products of these inputs."""
        x, w_down, dy = inputs.x.detach(), inputs.w_down.detach(), inputs.dy
        w_gate_up = torch.cat([inputs.w_gate.detach(), inputs.w_up.detach()])
        gate_up = x @ w_gate_up.mT
        gate, up = gate_up.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        h, d_h = silu(gate) * up, dy @ w_down
        d_gate = d_h * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_gate_up = torch.cat([d_gate, d_h * silu(gate)], dim=-1)
        return cls(
            x, dy, w_gate_up, w_down, h, d_gate_up, gate_up, torch.empty_like(x), d_h,
            torch.empty_like(x), torch.empty_like(w_gate_up), torch.empty_like(w_down),
        )  # fmt: skip

    def forward(self) -> None:
        """x Wguᵀ and h Wdᵀ."""
        torch.mm(self.x, self.w_gate_up.mT, out=self.gate_up)
        torch.mm(self.h, self.w_down.mT, out=self.y)

    def backward(self, weight_gradients: bool) -> None:
        """dy Wd and d(gate|up) Wgu; with weight gradients also dyᵀ h and d(gate|up)ᵀ x."""
        torch.mm(self.dy, self.w_down, out=self.d_h)
        torch.mm(self.d_gate_up, self.w_gate_up, out=self.d_x)
        if weight_gradients:
            torch.mm(self.dy.mT, self.h, out=self.d_w_down)
            torch.mm(self.d_gate_up.mT, self.x, out=self.d_w_gate_up)

    def run(self, direction: str, weight_gradients: bool) -> None:
        """The products of one direction."""
        if direction != "backward":
            self.forward()
        if direction != "forward":
            self.backward(weight_gradients)
