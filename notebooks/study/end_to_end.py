"""Whole training steps of a Transformer, by size, context, precision, compilation, MLP and AdamW.

A "step" runs alone; a "profile" is one more step under torch's profiler. "optimizer" is AdamW
alone, "ceiling" is what a card reaches. Steps of one model, with one set of weights, take turns by
each block's MLP ("mlp", under load "sustained") or by how the model runs ("model"). Who takes part
is checked in a model of the case's widths and tokens with `LAYERS` blocks, after its compilation
was timed: logits and the gradient of every parameter against float64.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType

from fusedlib.bench import check, timing
from fusedlib.bench.arguments import require_known, require_least
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.statistics import summarize
from fusedlib.bench.turns import Checked
from fusedlib.ops import fused_class
from fusedlib.patch import apply
from study import allocator, rivals, roofline, trainers
from study.cases import Case, Row, device_of, grid
from study.compiling import call_until_compiled, empty_compile_cache
from study.mlp import MODULE
from study.models import transformer
from study.models.transformer import SwiGLU, Transformer, config, flops, loss, sharing_copy
from study.profiler import profiling
from study.race import each, free, loaded, timed
from study.rivals import Task, rival
from study.run import sized
from study.settings import matmul_settings
from study.trainers import (
    WEIGHTS,
    TransformerTrainer,
    adamw,
    autocast_bf16,
    require_possible,
    shape_of,
)

QUICK: dict[str, Any] = {
    "device": "auto",  # cuda, mps, cpu, or auto for the best there is
    "models": ["nano", "micro"],  # sizes of the Transformer, smallest first
    "contexts": [16],  # tokens a sequence; the first is the one looked at closely
    "precisions": ["fp32", "bf16 autocast"],  # weights in fp32 in both; and bf16 (weights too)
    "whole": [],  # sizes that are also compiled, at the first context
    "chosen": ["nano"],  # sizes with other MLPs, and with sdpa in place of plain attention
    "providers": ["eager", "fused", "liger"],  # who computes the MLP, or all
    "split": [],  # sizes with every fp32 projection by fusedlib.linear
    "loaded": [],  # sizes whose other MLPs also run sustained, with energy
    "load_seconds": 0.2,  # of a sustained measurement, after heating
    "profiled": [],  # sizes also run under the profiler
    "cpu": [],  # sizes also run on the CPU at the first context
    "seconds": 0.05,  # a step alone is measured for so long at least
    "gemm_size": 256,  # of the square product taken as ceiling
}
SIZES = ["small", "medium", "large", "xl", "2.7b"]
FULL: dict[str, Any] = QUICK | {
    "models": SIZES, "contexts": [256, 1024, 512, 128],
    "precisions": ["fp32", "bf16 autocast", "bf16"], "whole": SIZES, "chosen": ["medium", "2.7b"],
    "providers": ["all"], "split": ["2.7b"], "loaded": ["2.7b"], "load_seconds": 1.0,
    "profiled": ["small", "medium", "xl"], "cpu": ["small", "medium"],
    "seconds": 0.6, "gemm_size": 8192,
}  # fmt: skip
PROFILES = {"quick": QUICK, "full": FULL}
AUTOCAST, DTYPES = ["fp32", "bf16 autocast"], ["float32", "bfloat16"]
Call = Callable[..., Any]
COMPILE = Task[[Transformer], Call]("compile")
RACES: dict[str, Task[..., Any]] = {"mlp": MODULE, "sustained": MODULE, "model": COMPILE}
"""Who competes, by experiment: in the MLP's place, or in how the model runs."""
LAYERS = 2
OPTIMIZERS = ("for-loop", "foreach", "fused")
CAST = "aten::_to_copy"
# Of a turn or on its own, after one that gives the host the head start which it has in a loop.
STEPS = 1
# AdamW reads weight, gradient and both moments, writes weight and moments.
PASSES = 7


def cases(profile: str = "quick", **sizes: Any) -> list[dict[str, Any]]:
    """Steps alone, ceilings and optimizers; steps in turns; under load; under the profiler last,
    for what it leaves behind could slow a step.
    """
    s = sized(PROFILES, profile, sizes)
    if not s.contexts:
        raise ValueError("contexts needs one at least")
    require_known("precision", s.precisions, WEIGHTS)
    device, first, longest = device_of(s.device), s.contexts[:1], [max(s.contexts)]
    shared = setting(device, seconds=s.seconds)
    halves = [name for name in ("bf16", "bf16 autocast") if name in s.precisions]

    listed = steps(shared, s.models, first, s.precisions, inference=True)
    listed += roofline.cases(device, DTYPES, gemm_size=s.gemm_size, copy_mib=64, repetitions=7)
    listed += steps(shared, s.models, s.contexts[1:], s.precisions)
    listed += steps(shared, s.chosen, longest, s.precisions, attention="sdpa")
    listed += optimizers(shared, s.models)
    listed += steps(setting("cpu", seconds=s.seconds), s.cpu, first, ["fp32"])

    listed += races(shared, "mlp", s.chosen, first, ["fp32"], s.providers)
    listed += races(shared, "mlp", s.chosen, longest, halves, s.providers)
    listed += races(shared, "model", s.whole, first, AUTOCAST)
    listed += races(shared, "model", s.split, first, ["fp32"], ["eager", "linear"])

    for contexts, precision in ((first, "fp32"), (longest, "bf16")):
        load = races(shared, "mlp", s.loaded, contexts, [precision], s.providers)
        listed += under_load(load, s.load_seconds)
    return listed + steps(shared, s.profiled, first, AUTOCAST, experiment="profile")


def setting(
    device: str, *, batch_size: int = transformer.BATCH_SIZE, seconds: float = 0.3,
    repetitions: int = 6,
) -> dict[str, Any]:  # fmt: skip
    """What all cases share: a step alone lasts so many seconds at least, and a race has so many
    rounds. The range of six pairs covers their median at 97 %.
    """
    require_least(1, batch_size=batch_size, repetitions=repetitions)
    return {
        "device": device, "batch_size": batch_size, "seconds": seconds, "repetitions": repetitions,
    }  # fmt: skip


def steps(
    shared: Case, models: Sequence[str], contexts: Sequence[int], precisions: Sequence[str],
    providers: Sequence[str] = ("eager",), *, experiment: str = "step", attention: str = "plain",
    inference: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Training steps with AdamW, a context after the other, sizes as given; `inference` is a field
    of recorded cases and says nothing any more.
    """
    listed = grid(
        {"experiment": experiment, "attention": attention, "inference": inference, **shared},
        context_length=contexts, model=models, precision=precisions, provider=providers,
    )  # fmt: skip
    for case in listed:
        shape_of(case)
    return listed


def races(
    shared: Case, experiment: str, models: Sequence[str], contexts: Sequence[int],
    precisions: Sequence[str], names: Sequence[str] = ("all",),
) -> list[dict[str, Any]]:  # fmt: skip
    """The same steps by each provider in turns, plain attention; the experiment is of `RACES`."""
    chosen = rivals.chosen(RACES[experiment], names)
    return steps(shared, models, contexts, precisions, chosen, experiment=experiment)


def under_load(race: Sequence[Case], seconds: float) -> list[dict[str, Any]]:
    """A race under load, the second round in the opposite order: drift hits all alike."""
    return [
        {**case, "experiment": "sustained", "round": number, "seconds": seconds}
        for number in (1, 2) for case in (race if number == 1 else race[::-1])
    ]  # fmt: skip


def optimizers(shared: Case, models: Sequence[str]) -> list[dict[str, Any]]:
    """AdamW's own step on fp32 weights, each way that torch has."""
    names = [config(model).name for model in models]
    return grid({"experiment": "optimizer", **shared}, model=names, optimizer=OPTIMIZERS)


def available(case: Case) -> None:
    """Raise `Refused` for what cannot run here, or is counted far above the memory there is."""
    require_possible(case)
    experiment = case["experiment"]
    if experiment in RACES:
        one = rivals.get(RACES[experiment], case["provider"])
        one.check_available(case["device"], WEIGHTS[case["precision"]])
    if experiment in ("sustained", "profile") and not case["device"].startswith("cuda"):
        raise Unavailable("sustained and profiled runs need a CUDA GPU")


def measure(race: list[Case]) -> list[Row]:
    """A row a case: a step's parts and peaks, alone or in turns, a ceiling, or AdamW alone."""
    experiment = race[0]["experiment"]
    if experiment not in RACES:
        free()  # of the race before, and when the case before ended in an exception
        return each(race, figures)
    how: dict[str, Any] = {
        "same": ("experiment", "model", "context_length", "precision", "attention", "device",
                 "batch_size"),
        "available": available, "settings": cold_compiler, "work": work,
    }  # fmt: skip
    if experiment == "sustained":
        return loaded(race, Setup, **how)
    rounds = int(race[0]["repetitions"])
    return timed(race, Setup, rounds=rounds, warmup=1, seconds=2.0, most=15, bursts=False, **how)


def figures(case: Case) -> dict[str, Any]:
    """The figures of a case that runs alone."""
    available(case)
    if case["experiment"] == "ceiling":
        return roofline.measure(case)
    with matmul_settings("highest", True):
        return optimizer(case) if case["experiment"] == "optimizer" else step(case)


def step(case: Case) -> dict[str, Any]:
    """Times of the step's parts, then its memory, then what else is asked for."""
    trainer = TransformerTrainer.of(case)
    row = trainers.measure(trainer, seconds=case["seconds"], steps=STEPS)
    row |= work(case) | trainers.peaks(trainer)
    return row | (_profiled(trainer) if case["experiment"] == "profile" else {})


def _profiled(trainer: TransformerTrainer) -> dict[str, Any]:
    """Kernels with their time, and casts of one step, by which a tensor changes its dtype, with
    that of the kernels that they launch.
    """
    with profiling(trainer.device) as profile:
        trainer.issue()
    row: dict[str, Any] = {"casts": 0, "casts_ms": 0.0, "kernels": 0, "kernels_ms": 0.0}
    for event in profile.key_averages():
        # A range's event on the device spans its kernels and is none itself.
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            row["kernels"] += event.count
            row["kernels_ms"] += event.self_device_time_total / 1e3
        elif event.key == CAST:
            row |= {"casts": event.count, "casts_ms": event.device_time_total / 1e3}
    return row


def optimizer(case: Case) -> dict[str, Any]:
    """AdamW's steps on random gradients, `least_bytes` that one must move, and on CUDA
    `transient_mib`, which a settled step allocates at its peak and gives back.
    """
    parameters = list(Transformer(config(case["model"]), device=case["device"]).parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    adam = adamw(parameters, case["optimizer"])
    adam.step()
    row: dict[str, Any] = {"least_bytes": PASSES * sum(p.nbytes for p in parameters)}
    if torch.device(case["device"]).type == "cuda":
        row["transient_mib"] = allocator.peak(adam.step, case["device"])
    times = timing.in_turns(
        {"optimizer": adam.step}, device=case["device"], warmup=1, repetitions=5, most=20,
        seconds=case["seconds"], flush_l2=False,
    )  # fmt: skip
    return row | summarize(times["optimizer"].samples_ms, "optimizer")


# --- steps in turns -------------------------------------------------------------------------------

rival(COMPILE, "eager", settings="Plain PyTorch")(lambda model: model)


@rival(COMPILE, "inductor")
def compiled(model: Transformer) -> Call:
    """torch.compile, dynamic=False, from an empty cache on disk."""
    return torch.compile(model, dynamic=False)


@rival(COMPILE, "linear", traits=frozenset({"on request"}))
def by_linear(model: Transformer) -> Call:
    """Every projection, the head's too, by fusedlib.linear; all else plain PyTorch."""
    same = sharing_copy(model)
    for module in list(same.modules()):
        if isinstance(module, nn.Linear):
            fused_class.fuse(module, apply.FusedLinear)
    return same


def work(case: Case) -> dict[str, Any]:
    """FLOPs of forward and backward by formula, and tokens of a step."""
    batch, context = case["batch_size"], case["context_length"]
    return {"flops": flops(shape_of(case), batch, context), "tokens": batch * context}


class Setup:
    """A trainer whose model the providers take turns in; each parameter has its moments."""

    def __init__(self, case: Case) -> None:
        self.trainer = TransformerTrainer.of(case)
        self.own = mlps(self.trainer.model)

    def check(self, case: Case) -> Checked:
        """Put one into the model, step until nothing compiles any more, weigh and check it."""
        trainer, one = self.trainer, rivals.get(RACES[case["experiment"]], case["provider"])
        place = placer(case, trainer.model, self.own)

        def put_in() -> None:
            trainer.call = place()

        put_in()
        assert trainer.optimizer is not None
        stepped = trainer.optimizer.param_groups[0]["params"]
        held = set(map(id, stepped))
        stepped.extend(p for p in trainer.model.parameters() if id(p) not in held)
        try:
            figures = {**one.facts(), **call_until_compiled(trainer.step, case["device"], 1)}
            figures |= trainers.peaks(trainer)
        finally:
            trainer.clear()
        figures |= checked(case)
        return Checked(figures, lambda timed: trainers.turn(trainer, put_in, steps=STEPS))


def mlps(model: Transformer) -> list[SwiGLU]:
    """A model's own MLPs, block by block."""
    return [part for part in model.modules() if isinstance(part, SwiGLU)]


def placer(case: Case, model: Transformer, own: Sequence[SwiGLU]) -> Callable[[], Call]:
    """What puts a case's provider into a model of these own MLPs, and gives the model as it is
    called then.
    """
    task = RACES[case["experiment"]]
    if task == COMPILE:
        call = rivals.get(COMPILE, case["provider"]).build(model)
        return lambda: call
    parts = [rivals.get(MODULE, case["provider"]).build(one) for one in own]

    def place() -> Call:
        for block, part in zip(model.blocks, parts, strict=True):
            block.mlp = part
        return model

    return place


def checked(case: Case) -> dict[str, Any]:
    """The largest error of the gradients, after logits and gradients were right."""
    torch.manual_seed(0)
    dtype, device = getattr(torch, WEIGHTS[case["precision"]]), case["device"]
    small = replace(shape_of(case), num_layers=LAYERS)
    model = Transformer(small, device=device, dtype=dtype)
    size = 2, case["batch_size"], case["context_length"]
    batch = torch.randint(small.vocab_size, size, device=device)
    exact = copy.deepcopy(model).double()
    true = _results(exact, exact, batch)
    cast = case["precision"] == "bf16 autocast"
    baseline = check.errors(_results(model, model, batch, cast), true)
    place = placer(case, model, mlps(model))
    errors = check.errors(_results(model, place(), batch, cast), true)
    gradients = [error.norm for name, error in errors.items() if name != "logits"]
    rounded = torch.float32 if case["precision"] == "fp32" else torch.bfloat16
    figures = {"gradients_error": max(gradients, default=None)}
    return check.require(errors, baseline, rounded, true, figures)


def _results(
    model: Transformer, call: Call, batch: Tensor, cast: bool = False
) -> dict[str, Tensor]:
    """Logits, under autocast or not, and the gradients that arrived by the state dict's names."""
    model.zero_grad(set_to_none=True)
    with autocast_bf16(batch.device) if cast else nullcontext():
        logits = call(batch[0])
    loss(logits, batch[1]).backward()
    arrived = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **arrived}


@contextmanager
def cold_compiler(case: Case) -> Iterator[None]:
    """fp32 products in fp32; where compilation is timed, an empty cache on disk, warm imports."""
    is_timed = case["experiment"] == "model"
    with matmul_settings("highest", True), warnings.catch_warnings():
        # This study wants its fp32 products in fp32, which Inductor takes for an oversight.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        with empty_compile_cache(case["device"]) if is_timed else nullcontext():
            yield


# --- what follows from the rows ------------------------------------------------------------------

BOTH = "both passes"
SECTIONS = {"forward": "forward", "backward": "backward", "both": BOTH, "optimizer": "optimizer",
            "step": "step"}  # fmt: skip
SHEETS = {
    "NVIDIA H200": {"fp32": 67e12, "bf16": 989.5e12},
    "NVIDIA H100 80GB HBM3": {"fp32": 67e12, "bf16": 989.5e12},
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": {"fp32": 125e12, "bf16": 500e12},
}
"""FLOP/s of dense products by the data sheet, by the card's whole name: an H100 on PCIe, an NVL and
a slice of a card have fewer. fp32 is without tensor cores. For bf16 NVIDIA's sheets have it with
sparsity: half of it; of the RTX PRO 6000 an eighth of its 4000 TOPS in sparse fp4."""
TEXTS = ["model", "precision", "attention", "ceiling", "device", "device_type", "device_name",
         "dtype", "optimizer", "samples_ms", "session"]  # fmt: skip
FIGURES = ["context_length", "flops", "tokens", "flops_per_s", "bytes_per_s", "median_ms",
           "compile_s", "held_mib", "both_peak_mib", "transient_mib", "least_bytes", "joules",
           *(f"{name}_median_ms" for name in SECTIONS)]  # fmt: skip


def derive(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    `execution` tells eager steps alone from compiled models; eager models that ran in turns with
    compiled ones have none. `host` marks steps on the CPU of a GPU's host. `mfu` is the FLOPs of
    forward and backward a second over the peak: of the data sheet where it is known, else of a
    large product of the same set. `cast_gain`: fp32's time over that of autocast, in the same set.
    `repaid`: after how many steps the compiler's seconds are saved again. `copy_ms`: the time of
    AdamW's bytes at the rate of a copy of 64 MiB, in the same set.
    """
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *TEXTS, *FIGURES])))
    rows = rows.assign(**rows[FIGURES].apply(pd.to_numeric, errors="coerce"))
    alone, model = (rows["experiment"] == name for name in ("step", "model"))
    compiled = rows["provider"] == "inductor"
    sizes = zip(rows["model"], rows["context_length"], strict=True)
    rows = rows.copy().assign(  # of many single columns pandas warns
        sized=[f"{model}·{context:.0f}" for model, context in sizes],
        execution=rows["provider"].where(model & compiled).mask(alone, "eager"),
        host=rows["device"] != rows["device_type"],
    )
    eager = rows[model & (rows["provider"] == "eager")]
    before = eager.drop_duplicates("session").set_index("session")["step_median_ms"]
    saved_ms = rows["session"].map(before) - rows["step_median_ms"]
    return rows.assign(
        layer=rows["sized"] + " " + rows["precision"].astype(object),
        mfu=_share_of_peak(rows), cast_gain=_cast_gain(rows),
        repaid=(1e3 * rows["compile_s"] / saved_ms).where((saved_ms > 0) & model & compiled),
        held_gib=rows["held_mib"] / 1024, peak_gib=rows["both_peak_mib"] / 1024,
        transient_gib=rows["transient_mib"] / 1024,
        copy_ms=1e3 * rows["least_bytes"] / _copy_rate(rows),
        token_mj=1e3 * rows["joules"] / rows["tokens"],
    )  # fmt: skip


def _share_of_peak(rows: pd.DataFrame) -> pd.Series:
    """Of each row that has FLOPs of forward and backward, their rate over the peak."""
    at = rows[["machine", "set"]].assign(
        kind=rows["precision"].map(lambda name: "fp32" if name == "fp32" else "bf16")
    )
    peak = pd.Series([
        SHEETS.get(str(device), {}).get(kind)
        for device, kind in zip(rows["device_name"], at["kind"], strict=True)
    ], rows.index, dtype=float)  # fmt: skip
    products = rows[rows["ceiling"] == "gemm"]
    products = products.assign(kind=products["dtype"].map({"float32": "fp32", "bfloat16": "bf16"}))
    rates = products.groupby(["machine", "set", "kind"])["flops_per_s"].max().rename("rate")
    peak = peak.fillna(at.join(rates, on=list(at))["rate"])
    return rows["flops"] / (rows["both_median_ms"] / 1e3) / peak.mask(rows["host"])


def _copy_rate(rows: pd.DataFrame) -> pd.Series:
    """Of each row the bytes a second of its set's copy."""
    copied = rows["bytes_per_s"].where(rows["ceiling"] == "copy")
    return copied.groupby([rows["machine"], rows["set"]]).transform("max")


def _cast_gain(rows: pd.DataFrame) -> pd.Series:
    """Of each row under autocast, fp32's time for forward and backward over its own."""
    keys = ["machine", "set", "experiment", "provider", "model", "context_length", "attention",
            "host"]  # fmt: skip
    at = rows[rows["both_median_ms"].notna()]
    cast, fp32 = (at[at["precision"] == name] for name in ("bf16 autocast", "fp32"))
    before = fp32.groupby(keys)["both_median_ms"].median().rename("fp32_ms")
    return cast[keys].join(before, on=keys)["fp32_ms"] / cast["both_median_ms"]


def by_section(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each step a row a section of it: `section`, its `median_ms` and `samples_ms`. Each has
    sessions of its own, so that a ratio is of one section."""
    pieces = []
    for column, name in SECTIONS.items():
        there = rows[rows[f"{column}_median_ms"].notna() & rows["both_median_ms"].notna()]
        samples = there.get(f"{column}_samples_ms", pd.Series(index=there.index, dtype=object))
        pieces.append(there.assign(
            section=name, median_ms=there[f"{column}_median_ms"], samples_ms=samples,
            session=[f"{session} {name}" for session in there["session"]],
        ))  # fmt: skip
    return pd.concat(pieces)
