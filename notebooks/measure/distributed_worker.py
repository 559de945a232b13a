"""What the processes of `measure.distributed` run: a training, and the plain one beside it."""

import json
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from itertools import pairwise
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import record_function

from fusedlib.bench import rivals
from fusedlib.bench.attempt import Attempt, Wrong, free_memory
from fusedlib.bench.machine import version_of
from fusedlib.bench.settings import MIB
from fusedlib.bench.statistics import summarize
from fusedlib.bench.timing import Sections, clock_for, synchronize
from measure import llama
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
KEPT_MIB = 2048  # that a process may keep of a case; loaded code takes half, DeepSpeed keeps all
SECTIONS = ("forward", "backward", "optimizer", "total")
STEP = "fusedlib: step"
Case = Mapping[str, Any]


def is_deepspeed(case: Case) -> bool:
    """Whether DeepSpeed runs the case."""
    return not case["strategy"].startswith("fsdp2")


def train(case: Case, device: torch.device) -> dict[str, Any]:
    """A case's figures, from one of the processes.

    Raises:
        Wrong: losses or the gradient's norm are not the plain model's; on process 0.
    """
    rank, processes = dist.get_rank(), dist.get_world_size()
    true = reference(case, device) if rank == 0 else {}
    free_memory()
    engine = (DeepSpeed if is_deepspeed(case) else FSDP2)(case, device)
    share = case["batch_size"]
    ids = _tokens(case, engine.model.config.vocab_size)
    own = ids[rank * share : (rank + 1) * share].to(device)
    losses: list[float] = []
    times: list[dict[str, float]] = []
    for index in range(case["warmup"] + case["steps"]):
        if index == case["warmup"] and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss, parts = _timed_step(engine, own, device)
        losses.append(loss)
        times.append(parts)
    figures: dict[str, Any] = {"losses": losses, "first_ms": times[0]["total"]}
    figures |= compared(case, true, losses, engine.gradient_norm) if rank == 0 else {}
    figures |= _memory(engine, device)
    steady = _steady_ms(engine, own, device, max(2, case["steps"] // 2))
    figures |= _communication(engine, own, device)
    dist.barrier()
    if why := figures.pop("why", None):
        del figures["first_ms"]
        raise Wrong(why, figures)
    timed = times[case["warmup"] :]
    for name in SECTIONS:
        figures |= summarize([t[name] for t in timed], "" if name == "total" else name)
    figures |= summarize(steady, "steady")
    tokens = processes * share * case["context_length"]
    figures["tokens_per_s"] = tokens / figures["median_ms"] * 1e3
    return figures | _facts(case)


def _join(case: Case) -> torch.device:
    """Enter the job's group of processes and take its device."""
    local, backend = int(os.environ["LOCAL_RANK"]), "gloo"
    device = torch.device("cpu")
    if case["device"] == "cuda":
        device, backend = torch.device("cuda", local), "nccl"
        torch.cuda.set_device(device)
    else:
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


def _model(case: Case, device: torch.device, provider: str) -> tuple[Any, Any]:
    """The model of an arm, and what is called."""
    model: Any = llama.build(case["model"], case["dtype"], device, SEED)
    return model, rivals.get(llama.TASK, provider).build(model)


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


class Engine:
    """An arm's model as a strategy divides it among the processes."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.model, self.call = _model(case, device, case["provider"])
        self.weights_mib = sum(p.numel() * p.element_size() for p in self.model.parameters()) / MIB
        self.gradient_norm: float | None = None
        if case["checkpointing"]:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def backward(self, loss: Tensor) -> None:
        """Gradients, averaged over the processes."""
        raise NotImplementedError

    def update(self) -> None:
        """The optimizer's step; the first one keeps the gradient's norm."""
        raise NotImplementedError


class FSDP2(Engine):
    """`fully_shard` of each layer and of the whole."""

    def __init__(self, case: Case, device: torch.device) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__(case, device)
        for module in (*self.model.model.layers, self.model):
            fully_shard(module, **STRATEGIES[case["strategy"]])
        self.optimizer = _optimizer(case, self.model.parameters())

    def backward(self, loss: Tensor) -> None:  # noqa: D102
        loss.backward()

    def update(self) -> None:  # noqa: D102
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
        optimizer = _optimizer(case, self.model.parameters())
        initialize = import_module("deepspeed").initialize
        self.call, *_ = initialize(model=self.model, optimizer=optimizer, config=config)

    def backward(self, loss: Tensor) -> None:  # noqa: D102
        self.call.backward(loss)

    def update(self) -> None:  # noqa: D102
        self.call.step()
        if self.gradient_norm is None:
            self.gradient_norm = float(self.call.get_global_grad_norm())


def _timed_step(
    engine: Engine, ids: Tensor, device: torch.device
) -> tuple[float, dict[str, float]]:
    """One step that all processes begin together: the mean loss, and ms of the slowest process."""
    dist.barrier()
    synchronize(device)
    begin = time.perf_counter()
    sections = Sections(device)
    loss = _step(engine, ids, sections)
    synchronize(device)
    times_ms = sections.elapsed_ms() | {"total": (time.perf_counter() - begin) * 1e3}
    slowest = torch.tensor([times_ms[name] for name in SECTIONS], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    mean = loss.detach().float() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item(), dict(zip(SECTIONS, slowest.tolist(), strict=True))


def _steady_ms(engine: Engine, ids: Tensor, device: torch.device, steps: int) -> list[float]:
    """From a step's begin to the next one's, without a wait between them: ms, the slowest process.

    One step more begins on an idle device; its time is left out.
    """
    clock = clock_for(device)
    dist.barrier()
    synchronize(device)
    marks = []
    for _ in range(1 + steps):
        _step(engine, ids, Sections(device))
        marks.append(clock.mark())
    synchronize(device)
    spans = [clock.elapsed_ms(begin, end) for begin, end in pairwise(marks)]
    slowest = torch.tensor(spans, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    slowest_ms: list[float] = slowest.tolist()
    return slowest_ms


def _step(engine: Engine, ids: Tensor, sections: Sections) -> Tensor:
    with sections.section("forward"):
        loss = _loss(engine.call, ids)
    with sections.section("backward"):
        engine.backward(loss)
    with sections.section("optimizer"):
        engine.update()
    return loss


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
    case: Case, true: dict[str, Any], losses: list[float], norm: float | None
) -> dict[str, Any]:
    """Differences to the plain model, and under `why` what is out of its band or not finite."""
    assert norm is not None
    baseline, baseline_norm = true["reference_losses"], true["reference_gradient_norm"]
    off = [abs(a / b - 1) for a, b in zip(losses, baseline, strict=False)]
    off += [math.nan for loss in losses if not math.isfinite(loss)]
    figures = {**true, "gradient_norm": norm}
    for name, error, bands in (
        ("loss", float(np.max(off)), LOSS_BAND),
        ("gradient_norm", abs(norm / baseline_norm - 1), GRADIENT_BAND),
    ):
        band = bands[case["dtype"]]
        figures |= {f"{name}_error": error, f"{name}_band": band}
        if not error <= band:
            figures["why"] = (
                f"the {name.replace('_', ' ')} differs from the plain model's in one process by "
                f"{error:.2g} of it, more than {band:g}"
            )
    return figures


# --- memory, communication, facts ----------------------------------------------------------------


def _memory(engine: Engine, device: torch.device) -> dict[str, Any]:
    """MiB: of the device in the fullest process, of the host in all together."""
    figures: dict[str, Any] = {"weights_mib": engine.weights_mib}
    figures["host_mib"] = _total(_resident(), device)
    if device.type != "cuda":
        return figures | dict.fromkeys(("peak_mib", "state_mib", "pinned_mib"))
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    held = [torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()]
    most = torch.tensor(held, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    peak, state = (most / MIB).tolist()
    return figures | {
        "peak_mib": peak, "state_mib": state, "pinned_mib": _total(pinned, device),
    }  # fmt: skip


def _resident() -> int:
    """Bytes of the host's memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _total(nbytes: int, device: torch.device) -> float:
    """MiB of all processes."""
    total = torch.tensor(nbytes / MIB, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item()


def _communication(engine: Engine, ids: Tensor, device: torch.device) -> dict[str, Any]:
    """Of one profiled step what is communication and what of it hidden; and the bandwidths.

    The step before it, under the profiler too, takes up that profilers start at different times.
    """

    def steps() -> None:
        for _ in range(2):
            with record_function(STEP):
                _step(engine, ids, Sections(device))
                synchronize(device)

    if device.type == "cuda" and dist.get_world_size() > 1:
        figures: dict[str, Any] = overlap(trace.record(device, steps).during(STEP))
    else:
        figures = dict.fromkeys(overlap([]))
    return figures | dict(_bandwidths(device))


def overlap(pieces: Iterable[Piece]) -> dict[str, float | None]:
    """How much of a step's communication is hidden, in ms of the device's time.

    `communication_ms` is the time in which a kernel of NCCL runs, its waiting for other processes
    included, `compute_ms` that in which any other kernel, copy or fill runs, and `hidden_ms` that
    in which both do: |communication| + |compute| - |their union|. `hidden_share` is of the
    communication, None where there is none.
    """
    parts: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for piece in pieces:
        parts["nccl" in piece.name.lower()].append((piece.start, piece.end))
    communication, compute = _covered_ms(parts[True]), _covered_ms(parts[False])
    hidden = communication + compute - _covered_ms(parts[True] + parts[False])
    return {
        "communication_ms": communication, "compute_ms": compute, "hidden_ms": hidden,
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
        times = []
        for _ in range(TRANSFERS):
            dist.barrier()
            sections = Sections(device)
            synchronize(device)
            with sections.section(name):
                call()
            times.append(sections.elapsed_ms()["total"])
        yield f"{name}_gb_s", sent / sorted(times)[TRANSFERS // 2] / 1e6


def _facts(case: Case) -> dict[str, Any]:
    """What ran: packages, the strategy's settings, and which code of ours."""
    packages = ["torch", "deepspeed"] if is_deepspeed(case) else ["torch"]
    return {
        "version": ", ".join(f"{p} {version_of(p)}" for p in packages),
        "settings": json.dumps(STRATEGIES[case["strategy"]]), "path": llama.path_of(case),
    }  # fmt: skip


# --- the process ---------------------------------------------------------------------------------


def serve(rank: int, first: Case, port: int, study: Connection, log: str) -> None:
    """What a process of a job does: train each case that the study sends, and send back how it was.

    It ends with the study, after a case that failed, and after one whose memory it cannot give
    back, as DeepSpeed's engines do not.

    Args:
        rank: of this process.
        first: a case, whose processes, device and launcher all cases share.
        port: at which the processes meet.
        study: takes a case, gives the reply: rank, status, reason, figures, value, `at` what time
            it was, and whether the process `goes_on`.
        log: the file of what libraries print.
    """
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_follow_study, daemon=True).start()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(first["processes"]),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_NVLS_ENABLE": "0",
    }  # fmt: skip
    if first["device"] == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    joined = Attempt.at(_join, first)
    started, goes_on = _give_back(), True
    while goes_on:
        case = study.recv()
        tried = Attempt.at(train, case, joined.value) if joined.value is not None else joined
        goes_on = tried.ok and _give_back() < started + KEPT_MIB * MIB
        study.send(
            {"rank": rank, "status": tried.status, "reason": tried.reason, "at": time.time(),
             "figures": tried.figures, "value": tried.value, "goes_on": goes_on}
        )  # fmt: skip
    os._exit(0)  # skips teardown: other processes may be gone, and nothing is left to save


def _follow_study() -> None:
    """End this process when the study that started it is gone."""
    study = parent_process()
    assert study is not None
    study.join()
    os._exit(1)


def _give_back() -> int:
    """Free what a case took; bytes that this process still has, of the host and the device."""
    torch.compiler.reset()
    free_memory()
    if not torch.cuda.is_available():
        return _resident()
    torch._C._host_emptyCache()
    return _resident() + torch.cuda.memory_allocated()
