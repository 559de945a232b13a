"""Operators registered, and autograd functions called, at the least cost to the host.

| operator          | is called by                                 | gradient                      |
|-------------------|----------------------------------------------|-------------------------------|
| `<name>`          | eager code that is watched, graphs of Dynamo | a `Function` of the other two |
| `<name>_forward`  | that `Function`, code that Inductor compiled | none                          |
| `<name>_backward` | the same                                     | none                          |

torch takes the first apart before autograd, so that compiled code calls the others alone. With a
gradient by `torch.library.register_autograd` each of their calls would first go to a function in
Python, also where nobody asks for gradients: 6 of the 11 µs of an operator that does nothing (torch
2.13, one CPU).
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, get_type_hints

import torch
from torch import Tensor

from fusedlib.launch import flops
from fusedlib.launch.internals import in_functorch, unwrap_dead_wrappers


def operator(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register a function of new tensors as `torch.ops.fusedlib.<name>`, without a gradient.

    `torch.library.custom_op` does the same; its look for results that share memory with operands,
    and two functions in between, cost 7 µs a call on a host that starts a kernel in 5.

    Args:
        name: of the operator.
        function: what it computes; annotated as `torch.library.infer_schema` wants it. Where the
            last parameter is a `NamedTuple`, its fields are the operator's last arguments. In place
            of a result that is None the operator gives an empty tensor.
        fake: gives tensors of the same shapes and dtypes without computing them.

    Returns:
        The overload.
    """
    overload = _register(name, _schema(function), ("cpu", "cuda"), _flat(function, function))
    torch.library.register_fake(overload, _flat(function, fake))
    return overload


def differentiable(
    name: str, function: Callable[..., Any], fake: Callable[..., Any], setup: Callable[..., None],
    gradients: Callable[..., Any],
) -> Any:  # fmt: skip
    """Register a function as `torch.ops.fusedlib.<name>_forward`, and `<name>` with its gradients.

    Args:
        name: of the operator that has gradients.
        function: as of `operator`.
        fake: as of `operator`.
        setup: the `setup_context` of an autograd `Function`, whose inputs are the operator's.
        gradients: its `backward`.

    Returns:
        The overload that has gradients.
    """
    forward = operator(f"{name}_forward", function, fake)
    methods = {"forward": forward, "setup_context": setup, "backward": gradients}
    members = {key: staticmethod(method) for key, method in methods.items()}
    watched: Any = type(f"{name}_operator", (DirectFunction,), members)

    def call(*arguments: Any) -> Any:
        return (watched.apply if in_functorch() else watched.direct)(*arguments)

    return _register(name, _schema(function), "CompositeImplicitAutograd", call)


def _register(name: str, schema: str, keys: Any, function: Callable[..., Any]) -> Any:
    torch.library.define(f"fusedlib::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"fusedlib::{name}", keys, function)
    packet = getattr(torch.ops.fusedlib, name)
    flops.count(name, packet)
    return packet.default


def _settings(function: Callable[..., Any]) -> Any:
    """The class of the last parameter where that is a `NamedTuple`, or None."""
    last = [*signature(function, eval_str=True).parameters.values()][-1].annotation
    return last if hasattr(last, "_fields") else None


def _schema(function: Callable[..., Any]) -> str:
    taken, settings = signature(function, eval_str=True), _settings(function)
    parameters = [*taken.parameters.values()]
    if settings is not None:
        fields = get_type_hints(settings).items()
        kind = Parameter.POSITIONAL_OR_KEYWORD
        parameters[-1:] = [Parameter(name, kind, annotation=of) for name, of in fields]
    returned = str(signature(function).return_annotation).replace("Tensor | None", "Tensor")

    def prototype() -> None: ...

    prototype.__signature__ = taken.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=returned
    )
    return torch.library.infer_schema(prototype, mutates_args=())


def _flat(function: Callable[..., Any], called: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes the fields of the settings of `function`, and calls another."""
    settings, count = _settings(function), len(signature(function).parameters) - 1

    def call(*arguments: Any) -> Any:
        if settings is not None:
            arguments = *arguments[:count], settings(*arguments[count:])
        results = called(*arguments)
        if type(results) is not tuple:
            return results
        return tuple([_empty(arguments) if r is None else r for r in results])

    return call


def _empty(arguments: tuple[Any, ...]) -> Tensor:
    like: Tensor = next(a for a in arguments if isinstance(a, Tensor))
    return like.new_empty(0)


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
