"""Backward passes without a second derivative: differentiating their results raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

NO_SECOND = "the fused kernels have no second derivative; differentiate plain PyTorch or float64"


class _Once(torch.autograd.Function):
    """A gradient with create_graph=True: differentiating it again raises, wherever it went."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, marker: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(NO_SECOND)


def first_order(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A `Function`'s backward whose results raise when they are differentiated again.

    torch's `once_differentiable` lets constants pass for them where the upstream gradient has none.
    """

    @wraps(backward)
    def once(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *upstream)
        with torch.no_grad():
            found = backward(ctx, *upstream)
        marker = torch.empty(0, requires_grad=True)
        return tuple(None if f is None else _Once.apply(f, marker) for f in found)

    return once
