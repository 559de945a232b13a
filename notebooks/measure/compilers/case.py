"""What can be asked: each arm in turns with the baseline."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fusedlib.bench.arguments import require_known, require_least
from fusedlib.bench.attempt import Unavailable
from measure import llama
from measure.compilers.arms import BASELINE, TASK
from measure.compilers.samplers import SAMPLERS
from measure.racing import rivals
from measure.racing.cases import Case, device_of

SUBJECTS = {
    "forward": "forward", "inference": "decoding", "generation": "decoding",
    "training": "training", "dynamic": "training",
}  # fmt: skip
"""Experiments of one subject share a setup, with what is compiled."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=6e-4, weight_decay=0.1, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1, fused=True),
}
"""SGD is set as seed 003 published it."""


def cases(
    variants: Sequence[Mapping[str, Any]], arms: Sequence[str], *, model: str, batch_size: int,
    context_length: int, repetitions: int, limit_s: float, device: str = "auto",
) -> list[dict[str, Any]]:  # fmt: skip
    """Each arm in turns with the baseline, variant by variant, so that an arm is compiled once.

    Args:
        variants: `experiment`, with `sampler` of a token's or `optimizer` of a training's.
        model: of `llama.CONFIGS`, in bf16.
        context_length: tokens a sequence; the most of a dynamic training, or those generated.
        repetitions: turns; of a dynamic training the iterations.
        limit_s: an arm that is not ready after so many seconds, or whose dynamic training is not
            done, is stopped; 0 compiles nothing.
    """
    require_known("model", model, llama.CONFIGS)
    choices: dict[str, Collection[str]] = {
        "experiment": SUBJECTS, "sampler": SAMPLERS, "optimizer": OPTIMIZERS
    }  # fmt: skip
    for field, value in (pair for variant in variants for pair in variant.items()):
        require_known(field, value, choices[field])
    require_least(
        1, batch_size=batch_size, context_length=context_length, repetitions=repetitions
    )  # fmt: skip
    require_least(0, limit_s=limit_s)
    shared = {
        "model": model, "batch_size": batch_size, "context_length": context_length,
        "dtype": "bfloat16", "repetitions": repetitions, "limit_s": float(limit_s),
        "device": device_of(device),
    }  # fmt: skip
    listed: list[dict[str, Any]] = []
    for arm in rivals.chosen(TASK, arms):
        for variant in variants:
            case = {"subject": SUBJECTS[variant["experiment"]], **variant, **shared}
            if variant["experiment"] == "dynamic":
                listed.append({**case, "provider": arm})
                continue
            case["against"] = arm
            if arm != BASELINE:
                listed += [{**case, "provider": name} for name in (BASELINE, arm)]
    return listed


def require_possible(case: Case) -> None:
    """Whether a case can run here, and the arm that its time stands beside.

    Raises:
        Unavailable: device or package are missing, or nothing is to be compiled.
    """
    for name in {case["provider"], case.get("against", case["provider"])}:
        one = rivals.get(TASK, name)
        one.check_available(case["device"], case["dtype"])
        if "graphs" in one.traits and case["device"] != "cuda":
            raise Unavailable("CUDA graphs need a CUDA GPU")
        if "compiles" in one.traits and not case["limit_s"]:
            raise Unavailable("this part was set to compile nothing here (parameter `compiled`)")
