"""The only clock: CUDA events on NVIDIA cards, the host's clock with synchronisation elsewhere."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fusedlib.bench.statistics import Interval, paired_ratio, summarize

# Twice the largest L2 of today's cards (an H200 has 60 MB, a B200 126 MB).
L2_FLUSH_BYTES = 256 * 2**20


class Clock(Protocol):
    """Marks moments on a device's own timeline."""

    def mark(self) -> Any:
        """The moment at which all work issued so far is done."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Time between two marks in ms; waits for the work if need be."""


class CudaClock:
    """Events in the stream: no synchronisation between marks, the host may run ahead."""

    def mark(self) -> torch.cuda.Event:
        """An event recorded in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Time between two events in ms."""
        end.synchronize()
        return start.elapsed_time(end)


class HostClock:
    """`perf_counter` after waiting for the device; for CPU and MPS."""

    def __init__(self, device_type: str) -> None:
        self._wait = torch.mps.synchronize if device_type == "mps" else _nothing

    def mark(self) -> int:
        """Nanoseconds on the host's clock once the device is idle."""
        self._wait()
        return time.perf_counter_ns()

    def elapsed_ms(self, start: int, end: int) -> float:
        """Time between two marks in ms."""
        return (end - start) / 1e6


def _nothing() -> None:
    pass


def clock_for(device: torch.device | str) -> Clock:
    """The clock of a device."""
    kind = torch.device(device).type
    return CudaClock() if kind == "cuda" else HostClock(kind)


def synchronize(device: torch.device | str) -> None:
    """Wait until the device is idle."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


class Sections:
    """Times the parts of one step by marks inside that step, never by subtracting averages.

    >>> step = Sections("cpu")
    >>> with step.section("forward"):
    ...     y = torch.ones(8).sum()
    >>> sorted(step.elapsed_ms())
    ['forward', 'total']
    """

    def __init__(self, device: torch.device | str) -> None:
        self._clock = clock_for(device)
        self._marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time what is done inside under `name`."""
        start = self._clock.mark()
        yield
        self._marks.append((name, start, self._clock.mark()))

    def elapsed_ms(self) -> dict[str, float]:
        """ms of each section, and `total` from the first one's start to the last one's end."""
        if not self._marks:
            raise RuntimeError("no section was timed; use `with sections.section(name): ...`")
        times = {name: self._clock.elapsed_ms(a, b) for name, a, b in self._marks}
        times["total"] = self._clock.elapsed_ms(self._marks[0][1], self._marks[-1][2])
        return times


@dataclass(frozen=True)
class Timing:
    """Samples of one provider, in the order they were taken."""

    samples_ms: tuple[float, ...]
    warmup: int
    flush_l2: bool

    def figures(self) -> dict[str, Any]:
        """The row's figures."""
        return {**summarize(self.samples_ms), "warmup": self.warmup, "flush_l2": self.flush_l2}

    def ratio_to(self, other: "Timing") -> Interval:
        """How many times longer this took than `other`, from the interleaved pairs."""
        return paired_ratio(self.samples_ms, other.samples_ms)


def interleaved(
    work: Mapping[str, Callable[[], object]], *, device: torch.device | str, warmup: int,
    repetitions: int, flush_l2: bool, prepare: Callable[[str], None] | None = None,
) -> dict[str, Timing]:  # fmt: skip
    """Time several providers in turns (A B C A B C ...), so that drift hits all alike.

    Args:
        work: by name, a callable that does the work once; everything it needs exists already.
        device: where the work runs.
        warmup: rounds that are run and thrown away.
        repetitions: rounds that are measured; every sample is kept.
        flush_l2: overwrite a buffer larger than the card's L2 before each call, outside the clock.
        prepare: called with the name before each call, outside the clock (resets gradients, ...).

    Raises:
        ValueError: no work, negative warm-up, or less than one repetition.
    """
    if not work or warmup < 0 or repetitions < 1:
        raise ValueError(
            f"nothing to time: {len(work)} providers, warmup={warmup}, repetitions={repetitions}; "
            "need at least one provider, warmup >= 0, repetitions >= 1"
        )
    clock = clock_for(device)
    on_cuda = torch.device(device).type == "cuda"
    buffer = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device=device) if on_cuda else None
    samples: dict[str, list[float]] = {name: [] for name in work}
    for index in range(warmup + repetitions):
        marks = {}
        for name, call in work.items():
            if prepare is not None:
                prepare(name)
            if flush_l2 and buffer is not None:
                buffer.zero_()
            start = clock.mark()
            call()
            marks[name] = (start, clock.mark())
        synchronize(device)
        if index >= warmup:
            for name, (start, end) in marks.items():
                samples[name].append(clock.elapsed_ms(start, end))
    return {n: Timing(tuple(s), warmup, flush_l2 and on_cuda) for n, s in samples.items()}
