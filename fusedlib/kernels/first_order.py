"""Backward passes without a second derivative: differentiating their results raises, and so does a
transform that begins at backward: batched gradients, and forward mode over them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

NO_SECOND = "the fused kernels have no second derivative; differentiate plain PyTorch or float64"
NO_TRANSFORM = (
    "the fused kernels' backward takes no batched gradients (is_grads_batched, vectorize=True) and "
    "no tangents: compute the forward inside a transform of torch.func or in forward mode too, or "
    "differentiate float64"
)


class _Once(torch.autograd.Function):
    """A gradient with create_graph=True: differentiating it again raises, wherever it went."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, marker: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(NO_SECOND)


def untransformed(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that raises where its upstream gradients are batched or have tangents."""

    @wraps(backward)
    def checked(ctx: Any, *upstream: Tensor | None) -> Any:
        _refuse_transforms(upstream)
        return backward(ctx, *upstream)

    return checked


def transformed_since(upstream: Tensor) -> bool:
    """Whether a transform that the forward did not see has made this gradient."""
    if is_compiling():
        return False
    if is_legacy_batchedtensor(upstream) or is_functorch_wrapped_tensor(upstream):
        return True
    dual = forward_ad._current_level >= 0
    return dual and forward_ad.unpack_dual(upstream).tangent is not None


def _refuse_transforms(upstream: tuple[Tensor | None, ...]) -> None:
    for gradient in upstream:
        if gradient is not None and transformed_since(gradient):
            raise RuntimeError(NO_TRANSFORM)


def first_order(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A `Function`'s backward whose results raise when they are differentiated again.

    torch's `once_differentiable` lets constants pass for them where the upstream gradient has none.
    """

    @wraps(backward)
    def once(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        _refuse_transforms(upstream)
        if not torch.is_grad_enabled():
            return backward(ctx, *upstream)
        with torch.no_grad():
            found = backward(ctx, *upstream)
        marker = torch.empty(0, requires_grad=True)
        return tuple(None if f is None else _Once.apply(f, marker) for f in found)

    return once
