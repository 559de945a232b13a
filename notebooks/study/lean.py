"""A SwiGLU MLP whose backward pass lets each tensor go after its last reader: what the exercise of
`04_memory` asks for.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


class LeanMLP(torch.autograd.Function):
    """silu(x w_gateᵀ) ⊙ (x w_upᵀ) w_downᵀ of x (tokens, hidden), without autocast.

    Kept are x, the weights, and unless `only_x`, gate and up.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, only_x: bool = False
    ) -> Tensor:
        """y (tokens, hidden)."""
        gate, up = x @ w_gate.T, x @ w_up.T
        ctx.save_for_backward(x, w_gate, w_up, w_down, *(() if only_x else (gate, up)))
        return (silu(gate) * up) @ w_down.T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and the weights."""
        x, w_gate, w_up, w_down, *saved = ctx.saved_tensors
        gate, up = saved or (x @ w_gate.T, x @ w_up.T)
        s = torch.sigmoid(gate)
        d_w_down = dy.T @ (gate * s).mul_(up)  # h lives for one product
        dh = dy @ w_down
        d_up = (gate * s).mul_(dh)
        d_x, d_w_up = d_up @ w_up, d_up.T @ x
        del d_up
        d_gate = (1 - s).mul_(gate).add_(1).mul_(s).mul_(up).mul_(dh)
        del gate, up, saved, s, dh
        return d_x.addmm_(d_gate, w_gate), d_gate.T @ x, d_w_up, d_w_down, None
