"""Study 01's cases and how each is measured: steps in fresh and shared processes, first steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from fusedlib.bench import first_step, fresh, machine, results, steps, timing
from fusedlib.models import transformer

STUDY = "01_warmup"
MEASURED_STEPS = 10
TIMEOUT_S = 540.0
EXPERIMENTS = ("stages", "compilation", "calls")


def code() -> str:
    """Fingerprint of all that measures this study."""
    return results.code_fingerprint(steps, first_step, fresh, timing, transformer)


def problem(
    context_length: int, *, batch_size: int = transformer.BATCH_SIZE, dtype: str = "float32",
    attention: str = "plain", device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """What all cases share; `device="auto"` takes the best one.

    Raises:
        ValueError: context or batch not positive.
    """
    for name, value in (("context_length", context_length), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return {
        "context_length": context_length, "batch_size": batch_size, "dtype": dtype,
        "attention": attention, "device": machine.device_type() if device == "auto" else device,
    }  # fmt: skip


def step_cases(
    shared: Mapping[str, Any], isolation: str, processes: int, *, models: Sequence[str],
    directions: Sequence[str], count: int, warmups: Sequence[int],
) -> list[dict[str, Any]]:  # fmt: skip
    """Cases of `count` steps each: every size and direction, in `processes` processes.

    `isolation` is "fresh" (a process for each size) or "shared" (one runs all sizes in order).

    Raises:
        ValueError: none or an unknown size or direction, no process, or too few steps for the
            warm-ups.
    """
    if not models or not directions:
        raise ValueError(
            f"models and directions need an entry each, got {list(models)} and {list(directions)}"
        )
    for model in models:
        transformer.config(model)
    if unknown := [d for d in directions if d not in steps.DIRECTIONS]:
        raise ValueError(f"unknown direction {unknown[0]!r}; known: {', '.join(steps.DIRECTIONS)}")
    if processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}")
    if isolation not in ("fresh", "shared"):
        raise ValueError(f"isolation must be 'fresh' or 'shared', got {isolation!r}")
    most = max(warmups, default=0)
    needed = most + 2 * MEASURED_STEPS
    if min(warmups, default=0) < 0 or count < needed:
        raise ValueError(
            f"{count} steps are too few: {most} of warm-up, {MEASURED_STEPS} measured and the last "
            f"{MEASURED_STEPS} as what is settled need {needed}; no warm-up of {list(warmups)} may "
            "be negative"
        )
    together = "" if isolation == "fresh" else ",".join(models)
    return [
        {
            "experiment": "steps", "model": model, "direction": direction, "provider": "eager",
            "isolation": isolation, "process": process, "steps": count, "together": together,
            **shared,
        }
        for direction in directions for process in range(1, processes + 1) for model in models
    ]  # fmt: skip


def first_step_cases(
    shared: Mapping[str, Any], *, models: Sequence[str], compiled: Sequence[str],
    stage_processes: int = 1,
) -> list[dict[str, Any]]:  # fmt: skip
    """Cases that take the first step apart: stages, driver calls, and compilation.

    Raises:
        ValueError: unknown size, or no process for the stages.
    """
    for model in (*models, *compiled):
        transformer.config(model)
    if stage_processes < 1:
        raise ValueError(f"stage_processes must be at least 1, got {stage_processes}")
    chosen = [("stages", "eager", m, p) for m in models for p in range(1, stage_processes + 1)]
    chosen += [("calls", "eager", m, 1) for m in models]
    chosen += [("compilation", "inductor", m, 1) for m in compiled]
    return [
        {
            "experiment": experiment, "model": model, "direction": "step",
            "provider": provider, "process": process, **shared,
        }
        for experiment, provider, model, process in chosen
    ]  # fmt: skip


def label(case: Mapping[str, Any]) -> str:
    """A case in a few words."""
    if case["experiment"] != "steps":
        return f"{case['model']} {case['experiment']}"
    return f"{case['model']} {case['direction']} {case['isolation']} process {case['process']}"


class Measure:
    """Measures a case in a process of its own; a shared process's sizes are run once together."""

    def __init__(self) -> None:
        self._together: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def __call__(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """The row's figures."""
        fields = ("context_length", "batch_size", "dtype", "attention", "device", "direction")
        arguments = {name: case[name] for name in fields}
        if case["experiment"] == "calls" and case["device"] != "cuda":
            raise results.Unavailable(
                "needs a CUDA GPU: elsewhere there are no driver calls to see"
            )
        if case["experiment"] != "steps":
            target = f"fusedlib.bench.first_step:{case['experiment']}"
            arguments |= {"model": case["model"], "provider": case["provider"]}
            return dict(fresh.run(target, arguments, timeout_s=TIMEOUT_S))
        models = case["together"].split(",") if case["together"] else [case["model"]]
        group = (case["direction"], case["process"], case["together"])
        # A shared process measures all its sizes; each size's case takes its own part of it.
        if case["together"] and group in self._together:
            runs = self._together[group]
        else:
            runs = fresh.run(
                "fusedlib.bench.steps:in_one_process",
                {"models": models, "steps": case["steps"], **arguments},
                timeout_s=TIMEOUT_S,
            )
        if case["together"]:
            self._together[group] = runs
        return dict(runs[models.index(case["model"])])
