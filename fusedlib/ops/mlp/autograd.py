"""The gradients of the SwiGLU MLP: one backward pass for the registered operator and eager mode.

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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedlib.compat import retains_graph, saved_tensor_hooks
from fusedlib.launch import current_device
from fusedlib.op import first_order, keep
from fusedlib.ops.mlp.plan import Plan, contiguous_and_aligned
from fusedlib.ops.mlp.plan_cache import plan_at_current_precision
from fusedlib.ops.mlp.prebuild import build_for_training
from fusedlib.ops.mlp.products import Gradients, WantedGradients

SavedTensors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def tensors_to_save(
    wants: WantedGradients, save: bool, x: Tensor,
    w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None, gate_up: Tensor | None,
) -> SavedTensors:  # fmt: skip
    """x, weights and gate|up where a wanted gradient needs them, otherwise None."""
    wants_x, wants_w_gate, wants_w_up, wants_w_down = wants
    wants_weights = wants_w_gate or wants_w_up
    gradient = wants_x or wants_weights
    return (
        x if wants_weights or not save else None,
        w_gate if wants_x or not save else None,
        w_up if wants_x or not save else None,
        w_down if gradient else None,
        gate_up if save and (gradient or wants_w_down) else None,
    )


def gradients(
    plan: Plan, wants: WantedGradients, saved: list[Tensor | None], upstream: Tensor,
    in_place: bool,
) -> Gradients:  # fmt: skip
    """d_x, d_w_gate_up and d_w_down, each if wanted; of a pair d_w_gate_up has the wanted rows.

    Args:
        plan: what computes them.
        wants: which of the four.
        saved: what `tensors_to_save` gave. gate|up is taken out of the list, so that nobody holds
            its memory any longer.
        upstream: dy (..., hidden), or dh (..., inner) where there is no w_down.
        in_place: gate|up may be overwritten; one computed again always may.
    """
    wants_x, wants_w_gate, wants_w_up, wants_w_down = wants
    gate_up = saved.pop()
    x, w_gate, w_up, w_down = saved
    gradient = wants_x or wants_w_gate or wants_w_up
    h = d_gate_up = None
    if gate_up is None:
        assert x is not None and w_gate is not None
        h, gate_up = plan.activate(x, w_gate, w_up, gradient)
        h, in_place = (h if wants_w_down else None), True
    recompute_h = wants_w_down and h is None
    if gradient or recompute_h:
        assert gate_up is not None
        dy = upstream if gradient else None
        d_gate_up, recomputed_h = plan.differentiate(
            dy, w_down, gate_up, recompute_h=recompute_h, in_place=in_place
        )
        h = recomputed_h if recompute_h else h
        recomputed_h = None
    buffers = [h, d_gate_up]
    del gate_up, h, d_gate_up
    return plan.products.gradients(wants, plan.pair, buffers, upstream, x, w_gate, w_up)


def separate_gate_up(
    d_w_gate_up: Tensor | None, wants: WantedGradients, pair: bool
) -> tuple[Tensor | None, Tensor | None]:
    """d_w_gate and d_w_up: rows of one matrix, or the one that is wanted; packed is d_w_gate."""
    if d_w_gate_up is None:
        return None, None
    if pair and wants[1] and wants[2]:
        inner = d_w_gate_up.shape[0] // 2
        return d_w_gate_up[:inner], d_w_gate_up[inner:]
    return d_w_gate_up if wants[1] else None, d_w_gate_up if wants[2] else None


def save_with_gate_up(
    ctx: Any, operands: Sequence[Tensor | None], *others: Tensor | None
) -> None:  # fmt: skip
    """Keep operands and other tensors, of which the last is gate|up, that nobody else holds.

    An attribute is out of every hook's sight, so that backward may write over it.
    """
    *others_saved, gate_up = others
    ctx.private_gate_up = gate_up if saved_tensor_hooks(False) is None else None
    ctx.gate_up_is_private = ctx.private_gate_up is not None
    keep(ctx, operands, *others_saved, None if ctx.gate_up_is_private else gate_up)


def saved_with_gate_up(ctx: Any) -> tuple[tuple[Any, ...], bool]:
    """What was kept, and whether backward may write over the last.

    Raises:
        RuntimeError: they are freed already.
    """
    *others, gate_up = ctx.saved_tensors
    in_place = False
    if ctx.gate_up_is_private:
        gate_up, in_place = ctx.private_gate_up, not retains_graph()
        if gate_up is None:
            raise RuntimeError("backward ran a second time; the first wants retain_graph=True")
        if in_place:
            ctx.private_gate_up = None
    return (*others, gate_up), in_place


class SwiGLUFunction(torch.autograd.Function):
    """y (..., hidden) or, where w_down is None, h (..., inner), launched without the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None,
        save: bool, plan: Plan,
    ) -> Tensor:  # fmt: skip
        """Compute y or h, and save what the wanted gradients need."""
        ctx.plan = plan
        if plan.training_not_built and w_down is not None:
            build_for_training(plan, "gate_up" if save else "input")
        y, gate_up = run_forward(x, w_gate, w_up, w_down, save, plan)
        ctx.wants = wants = ctx.needs_input_grad[:4]
        *operands, kept = tensors_to_save(wants, save, x, w_gate, w_up, w_down, gate_up)
        save_with_gate_up(ctx, operands, kept)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, w_gate, w_up and w_down; none for the rest."""
        (x, w_gate, w_up, w_down, gate_up), in_place = saved_with_gate_up(ctx)
        plan = ctx.plan
        if upstream.dtype == torch.float32:
            plan = plan_at_current_precision(plan, upstream)
        # dy may have any strides, and so may what DeepSpeed brought back.
        dy, *others = contiguous_and_aligned(upstream, x, w_gate, w_up, w_down, gate_up)
        saved = [*others]
        del gate_up, others
        assert dy is not None
        d_x, d_w_gate_up, d_w_down = gradients(plan, ctx.wants, saved, dy, in_place)
        d_weights = separate_gate_up(d_w_gate_up, ctx.wants, plan.pair)
        return d_x, *d_weights, d_w_down, None, None


# Without `Function.apply`'s own look at torch.func, whose transforms are sent elsewhere before.
apply_swiglu: Callable[..., Tensor] = super(torch.autograd.Function, SwiGLUFunction).apply


def run_forward(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None, save: bool, plan: Plan
) -> tuple[Tensor, Tensor | None]:
    """y (..., hidden), or h where w_down is None, and gate|up (tokens, 2·inner) if saved.

    The operands may have any strides and addresses, on any device.
    """
    if plan.accepts(x, w_gate, w_up, w_down):
        return plan.forward(x, w_gate, w_up, w_down, save)
    operands: tuple[Any, ...] = contiguous_and_aligned(x, w_gate, w_up, w_down)
    with current_device(x):
        return plan.forward(operands[0], operands[1], operands[2], operands[3], save)
