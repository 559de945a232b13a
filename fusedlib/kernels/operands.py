"""Dtypes that kernels take, and the checks of `rms_norm` and `rope`; imports no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

CASTS = ("hf", "litgpt")
HALF_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_DTYPES = (*HALF_DTYPES, torch.float32)  # that the library's kernels take


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
    _check_alike({"x": x, "weight": weight, "residual": residual})
    if residual is not None and residual.dtype != x.dtype:
        raise ValueError(f"residual must be {x.dtype} as x, got {residual.dtype}")


def check_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> None:
    """Raise a ValueError where the operands of `rope` do not go together."""
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, heads, tokens, head_dim), got {shape_of(x)}")
    batch, _, tokens, head_dim = q.shape
    if k.shape != (batch, k.shape[1], tokens, head_dim):
        raise ValueError(f"k must be ({batch}, heads, {tokens}, {head_dim}), got {shape_of(k)}")
    if k.dtype != q.dtype:
        raise ValueError(f"k must be {q.dtype} as q, got {k.dtype}")
    _check_alike({"q": q, "k": k, "cos": cos, "sin": sin})
    if sin.shape != cos.shape:
        raise ValueError(f"sin must be {shape_of(cos)} as cos, got {shape_of(sin)}")
    rotary = cos.shape[-1] if cos.ndim else 0
    if rotary % 2 or not 0 < rotary <= head_dim:
        raise ValueError(f"cos must have an even width of at most {head_dim}, got {shape_of(cos)}")
    if positions is None:
        if cos.ndim != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != tokens:
            raise ValueError(
                f"cos must be ({batch} or 1, {tokens}, rotary_dim) for q {shape_of(q)}, "
                f"got {shape_of(cos)}"
            )
        return
    if cos.ndim != 2:
        raise ValueError(f"with positions cos must be (length, rotary_dim), got {shape_of(cos)}")
    if positions.shape not in ((tokens,), (1, tokens), (batch, tokens)):
        raise ValueError(
            f"positions must be ({batch} or 1, {tokens}) or ({tokens},), got {shape_of(positions)}"
        )
    if positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"positions must be int32 or int64, got {positions.dtype}")
    if positions.device != q.device:
        raise ValueError(f"positions is on {positions.device}, q on {q.device}")


def _check_alike(named: dict[str, Tensor | None]) -> None:
    """One device, and floating-point numbers."""
    (first_name, first), *_ = named.items()
    assert first is not None
    for name, operand in named.items():
        if operand is None:
            continue
        if operand.device != first.device:
            raise ValueError(f"{name} is on {operand.device}, {first_name} on {first.device}")
        if not operand.is_floating_point():
            raise ValueError(f"{name} must be of a floating-point dtype, got {operand.dtype}")


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """A tensor's shape as a plain tuple, for messages."""
    return tuple(tensor.shape)
