"""Study 05's cases and how each is measured: first steps in fresh and shared processes."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from fusedlib.bench import attempt
from fusedlib.bench.arguments import require_known, require_least
from measure import study
from measure.racing import fresh
from measure.racing.cases import device_of, grid
from measure.study import Column, Experiment, PerRun, Positive, Study
from models import transformer
from study import trainer as transformer_trainer

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
            target = "study.trainer:in_one_process"
            self._runs[process] = fresh.run(target, arguments, timeout_s=TIMEOUT_S)
        figures = self._runs[process][models.index(case["model"])]
        if "oom" in figures:
            raise MemoryError(figures["oom"])
        return dict(figures)


# --- the study -----------------------------------------------------------------------------------


Processes = Annotated[int, Field(ge=1, le=100)]


class Sizes(study.Sizes):
    """Models, steps and processes of study 05."""

    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """cuda, mps, cpu, or auto for the best there is"""
    models: list[str] = ["nano", "micro"]
    """sizes of the Transformer, smallest first"""
    directions: list[str] = ["forward+backward"]
    """what a step does: forward, backward, forward+backward or step"""
    warmups: list[int] = [0, 1, 2, 5]
    """warm-up steps the tables compare"""
    steps: Annotated[int, Field(ge=20)] = 30
    """steps each process records from its very first"""
    processes: Processes = 1
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
    compiled: list[str] = []
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


# --- what its columns mean -----------------------------------------------------------------------

BOTH = "forward+backward"
SAMPLES = ["samples_ms", "forward_samples_ms"]
STAGES = ["gemm_ms", "gemm_again_ms", "corner_ms", "corner_again_ms", "first_ms", "settled_ms"]
COLUMNS = {
    "model": Column("size", names={name: name for name in transformer.SIZES}),
    "direction": Column(
        "a step does",
        names={"forward": "forward", "backward": "backward", BOTH: "forward and backward",
               "step": "forward, backward and AdamW"},
    ),
    "isolation": Column(
        "process", names={"fresh": "one process a size", "shared": "one process for all sizes"}
    ),
    "source": Column(
        "series",
        names={"001": "course report", "004": "warm-up notebook", "fresh": "one process a size",
               "shared": "one process for all sizes"},
    ),
    "origin": Column("origin", names={"published": "published", "measured": "measured"}),
    "experiment": Column(
        "experiment",
        names={"steps": "series of steps", "stages": "stages of a first step",
               "calls": "driver calls", "compilation": "compilation"},
    ),
    "warmup_steps": Column(
        "warm-up", names={0: "no warm-up", 1: "one step", 2: "two steps", 5: "five steps"}
    ),
    "step": Column("step of the process", ",d"),
    "late_ms": Column("late step", "3 ms", log=True),
    "extra_ms": Column("first step above a late one", "3 ms", log=True),
    "added_ms": Column("added to the mean of ten by the first step", "3 ms", log=True),
    "over_late": Column("time over a late step", "3×", log=True),
    "mean_ms": Column("mean", "4 ms"),
    "std_ms": Column("standard deviation", "4 ms"),
    "forward_share": Column("share of the forward pass", "2%"),
    "gemm_extra_ms": Column("matrix product", "3 ms"),
    "corner_extra_ms": Column("step on sixteen tokens", "3 ms"),
    "whole_extra_ms": Column("whole step", "2 ms"),
}  # fmt: skip


def described(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them, in ms.

    A late step is the median of the last ten of its process (`late_ms`). `extra_ms` is the first
    step above it, `added_ms` what a mean of ten steps without warm-up has of that, `over_late` this
    mean over a late step. Of stages, `gemm_extra_ms`, `corner_extra_ms` and `whole_extra_ms` are
    the first time above the second, or above a late step.
    """
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *SAMPLES, *STAGES])))
    figures = rows[STAGES].apply(pd.to_numeric, errors="coerce")
    late = rows["samples_ms"].map(_late).astype(float)
    extra = rows["samples_ms"].map(lambda s: s[0] if isinstance(s, list) else None) - late
    return rows.assign(
        late_ms=late, extra_ms=extra.astype(float), source=rows["isolation"], origin="measured",
        warmup_steps=0,
        added_ms=extra.astype(float) / MEASURED_STEPS,
        over_late=rows["samples_ms"].map(lambda s: _ten(s, 0, np.mean)).astype(float) / late,
        gemm_extra_ms=figures["gemm_ms"] - figures["gemm_again_ms"],
        corner_extra_ms=figures["corner_ms"] - figures["corner_again_ms"],
        whole_extra_ms=figures["first_ms"] - figures["settled_ms"],
    )  # fmt: skip


def after_warmup(rows: pd.DataFrame, *dropped: int) -> pd.DataFrame:
    """Each series once a number of warm-up steps, `warmup_steps`: what a benchmark would report.

    Of the ten steps that follow, `mean_ms`, `std_ms` and `over_late`, the mean over a late step;
    where a step goes forward and backward also `forward_share`, of their time. A series that has
    not as many steps is left out.
    """
    series = rows[rows["samples_ms"].map(lambda s: isinstance(s, list))]
    both = series["direction"] == BOTH
    parts = []
    for count in dropped:
        mean, std, forward = (
            series[name].map(lambda s, of=of, count=count: _ten(s, count, of)).astype(float)
            for name, of in ((SAMPLES[0], np.mean), (SAMPLES[0], _deviation), (SAMPLES[1], np.mean))
        )
        parts.append(series.assign(
            warmup_steps=count, mean_ms=mean, std_ms=std, over_late=mean / series["late_ms"],
            forward_share=(forward / mean).where(both),
        ).dropna(subset="mean_ms"))  # fmt: skip
    return pd.concat(parts)


def by_step(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a step of each series: `step`, from 1, and `over_late`, its time over a late step."""
    series = rows[rows["samples_ms"].map(lambda s: isinstance(s, list))]
    steps = series.assign(
        step=[range(1, len(s) + 1) for s in series["samples_ms"]],
        over_late=[list(np.array(s) / _late(s)) for s in series["samples_ms"]],
    )
    return steps.explode(["step", "over_late"]).astype({"step": int, "over_late": float})


def from_tables(tables: pd.DataFrame) -> pd.DataFrame:
    """Published means and standard deviations of ten steps with the columns of measured rows.

    If nine steps of ten take r and one takes r + e, their mean is r + e/10 and their standard
    deviation e/√10. So `added_ms`, e/10, is the deviation over √10; only where there was no
    warm-up. A late step is that of the source's main table or of its longest warm-up.
    """
    ordered = tables.sort_values("warmup_steps", na_position="last", kind="stable")
    settled = ordered.groupby(["source", "direction", "model"])["mean_ms"].transform("last")
    forward = tables["mean_ms"].where(tables["direction"] == "forward")
    dropped = tables["warmup_steps"].fillna(-1)
    same = [tables["source"], tables["model"], dropped]
    share = forward.groupby(same).transform("max") / tables["mean_ms"]
    return tables.assign(
        added_ms=(tables["std_ms"] / MEASURED_STEPS**0.5).where(dropped == 0),
        forward_share=share.where(tables["direction"] == BOTH),
        over_late=tables["mean_ms"] / settled, origin="published", experiment="steps",
    )  # fmt: skip


def _late(samples: Any) -> float | None:
    """Median of a process's last ten steps."""
    return float(np.median(samples[-MEASURED_STEPS:])) if isinstance(samples, list) else None


def _ten(samples: Any, dropped: int, statistic: Any) -> float | None:
    """A statistic of the ten steps after so many; None where there are fewer."""
    if not isinstance(samples, list) or len(samples) < dropped + MEASURED_STEPS:
        return None
    return float(statistic(samples[dropped : dropped + MEASURED_STEPS]))


def _deviation(samples: Any) -> float:
    """The sample standard deviation."""
    return float(np.std(samples, ddof=1))


STUDY = Study(
    "05_warmup", Sizes, [Experiment("first steps", PerRun(lambda sizes: Measure()), _cases)],
    COLUMNS, described, repeats=("process", "steps", "together"),
)  # fmt: skip
