"""RMSNorm as a function: fused on NVIDIA GPUs from compute capability 8.0 on, else PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedlib.launch.device import has_kernels
from fusedlib.launch.internals import (
    autocasts_anywhere,
    in_forward_mode,
    in_functorch,
    is_capturing,
    is_transformed,
)
from fusedlib.ops.arguments import (
    KERNEL_DTYPES,
    require_alike,
    require_number,
    require_tensors,
    shape_of,
)
from fusedlib.ops.call_context import (
    PLAIN_TYPES,
    autocast_enabled,
    is_distributed,
    is_plain_eager,
    left_to_compiler,
    present,
)

CASTS = ("hf", "litgpt")
TOKEN_WIDTH = 4096  # by which numbers are counted as tokens, for a head is a row, too
# The most that `torch.rms_norm` takes. Forward and backward keep the host of one H100 for 128 µs by
# it, 150 with the casts of "hf", and for 331 by the kernels, but the device 2 to 18 µs longer, and
# more than that for more or wider rows.
MAX_TORCH_NUMBERS, MAX_TORCH_ROWS, MAX_TORCH_WIDTH = 1 << 21, 1 << 11, 1 << 13


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
    if residual is None and not torch.compiler.is_dynamo_compiling():
        try:
            if _suits_torch(x, weight, eps, cast):
                return _by_torch(x, weight, eps, cast)
        except (AttributeError, IndexError, RuntimeError):
            pass  # what is wrong is said below
    require_tensors("weight", "residual", x=x, weight=weight, residual=residual)
    if type(eps) is not float:
        require_number("eps", eps)
    if residual is not None and x.dtype != residual.dtype and autocast_enabled(x.device.type):
        dtype = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(dtype), residual.to(dtype)
    _check(x, weight, residual, cast)
    dtypes = x.dtype in KERNEL_DTYPES and (weight is None or weight.dtype in KERNEL_DTYPES)
    few = left_to_compiler(x.numel() // TOKEN_WIDTH)  # torch.export fixes Size.numel()
    if not dtypes or few or not has_kernels(x.device) or is_transformed():
        return _plain(x, weight, eps, residual, cast)
    direct = is_plain_eager(*present(x, weight, residual))
    if not direct and is_distributed(x, weight, residual):
        return _plain(x, weight, eps, residual, cast)
    from fusedlib.ops.norm import kernels

    call = kernels.RMSNormFunction.direct if direct else kernels.rms_norm_operator
    y, s, _ = call(x, weight, residual, float(eps), cast == "hf")
    return y if residual is None else (y, s)


def _suits_torch(x: Tensor, weight: Tensor | None, eps: float, cast: str) -> bool:
    """True if `torch.rms_norm` is the faster: eager, on a GPU, small, in no graph's capture.

    It looks only at what torch would let pass, for such a call takes no longer than the host does.
    """
    if not x.is_cuda or type(x) not in PLAIN_TYPES or cast not in CASTS or type(eps) is not float:
        return False
    numbers, width, dtype = x.numel(), x.shape[-1], x.dtype
    if weight is not None and (
        type(weight) not in PLAIN_TYPES or weight.dtype is not dtype or weight.device != x.device
    ):
        return False
    return (
        0 < numbers <= MAX_TORCH_NUMBERS
        and numbers <= width * MAX_TORCH_ROWS
        and width <= MAX_TORCH_WIDTH
        and dtype in KERNEL_DTYPES
        and not autocasts_anywhere()
        and not in_functorch()
        and not in_forward_mode()
        and not is_capturing()
    )


def _by_torch(x: Tensor, weight: Tensor | None, eps: float, cast: str) -> Tensor:
    """`rms_norm` by `torch.rms_norm`, which rounds once.

    Where "hf" rounds twice, that gives the graph alone: gradients do not depend on y's rounding.
    """
    width = x.shape[-1:]
    if cast != "hf" or weight is None or x.dtype is torch.float32:
        return torch.rms_norm(x, width, weight, eps)
    normed = torch.rms_norm(x.data, width, None, eps)
    wants_graph = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    y = torch.rms_norm(x, width, weight, eps) if wants_graph else normed
    torch.mul(normed, weight.data, out=y.data)
    return y


def _plain(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, cast: str
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    s = x if residual is None else x + residual
    wide = s if s.dtype == torch.float64 else s.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        y = normed.to(s.dtype)
    elif cast == "hf":
        y = weight * normed.to(s.dtype)
    else:
        y = (normed * weight.to(wide.dtype)).to(s.dtype)
    return y if residual is None else (y, s)


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
