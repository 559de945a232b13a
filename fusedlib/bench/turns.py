"""Functions that were found right are timed in turns, and what is too good to be true is refused.

Each has a `Turn` after the other, so that drift hits all alike. Ways to launch:

- "python": calls one after another, as a loop makes them. Short ones are timed in bursts back to
  back; a call of more than `BURST_MS` by itself with the L2 flushed before it, which gives the host
  the head start that it has in a loop.
- "graph": a replay of a CUDA graph of the same call, the L2 flushed before each: what the device
  needs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import alarms, check, cuda_graphs, machine, timing
from fusedlib.bench.attempt import Attempt, Unavailable, free_memory
from fusedlib.bench.workload import Outputs, Workload, go_backward, named

BURST_MS = 2.0
MOST_CALLS = 20
# A round that takes longer is not short of samples: fewer rounds, the same for all in it.
SLOW_MS, SLOW_ROUNDS = 100.0, 5
LAUNCHES = ("python", "graph")
Figures = dict[str, Any]
Look = Callable[[], Callable[[Callable[[], dict[str, Tensor]]], object]]


@dataclass
class Turn:
    """What one function does when it is its turn.

    Attributes:
        run: the work, once; it may return the ms of its own parts by name.
        prepare: called before each sample with the number of calls in it, outside the clock.
        reset: called between the calls of a burst.
        figures: of the row, beside the times.
        issue: the work, not waited for, where `run` waits for its parts.
        again: holds what the work gives now, for other operands, against the truth; None where
            nothing does.
        look: instead of `prepare`, gives the operands values whose truth is known; what it gives
            holds the last call of the sample against that truth, after the clock.
    """

    run: Callable[[], object]
    prepare: Callable[[int], object] = lambda calls: None
    reset: Callable[[], object] = lambda: None
    figures: Figures = field(default_factory=dict)
    issue: Callable[[], object] | None = None
    again: Callable[[], object] | None = None
    look: Callable[[int], Callable[[], object]] | None = None


@dataclass
class Checked:
    """A function that was found right: its figures, and what makes its turn of a case, which says
    `direction`, `launch` and `device`.

    `seen_in_clock` is whether what a timed call gave was held against the truth.
    """

    figures: Figures
    turn: Callable[[Mapping[str, Any]], Turn]
    seen_in_clock: bool = False


@dataclass(frozen=True)
class Sampling:
    """How turns are sampled.

    Attributes:
        device: that does the work.
        rounds: measured at least; fewer where they are slow.
        warmup: rounds thrown away.
        seconds: further rounds until so much time has passed; `most` rounds in all.
        most_calls: of a sample; 1 times no short calls several at once.
        flush_l2: whether the L2 is flushed before a call that is alone in its sample.
        flops: of the products that the problem needs.
        moved_bytes: that it must read and write.
    """

    device: str
    rounds: int
    warmup: int = 2
    seconds: float = 0.0
    most: int | None = None
    most_calls: int = MOST_CALLS
    flush_l2: bool = True
    flops: float = 0.0
    moved_bytes: float = 0.0


def timed_together(
    ready: Mapping[str, tuple[Mapping[str, Any], Checked]], sampling: Sampling
) -> Iterator[tuple[str, Attempt[Figures]]]:
    """Time all who are ready, each a case and what was found right; whoever fails gives its reason,
    and the others are timed again. Those of one `session` were timed in turns, sample by sample.
    """
    turns: dict[str, Turn] = {}
    for name, (case, checked) in ready.items():
        tried = Attempt.at(checked.turn, case)
        if tried.value is not None:
            turns[name] = tried.value
            continue
        figures = {**checked.figures, **tried.figures}
        yield name, Attempt(tried.status, tried.reason, figures)
    while turns:
        clock = _Clock(sampling, turns, {name: ready[name][1] for name in turns})
        state = machine.conditions("before")
        timed = Attempt.at(clock.run)
        state |= machine.conditions("after")
        if timed.value is not None:
            session = {"session": datetime.now(UTC).isoformat()}
            for name, figures in timed.value.items():
                facts = {**ready[name][1].figures, **turns[name].figures}
                yield name, Attempt(value={**facts, **figures, **session, **state})
            return
        for name in _gone(timed, turns, ready, clock.last):
            yield name, Attempt(timed.status, timed.reason, ready[name][1].figures)
            del turns[name]
        free_memory()


def _gone(
    timed: Attempt[Any], turns: Mapping[str, Turn],
    ready: Mapping[str, tuple[Mapping[str, Any], Checked]], last: str | None,
) -> list[str]:  # fmt: skip
    """Who is out: of memory the one that holds most, after another failure whose turn it was."""
    if timed.status == "oom":
        return [max(turns, key=lambda name: _peak(ready[name][1].figures, turns[name].figures))]
    return [last] if last is not None and last in turns else list(turns)


def _peak(*of_one: Figures) -> float:
    """What one holds at most, in MiB, wherever its figures have it."""
    return max(float(figures.get("peak_mib") or 0.0) for figures in of_one)


@dataclass
class _Clock:
    """Times the turns of one group.

    Attributes:
        last: whose turn it is, or was.
        by_host_ms: each rival's samples by the second clock.
    """

    sampling: Sampling
    turns: dict[str, Turn]
    checks: dict[str, Checked] = field(default_factory=dict)
    last: str | None = None
    by_host_ms: dict[str, list[float]] = field(default_factory=dict)
    _begun_ns: int | None = None
    _own_parts: set[str] = field(default_factory=set)
    _left: dict[str, int] = field(default_factory=dict)  # samples until one is looked at
    _held: Callable[[], object] | None = None  # of the sample that is looked at

    def run(self) -> dict[str, Figures]:
        """Figures of everybody's times."""
        given = self.sampling
        calls, round_ms = self._burst_size() if given.most_calls > 1 else (1, 0)
        rounds = min(given.rounds, SLOW_ROUNDS) if round_ms > SLOW_MS else given.rounds
        unseen = [name for name, checked in self.checks.items() if not checked.seen_in_clock]
        self.by_host_ms, self._begun_ns, self._left, self._held = {}, None, {}, None
        settings: Figures = {
            "device": given.device, "calls": calls, "flush_l2": calls == 1 and given.flush_l2,
        }  # fmt: skip
        work = {name: partial(self._burst, name, calls) for name in self.turns}
        for name, call in work.items() if given.warmup else ():
            ready = partial(self._prepare, calls, name)
            timing.require_current_stream(call, given.device, ready)
        self._left = {name: alarms.some_of(given.warmup + rounds) for name in unseen}
        times = timing.sampled_in_turns(
            work, **settings, warmup=given.warmup, repetitions=rounds,
            prepare=partial(self._prepare, calls), seconds=given.seconds, most=given.most,
        )  # fmt: skip
        self._end_sample()
        nothing = timing.in_turns({"": lambda: None}, **settings, warmup=3, repetitions=20)[""]
        measured = {name: timed.figures() for name, timed in times.items()}
        for name, figures in measured.items():
            self.last = name
            least_ms = min(times[name].samples_ms) * calls
            alarms.require_possible_time(
                figures["median_ms"], given.flops, given.device, given.moved_bytes
            )  # fmt: skip
            if name not in self._own_parts:
                alarms.require_cheap_nothing(min(nothing.samples_ms) * calls, least_ms)
                alarms.require_clocks_agree(least_ms, min(self.by_host_ms.get(name, [0.0])))
            if (again := self.turns[name].again) is not None:
                again()
        return measured

    def _burst_size(self) -> tuple[int, float]:
        """As many calls a sample as make `BURST_MS` for the fastest; and the ms of a round. One
        on the host, whose clock waits for each call anyway.
        """
        device = self.sampling.device
        if torch.device(device).type != "cuda":
            return 1, 0.0
        fastest, whole = BURST_MS, 0.0
        for name in self.turns:
            taken = timing.second_call_ms(
                self.turns[name].run, device, prepare=partial(self._prepare, 1, name),
                enough=10 * BURST_MS,
            )  # fmt: skip
            fastest, whole = min(fastest, taken), whole + taken
        calls = min(self.sampling.most_calls, max(1, round(BURST_MS / fastest)))
        return calls, calls * whole

    def _prepare(self, calls: int, name: str) -> None:
        """Drop what everybody holds, run what the turn needs, and wait.

        A host that ran ahead while a slow rival computed would launch the next one for nothing.
        """
        self._end_sample()
        self.last = name
        for turn in self.turns.values():
            turn.reset()
        turn = self.turns[name]
        self._left[name] = self._left.get(name, 0) - 1
        if self._left[name]:
            turn.prepare(calls)
        elif turn.look:
            self._held = turn.look(calls)
        else:
            if turn.again is not None:
                turn.again()
                self.checks[name].seen_in_clock = True
            turn.prepare(calls)
        timing.synchronize(self.sampling.device)
        self._begun_ns = alarms.second_clock_ns()

    def _end_sample(self) -> None:
        """Read the second clock where a sample was begun; timers must be what they were. What a
        sample gave that is looked at must be right.
        """
        timing.synchronize(self.sampling.device)
        if self._begun_ns is not None and self.last is not None:
            taken_ms = (alarms.second_clock_ns() - self._begun_ns) / 1e6
            self.by_host_ms.setdefault(self.last, []).append(taken_ms)
        self._begun_ns = None
        alarms.require_own_timers()
        if self._held is not None and self.last is not None:
            held, self._held = self._held, None
            held()
            self.checks[self.last].seen_in_clock = True

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
    work: Workload, dy: Outputs, case: Mapping[str, Any],
    check_replay: Callable[[dict[str, Tensor]], Figures],
    again: Callable[[Callable[[], dict[str, Tensor]]], object] | None = None,
    vary: Callable[[], object] = lambda: None,
    look: Look | None = None,
) -> Turn:  # fmt: skip
    """The turn of a workload: "forward", "backward" of a forward outside the clock, or both, as the
    case's `direction` says.

    Args:
        check_replay: holds a graph's replay against the truth and gives the errors as figures.
        again: holds what a call gives against the truth, for other operands in the same memory.
        vary: draws the operands anew before each sample.
        look: gives the operands values of known truth; what it gives holds results against them.

    Raises:
        Unavailable: a graph away from CUDA.
    """
    direction, launch = case["direction"], case.get("launch", "python")

    def looked_at(
        prepare: Callable[[int], object], results: Callable[[], dict[str, Tensor]], calls: int
    ) -> Callable[[], object]:  # fmt: skip
        holds = look()  # type: ignore[misc]
        prepare(calls)
        return partial(holds, results)

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
            again=again and partial(again, replayed),
            look=look and partial(looked_at, lambda calls: None, lambda: graph.results),
        )  # fmt: skip
    outputs: list[Any] = []
    given: list[Any] = []  # by the last call, which nobody asks for but a look

    def ready(calls: int) -> None:
        outputs.clear()
        if direction == "backward":
            outputs.extend(work.forward() for _ in range(calls))

    def prepare(calls: int) -> None:
        vary()
        ready(calls)

    def run() -> None:
        y = outputs.pop() if direction == "backward" else work.forward()
        if direction != "forward":
            go_backward(y, dy)
        given.append(y)

    def reset() -> None:
        given.clear()
        work.reset()

    def called() -> dict[str, Tensor]:
        gave = named(given.pop())
        for name, y in gave.items():
            alarms.require_plain(name, y)
        return {**{name: y.detach() for name, y in gave.items()}, **work.gradients()}

    def results() -> dict[str, Tensor]:
        outputs.clear()
        with alarms.no_new_threads():
            return check.results_of(work, dy, backward=direction != "forward")

    return Turn(
        run, prepare, reset, again=again and partial(again, results),
        look=look and partial(looked_at, ready, called),
    )  # fmt: skip
