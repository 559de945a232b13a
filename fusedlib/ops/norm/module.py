"""A module in place of transformers' `LlamaRMSNorm`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusedlib.ops.arguments import require_number, require_size
from fusedlib.ops.norm.function import CASTS, rms_norm


class RMSNorm(nn.Module):
    """y = weight ⊙ s / √(mean(s²) + eps), s = x or x + residual, over the last dimension.

    Its checkpoints have `weight`, as those of the modules it replaces.

    Args:
        hidden_size: width of x and y.
        eps: added to the mean of squares.
        cast: "hf" or "litgpt"; see `fusedlib.rms_norm`.
        elementwise_affine: whether there is a weight.
        device: where the weight lies.
        dtype: the weight's dtype.

    Raises:
        ValueError: a size that is no whole number of at least 1, an eps that is no number, or an
            unknown `cast`.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, *, cast: str = "hf",
        elementwise_affine: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        require_size("hidden_size", hidden_size)
        require_number("eps", eps)
        if cast not in CASTS:
            raise ValueError(f"cast must be one of {', '.join(CASTS)}, got {cast!r}")
        self.hidden_size, self.eps, self.cast = hidden_size, eps, cast
        self.weight: nn.Parameter | None
        ones = torch.ones(hidden_size, device=device, dtype=dtype) if elementwise_affine else None
        self.register_parameter("weight", None if ones is None else nn.Parameter(ones))

    def reset_parameters(self) -> None:
        """Fill the weight with ones."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """y of x (..., hidden_size); with a residual also the stream x + residual."""
        return rms_norm(x, self.weight, self.eps, residual=residual, cast=self.cast)

    def extra_repr(self) -> str:
        """The size, eps and order of casts, for print."""
        affine = "" if self.weight is not None else ", elementwise_affine=False"
        return f"{self.hidden_size}, eps={self.eps}, cast={self.cast!r}{affine}"
