"""What a backward pass reads of a call's operands: their values as they were in forward.

`tensor.data = ...` gives a tensor other memory, and autograd, which keeps the tensor, does not
notice. torch's own products keep a view, and with it the old memory. A view of each operand would
cost the host 0.75 µs; `.data` costs 0.24, and beside the tensor itself it leaves graph, version and
identity to autograd. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedlib.launch.fixed import weights_are_fixed
from fusedlib.launch.internals import retains_graph, saved_tensor_hooks

# DeepSpeed's mark of a parameter that is in parts between forward and backward: it exchanges the
# memory itself and brings the same values back, and what held the old one would undo ZeRO-3.
BROUGHT_BACK = "ds_id"


def save_operands(ctx: Any, operands: Sequence[Tensor | None], *others: Tensor | None) -> None:
    """Keep a call's operands for backward with the memory that they have now, and other tensors."""
    if saved_tensor_hooks(False) is None:
        ctx.memory = [
            None if t is None or hasattr(t, BROUGHT_BACK) else t.data for t in operands
        ]  # fmt: skip
    else:  # which may keep what they are given; the memory is theirs to hold or to free
        ctx.memory = None
        with torch.enable_grad():  # for the graph behind an operand
            operands = [
                t if t is None or hasattr(t, BROUGHT_BACK) else t.view_as(t) for t in operands
            ]
    ctx.save_for_backward(*operands, *others)


def saved_operands(ctx: Any) -> tuple[Any, ...]:
    """What `save_operands` kept: the operands as they were in forward, and the others.

    Raises:
        RuntimeError: they are freed already, or one was changed in place since.
    """
    saved, memory = ctx.saved_tensors, ctx.memory
    if memory is None:
        return saved
    if not retains_graph():
        ctx.memory = None
    if torch.is_grad_enabled() or weights_are_fixed():
        return *map(_as_in_forward, saved, memory), *saved[len(memory) :]
    return *in_forward(saved, memory), *saved[len(memory) :]


def in_forward(operands: Sequence[Any], memory: Sequence[Tensor | None] | None) -> list[Any]:
    """The first of the operands with what is held of their memory, if anything is."""
    pairs = zip(operands, memory or operands, strict=False)
    return [t if held is None else held for t, held in pairs]


def release_memory(node: Any, tensor: Tensor) -> None:
    """Have a node hold the tensor's memory no longer, which its saved tensor does not need."""
    for index, held in enumerate(getattr(node, "memory", None) or ()):
        if held is not None and held.data_ptr() == tensor.data_ptr():
            node.memory[index] = None


def _as_in_forward(operand: Any, memory: Tensor | None) -> Any:
    if memory is None:
        return operand
    if torch.is_grad_enabled() and operand.requires_grad:
        return _WithMemory.apply(operand, memory)
    # Whether a weight is a fixed one is told by the parameter.
    return operand if _same_memory(operand, memory) else memory


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


class _WithMemory(torch.autograd.Function):
    """The values of `memory`, for a derivative of the backward pass in the graph of `operand`."""

    @staticmethod
    def forward(ctx: Any, operand: Tensor, memory: Tensor) -> Tensor:
        return memory.view_as(memory)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
