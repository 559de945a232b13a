"""A linear layer as a function: fp32 products of split factors on NVIDIA GPUs, else PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import has_torch_function

from fusedlib.compat import constant_while_compiling, is_transformed
from fusedlib.op import PLAIN_TYPES, is_plain_eager
from fusedlib.ops.arguments import (
    STRIDED,
    autocast_enabled,
    require_alike,
    require_tensors,
    shape_of,
)
from fusedlib.ops.linear import route
from fusedlib.ops.linear.route import may_split_linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b with true gradients of all three, as `torch.nn.functional.linear`.

    In fp32, where torch's matmul precision is "highest" and products are large, all three products
    (y, d_x and d_W) run on the tensor cores from two fp16 parts a factor. An element that sums k
    terms a b, of a row of one factor and a column of the other, errs by at most

        (18 + k/4096) 2⁻²² Σ|a||b| + 2⁻³⁹ (max|a| Σ|b| + max|b| Σ|a|)

    (before Hopper 30 for 18), and a bias adds half a unit in y's last place; derived in
    `fusedlib.ops.linear.split`. IEEE fp32's own bound is k/4 2⁻²² Σ|a||b|; FUSEDLIB_SPLIT=0 in the
    environment asks for IEEE arithmetic.
    Any other dtype, precision, size or device is `torch.nn.functional.linear`; so is a call under
    autocast, in a transform of torch.func or in forward-mode differentiation, on a subclass of
    Tensor or a sparse or nested one, and every derivative of a derivative.

    Kept for backward are x and W, as by torch. `torch.autograd.grad(y, x)` computes d_W too if W
    wants a gradient. A product holds parts as large as both its factors while it runs.

    Args:
        x: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,), or None.

    Returns:
        (..., out_features), in x's dtype, or autocast's.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: shapes, dtypes or devices that do not go together.
    """
    if type(x) in PLAIN_TYPES and not torch.compiler.is_dynamo_compiling():
        try:  # most calls are torch's: by all looks below it takes the host a fifth longer
            few = x.dtype is not torch.float32 or x.numel() * weight.shape[0] < route.MIN_SPLIT_WORK
            fits = weight.ndim == 2 and (bias is None or bias.shape == weight.shape[:1])
            if few and fits and weight.device == x.device:
                return functional.linear(x, weight, bias)
        except (AttributeError, IndexError, RuntimeError, TypeError):
            pass  # `_check` says what is wrong
    if any(map(_is_for_torch, (x, weight, bias))):
        return functional.linear(x, weight, bias)
    _check(x, weight, bias)
    if not _may_split(x, [weight], [bias]):
        return functional.linear(x, weight, bias)
    from fusedlib.ops.linear import operator as kernels

    y: Tensor = kernels.LINEAR(x, weight, bias)
    return y


def linear_by_each(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """`linear` of one x by each weight, (outputs, in_features), with each bias, (outputs,) or None.

    Where all products go the same way they are one product: x is split once, and narrow layers
    count with the wide ones. Values have the same bits as those of the joined weight.
    """
    alike = len({*map(_requires_grad, weights)}) == 1
    biased = len({b is None for b in biases}) == 1
    if not (alike and biased and is_plain_eager(x, *weights) and _may_split(x, weights, biases)):
        return tuple(map(partial(linear, x), weights, biases))
    for weight, bias in zip(weights, biases, strict=True):
        _check(x, weight, bias)
    from fusedlib.ops.linear import operator as kernels

    y: Tensor = kernels.JoinedLinearFunction.direct(x, *weights, *biases)
    # Nobody else has y: results may be written to, which autograd forbids for what `split` gives.
    return y.unsafe_split_with_sizes([weight.shape[0] for weight in weights], dim=-1)


def _requires_grad(operand: Tensor) -> bool:
    return operand.requires_grad


def _may_split(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """True if a product of this call or of its backward may run from split factors."""
    return (
        may_split_linear(x, sum(weight.shape[0] for weight in weights))
        and _is_plain(x)
        and all(map(_is_plain, weights))
        and all(bias is None or _is_plain(bias) for bias in biases)
        and not autocast_enabled(x.device.type)
        and not is_transformed()
        and _is_highest_precision()
    )


def _is_plain(operand: Tensor) -> bool:
    """A subclass, DTensor say, may have rules for torch's operators and none for ours; so may
    sparse tensors.
    """
    return type(operand) in PLAIN_TYPES and operand.layout is STRIDED


def _is_for_torch(operand: object) -> bool:
    """True for what torch knows and `_check` does not: sparse, nested, or of torch.fx, say."""
    if isinstance(operand, Tensor):
        return operand.is_nested or operand.layout is not STRIDED
    return operand is not None and has_torch_function((operand,))


@constant_while_compiling
def _is_highest_precision() -> bool:
    """True if torch's fp32 products are IEEE's; torch.compile traces anew when that changes."""
    return torch.backends.cuda.matmul.fp32_precision != "tf32"


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise where the operands do not go together."""
    require_tensors("bias", x=x, weight=weight, bias=bias)
    if x.ndim == 0:
        raise ValueError("x must be (..., in_features), got a scalar")
    if weight.ndim != 2:
        raise ValueError(f"weight must be (out_features, in_features), got {shape_of(weight)}")
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x must be (..., {weight.shape[1]}) for weight {shape_of(weight)}, got {shape_of(x)}"
        )
    if bias is not None and (bias.ndim != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(
            f"bias must be ({weight.shape[0]},) for weight {shape_of(weight)}, got {shape_of(bias)}"
        )
    require_alike(x=x, weight=weight, bias=bias)
