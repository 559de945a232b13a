"""What the kernels over rows of elements share: `rms_norm` and `rope`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusedlib.kernels.swiglu_autograd import _Once


@dataclass(frozen=True)
class Warps:
    """How wide a program is; `Launch` takes it for a configuration."""

    num_warps: int
    descriptors: ClassVar[bool] = False

    def launch(self) -> dict[str, Any]:
        """The keyword arguments of a kernel's launch."""
        return {"num_warps": self.num_warps}


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
