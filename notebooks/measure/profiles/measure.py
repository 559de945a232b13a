"""Study 08's cases: a training step by the clock, and then the same step under the profiler.

The two are rows of their own, all steps before all profiles: once the profiler has run in a
process, nobody knows whether the host keeps its pace. A step has one time, `step_clock`'s. The
profile gives which kernels run and how long each, of the second of two steps back to back, when the
host is as far ahead as it ever gets; and, from one more step inside named ranges, whose hooks slow
the host further, which part of the model they belong to.

`python -m measure.profiles.measure small 256 fp32` runs one warm step for a profiler of your
own, such as nsys, between `cudaProfilerStart` and `cudaProfilerStop`.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fusedlib.bench import machine, timing
from fusedlib.bench.arguments import require_known, require_least
from fusedlib.bench.attempt import Unavailable, free_memory
from measure.profiles import classes, trace
from measure.profiles.trace import Piece, Trace
from measure.racing.cases import Case, device_of, grid
from measure.recording import paths
from models import transformer
from models.ranges import Range, named_ranges
from models.transformer import loss
from study import step_clock
from study.compiling import graphs_compiled
from study.trainer import WEIGHTS, Trainer, require_possible

# The parts of a step, and the forward pass alone without anything kept for a backward pass.
SECTIONS = ("forward", "backward", "optimizer")
STEP, INFERENCE = "step", "inference"
ALL_SECTIONS = (INFERENCE, *SECTIONS)
WARMUP = 2
TOP = 10  # of each section and of the step: these a row names, the others it adds up by class
REST = "rest"
PERCENTILES = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)  # of the gaps' lengths
Figures = dict[str, Any]


def cases(
    experiment: str, models: Sequence[str], contexts: Sequence[int], precisions: Sequence[str], *,
    attention: str = "plain", provider: str = "eager",
    batch_size: int = transformer.BATCH_SIZE, device: str = "auto",
) -> list[dict[str, Any]]:  # fmt: skip
    """A case a size, context and precision; the experiment is "step" by the clock, or "profile"."""
    for context, model in product(contexts, models):
        transformer.config(model, context_length=context, attention=attention)
    require_known("precision", precisions, WEIGHTS)
    require_least(1, batch_size=batch_size)
    shared = {
        "experiment": experiment, "batch_size": batch_size, "attention": attention,
        "provider": provider, "device": device_of(device),
    }  # fmt: skip
    return grid(shared, context_length=contexts, precision=precisions, model=models)


def measure(case: Case, **limits: Any) -> Figures:
    """The row's figures; `limits` are of `step_clock.measure`. A profile's lists have as columns:

    - `sections`: section, calls, ms of its kernels; a section is "forward", "backward",
      "optimizer" or, of eager models, "inference" (the forward pass alone, without gradients)
    - `classes`: section, class, calls, ms
    - `kernels`: section, class, name, calls, ms; what is among the most expensive of any section or
      of the step has its line in each, then the rest by class
    - `parts`: section, part of the model, calls, ms; eager models only

    Raises:
        Refused: the device is not here, the profiler sees nothing of it, or the case is far above
            the memory there is.
        RuntimeError: a profiled step compiled the model once more.
    """
    require_possible(case)
    if case["experiment"] == "profile" and case["device"] == "mps":
        raise Unavailable("torch.profiler records no events of an MPS device")
    free_memory()  # also when the case before ended in an exception
    try:
        if case["experiment"] == "profile":
            return profiled(case)
        return step_clock.measure(Trainer.of(case, provider=case["provider"]), **limits)
    finally:
        if case["provider"] != "eager":
            torch.compiler.reset()
        free_memory()


# --- under the profiler ---------------------------------------------------------------------------


def step(trainer: Trainer) -> None:
    """A step with ranges instead of marks."""
    with Range(STEP):
        trainer.issue(Range)


def named_step(trainer: Trainer) -> None:
    """A step of an eager model with the names of all its modules, and the loss's."""
    with named_ranges(trainer.model) as tracer:

        def named_loss(logits: Tensor, targets: Tensor) -> Tensor:
            with tracer.within("loss"):
                return loss(logits, targets)

        trainer.criterion = named_loss
        step(trainer)
        trainer.criterion = loss


def inference(trainer: Trainer) -> None:
    """The forward pass alone, to the logits."""
    with torch.no_grad(), Range(INFERENCE):
        trainer.logits()


def warm(case: Case) -> Trainer:
    """The trainer of a case after its first steps."""
    trainer = Trainer.of(case, provider=case["provider"])
    if case["provider"] == "eager":
        inference(trainer)
    for _ in range(WARMUP):
        step(trainer)
    return trainer


def profiled(case: Case) -> Figures:
    """What a step consists of."""
    trainer, eager, path = warm(case), case["provider"] == "eager", trace_path(case)
    before = graphs_compiled()

    def run() -> None:
        if eager:  # compiled, it would be another model to compile
            inference(trainer)
        step(trainer)
        step(trainer)

    bare = trace.record(trainer.device, run, None if eager else path)
    if graphs_compiled() != before:
        raise RuntimeError("a profiled step compiled the model once more")
    figures = {"on_device": bare.on_device, **taken_apart(bare), **idleness(bare)}
    if eager:
        ranged = trace.record(trainer.device, lambda: named_step(trainer), path)
        figures |= {"ranged_ms": span_ms(ranged), "parts": parts(ranged)}
    return figures | {"trace_file": path.name, "trace_mib": path.stat().st_size / 2**20}


def trace_path(case: Case) -> Path:
    """Where the trace of a case lies, under a name that TensorBoard's plugin looks for."""
    fields = ("model", "context_length", "precision", "attention", "provider", "device")
    name = machine.slug("-".join(str(case[field]) for field in fields))
    return paths.traces_dir() / f"{name}.pt.trace.json.gz"


# --- from a trace to a row's figures --------------------------------------------------------------


def taken_apart(profile: Trace) -> Figures:
    """Sections, classes and kernels of a trace, the time of the step's kernels, and what of it lies
    in no section. A kernel that is dear in a section or in the step has its line in every section;
    the others have one by class.
    """
    pieces = pd.DataFrame(
        [(section, class_of(profile, section, p), classes.short_name(p.name), p.us)
         for section in ALL_SECTIONS for p in profile.during(section)],
        columns=["section", "class", "name", "us"],
    )  # fmt: skip
    dear = set[Any]()
    for _, own in [*pieces.groupby("section"), (STEP, pieces[pieces["section"] != INFERENCE])]:
        sums = own.groupby(["class", "name"], sort=False)["us"].sum()
        dear |= {*sums.sort_values(ascending=False, kind="stable").index[:TOP]}
    is_dear = [key in dear for key in zip(pieces["class"], pieces["name"], strict=True)]
    kernels = pieces.assign(name=pieces["name"].where(is_dear, REST))
    step, sections = profile.during(STEP), _lines(pieces)
    whole = _ms(p.us for p in step)
    inside = sum(ms for section, _, ms in sections if section != INFERENCE)
    return {
        "sections": sections, "classes": _lines(pieces, "class"),
        "kernels": _lines(kernels, "class", "name"), "unlinked": profile.unlinked,
        "profiled_kernels": len(step), "kernels_ms": whole,
        "outside_sections_ms": round(whole - inside, 6),
    }  # fmt: skip


def class_of(profile: Trace, section: str, piece: Piece) -> str:
    """The class of a piece: all that the optimizer does is the optimizer's."""
    if section == "optimizer":
        return classes.OPTIMIZER
    return (classes.of_kernel if profile.on_device else classes.of_operator)(piece.name)


def _lines(pieces: pd.DataFrame, *keys: str) -> list[list[Any]]:
    """Section, these columns, calls and ms; of a section most ms first, the rest at its end."""
    sums = pieces.groupby(["section", *keys], sort=False)["us"].agg(["size", "sum"]).reset_index()
    ordered = sums.sort_values("sum", ascending=False, kind="stable").values.tolist()
    lines = [[*key, calls, _ms([us])] for *key, calls, us in ordered]
    return sorted(lines, key=lambda line: (ALL_SECTIONS.index(line[0]), line[-3] == REST))


def parts(profile: Trace) -> list[list[Any]]:
    """Section, part of the model, calls and ms; the blocks' parts are added up over the blocks."""
    named = [r for r in profile.ranges if r.name not in (STEP, INFERENCE, *SECTIONS)]
    pieces = [
        (section, part_name(name), p.us)
        for section in SECTIONS for p, name in trace.innermost(profile.during(section), named)
    ]  # fmt: skip
    return _lines(pd.DataFrame(pieces, columns=["section", "part", "us"]), "part")


def part_name(range_name: str | None) -> str:
    """`block 3/attention` -> `block/attention`; what ran in no range is "no part"."""
    return re.sub(r"^block \d+", "block", range_name) if range_name else "no part"


def idleness(profile: Trace) -> Figures:
    """The last step under the profiler: how long it took, and the gaps between its kernels, in ms
    and µs; of a CPU's the former alone. `late_` is what waited for the host.
    """
    figures: Figures = {"profiled_ms": span_ms(profile)}
    pieces = profile.during(STEP)
    if not profile.on_device or not pieces:
        return figures
    seen = trace.gaps(pieces, _ended_before(profile))
    late = [us for us, waited in seen if waited]
    lengths = np.percentile([us for us, _ in seen] or [0.0], PERCENTILES)
    return figures | {
        "gaps": len(seen), "idle_ms": _ms(us for us, _ in seen), "late_gaps": len(late),
        "late_ms": _ms(late), "gap_percentiles_us": [round(float(us), 3) for us in lengths],
    }  # fmt: skip


def span_ms(profile: Trace) -> float | None:
    """The last step under the profiler: from where the device ended the one before, or else where
    the host begins it, until its last kernel; on a CPU until its own end.
    """
    step = profile.last(STEP)
    if step is None:
        return None
    if not profile.on_device:
        return _ms([step.end - step.start])
    since = _ended_before(profile)
    end = max((p.end for p in profile.during(STEP)), default=step.end)
    return _ms([end - (step.start if since is None else since)])


def _ended_before(profile: Trace) -> float | None:
    """When the device was done with what was issued before the last step."""
    step = profile.last(STEP)
    assert step is not None
    return max((p.end for p in profile.pieces if p.issued < step.start), default=None)


def _ms(us: Iterable[float]) -> float:
    return round(sum(us) / 1e3, 6)


# --- for a profiler of your own -------------------------------------------------------------------


def main(words: Sequence[str]) -> None:
    """One warm step of a size, context and precision, with all names, for nsys to record."""
    model, context, precision = words
    [case] = cases(STEP, [model], [int(context)], [precision])
    trainer = warm(case)
    on_cuda = trainer.device.type == "cuda"
    if on_cuda:
        torch.cuda.profiler.start()
    named_step(trainer)
    timing.synchronize(trainer.device)
    if on_cuda:
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
