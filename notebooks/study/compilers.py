"""What a compiler gives a Llama on one GPU and on two, and what compiling costs.

`experiment` says what is timed: a "forward" pass of a batch without gradients; a token at a time
with a static cache, whose sampler stays eager ("inference") or is compiled as the model is
("generation"); a "training" step; or as "dynamic" the same from the first step on, every step
another length; "distributed" trains on several GPUs. A compiler takes turns with Hugging Face's
eager model in a race of its own, which `against` names.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from fusedlib.bench.arguments import require_known, require_least
from study import compiled_llama, distributed, patched, rivals, roofline
from study.cases import Case, Row, device_of
from study.compiled_llama import BASELINE, SAMPLERS, TASK, TURN, Decoding, Forward, Setup, Training
from study.race import each, timed
from study.run import sized

QUICK: dict[str, Any] = {
    "device": "auto",  # cuda, cpu, or auto for the best there is
    "forward": ["fused", "inductor"],  # who runs a forward pass beside Hugging Face's eager model
    "inference": [],  # a token, the sampler eager
    "generation": ["fused"],  # a token, the sampler compiled too
    "training": ["fused"],  # a training step
    "changing": ["huggingface", "fused"],  # a training whose steps differ in length
    "several": [],  # a training on one and on two GPUs; implementations of the topic llama
    "model": "two small layers",  # of forward passes and tokens
    "trained": "two small layers",  # of trainings
    "batch_size": 2,  # sequences of a forward pass; of trainings it is 2
    "context_length": 32,  # tokens a sequence; where lengths change, the most
    "generated": 20,  # tokens of a sequence that is generated
    "iterations": 6,  # steps of a training
    "limit_s": 120.0,  # who has not compiled by then, or made all steps of changing lengths, ends;
    # who searches for its tiles has twice as long
    "gemm_size": 256,  # rows and columns of the product that is a ceiling
    "copy_mib": 32,  # size of the copy that is a ceiling
}
_MORE = ["inductor-causal", "inductor-causal-searched", "inductor-layers", "fused-inductor-layers"]
FULL: dict[str, Any] = QUICK | {
    "forward": ["all", *_MORE],
    "inference": ["all", "inductor-graphs-searched"],
    "generation": ["all", "inductor-graphs-searched"],
    "training": ["all", *_MORE],
    "changing": ["huggingface", "fused", "inductor-layers", "fused-inductor-layers", "inductor"],
    "several": ["huggingface", "inductor-layers", "fused", "fused-inductor-layers"],
    "model": "Llama-2-7B", "trained": "open_llama_3b", "batch_size": 10, "context_length": 2048,
    "generated": 200, "iterations": 45, "limit_s": 200.0,
    "gemm_size": 8192, "copy_mib": 2048,
}  # fmt: skip
PROFILES = {"quick": QUICK, "full": FULL}
"""Those of `full` are the published tables' sizes. `several` needs two GPUs."""
SETUPS: dict[str, type[Setup]] = {"forward": Forward, "decoding": Decoding, "training": Training}
SAME = ("subject", "model", "batch_size", "context_length", "dtype", "device")
KINDS = {"generation": "sampler", "training": "optimizer", "distributed": "strategy"}
STEPS = 45
"""Of a published training, whose total time is printed."""

# --- cases ---------------------------------------------------------------------------------------


def cases(profile: str = "quick", **sizes: Any) -> list[dict[str, Any]]:
    """What is measured: ceilings, each compiler in a race of its own, trainings of another length
    in every step, and on several GPUs.
    """
    s = sized(PROFILES, profile, sizes)
    require_known("model", [s.model, s.trained], patched.CONFIGS)
    require_least(TURN, generated=s.generated)
    require_least(3, iterations=s.iterations)
    require_least(2, context_length=s.context_length)
    device = device_of(s.device)
    shared = {"dtype": "bfloat16", "limit_s": s.limit_s, "device": device}
    at = {"model": s.model, "batch_size": s.batch_size, "context_length": s.context_length}
    forward = {"experiment": "forward", "subject": "forward", **shared, **at, "repetitions": 10}
    token = {
        "subject": "decoding", **shared, "model": s.model, "batch_size": 1,
        "context_length": s.generated,
        "repetitions": s.generated // TURN,
    }  # fmt: skip
    step = {"subject": "training", "optimizer": "sgd", **shared, **at}
    step |= {"model": s.trained, "batch_size": 2}
    training = {"experiment": "training", **step, "repetitions": s.iterations // 3}
    listed = roofline.cases(
        device, ["bfloat16"], gemm_size=s.gemm_size, copy_mib=s.copy_mib, repetitions=7
    )
    listed += [c for name in rivals.chosen(TASK, s.forward) for c in _beside(name, forward)]
    inference, generation = (rivals.chosen(TASK, names) for names in (s.inference, s.generation))
    for name in dict.fromkeys([*inference, *generation]):  # compiled once for all of its races
        samplers = [("inference", "multinomial")] * (name in inference)
        samplers += [("generation", sampler) for sampler in SAMPLERS if name in generation]
        for experiment, sampler in samplers:
            listed += _beside(name, {"experiment": experiment, "sampler": sampler, **token})
    listed += [c for name in rivals.chosen(TASK, s.training) for c in _beside(name, training)]
    changing = {"experiment": "dynamic", **step, "steps": s.iterations}
    listed += [{**changing, "provider": name} for name in rivals.chosen(TASK, s.changing)]
    return listed + _several(s, device)


def _beside(name: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    """A race: an implementation and the eager model that takes turns with it."""
    pair = (BASELINE, name) if name != BASELINE else ()
    seconds = case["limit_s"] * (1 + ("searched" in rivals.get(TASK, name).traits))
    return [{**case, "against": name, "provider": one, "limit_s": seconds} for one in pair]


def _several(s: Any, device: str) -> list[dict[str, Any]]:
    """One process under the first strategy, with which all others are compared; then two."""
    there: dict[str, Any] = {
        "model": s.trained, "batch_sizes": [2], "device": device,
        "context_length": s.context_length, "steps": s.iterations,
    }  # fmt: skip
    alone = distributed.cases(["fsdp2-2"], s.several, processes=[1], **there)
    return alone + distributed.cases(["fsdp2-2", "fsdp2-3"], s.several, processes=[2], **there)


def measure(race: list[Case]) -> list[Row]:
    """A row a case: times in turns, or a ceiling's rate, or a training alone."""
    kind = race[0]["experiment"]
    if kind == "ceiling":
        return each(race, roofline.measure)
    if kind == "dynamic":
        return each(race, compiled_llama.changing)
    if kind == "distributed":
        return each(race, distributed.measure)
    return timed(
        race, lambda case: SETUPS[case["subject"]](case), same=SAME, available=available,
        work=_tokens, rounds=int(race[0]["repetitions"]), warmup=1, bursts=False,
    )  # fmt: skip


def _tokens(case: Case) -> dict[str, Any]:
    """Tokens of a sample."""
    decoding = case["subject"] == "decoding"
    return {"tokens": TURN if decoding else case["batch_size"] * case["context_length"]}


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here."""
    if case["experiment"] == "distributed":
        distributed.require_available(case)
    elif case["experiment"] != "ceiling":
        compiled_llama.available(case)


# --- what follows from the rows ------------------------------------------------------------------

USED = [
    "experiment", "subject", "provider", *KINDS.values(), "model", "tokens", "session", "set",
    "median_ms", "samples_ms", "compile_s", "peak_mib", "temporaries_mib", "total_s",
    "flops_per_s", "bytes_per_s", "weights_bytes", "cache_bytes", "hidden_share",
]  # fmt: skip


def derive(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    `work` says what is timed, `compiler` and `operations` who does it. A call is a forward pass, a
    token or a training step: `call_ms`. `over_least` is its time over the least that the machine
    allows (`least_ms`) at the ceilings of the same set. `pays_after` is after how many calls
    compiling has paid, beside Hugging Face's time in the same session; missing where less than 2 %
    are saved. `published_as` is a time in the unit of Lit-GPT's tables: s of a forward pass or of
    45 training steps, tokens/s.

    Memory of a training is missing where the row is older than the count of temporaries: it then
    began with gradients of the implementation before.
    """
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *USED])))
    work = rows["experiment"].astype(object)
    for experiment, kind in KINDS.items():
        work = work.where(work != experiment, experiment + " " + rows[kind].astype(object))
    provider = rows["provider"].fillna("").astype(str)
    fused, own = provider.str.startswith("fused"), provider != BASELINE
    token = rows["subject"] == "decoding"
    call_ms = rows["median_ms"].astype(float) / np.where(token, TURN, 1)
    compiling = rows["compile_s"].astype(float).where(own & ~(token & (provider == "fused")))
    session = ["machine", "set", "session"]
    partner = rows[~own & rows["session"].notna()].assign(eager=call_ms).drop_duplicates(session)
    eager = rows[session].merge(partner[[*session, "eager"]], how="left", on=session)["eager"]
    saved = eager.set_axis(rows.index) - call_ms
    peaks = rows.groupby(["machine", "set"])[["flops_per_s", "bytes_per_s"]].transform("max")
    sides = rows.to_dict("records"), peaks.to_dict("records")
    least = [least_ms(row, peak) for row, peak in zip(*sides, strict=True)]
    whole = {"forward": 1e-3 * call_ms, "dynamic": rows["total_s"].astype(float)}
    published_as = (1e-3 * STEPS * call_ms).where(~token, 1e3 / call_ms)
    for name, value in whole.items():
        published_as = published_as.where(rows["experiment"] != name, value)
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
    fields = patched.CONFIGS.get(row["model"])
    if fields is None or row["subject"] not in SETUPS:
        return np.nan
    hidden, inner = fields["hidden_size"], fields["intermediate_size"]
    weights = fields["num_hidden_layers"] * (4 * hidden**2 + 3 * hidden * inner)
    flops = 2 * row["tokens"] * (weights + hidden * fields["vocab_size"])
    return 1e3 * (3 if row["subject"] == "training" else 1) * flops / peak["flops_per_s"]


def by_iteration(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a step of each training with changing lengths: `iteration`, its `length` and `step_ms`,
    and `behind_s`, how much longer all steps until then took than Hugging Face's."""
    ran = rows[(rows["experiment"] == "dynamic") & rows["samples_ms"].notna()]
    each_step = {
        "iteration": [range(1, len(ms) + 1) for ms in ran["samples_ms"]],
        "length": [n[: len(ms)] for n, ms in zip(ran["lengths"], ran["samples_ms"], strict=True)],
        "step_ms": ran["samples_ms"],
    }
    steps = ran[["machine", "provider"]].assign(**each_step).explode([*each_step])
    steps = steps.astype({"iteration": int, "length": int, "step_ms": float}).reset_index(drop=True)
    elapsed = steps.groupby(["machine", "provider"])["step_ms"].cumsum() / 1e3
    at = [steps["machine"], steps["iteration"]]
    return steps.assign(
        behind_s=elapsed - elapsed.where(steps["provider"] == BASELINE).groupby(at).transform("max")
    )


def from_tables(published: pd.DataFrame) -> pd.DataFrame:
    """Lit-GPT's tables, as `press.show.published` has them, in the columns of the rows.

    Its models had no mask. Inductor had CUDA graphs for tokens and on one GPU with equal lengths,
    ours for tokens alone. On two GPUs and at other lengths it compiled the whole model, ours its
    layers.
    """
    works = {
        "1 forward": "forward", "Compiled model inference": "inference",
        "Compiled generation inference": "generation race",
        "Single-device training": "training sgd",
    }  # fmt: skip
    stage = published["sharding_stage"].map({2: "distributed fsdp2-2", 3: "distributed fsdp2-3"})
    work = published["table"].map(works).fillna(stage)
    work = work.mask(published["shapes"] == "dynamic", "dynamic")
    of_work = dict.fromkeys(("forward", "training sgd"), "inductor-causal")
    of_work["dynamic"] = "inductor-layers"
    inductor = work.map(of_work).fillna("inductor-graphs").mask(stage.notna(), "inductor-layers")
    names = {"eager": BASELINE, "thunder": "thunder"}
    return published.assign(
        machine="published", set="published", profile="published", apart=False, status="ok",
        race=[f"published {n}" for n in range(len(published))], session=None, work=work,
        provider=published["method"].map(names).fillna(inductor),
        published_as=published["time_s"].fillna(published["tokens_per_s"]),
        peak_gib=published["memory_gb"] * 1e9 / 2**30,
    )  # fmt: skip


def beside_tables(rows: pd.DataFrame, source: pd.DataFrame) -> pd.DataFrame:
    """Published figures (`from_tables`) and what was measured of them, on one GPU or by FSDP2 on
    two: a row a `quantity` (s, tokens/s, GB), its figure as `published_as`.
    """
    pairs = {*zip(source["work"], source["provider"], strict=True)}
    ours = rows[rows["processes"] != 1]
    ours = ours[[pair in pairs for pair in zip(ours["work"], ours["provider"], strict=True)]]
    both = pd.concat([ours, source], ignore_index=True)[
        ["machine", "status", "work", "provider", "against", "published_as", "peak_gib"]
    ]
    unit = both["work"].isin(["inference", "generation race"]).map({True: "tokens/s", False: "s"})
    memory = both.assign(quantity="GB", published_as=both["peak_gib"] * 2**30 / 1e9)
    return pd.concat([both.assign(quantity=unit), memory], ignore_index=True)
