"""How the library's backward passes run: outside autocast, and most of them once.

Those have no second derivative: differentiating their results raises, and so does a transform that
begins at backward: batched gradients, and forward mode over them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fusedlib.launch.internals import (
    AccumulateGrad,
    autocasts_anywhere,
    in_forward_mode,
    is_batched_gradient,
    is_transform_wrapper,
)

NO_SECOND_DERIVATIVE = (
    "the fused kernels have no second derivative; differentiate plain PyTorch or float64"
)
NO_TRANSFORM = (
    "the fused kernels' backward takes no batched gradients (is_grads_batched, vectorize=True) and "
    "no tangents: compute the forward inside a transform of torch.func or in forward mode too, or "
    "differentiate float64"
)


class _FirstOrderGradient(torch.autograd.Function):
    """A gradient with create_graph=True: differentiating it again raises, wherever it went.

    It depends on `others`, so that autograd cannot pass it over on the way to one of them.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *others: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def outside_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose products have the dtypes of forward's where `backward()` is called under
    autocast: operands were cast before forward, and inside it nothing was.
    """

    @wraps(backward)
    def outside(ctx: Any, *upstream: Tensor | None) -> Any:
        given = next((t for t in upstream if t is not None), None) if autocasts_anywhere() else None
        if given is None:
            return backward(ctx, *upstream)
        with torch.autocast(given.device.type, enabled=False):
            return backward(ctx, *upstream)

    return outside


def is_transformed_gradient(upstream: Tensor) -> bool:
    """True if a transform that began after the forward has made this gradient."""
    if is_compiling():
        return False
    if is_batched_gradient(upstream) or is_transform_wrapper(upstream):
        return True
    return in_forward_mode() and forward_ad.unpack_dual(upstream).tangent is not None


def _refuse_transforms(upstream: tuple[Tensor | None, ...]) -> None:
    for gradient in upstream:
        if gradient is not None and is_transformed_gradient(gradient):
            raise RuntimeError(NO_TRANSFORM)


def first_order(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A `Function`'s backward whose results raise when they are differentiated again.

    torch's `once_differentiable` lets constants pass for them where the upstream gradient has none.
    """

    @outside_autocast
    @wraps(backward)
    def once(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        _refuse_transforms(upstream)
        if not torch.is_grad_enabled():
            return backward(ctx, *upstream)
        remembering = _ContextUnpackedOnce(ctx)
        with torch.no_grad():
            gradients = backward(remembering, *upstream)
        others = [t for t in (*upstream, *remembering.saved_tensors) if t is not None]
        others = [t for t in others if t.requires_grad]
        others += _unlisted_leaves(ctx, others)
        others.append(torch.empty(0, requires_grad=True))  # for `backward`, which visits all leaves
        return tuple(
            None if f is None else _FirstOrderGradient.apply(f, *others) for f in gradients
        )

    return once


class _ContextUnpackedOnce:
    """A backward's `ctx` that unpacks saved tensors once: checkpointing allows no more."""

    def __init__(self, ctx: Any) -> None:
        vars(self)["ctx"] = ctx

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.ctx, name)
        if name == "saved_tensors":
            vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)


def _unlisted_leaves(node: Any, listed: list[Tensor]) -> list[Tensor]:
    """The leaves that a node's operands depend on, except through the listed tensors."""
    visited = {t.grad_fn for t in listed if t.grad_fn is not None}
    leaves = []
    unvisited = [] if node in visited else [node]  # its own result leads to all operands
    while unvisited:
        inputs = {n for n, _ in unvisited.pop().next_functions if n is not None} - visited
        visited |= inputs
        unvisited += inputs
        leaves += [n.variable for n in inputs if isinstance(n, AccumulateGrad)]
    return leaves
