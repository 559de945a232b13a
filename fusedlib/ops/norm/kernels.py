# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""RMSNorm by rows, with the residual stream added in the same pass (Zhang and Sennrich 2019).

    s = x + residual                 rounded to x's dtype, as the stream is stored; without: s = x
    n = s / √(mean(s²) + eps)        in fp32, over a row
    y = weight ⊙ n                   "hf": n rounded to x's dtype first; "litgpt": in fp32;
                                     without a weight y = n

backward    with d = weight ⊙ dy, in fp32 throughout,
                d_s = (d − n ⊙ mean(d ⊙ n)) / √(mean(s²) + eps) + ds,  which is d_x and d_residual
                d_weight = Σ dy ⊙ n over all rows

| tensor                       | shape         | strides                                        |
|------------------------------|---------------|------------------------------------------------|
| x, residual, dy, ds          | (rows, width) | any; copied unless rows are contiguous         |
| weight, d_weight             | (width,)      | contiguous; any of the three dtypes            |
| y, s, d_s                    | (rows, width) | contiguous                                     |
| rstd = 1 / √(mean(s²) + eps) | (rows,)       | contiguous, fp32                               |
| partial                      | (parts, width)| contiguous, fp32: d_weight of a program's rows |

Saved: s (where there is no residual, x itself), weight and rstd. The backward reads dy, ds and s
and writes d_s once; up to WIDEST numbers a row stay in registers, wider rows are read twice, the
second time from the L2. Programs take rows in turns, so that d_weight is summed in one order: the
same bits in every run on a card.

Error bound, u = 2⁻²⁴ and v the results' roundoff, where mean(s²) neither overflows nor underflows
in fp32: each element of y errs by at most (42 u + v)·|y|, "hf" by v·|y| more; each row of d_s by
128 u·rstd·‖d‖ + v·‖d_s‖ in norm; each element of d_weight by (rows/parts + 64) u·Σ|dy ⊙ n| + v
of itself; s by v of itself. Those are HF's casts: y is HF's but where two fp32 sums round apart.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("rows",))
def _rms_norm_fwd_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, y, s, rstd, rows, x_row, residual_row, eps,
    RESIDUAL: tl.constexpr, WEIGHTED: tl.constexpr, HF: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)[None, :]
    row = i[:, None]
    inside = (row < rows) & (j < WIDTH)
    stream = tl.load(x + row * x_row + j, mask=inside, other=0.0)
    if RESIDUAL:
        added = tl.load(residual + row * residual_row + j, mask=inside, other=0.0)
        stream = (stream.to(tl.float32) + added.to(tl.float32)).to(s.dtype.element_ty)
        tl.store(s + row * WIDTH + j, stream, mask=inside)
    wide = stream.to(tl.float32)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(wide * wide, axis=1) * (1.0 / WIDTH) + eps))
    tl.store(rstd + i, scale, mask=i < rows)
    normed = wide * scale[:, None]
    if HF:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    if WEIGHTED:
        normed *= tl.load(weight + j, mask=j < WIDTH, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + j, normed.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _wide(source, offsets, inside):  # type: ignore[no-untyped-def]
    return tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=("rows",))
def _rms_norm_bwd_kernel(  # type: ignore[no-untyped-def]
    dy, ds, s, weight, rstd, d_s, partial, rows, dy_row, ds_row,
    RESIDUAL: tl.constexpr, WEIGHTED: tl.constexpr, WANTS_S: tl.constexpr,
    WANTS_WEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LOADED: tl.constexpr,
):  # fmt: skip
    start, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    WHOLE: tl.constexpr = BLOCK >= WIDTH  # noqa: N806
    columns = tl.arange(0, BLOCK)[None, :]
    own = partial + tl.program_id(0).to(tl.int64) * WIDTH
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    by = _wide(weight, columns, columns < WIDTH) if WEIGHTED else 1.0
    for first in tl.range(start, rows, step, num_stages=LOADED):
        i = first + tl.arange(0, ROWS)
        row = i.to(tl.int64)[:, None]
        scale = tl.load(rstd + i, mask=i < rows, other=0.0)[:, None]
        mean = tl.zeros((ROWS,), dtype=tl.float32)
        # Of a whole row the compiler sees that both loops load the same.
        if WANTS_S:
            for left in range(0, WIDTH, BLOCK):
                j = left + columns
                inside = (row < rows) & (j < WIDTH)
                n = _wide(s, row * WIDTH + j, inside) * scale
                d = _wide(dy, row * dy_row + j, inside)
                d *= by if WHOLE or not WEIGHTED else _wide(weight, j, j < WIDTH)
                mean += tl.sum(d * n, axis=1)
            mean *= 1.0 / WIDTH
        for left in range(0, WIDTH, BLOCK):
            j = left + columns
            inside = (row < rows) & (j < WIDTH)
            n = _wide(s, row * WIDTH + j, inside) * scale
            upstream = _wide(dy, row * dy_row + j, inside)
            if WANTS_S:
                d = upstream * (by if WHOLE or not WEIGHTED else _wide(weight, j, j < WIDTH))
                gradient = (d - n * mean[:, None]) * scale
                if RESIDUAL:
                    gradient += _wide(ds, row * ds_row + j, inside)
                tl.store(d_s + row * WIDTH + j, gradient.to(d_s.dtype.element_ty), mask=inside)
            if WANTS_WEIGHT:
                if WHOLE:
                    total += upstream * n
                else:
                    tl.debug_barrier()  # the row before was stored, by whichever thread
                    found = tl.load(own + j, mask=(j < WIDTH) & (first > start), other=0.0)
                    tl.store(own + j, found + upstream * n, mask=j < WIDTH)
    if WANTS_WEIGHT and WHOLE:
        j = tl.arange(0, BLOCK)
        tl.store(own + j, tl.sum(total, axis=0), mask=j < WIDTH)


@triton.jit(do_not_specialize=("parts",))
def _sum_parts_kernel(  # type: ignore[no-untyped-def]
    partial, d_weight, parts, width, PARTS: tl.constexpr, COLUMNS: tl.constexpr
):
    i = tl.arange(0, PARTS).to(tl.int64)[:, None]
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    block = tl.load(partial + i * width + j[None, :], mask=(i < parts) & (j < width)[None, :],
                    other=0.0)  # fmt: skip
    total = tl.sum(block, axis=0).to(d_weight.dtype.element_ty)
    tl.store(d_weight + j, total, mask=j < width)
