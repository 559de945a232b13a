"""How a race is measured: its entrants are checked, then timed in turns; each case gives a row."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from fusedlib.bench import alarms, machine
from fusedlib.bench.attempt import Attempt, forget_compiled, free_memory
from fusedlib.bench.sustained import Load
from fusedlib.bench.turns import MOST_CALLS, Checked, Figures, Sampling, timed_together
from study.cases import Case, Row


class Setup(Protocol):
    """One problem: its inputs, and what is right."""

    def check(self, case: Case) -> Checked:
        """Set a case's provider up and hold it against the truth; raises `Refused`."""


@dataclass
class _Slot:
    """The one setup that is kept for the next races: what was drawn, and who was found right."""

    key: tuple[Any, ...] = ()
    setup: Attempt[Setup] | None = None
    checked: dict[tuple[Any, ...], Attempt[Checked]] = field(default_factory=dict)


_SLOT = _Slot()


def free() -> None:
    """Give back the setup that is kept for the next race."""
    _SLOT.key, _SLOT.setup = (), None
    _SLOT.checked.clear()
    free_memory()


def timed(
    race: Sequence[Case], setup: Callable[[Case], Setup], *, same: Sequence[str],
    checked_by: Sequence[str] = (), available: Callable[[Case], None] = lambda case: None,
    settings: Callable[[Case], AbstractContextManager[Any]] = lambda case: nullcontext(),
    work: Callable[[Case], Figures] = lambda case: {}, rounds: int = 15, warmup: int = 2,
    seconds: float = 0.0, most: int | None = None, bursts: bool = True, load: Load | None = None,
) -> list[Row]:  # fmt: skip
    """Check every entrant of a race, time those that are right in turns, and give a row each.

    Args:
        setup: makes the problem of a case.
        same: the fields that decide the setup. The next race in which they are equal finds it, and
            whoever was found right on it; `checked_by` decide how a provider is set up on it.
        available: raises `Unavailable` for what cannot run here, before anything is made.
        work: figures that a case implies, such as its FLOPs.
        rounds: measured at least, after `warmup` that are thrown away; further ones until so many
            `seconds` have passed, `most` in all.
        bursts: whether short calls are timed several at once.
        load: under which each entrant works alone for the cases' seconds.
    """
    rows: list[Row] = []
    possible: list[Case] = []
    ready: dict[str, tuple[Case, Checked]] = {}
    for case in race:
        tried = Attempt.at(available, case)
        if tried.ok:
            possible.append(case)
        else:
            rows.append(Row(case, tried.status, tried.reason, tried.figures))
    if not possible:
        return rows
    with settings(possible[0]):
        _make(setup, possible[0], (setup, *(possible[0].get(name) for name in same)))
        for case in possible:
            attempt = _checked(case, checked_by)
            if attempt.value is not None:
                entrant = attempt.value if load is None else _under(load, attempt.value)
                ready[str(case["provider"])] = case, entrant
            else:
                rows.append(Row(case, attempt.status, attempt.reason, attempt.figures))
        if ready:
            case = possible[0]
            implied = work(case)
            in_bursts = bursts and case.get("launch", "python") == "python"
            sampling = Sampling(
                case["device"], rounds, warmup, seconds, most,
                most_calls=MOST_CALLS if in_bursts else 1, flush_l2=bursts,
                flops=implied.get("flops", 0.0), moved_bytes=implied.get("compulsory_bytes", 0.0),
            )  # fmt: skip
            for name, one in timed_together(ready, sampling):
                figures = one.figures if one.value is None else {**one.value, **implied}
                rows.append(Row(ready[name][0], one.status, one.reason, figures))
    return rows


def _under(load: Load, one: Checked) -> Checked:
    return Checked(one.figures, lambda case: load.turn(one.turn(case), case["seconds"]))


def _make(setup: Callable[[Case], Setup], case: Case, key: tuple[Any, ...]) -> None:
    """Have the slot hold the setup of a case."""
    if _SLOT.key != key:
        free()
        forget_compiled()
        _SLOT.key, _SLOT.setup = key, Attempt.at(setup, case)


def _checked(case: Case, checked_by: Sequence[str]) -> Attempt[Checked]:
    """What became of a provider on the slot's setup."""
    setup = _SLOT.setup
    assert setup is not None
    if setup.value is None:
        return Attempt(setup.status, f"the check: {setup.reason}")
    key = tuple(case.get(name) for name in ("provider", *checked_by))
    if key not in _SLOT.checked:
        with alarms.own_timers():
            _SLOT.checked[key] = Attempt.at(setup.value.check, case)
    return _SLOT.checked[key]


def loaded(race: Sequence[Case], setup: Callable[[Case], Setup], **how: Any) -> list[Row]:
    """A race under load: each entrant works alone for the cases' `seconds` without a pause, heated
    before. What a turn issues must not wait for the card, or it rests between two calls.
    """

    load = _load(race[0]["device"])
    return timed(race, setup, load=load, rounds=1, warmup=0, bursts=False, **how)


_load = cache(Load)  # who comes next need not be heated anew


def each(race: Iterable[Case], measure: Callable[[Case], Figures]) -> list[Row]:
    """Measure every case by itself, as memory or a process of its own: no case ends the others.

    On NVIDIA cards each row carries the card's clocks, power and temperature before and after.
    """
    return [_measured(case, measure) for case in race]


def _measured(case: Case, measure: Callable[[Case], Figures]) -> Row:
    state = machine.conditions("before")
    tried = Attempt.at(measure, case)
    state |= machine.conditions("after")
    return Row(case, tried.status, tried.reason, {**tried.figures, **(tried.value or {}), **state})
