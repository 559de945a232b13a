"""Training runs on several processes: FSDP2, and DeepSpeed.

`provider` names an arm, and `model` a configuration, of `study.patched`.

`strategy` (how the model is divided; `STRATEGIES`):

    fsdp2-2              `fully_shard` of each layer, weights stay whole from forward to backward
    fsdp2-3              weights are gathered anew in backward
    zero-2, zero-3       DeepSpeed's stages, its defaults, all on the device
    offload              ZeRO-3, weights and optimizer in the host's memory, CPU Adam, defaults
    offload-throttled    the same as seed 002 set it: no prefetch, no live weights, buckets of 1e5

Before its steps a job trains the plain Hugging Face model in one process, on the sequences of all
processes one by one; losses or the first gradient's norm outside the band are `wrong`.
"""

import json
import math
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import record_function

from fusedlib.bench import machine
from fusedlib.bench.arguments import require_known, require_least
from fusedlib.bench.attempt import Unavailable, Wrong, free_memory
from fusedlib.bench.machine import version_of
from fusedlib.bench.statistics import summarize
from fusedlib.bench.timing import synchronize
from study import fresh, liger, patched, rivals, trace
from study.cases import Case, device_of, grid
from study.settings import MIB
from study.trace import Piece

OFFLOAD = {
    "stage": 3,
    "offload_param": {"device": "cpu", "pin_memory": True},
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
}
THROTTLE = {
    "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0, "reduce_bucket_size": 100_000,
}  # fmt: skip
# Arguments of `fully_shard`, or the section `zero_optimization` of DeepSpeed's configuration.
STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp2-2": {"reshard_after_forward": False},
    "fsdp2-3": {"reshard_after_forward": True},
    "zero-2": {"stage": 2},
    "zero-3": {"stage": 3},
    "offload": OFFLOAD,
    "offload-throttled": OFFLOAD | THROTTLE,
}
OPTIMIZERS = {"sgd": 6e-4, "adamw": 1e-4}
"""Learning rates: SGD's is the one that seed 003 published, with its weight decay of 0.1."""
WEIGHT_DECAY = {"sgd": 0.1, "adamw": 0.01}

EXPERIMENT = "distributed"
TIMEOUT_S = 540.0


def cases(
    strategies: Sequence[str], arms: Sequence[str], *, model: str, processes: Sequence[int],
    batch_sizes: Sequence[int], context_length: int, dtype: str = "bfloat16",
    optimizer: str = "sgd", checkpointing: bool = False, warmup_steps: int | None = None,
    steps: int = 45, device: str = "auto",
) -> list[dict[str, Any]]:  # fmt: skip
    """Training runs of each arm under each strategy, on each number of processes with a GPU each;
    `batch_sizes` are sequences a step and process, `warmup_steps` by default a ninth of the steps.
    """
    require_known("strategy", strategies, STRATEGIES)
    require_known("model", model, patched.CONFIGS)
    require_least(1, processes=processes, batch_sizes=batch_sizes, context_length=context_length)
    shared = {
        "experiment": EXPERIMENT, "model": model, "context_length": context_length, "dtype": dtype,
        "optimizer": optimizer, "learning_rate": OPTIMIZERS[optimizer],
        "checkpointing": checkpointing, "steps": steps, "device": device_of(device),
    }  # fmt: skip
    if warmup_steps is not None:
        shared["warmup_steps"] = warmup_steps
    return grid(
        shared, strategy=strategies, processes=processes, batch_size=batch_sizes,
        provider=rivals.chosen(patched.TASK, arms),
    )  # fmt: skip


def measure(case: Case) -> dict[str, Any]:
    """The row's figures of one case: those of process 0."""
    require_available(case)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [{"case": dict(case), "rank": n, "port": port} for n in range(case["processes"])]
    target = f"{__name__}:train"
    figures: dict[str, Any] = fresh.run_together(target, ranks, timeout_s=TIMEOUT_S)[0]
    return figures


def require_available(case: Case) -> None:
    """Raise `Unavailable` where a package or GPUs are missing, or an arm cannot be divided."""
    if is_deepspeed(case) and find_spec("deepspeed") is None:
        raise Unavailable("the package deepspeed is not installed: pip install '.[llama]'")
    arm = rivals.get(patched.TASK, case["provider"])
    if "graph" in arm.traits:
        raise Unavailable("a step that waits for other processes is not captured in a CUDA graph")
    if is_deepspeed(case) and arm.name.startswith("liger-cute"):
        raise Unavailable("DeepSpeed calls the model, not the arm that puts CuTe's kernels there")
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


# --- a model divided among processes --------------------------------------------------------------


def is_deepspeed(case: Case) -> bool:
    """Whether DeepSpeed runs the case."""
    return not case["strategy"].startswith("fsdp2")


def tokens_of(case: Case) -> Tensor:
    """Random token ids of all processes, (processes · batch, context); the same in every step."""
    shape = case["processes"] * case["batch_size"], case["context_length"]
    vocabulary = patched.CONFIGS[case["model"]]["vocab_size"]
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))


def optimizer_of(case: Case, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer of a case; with offloaded weights DeepSpeed's Adam on the CPU."""
    kind, rate = case["optimizer"], case["learning_rate"]
    decay = WEIGHT_DECAY[kind]
    if case["strategy"].startswith("offload"):
        adam: Any = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        cpu_adam: torch.optim.Optimizer = adam(parameters, lr=rate, weight_decay=decay)
        return cpu_adam
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
    return make(parameters, lr=rate, weight_decay=decay)


class Engine(patched.LlamaTrainer):
    """An arm's model as a strategy divides it among the processes; `ids` are its own sequences."""

    def __init__(self, case: Case, ids: Tensor) -> None:
        super().__init__(*patched.alone(case), ids)
        self.model: Any
        self.call: Any
        self.gradient_norm: float | None = None
        if case["checkpointing"]:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def clear(self) -> None:
        """Nothing: an update drops the gradients, so that none lie between steps."""


class FSDP2(Engine):
    """`fully_shard` of each layer and of the whole."""

    def __init__(self, case: Case, ids: Tensor) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__(case, ids)
        for module in (*self.model.model.layers, self.model):
            fully_shard(module, **STRATEGIES[case["strategy"]])
        self.optimizer = optimizer_of(case, self.model.parameters())

    def update(self) -> None:
        """The optimizer's step; the first one keeps the gradient's norm."""
        assert self.optimizer is not None
        if self.gradient_norm is None:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm: Any = torch.nn.utils.get_total_norm(gradients)
            self.gradient_norm = float(norm.full_tensor())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class DeepSpeed(Engine):
    """DeepSpeed's engine; it keeps fp32 copies of 16-bit weights."""

    def __init__(self, case: Case, ids: Tensor) -> None:
        super().__init__(case, ids)
        config = {
            "train_micro_batch_size_per_gpu": case["batch_size"],
            "zero_optimization": STRATEGIES[case["strategy"]],
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # 1.0 by default, which the other strategies do not do
            "bf16": {"enabled": case["dtype"] == "bfloat16"},
        }
        self.optimizer = optimizer_of(case, self.model.parameters())
        initialize = import_module("deepspeed").initialize
        self.call, *_ = initialize(model=self.model, optimizer=self.optimizer, config=config)

    def backward(self, loss: Tensor) -> None:
        """Gradients, averaged over the processes."""
        self.call.backward(loss)

    def update(self) -> None:
        """The optimizer's step; the first one keeps the gradient's norm."""
        self.call.step()
        if self.gradient_norm is None:
            self.gradient_norm = float(self.call.get_global_grad_norm())


# --- what each process runs -----------------------------------------------------------------------

CHECKED_STEPS = 3
STEP = "fusedlib: step"
# Relative differences to the plain model in one process that rounding explains.
LOSS_BAND = {"float32": 1e-5, "bfloat16": 1e-3}
GRADIENT_BAND = {"float32": 1e-3, "bfloat16": 3e-2}
SECTIONS = ("forward", "backward", "optimizer", "total")


def train(case: Case, rank: int, port: int) -> dict[str, Any]:
    """Entry of a fresh process: one of those that train a case together. Times are steps from an
    idle device, the slowest process of each; memory is that of the fullest.

    Liger runs its Triton kernels in all that the process does: DeepSpeed calls the model and not
    the arm, and checkpoints call it in backward.
    """
    chosen = liger.is_liger(case["provider"]) and liger.has_cute()
    with liger.kernels_of(liger.TRITON) if chosen else nullcontext():
        return _train(case, rank, port)


def _train(case: Case, rank: int, port: int) -> dict[str, Any]:
    device = _join(case, rank, port)
    true = reference(case, device) if rank == 0 else {}
    free_memory()
    share, warmup = case["batch_size"], case.get("warmup_steps") or max(1, case["steps"] // 9)
    ids = tokens_of(case)[rank * share : (rank + 1) * share].to(device)
    engine = (DeepSpeed if is_deepspeed(case) else FSDP2)(case, ids)
    losses: list[float] = []
    times: list[dict[str, float]] = []
    for index in range(warmup + case["steps"]):
        if index == warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss, parts = _timed_step(engine)
        losses.append(loss)
        times.append(parts)
    figures: dict[str, Any] = {"losses": losses}
    wrong = compared(case, true, losses, engine.gradient_norm) if rank == 0 else []
    figures |= _memory(engine) | {"hidden_share": hidden_share(engine)}
    if liger.is_liger(case["provider"]):
        figures["path"] = liger.path(lambda: _timed_step(engine)) or liger.TRITON
    dist.barrier()
    if wrong:
        raise Wrong("; ".join(wrong), figures)
    timed = times[warmup:]
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
    model, _ = patched.alone({**case, "provider": patched.BASELINE})
    ids = tokens_of(case).to(device)
    own = list(model.parameters())
    apart = is_deepspeed(case) and case["dtype"] != "float32"
    stepped = [Parameter(p.detach().float()) for p in own] if apart else own
    plain = {**case, "strategy": "one process"}
    optimizer = optimizer_of(plain, stepped)
    losses, norms = [], []
    for _ in range(min(CHECKED_STEPS, case["steps"])):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in own]
        loss = 0.0
        for sequence in ids:
            value = model(sequence[None], labels=sequence[None]).loss
            value.backward()
            loss += value.item() / len(ids)
            for total, p in zip(sums, own, strict=True):
                assert p.grad is not None
                total.add_(p.grad, alpha=1 / len(ids))
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
