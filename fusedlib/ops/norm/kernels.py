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

from __future__ import annotations

from functools import partial as bind
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.launch.config import Config
from fusedlib.launch.first_order import first_order
from fusedlib.launch.launch import Launch, cdiv, launch_for, multiprocessors, rows_contiguous
from fusedlib.launch.operator import DirectFunction, differentiable, operator
from fusedlib.launch.saved import save_operands, saved_operands

WIDEST = 8192  # numbers of a row that the backward holds in registers: four arrays of 16 a thread
TILE = 4096  # numbers that a program takes at a time, of several rows where they are narrow
LOADED = 2  # of the backward's tiles on their way at once
PER_PROCESSOR = 2  # programs of the backward


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


def rows_of_tile(width: int, widest: int) -> int:
    """Rows that a program takes at a time."""
    return max(1, TILE >> (width - 1).bit_length()) if width <= widest else 1


def tile(width: int, widest: int) -> tuple[Config, dict[str, int]]:
    """How a kernel that holds at most `widest` numbers of a row is cut: 16 numbers a thread."""
    block = triton.next_power_of_2(width) if width <= widest else TILE
    rows = rows_of_tile(width, widest)
    constants = {"WIDTH": width, "ROWS": rows, "BLOCK": block}
    return Config(num_warps=min(16, rows * block // 512)), constants


def rms_norm_fwd(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, hf: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y and s of x's shape (s only with a residual), and rstd (rows,)."""
    dtype = x.dtype
    if hf and weight is not None and weight.dtype != dtype:
        dtype = torch.promote_types(dtype, weight.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    s = None if residual is None else x.new_empty(x.shape)
    source = _rows(x)
    by = source if weight is None else weight.contiguous()
    added = source if residual is None else _rows(residual)
    rows, width = source.shape
    rstd = x.new_empty(rows, dtype=torch.float32)
    if not rows:
        return y, s, rstd

    def make() -> Launch:
        config, constants = tile(width, 1 << 30)
        programs = cdiv(rows, constants["ROWS"]), 1, 1
        flags = {"RESIDUAL": residual is not None, "WEIGHTED": weight is not None, "HF": hf}
        scalars = rows, source.stride(0), added.stride(0), eps
        return Launch(_rms_norm_fwd_kernel, config, programs, (), scalars, constants | flags)

    matrices = source, added, by, y, source if s is None else s, rstd
    layout = source.shape, source.stride(0), added.stride(0), residual is None
    key = "rms_norm", *layout, hf, eps, x.dtype, weight is None, by.dtype, x.device
    launch_for(key, make, *matrices)(*matrices)
    return y, s, rstd


def rms_norm_bwd(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor | None, rstd: Tensor,
    wants_s: bool, wants_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """d_s of s's shape and d_weight, each if wanted."""
    d_s = s.new_empty(s.shape) if wants_s else None
    source, upstream = _rows(s).contiguous(), _rows(dy)
    by = rstd if weight is None else weight.contiguous()
    stream = upstream if ds is None else _rows(ds)
    rows, width = source.shape
    if not rows:
        return d_s, by.new_zeros(width) if wants_weight else None
    # No more than there are tiles of rows; d_weight has one partial row for each.
    parts = min(cdiv(rows, rows_of_tile(width, WIDEST)), most_parts(s.device))
    partial = s.new_empty((parts, width) if wants_weight else 0, dtype=torch.float32)
    scalars = rows, upstream.stride(0), stream.stride(0)

    def make() -> Launch:
        config, constants = tile(width, WIDEST)
        flags: dict[str, int] = {"RESIDUAL": ds is not None, "WEIGHTED": weight is not None}
        flags |= {"WANTS_S": wants_s, "WANTS_WEIGHT": wants_weight}
        # Loads ahead of a wide row's partial sums would read them before they are written.
        flags["LOADED"] = LOADED if constants["BLOCK"] >= width else 1
        programs = parts, 1, 1
        return Launch(_rms_norm_bwd_kernel, config, programs, (), scalars, constants | flags)

    matrices = upstream, stream, source, by, rstd, source if d_s is None else d_s, partial
    dtypes = upstream.dtype, stream.dtype, source.dtype, by.dtype
    variant = ds is None, weight is None, wants_s, wants_weight
    key = "rms_norm_bwd", *scalars, width, parts, *variant, *dtypes, s.device
    launch_for(key, make, *matrices)(*matrices)
    return d_s, sum_parts(partial, by.dtype) if wants_weight else None


def most_parts(device: torch.device) -> int:
    """Programs of the backward."""
    return PER_PROCESSOR * multiprocessors(device)


def sum_parts(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum (width,) of the partial rows: 16 columns a program, all parts at once."""
    parts, width = partial.shape
    total = partial.new_empty(width, dtype=dtype)

    def make() -> Launch:
        constants = {"PARTS": 1 << (most_parts(partial.device) - 1).bit_length(), "COLUMNS": 16}
        config, programs = Config(num_warps=8), (cdiv(width, 16), 1, 1)
        return Launch(_sum_parts_kernel, config, programs, (), (parts, width), constants)

    key = "sum_parts", parts, width, dtype, partial.device
    launch_for(key, make, partial, total)(partial, total)
    return total


def _rows(x: Tensor) -> Tensor:
    """(rows, width) of (..., width), rows contiguous."""
    return rows_contiguous(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]))


def _shapes(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, hf: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Tensors of the shapes and dtypes of y, s and rstd."""
    dtype = x.dtype
    if hf and weight is not None:
        dtype = torch.promote_types(dtype, weight.dtype)
    s = None if residual is None else x.new_empty(x.shape)
    rows = x.numel() // x.shape[-1]
    return x.new_empty(x.shape, dtype=dtype), s, x.new_empty(rows, dtype=torch.float32)


def _shapes_of_gradients(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor | None, rstd: Tensor,
    wants_s: bool, wants_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    d_weight = None if weight is None or not wants_weight else torch.empty_like(weight)
    return s.new_empty(s.shape) if wants_s else None, d_weight


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep what the wanted gradients need."""
    x, weight, residual, eps, hf = inputs
    _, s, rstd = output
    ctx.settings = eps, hf  # for who computes y again
    ctx.set_materialize_grads(False)
    fixed = (rstd,) if residual is not None or s is None else (s, rstd)
    ctx.mark_non_differentiable(*fixed)
    wants_x, wants_weight, wants_residual, *_ = ctx.needs_input_grad
    ctx.wants = wants_x, wants_residual, wants_weight
    save_operands(ctx, (x if residual is None else s, weight), rstd)


def _gradients(backward: Any, ctx: Any, dy: Tensor | None, ds: Tensor | None, _: Any) -> Any:
    """d_x, d_weight and d_residual, each if wanted, of the upstream gradients of y and s.

    Args:
        backward: `rms_norm_bwd`, or the operator that calls it.
        ctx: what `_set_up` filled.
        dy: of y's shape, or None.
        ds: of s's shape, or None.
    """
    wants_x, wants_residual, wants_weight = ctx.wants
    wants_s = wants_x or wants_residual
    d_s, d_weight = ds, None
    if dy is not None:
        d_s, d_weight = backward(dy, ds, *saved_operands(ctx), wants_s, wants_weight)
    return (
        d_s if wants_x else None, d_weight if wants_weight else None,
        d_s if wants_residual else None, None, None,
    )  # fmt: skip


_backward = operator("rms_norm_backward", rms_norm_bwd, _shapes_of_gradients)
rms_norm_operator = differentiable(
    "rms_norm", rms_norm_fwd, _shapes, _set_up, first_order(bind(_gradients, _backward))
)


class RMSNormFunction(DirectFunction):
    """y, s and rstd of x, weight, residual, eps and hf, launched without the dispatcher."""

    forward = staticmethod(rms_norm_fwd)
    setup_context = staticmethod(_set_up)
    backward = staticmethod(first_order(bind(_gradients, rms_norm_bwd)))
