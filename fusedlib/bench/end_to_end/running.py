"""A model with all that a training step needs, and steps of it until the time is up."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import machine
from fusedlib.bench.results import Unavailable
from fusedlib.bench.statistics import summarize
from fusedlib.bench.steps import LEARNING_RATE, Trainer
from fusedlib.bench.torch_precision import matmul_settings
from fusedlib.models import flops
from fusedlib.models.transformer import TransformerConfig, config

WEIGHTS = {"fp32": "float32", "bf16 autocast": "float32", "bf16": "bfloat16"}
SECTIONS = ("forward", "backward", "optimizer", "total")
# Of the card's memory: what needs at least so much is not tried.
HOPELESS = 1.5
# Steps that take longer are enough when there are `few` of them.
LONG_S = 1.0
Samples = dict[str, list[float]]


@contextmanager
def settings() -> Iterator[None]:
    """torch as all steps of this study have it: fp32 products in IEEE fp32."""
    with matmul_settings("highest", True):
        yield


def shape(case: Mapping[str, Any]) -> TransformerConfig:
    """The model of a case."""
    return config(case["model"], context_length=case["context_length"], attention=case["attention"])


def check_device(device: str) -> None:
    """Whether the device is there.

    Raises:
        Unavailable: it is not.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device, True):
        raise Unavailable(f"this machine has no {device} device")


def clear(device: str) -> None:
    """Leave nothing of the case before, also when that one ended in an exception."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def least_bytes(case: Mapping[str, Any]) -> int:
    """What a step cannot do without: weights, gradients, two moments, and what softmax gives.

    The last in plain attention alone: L matrices of B·H·T² numbers, which the backward pass reads.
    """
    model, size = shape(case), getattr(torch, WEIGHTS[case["precision"]]).itemsize
    matrices = 0
    if model.attention == "plain":
        pairs = case["batch_size"] * model.num_heads * case["context_length"] ** 2
        matrices = model.num_layers * pairs * size
    return 4 * model.num_parameters * size + matrices


def hopeless(case: Mapping[str, Any]) -> str | None:
    """Why a case is not tried: a bound from below that is far above the memory there is."""
    facts = machine.describe()
    total = facts.device_memory_gib if case["device"] == "cuda" else None
    total = total or facts.memory_gib
    need = least_bytes(case) / 2**30
    if total is None or need <= HOPELESS * total:
        return None
    return (
        f"not tried: at least {need:.0f} GiB, more than {HOPELESS:g} times the {total:.0f} GiB "
        "there are"
    )


def trainer(case: Mapping[str, Any], direction: str = "step") -> Trainer:
    """The trainer of a case; under autocast its forward pass runs so, the backward pass follows."""
    made = Trainer(
        model=case["model"], direction=direction, device=case["device"],
        dtype=WEIGHTS[case["precision"]], batch_size=case["batch_size"],
        context_length=case["context_length"], attention=case["attention"],
    )  # fmt: skip
    if direction == "step":
        made.optimizer = adamw(made.model.parameters())
    return made


def adamw(parameters: Any, kind: str = "foreach") -> torch.optim.AdamW:
    """AdamW as torch has it on GPUs by default, or another way."""
    return torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, foreach=kind == "foreach", fused=kind == "fused"
    )


def autocast(case: Mapping[str, Any], call: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The call as the case's precision has it."""
    if case["precision"] != "bf16 autocast":
        return call

    def under_autocast(tokens: Tensor) -> Tensor:
        with torch.autocast(torch.device(case["device"]).type, torch.bfloat16):
            return call(tokens)

    return under_autocast


def collect(step: Callable[[], dict[str, float]], case: Mapping[str, Any]) -> Samples:
    """Samples of each section from step to step, until seconds and steps are enough."""
    found: Samples = {}
    begin = time.perf_counter()
    for count in range(1, case["most"] + 1):
        keep(found, step())
        spent = time.perf_counter() - begin
        if count >= fewest(case, spent / count) and spent > case["seconds"]:
            break
    return found


def fewest(case: Mapping[str, Any], step_s: float) -> int:
    """Measured steps that a case needs at least, of so many seconds each."""
    return min(case["few"], case["least"]) if step_s > LONG_S else case["least"]


def keep(found: Samples, times: Mapping[str, float]) -> None:
    """Add one step's times to the samples, and the sum of forward and backward as `both`."""
    for name, ms in times.items():
        found.setdefault("step" if name == "total" else name, []).append(ms)
    if "backward" in times:
        found.setdefault("both", []).append(times["forward"] + times["backward"])


def figures(case: Mapping[str, Any], found: Samples) -> dict[str, Any]:
    """A row's figures: each section's times, FLOPs by formula, rates at the medians."""
    count = flops.count(shape(case), case["batch_size"], case["context_length"])
    tokens = case["batch_size"] * case["context_length"]
    row: dict[str, Any] = {}
    for name, samples in found.items():
        row |= summarize(samples, name)
    row |= {"forward_flops": count.forward, "backward_flops": count.backward, "tokens": tokens}
    row["flops_per_s"] = 1e3 * count.model / row["both_median_ms"]
    whole = "step" if "step" in found else "both"
    row["tokens_per_s"] = 1e3 * tokens / row[f"{whole}_median_ms"]
    return row


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the tensors, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors of an optimizer's state."""
    return [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
