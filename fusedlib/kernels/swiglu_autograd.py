"""The gradients of the SwiGLU MLP, once for the registered operators and once for plain eager mode.

What is kept for backward, when the weights and x all want gradients:

| save      | kept                    | recomputed in backward                               |
|-----------|-------------------------|------------------------------------------------------|
| True      | x, weights, gate|up     | h, in the epilogue of dy Wd                          |
| False     | x, weights              | gate|up and h by the forward kernel                  |

`SwiGLUFunction` writes d(gate|up) over gate|up where nobody else can see it: the graph is not
retained (running backward again then raises, as everywhere in torch), and no saved-tensor hooks
were set in the forward, whose tensors would be the user's. A second derivative raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedlib.kernels.backward_order import Gradients, products
from fusedlib.kernels.few_tokens_plan import Plan
from fusedlib.kernels.split_mlp import split_bwd_pays, split_mlp_bwd
from fusedlib.kernels.swiglu_calls import product, unchecked_bwd, unchecked_fwd

Saved = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Calls(NamedTuple):
    """How the two fused kernels are called: as registered operators or directly.

    `forward(x, w_gate_up, save)` gives h and gate|up, `backward(upstream, w_down, gate_up, output,
    in_place)` d(gate|up) and h.
    """

    forward: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
    backward: Callable[
        [Tensor | None, Tensor | None, Tensor, bool, bool], tuple[Tensor | None, Tensor | None]
    ]


DIRECT = Calls(unchecked_fwd, unchecked_bwd)


def kept(
    wants: tuple[bool, bool, bool], save: bool,
    x: Tensor, w_gate_up: Tensor, w_down: Tensor | None, gate_up: Tensor | None,
) -> Saved:  # fmt: skip
    """What the wanted gradients (of x, w_gate_up, w_down) need; None for what they do not."""
    wants_x, wants_w_gate_up, wants_w_down = wants
    gradient = wants_x or wants_w_gate_up
    return (
        x if wants_w_gate_up or not save else None,
        w_gate_up if wants_x or not save else None,
        w_down if gradient else None,
        gate_up if save and (gradient or wants_w_down) else None,
    )


def gradients(
    calls: Calls, wants: tuple[bool, bool, bool], saved: list[Tensor | None], upstream: Tensor,
    in_place: bool,
) -> Gradients:  # fmt: skip
    """d_x, d_w_gate_up and d_w_down, each if wanted.

    Args:
        calls: how the kernels are called.
        wants: which of the three.
        saved: what `kept` gave, x as a matrix. gate|up is taken out of the list, so that nobody
            holds its memory any longer.
        upstream: dy (tokens, hidden), or dh (tokens, inner) where there is no w_down.
        in_place: gate|up may be overwritten; one computed again always may.
    """
    wants_x, wants_w_gate_up, wants_w_down = wants
    gate_up = saved.pop()
    x, w_gate_up, w_down = saved
    gradient = wants_x or wants_w_gate_up
    h = d_gate_up = None
    if gate_up is None:
        assert x is not None and w_gate_up is not None
        h, gate_up = calls.forward(x, w_gate_up, gradient)
        h, in_place = (h if wants_w_down else None), True
    direct = calls is DIRECT and w_down is not None
    if direct and gate_up is not None and split_bwd_pays(upstream, gate_up):
        own = [gate_up]
        del gate_up, h
        return split_mlp_bwd(upstream, x, w_gate_up, w_down, own.pop(), wants, in_place=in_place)
    output = wants_w_down and h is None
    if gradient or output:
        assert gate_up is not None
        dy = upstream if gradient else None
        d_gate_up, again = calls.backward(dy, w_down, gate_up, output, in_place)
        h = again if output else h
        again = None
    held = [h, d_gate_up]
    del gate_up, h, d_gate_up
    return products(wants, held, upstream, x, w_gate_up)


def _rows(tensor: Tensor) -> Tensor:
    """(tokens, width) of (..., width)."""
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1])


class SwiGLUFunction(torch.autograd.Function):
    """y (..., hidden) or, where w_down is None, h (..., inner), launched without the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_gate_up: Tensor, w_down: Tensor | None, save: bool,
        plan: Plan | None,
    ) -> Tensor:  # fmt: skip
        """Compute, and keep what the wanted gradients need."""
        ctx.plan = plan
        y, gate_up = compute(x, w_gate_up, w_down, save, plan)
        ctx.wants = wants = ctx.needs_input_grad[:3]
        saved = kept(wants, save, x, w_gate_up, w_down, gate_up)
        # An attribute is out of every hook's sight, so that backward may write over it.
        ctx.own = saved[3] if _default_hooks(False) is None else None
        ctx.kept_own = ctx.own is not None
        ctx.save_for_backward(*saved[:3], None if ctx.kept_own else saved[3])
        return y

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, w_gate_up and w_down; none for the rest."""
        if not torch.is_grad_enabled():
            return _backward(ctx, upstream)
        with torch.no_grad():
            found = _backward(ctx, upstream)
        marker = upstream.new_empty(0).requires_grad_()
        return tuple(None if f is None else _Once.apply(f, marker) for f in found)


# Without `Function.apply`'s own look at torch.func, whose transforms are sent elsewhere before.
apply: Callable[..., Tensor] = super(torch.autograd.Function, SwiGLUFunction).apply


class _Once(torch.autograd.Function):
    """A gradient with create_graph=True: differentiating it again raises, wherever it went."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, marker: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "the fused kernels have no second derivative; differentiate plain PyTorch or float64"
        )


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    x, w_gate_up, w_down, gate_up = ctx.saved_tensors  # raises where they are freed already
    in_place = False
    if ctx.kept_own:
        gate_up, in_place = ctx.own, not _keeps_graph()
        if gate_up is None:
            raise RuntimeError("backward ran a second time; the first wants retain_graph=True")
        if in_place:
            ctx.own = None
    if ctx.plan is not None and ctx.plan.takes(upstream, (x, w_gate_up, w_down)):
        saved = [x, w_gate_up, w_down, gate_up]
        del gate_up
        return *ctx.plan.gradients(ctx.wants, saved, upstream, in_place), None, None
    saved = [None if x is None else _rows(x), w_gate_up, w_down, gate_up]
    del gate_up
    found = gradients(DIRECT, ctx.wants, saved, _rows(upstream), in_place)
    d_x = found[0]
    if d_x is not None and upstream.ndim != 2:
        d_x = d_x.view(*upstream.shape[:-1], d_x.shape[1])
    return d_x, found[1], found[2], None, None


def compute(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor | None, save: bool, plan: Plan | None = None
) -> tuple[Tensor, Tensor | None]:
    """y (..., hidden), or h where w_down is None, and gate|up (tokens, 2·inner) if saved.

    `plan` is one that fits these operands, or None.
    """
    if plan is not None and w_down is not None:
        return plan.forward(x, w_gate_up, w_down, save)
    h, gate_up = unchecked_fwd(_rows(x), w_gate_up, save)
    y = h if w_down is None else product(h, w_down.t())
    # In place: autograd lets nobody write to a view that a Function returns.
    return y if x.ndim == 2 else y.resize_(*x.shape[:-1], y.shape[1]), gate_up
