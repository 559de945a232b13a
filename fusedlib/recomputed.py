"""Outputs that are cheap to compute again are not kept for backward.

A norm's output is kept by the product that reads it, for that one's weight gradient, while what it
was computed from is kept for the norm's own. Two such outputs a layer are a ninth of what a Llama
keeps, and computing them again costs half a per cent of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks
DEPTH = 3  # a linear layer's result is a view of its product's, behind one more for its bias


def compute_again(y: Tensor, how: Callable[..., Any], *operands: Tensor) -> None:
    """Note on y, the output of a norm's kernel, that `how(*operands)` is y again, for `forget`.

    In plain PyTorch it stays: what is computed again has no graph for second derivatives, which the
    kernels do not have either. A change in place by `.data`, which autograd does not see, is not
    seen here either.
    """
    if torch.compiler.is_compiling() or y.grad_fn is None:
        return
    if y.grad_fn.name() == "RMSNormFunctionBackward":
        versions = [t._version for t in operands]
        again = partial(_again, how, versions, *(t.detach() for t in operands))
        y._computed_by = y._version, again  # type: ignore[attr-defined]


def forget(x: Tensor, result: Tensor) -> Tensor:
    """Have `result`'s backward compute x again instead of keeping it, where x says how.

    Nothing changes where others watch what is kept, as activation checkpointing and a compiler do,
    and where x was changed in place since.

    Args:
        x: of any shape.
        result: computed from x.

    Returns:
        The result.
    """
    if torch.compiler.is_compiling():
        return result
    version, how = getattr(x, "_computed_by", (0, None))
    if how is None or result.grad_fn is None or _default_hooks(False) is not None:
        return result
    if x._version != version:
        return result
    for tensor, saved in _saved(result.grad_fn):
        if tensor.data_ptr() == x.data_ptr() and tensor.numel() == x.numel():
            shape = tensor.shape
            saved.register_hooks(lambda _, s=shape: s, lambda s: how().view(s))
    return result


@torch.no_grad()
def _again(how: Callable[..., Tensor], versions: list[int], *operands: Tensor) -> Tensor:
    if [t._version for t in operands] != versions:
        raise RuntimeError(
            "a norm's output is computed again for backward, but its input or weight has been "
            "modified in place since: do that after backward, or apply_to with rms_norm=False"
        )
    return how(*operands)


def _saved(node: Any) -> Iterator[tuple[Tensor, Any]]:
    """Tensors kept by a node and by the first ones behind it, each with its `SavedTensor`."""
    for _ in range(DEPTH):
        if node is None:
            return
        kind: Any = type(node)
        for name, raw_name in _names(kind):
            kept, raw = getattr(node, name), getattr(node, raw_name)
            pairs = zip(kept, raw, strict=True) if isinstance(kept, tuple) else [(kept, raw)]
            yield from ((tensor, saved) for tensor, saved in pairs if isinstance(tensor, Tensor))
        node = node.next_functions[0][0] if node.next_functions else None


@cache
def _names(kind: Any) -> list[tuple[str, str]]:
    """Attributes of nodes of this kind that are kept, each with that of its `SavedTensor`."""
    raw = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    own = {"_raw_saved_tensors": "saved_tensors"}  # of torch.autograd.Function
    return [(own.get(name, name.removeprefix("_raw")), name) for name in raw]
