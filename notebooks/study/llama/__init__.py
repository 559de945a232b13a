"""Whole Llama training steps: who computes them, what they hold, how far they reach.

experiment      what is measured
step            forward and backward, or a whole step with AdamW, all arms in turns
families        forward and backward of other families of models
loss norm rope  one operation alone, beside what bounds it
log-probs       log-probabilities of tokens, by which GRPO and its like train
entropies       the same, with the entropies that they log
memory          two steps watched by the allocator's history: what fills the peak
limit           the largest batch or the longest context whose step fits
distributed     training under DeepSpeed with weights in the host's memory
fp32            steps in fp32, at a setting of torch's fp32 products
first-steps     losses of a training's first steps, beside those with exact gradients
gradients       errors of gradients at weights of a Hugging Face training
"""

from collections.abc import Mapping
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from fusedlib.bench.arguments import require_known, require_least
from fusedlib.bench.attempt import Unavailable, forget_compiled, free_memory
from study import distributed, patched, rivals
from study.cases import Case, Row, device_of, grid
from study.llama import operations, steps
from study.llama.training import (
    FIRST_STEPS,
    MOMENT_SEEDS,
    MOMENTS,
    SEEDS,
    Trajectory,
    train,
    wrong_gradients,
)
from study.patched import (
    BASELINE,
    BATCH_INVARIANT,
    CONFIGS,
    EXACT,
    OTHER_ATTENTION,
    TASK,
    require_possible,
)
from study.race import each
from study.run import sized
from study.settings import DTYPES, MIB

PARTS_OF_A_MODEL = [part.replace("_", "-") for part in patched.PARTS]
ALONE = [f"fused-{part}" for part in PARTS_OF_A_MODEL]
WITHOUT = [f"fused-without-{part}" for part in PARTS_OF_A_MODEL]
QUICK: dict[str, Any] = {
    "device": "auto",  # cuda, cpu, or auto for the best there is
    "experiments": ["all"],  # which of the table above are measured
    "model": "two layers",  # of study.patched.CONFIGS
    "dtype": "float32",  # of weights, gradients and moments
    "arms": ["huggingface", "liger", "fused", "fused-loss"],  # at the headline's size; or all
    "context": 32,  # tokens a sequence there
    "batches": [1, 8],  # sequences of batch_context tokens
    "batch_context": 16,  # tokens a sequence where the batch grows
    "contexts": [16, 64],  # tokens a sequence where the context grows, headline's batch
    "families": ["two Qwen3 layers"],  # models at the headline's batch and context
    "family_arms": ["huggingface", "liger", "fused"],  # in these models
    "stepped": ["huggingface", "liger", "fused"],  # arms of whole steps, memory and limits
    "sized": ["huggingface", "liger-without-flce", "liger", "fused"],  # arms at other sizes
    "captured": [],  # beside them in sizes of few tokens: CUDA graphs
    "searched": [],  # arms beside one that searches for its tiles
    "parts": ["huggingface", "fused", "fused-loss", "fused-without-loss"],  # one alone, or left out
    "invariant_shapes": ["1·16"],  # sequences·tokens of steps in fusedlib.batch_invariant
    "precise": [],  # arms in fp32, at both settings of its products
    "train_model": "two layers",  # that is trained
    "train_steps": 10,  # of a training, or at most
    "train_tokens": 16,  # tokens a sequence of that training, of eight sequences a step
    "offloaded": ["huggingface", "liger", "fused"],  # arms under DeepSpeed
    "offload_batches": [2],  # sequences of batch_context tokens under DeepSpeed
    "operation_rivals": ["all"],  # beside whom single operations run; inductor by its name
    "operation_widths": [64, 128],  # hidden sizes of loss, norm and rope
    "vocabulary": 1000,  # of that loss
    "heads": ["64·1000"],  # hidden·vocabulary of log-probabilities, and of losses that ignore
    "repetitions": 2,  # rounds that are measured at least
    "host_bound_repetitions": 2,  # of steps of few tokens, where the host may set the pace
}
FULL: dict[str, Any] = QUICK | {
    "model": "Llama-3.2-1B", "dtype": "bfloat16", "arms": ["all"],
    "context": 2048, "batches": [1, 4, 8, 32, 112], "batch_context": 1024,
    "contexts": [512, 8192, 24576],
    "families": ["Llama-3.2-1B", "Qwen3-0.6B", "Gemma-2-2B, 8 layers", "Phi-3-mini, 8 layers",
                 "Mistral-7B, 6 layers"],
    "family_arms": ["huggingface", "liger-without-flce", "liger", "liger-chunks",
                    "liger-chunks-32", "liger-cute-loss", "fused", "inductor", "inductor-causal",
                    "inductor-causal-loss", "fused-inductor"],
    "stepped": ["huggingface", "liger", "liger-chunks", "liger-chunks-32", "liger-cute-loss",
                "fused", "inductor-causal", "inductor-causal-loss"],
    "sized": ["huggingface", "liger-without-flce", "liger", "liger-chunks", "liger-chunks-32",
              "fused", "inductor-causal"],
    "captured": ["huggingface-graph", "liger-without-flce-graph", "liger-graph", "fused-graph",
                 "inductor-causal-graphs"],
    "searched": ["huggingface", "liger-chunks-32", "fused", "inductor-causal",
                 "inductor-causal-loss", "inductor-causal-searched"],
    "parts": ["huggingface", "liger", "liger-flce", "liger-without-flce", "fused", *ALONE,
              *WITHOUT],
    "invariant_shapes": ["4·2048", "4·512", "1·512", "1·64"],
    "precise": ["huggingface", "liger", "fused"],
    "train_model": "four layers", "train_steps": 200, "train_tokens": 512,
    "offloaded": ["huggingface", "liger-without-flce", "liger", "fused"], "offload_batches": [8],
    "operation_rivals": ["all", "inductor"], "operation_widths": [2048, 4096],
    "vocabulary": 128256, "heads": ["4096·151936", "2048·128256"],
    "repetitions": 6, "host_bound_repetitions": 30,
}  # fmt: skip
PROFILES = {"quick": QUICK, "full": FULL}
STEPS, OPERATIONS = ("step", "families", "fp32"), (*operations.TASKS,)
EXPERIMENTS = (*STEPS, *OPERATIONS, "memory", "limit", "distributed", "gradients", "first-steps")
BATCH, OFFLOADED_STEPS = 4, 3  # sequences at the headline's size; steps measured under DeepSpeed
IGNORED_SHARES = 0.0, 0.5  # of the tokens, prompts and padding
TRAINED_BATCH, LEARNING_RATE = 8, 3e-4
LEARNING = ["huggingface", "liger", "liger-fp32", "fused"]  # arms that are trained
HOST_BOUND_TOKENS = 4096  # of a step; above, the card computes for longer than the host issues


def cases(profile: str = "quick", **sizes: Any) -> list[dict[str, Any]]:
    """What is measured, as the table above has it."""
    s = sized(PROFILES, profile, sizes)
    s.device = device_of(s.device)
    require_known("experiment", s.experiments, ["all", *EXPERIMENTS])
    require_known("model", [s.model, s.train_model, *s.families], CONFIGS)
    require_known("dtype", s.dtype, DTYPES)
    require_least(1, batches=s.batches, contexts=s.contexts)
    require_least(2, context=s.context, batch_context=s.batch_context, train_tokens=s.train_tokens)
    listed = _steps(s)
    for name in s.families:
        turns = _turns(s) | {"model": name}
        listed += arms("families", s.family_arms, group="families", **turns)
    size = {"batch_size": BATCH, "context_length": s.context}
    size |= {"dtype": s.dtype, "device": s.device, "repetitions": s.repetitions}
    alone = {"widths": s.operation_widths, "vocabulary": s.vocabulary}
    asked = [task for task in operations.TASKS if {"all", task} & {*s.experiments}]
    for task in asked:
        if task not in operations.SCORES:
            listed += operations.cases(task, s.operation_rivals, **alone, **size)
    heads = [size | {"widths": [n], "vocabulary": words} for n, words in map(_head, s.heads)]
    for head, task, share in product(heads, operations.OF_VOCABULARY, IGNORED_SHARES):
        if task in asked and (task != "entropies" or not share):
            listed += operations.cases(task, s.operation_rivals, ignored_share=share, **head)
    for head in heads[-1:] if "loss" in asked else ():
        zipf = head | {"distribution": operations.ZIPF}
        listed += operations.cases("loss", s.operation_rivals, **zipf)
    listed += arms("memory", s.stepped, **_headline(s))
    for grows, length in (("batch", s.batch_context), ("context", s.context)):
        there = _headline(s) | {"context_length": length}
        listed += arms("limit", s.stepped, grows=grows, **there)
    listed += distributed.cases(
        ["offload-throttled"], s.offloaded, model=s.model, processes=[1],
        batch_sizes=s.offload_batches, context_length=s.batch_context, dtype="bfloat16",
        optimizer="adamw", checkpointing=True, warmup_steps=1, steps=OFFLOADED_STEPS,
        device=s.device,
    )  # fmt: skip
    there = {"dtype": "float32", "group": "fp32", "repetitions": max(1, s.repetitions // 2)}
    for precision in ("highest", "high"):
        listed += arms("fp32", s.precise, precision=precision, **_turns(s) | there)
    listed += _trained(s)
    return [c for c in listed if {"all", c["experiment"]} & {*s.experiments}]


def arms(experiment: str, names: list[str], **shared: Any) -> list[dict[str, Any]]:
    """A case an arm; `names` of arms, or all."""
    return grid({"experiment": experiment, **shared}, provider=rivals.chosen(TASK, names))


def _head(text: str) -> tuple[int, int]:
    """Hidden size and vocabulary."""
    try:
        width, vocabulary = map(int, text.split("·"))
    except ValueError:
        raise ValueError(f"heads: {text!r} is not hidden·vocabulary, such as 64·1000") from None
    return width, vocabulary


def _headline(s: SimpleNamespace) -> dict[str, Any]:
    return {
        "model": s.model, "device": s.device, "batch_size": BATCH,
        "context_length": s.context, "dtype": s.dtype,
    }  # fmt: skip


def _turns(s: SimpleNamespace) -> dict[str, Any]:
    """The headline in turns, forward and backward."""
    return _headline(s) | {"optimizer": False, "repetitions": s.repetitions}


def _steps(s: SimpleNamespace) -> list[dict[str, Any]]:
    listed = arms("step", s.arms, group="arms", **_turns(s))
    listed += arms("step", s.stepped, group="whole", **_turns(s) | {"optimizer": True})
    listed += arms("step", s.parts, group="parts", **_turns(s))
    listed += arms("step", s.searched, group="searched", **_turns(s))
    shapes = [(n, s.batch_context) for n in s.batches] + [(BATCH, n) for n in s.contexts]
    for count, length in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
        few = count * length <= HOST_BOUND_TOKENS
        there = {"batch_size": count, "context_length": length}
        there["repetitions"] = s.host_bound_repetitions if few else max(1, s.repetitions // 2)
        names = [*s.sized, *s.captured] if few else s.sized
        listed += arms("step", names, group="sizes", **_turns(s) | there)
    for text in s.invariant_shapes:
        there = dict(zip(("batch_size", "context_length"), map(int, text.split("·")), strict=True))
        names = ["fused", BATCH_INVARIANT]
        listed += arms("step", names, group="invariant", **_turns(s) | there)
    return listed


def _trained(s: SimpleNamespace) -> list[dict[str, Any]]:
    """First steps of trainings, and gradients along one, over some seeds."""
    training = {
        "model": s.train_model, "dtype": s.dtype, "batch_size": TRAINED_BATCH, "device": s.device,
        "context_length": s.train_tokens, "learning_rate": LEARNING_RATE,
    }  # fmt: skip
    alike, steps = [BASELINE, OTHER_ATTENTION, *LEARNING], min(FIRST_STEPS, s.train_steps)
    listed = []
    for seed in range(min(SEEDS, s.repetitions)):
        listed += arms("first-steps", [EXACT, *alike], seed=seed, steps=steps, **training)
    for seed in range(MOMENT_SEEDS):
        for step in (moment for moment in MOMENTS if moment <= s.train_steps):
            listed += arms("gradients", alike, seed=seed, step=step, **training)
    return listed


# --- measuring -----------------------------------------------------------------------------------

TRAJECTORY = Trajectory()
"""Kept from a race of gradients to the next one: its training goes on there."""


def measure(race: list[Case]) -> list[Row]:
    """A row a case: times in turns, or the figures of an arm alone."""
    experiment = race[0]["experiment"]
    if experiment != "gradients":
        TRAJECTORY.forget()
    if experiment in STEPS:
        return steps.race(race)
    if experiment in OPERATIONS:
        return operations.race(race)
    return each(race, _alone)


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here, before anything is made."""
    experiment = case["experiment"]
    if experiment in OPERATIONS:
        operations.available(case)
    elif experiment == "distributed":
        distributed.require_available(case)
    else:
        require_possible(case)
    if experiment == "limit" and not case["device"].startswith("cuda"):
        raise Unavailable("only a CUDA card's memory has an end that a step meets")


def _alone(case: Case) -> dict[str, Any]:
    """The figures of a case that shares no clock."""
    available(case)
    measured = {
        "memory": steps.memory, "limit": steps.limit, "first-steps": train,
        "gradients": TRAJECTORY.measure, "distributed": distributed.measure,
    }[case["experiment"]]  # fmt: skip
    free_memory()
    if case["experiment"] != "gradients":
        forget_compiled()
    try:
        return measured(case)
    finally:
        free_memory()


# --- rows ----------------------------------------------------------------------------------------

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "temporaries")
"""Of a peak, by the names of the rows' `peak_…_mib`."""
SWITCHES = {
    "fused": "all", "liger": "all", "liger-without-flce": "all but the loss",
    "fused-rms-norm": "norms", "liger-rms-norm": "norms", "fused-loss": "loss",
    "liger-flce": "loss", "fused-rope": "RoPE", "liger-rope": "RoPE", "fused-mlp": "MLP",
    "liger-swiglu": "MLP", "fused-attention": "q, k and v", "huggingface": "none",
    "fused-without-mlp": "all but the MLP", "fused-without-rms-norm": "all but norms",
    "fused-without-rope": "all but RoPE", "fused-without-attention": "all but q, k and v",
    "fused-without-loss": "all but the loss",
}  # fmt: skip
WEIGHTS = {"Llama-3.2-1B": 1_235_814_400}
"""Numbers of a model, whose gradients are as many."""
JUDGED = ["parameters", "gradient_errors", "usual_errors"]
USED = [
    "experiment", "model", "provider", "group", "dtype", "batch_size", "context_length", "tokens",
    "ignored_share", "distribution", "median_ms", "samples_ms", "tokens_per_s", "peak_mib",
    "host_mib", "activations_mib", "losses", "seed", *JUDGED,
    *(f"peak_{name}_mib" for name in PARTS),
]  # fmt: skip


def derive(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    `family` is whose implementation it is, and `switch` what it replaces of Hugging Face's;
    `sequences` is batch × context; `whole_gib` adds weights and gradients to activations.
    Errors of gradients are over Hugging Face's own at the same weights: `worst_gradient` is the
    largest, and `missed` counts those that the rule of `wrong_gradients` refuses.
    """
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *USED])))
    counts = ["batch_size", "context_length", "tokens", "median_ms", "tokens_per_s"]
    batch, context, tokens, ms, rate = (rows[name].astype(float) for name in counts)
    tokens = tokens.fillna(batch * context)
    judged = [_judged(row) for row in rows[[*JUDGED, "dtype"]].to_dict("records")]
    worst, missed = zip(*judged, strict=True) if judged else ((), ())
    sequences = [f"{n:.0f} × {length:,.0f}" for n, length in zip(batch, context, strict=True)]
    order = pd.Series(sequences, rows.index).loc[tokens.sort_values(kind="stable").index].unique()
    providers = rows["provider"].astype(str)
    family = providers.str.extract(r"^(fused|liger|inductor)", expand=False)
    gib = {f"{name}_gib": rows[f"{name}_mib"] / 1024 for name in ("peak", "host", "activations")}
    weights = rows["model"].map(WEIGHTS) * rows["dtype"].map({"bfloat16": 2, "float32": 4})
    gib["whole_gib"] = gib["activations_gib"] + 2 * weights / 2**30
    return rows.assign(
        tokens=tokens, tokens_per_s=rate.fillna(1e3 * tokens / ms),
        ignored_share=rows["ignored_share"].astype(float).fillna(0.0),
        sequences=pd.Categorical(sequences, order), worst_gradient=worst, missed=missed,
        family=family.fillna(rows["provider"]), switch=rows["provider"].map(SWITCHES), **gib,
    )  # fmt: skip


def _judged(row: Mapping[str, Any]) -> tuple[float, float]:
    """The largest error of a gradient over the usual one, and how many the rule refuses."""
    if not isinstance(row["parameters"], list):
        return np.nan, np.nan
    missed, errors = len(wrong_gradients(row)), row["gradient_errors"]
    if not isinstance(errors, list):
        return np.inf, missed
    over = np.array(errors, float) / np.array(row["usual_errors"], float)
    return float(np.nan_to_num(over, nan=np.inf).max()), missed


def from_tables(tables: pd.DataFrame) -> pd.DataFrame:
    """Published figures, as `press.show.published` has them, in the columns of the rows.

    All of a published peak counts as activations: weights, gradients and moments lie in the host's
    memory. Figures of `experiment` "step" are those that the source draws, of "run" those it logs.
    """
    drawn = tables["table"].str.startswith("drawing.py")
    headline = (tables["batch_size"] == 4) & (tables["context_length"] == 2048)
    mib = tables["peak_bytes"] / MIB
    same = {"machine": "published", "set": "published", "status": "ok", "strategy": "published"}
    rows = tables.assign(
        **same, race=[f"published {n}" for n in range(len(tables))], dtype="float16",
        experiment=drawn.map({True: "step", False: "run"}), model="Llama-3.2-1B",
        group=headline.map({True: "arms", False: "sizes"}), peak_mib=mib, activations_mib=mib,
        median_ms=1e3 * tables["latency_s"],
    )  # fmt: skip
    return derive(rows)
