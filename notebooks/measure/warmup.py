"""Study 01's cases and how each is measured: first steps in fresh and shared processes."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from fusedlib.bench import attempt, fresh
from fusedlib.bench.cases import device_of, grid, require_known, require_least
from measure import study, transformer_trainer
from measure.study import Experiment, PerRun, Positive, Study
from models import transformer

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


# --- the study -----------------------------------------------------------------------------------


Processes = Annotated[int, Field(ge=1, le=100)]


class Sizes(study.Sizes):
    """Models, steps and processes of study 01."""

    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """cuda, mps, cpu, or auto for the best there is"""
    models: list[str] = ["nano", "micro"]
    """sizes of the Transformer, smallest first"""
    directions: list[str] = ["forward", "backward", "forward+backward", "step"]
    """what a step does"""
    warmups: list[int] = [0, 1, 2, 5]
    """warm-up steps the tables compare"""
    steps: Annotated[int, Field(ge=20)] = 30
    """steps each process records from its very first"""
    processes: Processes = 2
    """fresh processes for each size and direction"""
    shared_processes: Processes = 1
    """processes that run all sizes one after the other"""
    stage_processes: Processes = 1
    """fresh processes for the stages of the first step"""
    context_length: Positive = 16
    """tokens a sequence"""
    batch_size: Positive = 4
    """sequences a step"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the weights"""
    attention: Literal["plain", "sdpa"] = "plain"
    """plain softmax(QKᵀ)V as published, or sdpa"""
    compiled: list[str] = ["nano"]
    """sizes whose first compiled step is timed"""


def _cases(sizes: Sizes) -> list[Case]:
    shared = problem(
        sizes.context_length, batch_size=sizes.batch_size, dtype=sizes.dtype,
        attention=sizes.attention, device=sizes.device,
    )  # fmt: skip
    options: dict[str, Any] = {
        "models": sizes.models, "directions": sizes.directions, "count": sizes.steps,
        "warmups": sizes.warmups,
    }  # fmt: skip
    return [
        *step_cases(shared, "fresh", sizes.processes, **options),
        *step_cases(shared, "shared", sizes.shared_processes, **options),
        *first_step_cases(
            shared, models=sizes.models, compiled=sizes.compiled,
            stage_processes=sizes.stage_processes,
        ),
    ]  # fmt: skip


STUDY = Study(
    "01_warmup", Sizes, [Experiment("first steps", PerRun(lambda sizes: Measure()), _cases)]
)  # fmt: skip
