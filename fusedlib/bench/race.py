"""The one race: every entrant is checked against the reference, then all are timed in turns.

A study says what its cases are and makes a *course* of them: one problem with its inputs and its
truth. Cases that share a course are checked on it once; those that differ in their provider alone
make a *heat* and take turns, so that drift hits all alike. Each case gets a row, whatever happens.

Ways to launch:

- "python": calls one after another, as a loop makes them. Short ones are timed in bursts back to
  back; a call of more than `BURST_MS` by itself with the L2 flushed before it, which gives the host
  the head start that it has in a loop.
- "graph": a replay of a CUDA graph of the same call, the L2 flushed before each: what the device
  needs.

How a rival runs alone for seconds on end, as training does, measures `fusedlib.bench.sustained`.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fusedlib.bench import graphs, machine, timing
from fusedlib.bench.attempt import Attempt, Unavailable, free_memory
from fusedlib.bench.cases import Case, differing, label
from fusedlib.bench.progress import progress
from fusedlib.bench.results import Recorder
from fusedlib.bench.rivals import Workload

BURST_MS = 2.0
MOST_CALLS = 20
# A round that takes longer is not short of samples: fewer rounds, the same for all in it.
SLOW_MS, SLOW_ROUNDS = 100.0, 5
LAUNCHES = ("python", "graph")
Figures = dict[str, Any]


@dataclass
class Lap:
    """What one entrant does when it is its turn.

    Attributes:
        run: the work, once. What returns a mapping tells of its own parts in ms.
        prepare: called before each sample with the number of calls in it, outside the clock.
        reset: called between the calls of a burst.
        figures: what was found out on the way here.
    """

    run: Callable[[], object]
    prepare: Callable[[int], object] = lambda calls: None
    reset: Callable[[], object] = lambda: None
    figures: Figures = field(default_factory=dict)


@dataclass
class Entry:
    """An entrant that is right: its figures, and its lap in a heat."""

    figures: Figures
    lap: Callable[[Case], Lap]


class Course(Protocol):
    """One problem made once: its inputs, and what is right."""

    def enter(self, case: Case) -> Entry:
        """Set a case's provider up and hold it against the truth.

        Raises:
            Refused: it is wrong, too large or cannot run here.
        """


@dataclass(frozen=True)
class Event:
    """How a study races.

    Attributes:
        course: makes the course of a case.
        fields: the fields of a case that make its course.
        entrant: further fields that decide how a provider is set up on it.
        available: raises `Unavailable` for what cannot run here, before anything is made.
        settings: torch's settings around a course.
        work: figures that a case implies, such as its FLOPs.
        warmup: rounds thrown away.
        rounds: rounds measured at least, by a case.
        seconds: further rounds until so much time has passed; `most` rounds in all.
        bursts: whether short calls are timed several at once.
    """

    course: Callable[[Case], Course]
    fields: tuple[str, ...]
    entrant: tuple[str, ...] = ()
    available: Callable[[Case], None] = lambda case: None
    settings: Callable[[Case], AbstractContextManager[Any]] = lambda case: nullcontext()
    work: Callable[[Case], Figures] = lambda case: {}
    warmup: int = 2
    rounds: Callable[[Case], int] = lambda case: case["repetitions"]
    seconds: float = 0.0
    most: int | None = None
    bursts: bool = True


def race(recorder: Recorder, event: Event, cases: Iterable[Case]) -> None:
    """Check and time all cases, course by course, and record each.

    All of a heat run again when one is missing: a time means something beside the others. Rows
    with one `session` were timed in turns, sample by sample.
    """
    able = []
    for case in cases:
        tried = Attempt.at(event.available, case)
        if tried.ok:
            able.append(case)
        else:
            recorder.append(case, tried.figures, status=tried.status, reason=tried.reason)
    courses: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Case]]] = {}
    for case in able:
        heat = tuple((k, v) for k, v in case.items() if k != "provider")
        there = courses.setdefault(tuple(case[name] for name in event.fields), {})
        if case not in there.setdefault(heat, []):
            there[heat].append(case)
    todo = [
        wanted for there in courses.values()
        if (wanted := [cases for cases in there.values() if recorder.missing(cases)])
    ]  # fmt: skip
    names = [name for name in differing(cases[0] for cases, *_ in todo) if name in event.fields]
    with progress(recorder.study, len(todo)) as shown:
        for heats in todo:
            if recorder.is_over():
                break
            first = heats[0][0]
            shown.case(label(first, names))
            with event.settings(first):
                _run(recorder, event, heats)
            free_memory()
            shown.done()
    print(recorder.summary())


def _run(recorder: Recorder, event: Event, heats: list[list[Case]]) -> None:
    """All heats of one course: make it, check everybody once, time heat by heat."""
    _forget_compiled()
    course = Attempt.at(event.course, heats[0][0])
    entered: dict[tuple[Any, ...], Attempt[Entry]] = {}
    for heat in heats:
        ready: dict[str, tuple[Case, Entry]] = {}
        for case in heat:
            if course.value is None:
                reason = f"the check: {course.reason}"
                recorder.append(case, status=course.status, reason=reason)
                continue
            key = tuple(case[name] for name in ("provider", *event.entrant))
            if key not in entered:
                entered[key] = Attempt.at(course.value.enter, case)
            tried = entered[key]
            if tried.value is None:
                recorder.append(case, tried.figures, status=tried.status, reason=tried.reason)
            else:
                ready[case["provider"]] = case, tried.value
        _heat(recorder, event, ready)


def _forget_compiled() -> None:
    """torch.compile's cache is bounded: eight shapes of one function at most."""
    import sys

    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _heat(recorder: Recorder, event: Event, ready: dict[str, tuple[Case, Entry]]) -> None:
    """Time all who are ready in turns; whoever fails gets a row, the others are timed again."""
    laps: dict[str, Lap] = {}
    for name, (case, entry) in ready.items():
        tried = Attempt.at(entry.lap, case)
        if tried.value is not None:
            laps[name] = tried.value
            continue
        figures = {**entry.figures, **tried.figures}
        recorder.append(case, figures, status=tried.status, reason=tried.reason)
    while laps:
        clock = _Clock(event, laps, ready[next(iter(laps))][0])
        before = machine.conditions()
        timed = Attempt.at(clock.run)
        state = machine.before_and_after(before, machine.conditions())
        if timed.value is not None:
            session = {"session": datetime.now(UTC).isoformat()}
            for name, figures in timed.value.items():
                case, entry = ready[name]
                told = {**entry.figures, **laps[name].figures, **figures, **event.work(case)}
                recorder.append(case, {**told, **session, **state})
            return
        for name in _gone(timed, laps, ready, clock.last):
            case, entry = ready[name]
            recorder.append(case, entry.figures, status=timed.status, reason=timed.reason)
            del laps[name]
        free_memory()


def _gone(
    timed: Attempt[Any], laps: dict[str, Lap], ready: dict[str, tuple[Case, Entry]],
    last: str | None,
) -> list[str]:  # fmt: skip
    """Who is out: of memory the one that holds most, after another failure whose turn it was."""
    if timed.status == "oom":
        return [max(laps, key=lambda name: ready[name][1].figures.get("peak_mib") or 0.0)]
    return [last] if last in laps else list(laps)


@dataclass
class _Clock:
    """Times the laps of one heat."""

    event: Event
    laps: dict[str, Lap]
    case: Case
    last: str | None = None

    def run(self) -> dict[str, Figures]:
        """Figures of everybody's times."""
        device, in_bursts = self.case["device"], self.case.get("launch", "python") == "python"
        calls, round_ms = self._burst_size() if self.event.bursts and in_bursts else (1, 0)
        rounds = self.event.rounds(self.case)
        if round_ms > SLOW_MS:
            rounds = min(rounds, SLOW_ROUNDS)
        times = timing.interleaved(
            {name: partial(self._burst, name, calls) for name in self.laps},
            device=device, warmup=self.event.warmup, repetitions=rounds,
            flush_l2=calls == 1 and self.event.bursts, prepare=partial(self._prepare, calls),
            calls=calls, seconds=self.event.seconds, most=self.event.most,
        )  # fmt: skip
        return {name: found.figures() for name, found in times.items()}

    def _burst_size(self) -> tuple[int, float]:
        """As many calls a sample as make `BURST_MS` for the fastest; and the ms of a round. One
        on the host, whose clock waits for each call anyway.
        """
        device = self.case["device"]
        if torch.device(device).type != "cuda":
            return 1, 0.0
        fastest, whole = BURST_MS, 0.0
        for name in self.laps:
            taken = self._once_ms(name)
            fastest, whole = min(fastest, taken), whole + taken
        calls = min(MOST_CALLS, max(1, round(BURST_MS / fastest)))
        return calls, calls * whole

    def _once_ms(self, name: str) -> float:
        """ms of one call, the second of two where they are short."""
        taken = 0.0
        for _ in range(2):
            self._prepare(1, name)
            begin = time.perf_counter()
            self.laps[name].run()
            timing.synchronize(self.case["device"])
            taken = (time.perf_counter() - begin) * 1e3
            if taken > 10 * BURST_MS:
                break
        return taken

    def _prepare(self, calls: int, name: str) -> None:
        """Drop what everybody holds, run what the lap needs, and wait.

        A host that ran ahead while a slow rival computed would launch the next one for nothing.
        """
        self.last = name
        for lap in self.laps.values():
            lap.reset()
        self.laps[name].prepare(calls)
        timing.synchronize(self.case["device"])

    def _burst(self, name: str, calls: int) -> object:
        lap = self.laps[name]
        told = lap.run()
        for _ in range(calls - 1):
            lap.reset()
            told = lap.run()
        return told


def workload_lap(
    work: Workload, dy: Tensor, case: Case, judge: Callable[[dict[str, Tensor]], Figures]
) -> Lap:
    """The lap of a workload: "forward", "backward" of a forward outside the clock, or both.

    Args:
        work: what runs.
        dy: the output's gradient.
        case: its `direction` and `launch`.
        judge: holds a graph's replay against the truth and gives the errors as figures.

    Raises:
        Unavailable: a graph away from CUDA.
    """
    direction, launch = case["direction"], case.get("launch", "python")
    if launch == "graph":
        if not dy.is_cuda:
            raise Unavailable("CUDA graphs need a CUDA GPU")
        graph = graphs.capture(work, dy, direction)
        return Lap(graph.replay, figures=judge(graph.results))
    outputs: list[Tensor] = []

    def prepare(calls: int) -> None:
        outputs.clear()
        if direction == "backward":
            outputs.extend(work.forward() for _ in range(calls))

    def run() -> None:
        if direction == "forward":
            work.forward()
        else:
            (outputs.pop() if direction == "backward" else work.forward()).backward(dy)

    return Lap(run, prepare, work.reset)
