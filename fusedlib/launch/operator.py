"""Operators registered, and autograd functions called, at the least cost to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedlib.launch import flops
from fusedlib.launch.first_order import NO_SECOND_DERIVATIVE
from fusedlib.launch.internals import unwrap_dead_wrappers


def operator(name: str, *, last: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Register a function of new tensors as `torch.ops.fusedlib.<name>`, and give that.

    `last`: it has no gradient, and who differentiates its results is told so. All others get one by
    `torch.library.register_autograd`.

    `torch.library.custom_op` does the same; its look for results that share memory with operands,
    and two functions in between, cost 7 µs a call on a host that starts a kernel in 5.
    """

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(f"fusedlib::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(f"fusedlib::{name}", ("cpu", "cuda"), function)
        packet = getattr(torch.ops.fusedlib, name)
        flops.count(name, packet)
        overload = packet.default
        if last:
            torch.library.register_autograd(overload, _no_gradient)
        return overload

    return register


def _no_gradient(*_: Any) -> None:
    raise RuntimeError(NO_SECOND_DERIVATIVE)


class DirectFunction(torch.autograd.Function):
    """A `Function` that plain eager code calls by `direct`, with all its arguments."""

    @classmethod
    def direct(cls, *arguments: Any) -> Any:
        """The result of `forward`, with a graph where an argument wants a gradient.

        `Function.apply` looks at forward's signature each time, for 28 µs, and at torch.func, whose
        transforms were sent elsewhere before.
        """
        arguments = unwrap_dead_wrappers(arguments)
        wants_gradient = (isinstance(a, Tensor) and a.requires_grad for a in arguments)
        if torch.is_grad_enabled() and any(wants_gradient):
            return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]
        return cls.forward(*arguments)
