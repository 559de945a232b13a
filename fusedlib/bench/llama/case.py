"""What can be asked: a case an arm."""

from collections.abc import Iterable
from typing import Any

from fusedlib.bench import machine, rivals
from fusedlib.bench.llama.arms import TASK
from fusedlib.bench.llama.models import CONFIGS, Case

EXPERIMENTS = ("step", "fp32", "memory", "limit", "train", "fp32-train")
DTYPES = ("bfloat16", "float16", "float32")
GROWING = {"batch": 1, "context": 256}
"""What a limit looks for, and the unit that it is told in."""


def cases(
    experiment: str, arms: Iterable[str], *, model: str, dtype: str = "bfloat16",
    batch_size: int = 4, context_length: int = 2048, device: str = "auto", **more: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """A case an arm.

    Args:
        experiment: see `fusedlib.bench.llama`.
        arms: names of rivals, or "all".
        model: of `CONFIGS`.
        dtype: of weights, gradients and moments.
        batch_size: sequences a step.
        context_length: tokens a sequence.
        device: "auto" takes the best there is.
        more: what else makes the case: `optimizer` and `repetitions` of a step, `grows` of a
            limit, `steps` and `learning_rate` of a training, `precision` of fp32 products.

    Raises:
        ValueError: an unknown experiment, model, dtype or arm, or a size below 1.
    """
    for name, given, known in (
        ("experiment", experiment, EXPERIMENTS), ("model", model, CONFIGS),
        ("dtype", dtype, DTYPES), ("grows", more.get("grows", "batch"), GROWING),
    ):  # fmt: skip
        if given not in known:
            raise ValueError(f"unknown {name} {given!r}; known: {', '.join(known)}")
    if batch_size < 1 or context_length < 2:
        raise ValueError(
            f"batch_size={batch_size}, context_length={context_length}: need at least 1 and 2"
        )
    where = machine.device_type() if device == "auto" else device
    shared = {"model": model, "dtype": dtype, "batch_size": batch_size,
              "context_length": context_length, "device": where, **more}  # fmt: skip
    return [
        {"experiment": experiment, "provider": name, **shared}
        for name in rivals.chosen(TASK, arms)
    ]  # fmt: skip


def label(case: Case) -> str:
    """A case in a few words."""
    size = f"{case['batch_size']}×{case['context_length']}"
    return f"{case['experiment']} {case['model']} {size} {case['dtype']} {case['provider']}"


def require_possible(case: Case) -> None:
    """Raise `Unavailable` where the device or a package is missing."""
    rivals.get(TASK, case["provider"]).check_available(case["device"], case["dtype"])
