"""Measuring many cases, one after the other: each gets a row, whatever happens to it."""

from collections.abc import Callable, Generator, Iterable
from typing import Any

from fusedlib.bench import machine
from fusedlib.bench.attempt import Attempt
from measure.racing.cases import Case, Row, Skip, skip_none


def sweep(
    cases: Iterable[Case], measure: Callable[[Case], dict[str, Any]], skip: Skip = skip_none
) -> Generator[Row, None, None]:
    """Measure the cases, and give a row of each as soon as it is done.

    `measure` returns the row's figures, or raises what `Attempt.at` knows: no case ends the sweep.
    On NVIDIA cards each row carries the card's clocks, power and temperature before and after.

    Args:
        skip: asked of each case before the first is measured. By default all are measured.
    """
    todo = [case for case in cases if not skip([case])]
    return (_measured(case, measure) for case in todo)


def _measured(case: Case, measure: Callable[[Case], dict[str, Any]]) -> Row:
    state = machine.conditions("before")
    tried = Attempt.at(measure, case)
    state |= machine.conditions("after")
    figures = {**tried.figures, **(tried.value or {}), **state}
    return Row(case, tried.status, tried.reason, figures)
