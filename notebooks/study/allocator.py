"""What memory was held: kept for backward, at a peak, through one pass, or over time.

    kept(lambda: mlp(x), [x, *mlp.parameters()])    # storages that autograd saves, by its own hooks
    peak(work, "cuda")                              # MiB over what was there, by the allocator
    passed(lambda: mlp(x), dy).figures()            # forward and backward, and what its peak is of
    with watching(device) as watch:                 # all blocks over time, and what they are
        watch.mark("built", "weights", model.parameters()); ...
    watch.mib()

On CUDA torch's own memory history tells it, on a CPU the profiler's memory events. Sizes are those
asked for, before the allocator rounds them up.

A block is named by its address at a moment when its meaning is known: a weight when the
model has been built, a gradient after a backward, AdamW's state after an update, a kept activation,
autocast's casts among them, at the end of a forward. What outlives everything is `other` (tokens,
RoPE's tables, cuBLAS's workspaces), all the rest is temporary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fusedlib.bench.attempt import Unavailable
from study.profiler import profiling
from study.settings import MIB

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "other", "temporaries")
OF_PASS = ("output", "saved", "gradients", "temporaries")
COMPLETE = 0.005
"""Share of a peak that its events may be off before they are not taken for its parts."""
_MARK = "fusedlib moment: "

# --- kept, peak, passed --------------------------------------------------------------------------


class Kept(NamedTuple):
    """A storage that autograd keeps: its bytes, and the first tensor in it."""

    nbytes: int
    tensor: str


def kept(forward: Callable[[], object], given: Iterable[Tensor]) -> list[Kept]:
    """Storages that autograd keeps of a forward for its backward, those given left out."""
    seen = addresses_of(given)
    found: list[Kept] = []
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held.append(tensor.detach())  # so that no address comes twice
            shape, dtype = "·".join(map(str, tensor.shape)), str(tensor.dtype)
            found.append(Kept(storage.nbytes(), f"{shape} {dtype.removeprefix('torch.')}"))

    def unpack(packed: None) -> Tensor:
        # Given back to autograd, a saved output would keep itself for good.
        raise AssertionError("no backward runs through a graph that kept nothing")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        forward()
    return found


def peak(work: Callable[[], object], device: torch.device | str) -> float | None:
    """MiB at the peak of some work over what was handed out before; None where nobody counts it.

    On CUDA by the allocator's own count, on a CPU by its events.
    """
    device = torch.device(device)
    if device.type == "cpu":
        with profiled(device) as watch:
            work()
        return at_peak(watch.held())["peak_mib"]
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def addresses_of(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the tensors' storages."""
    return {t.untyped_storage().data_ptr() for t in tensors}


def leaves_of(y: Tensor) -> list[Tensor]:
    """The tensors to whose `.grad` a backward pass of y adds."""
    seen: set[Any] = set()
    waiting: list[Any] = [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [function for function, _ in node.next_functions]
    return [node.variable for node in seen if node.name() == "torch::autograd::AccumulateGrad"]


def mib_of(tensors: Iterable[Tensor | None]) -> float:
    """MiB of those that are tensors."""
    return sum(t.nbytes for t in tensors if t is not None) / MIB


@dataclass(frozen=True)
class Pass:
    """What one forward and backward held over what was there before.

    `held` are bytes after each change, by the categories of `OF_PASS`, `counted` the peak by CUDA's
    allocator itself, None elsewhere.
    """

    held: Mapping[str, np.ndarray]
    counted: int | None = None

    def figures(self) -> dict[str, Any]:
        """MiB at the peak with its parts, and in gradients at the end.

        On CUDA the allocator's own count is the peak, and the events give the parts. Where their
        peak is another (`complete` False: the profiler does not see what torch's checkpoint
        releases), there are no parts.
        """
        figures = at_peak(self.held)
        most = figures["peak_mib"] if self.counted is None else self.counted / MIB
        complete = abs(figures["peak_mib"] - most) <= COMPLETE * most
        if not complete:
            return {"peak_mib": most, "complete": complete}
        gradients = int(self.held["gradients"][-1]) / MIB
        return {**figures, "peak_mib": most, "complete": complete, "gradients_mib": gradients}


def passed(forward: Callable[[], Tensor], dy: Tensor) -> Pass:
    """Run forward and backward once, every block seen: one that outlives the forward is saved, or
    y; one in which a leaf's gradient lies at the end is a gradient; all else is temporary.

    Raises:
        Unavailable: the device's allocator tells nothing.
    """
    base = 0
    if dy.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    with profiled(dy.device) as watch:
        y = forward()
        watch.mark("forward")
        address, leaves = y.untyped_storage().data_ptr(), leaves_of(y)
        y.backward(dy)
    counted = torch.cuda.max_memory_allocated() - base if dy.is_cuda else None
    every, done = blocks(watch.history), watch.history.moments["forward"]
    gradients = addresses_of(leaf.grad for leaf in leaves if leaf.grad is not None)
    for block in every:
        if block.lives(done):
            block.category = "output" if block.address == address else "saved"
        elif block.start >= done and block.end is None and block.address in gradients:
            block.category = "gradients"
    return Pass(live(every, len(watch.history.changes), OF_PASS), counted)


# --- a history -----------------------------------------------------------------------------------


@dataclass
class History:
    """Changes in order, each an address with the bytes that were handed out there, 0 where they
    were taken back; and how many of them had happened at each moment.
    """

    changes: list[tuple[int, int]] = field(default_factory=list)
    moments: dict[str, int] = field(default_factory=dict)


class Watch:
    """Marks moments while a history is taken, and whose memory is whose at them.

    Attributes:
        history: there when the watch is over.
        named: moment, category, and the addresses that had it then.
        forwards: the moments at which a forward began and ended.
    """

    def __init__(self, device: torch.device, *, by_profiler: bool = False) -> None:
        self.device, self.by_profiler = device, by_profiler
        self.history = History()
        self.named: list[tuple[str, str, set[int]]] = []
        self.forwards: list[tuple[str, str]] = []
        self.names: list[str] = []

    def mark(self, name: str, category: str = "", tensors: Iterable[Tensor] = ()) -> None:
        """Name this moment; these tensors are of this category, one of `CATEGORIES`."""
        self.names.append(name)
        if not self.by_profiler:
            _sentinel(self.device)
        else:
            with torch.profiler.record_function(_MARK + name):
                pass
        if category:
            self.named.append((name, category, addresses_of(tensors)))

    def forward(self, begin: str, end: str) -> None:
        """Between these moments was a forward: what it left, and what is freed later, is kept."""
        self.forwards.append((begin, end))

    def blocks(self) -> list["Block"]:
        """All blocks with their category."""
        return classify(self.history, self.named, self.forwards)

    def held(self) -> dict[str, np.ndarray]:
        """Bytes by category, after each change."""
        return live(self.blocks(), len(self.history.changes))

    def mib(self) -> pd.DataFrame:
        """MiB by category, a row a change."""
        return pd.DataFrame(self.held()) / MIB

    def phases(self, *names: str) -> pd.DataFrame:
        """The same between these moments; the index is 0 at the first, 1 at the second, and so on,
        so that each phase is as wide as the others."""
        ends = [self.history.moments[name] for name in names]
        held = self.mib().iloc[ends[0] : ends[-1]]
        return held.set_axis(np.interp(held.index, ends, range(len(ends))))


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
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        record(None)
    watch.history = read_trace(traces[torch.cuda.current_device()], watch.names)


def _sentinel(device: torch.device) -> None:
    """An allocation that the history shows with this function on top of its stack."""
    torch.empty(1, device=device)


def read_trace(trace: list[dict[str, Any]], names: Sequence[str]) -> History:
    """The history that CUDA's trace tells; the sentinels' places get the names in order."""
    history, waiting, sentinels = History(), iter(names), set()
    for entry in trace:
        address, frames = entry["addr"], entry.get("frames", ())
        if entry["action"] == "alloc":
            if frames and frames[0]["name"] == _sentinel.__name__:
                sentinels.add(address)
                history.moments[next(waiting)] = len(history.changes)
            else:
                history.changes.append((address, entry["size"]))
        elif entry["action"] == "free_completed":
            if address in sentinels:
                sentinels.discard(address)
            else:
                history.changes.append((address, 0))
    if lacking := [*waiting]:
        raise ValueError(f"the history lacks the moments {', '.join(lacking)}: it was cut off")
    return history


@contextmanager
def profiled(device: torch.device) -> Iterator[Watch]:
    """Take the history of the host's or CUDA's allocator from the profiler's memory events."""
    watch = Watch(device, by_profiler=True)
    with profiling("cpu", profile_memory=True) as profile:
        yield watch
    watch.history = _read_profile(profile, device.type)


def _read_profile(profile: torch.profiler.profile, device: str) -> History:
    from torch._C._profiler import _EventType

    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    events: list[tuple[int, str | tuple[int, int]]] = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name.startswith(_MARK):
            events.append((event.start_time_ns, event.name.removeprefix(_MARK)))
        elif event.tag == _EventType.Allocation:
            fields: Any = event.extra_fields
            if fields.device.type == device:
                events.append((event.start_time_ns, (fields.ptr, max(fields.alloc_size, 0))))
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
    category: str = "temporaries"

    def lives(self, at: int) -> bool:
        """Whether it is there when `at` changes have happened."""
        return self.start < at and (self.end is None or self.end >= at)


def blocks(history: History) -> list[Block]:
    """Every block of the history, without a category yet, in the order of birth."""
    every: list[Block] = []
    alive: dict[int, Block] = {}
    for at, (address, nbytes) in enumerate(history.changes):
        gone = alive.pop(address, None)
        if gone is not None:  # taken back, or handed out again without its release in the history
            gone.end = at
        if nbytes:
            alive[address] = Block(address, nbytes, at, None)
            every.append(alive[address])
    return every


def classify(
    history: History, named: Iterable[tuple[str, str, set[int]]],
    forwards: Iterable[tuple[str, str]],
) -> list[Block]:  # fmt: skip
    """All blocks with their category; `named` and `forwards` are those of a `Watch`."""
    every = blocks(history)
    for moment, category, addresses in named:
        at = history.moments[moment]
        for block in every:
            if block.address in addresses and block.lives(at):
                block.category = category
    for begin, end in forwards:
        since, at = history.moments[begin], history.moments[end]
        for block in every:
            unnamed = block.category == "temporaries" and block.end is not None
            if unnamed and block.start >= since and block.lives(at):
                block.category = "activations"
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


def total(held: Mapping[str, np.ndarray]) -> np.ndarray:
    """All categories together."""
    summed: np.ndarray = np.sum(list(held.values()), axis=0)
    return summed


def at_peak(held: Mapping[str, np.ndarray]) -> dict[str, float]:
    """A row's figures of bytes by category: MiB when most is held, and the parts of that."""
    together = total(held)
    at = int(np.argmax(together))
    parts = {f"peak_{name}_mib": int(series[at]) / MIB for name, series in held.items()}
    return {"peak_mib": int(together[at]) / MIB, **parts}
