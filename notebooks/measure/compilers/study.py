"""Study 11: a Llama compiled, in five parts, and two on several GPUs."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from measure import compilers, distributed, llama, study
from measure.compilers import BASELINE, TURN
from measure.racing import roofline
from measure.study import Column, Experiment, Positive, Size, Study

FORWARD, INFERENCE, GENERATION, TRAINING, SEVERAL = range(1, 6)
LAYERED = ("inductor-layers", "fused-inductor-layers")
Part = Annotated[int, Field(ge=1, le=6)]
Compiled = Annotated[int, Field(ge=1, le=4)]
Cases = list[dict[str, Any]]


class Sizes(study.Sizes):
    """Parts, arms and models of study 11."""

    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """cuda, cpu, or auto for the best there is"""
    parts: list[Part] = [1, 3, 4]
    """forward, inference, generation, training, two GPUs"""
    arms: list[str] = ["huggingface", "fused", "inductor"]
    """who is measured; all: every arm but the one that searches"""
    compiled: list[Compiled] = [1]
    """parts in which arms that compile do so"""
    searched: list[Compiled] = []
    """parts in which torch.compile also searches (max-autotune)"""
    unmasked: list[Compiled] = []
    """parts in which torch.compile also runs without a mask"""
    layered: list[Literal[1, 4]] = []
    """parts in which layers are also compiled one by one"""
    model: str = "two small layers"
    """of measure.llama.CONFIGS, in parts 1 to 3"""
    trained: str = ""
    """the same, in parts 4 and 5; empty: as `model`"""
    batch_size: Positive = 2
    """sequences of the forward pass"""
    context_length: Annotated[int, Field(ge=16)] = 32
    """tokens a sequence, in parts 1, 4 and 5"""
    generated: Annotated[int, Field(ge=20)] = 20
    """tokens that are generated"""
    iterations: Annotated[int, Field(ge=3)] = 6
    """of a training"""
    changing: list[str] = ["huggingface", "fused", "inductor"]
    """arms that also train with another length in every step; those that compile in part 4"""
    limit_s: Annotated[float, Field(ge=0)] = 120.0
    """an arm that is not ready by then is stopped"""
    changing_limit_s: Annotated[float, Field(ge=0)] = 120.0
    """the same for all steps of changing lengths"""
    strategies: list[str] = ["fsdp2-2", "fsdp2-3"]
    """how the processes of part 5 share a model"""
    several: list[str] = ["huggingface"]
    """arms of part 5"""
    processes: list[int] = [1, 2]
    """of part 5, one GPU each"""
    gemm_size: Size = 256
    """rows and columns of the product that is a ceiling"""
    copy_mib: Size = 32
    """size of the copy that is a ceiling"""

    @property
    def training(self) -> dict[str, Any]:
        """Model, batch and longest context of part 4."""
        return {
            "model": self.trained or self.model, "batch_size": 2,
            "context_length": self.context_length,
        }  # fmt: skip


def _ceilings(sizes: Sizes) -> Cases:
    """What the card itself reaches: a large product, a copy."""
    return roofline.cases(
        sizes.where, ["bfloat16"], gemm_size=sizes.gemm_size, copy_mib=sizes.copy_mib,
        repetitions=7,
    )  # fmt: skip


def _of_part(
    sizes: Sizes, part: int, variants: list[dict[str, Any]], **size: Any
) -> Cases:  # fmt: skip
    """The arms that a part asks for."""
    more: dict[str, Sequence[int]] = {
        "inductor-graphs-searched": sizes.searched, "inductor-causal": sizes.unmasked,
        **dict.fromkeys(LAYERED, sizes.layered),
    }  # fmt: skip
    asked = [*sizes.arms, *(arm for arm, parts in more.items() if part in parts)]
    limit_s = sizes.limit_s if part in sizes.compiled else 0.0
    return compilers.cases(variants, asked, limit_s=limit_s, device=sizes.where, **size)


def _forward(sizes: Sizes) -> Cases:
    if FORWARD not in sizes.parts:
        return []
    return _of_part(
        sizes, FORWARD, [{"experiment": "forward"}], repetitions=10, model=sizes.model,
        batch_size=sizes.batch_size, context_length=sizes.context_length,
    )  # fmt: skip


def _by_token(sizes: Sizes) -> Cases:
    """Token by token, each arm with both samplers."""
    parts = [part for part in (INFERENCE, GENERATION) if part in sizes.parts]
    if not parts:
        return []
    variants = [{"experiment": "inference", "sampler": "multinomial"}] * (INFERENCE in parts)
    generation = [{"experiment": "generation", "sampler": s} for s in compilers.SAMPLERS]
    variants += generation * (GENERATION in parts)
    return _of_part(
        sizes, parts[0], variants, repetitions=sizes.generated // compilers.TURN,
        model=sizes.model, batch_size=1, context_length=sizes.generated,
    )  # fmt: skip


def _training(sizes: Sizes) -> Cases:
    if TRAINING not in sizes.parts:
        return []
    kind = {"experiment": "training", "optimizer": "sgd"}
    return _of_part(
        sizes, TRAINING, [kind], repetitions=sizes.iterations // 3, **sizes.training
    )  # fmt: skip


def _dynamic(sizes: Sizes) -> Cases:
    """The same training with another length in every step."""
    if TRAINING not in sizes.parts:
        return []
    return compilers.cases(
        [{"experiment": "dynamic", "optimizer": "sgd"}], sizes.changing,
        limit_s=sizes.changing_limit_s if TRAINING in sizes.compiled else 0.0,
        device=sizes.where, repetitions=sizes.iterations, **sizes.training,
    )  # fmt: skip


def _several(sizes: Sizes) -> Cases:
    """One process under the first strategy, with which all others are compared; then these."""
    if SEVERAL not in sizes.parts:
        return []
    alone = sizes.strategies[:1], sizes.processes[:1]
    return [
        case for strategies, processes in (alone, (sizes.strategies, sizes.processes[1:]))
        for case in distributed.cases(
            strategies, sizes.several, model=sizes.training["model"], processes=processes,
            batch_sizes=[2], device=sizes.where, context_length=sizes.context_length,
            steps=sizes.iterations,
            warmup=max(1, sizes.iterations // 9),
        )
    ]  # fmt: skip


# --- what the columns mean -----------------------------------------------------------------------

WORKS = {
    "forward": "forward pass", "inference": "token, sampler uncompiled",
    "generation multinomial": "token, multinomial", "generation race": "token, race",
    "training sgd": "training step, SGD",
    "dynamic": "training, changing lengths", "distributed fsdp2-2": "FSDP2, weights kept",
    "distributed fsdp2-3": "FSDP2, gathered anew", "distributed zero-2": "ZeRO-2",
    "distributed zero-3": "ZeRO-3",
}  # fmt: skip
"""What is timed: an experiment, with its sampler, optimizer or strategy."""
KINDS = {"generation": "sampler", "training": "optimizer", distributed.EXPERIMENT: "strategy"}
COMPILERS = {
    "none": "no compiler", "inductor": "torch.compile", "inductor-dynamic": "any length",
    "inductor-causal": "no mask",
    "inductor-layers": "layer by layer", "inductor-graphs": "CUDA graph",
    "inductor-graphs-searched": "CUDA graph, search", "thunder": "Thunder",
}  # fmt: skip
STEPS = 45
"""Of a published training, whose total time is printed."""
COLUMNS = {
    "work": Column("work", names=WORKS),
    "experiment": Column(
        "experiment", names={"dynamic": "changing lengths", distributed.EXPERIMENT: "several GPUs"}
    ),
    "compiler": Column("compiler", names=COMPILERS),
    "operations": Column(
        "operations",
        names={BASELINE: "Hugging Face's operations", "fused": "fusedlib's operations"},
    ),
    "processes": Column("GPUs", ",d"),
    "median_ms": Column("time", "3 ms"),
    "call_ms": Column("time of a call", "3 ms"),
    "over_least": Column("time over the least possible", "3×"),
    "published_as": Column("as published", "3"),
    "first_s": Column("first call", "2 s"),
    "compiling_s": Column("compiling", "2 s"),
    "pays_after": Column("calls until compiling has paid", ",d", log=True),
    "graphs": Column("graphs", ",d"),
    "iteration": Column("step", ",d"),
    "elapsed_s": Column("since the first step began", "3 s", log=True),
    "done": Column("steps done", ",d"),
    "total_s": Column("all steps", "3 s"),
    "peak_gib": Column("peak memory", "3 GiB"),
    "tokens_per_s": Column("tokens/s", ",d"),
    "hidden_share": Column("communication hidden", "2%"),
    "error": Column("error", "2"),
}  # fmt: skip
USED = [
    "experiment", "subject", "provider", *KINDS.values(), "model", "tokens", "session",
    "median_ms", "samples_ms", "compile_s", "peak_mib", "temporaries_mib", "total_s",
    "flops_per_s", "bytes_per_s", "weights_bytes", "cache_bytes", "hidden_share",
]  # fmt: skip


def described(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    `work` says what is timed, `compiler` and `operations` who does it. A call is a forward pass, a
    token or a training step: `call_ms`. `over_least` is its time over the least that the machine
    allows (`least_ms`). `pays_after` is after how many calls compiling has paid, beside Hugging
    Face's time in the same session; missing where less than 2 % are saved. `published_as` is a time
    in the unit of Lit-GPT's tables: s of a forward pass or of 45 training steps, tokens/s.

    Memory of a training is missing where the row is older than the count of temporaries: it then
    began with gradients of the implementation before.
    """
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *USED])))
    work = rows["experiment"].astype(object)
    for experiment, kind in KINDS.items():
        work = work.where(work != experiment, experiment + " " + rows[kind].astype(object))
    provider = rows["provider"].fillna("").astype(str)
    fused = provider.str.startswith("fused")
    token = rows["subject"] == "decoding"
    call_ms = rows["median_ms"].astype(float) / np.where(token, TURN, 1)
    own = provider != BASELINE
    compiling = rows["compile_s"].astype(float).where(own & ~(token & (provider == "fused")))
    session = ["machine", "recording", "session"]
    partner = rows[~own & rows["session"].notna()].assign(eager=call_ms)
    partner = partner.drop_duplicates(session)
    eager = rows[session].merge(partner[[*session, "eager"]], how="left", on=session)["eager"]
    saved = eager.set_axis(rows.index) - call_ms
    peaks = rows.groupby(["machine", "recording"], observed=True)[["flops_per_s", "bytes_per_s"]]
    sides = rows.to_dict("records"), peaks.transform("max").to_dict("records")
    least = [least_ms(row, peak) for row, peak in zip(*sides, strict=True)]
    whole = {"forward": 1e-3 * call_ms, "dynamic": rows["total_s"].astype(float)}
    unit = rows["experiment"].map(lambda name: name if name in whole else "training")
    published_as = (1e-3 * STEPS * call_ms).where(~token, 1e3 / call_ms)
    for name, value in whole.items():
        published_as = published_as.where(unit != name, value)
    counted = (rows["experiment"] != "training") | rows["temporaries_mib"].notna()
    return rows.assign(
        work=work, call_ms=call_ms, compiling_s=compiling, published_as=published_as,
        operations=fused.map({True: "fused", False: BASELINE}),
        compiler=provider.str.removeprefix("fused-").replace({BASELINE: "none", "fused": "none"}),
        over_least=call_ms / pd.Series(least, rows.index, float),
        pays_after=(1e3 * compiling / saved).where(saved > 0.02 * call_ms),
        peak_gib=rows["peak_mib"].astype(float).where(counted) / 1024,
        hidden_share=rows["hidden_share"].astype(float).clip(lower=0),
        done=rows["samples_ms"].map(lambda s: len(s) if isinstance(s, list) else np.nan),
    )  # fmt: skip


def least_ms(row: Mapping[str, Any], peak: Mapping[str, float]) -> float:
    """Least time of a call at a machine's rates: a token reads all weights and the cache once at
    the rate of a copy; a forward pass computes the linear layers' products at the rate of a large
    one, a training step three times as many.
    """
    if row["subject"] == "decoding":
        return 1e3 * (row["weights_bytes"] + row["cache_bytes"]) / peak["bytes_per_s"]
    fields = llama.CONFIGS.get(row["model"])
    if fields is None or not row["subject"]:
        return np.nan
    hidden, inner = fields["hidden_size"], fields["intermediate_size"]
    weights = fields["num_hidden_layers"] * (4 * hidden**2 + 3 * hidden * inner)
    flops = 2 * row["tokens"] * (weights + hidden * fields["vocab_size"])
    return 1e3 * (3 if row["subject"] == "training" else 1) * flops / peak["flops_per_s"]


def by_iteration(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a step of each training with changing lengths: `iteration`, and `elapsed_s` by then."""
    ran = rows[(rows["experiment"] == "dynamic") & rows["samples_ms"].notna()]
    steps = ran.assign(
        iteration=[range(1, len(ms) + 1) for ms in ran["samples_ms"]],
        elapsed_s=[list(np.cumsum(ms) / 1e3) for ms in ran["samples_ms"]],
    )
    return steps.explode(["iteration", "elapsed_s"]).astype({"iteration": int, "elapsed_s": float})


def from_tables(tables: pd.DataFrame) -> pd.DataFrame:
    """Lit-GPT's tables with the columns of measured rows, and `ratio` over eager PyTorch.

    Inductor had CUDA graphs for tokens and on one GPU with equal lengths. On two GPUs it compiled
    the whole model; layer by layer is what was measured.
    """
    works = {
        "1 forward": "forward", "Compiled model inference": "inference",
        "Compiled generation inference": "generation race",
        "Single-device training": "training sgd",
    }  # fmt: skip
    stage = tables["sharding_stage"].map({2: "distributed fsdp2-2", 3: "distributed fsdp2-3"})
    work = tables["table"].map(works).fillna(stage).mask(tables["shapes"] == "dynamic", "dynamic")
    plain = {"forward": "inductor", "dynamic": "inductor"}
    inductor = work.map(plain).fillna("inductor-graphs").mask(stage.notna(), "inductor-layers")
    names = {"eager": BASELINE, "thunder": "thunder"}
    rows = tables.assign(
        work=work, provider=tables["method"].map(names).fillna(inductor),
        published_as=tables["time_s"].fillna(tables["tokens_per_s"]),
        peak_gib=tables["memory_gb"] * 1e9 / 2**30,
    )  # fmt: skip
    speed = rows["tokens_per_s"].fillna(1 / rows["time_s"])
    eager = speed.where(rows["provider"] == BASELINE)
    ratio = speed / eager.groupby(work).transform("max")
    return rows.assign(ratio=ratio.where(rows["provider"] != BASELINE))


STUDY = Study(
    "11_compilers", Sizes,
    [
        Experiment("ceilings", roofline.measure, _ceilings),
        Experiment("forward", compilers.RACE, _forward),
        Experiment("token by token", compilers.RACE, _by_token),
        Experiment("training", compilers.RACE, _training),
        Experiment("other lengths", compilers.dynamic, _dynamic),
        Experiment("several GPUs", distributed.measure, _several),
    ],
    COLUMNS, described,
    repeats=("against", "repetitions", "limit_s", "steps", "warmup"),
)  # fmt: skip
