"""What an allocator did, call by call, and what the blocks were that it handed out.

On CUDA torch's own memory history tells it, with the Python stack of each allocation, and can be
kept as the pickle that https://pytorch.org/memory_viz draws. On a CPU the profiler's memory events
do, without stacks. Sizes are those asked for, before the allocator rounds them up.

A block is named by its address at a moment when its meaning is known: a weight when the
model has been built, a gradient after a backward, AdamW's state after an update, a cast of a weight
or another kept activation at the end of a forward. What outlives everything is `other` (tokens,
RoPE's tables, cuBLAS's workspaces), all the rest is temporary.
"""

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusedlib.bench.attempt import Unavailable
from measure.profiler import profiling
from measure.recording import paths
from measure.recording.files import write_whole

CATEGORIES = (
    "weights", "gradients", "optimizer", "activations", "casts", "other", "temporaries",
)  # fmt: skip
AUTOGRAD = "no Python frame (autograd's own thread)"
_MARK = "fusedlib moment: "
_DEPTH = 3  # frames of a stack that are kept


@dataclass(frozen=True)
class Change:
    """A block handed out (`nbytes` above 0) or taken back (0); `where` is its Python stack."""

    address: int
    nbytes: int
    where: str = ""


@dataclass
class History:
    """Changes in order, and how many of them had happened at each moment."""

    changes: list[Change] = field(default_factory=list)
    moments: dict[str, int] = field(default_factory=dict)


class Watch:
    """Marks moments while a history is taken; `history` is there when the watch is over."""

    def __init__(self, device: torch.device, *, by_profiler: bool = False) -> None:
        self.device, self.by_profiler = device, by_profiler
        self.history = History()
        self.names: list[str] = []
        self.snapshot: dict[str, Any] | None = None

    def mark(self, name: str) -> None:
        """Name this moment."""
        self.names.append(name)
        if not self.by_profiler:
            _sentinel(self.device)
        else:
            with torch.profiler.record_function(_MARK + name):
                pass

    def save(self, path: Path) -> int:
        """Write CUDA's snapshot as a pickle; its size in bytes."""
        return write_whole(path, pickle.dumps(self.snapshot)).stat().st_size


@contextmanager
def watching(device: torch.device) -> Iterator[Watch]:
    """Take the allocator's history while inside.

    Raises:
        Unavailable: a device whose allocator keeps none, such as MPS.
    """
    if device.type == "cpu":
        with profiled(device) as watch:
            yield watch
        return
    if device.type != "cuda":
        raise Unavailable(f"the allocator of {device.type} keeps no history")
    watch, record = Watch(device), torch.cuda.memory._record_memory_history
    torch.cuda.synchronize()
    record("all", context="alloc", stacks="python", device=device)
    try:
        yield watch
        torch.cuda.synchronize()
        watch.snapshot = torch.cuda.memory._snapshot()
    finally:
        record(None)
    trace = watch.snapshot["device_traces"][torch.cuda.current_device()]
    watch.history = read_trace(trace, watch.names)


def _sentinel(device: torch.device) -> None:
    """An allocation that the history shows with this function on top of its stack."""
    torch.empty(1, device=device)


def read_trace(trace: list[dict[str, Any]], names: list[str]) -> History:
    """The history that CUDA's trace tells; the sentinels' places get the names in order.

    Raises:
        ValueError: there are not as many sentinels as names.
    """
    history, waiting, sentinels = History(), list(names), set()
    for entry in trace:
        address, frames = entry["addr"], entry.get("frames", ())
        if entry["action"] == "alloc":
            if frames and frames[0]["name"] == _sentinel.__name__:
                sentinels.add(address)
                if not waiting:
                    raise ValueError("the history has more sentinels than moments were marked")
                history.moments[waiting.pop(0)] = len(history.changes)
            else:
                history.changes.append(Change(address, entry["size"], _stack(frames)))
        elif entry["action"] == "free_completed":
            if address in sentinels:
                sentinels.discard(address)
            else:
                history.changes.append(Change(address, 0))
    if waiting:
        raise ValueError(f"the history lacks the moments {', '.join(waiting)}: it was cut off")
    return history


def _stack(frames: Any) -> str:
    """The innermost frames of the models' code, or of torch where none is: file:line name."""
    models = str(paths.NOTEBOOKS / "models")
    chosen = [(f, str(paths.ROOT)) for f in frames if f["filename"].startswith(models)] or [
        (f, f["filename"].rpartition("/torch/")[0]) for f in frames
        if "/torch/" in f["filename"] and "_contextlib" not in f["filename"]
    ]  # fmt: skip
    lines = [
        f"{f['filename'].removeprefix(root).lstrip('/')}:{f['line']} {f['name']}"
        for f, root in chosen[:_DEPTH]
    ]
    return " ← ".join(lines) or AUTOGRAD


@contextmanager
def profiled(device: torch.device) -> Iterator[Watch]:
    """Take the history of the host's or CUDA's allocator from the profiler's memory events.

    Raises:
        Unavailable: the device's allocator tells the profiler nothing.
    """
    watch = Watch(device, by_profiler=True)
    with profiling("cpu", profile_memory=True) as profile:
        yield watch
    watch.history = _read_profile(profile, device.type)


def _read_profile(profile: torch.profiler.profile, device: str) -> History:
    from torch._C._profiler import _EventType

    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    events: list[tuple[int, str | Change]] = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name.startswith(_MARK):
            events.append((event.start_time_ns, event.name.removeprefix(_MARK)))
        elif event.tag == _EventType.Allocation:
            fields: Any = event.extra_fields
            if fields.device.type == device:
                change = Change(fields.ptr, max(fields.alloc_size, 0))
                events.append((event.start_time_ns, change))
    history = History()
    for _, entry in sorted(events, key=lambda event: event[0]):
        if isinstance(entry, str):
            history.moments[entry] = len(history.changes)
        else:
            history.changes.append(entry)
    if not history.changes:
        raise Unavailable(f"the allocator of {device} tells the profiler nothing")
    return history


# --- what the blocks were ------------------------------------------------------------------------


@dataclass
class Block:
    """A block: its bytes and between which changes it lived; `end` None outlives the history."""

    address: int
    nbytes: int
    start: int
    end: int | None
    where: str
    category: str = "temporaries"

    def lives(self, at: int) -> bool:
        """Whether it is there when `at` changes have happened."""
        return self.start < at and (self.end is None or self.end >= at)


@dataclass
class KnownAddresses:
    """Addresses whose meaning was known at a moment.

    Attributes:
        named: moment, category, and the addresses that had it then.
        forwards: the moments at which a forward began and ended, and the addresses of casts then.
    """

    named: list[tuple[str, str, set[int]]] = field(default_factory=list)
    forwards: list[tuple[str, str, set[int]]] = field(default_factory=list)


def blocks(history: History) -> list[Block]:
    """Every block of the history, without a category yet, in the order of birth."""
    every: list[Block] = []
    alive: dict[int, Block] = {}
    for at, change in enumerate(history.changes):
        gone = alive.pop(change.address, None)
        if gone is not None:  # taken back, or handed out again without its release in the history
            gone.end = at
        if change.nbytes:
            alive[change.address] = Block(change.address, change.nbytes, at, None, change.where)
            every.append(alive[change.address])
    return every


def classify(history: History, addresses: KnownAddresses) -> list[Block]:
    """All blocks with their category."""
    every = blocks(history)
    for moment, category, named in addresses.named:
        at = history.moments[moment]
        for block in every:
            if block.address in named and block.lives(at):
                block.category = category
    for begin, end, casts in addresses.forwards:
        since, at = history.moments[begin], history.moments[end]
        for block in every:
            unnamed = block.category == "temporaries" and block.end is not None
            if unnamed and block.start >= since and block.lives(at):
                block.category = "casts" if block.address in casts else "activations"
    for block in every:
        if block.category == "temporaries" and block.end is None:
            block.category = "other"
    return every


def live(
    every: Sequence[Block], changes: int, categories: Sequence[str] = CATEGORIES
) -> dict[str, np.ndarray]:
    """Bytes held after each change, by category."""
    steps = {name: [0] * (changes + 1) for name in categories}
    for block in every:
        steps[block.category][block.start] += block.nbytes
        steps[block.category][changes if block.end is None else block.end] -= block.nbytes
    return {name: np.array(list(accumulate(s))[:-1], np.int64) for name, s in steps.items()}


def thinned(total: np.ndarray, keep: Sequence[int], most: int) -> np.ndarray:
    """At most `most` positions of a series: the peak, those of `keep`, and of each of equal parts
    its least and its greatest.
    """
    chosen = {int(np.argmax(total)), 0, len(total) - 1, *(min(k, len(total) - 1) for k in keep)}
    if len(total) <= most:
        return np.arange(len(total))
    edges = np.linspace(0, len(total), (most - len(chosen)) // 2 + 1).astype(int)
    for low, high in pairwise(edges):
        chosen |= {low + int(np.argmin(total[low:high])), low + int(np.argmax(total[low:high]))}
    return np.array(sorted(chosen))


def largest(
    every: Sequence[Block], at: int, most: int, leave_out: Sequence[str] = ()
) -> list[tuple[int, int, str, str]]:
    """The largest blocks after `at` changes: count, bytes of each, category and origin, of blocks
    that share the last three.
    """
    there = Counter(
        (b.nbytes, b.category, b.where) for b in every
        if b.lives(at) and b.category not in leave_out
    )  # fmt: skip
    ranked = sorted(there.items(), key=lambda item: (-item[0][0], -item[1], item[0][2]))
    return [(count, *group) for group, count in ranked[:most]]
