"""What an allocator did, call by call: blocks handed out and taken back, between named moments.

On CUDA torch's own memory history tells it, with the Python stack of each allocation, and can be
kept as the pickle that https://pytorch.org/memory_viz draws. On a CPU the profiler's memory events
do, without stacks. Sizes are those asked for, before the allocator rounds them up.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fusedlib import paths
from fusedlib.bench.allocations import quiet
from fusedlib.bench.results import Unavailable

_MARK = "fusedlib moment: "
# Frames of one allocation that a row names, the innermost first.
DEPTH = 3


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

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.history = History()
        self.snapshot: dict[str, Any] | None = None
        self._names: list[str] = []

    def mark(self, name: str) -> None:
        """Name this moment."""
        self._names.append(name)
        if self.device.type == "cuda":
            _sentinel(self.device)
        else:
            with torch.profiler.record_function(_MARK + name):
                pass

    def save(self, path: Path) -> int:
        """Write CUDA's snapshot as a pickle; its size in bytes.

        Raises:
            Unavailable: there is none on this device.
        """
        if self.snapshot is None:
            raise Unavailable(f"the allocator of {self.device.type} gives no snapshot")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            pickle.dump(self.snapshot, file)
        return path.stat().st_size


@contextmanager
def watching(device: torch.device) -> Iterator[Watch]:
    """Take the allocator's history while inside.

    Raises:
        Unavailable: a device whose allocator keeps none, such as MPS.
    """
    watch = Watch(device)
    if device.type == "cuda":
        yield from _cuda(watch)
    elif device.type == "cpu":
        yield from _host(watch)
    else:
        raise Unavailable(f"the allocator of {device.type} keeps no history")


def _sentinel(device: torch.device) -> None:
    """An allocation that the history shows with this function on top of its stack."""
    torch.empty(1, device=device)


def _cuda(watch: Watch) -> Iterator[Watch]:
    record = torch.cuda.memory._record_memory_history
    torch.cuda.synchronize()
    record("all", context="alloc", stacks="python", device=watch.device)
    try:
        yield watch
        torch.cuda.synchronize()
        watch.snapshot = torch.cuda.memory._snapshot()
    finally:
        record(None)
    index = torch.cuda.current_device()
    watch.history = read_trace(watch.snapshot["device_traces"][index], watch._names)


def read_trace(trace: list[dict[str, Any]], names: list[str]) -> History:
    """The history that CUDA's trace tells; the sentinels' places get the names in order.

    Raises:
        ValueError: there are not as many sentinels as names.
    """
    found, waiting, sentinels = History(), list(names), set()
    for entry in trace:
        address, frames = entry["addr"], entry.get("frames", ())
        if entry["action"] == "alloc":
            if frames and frames[0]["name"] == _sentinel.__name__:
                sentinels.add(address)
                if not waiting:
                    raise ValueError("the history has more sentinels than moments were marked")
                found.moments[waiting.pop(0)] = len(found.changes)
            else:
                found.changes.append(Change(address, entry["size"], shorten(frames)))
        elif entry["action"] == "free_completed":
            if address in sentinels:
                sentinels.discard(address)
            else:
                found.changes.append(Change(address, 0))
    if waiting:
        raise ValueError(f"the history lacks the moments {', '.join(waiting)}: it was cut off")
    return found


def shorten(frames: Any) -> str:
    """The innermost frames of our own code, or of torch where none is ours, file:line in name."""
    ours = [f for f in frames if f["filename"].startswith(str(paths.ROOT / "fusedlib" / "models"))]
    if ours:
        return " ← ".join(_frame(f, str(paths.ROOT)) for f in ours[:DEPTH])
    parts = [f for f in frames if "/torch/" in f["filename"] and "_contextlib" not in f["filename"]]
    said = " ← ".join(_frame(f, f["filename"].rpartition("/torch/")[0]) for f in parts[:DEPTH])
    return said or "no Python frame (autograd's own thread)"


def _frame(frame: dict[str, Any], root: str) -> str:
    return f"{frame['filename'].removeprefix(root).lstrip('/')}:{frame['line']} {frame['name']}"


def _host(watch: Watch) -> Iterator[Watch]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=activities, profile_memory=True)
    with quiet():
        profile.start()
    try:
        yield watch
    finally:
        with quiet():
            profile.stop()
    watch.history = _read_profile(profile)


def _read_profile(profile: torch.profiler.profile) -> History:
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
            if fields.device.type == "cpu":
                change = Change(fields.ptr, max(fields.alloc_size, 0))
                events.append((event.start_time_ns, change))
    events.sort(key=lambda event: event[0])
    found = History()
    for _, told in events:
        if isinstance(told, str):
            found.moments[told] = len(found.changes)
        else:
            found.changes.append(told)
    if not found.changes:
        raise Unavailable("the allocator of cpu tells the profiler nothing")
    return found
