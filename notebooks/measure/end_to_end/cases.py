"""Study 06's cases: steps alone and under the profiler, rivals' steps in turns, optimizers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusedlib.bench import machine, rivals, roofline
from fusedlib.bench.attempt import TooLarge, Unavailable
from measure.steps import Trainer
from models import transformer
from models.transformer import TransformerConfig, config

STUDY = "06_end_to_end"
WEIGHTS = {"fp32": "float32", "bf16 autocast": "float32", "bf16": "bfloat16"}
"""Dtype of the weights by precision; fp32 products are IEEE's, not TF32's."""
RACES = {"mlp": "mlp", "model": "compile"}
"""The task of the rivals by experiment: whose MLP, or whether the model is compiled."""
OPTIMIZERS = ("for-loop", "foreach", "fused")
# Of the card's memory: what needs at least so much is not tried.
HOPELESS = 1.5
Case = Mapping[str, Any]


def setting(
    device: str = "auto", *, batch_size: int = transformer.BATCH_SIZE, seconds: float = 0.3,
    repetitions: int = 6,
) -> dict[str, Any]:  # fmt: skip
    """What all cases of a run share.

    Args:
        device: where it runs; "auto" takes the best there is.
        batch_size: sequences a step.
        seconds: steps alone are measured for so long at least.
        repetitions: rounds of a race at least. The range of six pairs covers their median at 97 %.

    Raises:
        ValueError: a number out of its bounds.
    """
    if batch_size < 1 or repetitions < 1 or seconds < 0:
        raise ValueError(
            f"batch_size={batch_size}, repetitions={repetitions}, seconds={seconds}: need at "
            "least 1, 1 and 0"
        )
    where = machine.device_type() if device == "auto" else device
    return {
        "device": where, "batch_size": batch_size, "seconds": seconds, "repetitions": repetitions
    }  # fmt: skip


def steps(
    shared: Case, models: Sequence[str], contexts: Sequence[int], precisions: Sequence[str],
    *, attention: str = "plain", inference: bool = False, experiment: str = "step",
) -> list[dict[str, Any]]:  # fmt: skip
    """Eager training steps with AdamW, a context after the other, sizes as given.

    Args:
        shared: from `setting`.
        models: names of sizes.
        contexts: tokens a sequence.
        precisions: of `WEIGHTS`.
        attention: "plain" or "sdpa".
        inference: whether the model is timed without gradients too.
        experiment: "step", or "profile" for one more step under the profiler.

    Raises:
        ValueError: an unknown size or precision, or a context below 1.
    """
    if unknown := [p for p in precisions if p not in WEIGHTS]:
        raise ValueError(f"unknown precision {unknown[0]!r}; known: {', '.join(WEIGHTS)}")
    found = [
        {"experiment": experiment, "model": model, "context_length": context,
         "precision": precision, "attention": attention, "inference": inference, **shared}
        for context in contexts for model in models for precision in precisions
    ]  # fmt: skip
    for case in found:
        shape(case)
    return found


def races(
    shared: Case, experiment: str, models: Sequence[str], contexts: Sequence[int],
    precisions: Sequence[str], asked: Sequence[str] = ("all",),
) -> list[dict[str, Any]]:  # fmt: skip
    """The same steps by each rival in turns, plain attention.

    Args:
        shared: from `setting`.
        experiment: of `RACES`: "mlp", whose MLP; "model", whether it is compiled.
        models: names of sizes.
        contexts: tokens a sequence.
        precisions: of `WEIGHTS`.
        asked: names of rivals; `all` for every one that is registered.

    Raises:
        ValueError: as `steps`, and an unknown experiment or rival.
    """
    if experiment not in RACES:
        raise ValueError(f"unknown race {experiment!r}; known: {', '.join(RACES)}")
    names = rivals.chosen(RACES[experiment], asked)
    wanted = steps(shared, models, contexts, precisions, experiment=experiment)
    return [{**case, "provider": name} for case in wanted for name in names]


def optimizers(shared: Case, models: Sequence[str]) -> list[dict[str, Any]]:
    """AdamW's own step on fp32 weights, each way that torch has."""
    return [
        {"experiment": "optimizer", "optimizer": kind, "model": config(model).name, **shared}
        for model in models for kind in OPTIMIZERS
    ]  # fmt: skip


def shape(case: Case) -> TransformerConfig:
    """The model of a case."""
    return config(
        case["model"], context_length=int(case["context_length"]), attention=case["attention"]
    )


def label(case: Case) -> str:
    """A case in a few words."""
    if case["experiment"] == "ceiling":
        return roofline.label(case)
    if case["experiment"] == "optimizer":
        return f"{case['model']} AdamW {case['optimizer']}"
    size = f"{case['model']}·{case['context_length']} {case['precision']}"
    return f"{size} {case['experiment']} on {case['device']}"


def require_possible(case: Case) -> None:
    """Whether a case is worth a try.

    Raises:
        Unavailable: its device is not here.
        TooLarge: weights, gradients, moments and attention matrices are far above the memory.
    """
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not here.get(case["device"], True):
        raise Unavailable(f"this machine has no {case['device']} device")
    if "precision" not in case or "context_length" not in case:
        return
    facts = machine.describe()
    on_card = facts.device_memory_gib if case["device"] == "cuda" else None
    memory, least = on_card or facts.memory_gib, least_bytes(case) / 2**30
    if memory is not None and least > HOPELESS * memory:
        raise TooLarge(
            f"not tried: at least {least:.0f} GiB, more than {HOPELESS:g} times the "
            f"{memory:.0f} GiB there are"
        )


def least_bytes(case: Case) -> int:
    """What a step cannot do without: weights, gradients, two moments, and what softmax gives.

    The last in plain attention alone: L matrices of B·H·T² numbers, which the backward pass reads.
    """
    model, size = shape(case), getattr(torch, WEIGHTS[case["precision"]]).itemsize
    pairs = case["batch_size"] * model.num_heads * model.context_length**2
    matrices = model.num_layers * pairs if model.attention == "plain" else 0
    return (4 * model.num_parameters + matrices) * size


def trainer(case: Case) -> Trainer:
    """The trainer of a case; under autocast its forward pass runs so, the backward pass follows."""
    made = Trainer(
        model=case["model"], direction="step", device=case["device"],
        dtype=WEIGHTS[case["precision"]], batch_size=case["batch_size"],
        context_length=case["context_length"], attention=case["attention"],
    )  # fmt: skip
    made.call = autocast(case, made.model)
    return made


def autocast(case: Case, call: Any) -> Any:
    """The call as the case's precision has it."""
    if case["precision"] != "bf16 autocast":
        return call

    def under_autocast(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(torch.device(case["device"]).type, torch.bfloat16):
            return call(tokens)

    return under_autocast
