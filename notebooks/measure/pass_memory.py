"""What one forward and backward pass holds: each allocation, tensors kept, the allocator's peak.

The profiler's memory events name address and size of each block handed out and taken back, by the
host's allocator as by CUDA's. From them follow what is held at each moment and what it is: a block
that outlives the forward is saved (or y), one made in the backward that outlives it is a gradient,
all else is temporary.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from measure import allocator_history
from measure.allocator_history import Block, History
from measure.racing.rivals import Workload
from measure.racing.settings import MIB

CATEGORIES = ("output", "saved", "gradients", "temporaries")
_FORWARD = "forward"


@dataclass(frozen=True)
class Trace:
    """The blocks of one pass, each with its category, and the event at which the forward was done.

    `forward_bytes` is what CUDA's allocator itself had handed out by then; None elsewhere.
    """

    blocks: list[Block]
    events: int
    forward_events: int
    forward_bytes: int | None = None

    def live_mib(self) -> dict[str, list[float]]:
        """MiB held over base after each event, by category."""
        held = allocator_history.live(self.blocks, self.events, CATEGORIES)
        return {name: (nbytes / MIB).tolist() for name, nbytes in held.items()}


def trace(forward: Callable[[], Tensor], dy: Tensor) -> Trace:
    """Run forward and backward once under the profiler.

    Raises:
        Unavailable: the device's allocator tells the profiler nothing.
    """
    with allocator_history.profiled(dy.device) as watch:
        y = forward()
        watch.mark(_FORWARD)
        output = y.untyped_storage().data_ptr()
        allocated = torch.cuda.memory_allocated() if dy.is_cuda else None
        y.backward(dy)
    return classified(watch.history, output, allocated)


def classified(history: History, output: int, forward_bytes: int | None = None) -> Trace:
    """The trace of a pass whose forward ends at the moment "forward", with y at this address."""
    every, done = allocator_history.blocks(history), history.moments[_FORWARD]
    for block in every:
        if block.lives(done):
            block.category = "output" if block.address == output else "saved"
        elif block.start >= done and block.end is None:
            block.category = "gradients"
    return Trace(every, len(history.changes), done, forward_bytes)


def kept_for_backward(work: Workload) -> dict[str, Any]:
    """What autograd keeps of a forward, storage by storage, the operands left out.

    Returns:
        `mib` in all, and `tensors`, for each storage the shape and dtype of the first tensor in it.
    """
    kept: list[tuple[int, str]] = []

    def note(tensor: Tensor) -> None:
        shape, dtype = "·".join(map(str, tensor.shape)), str(tensor.dtype)
        kept.append((tensor.untyped_storage().nbytes(), f"{shape} {dtype.removeprefix('torch.')}"))

    with noting_saved(work.leaves.values(), note):
        work.forward()
    return {
        "mib": sum(nbytes for nbytes, _ in kept) / MIB,
        "tensors": sorted(text for _, text in kept),
    }  # fmt: skip


@contextmanager
def noting_saved(given: Iterable[Tensor], note: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `note` once for each storage that autograd saves inside, those of `given` left out.

    There is no backward: given back to autograd, a saved output would keep itself for good.
    """
    seen = {tensor.untyped_storage().data_ptr() for tensor in given}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held.append(tensor.detach())  # so that no address comes twice
            note(tensor)

    def unpack(packed: None) -> Tensor:
        raise AssertionError("no backward runs through a graph that kept nothing")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def peak_over_mib(work: Callable[[], object]) -> float:
    """MiB at the peak of some work over what CUDA's allocator had handed out before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def mib_of(tensors: Iterable[Tensor | None]) -> float:
    """MiB of those that are tensors."""
    return sum(t.nbytes for t in tensors if t is not None) / MIB
