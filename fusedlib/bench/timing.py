"""The only clock: CUDA events on NVIDIA cards, the host's clock with synchronisation elsewhere."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from fusedlib.bench.attempt import Wrong
from fusedlib.bench.statistics import Interval, paired_ratio, summarize

# Twice the largest L2 of today's cards (an H200 has 60 MB, a B200 126 MB).
L2_FLUSH_BYTES = 256 * 2**20
TRIES = 5  # the host may be held up in some
LATE_MS, LATE_SHARE = 0.5, 0.1


class Clock:
    """Marks moments on a device's own timeline: by `perf_counter`, waiting for the device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device

    def mark(self) -> Any:
        """The moment at which all work issued so far is done."""
        synchronize(self.device)
        return time.perf_counter_ns()

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Time between two marks in ms; waits for the work if need be."""
        return (end - start) / 1e6


class CudaClock(Clock):
    """Events in the stream: no synchronisation between marks, the host may run ahead."""

    def mark(self) -> torch.cuda.Event:
        """An event recorded in the device's current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Time between two events in ms."""
        end.synchronize()
        return start.elapsed_time(end)


def clock_for(device: torch.device | str) -> Clock:
    """The clock of a device."""
    return (CudaClock if torch.device(device).type == "cuda" else Clock)(device)


def synchronize(device: torch.device | str) -> None:
    """Wait until the device is idle."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


@dataclass(frozen=True)
class Timing:
    """Samples of one rival, in the order they were taken.

    `parts` are those of a call that tells of its own parts: ms by name, a sample a call.
    """

    samples_ms: tuple[float, ...]
    warmup: int
    flush_l2: bool
    calls: int = 1
    parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """The row's figures: of the whole, and `part_median_ms` and so on of each part."""
        figures = summarize(self.samples_ms)
        for name, samples in self.parts.items():
            figures |= summarize(samples, name)
        return {
            **figures, "warmup": self.warmup, "flush_l2": self.flush_l2, "calls": self.calls
        }  # fmt: skip

    def ratio_to(self, other: "Timing") -> Interval:
        """How many times longer this took than `other`, from the pairs of turns."""
        return paired_ratio(self.samples_ms, other.samples_ms)


def in_turns(
    work: Mapping[str, Callable[[], object]], *, device: torch.device | str, warmup: int,
    repetitions: int, flush_l2: bool, prepare: Callable[[str], None] | None = None,
    calls: int = 1, seconds: float = 0.0, most: int | None = None,
) -> dict[str, Timing]:  # fmt: skip
    """Time several rivals in turns, each round in another order: drift hits all alike, each is as
    often first as every other, and follows another one than in the round before.

    Args:
        work: by name, a callable that does the work `calls` times; all that it needs exists. What
            returns a mapping of numbers tells of its own parts, in ms, `total` among them: that is
            its time.
        repetitions: rounds that are measured at least; every sample is kept.
        flush_l2: overwrite a buffer larger than the card's L2 before each call, outside the clock.
        prepare: called with the name before each call, outside the clock (resets gradients, ...).
            Where it waits for the device (`synchronize`), as a race's does, every call pays for its
            launches; without, the host may issue one rival while the one before it still runs.
        calls: how often a callable does the work; a sample is that share of its time.
        seconds: further rounds until so much time has passed.
        most: rounds that are measured at most; by default `repetitions`.

    Raises:
        ValueError: no work, negative warm-up, or less than one repetition or call.
        Wrong: a callable's work runs on another stream, which the clock does not see. Looked for
            where there is a warm-up.
    """
    if not work or warmup < 0 or repetitions < 1 or calls < 1:
        raise ValueError(
            f"nothing to time: {len(work)} rivals, warmup={warmup}, repetitions={repetitions}, "
            f"calls={calls}; need at least one rival, warmup >= 0, repetitions and calls >= 1"
        )
    for name, call in work.items() if warmup else ():
        require_current_stream(call, device, partial(prepare, name) if prepare else lambda: None)
    return sampled_in_turns(
        work, device=device, warmup=warmup, repetitions=repetitions, flush_l2=flush_l2,
        prepare=prepare, calls=calls, seconds=seconds, most=most,
    )  # fmt: skip


def order(names: Sequence[str], index: int) -> list[str]:
    """Who comes when in a round: in as many rounds as there are names, twice as many if these are
    odd, each is as often in each place and behind each other one (Williams, "Experimental designs
    balanced for the estimation of residual effects of treatments", 1949). What runs before a call
    sets the card's power and clocks for it.
    """
    count = len(names)
    zigzag = [step // 2 + 1 if step % 2 else -(step // 2) for step in range(count)]
    row = [names[(index + offset) % count] for offset in zigzag]
    return row[::-1] if index // count % 2 else row


def sampled_in_turns(
    work: Mapping[str, Callable[[], object]], *, device: torch.device | str, warmup: int,
    repetitions: int, flush_l2: bool, prepare: Callable[[str], None] | None, calls: int,
    seconds: float, most: int | None,
) -> dict[str, Timing]:  # fmt: skip
    """The samples of `in_turns`, of work that runs on the current stream."""
    clock = clock_for(device)
    on_cuda = torch.device(device).type == "cuda"
    buffer = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device=device) if on_cuda else None
    samples: dict[str, list[float]] = {name: [] for name in work}
    parts: dict[str, dict[str, list[float]]] = {name: {} for name in work}
    names = list(work)
    begin = time.perf_counter()
    for index in range(warmup + max(repetitions, most or 0)):
        marks: dict[str, Any] = {}
        for name in order(names, index):
            if prepare is not None:
                prepare(name)
            if flush_l2 and buffer is not None:
                buffer.zero_()
            start = clock.mark()
            parts_ms = work[name]()
            marks[name] = (start, clock.mark(), parts_ms)
        synchronize(device)
        if index < warmup:
            begin = time.perf_counter()
            continue
        for name, (start, end, parts_ms) in marks.items():
            own = _parts(parts_ms)
            whole = own.pop("total", None)
            samples[name].append((clock.elapsed_ms(start, end) if whole is None else whole) / calls)
            for part, ms in own.items():
                parts[name].setdefault(part, []).append(ms / calls)
        enough = index + 1 - warmup >= repetitions
        if enough and time.perf_counter() - begin >= seconds:
            break
    return {
        name: Timing(
            tuple(samples[name]), warmup, flush_l2 and on_cuda, calls,
            {part: tuple(part_samples) for part, part_samples in parts[name].items()},
        )
        for name in work
    }  # fmt: skip


def require_current_stream(
    call: Callable[[], object], device: torch.device | str, prepare: Callable[[], object]
) -> None:
    """Look whether the device is done when the current stream is; what is short is not seen.

    Raises:
        Wrong: in every try it went on for half a millisecond and a tenth of the time until then.
    """
    if torch.device(device).type != "cuda":
        return
    late_ms = 0.0
    for _ in range(TRIES):
        prepare()
        synchronize(device)
        begin = time.perf_counter()
        call()
        torch.cuda.current_stream(device).synchronize()
        seen = time.perf_counter()
        synchronize(device)
        late_ms = 1e3 * (time.perf_counter() - seen)
        if late_ms <= max(LATE_MS, LATE_SHARE * 1e3 * (seen - begin)):
            return
    raise Wrong(
        f"the device worked on for {late_ms:.2g} ms after the current stream was done: the work "
        "runs on another stream, which the clock does not see; let the current stream wait for it"
    )


def _parts(returned: object) -> dict[str, float]:
    """The ms by part that a call gave; what is no mapping of numbers (a model's output) is none."""
    if not isinstance(returned, Mapping):
        return {}
    numbers = all(isinstance(ms, int | float) for ms in returned.values())
    return dict(returned) if numbers else {}


def second_call_ms(
    call: Callable[[], object], device: torch.device | str, *,
    prepare: Callable[[], object] = lambda: None, enough: float = math.inf,
) -> float:  # fmt: skip
    """ms of the second of two calls, by the host's clock; of the first where it takes `enough`."""
    taken = 0.0
    for _ in range(2):
        prepare()
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        taken = (time.perf_counter() - begin) * 1e3
        if taken > enough:
            break
    return taken


def sustained(
    call: Callable[[], object], *, device: torch.device | str, calls: int, heat_s: float,
    seconds: float,
) -> Timing:  # fmt: skip
    """Time one rival alone without a pause, after `heat_s` of the same work.

    A sample is a burst of `calls`; the host stays a burst ahead, so that the device never waits.
    A card at its power limit runs slower so than in turns on a rested card, and training runs so.
    """
    clock = clock_for(device)
    samples: list[float] = []
    for span, kept in ((heat_s, False), (seconds, True)):
        marks = [clock.mark()]
        begin = time.perf_counter()
        while time.perf_counter() - begin < span or len(marks) < 3:
            for _ in range(calls):
                call()
            marks.append(clock.mark())
            clock.elapsed_ms(marks[-3], marks[-2]) if len(marks) > 2 else None
        if kept:
            samples = [clock.elapsed_ms(a, b) / calls for a, b in pairwise(marks)]
    return Timing(tuple(samples), 0, False, calls)
