"""RMSNorm: fused on NVIDIA GPUs from compute capability 8.0 on, else PyTorch.

Saved for backward: s (where there is no residual, x itself), weight and rstd. `kernels` beside this
has the formulas, layouts and error bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedlib import reference
from fusedlib.compat import autocasts_anywhere, is_capturing, is_transformed
from fusedlib.invariant import is_batch_invariant
from fusedlib.launch import (
    Config,
    Launch,
    cdiv,
    has_kernels,
    launch_for,
    multiprocessors,
    next_power_of_2,
    rows_contiguous,
)
from fusedlib.op import call_prepared, declare, save_operands
from fusedlib.ops.arguments import (
    KERNEL_DTYPES,
    is_distributed,
    left_to_compiler,
    require_alike,
    require_number,
    require_tensors,
    shape_of,
)

CASTS = ("hf", "litgpt")
TOKEN_WIDTH = 4096  # by which numbers are counted as tokens, for a head is a row, too
# Calls up to this size are given to `torch.rms_norm`. Forward and backward keep the host of one
# H100 for 128 µs by it, 150 with the casts of "hf", and for 331 by the kernels, but the device 2 to
# 18 µs longer, and more than that for more or wider rows.
MAX_TORCH_NUMBERS, MAX_TORCH_ROWS, MAX_TORCH_WIDTH = 1 << 21, 1 << 11, 1 << 13
WIDEST = 8192  # numbers of a row that the backward holds in registers: four arrays of 16 a thread
TILE = 4096  # numbers that a program takes at a time, of several rows where they are narrow
LOADED = 2  # of the backward's tiles on their way at once
PER_PROCESSOR = 2  # programs of the backward


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, residual: Tensor | None = None,
    cast: str = "hf",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """weight ⊙ s / √(mean(s²) + eps) over the last dimension, s = x + residual or x itself.

    Statistics and normalisation are in fp32. In the kernels each element errs by at most 42·2⁻²⁴
    of itself beside the casts; `fusedlib.ops.norm.kernels` has the bounds of the gradients. Small
    eager calls on a GPU, of one dtype and without a residual, run `torch.rms_norm`, at most
    MAX_TORCH_ROWS rows and MAX_TORCH_NUMBERS numbers: with the same casts and the kernels' errors.
    Under torch.compile at most 1,024 rows of 4,096 numbers, or as many numbers, where that is
    fixed, are plain PyTorch, whose kernels Inductor joins with what is beside them.

    Args:
        x: (..., width).
        weight: (width,), in any floating-point dtype; None for ones.
        eps: added to the mean of squares.
        residual: the residual stream, of x's shape and dtype (under autocast of any), added first
            and rounded to that dtype.
        cast: "hf" rounds what is normalised to x's dtype and multiplies then, as Hugging Face's
            Llama, Mistral and Qwen do, in the wider of x's and weight's dtypes; "litgpt" multiplies
            in fp32 and rounds to x's dtype once, as litgpt and `torch.nn.RMSNorm` do.

    Returns:
        (..., width), and s where a residual is given.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: shapes, dtypes or devices that do not go together, operands that are sparse or
            nested, an eps that is no number, or an unknown `cast`.
    """
    return call_prepared(_prepare, (x, weight, residual), eps, cast)


def _prepare(
    eager: bool, x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, cast: str
) -> Callable[..., Any]:  # fmt: skip
    """Check the operands, and choose what computes x, weight and residual."""
    require_tensors("weight", "residual", x=x, weight=weight, residual=residual)
    require_number("eps", eps)
    _check(x, weight, residual, cast)
    if residual is not None and x.dtype != residual.dtype:  # under autocast
        return partial(_promoted, torch.promote_types(x.dtype, residual.dtype), eps, cast)
    plain = partial(_by_formula, float(eps), cast)
    dtypes = x.dtype in KERNEL_DTYPES and (weight is None or weight.dtype in KERNEL_DTYPES)
    few = left_to_compiler(x.numel() // TOKEN_WIDTH)  # torch.export fixes Size.numel()
    if not dtypes or few or not has_kernels(x.device) or is_transformed():
        return plain
    if is_distributed(x, weight, residual):
        return plain
    if eager and residual is None and _suits_torch(x, weight):
        if cast == "litgpt" or weight is None or x.dtype is torch.float32:
            return partial(_by_torch, float(eps), cast == "hf")
        wants_graph = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        return partial(_by_torch_rounding_twice, float(eps), wants_graph)
    return partial(_by_kernels, RMS_NORM.way(eager), float(eps), cast == "hf")


def _by_formula(
    eps: float, cast: str, x: Tensor, weight: Tensor | None, residual: Tensor | None
) -> Any:  # fmt: skip
    s = x if residual is None else x + residual
    y = reference.rms_norm(s, weight, eps, cast=cast)
    return y if residual is None else (y, s)


def _promoted(
    dtype: torch.dtype, eps: float, cast: str, x: Tensor, weight: Tensor | None, residual: Tensor
) -> Any:  # fmt: skip
    return rms_norm(x.to(dtype), weight, eps, residual=residual.to(dtype), cast=cast)


def _by_kernels(
    norm: Callable[..., Any], eps: float, hf: bool, x: Tensor, weight: Tensor | None,
    residual: Tensor | None,
) -> Any:  # fmt: skip
    y, s, _ = norm(x, weight, residual, eps, hf)
    return y if residual is None else (y, s)


def _suits_torch(x: Tensor, weight: Tensor | None) -> bool:
    """True if `torch.rms_norm` is the faster: on a GPU, small, of one dtype, without autocast."""
    numbers, width = x.numel(), x.shape[-1]
    return (
        x.is_cuda
        and (weight is None or weight.dtype == x.dtype)
        and 0 < numbers <= MAX_TORCH_NUMBERS
        and numbers <= width * MAX_TORCH_ROWS
        and width <= MAX_TORCH_WIDTH
        and not autocasts_anywhere()
        and not is_batch_invariant()
    )


def _by_torch(eps: float, hf: bool, x: Tensor, weight: Tensor | None, _: None) -> Any:
    """`rms_norm` by `torch.rms_norm`; a CUDA graph gets the kernels, for there no host waits."""
    if is_capturing():
        return _by_kernels(RMS_NORM.way(False), eps, hf, x, weight, None)
    return torch.rms_norm(x, x.shape[-1:], weight, eps)


def _by_torch_rounding_twice(
    eps: float, wants_graph: bool, x: Tensor, weight: Tensor, _: None
) -> Any:  # fmt: skip
    """`_by_torch` with the casts of "hf". `torch.rms_norm` with a weight rounds once, and gives the
    graph alone: gradients do not depend on y's rounding.
    """
    if is_capturing():
        return _by_kernels(RMS_NORM.way(False), eps, True, x, weight, None)
    width = x.shape[-1:]
    if not wants_graph:
        return torch.rms_norm(x, width, None, eps).mul_(weight)
    normed = torch.rms_norm(x.data, width, None, eps)
    y = torch.rms_norm(x, width, weight, eps)
    torch.mul(normed, weight.data, out=y.data)
    return y


def _check(x: Tensor, weight: Tensor | None, residual: Tensor | None, cast: str) -> None:
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


# --- forward and backward ------------------------------------------------------------------------


def rms_norm_fwd(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, hf: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y and s of x's shape (s only with a residual), and rstd (rows,)."""
    y, s, rstd = results = _empty_results(x, weight, residual, eps, hf)
    source = _rows(x)
    # In the place of an absent operand a kernel gets any tensor, and does not read or write it.
    factor = source if weight is None else weight.contiguous()
    added = source if residual is None else _rows(residual)
    rows, width = source.shape
    if not rows:
        return results

    def make() -> Launch:
        from fusedlib.ops.norm.kernels import _rms_norm_fwd_kernel

        config, constants = tile(width, width)  # a whole row at a time, however wide
        programs = cdiv(rows, constants["ROWS"]), 1, 1
        flags = {"RESIDUAL": residual is not None, "WEIGHTED": weight is not None, "HF": hf}
        scalars = rows, source.stride(0), added.stride(0), eps
        return Launch(_rms_norm_fwd_kernel, config, programs, scalars, constants | flags)

    matrices = source, added, factor, y, source if s is None else s, rstd
    layout = source.shape, source.stride(0), added.stride(0), residual is None
    key = "rms_norm", *layout, hf, eps, x.dtype, weight is None, factor.dtype, x.device
    launch_for(key, make, *matrices)(*matrices)
    return results


def rms_norm_bwd(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor | None, rstd: Tensor,
    wants_s: bool, wants_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """d_s of s's shape and d_weight, each if wanted."""
    d_s = s.new_empty(s.shape) if wants_s else None
    source, upstream = _rows(s).contiguous(), _rows(dy)
    factor = rstd if weight is None else weight.contiguous()
    stream = upstream if ds is None else _rows(ds)
    rows, width = source.shape
    if not rows:
        return d_s, factor.new_zeros(width) if wants_weight else None
    # No more than there are tiles of rows; d_weight has one partial row for each.
    parts = min(cdiv(rows, rows_of_tile(width, WIDEST)), most_parts(s.device))
    partial_sums = s.new_empty((parts, width) if wants_weight else 0, dtype=torch.float32)
    scalars = rows, upstream.stride(0), stream.stride(0)

    def make() -> Launch:
        from fusedlib.ops.norm.kernels import _rms_norm_bwd_kernel

        config, constants = tile(width, WIDEST)
        flags: dict[str, int] = {"RESIDUAL": ds is not None, "WEIGHTED": weight is not None}
        flags |= {"WANTS_S": wants_s, "WANTS_WEIGHT": wants_weight}
        # Loads ahead of a wide row's partial sums would read them before they are written.
        flags["LOADED"] = LOADED if constants["BLOCK"] >= width else 1
        programs = parts, 1, 1
        return Launch(_rms_norm_bwd_kernel, config, programs, scalars, constants | flags)

    matrices = upstream, stream, source, factor, rstd, source if d_s is None else d_s, partial_sums
    dtypes = upstream.dtype, stream.dtype, source.dtype, factor.dtype
    variant = ds is None, weight is None, wants_s, wants_weight
    key = "rms_norm_bwd", *scalars, width, parts, *variant, *dtypes, s.device
    launch_for(key, make, *matrices)(*matrices)
    return d_s, sum_parts(partial_sums, factor.dtype) if wants_weight else None


def rows_of_tile(width: int, widest: int) -> int:
    """Rows that a program takes at a time."""
    return max(1, TILE >> (width - 1).bit_length()) if width <= widest else 1


def tile(width: int, widest: int) -> tuple[Config, dict[str, int]]:
    """How a kernel that holds at most `widest` numbers of a row is cut: 16 numbers a thread."""
    block = next_power_of_2(width) if width <= widest else TILE
    rows = rows_of_tile(width, widest)
    constants = {"WIDTH": width, "ROWS": rows, "BLOCK": block}
    return Config(num_warps=min(16, rows * block // 512)), constants


def most_parts(device: torch.device) -> int:
    """Programs of the backward."""
    return PER_PROCESSOR * multiprocessors(device)


def sum_parts(parts_of_sum: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum (width,) of partial rows (parts, width): 16 columns a program, all parts at once."""
    parts, width = parts_of_sum.shape
    total = parts_of_sum.new_empty(width, dtype=dtype)

    def make() -> Launch:
        from fusedlib.ops.norm.kernels import _sum_parts_kernel

        most = most_parts(parts_of_sum.device)
        constants = {"PARTS": next_power_of_2(most), "COLUMNS": 16}
        config, programs = Config(num_warps=8), (cdiv(width, 16), 1, 1)
        return Launch(_sum_parts_kernel, config, programs, (parts, width), constants)

    key = "sum_parts", parts, width, dtype, total.device
    launch_for(key, make, parts_of_sum, total)(parts_of_sum, total)
    return total


def _rows(x: Tensor) -> Tensor:
    """(rows, width) of (..., width), rows contiguous."""
    return rows_contiguous(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]))


def _empty_results(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, hf: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Empty tensors for y, s and rstd."""
    dtype = x.dtype
    if hf and weight is not None and weight.dtype != dtype:
        dtype = torch.promote_types(dtype, weight.dtype)
    s = None if residual is None else x.new_empty(x.shape)
    rows = x.numel() // x.shape[-1]
    return x.new_empty(x.shape, dtype=dtype), s, x.new_empty(rows, dtype=torch.float32)


def _fake_gradients(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor | None, rstd: Tensor,
    wants_s: bool, wants_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    d_weight = None if weight is None or not wants_weight else torch.empty_like(weight)
    return s.new_empty(s.shape) if wants_s else None, d_weight


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, weight, residual, eps, hf = inputs
    _, s, rstd = output
    ctx.settings = eps, hf  # for `ops.recomputed`, which computes y again
    ctx.set_materialize_grads(False)
    is_stream = residual is not None or s is None  # without a residual the operator's s is empty
    ctx.mark_non_differentiable(*((rstd,) if is_stream else (s, rstd)))
    save_operands(ctx, (x if residual is None else s, weight), rstd)


def _gradients(backward: Any, ctx: Any, dy: Tensor | None, ds: Tensor | None, _: Any) -> Any:
    """d_x, d_weight and d_residual, each if wanted, of the upstream gradients of y and s."""
    wants_x, wants_weight, wants_residual, *_ = ctx.needs_input_grad
    d_s, d_weight = ds, None
    if dy is not None:
        wants_s = wants_x or wants_residual
        d_s, d_weight = backward(dy, ds, *ctx.saved_tensors, wants_s, wants_weight)
    return (
        d_s if wants_x else None, d_weight if wants_weight else None,
        d_s if wants_residual else None, None, None,
    )  # fmt: skip


RMS_NORM = declare(
    "rms_norm", rms_norm_fwd, _empty_results, setup_context=_setup_context, gradients=_gradients,
    backward=(rms_norm_bwd, _fake_gradients),
)  # fmt: skip
