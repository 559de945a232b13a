"""The MLP as torch operators: `torch.ops.fusedlib.swiglu_mlp` and `.swiglu_mlp_backward`.

Registered through `torch.library`, with shapes for meta and fake tensors and an autograd formula,
so that torch.compile, dispatch modes and tensor subclasses see ordinary operators. All operands are
matrices of one dtype and device; `function` brings them into that form. What is kept for
backward is in `autograd`; the operators never write over what they are given,
so running backward twice on a retained graph gives the same answer twice. A second derivative
raises.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedlib.launch.first_order import outside_autocast
from fusedlib.launch.launch import current_device
from fusedlib.launch.operator import operator
from fusedlib.launch.saved import save_operands, saved_operands
from fusedlib.ops.arguments import KERNEL_DTYPES, shape_of
from fusedlib.ops.mlp.autograd import gradients, run_forward, separate_gate_up, tensors_to_save
from fusedlib.ops.mlp.plan import Plan, contiguous_and_aligned
from fusedlib.ops.mlp.plan_cache import plan_for
from fusedlib.ops.mlp.route import weight_sizes


def _check(like: Tensor, **named: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise a ValueError where a matrix is not of its shape and of like's dtype and device."""
    for name, (matrix, shape) in named.items():
        if matrix is None:
            continue
        if matrix.shape != shape:
            raise ValueError(f"{name} must be {shape}, got {shape_of(matrix)}")
        if matrix.dtype != like.dtype or matrix.dtype not in KERNEL_DTYPES:
            known = ", ".join(map(str, KERNEL_DTYPES))
            raise ValueError(f"{name} must be {like.dtype}, one of {known}; got {matrix.dtype}")
        if matrix.device != like.device:
            raise ValueError(f"{name} must be on {like.device}, got {matrix.device}")


@operator("swiglu_mlp")
def swiglu_mlp(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None, activation: str,
    save: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y (tokens, hidden), and gate|up (tokens, 2·inner) or, not saved, an empty tensor.

    w_gate and w_up are (inner, hidden); without w_up w_gate is packed, (2·inner, hidden). Without
    w_down h (tokens, inner) takes the place of y.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    wide, hidden = weight_sizes(w_gate, w_up)
    inner, rows = wide // 2, wide // 2 * (2 if w_up is None else 1)
    _check(
        x, x=(x, (x.shape[0], hidden)), w_gate=(w_gate, (rows, hidden)),
        w_up=(w_up, (inner, hidden)), w_down=(w_down, (hidden, inner)),
    )  # fmt: skip
    plan = plan_for(x, w_gate, w_up, w_down, activation)
    output, gate_up = run_forward(x, w_gate, w_up, w_down, save, plan)
    return output, x.new_empty(0, 0) if gate_up is None else gate_up


@operator("swiglu_mlp_backward", last=True)
def swiglu_mlp_backward(
    upstream: Tensor, x: Tensor | None, w_gate: Tensor | None, w_up: Tensor | None,
    w_down: Tensor | None, gate_up: Tensor | None, wants: Sequence[bool],
    sizes: Sequence[int], pair: bool, activation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """d_x, d_w_gate_up and d_w_down, new; empty where not wanted. They have no gradients.

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

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    (hidden, inner), down = sizes, w_down is not None or wants[3]
    tokens, rows = upstream.shape[0], inner if pair else 2 * inner
    _check(
        upstream, upstream=(upstream, (tokens, hidden if down else inner)),
        x=(x, (tokens, hidden)), w_gate=(w_gate, (rows, hidden)), w_up=(w_up, (inner, hidden)),
        w_down=(w_down, (hidden, inner)), gate_up=(gate_up, (tokens, 2 * inner)),
    )  # fmt: skip
    plan = _plan_of_sizes(upstream, tokens, hidden, inner, pair, down, activation)
    dy, *saved = contiguous_and_aligned(upstream, x, w_gate, w_up, w_down, gate_up)
    assert dy is not None
    with current_device(upstream):
        wanted = wants[0], wants[1], wants[2], wants[3]
        wanted_ones = gradients(plan, wanted, saved, dy, False)
    d_x, d_w_gate_up, d_w_down = (dy.new_empty(0, 0) if d is None else d for d in wanted_ones)
    return d_x, d_w_gate_up, d_w_down


def _plan_of_sizes(
    like: Tensor, tokens: int, hidden: int, inner: int, pair: bool, down: bool, activation: str
) -> Plan:
    """The plan of a forward that had these sizes, found by operands of one element."""
    shapes = (tokens, hidden), ((2 - pair) * inner, hidden), (inner, hidden), (hidden, inner)
    x, w_gate, w_up, w_down = (like.new_empty(()).expand(shape) for shape in shapes)
    return plan_for(x, w_gate, w_up if pair else None, w_down if down else None, activation)


@torch.library.register_fake(swiglu_mlp)
def _(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None, activation: str,
    save: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, wide = x.shape[0], weight_sizes(w_gate, w_up)[0]
    output = x.new_empty(tokens, wide // 2 if w_down is None else w_down.shape[0])
    return output, x.new_empty(tokens, wide) if save else x.new_empty(0, 0)


@torch.library.register_fake(swiglu_mlp_backward)
def _(
    upstream: Tensor, x: Any, w_gate: Any, w_up: Any, w_down: Any, gate_up: Any,
    wants: Sequence[bool], sizes: Sequence[int], pair: bool, activation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (hidden, inner), both = sizes, not pair or (wants[1] and wants[2])
    shapes = (
        (upstream.shape[0], hidden) if wants[0] else (0, 0),
        ((1 + both) * inner, hidden) if wants[1] or wants[2] else (0, 0),
        (hidden, inner) if wants[3] else (0, 0),
    )
    d_x, d_w_gate_up, d_w_down = (upstream.new_empty(shape) for shape in shapes)
    return d_x, d_w_gate_up, d_w_down


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the wanted gradients need, and nothing else."""
    x, w_gate, w_up, w_down, activation, save = inputs
    wide, hidden = weight_sizes(w_gate, w_up)
    ctx.wants, ctx.pair = ctx.needs_input_grad[:4], w_up is not None
    ctx.settings = ctx.wants, (hidden, wide // 2), ctx.pair, activation
    ctx.set_materialize_grads(False)  # gate|up has no gradient: zeros would cost its size
    *operands, gate_up = tensors_to_save(ctx.wants, save, x, w_gate, w_up, w_down, output[1])
    save_operands(ctx, operands, gate_up)


@outside_autocast
def _gradients(ctx: Any, upstream: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if upstream is None:
        return (None,) * 6
    # Saved tensors are read once: activation checkpointing allows no more.
    d_x, d_w_gate_up, d_w_down = swiglu_mlp_backward(upstream, *saved_operands(ctx), *ctx.settings)
    wants_x, *_, wants_w_down = ctx.wants
    d_weights = separate_gate_up(d_w_gate_up, ctx.wants, ctx.pair)
    return d_x if wants_x else None, *d_weights, d_w_down if wants_w_down else None, None, None


torch.library.register_autograd(swiglu_mlp, _gradients, setup_context=_set_up)
