# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""Rotary position embedding of q and k in one launch (Su et al. 2021), halves rotated.

With a, b the halves of a head's first rotary_dim elements, c, d those of cos and e, f those of sin:

    forward     a' = a ⊙ c − b ⊙ e        b' = b ⊙ d + a ⊙ f        the rest of the head is copied
    backward    da = da' ⊙ c + db' ⊙ f    db = db' ⊙ d − da' ⊙ e    by the same kernel

With the norms of q and k that come before it in Qwen3 and others, in the same launch, x a head:

    forward     n = x / √(mean(x²) + eps)    (a, b) = weight ⊙ n, in fp32, then as above
    backward    d = weight ⊙ (da, db)        dx = (d − n ⊙ mean(d ⊙ n)) / √(mean(x²) + eps)
                d_weight = Σ (da, db) ⊙ n over all heads and tokens, by partial sums

| tensor    | shape                                 | strides                                     |
|-----------|---------------------------------------|---------------------------------------------|
| q, dq     | (batch, heads, tokens, head_dim)      | any; copied unless heads are contiguous     |
| k, dk     | (batch, key_heads, tokens, head_dim)  | likewise                                    |
| results   | as q and k, or of another width       | dense, in the order of q's and k's strides, |
|           |                                       | or as (batch, tokens, heads, width)         |
| cos, sin  | (1 or batch, tokens, rotary_dim)      | alike, rows contiguous; or copied           |
| … by positions | (length, rotary_dim)             | likewise                                    |
| positions | (1 or batch, tokens), int32 or int64  | contiguous; or copied                       |
| weights   | (head_dim,), of q's and of k's norm   | any; copied unless contiguous; q's dtype    |
| partial   | (parts, 2 head_dim)                   | contiguous, fp32: q's and k's d_weight      |

Results wider than q end in zeros: heads that attention's kernels take as they are. Saved: cos, sin
and positions. A row of cos and sin is read once for up to eight heads. On a GPU a position outside
the table reads nothing and gives NaN: nobody waits for the device to find out.

Error bound, u = 2⁻²⁴ and v the results' roundoff: every element a' errs by at most
3 u·(|a c| + |b e|) + v·|a'|, and so do the others: fp32 inside, rounded once. After a norm by at
most 48 u·(|a c| + |b e|) + v·|a'|; dx by 128 u·‖d‖ / √(mean(x²) + eps) + v·‖dx‖ in norm.
"""

from __future__ import annotations

from functools import partial as bind
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.launch.config import Config
from fusedlib.launch.first_order import first_order
from fusedlib.launch.launch import Launch, cdiv, launch_for
from fusedlib.launch.operator import DirectFunction, differentiable, operator
from fusedlib.launch.saved import save_operands, saved_operands
from fusedlib.ops.arguments import refuse_outside
from fusedlib.ops.norm.kernels import most_parts, sum_parts

PAIRS = 1024  # rotated pairs a program, 8 a thread: two loads of 16 bytes in flight in 16 bits
MAX_SHARED_HEADS = 8  # that share the rows of cos and sin they read


@triton.jit
def _rstd(a, b, eps, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / √(mean(x²) + eps) of heads with the halves a and b."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(a * a + b * b, axis=1) * (0.5 / HALF) + eps))


@triton.jit
def _load_halves(source, mask, other, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """In fp32, what lies at `source` and HALF elements on."""
    left = tl.load(source, mask=mask, other=other).to(tl.float32)
    return left, tl.load(source + HALF, mask=mask, other=other).to(tl.float32)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x, y, cos, sin, weight, eps, batch, head, token, tokens, table, in_table,
    x_batch, x_head, x_token, y_batch, y_head, y_token,
    INVERSE: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST: tl.constexpr, ZEROS: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows (head, token) of x into y; `table` is where the row of cos begins."""
    x += (batch * x_batch + head * x_head + token * x_token)[:, None]
    y += (batch * y_batch + head * y_head + token * y_token)[:, None]
    present = (token < tokens)[:, None]
    j = tl.arange(0, HALF_BLOCK)[None, :]
    inside = present & (j < HALF)
    in_table = inside & in_table[:, None]
    nan = float("nan")
    a, b = _load_halves(x + j, inside, 0.0, HALF)
    if NORM:
        scale = _rstd(a, b, eps, HALF)[:, None]
        w_a, w_b = _load_halves(weight + j, j < HALF, 0.0, HALF)
        a *= scale * w_a
        b *= scale * w_b
    c, d = _load_halves(cos + table[:, None] + j, in_table, nan, HALF)
    e, f = _load_halves(sin + table[:, None] + j, in_table, nan, HALF)
    if INVERSE:
        e, f = -f, -e
    tl.store(y + j, (a * c - b * e).to(y.dtype.element_ty), mask=inside)
    tl.store(y + HALF + j, (b * d + a * f).to(y.dtype.element_ty), mask=inside)
    if REST + ZEROS:
        j = tl.arange(0, REST_BLOCK)[None, :]
        rest = tl.load(x + 2 * HALF + j, mask=present & (j < REST), other=0.0)
        tl.store(y + 2 * HALF + j, rest, mask=present & (j < REST + ZEROS))


# Strides are multiples of a head, whatever the length.
@triton.jit(do_not_specialize=("tokens", "length", "positions_batch"))
def _rope_kernel(  # type: ignore[no-untyped-def]
    q, k, q_out, k_out, cos, sin, positions, q_weight, k_weight, heads, key_heads, tokens, length,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    qo_batch, qo_head, qo_token, ko_batch, ko_head, ko_token,
    table_batch, table_row, positions_batch, eps,
    POSITIONS: tl.constexpr, INVERSE: tl.constexpr, NORM: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST: tl.constexpr, ZEROS: tl.constexpr, REST_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    # [TOKENS · HEADS] rows, heads next to each other: contiguous where a projection wrote them.
    groups, blocks = (heads + key_heads) // HEADS, tl.cdiv(tokens, TOKENS)
    block, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    batch = (block // blocks).to(tl.int64)
    i = tl.arange(0, TOKENS * HEADS)
    token = (block % blocks).to(tl.int64) * TOKENS + i // HEADS
    # Offsets in 64 bits: heads may lie 2³¹ elements and more apart.
    head = (group * HEADS + i % HEADS).to(tl.int64)
    if POSITIONS:
        at = tl.load(positions + batch * positions_batch + token, mask=token < tokens, other=0)
        at = at.to(tl.int64)
        in_table = (at >= 0) & (at < length)
        table = tl.where(in_table, at, 0) * table_row
    else:
        in_table = token < tokens
        table = batch * table_batch + token * table_row
    if group * HEADS < heads:
        _rotate(q, q_out, cos, sin, q_weight, eps, batch, head, token, tokens, table, in_table,
                q_batch, q_head, q_token, qo_batch, qo_head, qo_token,
                INVERSE, NORM, HALF, HALF_BLOCK, REST, ZEROS, REST_BLOCK)  # fmt: skip
    else:
        _rotate(k, k_out, cos, sin, k_weight, eps, batch, head - heads, token, tokens, table,
                in_table, k_batch, k_head, k_token, ko_batch, ko_head, ko_token,
                INVERSE, NORM, HALF, HALF_BLOCK, REST, ZEROS, REST_BLOCK)  # fmt: skip


@triton.jit
def _normed_back(  # type: ignore[no-untyped-def]
    x, dy, dx, cos, sin, weight, partial, eps, batches, heads, tokens,
    x_batch, x_head, x_token, dy_batch, dy_head, dy_token, dx_batch, dx_head, dx_token,
    table_batch, table_row, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx of one tensor of heads, by all programs in turns, and this program's d_weight."""
    j = tl.arange(0, HALF_BLOCK)[None, :]
    within = j < HALF
    w_a, w_b = _load_halves(weight + j, within, 0.0, HALF)
    total_a = tl.zeros((ROWS, HALF_BLOCK), dtype=tl.float32)
    total_b = tl.zeros((ROWS, HALF_BLOCK), dtype=tl.float32)
    rows = batches.to(tl.int64) * tokens * heads
    for first in range(tl.program_id(0).to(tl.int64) * ROWS, rows, tl.num_programs(0) * ROWS):
        i = first + tl.arange(0, ROWS)
        head, at = i % heads, i // heads
        token, batch = at % tokens, at // tokens
        inside = (i < rows)[:, None] & within
        from_x = x + (batch * x_batch + head * x_head + token * x_token)[:, None] + j
        from_dy = dy + (batch * dy_batch + head * dy_head + token * dy_token)[:, None] + j
        to_dx = dx + (batch * dx_batch + head * dx_head + token * dx_token)[:, None] + j
        table = (batch * table_batch + token * table_row)[:, None] + j
        a, b = _load_halves(from_x, inside, 0.0, HALF)
        up_a, up_b = _load_halves(from_dy, inside, 0.0, HALF)
        c, d = _load_halves(cos + table, inside, 0.0, HALF)
        e, f = _load_halves(sin + table, inside, 0.0, HALF)
        back_a, back_b = up_a * c + up_b * f, up_b * d - up_a * e
        scale = _rstd(a, b, eps, HALF)[:, None]
        a *= scale
        b *= scale
        total_a += back_a * a
        total_b += back_b * b
        back_a *= w_a
        back_b *= w_b
        mean = tl.sum(back_a * a + back_b * b, axis=1)[:, None] * (0.5 / HALF)
        tl.store(to_dx, ((back_a - a * mean) * scale).to(dx.dtype.element_ty), mask=inside)
        tl.store(to_dx + HALF, ((back_b - b * mean) * scale).to(dx.dtype.element_ty), mask=inside)
    j = tl.arange(0, HALF_BLOCK)
    tl.store(partial + j, tl.sum(total_a, axis=0), mask=j < HALF)
    tl.store(partial + HALF + j, tl.sum(total_b, axis=0), mask=j < HALF)


@triton.jit(do_not_specialize=("batches", "tokens"))
def _normed_rope_bwd_kernel(  # type: ignore[no-untyped-def]
    q, k, dq, dk, d_q, d_k, cos, sin, q_weight, k_weight, partial,
    batches, heads, key_heads, tokens,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    dq_batch, dq_head, dq_token, dk_batch, dk_head, dk_token,
    qo_batch, qo_head, qo_token, ko_batch, ko_head, ko_token,
    table_batch, table_row, eps,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    own = partial + tl.program_id(0).to(tl.int64) * (4 * HALF)
    _normed_back(q, dq, d_q, cos, sin, q_weight, own, eps, batches, heads, tokens,
                 q_batch, q_head, q_token, dq_batch, dq_head, dq_token,
                 qo_batch, qo_head, qo_token, table_batch, table_row,
                 HALF, HALF_BLOCK, ROWS)  # fmt: skip
    _normed_back(k, dk, d_k, cos, sin, k_weight, own + 2 * HALF, eps, batches, key_heads, tokens,
                 k_batch, k_head, k_token, dk_batch, dk_head, dk_token,
                 ko_batch, ko_head, ko_token, table_batch, table_row,
                 HALF, HALF_BLOCK, ROWS)  # fmt: skip


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
    block = triton.next_power_of_2(head_dim // 2)
    constants = {"HALF": head_dim // 2, "HALF_BLOCK": block, "ROWS": max(1, PAIRS // block)}
    parts = min(cdiv(batch * heads * tokens, constants["ROWS"]), most_parts(q.device))
    partial = q.new_empty((parts, 2 * head_dim), dtype=torch.float32)
    strides = _strides(*given, *upstream, *results)
    scalars = batch, heads, k.shape[1], tokens, *strides, *_table_strides(cos), eps
    grid = parts, 1, 1
    make = bind(Launch, _normed_rope_bwd_kernel, Config(num_warps=4), grid, (), scalars, constants)
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
    wide = results[0].shape[-1]
    half, rest = cos.shape[-1] // 2, min(head_dim, wide) - cos.shape[-1]
    zeros = max(wide - head_dim, 0)
    constants = {
        "POSITIONS": positions is not None, "INVERSE": inverse, "NORM": eps is not None,
        "HALF": half, "REST": rest, "ZEROS": zeros,
    }  # fmt: skip

    def make() -> Launch:
        block = triton.next_power_of_2(half)
        shared = gcd(heads, key_heads, MAX_SHARED_HEADS)
        rows = max(1, PAIRS // block)
        cut = {"HALF_BLOCK": block, "REST_BLOCK": triton.next_power_of_2(max(rest + zeros, 1))}
        cut |= {"TOKENS": max(1, rows // shared), "HEADS": shared}
        groups = (heads + key_heads) // shared
        # Sequences too along x: along y and z a grid ends at 65,535.
        programs = batch * cdiv(tokens, cut["TOKENS"]) * groups, 1, 1
        return Launch(_rope_kernel, Config(num_warps=4), programs, (), scalars, constants | cut)

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


def _shapes_of_gradients(
    dq: Tensor | None, dk: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None,
    head_dim: int,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    d_q, d_k = (None if d is None else _like(_heads_contiguous(d), head_dim) for d in (dq, dk))
    return d_q, d_k


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.wants, ctx.head_dim = ctx.needs_input_grad[:2], inputs[0].shape[-1]
    ctx.mark_non_differentiable(*(y for y, want in zip(output, ctx.wants, strict=True) if not want))
    save_operands(ctx, inputs[2:5])


def _gradients(backward: Any, ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    """d_q and d_k, each if wanted and if its upstream gradient is not None.

    Args:
        backward: `rope_bwd`, or the operator that calls it.
        ctx: what `_set_up` filled.
        upstream: dq and dk, (batch, heads, tokens, width) or None.
    """
    dq, dk = (d if want else None for d, want in zip(upstream, ctx.wants, strict=True))
    d_q: Tensor | None = None
    d_k: Tensor | None = None
    if dq is not None or dk is not None:
        d_q, d_k = backward(dq, dk, *saved_operands(ctx), ctx.head_dim)
    return None if dq is None else d_q, None if dk is None else d_k, None, None, None, None


_backward = operator("rope_backward", rope_bwd, _shapes_of_gradients)
rope_operator = differentiable(
    "rope", rope_fwd, _shapes, _set_up, first_order(bind(_gradients, _backward))
)


class RopeFunction(DirectFunction):
    """q and k turned, of the arguments of `rope_fwd`, launched without the dispatcher."""

    forward = staticmethod(rope_fwd)
    setup_context = staticmethod(_set_up)
    backward = staticmethod(first_order(bind(_gradients, rope_bwd)))
