"""Study 10: what is measured of a whole Llama training step, in the order it is measured."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field, field_validator

from fusedlib.bench.arguments import require_known
from measure import distributed, llama, study
from measure.llama import operations
from measure.racing import sustained
from measure.racing.cases import Case
from measure.racing.settings import MIB
from measure.study import Column, Experiment, PerRun, Positive, Size, Study

KNOWN = (
    "all", "step", "families", "memory", "limit", *operations.TASKS, "distributed", "sustained",
    "product", "fp32", "gradients", "first-steps",
)  # fmt: skip
TRAINED_BATCH, LEARNING_RATE = 8, 3e-4
HOST_BOUND_TOKENS = 4096  # of a step; above, the card computes for longer than the host issues
Dtype = Literal["bfloat16", "float16", "float32"]
Context = Annotated[int, Field(ge=2)]
Cases = list[dict[str, Any]]


class Sizes(study.Sizes):
    """Models, arms, batches and contexts of study 10."""

    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """cuda, cpu, or auto for the best there is"""
    model: str = "two layers"
    """configuration, of measure.llama.CONFIGS"""
    dtype: Dtype = "float32"
    """of weights, gradients and moments"""
    more_dtypes: list[Dtype] = []
    """in which the headline's size is run besides"""
    arms: list[str] = ["huggingface", "liger", "fused", "fused-loss"]
    """headline; or all"""
    few: list[str] = ["huggingface", "liger-without-flce", "liger", "fused"]
    """at the other sizes"""
    batch_size: Positive = 4
    """sequences at the headline's size"""
    context: Context = 32
    """tokens a sequence there"""
    batches: list[int] = [1, 8]
    """sequences of `batch_context` tokens"""
    batch_context: Context = 16
    """tokens a sequence where the batch grows"""
    contexts: list[int] = [16, 64]
    """tokens a sequence where the context grows, headline's batch"""
    families: list[str] = ["two Qwen3 layers"]
    """models of several families, at the headline's batch and context"""
    family_arms: list[str] = ["huggingface", "liger", "fused"]
    """in these models"""
    stepped: list[str] = ["huggingface", "liger", "fused"]
    """arms of whole steps, memory and limits"""
    loaded: list[str] = ["huggingface", "fused"]
    """arms that also run sustained, with energy"""
    load_seconds: Annotated[float, Field(ge=0.01, le=60)] = 0.2
    """seconds of a sustained measurement, after heating"""
    gemm_size: Size = 256
    """rows and columns of the plain product under load"""
    precise: list[str] = []
    """arms in fp32, at both settings of its products"""
    trained: list[str] = ["huggingface", "liger", "liger-fp32", "fused"]
    """arms that train"""
    train_model: str = "two layers"
    """configuration that is trained"""
    train_steps: Positive = 10
    """steps of a training, or at most"""
    train_tokens: Context = 16
    """tokens a sequence of that training, of eight sequences a step"""
    offloaded: list[str] = ["huggingface", "liger", "fused"]
    """arms under DeepSpeed"""
    offload_batches: list[int] = [2]
    """sequences of `batch_context` tokens under DeepSpeed"""
    offload_steps: Positive = 3
    """measured steps under DeepSpeed"""
    experiments: list[str] = ["all"]
    """what is measured: step, memory, limit, loss, rope and so on"""
    operation_rivals: list[str] = ["all"]
    """beside whom loss, norm and rope run; inductor by its name"""
    operation_widths: list[int] = [64, 128]
    """hidden sizes of loss, norm and rope"""
    vocabulary: Positive = 1000
    """of that loss"""
    repetitions: Annotated[int, Field(ge=1, le=1000)] = 2
    """rounds that are measured at least"""
    host_bound_repetitions: Annotated[int, Field(ge=1, le=1000)] = 2
    """rounds of steps of up to 4,096 tokens, where the host may set the pace"""

    @field_validator("experiments")
    @classmethod
    def _are_known(cls, experiments: list[str]) -> list[str]:
        require_known("experiment", experiments, KNOWN)
        return experiments

    @property
    def headline(self) -> dict[str, Any]:
        """Model, batch, context and dtype of the headline."""
        return {
            "model": self.model, "device": self.device, "batch_size": self.batch_size,
            "context_length": self.context, "dtype": self.dtype,
        }  # fmt: skip

    @property
    def turns(self) -> dict[str, Any]:
        """The headline in turns, forward and backward."""
        return {**self.headline, "optimizer": False, "repetitions": self.repetitions}

    @property
    def training(self) -> dict[str, Any]:
        """The training whose losses and gradients are compared."""
        return {
            "model": self.train_model, "dtype": self.dtype, "batch_size": TRAINED_BATCH,
            "device": self.device, "context_length": self.train_tokens,
            "learning_rate": LEARNING_RATE,
        }  # fmt: skip


def _steps(sizes: Sizes) -> Cases:
    turns, batch, context = sizes.turns, sizes.batch_size, sizes.batch_context
    listed = llama.cases("step", sizes.arms, group="arms", **turns)
    for dtype in sizes.more_dtypes:
        listed += llama.cases("step", sizes.few, group="arms", **turns | {"dtype": dtype})
    listed += llama.cases("step", sizes.stepped, group="whole", **turns | {"optimizer": True})
    shapes = [(n, context) for n in sizes.batches] + [(batch, n) for n in sizes.contexts]
    for count, length in shapes:
        there = {"batch_size": count, "context_length": length}
        few = count * length <= HOST_BOUND_TOKENS
        there["repetitions"] = (
            sizes.host_bound_repetitions if few else max(1, sizes.repetitions // 2)
        )
        listed += llama.cases("step", sizes.few, group="sizes", **turns | there)
    return listed


def _families(sizes: Sizes) -> Cases:
    return [
        case for name in sizes.families
        for case in llama.cases(
            "families", sizes.family_arms, group="families", **sizes.turns | {"model": name}
        )
    ]  # fmt: skip


def _operations(sizes: Sizes) -> Cases:
    return [
        case for task in operations.TASKS
        for case in operations.cases(
            task, sizes.operation_rivals, widths=sizes.operation_widths,
            vocabulary=sizes.vocabulary, dtype=sizes.dtype, batch_size=sizes.batch_size,
            context_length=sizes.context, device=sizes.device, repetitions=sizes.repetitions,
        )
    ]  # fmt: skip


def _memory(sizes: Sizes) -> Cases:
    listed = llama.cases("memory", sizes.stepped, **sizes.headline)
    for grows, length in (("batch", sizes.batch_context), ("context", sizes.context)):
        there = sizes.headline | {"context_length": length}
        listed += llama.cases("limit", sizes.stepped, grows=grows, **there)
    return listed


def _offloaded(sizes: Sizes) -> Cases:
    return distributed.cases(
        ["offload-throttled"], sizes.offloaded, model=sizes.model, processes=[1],
        batch_sizes=sizes.offload_batches, context_length=sizes.batch_context, dtype="bfloat16",
        optimizer="adamw", checkpointing=True, warmup=1, steps=sizes.offload_steps,
        device=sizes.device,
    )  # fmt: skip


def _under_load(sizes: Sizes) -> list[Case]:
    once = llama.cases("step", sizes.loaded, group="arms", **sizes.turns | {"repetitions": 1})
    return [*sustained.loaded_cases(once, seconds=sizes.load_seconds)]


def _products(sizes: Sizes) -> Cases:
    return sustained.products(
        sizes.where, [sizes.dtype], size=sizes.gemm_size, seconds=sizes.load_seconds
    )  # fmt: skip


def _in_fp32(sizes: Sizes) -> Cases:
    there = {"dtype": "float32", "group": "fp32", "repetitions": max(1, sizes.repetitions // 2)}
    return [
        case for precision in ("highest", "high")
        for case in llama.cases(
            "fp32", sizes.precise, precision=precision, **sizes.turns | there
        )
    ]  # fmt: skip


def _alike(sizes: Sizes) -> list[str]:
    return [llama.BASELINE, llama.OTHER_ATTENTION, *sizes.trained]


def _first_steps(sizes: Sizes) -> Cases:
    steps = min(llama.FIRST_STEPS, sizes.train_steps)
    return [
        case for seed in range(min(llama.SEEDS, sizes.repetitions))
        for case in llama.cases(
            "first-steps", [llama.EXACT, *_alike(sizes)], seed=seed, steps=steps, **sizes.training
        )
    ]  # fmt: skip


def _gradients(sizes: Sizes) -> Cases:
    moments = [step for step in llama.MOMENTS if step <= sizes.train_steps]
    return [
        case for seed in range(llama.MOMENT_SEEDS) for step in moments
        for case in llama.cases("gradients", _alike(sizes), seed=seed, step=step, **sizes.training)
    ]  # fmt: skip


def _asked(cases: Callable[[Sizes], list[Any]]) -> Callable[[Sizes], list[Case]]:
    """Those of the experiments that `Sizes.experiments` names."""

    def of(sizes: Sizes) -> list[Case]:
        listed = cases(sizes)
        if "all" in sizes.experiments:
            return listed
        return [case for case in listed if case["experiment"] in sizes.experiments]

    return of


PARTS = {  # from their second colour on, as in study 09
    "weights": "weights", "gradients": "gradients", "optimizer": "AdamW's moments",
    "activations": "saved by layers", "logits": "as wide as the vocabulary",
    "temporaries": "temporary",
}  # fmt: skip
IMPLEMENTATIONS = ("fused", "liger", "inductor")
SWITCHES = {
    "fused": "all", "liger": "all", "liger-without-flce": "all but the loss",
    "fused-rms-norm": "norms", "liger-rms-norm": "norms", "fused-loss": "loss",
    "liger-flce": "loss", "fused-rope": "RoPE", "liger-rope": "RoPE", "fused-mlp": "MLP",
    "liger-swiglu": "MLP", "fused-attention": "q, k and v", "huggingface": "none",
}  # fmt: skip
COLUMNS = {
    "experiment": Column(
        "operation",
        names={"loss": "loss", "norm": "norm", "rope": "rope",
               "step": "whole steps", "families": "families of models",
               "memory": "by the allocator's history",
               "gradients": "at equal weights", "distributed": "under DeepSpeed"},
    ),
    "family": Column("implementation"),
    "model": Column("model"),
    "switch": Column("switch", names={name: name for name in SWITCHES.values()}),
    "group": Column(
        "steps",
        names={"arms": "forward and backward", "whole": "with AdamW", "sizes": "other sizes"},
    ),
    "direction": Column(
        "direction", names={"forward": "forward", "forward+backward": "forward and backward"}
    ),
    "dtype": Column("dtype", names={"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}),
    "precision": Column(
        "torch's fp32 products", names={"highest": '"highest"', "high": '"high", TF32'}
    ),
    "strategy": Column(
        "DeepSpeed's settings",
        names={"published": "published", "offload-throttled": "as published"},
    ),
    "grows": Column("what grows", names={"batch": "batch", "context": "context"}),
    "grown_to": Column("sequences, or tokens of four sequences", ",d", log=True),
    "weights_on": Column(
        "weights", names={"CPU": "weights on the CPU, published", "GPU": "weights on the GPU"}
    ),
    "figure": Column(
        "figure", names={"rate": "thousand tokens/s", "memory": "activations, GiB"}
    ),
    "value": Column("throughput and memory", "3"),
    "batch_size": Column("batch", ",d", log=True),
    "context_length": Column("context", ",d", log=True),
    "size": Column("batch × context"),
    "hidden_size": Column("hidden size", ",d", log=True),
    "tokens": Column("tokens a step", ",d", log=True),
    "tokens_per_s": Column("throughput", "3 tokens/s", log=True),
    "step": Column("steps of training before"),
    "activations_gib": Column("memory besides weights and gradients, GiB", "3"),
    "peak_gib": Column("peak memory, GiB", "3"),
    "host_gib": Column("memory of the host, GiB", "3"),
    "part": Column("part", names={name: name for name in ("workspaces", *PARTS.values())}),
    "part_gib": Column("held at the peak of a whole step", "3 GiB"),
    "forward_median_ms": Column("forward", "3 ms"),
    "backward_median_ms": Column("backward", "3 ms"),
    "worst_gradient": Column("largest error", "3×"),
}  # fmt: skip
USED = [
    "group", "dtype", "tokens", "median_ms", "samples_ms", "tokens_per_s", "peak_mib", "host_mib",
    "activations_mib", "joules", "losses", "seed", "parameters", "gradient_errors", "usual_errors",
    *(f"peak_{name}_mib" for name in PARTS),
]  # fmt: skip


def described(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    `family` is whose implementation it is, and `switch` what it replaces of Hugging Face's.
    Errors of gradients are over Hugging Face's own at the same weights: `worst_gradient` is the
    largest, and `missed` counts those that the rule of `wrong_gradients` refuses.
    """
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *USED])))
    counts = ["batch_size", "context_length", "tokens", "median_ms", "tokens_per_s", "joules"]
    batch, context, tokens, ms, rate, joules = (rows[name].astype(float) for name in counts)
    tokens = tokens.fillna(batch * context)
    judged = [_judged(row) for row in rows[[*JUDGED, "dtype"]].to_dict("records")]
    worst, missed = zip(*judged, strict=True) if judged else ((), ())
    size = [f"{n:.0f} × {length:,.0f}" for n, length in zip(batch, context, strict=True)]
    order = pd.Series(size, rows.index).loc[tokens.sort_values(kind="stable").index].unique()
    family = rows["provider"].str.extract(rf"^({'|'.join(IMPLEMENTATIONS)})", expand=False)
    gib = {f"{name}_gib": rows[f"{name}_mib"] / 1024 for name in ("peak", "host", "activations")}
    return rows.assign(
        tokens=tokens, tokens_per_s=rate.fillna(1e3 * tokens / ms), token_mj=1e3 * joules / tokens,
        size=pd.Categorical(size, order), weights_on="GPU", worst_gradient=worst, missed=missed,
        family=family.fillna(rows["provider"]), switch=rows["provider"].map(SWITCHES), **gib,
    )  # fmt: skip


JUDGED = ["parameters", "gradient_errors", "usual_errors"]


def _judged(row: Mapping[str, Any]) -> tuple[float, float]:
    """The largest error of a gradient over the usual one, and how many the rule refuses."""
    if not isinstance(row["parameters"], list):
        return np.nan, np.nan
    errors = row["gradient_errors"]
    if not isinstance(errors, list):
        return np.inf, len(llama.wrong_gradients(row))
    over = np.array(errors, float) / np.array(row["usual_errors"], float)
    return float(np.nan_to_num(over, nan=np.inf).max()), len(llama.wrong_gradients(row))


def from_tables(tables: pd.DataFrame) -> pd.DataFrame:
    """The published figures in the columns of the study's own rows.

    All of a published peak counts as activations: weights, gradients and moments lie in the host's
    memory. Figures of `experiment` "step" are those that the source draws, of "run" those it logs.
    """
    drawn = tables["table"].str.startswith("drawing.py")
    headline = (tables["batch_size"] == 4) & (tables["context_length"] == 2048)
    mib = tables["peak_bytes"] / MIB
    rows = tables.assign(
        experiment=drawn.map({True: "step", False: "run"}), strategy="published", dtype="float16",
        group=headline.map({True: "arms", False: "sizes"}), model="Llama-3.2-1B", peak_mib=mib,
        activations_mib=mib, median_ms=1e3 * tables["latency_s"],
    )  # fmt: skip
    return described(rows).assign(weights_on="CPU")


def grown(rows: pd.DataFrame) -> pd.DataFrame:
    """Forward and backward passes at several sizes, a row for each size that `grows` in it.

    Those of "context" have the headline's batch, those of "batch" the context of all other batches;
    `grown_to` is the context or the batch.
    """
    steps = rows[rows["group"].isin(["arms", "sizes"]) & (rows["experiment"] == "step")]
    run = [steps["machine"], steps["recording"]]
    batch, length = steps["batch_size"], steps["context_length"]
    headline = batch.where(steps["group"] == "arms").groupby(run, observed=True)
    same_batch = batch == headline.transform("first")
    others = length.mask(same_batch).groupby(run, observed=True)
    of_batch = steps[length == others.transform("first")]
    of_context = steps[same_batch]
    return pd.concat(
        [of_batch.assign(grows="batch", grown_to=of_batch["batch_size"]),
         of_context.assign(grows="context", grown_to=of_context["context_length"])]
    )  # fmt: skip


def with_figures(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of steps, one for the throughput and one for the memory: `figure`, and its `value`."""
    rate = rows.assign(figure="rate", value=rows["tokens_per_s"] / 1e3)
    return pd.concat([rate, rows.assign(figure="memory", value=rows["activations_gib"])])


def peak_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of "memory", one for each part of the peak: `part`, and `part_gib`."""
    peaks = rows[rows["experiment"] == "memory"]
    return pd.concat(
        [peaks.assign(part=name, part_gib=peaks[f"peak_{part}_mib"] / 1024)
         for part, name in PARTS.items()]
    )  # fmt: skip


STUDY = Study(
    "10_llama", Sizes,
    [
        Experiment("steps", llama.RACE, _asked(_steps)),
        Experiment("families", llama.RACE, _asked(_families)),
        Experiment("operations", operations.RACE, _asked(_operations)),
        Experiment("memory", llama.measure, _asked(_memory)),
        Experiment("offloaded", distributed.measure, _asked(_offloaded)),
        Experiment("under load", llama.LOADED, _asked(_under_load)),
        Experiment("products under load", sustained.product, _asked(_products)),
        Experiment("fp32", llama.FP32, _asked(_in_fp32)),
        Experiment("first steps", llama.measure, _asked(_first_steps)),
        Experiment(
            "gradients", PerRun(lambda sizes: llama.Trajectory().measure), _asked(_gradients)
        ),
    ],
    COLUMNS, described,
)  # fmt: skip
