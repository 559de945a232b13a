"""Every allocation of one forward and backward pass, on any device that tells the profiler.

The profiler's memory events name address and size of each block handed out and taken back, by the
host's allocator as by CUDA's. From them follow what is held at each moment and what it is: a block
that outlives the forward is saved (or y), one made in the backward that outlives it is a gradient,
all else is temporary.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench.attempt import Unavailable

CATEGORIES = ("output", "saved", "gradients", "temporaries")
MIB = 2**20
_MARK = "fusedlib: the forward is done"


@dataclass
class Block:
    """A block: its bytes and between which events it lived; `end` None outlives the pass."""

    address: int
    nbytes: int
    start: int
    end: int | None = None


@dataclass(frozen=True)
class Trace:
    """The blocks of one pass, what each was, and the event at which the forward was done.

    `forward_bytes` is what CUDA's allocator itself had handed out by then; None elsewhere.
    """

    blocks: list[tuple[Block, str]]
    events: int
    forward_events: int
    forward_bytes: int | None = None

    def live_mib(self) -> dict[str, list[float]]:
        """MiB held over base after each event, by category."""
        change = {name: [0] * (self.events + 1) for name in CATEGORIES}
        for block, name in self.blocks:
            change[name][block.start] += block.nbytes
            change[name][self.events if block.end is None else block.end] -= block.nbytes
        live: dict[str, list[float]] = {}
        for name, steps in change.items():
            held, live[name] = 0, []
            for step in steps[:-1]:
                held += step
                live[name].append(held / MIB)
        return live


def trace(forward: Callable[[], Tensor], dy: Tensor) -> Trace:
    """Run forward and backward once under the profiler.

    Raises:
        Unavailable: the device's allocator tells the profiler nothing.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=activities, profile_memory=True)
    with quiet():
        profile.start()
    try:
        y = forward()
        with torch.profiler.record_function(_MARK):
            output = y.untyped_storage().data_ptr()
        allocated = torch.cuda.memory_allocated() if dy.is_cuda else None
        y.backward(dy)
    finally:
        with quiet():
            profile.stop()
    return replace(_read(profile, dy.device.type, output), forward_bytes=allocated)


@contextmanager
def quiet() -> Iterator[None]:
    """The profiler's library greets and takes leave on the process's standard error, each time."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _read(profile: torch.profiler.profile, device: str, output: int) -> Trace:
    from torch._C._profiler import _EventType

    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    found, mark = [], None
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == _MARK:
            mark = event.start_time_ns
        elif event.tag == _EventType.Allocation:
            fields: Any = event.extra_fields
            if fields.device.type == device:
                found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    if not found or mark is None:
        raise Unavailable(f"the allocator of {device} tells the profiler nothing")
    found.sort(key=lambda event: event[0])
    done = sum(time < mark for time, _, _ in found)
    return _classified([(address, size) for _, address, size in found], done, output)


def _classified(changes: list[tuple[int, int]], done: int, output: int) -> Trace:
    blocks: list[Block] = []
    live: dict[int, Block] = {}
    for at, (address, size) in enumerate(changes):
        if size > 0:
            if address in live:  # handed out again: its release was not told
                live[address].end = at
            live[address] = Block(address, size, at)
            blocks.append(live[address])
        elif address in live:  # else it was there before the pass
            live.pop(address).end = at
    return Trace([(b, _category(b, done, output)) for b in blocks], len(changes), done)


def _category(block: Block, done: int, output: int) -> str:
    if block.start < done and (block.end is None or block.end >= done):
        return "output" if block.address == output else "saved"
    return "gradients" if block.start >= done and block.end is None else "temporaries"
