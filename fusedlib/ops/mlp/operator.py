"""The MLP as torch operators: `torch.ops.fusedlib.swiglu_mlp`, its forward and its backward.

torch.compile, dispatch modes and tensor subclasses see them; `function` brings the operands into
their form and checks them. All are matrices of one dtype and device. What is kept for backward is
in `autograd`; the operators never write over what they are given, so running backward twice on a
retained graph gives the same answer twice. A second derivative raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from fusedlib.launch import current_device
from fusedlib.op import declare, keep
from fusedlib.ops.mlp.autograd import gradients, run_forward, separate_gate_up, tensors_to_save
from fusedlib.ops.mlp.plan import contiguous_and_aligned
from fusedlib.ops.mlp.plan_cache import plan_for, plan_of_sizes
from fusedlib.ops.mlp.products import Gradients
from fusedlib.ops.mlp.route import weight_sizes

Shape = tuple[int, ...]


def _forward(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None, activation: str,
    save: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y (tokens, hidden), and gate|up (tokens, 2·inner) if saved.

    w_gate and w_up are (inner, hidden); without w_up w_gate is packed, (2·inner, hidden). Without
    w_down h (tokens, inner) takes the place of y.
    """
    plan = plan_for(x, w_gate, w_up, w_down, activation)
    return run_forward(x, w_gate, w_up, w_down, save, plan)


def _backward(
    upstream: Tensor, x: Tensor | None, w_gate: Tensor | None, w_up: Tensor | None,
    w_down: Tensor | None, gate_up: Tensor | None, wants: Sequence[bool],
    sizes: Sequence[int], pair: bool, activation: str,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """d_x, d_w_gate_up and d_w_down, each if wanted.

    Args:
        upstream: dy (tokens, hidden), or dh (tokens, inner) of an MLP without w_down.
        x: what `tensors_to_save` gave of the operands, as the next four.
        w_gate: likewise.
        w_up: likewise.
        w_down: likewise.
        gate_up: likewise.
        wants: d_x, d_w_gate, d_w_up, d_w_down.
        sizes: hidden and inner.
        pair: gate and up have a weight each, whose gradients are rows of d_w_gate_up.
        activation: of gate.
    """
    (hidden, inner), down = sizes, w_down is not None or wants[3]
    plan = plan_of_sizes(upstream, hidden, inner, down, pair, activation)
    dy, *saved = contiguous_and_aligned(upstream, x, w_gate, w_up, w_down, gate_up)
    assert dy is not None
    with current_device(upstream):
        wanted = wants[0], wants[1], wants[2], wants[3]
        return gradients(plan, wanted, saved, dy, False)


def _shapes(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None, activation: str,
    save: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    tokens, wide = x.shape[0], weight_sizes(w_gate, w_up)[0]
    output = x.new_empty(tokens, wide // 2 if w_down is None else w_down.shape[0])
    return output, x.new_empty(tokens, wide) if save else None


def _shapes_of_gradients(
    upstream: Tensor, x: Any, w_gate: Any, w_up: Any, w_down: Any, gate_up: Any,
    wants: Sequence[bool], sizes: Sequence[int], pair: bool, activation: str,
) -> Gradients:  # fmt: skip
    (hidden, inner), both = sizes, not pair or (wants[1] and wants[2])
    new = upstream.new_empty
    return (
        new(upstream.shape[0], hidden) if wants[0] else None,
        new((1 + both) * inner, hidden) if wants[1] or wants[2] else None,
        new(hidden, inner) if wants[3] else None,
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the wanted gradients need, and nothing else."""
    x, w_gate, w_up, w_down, activation, save = inputs
    wide, hidden = weight_sizes(w_gate, w_up)
    ctx.wants, ctx.pair = ctx.needs_input_grad[:4], w_up is not None
    ctx.settings = ctx.wants, (hidden, wide // 2), ctx.pair, activation
    ctx.set_materialize_grads(False)  # gate|up has no gradient: zeros would cost its size
    *operands, gate_up = tensors_to_save(ctx.wants, save, x, w_gate, w_up, w_down, output[1])
    keep(ctx, operands, gate_up)


def _gradients(
    backward: Any, ctx: Any, upstream: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    if upstream is None:
        return (None,) * 6
    d_x, d_w_gate_up, d_w_down = backward(upstream, *ctx.saved_tensors, *ctx.settings)
    wants_x, *_, wants_w_down = ctx.wants
    d_weights = separate_gate_up(d_w_gate_up, ctx.wants, ctx.pair)
    return d_x if wants_x else None, *d_weights, d_w_down if wants_w_down else None, None, None


def _flops(
    x: Shape, w_gate: Shape, w_up: Shape | None, w_down: Shape | None, *_: Any, **__: Any
) -> int:
    return 2 * x[0] * sum(prod(w) for w in (w_gate, w_up, w_down) if w is not None)


def _backward_flops(
    upstream: Shape, x: Shape | None, w_gate: Shape | None, w_up: Shape | None,
    w_down: Shape | None, gate_up: Shape | None, wants: Sequence[bool], sizes: Sequence[int],
    pair: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """With gate|up where they are computed again."""
    wants_x, wants_w_gate, wants_w_up, wants_w_down = wants
    of_gate_up = wants_w_gate + wants_w_up if pair else 2 * wants_w_gate
    dh = w_down is not None and any(wants[:3])
    products = dh + 2 * (gate_up is None) + 2 * wants_x + of_gate_up + wants_w_down
    return 2 * upstream[0] * prod(sizes) * products


SWIGLU_MLP = declare(
    "swiglu_mlp", _forward, _shapes, keep=_keep, gradients=_gradients,
    backward=(_backward, _shapes_of_gradients), flops=_flops, backward_flops=_backward_flops,
)  # fmt: skip
