"""Rotary position embedding: one launch for q and k on NVIDIA GPUs, else PyTorch.

Saved for backward: cos, sin and positions. `kernels` beside this has the formulas, layouts and
error bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from fusedlib import reference
from fusedlib.compat import is_transformed
from fusedlib.launch import MAX_GRID, Config, Launch, cdiv, has_kernels, launch_for, next_power_of_2
from fusedlib.op import call_prepared, declare, save_operands
from fusedlib.ops.arguments import (
    KERNEL_DTYPES,
    is_distributed,
    left_to_compiler,
    refuse_outside,
    require_alike,
    require_size,
    require_tensors,
    shape_of,
)
from fusedlib.ops.norm.function import most_parts, sum_parts

PAIRS = 1024  # rotated pairs a program, 8 a thread: two loads of 16 bytes in flight in 16 bits
MAX_SHARED_HEADS = 8  # that share the rows of cos and sin they read


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
    turned: tuple[Tensor, Tensor] = call_prepared(_prepare, (q, k, cos, sin, positions), width)
    return turned


def _prepare(
    eager: bool, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None,
    width: int | None,
) -> Callable[..., Any]:  # fmt: skip
    """Check the operands, and choose what turns them."""
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
    runs = fixed and dtypes and not few and has_kernels(q.device) and not is_transformed()
    if not runs or is_distributed(q, k, cos, sin):
        return partial(_plain, width)
    return partial(_by_kernel, ROPE.way(eager), width)


def _by_kernel(
    rotate: Callable[..., Any], width: int | None, *operands: Tensor | None
) -> Any:  # fmt: skip
    return rotate(*operands, width)


def _plain(
    width: int | None, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None
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
    q, k = reference.rope(q, cos, sin), reference.rope(k, cos, sin)
    if width is None:
        return q, k
    more = 0, width - q.shape[-1]
    return pad(q, more), pad(k, more)


def _stored(table: Tensor) -> Tensor:
    """The table itself. Inductor stores what `as_strided` is taken of, where it would else compute
    each cosine anew in every layer and for every head.
    """
    return table.as_strided(table.shape, table.stride())


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


# --- forward and backward ------------------------------------------------------------------------


def rope_fwd(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, width: int | None
) -> tuple[Tensor, Tensor]:
    """q and k turned, in heads of `width`, which is head_dim where it is None."""
    if positions is not None and positions.device.type == "cpu":
        refuse_outside(positions, cos.shape[0])
    given = [_heads_contiguous(x) for x in (q, k)]
    results = [_like(x, width or x.shape[-1]) for x in given]
    if q.numel() + k.numel():
        _start(given, results, *_tables(cos, sin, positions), False)
    return results[0], results[1]


def rope_bwd(
    dq: Tensor | None, dk: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None,
    head_dim: int,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """d_q and d_k, in heads of head_dim, each where its upstream gradient is not None."""
    given = [_heads_contiguous(d) for d in (dq, dk) if d is not None]
    results = [_like(d, head_dim) for d in given]
    if given[0].numel() + given[-1].numel():
        _start(given, results, *_tables(cos, sin, positions), True)
    return None if dq is None else results[0], None if dk is None else results[-1]


def normed_rope_fwd(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """q and k, each head normalised by its RMS and its weight (head_dim,), then turned.

    Heads are contiguous and as wide as cos and sin, which are (1 or batch, tokens, head_dim).
    """
    results = [torch.empty_like(q), torch.empty_like(k)]
    weights = q_weight.contiguous(), k_weight.contiguous()
    _start([q, k], results, *_tables(cos, sin, None), False, weights, eps)
    return results[0], results[1]


def normed_rope_bwd(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    cos: Tensor, sin: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and both weights."""
    given, upstream = [q, k], [_heads_contiguous(dq), _heads_contiguous(dk)]
    results = [torch.empty_like(q), torch.empty_like(k)]
    cos, sin, _ = _tables(cos, sin, None)
    batch, heads, tokens, head_dim = q.shape
    block = next_power_of_2(head_dim // 2)
    constants = {"HALF": head_dim // 2, "HALF_BLOCK": block, "ROWS": max(1, PAIRS // block)}
    parts = min(cdiv(batch * heads * tokens, constants["ROWS"]), most_parts(q.device))
    partial = q.new_empty((parts, 2 * head_dim), dtype=torch.float32)
    strides = _strides(*given, *upstream, *results)
    scalars = batch, heads, k.shape[1], tokens, *strides, *_table_strides(cos), eps
    grid = parts, 1, 1

    def make() -> Launch:
        from fusedlib.ops.rope.kernels import _normed_rope_bwd_kernel

        return Launch(_normed_rope_bwd_kernel, Config(num_warps=4), grid, scalars, constants)

    weights = q_weight.contiguous(), k_weight.contiguous()
    matrices = *given, *upstream, *results, cos, sin, *weights, partial
    key = "normed_rope_bwd", parts, head_dim, *scalars, q.dtype, q.device
    launch_for(key, make, *matrices)(*matrices)
    d_q_weight, d_k_weight = sum_parts(partial, q_weight.dtype).chunk(2)
    return results[0], results[1], d_q_weight, d_k_weight


def _start(
    given: list[Tensor], results: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None,
    inverse: bool, weights: tuple[Tensor, ...] = (), eps: float | None = None,
) -> None:  # fmt: skip
    """Launch for one or two tensors of heads; `weights` and `eps` are of norms that come first."""
    first, last = given[0], given[-1]
    batch, heads, tokens, head_dim = first.shape
    key_heads = last.shape[1] if len(given) > 1 else 0
    if batch > MAX_GRID[1]:  # sequences lie along a grid's y
        for part in slice(batch // 2), slice(batch // 2, None):
            inputs, outputs = [x[part] for x in given], [x[part] for x in results]
            cos_part, sin_part = (t if t.ndim == 2 or len(t) == 1 else t[part] for t in (cos, sin))
            rows = positions if positions is None or len(positions) == 1 else positions[part]
            _start(inputs, outputs, cos_part, sin_part, rows, inverse, weights, eps)
        return
    wide = results[0].shape[-1]
    half, rest = cos.shape[-1] // 2, min(head_dim, wide) - cos.shape[-1]
    zeros = max(wide - head_dim, 0)
    constants = {
        "POSITIONS": positions is not None, "INVERSE": inverse, "NORM": eps is not None,
        "HALF": half, "REST": rest, "ZEROS": zeros,
    }  # fmt: skip

    def make() -> Launch:
        from fusedlib.ops.rope.kernels import _rope_kernel

        block = next_power_of_2(half)
        shared = gcd(heads, key_heads, MAX_SHARED_HEADS)
        rows = max(1, PAIRS // block)
        cut = {"HALF_BLOCK": block, "REST_BLOCK": next_power_of_2(max(rest + zeros, 1))}
        cut |= {"TOKENS": max(1, rows // shared), "HEADS": shared}
        cut["FAR"] = max(strides[1::3]) * max(heads, key_heads) >= 2**31
        programs = cdiv(tokens, cut["TOKENS"]) * ((heads + key_heads) // shared), batch, 1
        return Launch(_rope_kernel, Config(num_warps=4), programs, scalars, constants | cut)

    strides = _strides(first, last, results[0], results[-1])
    of_positions = 0 if positions is None or positions.shape[0] == 1 else tokens
    sizes = heads, key_heads, tokens, cos.shape[-2]
    scalars = (*sizes, *strides, *_table_strides(cos), of_positions, eps or 0.0)
    index = cos if positions is None else positions
    # What it does not read, positions or weights, it is given cos for.
    matrices = first, last, results[0], results[-1], cos, sin, index, *(weights or (cos, cos))
    dtypes = first.dtype, cos.dtype, index.dtype
    key = "rope", batch, *scalars, *constants.values(), *dtypes, first.device
    launch_for(key, make, *matrices)(*matrices)


def _strides(*heads: Tensor) -> list[int]:
    return [n for x in heads for n in x.stride()[:3]]


def _table_strides(cos: Tensor) -> tuple[int, int]:
    return (0 if cos.shape[0] == 1 or cos.ndim == 2 else cos.stride(0)), cos.stride(-2)


def _like(x: Tensor, width: int) -> Tensor:
    if width == x.shape[-1]:
        return torch.empty_like(x)
    batch, heads, tokens, _ = x.shape
    return x.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _heads_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tables(
    cos: Tensor, sin: Tensor, positions: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """cos and sin alike in dtype and strides, rows contiguous; positions (1 or batch, tokens)."""
    if cos.stride() != sin.stride() or cos.dtype != sin.dtype or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.to(cos.dtype).contiguous()
    if positions is not None:
        positions = positions.reshape(-1, positions.shape[-1]).contiguous()
    return cos, sin, positions


def _shapes(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, width: int | None
) -> tuple[Tensor, Tensor]:
    q, k = (_like(_heads_contiguous(x), width or x.shape[-1]) for x in (q, k))
    return q, k


def _fake_gradients(
    dq: Tensor | None, dk: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None,
    head_dim: int,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    d_q, d_k = (None if d is None else _like(_heads_contiguous(d), head_dim) for d in (dq, dk))
    return d_q, d_k


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.wants, ctx.head_dim = ctx.needs_input_grad[:2], inputs[0].shape[-1]
    ctx.mark_non_differentiable(*(y for y, want in zip(output, ctx.wants, strict=True) if not want))
    save_operands(ctx, inputs[2:5])


def _gradients(backward: Any, ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    """d_q and d_k, each if wanted and if its upstream gradient is not None.

    Args:
        backward: `rope_bwd`, or the operator that calls it.
        ctx: what `_setup_context` filled.
        upstream: dq and dk, (batch, heads, tokens, width) or None.
    """
    dq, dk = (d if want else None for d, want in zip(upstream, ctx.wants, strict=True))
    d_q: Tensor | None = None
    d_k: Tensor | None = None
    if dq is not None or dk is not None:
        d_q, d_k = backward(dq, dk, *ctx.saved_tensors, ctx.head_dim)
    return None if dq is None else d_q, None if dk is None else d_k, None, None, None, None


ROPE = declare(
    "rope", rope_fwd, _shapes, setup_context=_setup_context, gradients=_gradients,
    backward=(rope_bwd, _fake_gradients),
)  # fmt: skip
