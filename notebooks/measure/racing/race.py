"""The one race of studies: every rival is checked, then all are timed in turns.

A study says what its cases are and makes a `Setup` of them: one problem with its inputs and its
truth. A rival is checked once on a setup; cases that differ in their rival alone are timed
together, a `Turn` after the other (`fusedlib.bench.turns`). Each case gives a row, whatever
happens. What is too good to be true gives a row without a time (`fusedlib.bench.alarms`).

How a rival runs alone for seconds on end, as training does, measures `measure.racing.sustained`.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from fusedlib.bench import alarms
from fusedlib.bench.attempt import Attempt, forget_compiled, free_memory
from fusedlib.bench.turns import MOST_CALLS, Checked, Figures, Sampling, timed_together
from measure.racing.cases import Case, Row, Skip, skip_none


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
    with alarms.own_timers():
        return setup.check(case)


def _timed_together(spec: Race, ready: dict[str, tuple[Case, Checked]]) -> Iterator[Row]:
    """Time all who are ready; each case's figures are with what it implies."""
    if not ready:
        return
    case, _ = next(iter(ready.values()))
    work, in_bursts = spec.work(case), spec.bursts and case.get("launch", "python") == "python"
    sampling = Sampling(
        case["device"], spec.rounds(case), spec.warmup, spec.seconds, spec.most,
        most_calls=MOST_CALLS if in_bursts else 1, flush_l2=spec.bursts,
        flops=work.get("flops", 0.0), moved_bytes=work.get("compulsory_bytes", 0.0),
    )  # fmt: skip
    for name, timed in timed_together(ready, sampling):
        case, _ = ready[name]
        figures = {**timed.value, **spec.work(case)} if timed.value is not None else timed.figures
        yield Row(case, timed.status, timed.reason, figures)
