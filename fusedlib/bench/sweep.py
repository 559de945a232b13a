"""Measuring many cases: each gets a row, whatever happens to it."""

import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fusedlib.bench import machine
from fusedlib.bench.progress import progress
from fusedlib.bench.results import Recorder, ResultsError, Unavailable

Case = Mapping[str, Any]


def default_label(case: Case) -> str:
    """The values of a case in one line."""
    return " · ".join(str(v) for v in case.values() if v is not None)


def sweep(
    recorder: Recorder, cases: Iterable[Case], measure: Callable[[Case], dict[str, Any]],
    label: Callable[[Case], str] = default_label,
) -> None:  # fmt: skip
    """Measure the cases that have no row yet and record each as soon as it is done.

    `measure` returns the row's figures, among them `status` and `reason` where the case is not ok.
    `Unavailable` and a package that is not installed give a row `unavailable` with the reason,
    running out of memory one with `oom`, any other exception one with `failed` and its message: no
    case ends the sweep. Only a row that cannot be written (`ResultsError`) and ctrl-C do. On NVIDIA
    cards each row carries the card's clocks, power and temperature before and after.
    """
    todo = recorder.missing(cases)
    with progress(recorder.study, len(todo)) as shown:
        for case in todo:
            shown.case(label(case))
            before = machine.conditions()
            figures, status, reason = outcome(measure, case)
            state = machine.before_and_after(before, machine.conditions())
            recorder.append(case, {**figures, **state}, status=status, reason=reason)
            shown.done()
    print(recorder.summary())


def outcome(
    measure: Callable[[Case], dict[str, Any]], case: Case
) -> tuple[dict[str, Any], str, str | None]:
    """Figures, status and reason of one case."""
    try:
        figures = dict(measure(case))
    except ResultsError:
        raise
    except Unavailable as error:
        return {}, "unavailable", str(error)
    except Exception as error:
        if package := _missing_package(error):
            return {}, "unavailable", f"the package {package} is not installed"
        if is_out_of_memory(error):
            _free_memory()
            return {}, "oom", _first_line(error)
        return {}, "failed", f"{type(error).__name__}: {_first_line(error)} ({_where(error)})"
    status = figures.pop("status", "ok")
    return figures, status, figures.pop("reason", None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the device or in the host."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return "out of memory" in text or "can't allocate memory" in text


def _missing_package(error: BaseException) -> str | None:
    """The package that an import did not find; None for other errors and modules of our own."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    return None if package == "fusedlib" else package


def _free_memory() -> None:
    """Give the failed case's memory back, so that the next one finds it."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


def _where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
