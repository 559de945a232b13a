"""The one race: every rival is checked against the reference, then all are timed in turns.

A study says what its cases are and makes a `Setup` of them: one problem with its inputs and its
truth. A rival is checked once on a setup; cases that differ in their rival alone are timed
together, a `Turn` after the other, so that drift hits all alike. Each case gives a row, whatever
happens. What is too good to be true gives a row without a time (`alarms`).

Ways to launch:

- "python": calls one after another, as a loop makes them. Short ones are timed in bursts back to
  back; a call of more than `BURST_MS` by itself with the L2 flushed before it, which gives the host
  the head start that it has in a loop.
- "graph": a replay of a CUDA graph of the same call, the L2 flushed before each: what the device
  needs.

How a rival runs alone for seconds on end, as training does, measures `fusedlib.bench.sustained`.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fusedlib.bench import alarms, check, cuda_graphs, machine, rivals, timing
from fusedlib.bench.attempt import Attempt, Unavailable, forget_compiled, free_memory
from fusedlib.bench.cases import Case, Row, Skip, skip_none
from fusedlib.bench.rivals import Outputs, Workload

BURST_MS = 2.0
MOST_CALLS = 20
# A round that takes longer is not short of samples: fewer rounds, the same for all in it.
SLOW_MS, SLOW_ROUNDS = 100.0, 5
LAUNCHES = ("python", "graph")
Figures = dict[str, Any]


@dataclass
class Turn:
    """What one rival does when it is its turn.

    Attributes:
        run: the work, once; it may return the ms of its own parts by name.
        prepare: called before each sample with the number of calls in it, outside the clock.
        reset: called between the calls of a burst.
        figures: of the row, beside the times.
        issue: the work, not waited for, where `run` waits for its parts.
        again: holds what the work gives now, for other operands, against the truth.
    """

    run: Callable[[], object]
    prepare: Callable[[int], object] = lambda calls: None
    reset: Callable[[], object] = lambda: None
    figures: Figures = field(default_factory=dict)
    issue: Callable[[], object] | None = None
    again: Callable[[], object] = lambda: None


@dataclass
class Checked:
    """A rival that was found right: its figures, and what makes its turn of a case.

    `seen_in_clock` is whether it was held against the truth between two samples.
    """

    figures: Figures
    turn: Callable[[Case], Turn]
    seen_in_clock: bool = False


class Setup(Protocol):
    """One problem, made once: its inputs, and what is right."""

    def check(self, case: Case) -> Checked:
        """Set a case's rival up and hold it against the truth.

        Raises:
            Refused: it is wrong, too large or cannot run here.
        """


@dataclass(frozen=True)
class Race:
    """How a study races.

    Attributes:
        setup: makes the setup of a case.
        fields: the fields of a case that decide its setup.
        rival_fields: further fields that decide how a rival is set up on it.
        available: raises `Unavailable` for what cannot run here, before anything is made.
        settings: torch's settings around a setup.
        work: figures that a case implies, such as its FLOPs.
        warmup: rounds thrown away.
        rounds: rounds measured at least, by a case.
        seconds: further rounds until so much time has passed; `most` rounds in all.
        bursts: whether short calls are timed several at once.
    """

    setup: Callable[[Case], Setup]
    fields: tuple[str, ...]
    rival_fields: tuple[str, ...] = ()
    available: Callable[[Case], None] = lambda case: None
    settings: Callable[[Case], AbstractContextManager[Any]] = lambda case: nullcontext()
    work: Callable[[Case], Figures] = lambda case: {}
    warmup: int = 2
    rounds: Callable[[Case], int] = lambda case: case["repetitions"]
    seconds: float = 0.0
    most: int | None = None
    bursts: bool = True


def race(
    spec: Race, cases: Iterable[Case], skip: Skip = skip_none
) -> Generator[Row, None, None]:  # fmt: skip
    """Check and time all cases, setup by setup, and give a row of each as soon as it is measured.

    Rows with one `session` were timed in turns, sample by sample. Until the last row is taken, or
    the generator is closed, torch's settings are those of the cases being raced.

    Args:
        skip: asked of all cases that would be timed together, before the first is measured: a time
            means something beside the others. By default all are measured.
    """
    refused: list[Row] = []
    by_setup: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Case]]] = {}
    for case in cases:
        tried = Attempt.at(spec.available, case)
        if not tried.ok:
            refused.append(Row(case, tried.status, tried.reason, tried.figures))
            continue
        alike = tuple((k, v) for k, v in case.items() if k != "provider")
        groups = by_setup.setdefault(tuple(case[name] for name in spec.fields), {})
        if case not in groups.setdefault(alike, []):
            groups[alike].append(case)
    todo = [[g for g in groups.values() if not skip(g)] for groups in by_setup.values()]
    return _rows(spec, refused, [groups for groups in todo if groups])


def _rows(
    spec: Race, refused: list[Row], todo: list[list[list[Case]]]
) -> Generator[Row, None, None]:  # fmt: skip
    yield from refused
    for groups in todo:
        with spec.settings(groups[0][0]):
            yield from _of_setup(spec, groups)
        free_memory()


def _of_setup(spec: Race, groups: list[list[Case]]) -> Iterator[Row]:
    """All groups of one setup: make it, check every rival once, time group by group."""
    forget_compiled()
    setup = Attempt.at(spec.setup, groups[0][0])
    checked: dict[tuple[Any, ...], Attempt[Checked]] = {}
    for group in groups:
        ready: dict[str, tuple[Case, Checked]] = {}
        for case in group:
            if setup.value is None:
                yield Row(case, setup.status, f"the check: {setup.reason}")
                continue
            key = tuple(case[name] for name in ("provider", *spec.rival_fields))
            if key not in checked:
                checked[key] = Attempt.at(_check, setup.value, case)
            tried = checked[key]
            if tried.value is None:
                yield Row(case, tried.status, tried.reason, tried.figures)
            else:
                ready[case["provider"]] = case, tried.value
        yield from _timed_together(spec, ready)


def _check(setup: Setup, case: Case) -> Checked:
    """The rival, who may not replace a timer in the meantime."""
    try:
        return setup.check(case)
    finally:
        alarms.require_own_timers()


def _timed_together(spec: Race, ready: dict[str, tuple[Case, Checked]]) -> Iterator[Row]:
    """Time all who are ready in turns; whoever fails gives a row, the others are timed again."""
    turns: dict[str, Turn] = {}
    for name, (case, checked) in ready.items():
        tried = Attempt.at(checked.turn, case)
        if tried.value is not None:
            turns[name] = tried.value
            continue
        yield Row(case, tried.status, tried.reason, {**checked.figures, **tried.figures})
    while turns:
        checks = {name: ready[name][1] for name in turns}
        clock = _Clock(spec, turns, ready[next(iter(turns))][0], checks)
        state = machine.conditions("before")
        timed = Attempt.at(clock.run)
        state |= machine.conditions("after")
        if timed.value is not None:
            session = {"session": datetime.now(UTC).isoformat()}
            for name, figures in timed.value.items():
                case, checked = ready[name]
                facts = {**checked.figures, **turns[name].figures, **spec.work(case)}
                yield Row(case, figures={**facts, **figures, **session, **state})
            return
        for name in _gone(timed, turns, ready, clock.last):
            case, checked = ready[name]
            yield Row(case, timed.status, timed.reason, checked.figures)
            del turns[name]
        free_memory()


def _gone(
    timed: Attempt[Any], turns: dict[str, Turn], ready: dict[str, tuple[Case, Checked]],
    last: str | None,
) -> list[str]:  # fmt: skip
    """Who is out: of memory the one that holds most, after another failure whose turn it was."""
    if timed.status == "oom":
        return [max(turns, key=lambda name: ready[name][1].figures.get("peak_mib") or 0.0)]
    return [last] if last in turns else list(turns)


@dataclass
class _Clock:
    """Times the turns of one group.

    Attributes:
        last: whose turn it is, or was.
        by_host_ms: each rival's samples by the second clock.
    """

    spec: Race
    turns: dict[str, Turn]
    case: Case
    checks: dict[str, Checked] = field(default_factory=dict)
    last: str | None = None
    by_host_ms: dict[str, list[float]] = field(default_factory=dict)
    _begun_ns: int | None = None
    _own_parts: set[str] = field(default_factory=set)
    _left: dict[str, int] = field(default_factory=dict)  # samples until the look between two

    def run(self) -> dict[str, Figures]:
        """Figures of everybody's times."""
        device, in_bursts = self.case["device"], self.case.get("launch", "python") == "python"
        calls, round_ms = self._burst_size() if self.spec.bursts and in_bursts else (1, 0)
        rounds = self.spec.rounds(self.case)
        if round_ms > SLOW_MS:
            rounds = min(rounds, SLOW_ROUNDS)
        unseen = [name for name, checked in self.checks.items() if not checked.seen_in_clock]
        self._left = {name: alarms.some_of(self.spec.warmup + rounds) for name in unseen}
        self.by_host_ms, self._begun_ns = {}, None
        settings: Figures = {
            "device": device, "calls": calls, "flush_l2": calls == 1 and self.spec.bursts,
        }  # fmt: skip
        times = timing.in_turns(
            {name: partial(self._burst, name, calls) for name in self.turns}, **settings,
            warmup=self.spec.warmup, repetitions=rounds, prepare=partial(self._prepare, calls),
            seconds=self.spec.seconds, most=self.spec.most,
        )  # fmt: skip
        self._end_sample()
        nothing = timing.in_turns({"": lambda: None}, **settings, warmup=3, repetitions=20)[""]
        work = self.spec.work(self.case)
        measured = {name: timed.figures() for name, timed in times.items()}
        for name, figures in measured.items():
            self.last = name
            least_ms = min(times[name].samples_ms) * calls
            alarms.require_possible_time(
                figures["median_ms"], work.get("flops", 0), device,
                work.get("compulsory_bytes", 0),
            )  # fmt: skip
            if name not in self._own_parts:
                alarms.require_cheap_nothing(min(nothing.samples_ms) * calls, least_ms)
                alarms.require_clocks_agree(least_ms, min(self.by_host_ms.get(name, [0.0])))
            self.turns[name].again()
        return measured

    def _burst_size(self) -> tuple[int, float]:
        """As many calls a sample as make `BURST_MS` for the fastest; and the ms of a round. One
        on the host, whose clock waits for each call anyway.
        """
        device = self.case["device"]
        if torch.device(device).type != "cuda":
            return 1, 0.0
        fastest, whole = BURST_MS, 0.0
        for name in self.turns:
            taken = timing.second_call_ms(
                self.turns[name].run, device, prepare=partial(self._prepare, 1, name),
                enough=10 * BURST_MS,
            )  # fmt: skip
            fastest, whole = min(fastest, taken), whole + taken
        calls = min(MOST_CALLS, max(1, round(BURST_MS / fastest)))
        return calls, calls * whole

    def _prepare(self, calls: int, name: str) -> None:
        """Drop what everybody holds, run what the turn needs, and wait.

        A host that ran ahead while a slow rival computed would launch the next one for nothing.
        """
        self._end_sample()
        self.last = name
        for turn in self.turns.values():
            turn.reset()
        self._left[name] = self._left.get(name, 0) - 1
        if not self._left[name]:
            self.turns[name].again()
            self.checks[name].seen_in_clock = True
        self.turns[name].prepare(calls)
        timing.synchronize(self.case["device"])
        self._begun_ns = alarms.second_clock_ns()

    def _end_sample(self) -> None:
        """Read the second clock where a sample was begun; timers must be what they were."""
        timing.synchronize(self.case["device"])
        if self._begun_ns is not None and self.last is not None:
            taken_ms = (alarms.second_clock_ns() - self._begun_ns) / 1e6
            self.by_host_ms.setdefault(self.last, []).append(taken_ms)
        self._begun_ns = None
        alarms.require_own_timers()

    def _burst(self, name: str, calls: int) -> object:
        turn = self.turns[name]
        parts = turn.run()
        for _ in range(calls - 1):
            turn.reset()
            parts = turn.run()
        if isinstance(parts, Mapping):
            self._own_parts.add(name)
        return parts


def workload_turn(
    work: Workload, dy: Outputs, case: Case,
    check_replay: Callable[[dict[str, Tensor]], Figures],
    again: Callable[[Callable[[], dict[str, Tensor]]], object] = lambda results: None,
    vary: Callable[[], object] = lambda: None,
) -> Turn:  # fmt: skip
    """The turn of a workload: "forward", "backward" of a forward outside the clock, or both.

    Args:
        check_replay: holds a graph's replay against the truth and gives the errors as figures.
        again: holds what a call gives against the truth, for other operands in the same memory.
        vary: draws the operands anew before each sample.

    Raises:
        Unavailable: a graph away from CUDA.
    """
    direction, launch = case["direction"], case.get("launch", "python")
    if launch == "graph":
        if torch.device(case["device"]).type != "cuda":
            raise Unavailable("CUDA graphs need a CUDA GPU")
        graph = cuda_graphs.capture(work, dy, direction)

        def replayed() -> dict[str, Tensor]:
            graph.replay()
            timing.synchronize(case["device"])
            return graph.results

        return Turn(
            graph.replay, lambda calls: vary(), figures=check_replay(graph.results),
            again=partial(again, replayed),
        )  # fmt: skip
    outputs: list[Any] = []

    def prepare(calls: int) -> None:
        outputs.clear()
        vary()
        if direction == "backward":
            outputs.extend(work.forward() for _ in range(calls))

    def run() -> None:
        if direction == "forward":
            work.forward()
        else:
            rivals.go_backward(outputs.pop() if direction == "backward" else work.forward(), dy)

    def results() -> dict[str, Tensor]:
        outputs.clear()
        with alarms.no_new_threads():
            return check.results_of(work, dy, backward=direction != "forward")

    return Turn(run, prepare, work.reset, again=partial(again, results))
