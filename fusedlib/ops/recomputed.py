"""Outputs that are cheap to compute again are not kept for backward.

A norm's output is kept by the product that reads it, for that one's weight gradient, while what it
was computed from is kept for the norm's own. Two such outputs a layer are a ninth of what a Llama
keeps, and computing them again costs half a per cent of its step.

Where a tensor comes from is read off its graph: nothing hangs on a tensor that leaves the model. In
plain PyTorch all stays: what is computed again has no graph for second derivatives, which the
kernels do not have either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedlib.compat import node_class, saved_tensor_hooks, version_of
from fusedlib.ops.norm.function import RMS_NORM, rms_norm_fwd


def recompute_in_backward(x: Tensor, result: Tensor) -> Tensor:
    """Have `result`'s backward compute x again instead of keeping it, where x is a norm's output.

    Nothing changes where others watch what is kept, as activation checkpointing and a compiler do,
    where x was changed in place since, and where the norm's weight is not there any more, as after
    the forward of a shard of its own. A change in place by `.data`, or by a fused optimizer, is not
    seen by autograd, and not here: the norm's weight changes after its own backward at the
    earliest, which comes after that of the result.

    Args:
        x: of any shape.
        result: what a `torch.autograd.Function` gave of x and others.

    Returns:
        The result.
    """
    if torch.compiler.is_compiling():
        return result
    node: Any = result.grad_fn
    if not hasattr(node, "saved_tensors"):
        return result
    again = computed_again(x)
    if again is None or saved_tensor_hooks(False) is not None:
        return result
    for tensor, saved in zip(node.saved_tensors, node._raw_saved_tensors, strict=True):
        is_there = tensor is not None and tensor.numel() == x.numel()
        if is_there and tensor.data_ptr() == x.data_ptr():
            shape = tensor.shape
            saved.register_hooks(lambda _, s=shape: s, lambda s: again().view(s))
    return result


def computed_again(x: Tensor) -> Callable[[], Tensor] | None:
    """What gives x again; None where x is anything but what a norm's kernel gave."""
    node: Any = x.grad_fn
    if node is None or x.output_nr or version_of(x):
        return None
    if type(node) is not node_class(RMS_NORM.function):
        return None
    try:
        s, weight, _ = node.saved_tensors
    except RuntimeError:  # changed in place: the norm's own backward will say so
        return None
    if weight is None or weight.numel() != s.shape[-1] or not weight.untyped_storage().nbytes():
        return None
    versions = version_of(s), version_of(weight)
    return partial(_again, s, weight, versions, node.settings)


@torch.no_grad()
def _again(
    s: Tensor, weight: Tensor, versions: tuple[int, int], settings: tuple[float, bool]
) -> Tensor:  # fmt: skip
    if (version_of(s), version_of(weight)) != versions:
        raise RuntimeError(
            "a norm's output is computed again for backward, but its input or weight has been "
            "modified in place since: do that after backward, or apply_to with rms_norm=False"
        )
    return rms_norm_fwd(s, weight, None, *settings)[0]  # torch's would not have the same bits
