"""Where the time of a training step goes: a step by the clock, and the same under the profiler.

The two are rows of their own, `experiment` "step" and "profile", all steps before all profiles:
once the profiler has run in a process, nobody knows whether the host keeps its pace. A step has one
time, the clock's. The profile gives which kernels run and how long each, of the second of two steps
back to back, when the host is as far ahead as it ever gets; and, from one more step inside named
ranges, whose hooks slow the host further, which part of the model they belong to.

`python -m study.profile small 256 fp32` runs one warm step for a profiler of your own, such as
nsys, between `cudaProfilerStart` and `cudaProfilerStop`.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fusedlib.bench import machine, timing
from fusedlib.bench.arguments import require_known
from fusedlib.bench.attempt import Unavailable, free_memory
from study import kernel_names, paths, step_clock, trace
from study.cases import Case, Row, device_of, grid
from study.compiling import graphs_compiled
from study.kernel_names import GEMM, OPTIMIZER
from study.models import transformer
from study.models.ranges import Range, named_ranges
from study.race import each
from study.run import sized
from study.trace import Piece, Trace
from study.trainer import WEIGHTS, Trainer, require_possible

QUICK: dict[str, Any] = {
    "device": "auto",  # cuda, mps, cpu, or auto for the best there is
    "models": ["nano", "micro"],  # sizes of the Transformer, in fp32 and in bf16 autocast
    "contexts": [16],  # tokens a sequence, for all sizes
    "spanning": ["nano"],  # sizes at more contexts than those
    "more_contexts": [8],  # tokens a sequence, for these
    "fused": ["nano"],  # sizes with fused attention too, under autocast
    "compiled": [],  # sizes compiled by Inductor too, under autocast
    "batch_size": 4,  # sequences a step
    "seconds": 0.02,  # a step without the profiler is clocked for so long at least
}
FULL: dict[str, Any] = QUICK | {
    "models": ["small", "large", "2.7b"], "contexts": [256], "spanning": ["small"],
    "more_contexts": [128, 512, 1024], "fused": ["small"], "compiled": ["small"], "seconds": 0.3,
}  # fmt: skip
PROFILES = {"quick": QUICK, "full": FULL}

SECTIONS = ("forward", "backward", "optimizer")
STEP, INFERENCE = "step", "inference"
ALL_SECTIONS = (INFERENCE, *SECTIONS)
"""The parts of a step, and before them the forward pass alone, which keeps nothing."""
WARMUP = 2
TOP = 10
"""So many kernels of each section and of the step a row names; the others it adds up by class."""
REST = "rest"
Figures = dict[str, Any]


def cases(profile: str = "quick", **sizes: Any) -> list[dict[str, Any]]:
    """Every case by the clock, then every one under the profiler.

    Raises:
        ValueError: an unknown size of the Transformer.
    """
    s = sized(PROFILES, profile, sizes)
    listed, both, half = [], [*WEIGHTS][:2], ["bf16 autocast"]
    for experiment, clock in ((STEP, {"seconds": s.seconds}), ("profile", {})):
        shared = {"experiment": experiment, "batch_size": s.batch_size, **clock}
        of = partial(settings, shared, s.device)
        listed += [
            *of(s.models, s.contexts, both), *of(s.spanning, s.more_contexts, both),
            *of(s.fused, s.contexts[:1], half, attention="sdpa"),
            *of(s.compiled, s.contexts[:1], half, provider="inductor"),
        ]  # fmt: skip
    return listed


def settings(
    shared: Case, device: str, models: Sequence[str], contexts: Sequence[int],
    precisions: Sequence[str], attention: str = "plain", provider: str = "eager",
) -> list[dict[str, Any]]:  # fmt: skip
    """A case a context, precision and size of the Transformer."""
    for context, model in product(contexts, models):
        transformer.config(model, context_length=context, attention=attention)
    require_known("precision", precisions, WEIGHTS)
    fields = {**shared, "attention": attention, "provider": provider, "device": device_of(device)}
    return grid(fields, context_length=contexts, precision=precisions, model=models)


def measure(race: list[Case]) -> list[Row]:
    """A row a case: the clock's times, or lists of kernels."""
    return each(race, figures)


def available(case: Case) -> None:
    """Raise `Refused` for what cannot run here, or is far above the memory there is."""
    require_possible(case)
    if case["experiment"] == "profile" and case["device"] == "mps":
        raise Unavailable("torch.profiler records no events of an MPS device")


def figures(case: Case) -> Figures:
    """The row's figures. A profile's lists have as columns:

    - `sections`: section, calls, ms of its kernels; a section is "forward", "backward",
      "optimizer" or, of eager models, "inference" (the forward pass alone, without gradients)
    - `classes`: section, class, calls, ms
    - `kernels`: section, class, name, calls, ms; what is among the most expensive of any section or
      of the step has its line in each, then the rest by class
    - `parts`: section, part of the model, calls, ms; eager models only

    Raises:
        RuntimeError: a profiled step compiled the model once more.
    """
    available(case)
    free_memory()  # also when the case before ended in an exception
    try:
        if case["experiment"] == "profile":
            return profiled(case)
        return step_clock.measure(
            Trainer.of(case, provider=case["provider"]), seconds=case["seconds"],
            blocks=3, steps=2, settling=6,
        )  # fmt: skip
    finally:
        if case["provider"] != "eager":
            torch.compiler.reset()
        free_memory()


# --- under the profiler --------------------------------------------------------------------------


def step(trainer: Trainer) -> None:
    """A step with ranges instead of marks."""
    with Range(STEP):
        trainer.issue(Range)


def named_step(trainer: Trainer) -> None:
    """A step of an eager model with the names of all its modules, and the loss's."""
    with named_ranges(trainer.model) as tracer:

        def named_loss(logits: Tensor, targets: Tensor) -> Tensor:
            with tracer.within("loss"):
                return transformer.loss(logits, targets)

        trainer.criterion = named_loss
        step(trainer)
        trainer.criterion = transformer.loss


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
    """What a step consists of. Its trace is left for viewers, such as ui.perfetto.dev."""
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
    found = {"on_device": bare.on_device, **taken_apart(bare)}
    if eager:
        found["parts"] = parts(trace.record(trainer.device, lambda: named_step(trainer), path))
    return found | {"trace_file": path.name}


def trace_path(case: Case) -> Path:
    """Where the trace of a case lies, under a name that TensorBoard's plugin looks for."""
    fields = ("model", "context_length", "precision", "attention", "provider", "device")
    name = machine.slug("-".join(str(case[field]) for field in fields))
    return paths.traces_dir() / f"{name}.pt.trace.json.gz"


def taken_apart(profile: Trace) -> Figures:
    """Sections, classes and kernels of a trace, the time of the step's kernels, and what of it lies
    in no section. A kernel that is dear in a section or in the step has its line in every section;
    the others have one by class.
    """
    pieces = pd.DataFrame(
        [(section, class_of(profile, section, p), kernel_names.short_name(p.name), p.us)
         for section in ALL_SECTIONS for p in profile.during(section)],
        columns=["section", "class", "name", "us"],
    )  # fmt: skip
    dear = set[Any]()
    for _, own in [*pieces.groupby("section"), (STEP, pieces[pieces["section"] != INFERENCE])]:
        sums = own.groupby(["class", "name"], sort=False)["us"].sum()
        dear |= {*sums.sort_values(ascending=False, kind="stable").index[:TOP]}
    is_dear = [key in dear for key in zip(pieces["class"], pieces["name"], strict=True)]
    kernels = pieces.assign(name=pieces["name"].where(is_dear, REST))
    whole, sections = profile.during(STEP), _lines(pieces)
    kernels_ms = _in_ms(p.us for p in whole)
    inside = sum(ms for section, _, ms in sections if section != INFERENCE)
    return {
        "sections": sections, "classes": _lines(pieces, "class"),
        "kernels": _lines(kernels, "class", "name"), "unlinked": profile.unlinked,
        "profiled_kernels": len(whole), "kernels_ms": kernels_ms,
        "outside_sections_ms": round(kernels_ms - inside, 6),
    }  # fmt: skip


def class_of(profile: Trace, section: str, piece: Piece) -> str:
    """The class of a piece: all that the optimizer does is the optimizer's."""
    if section == "optimizer":
        return OPTIMIZER
    of = kernel_names.of_kernel if profile.on_device else kernel_names.of_operator
    return of(piece.name)


def parts(profile: Trace) -> list[list[Any]]:
    """Section, part of the model, calls and ms; the blocks' parts are added up over the blocks."""
    named = [r for r in profile.ranges if r.name not in (STEP, INFERENCE, *SECTIONS)]
    pieces = [
        (section, re.sub(r"^block \d+", "block", name or "no part"), p.us)
        for section in SECTIONS for p, name in trace.innermost(profile.during(section), named)
    ]  # fmt: skip
    return _lines(pd.DataFrame(pieces, columns=["section", "part", "us"]), "part")


def _lines(pieces: pd.DataFrame, *keys: str) -> list[list[Any]]:
    """Section, these columns, calls and ms; of a section most ms first, the rest at its end."""
    sums = pieces.groupby(["section", *keys], sort=False)["us"].agg(["size", "sum"]).reset_index()
    ordered = sums.sort_values("sum", ascending=False, kind="stable").values.tolist()
    lines = [[*key, calls, _in_ms([us])] for *key, calls, us in ordered]
    return sorted(lines, key=lambda line: (ALL_SECTIONS.index(line[0]), line[-3] == REST))


def _in_ms(us: Iterable[float]) -> float:
    return round(sum(us) / 1e3, 6)


# --- what follows from rows ----------------------------------------------------------------------

CASE = ["model", "precision", "context_length", "attention", "provider"]
IDLE, OTHERS = "GPU idle", "others"
DRAWN = (GEMM, "element-wise", OPTIMIZER, "softmax", "copy and cast")
"""Classes that have a colour; all other kernels are `OTHERS`."""
BYTES = {"fp32": (4 + 4, 4), "bf16 autocast": ((2 + 4) + (4 + 4) + (4 + 2), 2)}
"""Bytes that the softmax moves a score, with its casts, and of an element of q, k, v, scores."""
SETTERS = {"card": "GPU", "host": "CPU"}


def derive(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    Beside each profile stands its set's step without a profiler: `step_ms`, and `issue_ms`, in
    which the CPU launches it; of a GPU `busy`, the time of kernels over the step, and `pace`, who
    sets it. Of a profile `products_ms`, `optimizer_ms` and `others_ms`, all but products; of plain
    attention `softmax_ratio`, the softmax's forward time over that of both products, and what
    counting predicts of it, `flops_ratio` and `bytes_ratio`.
    """
    used = ["experiment", "set", *CASE, "on_device", "classes", "parts", "kernels_ms",
            "step_median_ms", "issue_ms"]  # fmt: skip
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *used])))
    keys = ["machine", "set", *CASE]
    steps = rows[(rows["experiment"] == STEP) & (rows["status"] == "ok")].drop_duplicates(keys)
    beside = rows[keys].merge(steps[[*keys, "step_median_ms", "issue_ms"]], "left", on=keys)
    step_ms, issue_ms = (
        pd.Series(beside[name].to_numpy(dtype=float), rows.index)
        for name in ("step_median_ms", "issue_ms")
    )
    spent = rows["kernels_ms"].astype(float)
    kernels = spent.where(rows["on_device"].eq(True))
    lists = rows["classes"].where(rows["classes"].notna(), None)
    gemm, adam = (
        lists.map(lambda of, name=name: _ms(of, SECTIONS, [name]), "ignore").astype(float)
        for name in (GEMM, OPTIMIZER)
    )
    parts = rows["parts"].where(rows["parts"].notna(), None)
    counts = [_counted(row) for row in rows[CASE].to_dict("records")]
    counted = pd.DataFrame(counts, rows.index, ["flops_ratio", "bytes_ratio"], dtype=float)
    return rows.assign(
        sized=rows["model"] + rows["context_length"].map(", {:.0f} tokens".format),
        step_ms=step_ms, issue_ms=issue_ms, busy=kernels / step_ms,
        pace=[SETTERS[step_clock.pace_setter(k, s)] if k > 0 and s > 0 else None
              for k, s in zip(kernels, step_ms, strict=True)],
        products_ms=gemm, optimizer_ms=adam, others_ms=spent - gemm,
        softmax_ratio=parts.map(_softmax_over_products, "ignore").astype(float), **counted,
    )  # fmt: skip


def by_class(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each profile a row a class of kernels, and one for the time when the GPU is idle.

    `class_ms` is the time in a step, `step_share` its share of the unprofiled step. On a CPU, where
    operators stand in for kernels, it is a share of their time, and nothing is idle.
    """
    profiles, found = rows[rows["classes"].notna()], []
    others = [name for name in kernel_names.CLASSES if name not in DRAWN]
    for name in (*DRAWN, OTHERS):
        members = others if name == OTHERS else [name]
        ms = [float(_ms(lines, SECTIONS, members)) for lines in profiles["classes"]]
        found.append(profiles.assign(**{"class": name, "class_ms": ms}))
    on_device = profiles[profiles["on_device"].eq(True)]
    idle = on_device["step_ms"] - on_device["kernels_ms"]
    every = pd.concat([*found, on_device.assign(**{"class": IDLE, "class_ms": idle})])
    span = every["step_ms"].where(every["on_device"].eq(True), every["kernels_ms"])
    return every.assign(step_share=every["class_ms"].clip(lower=0) / span)


def with_busy_ends(profiles: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Profiles with `busy_low` and `busy_high`, the time of their kernels over the slowest and the
    fastest such step of these; NaN where there is none.
    """
    keys = ["machine", "model", "precision", "context_length"]
    ends = steps.groupby(keys, observed=True)["step_median_ms"].agg(["max", "min"])
    ends = ends.reindex(pd.MultiIndex.from_frame(profiles[keys])).set_axis(profiles.index)
    kernels = profiles["kernels_ms"]
    return profiles.assign(busy_low=kernels / ends["max"], busy_high=kernels / ends["min"])


def _ms(lines: list[list[Any]], sections: Iterable[str], names: Iterable[str]) -> float:
    """Time of a list's lines of these sections and second columns."""
    return sum(line[-1] for line in lines if line[0] in sections and line[1] in names)


def _softmax_over_products(lines: list[list[Any]]) -> float | None:
    part = "block/attention/{}".format
    products = _ms(lines, ["forward"], [part("scores"), part("values")])
    return _ms(lines, ["forward"], [part("softmax")]) / products if products else None


def _counted(case: Case) -> tuple[float | None, float | None]:
    """The softmax's FLOPs and bytes over those of both products, of plain attention.

    A score takes 4 · width FLOPs in the products and five in the softmax. The products write it
    and read its probability, and read or write 4 · width / context elements of q, k, v and the
    output.
    """
    if case["attention"] != "plain" or case["precision"] not in BYTES:
        return None, None
    width = transformer.config(case["model"]).head_dim
    softmax, element = BYTES[case["precision"]]
    return 5 / (4 * width), softmax / (element * (2 + 4 * width / case["context_length"]))


# --- for a profiler of your own ------------------------------------------------------------------


def main(words: Sequence[str]) -> None:
    """One warm step of a size, context and precision, with all names, for nsys to record."""
    model, context, precision = words
    shared = {"experiment": STEP, "batch_size": transformer.BATCH_SIZE}
    [case] = settings(shared, "auto", [model], [int(context)], [precision])
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
