"""Weights that a user says stay as they are: what was computed of them, kept until they may change.

Nothing in torch tells for sure that a weight is the one of the last call: `tensor.data` and fused
optimizers change it and raise no version counter. So it takes the user's word, a `with` block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedlib.compat import base_of, current_stream, version_of


class _Kept(NamedTuple):
    weights: tuple[Tensor, ...]
    versions: tuple[int, ...]
    computed: Any


_KEPT: dict[Hashable, _Kept] = {}
_blocks = 0  # entered and not left, by any thread: autograd's run backward
_COUNTING = Lock()


@contextmanager
def fixed_weights() -> Iterator[None]:
    """Inside, no weight changes: fp32 products split each parameter once, not once a product.

    For evaluation, and for a step that accumulates gradients, forward and backward of all its
    batches; the optimizer's step comes after the block. The parts take 4 bytes an element by rows,
    for forward, and as many by columns, for backward, until the outermost block ends.

        with fusedlib.fixed_weights():
            for batch in batches:
                loss(model(batch)).backward()
        optimizer.step()

    Kept are the parts of `torch.nn.Parameter`s alone, and none while a CUDA graph is captured.
    Whether it is eager or compiled code, one thread or several, they count for the whole process.

    Raises:
        RuntimeError: in a product whose weight was changed in place inside the block, where torch's
            version counter tells. A change by `weight.data` or by a fused optimizer raises none,
            and products go on with the weight as it was.
    """
    global _blocks
    with _COUNTING:
        _blocks += 1
    try:
        yield
    finally:
        with _COUNTING:
            _blocks -= 1
            if not _blocks:
                _KEPT.clear()


def weights_are_fixed() -> bool:
    """True while somebody is inside `fixed_weights`."""
    return _blocks > 0


def kept_of_fixed(
    compute: Callable[..., Any], variant: Hashable, first: Tensor, second: Tensor | None
) -> Any:
    """`compute(first, second)`, kept by `variant` where both are weights that are fixed now."""
    if not _blocks:
        return compute(first, second)
    weights = (first,) if second is None else (first, second)
    if not all(map(_is_parameter, weights)):
        return compute(first, second)
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        return compute(first, second)
    stream = current_stream(first.get_device()) if first.is_cuda else 0
    addresses = tuple(weight.data_ptr() for weight in weights)
    # By owner too: parameters that share memory count their versions apart.
    owners = tuple(id(w if base_of(w) is None else base_of(w)) for w in weights)
    key = variant, stream, owners, addresses, first.shape, first.stride()
    versions = tuple(0 if w.is_inference() else version_of(w) for w in weights)
    kept = _KEPT.get(key)
    # A shard's memory is freed and may serve another: the kept weight has another address then.
    if kept is None or addresses != tuple(weight.data_ptr() for weight in kept.weights):
        kept = _KEPT[key] = _Kept(weights, versions, compute(first, second))
    elif kept.versions != versions:
        raise RuntimeError(
            f"a weight of shape {tuple(first.shape)} was changed in place inside `with "
            "fusedlib.fixed_weights():`, whose products use its parts from before; leave the block "
            "before weights change"
        )
    return kept.computed


def _is_parameter(weight: Tensor) -> bool:
    """True for a parameter and for a view of one, its transpose say."""
    return type(weight) is Parameter or type(base_of(weight)) is Parameter
