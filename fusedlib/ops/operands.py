"""Dtypes that kernels take, and whether operands go together; imports no Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedlib.ops.arguments import require_alike, require_tensors
from fusedlib.ops.arguments import shape_of as shape_of

CASTS = ("hf", "litgpt")
HALF_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_DTYPES = (*HALF_DTYPES, torch.float32)  # that the library's kernels take


def check_mlp(x: Tensor, w_gate: Any, w_up: Any, *w_down: Tensor) -> None:
    """Raise where the operands of a gated MLP, with or without w_down, do not go together.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: shapes, dtypes or devices that do not go together, or no pair of weights.
    """
    if isinstance(w_gate, tuple | list):  # no pair, or None in it
        if len(w_gate) != 2:
            if not all(isinstance(weight, Tensor) for weight in w_gate):
                require_tensors(w_gate_up=w_gate)
            raise ValueError(
                "w_gate_up must be one tensor or a pair (w_gate, w_up), "
                f"got a {type(w_gate).__name__} of {len(w_gate)}"
            )
        require_tensors(w_gate=w_gate[0], w_up=w_gate[1])
    first = "w_gate_up" if w_up is None else "w_gate"
    named = {"x": x, first: w_gate} | ({} if w_up is None else {"w_up": w_up})
    named |= dict(zip(["w_down"], w_down, strict=False))
    require_tensors(**named)
    if x.ndim == 0:
        raise ValueError("x must be (..., hidden), got a scalar")
    if w_up is None and (w_gate.ndim != 2 or w_gate.shape[0] % 2):
        raise ValueError(
            "w_gate_up must be (2·intermediate, hidden), gate rows above up rows; "
            f"got {shape_of(w_gate)}"
        )
    if w_gate.ndim != 2:
        raise ValueError(f"w_gate must be (intermediate, hidden); got {shape_of(w_gate)}")
    rows, hidden = w_gate.shape
    if x.shape[-1] != hidden:
        raise ValueError(
            f"x must be (..., {hidden}) for {first} {shape_of(w_gate)}, got {shape_of(x)}"
        )
    if w_up is not None and w_up.shape != w_gate.shape:
        raise ValueError(f"w_up must be {shape_of(w_gate)}, as w_gate is, got {shape_of(w_up)}")
    expected = hidden, rows // 2 if w_up is None else rows
    for down in w_down:
        if down.shape != expected:
            raise ValueError(f"w_down must be {expected}, got {shape_of(down)}")
    require_alike(**named)


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
    require_alike("cos", "sin", q=q, k=k, cos=cos, sin=sin)
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
