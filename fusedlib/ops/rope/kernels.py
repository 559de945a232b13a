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

import triton
import triton.language as tl


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
    cos += table[:, None] + j
    sin += table[:, None] + j
    a, b = _load_halves(x + j, inside, 0.0, HALF)
    if NORM:
        scale = _rstd(a, b, eps, HALF)[:, None]
        w_a, w_b = _load_halves(weight + j, j < HALF, 0.0, HALF)
        a *= scale * w_a
        b *= scale * w_b
    c, d = _load_halves(cos, in_table, nan, HALF)
    e, f = _load_halves(sin, in_table, nan, HALF)
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
    POSITIONS: tl.constexpr, INVERSE: tl.constexpr, NORM: tl.constexpr, FAR: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST: tl.constexpr, ZEROS: tl.constexpr, REST_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    # [TOKENS · HEADS] rows, heads next to each other: contiguous where a projection wrote them.
    groups = (heads + key_heads) // HEADS
    block, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    batch = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, TOKENS * HEADS)
    token = block.to(tl.int64) * TOKENS + i // HEADS
    head = group * HEADS + i % HEADS
    if FAR:  # heads lie 2³¹ elements and more apart; else 64 bits take a fifth more registers
        head = head.to(tl.int64)
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
