"""Study 01's cases and how each is measured: first steps in fresh and shared processes."""

from collections.abc import Mapping, Sequence
from typing import Any

from fusedlib.bench import attempt, fresh
from fusedlib.bench.cases import device_of, grid, require_known, require_least
from measure import transformer_trainer
from models import transformer

STUDY = "01_warmup"
MEASURED_STEPS = 10
TIMEOUT_S = 540.0
ARGUMENTS = ("context_length", "batch_size", "dtype", "attention", "device", "direction")
Case = dict[str, Any]


def problem(
    context_length: int, *, batch_size: int = transformer.BATCH_SIZE, dtype: str = "float32",
    attention: str = "plain", device: str = "auto",
) -> Case:  # fmt: skip
    """What all cases share; `device="auto"` takes the best one."""
    require_least(1, context_length=context_length, batch_size=batch_size)
    return {
        "context_length": context_length, "batch_size": batch_size, "dtype": dtype,
        "attention": attention, "device": device_of(device),
    }  # fmt: skip


def step_cases(
    shared: Case, isolation: str, processes: int, *, models: Sequence[str],
    directions: Sequence[str], count: int, warmups: Sequence[int],
) -> list[Case]:  # fmt: skip
    """Series of `count` steps: every size and direction, in `processes` processes.

    `isolation` is "fresh" (a process for each size) or "shared" (one runs all sizes in order).

    Raises:
        ValueError: an unknown or missing name, no process, or too few steps for the warm-ups.
    """
    if not models or not directions:
        raise ValueError(
            f"models and directions need an entry each, got {list(models)} and {list(directions)}"
        )
    for model in models:
        transformer.config(model)
    require_known("direction", directions, transformer_trainer.DIRECTIONS)
    require_least(1, processes=processes)
    require_known("isolation", isolation, ("fresh", "shared"))
    least = max(warmups) + 2 * MEASURED_STEPS
    if min(warmups) < 0 or count < least:
        raise ValueError(
            f"{count} steps are too few for warm-ups of {list(warmups)}, {MEASURED_STEPS} measured "
            f"and {MEASURED_STEPS} settled ones: need {least}, and no warm-up below 0"
        )
    together = "" if isolation == "fresh" else ",".join(models)
    fields = {
        "experiment": "steps", "provider": "eager", "isolation": isolation, "steps": count,
        "together": together, **shared,
    }  # fmt: skip
    return grid(fields, direction=directions, process=range(1, processes + 1), model=models)


def first_step_cases(
    shared: Case, *, models: Sequence[str], compiled: Sequence[str], stage_processes: int = 1
) -> list[Case]:
    """Cases that take the first step apart: stages, driver calls, and compilation."""
    alone = {"direction": "step", "provider": "eager", "process": 1, **shared}
    return [
        *grid({**alone, "experiment": "stages"}, model=models,
              process=range(1, stage_processes + 1)),
        *grid({**alone, "experiment": "calls"}, model=models),
        *grid({**alone, "experiment": "compilation", "provider": "inductor"}, model=compiled),
    ]  # fmt: skip


class Measure:
    """Measures a case in a process of its own; a shared process's sizes run once, together."""

    def __init__(self) -> None:
        self._runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def __call__(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """The row's figures.

        Raises:
            Unavailable: driver calls of no CUDA GPU.
            MemoryError: the size did not fit.
        """
        arguments = {name: case[name] for name in ARGUMENTS}
        if case["experiment"] == "calls" and case["device"] != "cuda":
            raise attempt.Unavailable("needs a CUDA GPU: elsewhere there are no driver calls")
        if case["experiment"] != "steps":
            arguments |= {"model": case["model"], "provider": case["provider"]}
            target = f"measure.first_step:{case['experiment']}"
            return dict(fresh.run(target, arguments, timeout_s=TIMEOUT_S))
        models = (case["together"] or case["model"]).split(",")
        process = (case["direction"], case["isolation"], case["process"], *models)
        if process not in self._runs:
            arguments |= {"models": models, "steps": case["steps"]}
            target = "measure.transformer_trainer:in_one_process"
            self._runs[process] = fresh.run(target, arguments, timeout_s=TIMEOUT_S)
        figures = self._runs[process][models.index(case["model"])]
        if "oom" in figures:
            raise MemoryError(figures["oom"])
        return dict(figures)
