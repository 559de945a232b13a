"""One order of sums for every number of tokens, so that a token's bits do not depend on others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_blocks = 0  # entered and not left, by any thread: autograd's run backward
_COUNTING = Lock()


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Inside, this library gives a token the same bits whatever tokens are beside it.

    For who trains on what another batch size has sampled, or compares runs of other batch sizes:
    without it the kernels, and with them the order of sums, are chosen by the number of tokens.

        with fusedlib.batch_invariant():
            loss(model(batch)).backward()

    What holds is of the results and gradients of tokens, in one process on one card: gradients of
    weights are sums over tokens. Backward belongs inside, and so does `torch.compile` of a model.
    Attention and the products that are torch's (down projection, logits and the like) are as torch
    has them: cuBLAS gave a row the same bits at every number of rows that we tried in half
    precision, but promises none; `notebooks/05_precision.ipynb` has what was measured, also of
    whole models, and what this costs. Under torch.compile what Inductor makes of a model's own
    lines promises nothing either.

    In half precision a few tokens take the kernels of many. In fp32 a product of split factors is
    chosen by the weight's size alone. Losses by token and `linear_log_probs` go over slices of
    16,384 classes, 32 KiB of logits a token in half precision; a `memory` in bytes keeps its own
    slices. Calls are prepared anew when the first block begins and when the last one ends. It
    counts for the whole process, whichever thread is inside.
    """
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def is_batch_invariant() -> bool:
    """True while somebody is inside `batch_invariant`."""
    return _blocks > 0


def _enter(step: int) -> None:
    global _blocks
    from fusedlib.tuning import forget

    with _COUNTING:
        before, _blocks = _blocks > 0, _blocks + step
        if before != (_blocks > 0):
            forget()
