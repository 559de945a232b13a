"""What the processes of `study.distributed` run: a training, and the plain one beside it."""

import json
import math
import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.profiler import record_function

from fusedlib.bench.attempt import Wrong, free_memory
from fusedlib.bench.machine import version_of
from fusedlib.bench.statistics import summarize
from fusedlib.bench.timing import synchronize
from study import patched, trace
from study.cases import Case
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
from study.trace import Piece

CHECKED_STEPS = 3
STEP = "fusedlib: step"
# Relative differences to the plain model in one process that rounding explains.
LOSS_BAND = {"float32": 1e-5, "float16": 5e-4, "bfloat16": 1e-3}
GRADIENT_BAND = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}
SECTIONS = ("forward", "backward", "optimizer", "total")


def train(case: Case, rank: int, port: int) -> dict[str, Any]:
    """Entry of a fresh process: one of those that train a case together.

    Returns:
        The row's figures. `samples_ms` and its kin are steps from an idle device, the slowest
        process of each, `forward_...` and so on their parts. `peak_mib` is device memory of the
        fullest process, `host_mib` the host's of all.

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
    wrong = compared(case, true, losses, engine.gradient_norm) if rank == 0 else []
    figures |= _memory(engine) | {"hidden_share": hidden_share(engine)}
    dist.barrier()
    if wrong:
        raise Wrong("; ".join(wrong), figures)
    timed = times[case["warmup_steps"] :]
    for name in SECTIONS:
        figures |= summarize([t[name] for t in timed], "" if name == "total" else name)
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
    case: Case, true: dict[str, Any], losses: list[float], norm: float | None
) -> list[str]:  # fmt: skip
    """What is out of its band beside the plain model, or not finite."""
    assert norm is not None
    baseline, baseline_norm = true["reference_losses"], true["reference_gradient_norm"]
    off = [abs(a / b - 1) for a, b in zip(losses, baseline, strict=False)]
    off += [math.nan for loss in losses if not math.isfinite(loss)]
    wrong = []
    for name, error, bands in (
        ("loss", float(np.max(off)), LOSS_BAND),
        ("gradient norm", abs(norm / baseline_norm - 1), GRADIENT_BAND),
    ):
        if not error <= bands[case["dtype"]]:
            wrong.append(
                f"the {name} differs from the plain model's in one process by {error:.2g} of it, "
                f"more than {bands[case['dtype']]:g}"
            )
    return wrong


# --- memory, communication, facts ----------------------------------------------------------------


def _memory(engine: Engine) -> dict[str, Any]:
    """MiB: of the device in the fullest process, of the host in all together."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    host = torch.tensor(resident / MIB, dtype=torch.float64, device=engine.device)
    dist.all_reduce(host)
    peak = None
    if engine.device.type == "cuda":
        [peak] = _slowest([torch.cuda.max_memory_allocated() / MIB], engine)
    return {"host_mib": host.item(), "peak_mib": peak}


def hidden_share(engine: Engine) -> float | None:
    """How much of a step's communication is hidden; None where nothing communicates.

    The step before it, under the profiler too, takes up that profilers start at different times.
    """

    def steps() -> None:
        for _ in range(2):
            with record_function(STEP):
                engine.issue()
                synchronize(engine.device)

    if engine.device.type != "cuda" or dist.get_world_size() == 1:
        return None
    return hidden(trace.record(engine.device, steps).during(STEP))


def hidden(pieces: Iterable[Piece]) -> float | None:
    """Of the time in which a kernel of NCCL runs, its waiting for other processes included, the
    share in which another kernel, copy or fill runs beside it: |communication| + |compute| - |their
    union|, over |communication|.
    """
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for piece in pieces:
        spans["nccl" in piece.name.lower()].append((piece.start, piece.end))
    communication, compute = _covered(spans[True]), _covered(spans[False])
    beside = communication + compute - _covered(spans[True] + spans[False])
    return beside / communication if communication else None


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return covered


def _facts(case: Case) -> dict[str, Any]:
    """What ran: packages, and the strategy's settings."""
    packages = ["torch", "deepspeed"] if is_deepspeed(case) else ["torch"]
    version = ", ".join(f"{p} {version_of(p)}" for p in packages)
    return {"version": version, "settings": json.dumps(STRATEGIES[case["strategy"]])}
