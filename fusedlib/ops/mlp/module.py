"""Modules in place of transformers' `LlamaMLP` and `GemmaMLP`, and Liger's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedlib.ops.arguments import require_size
from fusedlib.ops.fused_class import plain_weights
from fusedlib.ops.mlp.activation import ACTIVATIONS, gelu_name
from fusedlib.ops.mlp.function import SAVES, gated_mlp


class SwiGLUMLP(nn.Module):
    """y = (silu(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ, x (..., hidden_size).

    Its three projections are `torch.nn.Linear`s of the names that Llama's have: `gate_proj`,
    `up_proj` and `down_proj`. So checkpoints, adapters, optimizers and parallel wrappers take it as
    they take the modules it replaces; where one of them has changed a projection, or hooks it, the
    module runs plain PyTorch.

    Args:
        hidden_size: width of x and y.
        intermediate_size: width of gate and up.
        save: what is kept for backward, "gate_up" or "input"; see `fusedlib.swiglu_mlp`.
        device: where the weights lie.
        dtype: the weights' dtype.

    Raises:
        ValueError: a size that is no whole number of at least 1, or an unknown `save`.
    """

    activation = "silu"

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, save: str = "gate_up",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        require_size("hidden_size", hidden_size)
        require_size("intermediate_size", intermediate_size)
        if save not in SAVES:
            raise ValueError(f"save must be one of {', '.join(SAVES)}, got {save!r}")
        self.hidden_size, self.intermediate_size, self.save = hidden_size, intermediate_size, save
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights uniform within 1/√(row length), as `torch.nn.Linear` does."""
        for projection in (self.gate_proj, self.up_proj, self.down_proj):
            bound = projection.in_features**-0.5
            nn.init.uniform_(projection.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """y (..., hidden_size) of x (..., hidden_size)."""
        weights = self.weights()
        if weights is None:
            activated = ACTIVATIONS[self.activation].compute(self.gate_proj(x))
            y: Tensor = self.down_proj(activated * self.up_proj(x))
            return y
        return gated_mlp(self.activation, self.save, x, *weights)

    def weights(self) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
        """The weights of gate and up, and that of down; None where a layer is no plain product."""
        weights = plain_weights(self.gate_proj, self.up_proj, self.down_proj, biased=False)
        return None if weights is None else ((weights[0], weights[1]), weights[2])

    def extra_repr(self) -> str:
        """The sizes and what is saved, for print."""
        sizes = f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}"
        return f"{sizes}, save={self.save!r}"


class GeGLUMLP(SwiGLUMLP):
    """y = (gelu(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ: all else is `SwiGLUMLP`'s.

    Args:
        hidden_size: width of x and y.
        intermediate_size: width of gate and up.
        approximate: "tanh" or "none"; see `fusedlib.geglu_mlp`.
        options: those of `SwiGLUMLP`.

    Raises:
        ValueError: an unknown `approximate`, and what `SwiGLUMLP` refuses.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, approximate: str = "tanh", **options: Any
    ) -> None:
        super().__init__(hidden_size, intermediate_size, **options)
        self.activation = gelu_name(approximate)

    def extra_repr(self) -> str:
        """The sizes, what is saved and the activation, for print."""
        return f"{super().extra_repr()}, activation={self.activation!r}"
