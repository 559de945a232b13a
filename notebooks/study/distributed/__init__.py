"""Training runs on several processes: FSDP2, and DeepSpeed.

`cases` lists them, and `measure` trains one: its processes run `study.distributed.job.train`,
each in a fresh process of its own. `provider` names an arm, and `model` a configuration, of
`study.patched`.

`strategy` (how the model is divided; `STRATEGIES`):

    fsdp2-2              `fully_shard` of each layer, weights stay whole from forward to backward
    fsdp2-3              weights are gathered anew in backward
    zero-2, zero-3       DeepSpeed's stages, its defaults, all on the device
    offload              ZeRO-3, weights and optimizer in the host's memory, CPU Adam, defaults
    offload-throttled    the same as seed 002 set it: no prefetch, no live weights, buckets of 1e5

Before its steps a job trains the plain Hugging Face model in one process, on the sequences of all
processes one by one; losses or the first gradient's norm outside the band are `wrong`.
"""

import socket
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from fusedlib.bench import machine
from fusedlib.bench.arguments import require_known, require_least
from fusedlib.bench.attempt import Unavailable
from study import fresh, patched, rivals
from study.cases import Case, device_of, grid
from study.distributed.engines import OPTIMIZERS, STRATEGIES, is_deepspeed

EXPERIMENT = "distributed"
TIMEOUT_S = 540.0


def cases(
    strategies: Sequence[str], arms: Sequence[str], *, model: str, processes: Sequence[int],
    batch_sizes: Sequence[int], context_length: int, dtype: str = "bfloat16",
    optimizer: str = "sgd", checkpointing: bool = False, warmup_steps: int = 5, steps: int = 45,
    device: str = "auto",
) -> list[dict[str, Any]]:  # fmt: skip
    """Training runs of each arm under each strategy, on each number of processes.

    Args:
        processes: numbers of processes, one GPU each.
        batch_sizes: sequences a step and process.
        checkpointing: whether backward computes each layer's activations anew.

    Raises:
        ValueError: an unknown name, or a number below 1.
    """
    require_known("strategy", strategies, STRATEGIES)
    require_known("model", model, patched.CONFIGS)
    require_least(1, processes=processes, batch_sizes=batch_sizes, context_length=context_length)
    shared = {
        "experiment": EXPERIMENT, "model": model, "context_length": context_length, "dtype": dtype,
        "optimizer": optimizer, "learning_rate": OPTIMIZERS[optimizer],
        "checkpointing": checkpointing, "warmup_steps": warmup_steps, "steps": steps,
        "device": device_of(device),
    }  # fmt: skip
    return grid(
        shared, strategy=strategies, processes=processes, batch_size=batch_sizes,
        provider=rivals.chosen(patched.TASK, arms),
    )  # fmt: skip


def measure(case: Case) -> dict[str, Any]:
    """The row's figures of one case: those of process 0.

    Raises:
        Refused: a package or GPUs are missing, or losses are not the plain model's.
        MemoryError: a process ran out of memory, or the system killed it.
        FreshProcessError: a process failed otherwise, or the time was up.
    """
    require_available(case)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [{"case": dict(case), "rank": n, "port": port} for n in range(case["processes"])]
    target = "study.distributed.job:train"
    figures: dict[str, Any] = fresh.run_together(target, ranks, timeout_s=TIMEOUT_S)[0]
    return figures


def require_available(case: Case) -> None:
    """Raise `Unavailable` where a package or GPUs are missing, or an arm cannot be divided."""
    if is_deepspeed(case) and find_spec("deepspeed") is None:
        raise Unavailable("the package deepspeed is not installed: pip install '.[llama]'")
    arm = rivals.get(patched.TASK, case["provider"])
    if "graph" in arm.traits:
        raise Unavailable("a step that waits for other processes is not captured in a CUDA graph")
    if "whole" in arm.traits:
        raise Unavailable(
            "hooks that gather weights stand between the layers of a divided model, so it is not "
            "compiled as a whole: take inductor-layers or fused-inductor-layers"
        )
    facts = machine.describe()
    there = facts.device_count if facts.device_type == "cuda" else 0
    if case["device"] == "cuda" and case["processes"] > there:
        raise Unavailable(
            f"needs {case['processes']} GPUs, one a process; this machine has {there}"
        )
    arm.check_available(case["device"], case["dtype"])
