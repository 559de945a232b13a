"""The first steps of a process: what they take above late ones, and what of the start is to blame.

`experiment` is "steps", each step of a process from its very first one; "stages" takes a first step
apart, "compilation" times one that is compiled. `isolation` says whether a process ran one size,
"fresh", or all of `together` in order, "shared". How often a process is begun anew is told by
`process`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from fusedlib.bench.arguments import require_known
from study import fresh, trainers
from study.cases import Case, Row, device_of, grid
from study.models import transformer
from study.race import each
from study.run import sized
from study.trainers import require_possible

QUICK: dict[str, Any] = {
    "device": "auto",  # cuda, mps, cpu, or auto for the best there is
    "models": ["nano", "micro"],  # sizes of the Transformer, smallest first
    "directions": ["forward+backward"],  # forward, backward, forward+backward or step
    "processes": 1,  # fresh processes for each size and direction
    "stage_processes": 1,  # fresh processes for the stages of the first step
    "context_length": 16,  # tokens a sequence
    "compiled": [],  # sizes whose first compiled step is timed
}
FULL: dict[str, Any] = QUICK | {
    "models": ["small", "medium", "large", "xl", "2.7b"],
    "directions": ["forward", "backward", "forward+backward"], "context_length": 256,
    "compiled": ["small"], "processes": 3, "stage_processes": 2,
}  # fmt: skip
PROFILES = {"quick": QUICK, "full": FULL}

STEPS = 30  # that each process records from its very first
MEASURED_STEPS = 10
"""Steps of a published mean, and the late ones at the end of a process."""
TIMEOUT_S = 540.0
BOTH = "forward+backward"
_ARGUMENTS = ("context_length", "batch_size", "attention", "device", "direction")


def cases(profile: str = "quick", **sizes: Any) -> list[dict[str, Any]]:
    """Every case, whole processes first."""
    s = sized(PROFILES, profile, sizes)
    require_known("direction", s.directions, trainers.DIRECTIONS)
    for model in (*s.models, *s.compiled):
        transformer.config(model, context_length=s.context_length)
    if not s.models or not s.directions:
        raise ValueError("models and directions need an entry each")
    shared = {
        "context_length": s.context_length, "batch_size": transformer.BATCH_SIZE,
        "dtype": "float32", "attention": "plain", "provider": "eager",
        "device": device_of(s.device),
    }  # fmt: skip
    series = {"experiment": "steps", "steps": STEPS, **shared}
    listed = []
    for isolation, count in (("fresh", s.processes), ("shared", 1)):
        together = "" if isolation == "fresh" else ",".join(s.models)
        listed += grid(
            {**series, "isolation": isolation, "together": together},
            direction=s.directions, process=range(1, count + 1), model=s.models,
        )  # fmt: skip
    alone = {**shared, "direction": "step"}
    stages = range(1, s.stage_processes + 1)
    listed += grid({**alone, "experiment": "stages"}, model=s.models, process=stages)
    inductor = {**alone, "experiment": "compilation", "provider": "inductor"}
    return listed + grid(inductor, model=s.compiled, process=[1])


def measure(race: list[Case]) -> list[Row]:
    """A row a case, each of a process that is begun for it, or for all sizes of a shared one."""
    return each(race, _figures)


def _figures(case: Case) -> dict[str, Any]:
    require_possible(case)
    arguments = {name: case[name] for name in _ARGUMENTS} | {"precision": "fp32"}
    if case["experiment"] == "steps":
        return _of_process(case, arguments)
    arguments |= {"model": case["model"], "provider": case["provider"]}
    target = f"study.first_step:{case['experiment']}"
    return dict(fresh.run(target, arguments, timeout_s=TIMEOUT_S))


_RUN: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
"""The last shared process, and its figures by size, of those whose rows are still to come."""


def _of_process(case: Case, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A series of steps; a size that did not fit is a `MemoryError`."""
    models = (case["together"] or case["model"]).split(",")
    key = (*arguments.items(), case["process"], case["steps"], *models)
    if case["model"] not in _RUN.get(key, {}):
        call = {**arguments, "models": models, "steps": case["steps"]}
        target = "study.first_step:in_one_process"
        runs = fresh.run(target, call, timeout_s=TIMEOUT_S)
        _RUN.clear()
        _RUN[key] = dict(zip(models, runs, strict=True))
    figures = _RUN[key].pop(case["model"])
    if "oom" in figures:
        raise MemoryError(figures["oom"])
    return figures


# --- what follows from rows ----------------------------------------------------------------------

STAGES = ["gemm_ms", "gemm_again_ms", "corner_ms", "corner_again_ms", "first_ms", "settled_ms"]


def derive(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them, in ms.

    A late step is the median of the last ten of its process (`late_ms`). `extra_ms` is the first
    step above it, `added_ms` what a mean of ten steps without warm-up has of that, `over_late` this
    mean over a late step. Of stages, `gemm_extra_ms`, `corner_extra_ms` and `whole_extra_ms` are
    the first time above the second, or above a late step.
    """
    used = ["isolation", "samples_ms", *STAGES]
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *used])))
    figures = rows[STAGES].apply(pd.to_numeric, errors="coerce")
    series = rows["samples_ms"].where(rows["samples_ms"].notna(), None)
    late = series.map(_late, "ignore").astype(float)
    extra = series.map(lambda s: s[0], "ignore").astype(float) - late
    mean = series.map(lambda s: _ten(s, 0, np.mean), "ignore").astype(float)
    return rows.assign(
        late_ms=late, extra_ms=extra, added_ms=extra / MEASURED_STEPS, over_late=mean / late,
        source=rows["isolation"], origin="measured", warmup_steps=0,
        gemm_extra_ms=figures["gemm_ms"] - figures["gemm_again_ms"],
        corner_extra_ms=figures["corner_ms"] - figures["corner_again_ms"],
        whole_extra_ms=figures["first_ms"] - figures["settled_ms"],
    )  # fmt: skip


def after_warmup(rows: pd.DataFrame, *dropped: int) -> pd.DataFrame:
    """Each series once a number of warm-up steps, `warmup_steps`: what a benchmark would report of
    the ten steps that follow. A series that has not as many is left out.
    """
    series = rows[rows["samples_ms"].notna()]
    parts = []
    for count in dropped:
        mean, std = (
            series["samples_ms"].map(lambda s, of=of, n=count: _ten(s, n, of)).astype(float)
            for of in (np.mean, _deviation)
        )
        parts.append(series.assign(
            warmup_steps=count, mean_ms=mean, std_ms=std, over_late=mean / series["late_ms"],
        ).dropna(subset="mean_ms"))  # fmt: skip
    return pd.concat(parts)


def _late(samples: list[float]) -> float:
    """Median of a process's last ten steps."""
    return float(np.median(samples[-MEASURED_STEPS:]))


def _ten(samples: list[float], dropped: int, statistic: Any) -> float:
    """A statistic of the ten steps after so many; NaN where there are fewer."""
    enough = len(samples) >= dropped + MEASURED_STEPS
    return float(statistic(samples[dropped : dropped + MEASURED_STEPS])) if enough else np.nan


def _deviation(samples: list[float]) -> float:
    """The sample standard deviation."""
    return float(np.std(samples, ddof=1))
