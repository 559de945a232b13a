"""Measuring many cases: each gets a row, whatever happens to it."""

from collections.abc import Callable, Iterable
from typing import Any

from fusedlib.bench import machine
from fusedlib.bench.attempt import Attempt
from fusedlib.bench.cases import Case, differing, label
from measure.recording.progress import progress
from measure.recording.results import Recorder


def sweep(
    recorder: Recorder, cases: Iterable[Case], measure: Callable[[Case], dict[str, Any]]
) -> None:
    """Measure the cases that have no row yet and record each as soon as it is done.

    `measure` returns the row's figures, or raises what `Attempt.at` knows: no case ends the sweep.
    Only a row that cannot be written (`ResultsError`), ctrl-C and the end of `make record`'s time
    do. On NVIDIA cards each row carries the card's clocks, power and temperature before and after.
    """
    todo = recorder.missing(cases)
    names = differing(todo)
    with progress(recorder.study, len(todo)) as shown:
        for case in todo:
            if recorder.is_over():
                break
            shown.case(label(case, names))
            state = machine.conditions("before")
            tried = Attempt.at(measure, case)
            state |= machine.conditions("after")
            figures = {**tried.figures, **(tried.value or {}), **state}
            recorder.append(case, figures, status=tried.status, reason=tried.reason)
            shown.done()
    print(recorder.summary())
