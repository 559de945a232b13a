"""Whether the operands of `rope` go together."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedlib.ops.arguments import require_alike, shape_of


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
