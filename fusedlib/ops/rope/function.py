"""Rotary position embedding as a function: one launch for q and k on NVIDIA GPUs, else PyTorch."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from fusedlib.launch.device import has_kernels
from fusedlib.launch.internals import is_transformed
from fusedlib.ops.arguments import (
    KERNEL_DTYPES,
    refuse_outside,
    require_alike,
    require_size,
    require_tensors,
    shape_of,
)
from fusedlib.ops.call_context import is_distributed, is_plain_eager, left_to_compiler


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q and k with the halves of each head turned: x ⊙ cos + rotate_half(x) ⊙ sin.

    Hugging Face and litgpt mean the same by it, and hand the same shapes over. What lies in a head
    behind rotary_dim is copied. Nothing is written in place. The kernel computes in fp32 and rounds
    once; beside that an element errs by at most 3·2⁻²⁴ of its two products' magnitudes. Under
    torch.compile at most 1,024 tokens, where their number is fixed, are plain PyTorch, for
    Inductor.

    Args:
        q: (batch, heads, tokens, head_dim), any strides, those of a transposed projection too.
        k: (batch, key_heads, tokens, head_dim), in q's dtype.
        cos: (1 or batch, tokens, rotary_dim), of any floating-point dtype, rotary_dim even and at
            most head_dim; with `positions` a table (length, rotary_dim).
        sin: as cos.
        positions: rows of the table, (tokens,) or (1 or batch, tokens), int32 or int64. One outside
            the table is an error on a CPU. On a GPU, where nobody waits for the device, its token
            is NaN; in plain PyTorch there it is torch's own error of the device.
        width: of a head of the results, at least head_dim, which it is by default; zeros fill it.
            Attention's kernels in 16 bits take multiples of 8, and torch pads other heads in copies
            of its own, forward and backward.

    Returns:
        q and k turned, in their dtype. They are differentiable in q and k; where cos or sin wants a
        gradient plain PyTorch runs.

    Raises:
        TypeError: an operand that is no tensor.
        IndexError: a position outside the table, on a CPU.
        ValueError: shapes, dtypes or devices that do not go together, operands that are sparse or
            nested, or a width that is no whole number from head_dim on.
    """
    require_tensors("positions", q=q, k=k, cos=cos, sin=sin, positions=positions)
    _check(q, k, cos, sin, positions)
    if width is not None:
        require_size("width", width)
        if width < q.shape[-1]:
            raise ValueError(f"width must be at least head_dim, {q.shape[-1]}, got {width}")
        width = int(width)
    fixed = not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
    dtypes = q.dtype in KERNEL_DTYPES and cos.dtype in KERNEL_DTYPES
    few = left_to_compiler(q.shape[0] * q.shape[2])
    if not fixed or not dtypes or few or not has_kernels(q.device) or is_transformed():
        return _plain(q, k, cos, sin, positions, width)
    direct = is_plain_eager(q, k, cos, sin)
    if not direct and is_distributed(q, k, cos, sin):
        return _plain(q, k, cos, sin, positions, width)
    from fusedlib.ops.rope import kernels

    call = kernels.RopeFunction.direct if direct else kernels.rope_operator
    return cast(tuple[Tensor, Tensor], call(q, k, cos, sin, positions, width))


def _plain(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, width: int | None
) -> tuple[Tensor, Tensor]:
    if positions is not None:
        positions = positions if positions.ndim == 2 else positions[None]
        table = cos
        try:
            cos, sin = embedding(positions, cos), embedding(positions, sin)
        except IndexError:  # torch's, which names neither
            refuse_outside(positions, len(table))
            raise
    if torch.compiler.is_compiling():
        cos, sin = _stored(cos), _stored(sin)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotated(q, cos, sin, width), _rotated(k, cos, sin, width)


def _stored(table: Tensor) -> Tensor:
    """The table itself. Inductor stores what `as_strided` is taken of, where it would else compute
    each cosine anew in every layer and for every head.
    """
    return table.as_strided(table.shape, table.stride())


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, width: int | None) -> Tensor:
    turning, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    a, b = turning.chunk(2, dim=-1)
    rotated = turning * cos + torch.cat([-b, a], dim=-1) * sin
    result = torch.cat([rotated.to(x.dtype), rest], dim=-1)
    return result if width is None else pad(result, (0, width - x.shape[-1]))


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> None:
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
