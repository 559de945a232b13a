"""Study 06's cases: steps alone and under the profiler, rivals' steps in turns, optimizers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedlib.bench.arguments import require_known, require_least
from fusedlib.bench.attempt import Unavailable
from measure.racing import rivals
from measure.racing.cases import Case, device_of, grid
from measure.racing.memory import require_memory
from measure.racing.rivals import Task
from models import transformer
from models.transformer import Transformer, TransformerConfig, config
from study.mlp import MODULE
from study.trainer import WEIGHTS

Call = Callable[..., Any]
COMPILE = Task[[Transformer], Call]("compile")
RACES: dict[str, Task[..., Any]] = {"mlp": MODULE, "model": COMPILE}
"""The task of the rivals by experiment: whose MLP, or whether the model is compiled."""
OPTIMIZERS = ("for-loop", "foreach", "fused")


def setting(
    device: str = "auto", *, batch_size: int = transformer.BATCH_SIZE, seconds: float = 0.3,
    repetitions: int = 6,
) -> dict[str, Any]:  # fmt: skip
    """What all cases of a run share.

    Args:
        seconds: steps alone are measured for so long at least.
        repetitions: rounds of a race at least. The range of six pairs covers their median at 97 %.
    """
    require_least(1, batch_size=batch_size, repetitions=repetitions)
    require_least(0, seconds=seconds)
    return {
        "device": device_of(device), "batch_size": batch_size, "seconds": seconds,
        "repetitions": repetitions,
    }  # fmt: skip


def steps(
    shared: Case, models: Sequence[str], contexts: Sequence[int], precisions: Sequence[str],
    *, attention: str = "plain", inference: bool = False, experiment: str = "step",
) -> list[dict[str, Any]]:  # fmt: skip
    """Eager training steps with AdamW, a context after the other, sizes as given.

    Args:
        inference: whether the model is timed without gradients too.
        experiment: "step", or "profile" for one more step under the profiler.
    """
    require_known("precision", precisions, WEIGHTS)
    listed = grid(
        {"experiment": experiment, "attention": attention, "inference": inference, **shared},
        context_length=contexts, model=models, precision=precisions,
    )  # fmt: skip
    for case in listed:
        shape(case)
    return listed


def races(
    shared: Case, experiment: str, models: Sequence[str], contexts: Sequence[int],
    precisions: Sequence[str], rival_names: Sequence[str] = ("all",),
) -> list[dict[str, Any]]:  # fmt: skip
    """The same steps by each rival in turns, plain attention; the experiment is one of `RACES`."""
    require_known("race", experiment, RACES)
    names = rivals.chosen(RACES[experiment], rival_names)
    wanted = steps(shared, models, contexts, precisions, experiment=experiment)
    return grid(step=wanted, provider=names)


def optimizers(shared: Case, models: Sequence[str]) -> list[dict[str, Any]]:
    """AdamW's own step on fp32 weights, each way that torch has."""
    names = [config(model).name for model in models]
    return grid({"experiment": "optimizer", **shared}, model=names, optimizer=OPTIMIZERS)


def shape(case: Case) -> TransformerConfig:
    """The model of a case."""
    return config(
        case["model"], context_length=int(case["context_length"]), attention=case["attention"]
    )


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
    require_memory(least_bytes(case) / 2**30, case["device"])


def least_bytes(case: Case) -> int:
    """What a step cannot do without: weights, gradients, two moments, and what softmax gives.

    The last in plain attention alone: L matrices of B·H·T² numbers, which the backward pass reads.
    """
    model, size = shape(case), getattr(torch, WEIGHTS[case["precision"]]).itemsize
    pairs = case["batch_size"] * model.num_heads * model.context_length**2
    matrices = model.num_layers * pairs if model.attention == "plain" else 0
    return (4 * model.num_parameters + matrices) * size
