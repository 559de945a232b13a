"""What the processes of `study.distributed` run: a training, and the plain one beside it."""

import json
import math
import os
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import Parameter

from fusedlib.bench.attempt import Wrong, free_memory
from fusedlib.bench.machine import version_of
from fusedlib.bench.statistics import summarize
from fusedlib.bench.timing import clock_for, synchronize
from study import patched
from study.cases import Case
from study.distributed import communication
from study.distributed.engines import (
    FSDP2,
    LOSS_SCALE,
    STRATEGIES,
    DeepSpeed,
    Engine,
    is_deepspeed,
    loss_of,
    model_of,
    optimizer_of,
    tokens_of,
)
from study.settings import MIB

CHECKED_STEPS = 3
# Relative differences to the plain model in one process that rounding explains.
LOSS_BAND = {"float32": 1e-5, "float16": 5e-4, "bfloat16": 1e-3}
GRADIENT_BAND = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}
SECTIONS = ("forward", "backward", "optimizer", "total")


def train(case: Case, rank: int, port: int, start: dict[str, float]) -> dict[str, Any]:
    """Entry of a fresh process: one of those that train a case together.

    Returns:
        The row's figures. `samples_ms` and its kin are steps from an idle device, the slowest
        process of each, `forward_...` and so on their parts; `steady_...` steps that follow without
        a wait, where the host may be ahead; `first_ms` the very first. `peak_mib` and `state_mib`
        are device memory of the fullest process, most in a step and between steps, `host_mib` the
        host's of all. Bandwidths are bytes that a process sends a second. What there is not, as
        device memory without a GPU, is None.

    Raises:
        Wrong: losses or the gradient's norm are not the plain model's; on process 0.
    """
    device = _join(case, rank, port)
    true = reference(case, device) if rank == 0 else {}
    free_memory()
    engine = (DeepSpeed if is_deepspeed(case) else FSDP2)(case, device)
    share = case["batch_size"]
    engine.ids = tokens_of(case, engine.model.config.vocab_size)[rank * share : (rank + 1) * share]
    engine.ids = engine.ids.to(device)
    losses: list[float] = []
    times: list[dict[str, float]] = []
    for index in range(case["warmup_steps"] + case["steps"]):
        if index == case["warmup_steps"] and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss, parts = _timed_step(engine)
        losses.append(loss)
        times.append(parts)
    figures: dict[str, Any] = {"losses": losses}
    wrong = compared(case, true, losses, engine.gradient_norm, figures) if rank == 0 else []
    figures |= _memory(engine)
    steady = _steady_ms(engine, max(2, case["steps"] // 2))
    figures |= communication.measured(engine)
    dist.barrier()
    if wrong:
        raise Wrong("; ".join(wrong), figures)
    timed = times[case["warmup_steps"] :]
    for name in SECTIONS:
        figures |= summarize([t[name] for t in timed], "" if name == "total" else name)
    figures |= {"first_ms": times[0]["total"], **summarize(steady, "steady")}
    tokens = case["processes"] * share * case["context_length"]
    figures["tokens_per_s"] = tokens / figures["median_ms"] * 1e3
    return figures | _facts(case)


def _join(case: Case, rank: int, port: int) -> torch.device:
    """Enter the job's group of processes and take its device."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case["processes"]),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_NVLS_ENABLE": "0",
    }  # fmt: skip
    if case["device"] == "cuda":
        device, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        torch.set_num_threads(max((os.cpu_count() or 1) // case["processes"], 1))
    if is_deepspeed(case):
        import_module("deepspeed").init_distributed(dist_backend=backend)
    else:
        dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    return device


def _timed_step(engine: Engine) -> tuple[float, dict[str, float]]:
    """One step that all processes begin together: the mean loss, and ms of the slowest process."""
    dist.barrier()
    synchronize(engine.device)
    times_ms = engine.issue().elapsed_ms()
    slowest = _slowest([times_ms[name] for name in SECTIONS], engine)
    mean = engine.loss.float() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item(), dict(zip(SECTIONS, slowest, strict=True))


def _steady_ms(engine: Engine, steps: int) -> list[float]:
    """From a step's begin to the next one's, without a wait between them: ms, the slowest process.

    One step more begins on an idle device; its time is left out.
    """
    clock = clock_for(engine.device)
    dist.barrier()
    synchronize(engine.device)
    marks = []
    for _ in range(1 + steps):
        engine.issue()
        marks.append(clock.mark())
    synchronize(engine.device)
    return _slowest([clock.elapsed_ms(begin, end) for begin, end in pairwise(marks)], engine)


def _slowest(times_ms: list[float], engine: Engine) -> list[float]:
    """Each time in the process that has the largest."""
    slowest = torch.tensor(times_ms, device=engine.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    slowest_ms: list[float] = slowest.tolist()
    return slowest_ms


# --- the plain model in one process --------------------------------------------------------------


def reference(case: Case, device: torch.device) -> dict[str, Any]:
    """Losses of the plain model over the first steps, and the norm of its first gradient.

    Each step runs the sequences of all processes one by one and sums their gradients in fp32, so
    that every batch fits. Weights that the optimizer steps are as the strategy's: fp32 copies under
    DeepSpeed, the model's own under FSDP2.
    """
    model = model_of(case, device, patched.BASELINE)[0]
    ids = tokens_of(case, model.config.vocab_size)
    own = list(model.parameters())
    apart = is_deepspeed(case) and case["dtype"] != "float32"
    stepped = [Parameter(p.detach().float()) for p in own] if apart else own
    plain = {**case, "strategy": "one process"}
    optimizer = optimizer_of(plain, stepped)
    scale = LOSS_SCALE if case["dtype"] == "float16" else 1.0
    losses, norms = [], []
    for _ in range(min(CHECKED_STEPS, case["warmup_steps"] + case["steps"])):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in own]
        loss = 0.0
        for sequence in ids:
            value = loss_of(model, sequence[None].to(device))
            (value * scale).backward()
            loss += value.item() / len(ids)
            for total, p in zip(sums, own, strict=True):
                assert p.grad is not None
                total.add_(p.grad, alpha=1 / (scale * len(ids)))
                p.grad = None
        losses.append(loss)
        norms.append(math.sqrt(sum(total.square().sum().item() for total in sums)))
        for weight, total in zip(stepped, sums, strict=True):
            weight.grad = total.to(weight.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if apart:
            with torch.no_grad():
                for p, weight in zip(own, stepped, strict=True):
                    p.copy_(weight)
    return {"reference_losses": losses, "reference_gradient_norm": norms[0]}


def compared(
    case: Case, true: dict[str, Any], losses: list[float], norm: float | None,
    figures: dict[str, Any],
) -> list[str]:  # fmt: skip
    """What is out of its band beside the plain model, or not finite; adds to the figures."""
    assert norm is not None
    baseline, baseline_norm = true["reference_losses"], true["reference_gradient_norm"]
    off = [abs(a / b - 1) for a, b in zip(losses, baseline, strict=False)]
    off += [math.nan for loss in losses if not math.isfinite(loss)]
    figures |= {**true, "gradient_norm": norm}
    wrong = []
    for name, error, bands in (
        ("loss", float(np.max(off)), LOSS_BAND),
        ("gradient_norm", abs(norm / baseline_norm - 1), GRADIENT_BAND),
    ):
        band = bands[case["dtype"]]
        figures |= {f"{name}_error": error, f"{name}_band": band}
        if not error <= band:
            wrong.append(
                f"the {name.replace('_', ' ')} differs from the plain model's in one process by "
                f"{error:.2g} of it, more than {band:g}"
            )
    return wrong


# --- memory, communication, facts ----------------------------------------------------------------


def _memory(engine: Engine) -> dict[str, Any]:
    """MiB: of the device in the fullest process, of the host in all together."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    host = torch.tensor(resident / MIB, dtype=torch.float64, device=engine.device)
    dist.all_reduce(host)
    peak = state = None
    if engine.device.type == "cuda":
        held = torch.cuda.max_memory_allocated() / MIB, torch.cuda.memory_allocated() / MIB
        peak, state = _slowest(list(held), engine)
    return {
        "weights_mib": engine.weights_mib, "host_mib": host.item(), "peak_mib": peak,
        "state_mib": state,
    }  # fmt: skip


def _facts(case: Case) -> dict[str, Any]:
    """What ran: packages, the strategy's settings, and which code of ours."""
    packages = ["torch", "deepspeed"] if is_deepspeed(case) else ["torch"]
    return {
        "version": ", ".join(f"{p} {version_of(p)}" for p in packages),
        "settings": json.dumps(STRATEGIES[case["strategy"]]), "path": patched.path_of(case),
    }  # fmt: skip
