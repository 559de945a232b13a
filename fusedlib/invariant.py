"""One order of sums for every number of tokens, so that a token's bits do not depend on others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

import torch

from fusedlib.launch import exchange_prepared

_blocks = 0  # entered and not left, by any thread: autograd's run backward
_told_before = ExitStack()  # tells torch what it was told before the first
_COUNTING = Lock()


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Inside, this library gives a token the same bits whatever tokens are beside it.

    For who trains on what another batch size has sampled, or compares runs of other batch sizes:
    without it the kernels, and with them the order of sums, are chosen by the number of tokens.

        with fusedlib.batch_invariant():
            loss(model(batch)).backward()

    It holds of the results and gradients of tokens, in one process on one card; gradients of
    weights are sums over tokens. Backward belongs inside, and so does `torch.compile` of a model.

    A model's other products, torch's own, share no sum among programs inside: cuBLASLt is taken,
    and `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`, and fp16's, are
    (False, False) until the block ends. In half precision cuBLAS then gave rows the same bits at
    every number of rows that was tried, but for a single row of narrow products; NVIDIA promises
    none. In fp32 torch's products have other bits at other numbers of rows, and Inductor promises
    nothing of what it makes of a model's own lines. `notebooks/05_precision.ipynb` has what was
    measured, of whole models too, and what it costs.

    In half precision a few tokens take the kernels of many. In fp32 a product of split factors is
    chosen by the weight's size alone. Losses by token and `linear_log_probs` go over slices of
    32,768 classes, 64 KiB of logits a token in half precision; a `memory` in bytes keeps its own
    slices. The block counts for the whole process, whichever thread is inside.
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
    with _COUNTING:
        begins, ends = _blocks == 0, _blocks + step == 0
        if begins and torch.cuda.is_available() and torch.version.cuda is not None:
            _forbid_shared_sums()  # first, for torch may refuse
        _blocks += step
        if begins or ends:
            exchange_prepared()
        if ends:
            _told_before.close()


def _forbid_shared_sums() -> None:
    """Tell cuBLAS; closing `_told_before` tells it what it was told before, all or nothing."""
    choose, matmul = torch.backends.cuda.preferred_blas_library, torch.backends.cuda.matmul
    with ExitStack() as told:
        told.callback(choose, choose())
        choose("cublaslt")  # the others have no such setting
        for half in ("bf16", "fp16"):
            name = f"allow_{half}_reduced_precision_reduction"
            before = getattr(matmul, name), getattr(matmul, f"{name}_split_k")
            told.callback(setattr, matmul, name, before)
            setattr(matmul, name, (False, False))
        _told_before.callback(told.pop_all().close)
