"""Whether the operands of `rms_norm` go together."""

from __future__ import annotations

from torch import Tensor

from fusedlib.ops.arguments import require_alike, shape_of

CASTS = ("hf", "litgpt")


def check_rms_norm(x: Tensor, weight: Tensor | None, residual: Tensor | None, cast: str) -> None:
    """Raise a ValueError where the operands of `rms_norm` do not go together."""
    if cast not in CASTS:
        raise ValueError(f"cast must be one of {', '.join(CASTS)}, got {cast!r}")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must be (..., width) with a width of at least 1, got {shape_of(x)}")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight must be ({x.shape[-1]},) for x {shape_of(x)}, got {shape_of(weight)}"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must be {shape_of(x)} as x, got {shape_of(residual)}")
    require_alike("weight", x=x, weight=weight, residual=residual)
