"""What memory was held: kept for backward, at a peak, through one pass, or over time.

    kept(lambda: mlp(x), [x, *mlp.parameters()])    # storages that autograd saves, by its own hooks
    peak(work, "cuda")                              # MiB over what was there, by the allocator
    passed(lambda: mlp(x), dy).figures()            # forward and backward, and what its peak is of
    with watching(device) as watch:                 # all blocks over time, and what they are
        watch.mark("built", "weights", model.parameters()); ...
    watch.mib()

On CUDA torch's own memory history tells it, with the Python stack of each allocation; pickled,
`watch.snapshot` is what https://pytorch.org/memory_viz draws. On a CPU the profiler's memory events
do, without stacks. Sizes are those asked for, before the allocator rounds them up.

A block is named by its address at a moment when its meaning is known: a weight when the
model has been built, a gradient after a backward, AdamW's state after an update, a cast of a weight
or another kept activation at the end of a forward. What outlives everything is `other` (tokens,
RoPE's tables, cuBLAS's workspaces), all the rest is temporary.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusedlib.bench.attempt import Unavailable
from study import paths
from study.profiler import profiling
from study.settings import MIB

CATEGORIES = (
    "weights", "gradients", "optimizer", "activations", "casts", "other", "temporaries",
)  # fmt: skip
AUTOGRAD = "no Python frame (autograd's own thread)"
OF_PASS = ("output", "saved", "gradients", "temporaries")
COMPLETE = 0.005
"""Share of a peak that its events may be off before they are not taken for its parts."""
_MARK = "fusedlib moment: "
_DEPTH = 3  # frames of a stack that are kept

# --- kept, peak, passed --------------------------------------------------------------------------


class Kept(NamedTuple):
    """A storage that autograd keeps: its bytes, the first tensor in it, and what that was for."""

    nbytes: int
    tensor: str
    part: str


def kept(
    forward: Callable[[], object], given: Iterable[Tensor],
    part: Callable[[Tensor], str] = lambda tensor: "",
) -> list[Kept]:  # fmt: skip
    """What autograd keeps of a forward for its backward, storage by storage, without those given.

    Args:
        part: says of a tensor, when it is saved, whose it is.
    """
    seen = {tensor.untyped_storage().data_ptr() for tensor in given}
    found: list[Kept] = []
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held.append(tensor.detach())  # so that no address comes twice
            shape, dtype = "·".join(map(str, tensor.shape)), str(tensor.dtype)
            text = f"{shape} {dtype.removeprefix('torch.')}"
            found.append(Kept(storage.nbytes(), text, part(tensor)))

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
        held = live(blocks(watch.history), len(watch.history.changes))
        return float(np.sum([*held.values()], axis=0).max()) / MIB
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
    """The blocks of one forward and backward, and the event at which the forward was done.

    A block that outlives the forward is saved (or y), one in which a leaf's gradient lies at the
    end of the backward is a gradient, all else is temporary. `handed_out` are the bytes that CUDA's
    allocator itself counts over those before, after the forward and at the peak; None elsewhere.
    """

    blocks: list["Block"]
    events: int
    forward_events: int
    handed_out: tuple[int, int] | None = None

    def live_mib(self) -> dict[str, list[float]]:
        """MiB held over what was there before, after each event, by category."""
        held = live(self.blocks, self.events, OF_PASS)
        return {name: (nbytes / MIB).tolist() for name, nbytes in held.items()}

    def figures(self) -> dict[str, Any]:
        """MiB after the forward, at the peak with its parts, and in gradients at the end.

        On CUDA the allocator's own counts are the figures, and the events give the parts. Where
        their peak is not the allocator's (`complete` False: the profiler does not see what torch's
        checkpoint releases), there are no parts.
        """
        by = self.live_mib()
        held = [sum(parts) for parts in zip(*by.values(), strict=True)]
        at = max(range(len(held)), key=lambda event: held[event])
        after, most = held[self.forward_events - 1], held[at]
        if self.handed_out is not None:
            after, most = (nbytes / MIB for nbytes in self.handed_out)
        output = sum(block.nbytes for block in self.blocks if block.category == "output") / MIB
        complete = abs(held[at] - most) <= COMPLETE * most
        figures = {
            "after_forward_mib": after, "output_mib": output, "saved_mib": after - output,
            "peak_mib": most, "events_peak_mib": held[at], "complete": complete,
        }  # fmt: skip
        if complete:
            figures["gradients_mib"] = by["gradients"][-1]
            figures |= {f"peak_{name}_mib": by[name][at] for name in OF_PASS}
        return figures


def passed(forward: Callable[[], Tensor], dy: Tensor) -> Pass:
    """Run forward and backward once, every block seen.

    Raises:
        Unavailable: the device's allocator tells nothing.
    """
    base, after = 0, 0
    if dy.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    with profiled(dy.device) as watch:
        y = forward()
        watch.mark("forward")
        address, leaves = y.untyped_storage().data_ptr(), leaves_of(y)
        after = torch.cuda.memory_allocated() if dy.is_cuda else 0
        y.backward(dy)
    most = torch.cuda.max_memory_allocated() if dy.is_cuda else 0
    every, done = blocks(watch.history), watch.history.moments["forward"]
    gradients = addresses_of(leaf.grad for leaf in leaves if leaf.grad is not None)
    for block in every:
        if block.lives(done):
            block.category = "output" if block.address == address else "saved"
        elif block.start >= done and block.end is None and block.address in gradients:
            block.category = "gradients"
    counts = (after - base, most - base) if dy.is_cuda else None
    return Pass(every, len(watch.history.changes), done, counts)


# --- a history -----------------------------------------------------------------------------------


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
    """Marks moments while a history is taken, and whose memory is whose at them; `history` is there
    when the watch is over.
    """

    def __init__(self, device: torch.device, *, by_profiler: bool = False) -> None:
        self.device, self.by_profiler = device, by_profiler
        self.history, self.addresses = History(), KnownAddresses()
        self.names: list[str] = []
        self.snapshot: dict[str, Any] | None = None

    def mark(self, name: str, category: str = "", tensors: Iterable[Tensor] = ()) -> None:
        """Name this moment; these tensors are of this category, one of `CATEGORIES`."""
        self.names.append(name)
        if not self.by_profiler:
            _sentinel(self.device)
        else:
            with torch.profiler.record_function(_MARK + name):
                pass
        if category:
            self.addresses.named.append((name, category, addresses_of(tensors)))

    def forward(self, begin: str, end: str, casts: Iterable[int] = ()) -> None:
        """Between these moments was a forward: what it left, and what is freed later, is kept."""
        self.addresses.forwards.append((begin, end, {*casts}))

    def mib(self) -> pd.DataFrame:
        """MiB by category, a row a change."""
        every = classify(self.history, self.addresses)
        return pd.DataFrame(live(every, len(self.history.changes))) / MIB

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
    models = str(paths.NOTEBOOKS / "study" / "models")
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


def total(held: Mapping[str, np.ndarray]) -> np.ndarray:
    """All categories together."""
    summed: np.ndarray = np.sum(list(held.values()), axis=0)
    return summed


def curve(held: Mapping[str, np.ndarray], points: int, keep: Sequence[int] = ()) -> dict[str, Any]:
    """A row's figures of bytes by category: MiB at the peak of all, and at so many points of time.

    Args:
        keep: positions that must be among them.
    """
    together = total(held)
    at, chosen = int(np.argmax(together)), thinned(together, keep, points)
    figures: dict[str, Any] = {"live_at": chosen.tolist()}
    for name, series in held.items():
        figures[f"live_{name}_mib"] = [round(float(v), 4) for v in series[chosen] / MIB]
        figures[f"peak_{name}_mib"] = int(series[at]) / MIB
    return figures


class Casts(TorchDispatchMode):
    """Notes the addresses of copies of weights in another dtype.

    A dispatch mode sees every operation below autograd and autocast, so also autocast's casts.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._weights = addresses_of(weights)
        self.addresses: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and note what it made; an address that comes again is another block."""
        result = func(*args, **(kwargs or {}))
        given = addresses_of(t for t in tree_leaves(args) if isinstance(t, Tensor))
        created = addresses_of(t for t in tree_leaves(result) if isinstance(t, Tensor)) - given
        self.addresses -= created
        if func.overloadpacket.__name__ == "_to_copy" and given & self._weights:
            self.addresses |= created
        return result
