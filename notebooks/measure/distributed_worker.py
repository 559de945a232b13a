"""What the processes of `measure.distributed` run: a training, and the plain one beside it."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import record_function

from fusedlib.bench import rivals, step_clock
from fusedlib.bench.attempt import Wrong, free_memory
from fusedlib.bench.cases import Case
from fusedlib.bench.machine import version_of
from fusedlib.bench.settings import MIB
from fusedlib.bench.statistics import summarize
from fusedlib.bench.timing import clock_for, synchronize
from measure import llama
from measure.pass_memory import mib_of
from measure.profiles import trace
from measure.profiles.trace import Piece

SEED = 0
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
# fp16 gradients of the logits are about 1e-9 of the loss: scaled they are no zeros. Never changed,
# so that no step is skipped.
LOSS_SCALE = 2.0**14
CHECKED_STEPS = 3
# Relative differences to the plain model in one process that rounding explains.
LOSS_BAND = {"float32": 1e-5, "float16": 5e-4, "bfloat16": 1e-3}
GRADIENT_BAND = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}
TRANSFERS, TRANSFER_MIB = 10, 64
SECTIONS = ("forward", "backward", "optimizer", "total")
STEP = "fusedlib: step"


def is_deepspeed(case: Case) -> bool:
    """Whether DeepSpeed runs the case."""
    return not case["strategy"].startswith("fsdp2")


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
    engine.ids = _tokens(case, engine.model.config.vocab_size)[rank * share : (rank + 1) * share]
    engine.ids = engine.ids.to(device)
    losses: list[float] = []
    times: list[dict[str, float]] = []
    for index in range(case["warmup"] + case["steps"]):
        if index == case["warmup"] and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss, parts = _timed_step(engine)
        losses.append(loss)
        times.append(parts)
    figures: dict[str, Any] = {"losses": losses}
    wrong = compared(case, true, losses, engine.gradient_norm, figures) if rank == 0 else []
    figures |= _memory(engine)
    steady = _steady_ms(engine, max(2, case["steps"] // 2))
    figures |= _communication(engine)
    dist.barrier()
    if wrong:
        raise Wrong("; ".join(wrong), figures)
    timed = times[case["warmup"] :]
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


def _tokens(case: Case, vocabulary: int) -> Tensor:
    """Random token ids of all processes, (processes · batch, context); the same in every step."""
    shape = case["processes"] * case["batch_size"], case["context_length"]
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(SEED))


def _model(case: Case, device: torch.device, arm: str) -> tuple[Any, Any]:
    """The model of an arm, and what is called."""
    model: Any = llama.build(case["model"], case["dtype"], device, SEED)
    return model, rivals.get(llama.TASK, arm).build(model)


def _loss(call: Any, ids: Tensor) -> Tensor:
    loss: Tensor = call(ids, labels=ids).loss
    return loss


def _optimizer(case: Case, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    kind, rate = case["optimizer"], case["learning_rate"]
    decay = WEIGHT_DECAY[kind]
    if case["strategy"].startswith("offload"):
        adam: Any = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        cpu_adam: torch.optim.Optimizer = adam(parameters, lr=rate, weight_decay=decay)
        return cpu_adam
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
    return make(parameters, lr=rate, weight_decay=decay)


# --- engines -------------------------------------------------------------------------------------


class Engine(step_clock.Trainer):
    """An arm's model as a strategy divides it among the processes; `ids` are its own sequences."""

    ids: Tensor

    def __init__(self, case: Case, device: torch.device) -> None:
        model, self.call = _model(case, device, case["provider"])
        super().__init__(model, device)
        self.model: Any = model
        self.weights_mib = mib_of(model.parameters())
        self.gradient_norm: float | None = None
        if case["checkpointing"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self) -> Tensor:
        """The loss of this process."""
        return _loss(self.call, self.ids)

    def clear(self) -> None:
        """Nothing: an update drops the gradients, so that none lie between steps."""


class FSDP2(Engine):
    """`fully_shard` of each layer and of the whole."""

    def __init__(self, case: Case, device: torch.device) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__(case, device)
        for module in (*self.model.model.layers, self.model):
            fully_shard(module, **STRATEGIES[case["strategy"]])
        self.optimizer = _optimizer(case, self.model.parameters())

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

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        config = {
            "train_micro_batch_size_per_gpu": case["batch_size"],
            "zero_optimization": STRATEGIES[case["strategy"]],
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # 1.0 by default, which the other strategies do not do
            "fp16": {"enabled": case["dtype"] == "float16", "loss_scale": LOSS_SCALE},
            "bf16": {"enabled": case["dtype"] == "bfloat16"},
        }
        self.optimizer = _optimizer(case, self.model.parameters())
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
    model = _model(case, device, llama.BASELINE)[0]
    ids = _tokens(case, model.config.vocab_size)
    own = list(model.parameters())
    apart = is_deepspeed(case) and case["dtype"] != "float32"
    stepped = [Parameter(p.detach().float()) for p in own] if apart else own
    plain = {**case, "strategy": "one process"}
    optimizer = _optimizer(plain, stepped)
    scale = LOSS_SCALE if case["dtype"] == "float16" else 1.0
    losses, norms = [], []
    for _ in range(min(CHECKED_STEPS, case["warmup"] + case["steps"])):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in own]
        loss = 0.0
        for sequence in ids:
            value = _loss(model, sequence[None].to(device))
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


def _communication(engine: Engine) -> dict[str, Any]:
    """Of one profiled step what is communication and what of it hidden; and the bandwidths.

    The step before it, under the profiler too, takes up that profilers start at different times.
    """

    def steps() -> None:
        for _ in range(2):
            with record_function(STEP):
                engine.issue()
                synchronize(engine.device)

    pieces: Iterable[Piece] = []
    if engine.device.type == "cuda" and dist.get_world_size() > 1:
        pieces = trace.record(engine.device, steps).during(STEP)
    return {**overlap(pieces), **dict(_bandwidths(engine.device))}


def overlap(pieces: Iterable[Piece]) -> dict[str, float | None]:
    """How much of a step's communication is hidden, in ms of the device's time.

    `communication_ms` is the time in which a kernel of NCCL runs, its waiting for other processes
    included. Hidden is what of it another kernel, copy or fill runs beside: |communication| +
    |compute| - |their union|. Both are None where nothing communicates.
    """
    parts: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for piece in pieces:
        parts["nccl" in piece.name.lower()].append((piece.start, piece.end))
    communication, compute = _covered_ms(parts[True]), _covered_ms(parts[False])
    hidden = communication + compute - _covered_ms(parts[True] + parts[False])
    return {
        "communication_ms": communication or None,
        "hidden_share": hidden / communication if communication else None,
    }  # fmt: skip


def _covered_ms(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans in µs."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return covered / 1e3


def _bandwidths(device: torch.device) -> Iterator[tuple[str, float | None]]:
    """1e9 bytes a second that a process sends, by the median of large transfers, in bf16."""
    processes = dist.get_world_size()
    part = torch.zeros(TRANSFER_MIB * MIB // 2 // processes, dtype=torch.bfloat16, device=device)
    whole = torch.zeros(part.numel() * processes, dtype=part.dtype, device=device)
    sent = (whole.numel() - part.numel()) * whole.element_size()
    calls = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    for name, call in calls.items():
        if processes == 1:
            yield f"{name}_gb_s", None
            continue
        clock, times = clock_for(device), []
        for _ in range(TRANSFERS):
            dist.barrier()
            synchronize(device)
            begin = clock.mark()
            call()
            times.append(clock.elapsed_ms(begin, clock.mark()))
        yield f"{name}_gb_s", sent / sorted(times)[TRANSFERS // 2] / 1e6


def _facts(case: Case) -> dict[str, Any]:
    """What ran: packages, the strategy's settings, and which code of ours."""
    packages = ["torch", "deepspeed"] if is_deepspeed(case) else ["torch"]
    return {
        "version": ", ".join(f"{p} {version_of(p)}" for p in packages),
        "settings": json.dumps(STRATEGIES[case["strategy"]]), "path": llama.path_of(case),
    }  # fmt: skip
