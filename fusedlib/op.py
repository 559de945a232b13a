"""An operation is declared once: its operator, its gradient and its short way for eager code.

    RMS_NORM = declare(
        "rms_norm", rms_norm_fwd, _empty_results, setup_context=_setup_context,
        gradients=_gradients, backward=(rms_norm_bwd, _fake_gradients),
    )
    y, s, rstd = RMS_NORM(x, weight, residual, eps, hf)

| way                              | who takes it                                 | its gradient   |
|----------------------------------|----------------------------------------------|----------------|
| `RMS_NORM.function`              | plain eager code, without the dispatcher     | `gradients`    |
| `torch.ops.fusedlib.rms_norm`    | eager code that is watched, graphs of Dynamo | `gradients`    |
| `….rms_norm_forward`, `_backward`| that operator, code that Inductor compiled   | none           |

torch takes the operator apart before autograd, so that compiled code calls the other two alone.
With a gradient by `torch.library.register_autograd` each of their calls would first go to a
function in Python, also where nobody asks for gradients: 6 of the 11 µs of an operator that does
nothing (torch 2.13, one CPU); `torch.library.custom_op` costs 7 more.

Backward runs outside autocast, for operands were cast before forward. What it reads is what forward
read (`save_operands`). It has no second derivative: differentiating its results raises, and so does
a transform that begins at backward, batched gradients and forward mode over them. All of this
imports no Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter as TorchParameter

from fusedlib.compat import (
    AccumulateGrad,
    autocasts_anywhere,
    dispatch_mode_count,
    dispatch_modes,
    function_mode_count,
    in_forward_mode,
    in_functorch,
    is_batched_gradient,
    is_transform_wrapper,
    is_transformed,
    saved_tensor_hooks,
    tracing_state,
    unwrap_dead_wrappers,
)
from fusedlib.fixed import weights_are_fixed
from fusedlib.launch import prepared

PLAIN_TYPES = frozenset((Tensor, TorchParameter))
STRIDED = torch.strided  # looked up once: a look at every operand costs the host 0.1 µs
PLAIN_SETTINGS = frozenset((float, int, bool, str, type(None)))
NO_SECOND_DERIVATIVE = (
    "the fused kernels have no second derivative; differentiate plain PyTorch or float64"
)
NO_TRANSFORM = (
    "the fused kernels' backward takes no batched gradients (is_grads_batched, vectorize=True) and "
    "no tangents: compute the forward inside a transform of torch.func or in forward mode too, or "
    "differentiate float64"
)

# --- who watches a call, and what it depends on --------------------------------------------------


def is_plain_eager(*operands: Tensor) -> bool:
    """True if nothing between this call and its tensors would see an operator: no compiler, no
    tracer, no mode, no subclass.
    """
    return (
        not torch.compiler.is_dynamo_compiling()
        and not dispatch_mode_count()
        and not function_mode_count()
        and tracing_state() is None
        and PLAIN_TYPES.issuperset(map(type, operands))
    )


def call_prepared(
    prepare: Callable[..., Callable[..., Any]], operands: Sequence[Tensor | None], *settings: Any
) -> Any:
    """Call what `prepare(eager, *operands, *settings)` gives, on the operands.

    It checks the operands and chooses what computes them, without keeping any. A plain eager call
    finds what was prepared for one like it: a key takes 2 µs, and checks may take more. The key
    holds shapes, strides, dtypes, devices, who wants a gradient, grad mode, autocast and settings;
    what else may change between calls (fp32 precision, hooks on saved tensors, a CUDA graph's
    capture) is asked by what was prepared, each time.
    """
    key = _call_key(operands, settings)
    if key is None:
        return prepare(False, *operands, *settings)(*operands)
    return prepared((prepare, *key), prepare, True, *operands, *settings)(*operands)


def _call_key(
    operands: Sequence[Tensor | None], settings: tuple[Any, ...]
) -> tuple[Any, ...] | None:  # fmt: skip
    """All that the preparation of a plain eager call may depend on; None for any other call."""
    if not is_plain_eager(*[t for t in operands if t is not None]) or is_transformed():
        return None
    kinds = tuple(map(type, settings))  # for True is 1 and 1.0
    if not PLAIN_SETTINGS.issuperset(kinds):
        return None
    layouts: list[Any] = []
    for t in operands:
        if t is None:
            layouts.append(None)
        elif t.layout is not STRIDED or t.is_nested:
            return None
        else:
            layouts += t.shape, t.stride(), t.dtype, t.device, t.requires_grad
    return (*settings, kinds, torch.is_grad_enabled(), _autocast(operands), *layouts)


def _autocast(operands: Sequence[Tensor | None]) -> Any:
    """The state of autocast for the operands' device."""
    if not autocasts_anywhere():
        return None
    device = next((t.device.type for t in operands if t is not None), "meta")
    if device == "meta":  # which has none, and torch raises
        return None
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


# --- declaration ---------------------------------------------------------------------------------


class Operation(NamedTuple):
    """The ways to call an operation, each with all arguments of its forward by position.

    Attributes:
        function: the autograd `Function` of plain eager code, which calls its `direct`.
        operator: the overload of `torch.ops.fusedlib`, for everybody else.
    """

    function: type[DirectFunction]
    operator: Any

    def way(self, eager: bool) -> Callable[..., Any]:
        """What computes the results, where it is known that all calls are plain eager ones."""
        return self.function.direct if eager else self.__call__

    def __call__(self, *arguments: Any) -> Any:
        """The results, by the way that this call can go."""
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        return (self.function.direct if is_plain_eager(*tensors) else self.operator)(*arguments)


def declare(
    name: str, forward: Callable[..., Any], fake: Callable[..., Any], *,
    setup_context: Callable[..., None], gradients: Callable[..., Any],
    backward: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    flops: Callable[..., int] | None = None, backward_flops: Callable[..., int] | None = None,
    differentiable_twice: bool = False,
) -> Operation:  # fmt: skip
    """Register an operation and its gradient.

    Args:
        name: of the operator `torch.ops.fusedlib.<name>`.
        forward: what it computes; annotated as `torch.library.infer_schema` wants it, its results
            new tensors. Where the last parameter is a `NamedTuple`, its fields are the operator's
            last arguments. In place of a result that is None the operator gives an empty tensor.
        fake: gives tensors of the results' shapes and dtypes without computing them.
        setup_context: of an autograd `Function`.
        gradients: its `backward`, which takes the function that computes gradients before `ctx`.
        backward: that function, without a graph, and its fake; None where `gradients` takes none.
        flops: of the forward, from the shapes of its arguments: 2 m n k a product, as torch counts
            them for `torch.utils.flop_counter.FlopCounterMode`.
        backward_flops: of the backward.
        differentiable_twice: `gradients` may be differentiated, so that it is left as it is.
    """
    wrap = outside_autocast if differentiable_twice else first_order
    by_operator, direct = gradients, gradients
    if backward is not None:
        computed = operator(f"{name}_backward", *backward, flops=backward_flops)
        by_operator = partial(gradients, computed)
        direct = partial(gradients, _with_settings(backward[0]))
    computed = operator(f"{name}_forward", forward, fake, flops=flops)
    of_operator = _function(f"{name}_operator", computed, setup_context, wrap(by_operator))

    def call(*arguments: Any) -> Any:
        if _UNCOUNTED:
            _count_flops()
        return (of_operator.apply if in_functorch() else of_operator.direct)(*arguments)

    composite = _register(name, _schema(forward), "CompositeImplicitAutograd", call)
    function = _function(name, _with_settings(forward), setup_context, wrap(direct))
    return Operation(function, composite)


def operator(
    name: str, function: Callable[..., Any], fake: Callable[..., Any],
    flops: Callable[..., int] | None = None,
) -> Any:  # fmt: skip
    """Register a function of new tensors as `torch.ops.fusedlib.<name>`, without a gradient; its
    arguments are as of `declare`. Returns the overload.
    """
    overload = _register(name, _schema(function), ("cpu", "cuda"), _tensors(function, function))
    torch.library.register_fake(overload, _tensors(fake, function))
    if flops is not None:
        _UNCOUNTED.append((overload.overloadpacket, flops))
    return overload


def _register(name: str, schema: str, keys: Any, function: Callable[..., Any]) -> Any:
    torch.library.define(f"fusedlib::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"fusedlib::{name}", keys, function)
    return getattr(torch.ops.fusedlib, name).default


# Formulas that torch's counter does not have yet: its module imports Triton.
_UNCOUNTED: list[tuple[Any, Callable[..., int]]] = []


def _count_flops() -> None:
    """Have the operators' FLOPs counted, by counters that run already too."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    while _UNCOUNTED:
        packet, formula = _UNCOUNTED.pop()
        register_flop_formula(packet)(formula)
        for mode in dispatch_modes():
            counter: Any = getattr(mode, "counter", None)
            if hasattr(counter, "flop_registry"):  # a copy
                counter.flop_registry[packet] = flop_registry[packet]


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


def _with_settings(function: Callable[..., Any], like: Any = None) -> Callable[..., Any]:
    """A function that takes the fields of its settings, or of those of `like`, one by one."""
    settings, count = _settings(like or function), len(signature(like or function).parameters) - 1
    if settings is None:
        return function
    return lambda *arguments: function(*arguments[:count], settings(*arguments[count:]))


def _tensors(function: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    """`_with_settings`, with an empty tensor in place of a result that is None."""
    taking_all = _with_settings(function, like)

    def call(*arguments: Any) -> Any:
        results = taking_all(*arguments)
        if type(results) is not tuple:
            return results
        return tuple([_empty(arguments) if r is None else r for r in results])

    return call


def _empty(arguments: tuple[Any, ...]) -> Tensor:
    like: Tensor = next(a for a in arguments if isinstance(a, Tensor))
    return like.new_empty(0)


# --- the short way -------------------------------------------------------------------------------


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


def _function(name: str, forward: Any, setup_context: Any, backward: Any) -> Any:
    methods = {"forward": forward, "setup_context": setup_context, "backward": backward}
    members = {key: staticmethod(method) for key, method in methods.items()}
    words = name.split("_")  # of which the name of the graph's nodes is made
    return type("".join(map(str.capitalize, words)), (DirectFunction,), members)


# --- what backward reads -------------------------------------------------------------------------

# DeepSpeed's mark of a parameter that is in parts between forward and backward: it exchanges the
# memory itself and brings the same values back, and what held the old one would undo ZeRO-3.
BROUGHT_BACK = "ds_id"


def save_operands(
    ctx: Any, operands: Sequence[Tensor | None], *others: Tensor | None, with_graph: bool = False
) -> None:  # fmt: skip
    """Keep a call's operands for backward with the values that they have now, and other tensors.

    Of an operand a view is kept: it notices a change in place, and has forward's memory when
    `tensor.data = …` has given the tensor another one. Hooks on saved tensors, and
    `fixed_weights`, see of which parameter it is a view; `detach`, which does not tell, costs the
    host half as much. With a graph gradients can be differentiated by the operands.
    """
    if with_graph:
        with torch.enable_grad():
            views = [_view(t, True) for t in operands]
    else:
        tells = weights_are_fixed() or saved_tensor_hooks(False) is not None
        views = [_view(t, tells) for t in operands]
    ctx.save_for_backward(*views, *others)


def _view(operand: Tensor | None, tells: bool) -> Tensor | None:
    if operand is None or hasattr(operand, BROUGHT_BACK):
        return operand
    if operand.is_inference():  # made in inference mode, a frozen encoder's features say
        return operand.clone()
    return operand.view_as(operand) if tells else operand.detach()


# --- how backward runs ---------------------------------------------------------------------------


def outside_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose products have the dtypes of forward's where `backward()` is called under
    autocast: operands were cast before forward, and inside it nothing was.
    """

    def outside(ctx: Any, *upstream: Tensor | None) -> Any:
        given = next((t for t in upstream if t is not None), None) if autocasts_anywhere() else None
        if given is None:
            return backward(ctx, *upstream)
        with torch.autocast(given.device.type, enabled=False):
            return backward(ctx, *upstream)

    return outside


def first_order(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A `Function`'s backward whose results raise when they are differentiated again.

    torch's `once_differentiable` lets constants pass for them where the upstream gradient has none.
    """

    @outside_autocast
    def once(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        if any(d is not None and is_transformed_gradient(d) for d in upstream):
            raise RuntimeError(NO_TRANSFORM)
        if not torch.is_grad_enabled():
            return backward(ctx, *upstream)
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        sources = [d for d in upstream if d is not None and d.requires_grad]
        sources += _leaves(ctx)
        return tuple(None if d is None else _FirstOrder.apply(d, *sources) for d in gradients)

    return once


class _FirstOrder(torch.autograd.Function):
    """A gradient with create_graph=True: differentiating it again raises, wherever it went.

    It depends on what flowed back and on the leaves that the operands come from, so that autograd
    cannot pass it over on the way to one of them. It can where what flowed back is a constant and
    `torch.autograd.grad` asks for an operand that is no leaf: torch then says that the operand was
    not used, or adds nothing for it.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def _leaves(node: Any) -> list[Tensor]:
    """The leaves that a node's results depend on, and one more, which `backward()` visits too."""
    visited, unvisited = {node}, [node]
    while unvisited:
        inputs = {n for n, _ in unvisited.pop().next_functions if n is not None} - visited
        visited |= inputs
        unvisited += inputs
    leaves = [n.variable for n in visited if isinstance(n, AccumulateGrad)]
    return [*leaves, torch.empty(0, requires_grad=True)]


def is_transformed_gradient(upstream: Tensor) -> bool:
    """True if a transform that began after the forward has made this gradient."""
    if is_compiling():
        return False
    if is_batched_gradient(upstream) or is_transform_wrapper(upstream):
        return True
    return in_forward_mode() and forward_ad.unpack_dual(upstream).tangent is not None
