"""Study 06's single cases: a step's parts and peaks, one under the profiler, AdamW alone."""

from typing import Any

import torch
from torch.autograd import DeviceType

from fusedlib.bench import timing
from fusedlib.bench.attempt import free_memory
from fusedlib.bench.statistics import summarize
from measure.end_to_end.cases import require_possible, shape
from measure.pass_memory import peak_over_mib
from measure.profiler import profiling
from measure.racing import roofline, step_clock
from measure.racing.cases import Case
from measure.racing.settings import MIB, matmul_settings
from models import flops
from models.transformer import Transformer, config
from study.trainer import Trainer, adamw

CAST = "aten::_to_copy"
# A step on its own, after one that gives the host the head start which it has in a loop.
BLOCKS, STEPS = 3, 1
INFERENCES = 3
# AdamW reads weight, gradient and both moments, writes weight and moments.
PASSES = 7


def measure(case: Case) -> dict[str, Any]:
    """The row's figures.

    Raises:
        Refused: the device is not here, or the case is far above the memory there is.
    """
    require_possible(case)
    free_memory()  # also when the case before ended in an exception
    if case["experiment"] == "ceiling":
        return roofline.measure(case)
    with matmul_settings("highest", True):
        return optimizer(case) if case["experiment"] == "optimizer" else step(case)


def step(case: Case) -> dict[str, Any]:
    """Times of the step's parts, then its memory, then what else is asked for."""
    trainer = Trainer.of(case)
    row = step_clock.measure(trainer, seconds=case["seconds"], blocks=BLOCKS, steps=STEPS)
    row |= work(case) | step_clock.peaks(trainer)
    if case["inference"]:
        row |= _inference(trainer)
    return row | (_profiled(trainer) if case["experiment"] == "profile" else {})


def work(case: Case) -> dict[str, Any]:
    """FLOPs of forward and backward by formula, and tokens of a step."""
    batch, context = case["batch_size"], case["context_length"]
    return {"flops": flops.count(shape(case), batch, context), "tokens": batch * context}


def _inference(trainer: Trainer) -> dict[str, Any]:
    """The model alone without gradients and loss."""
    with torch.no_grad():
        times = timing.in_turns(
            {"inference": trainer.logits}, device=trainer.device, warmup=1,
            repetitions=INFERENCES, flush_l2=False,
        )  # fmt: skip
    return summarize(times["inference"].samples_ms, "inference")


def _profiled(trainer: Trainer) -> dict[str, Any]:
    """Operators, kernels with their time, and casts of one step.

    A cast is `aten::_to_copy`, by which a tensor changes its dtype; its time is that of the kernels
    it launches, on a CPU that of the operator. On MPS the profiler sees the host alone.
    """
    on_cuda = trainer.device.type == "cuda"
    with profiling(trainer.device) as profile:
        trainer.issue()
    row: dict[str, Any] = {"operators": 0, "casts": 0, "casts_ms": 0.0}
    kernels, kernels_us = 0, 0.0
    for event in profile.key_averages():
        # A range's event on the device spans its kernels and is none itself.
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kernels += event.count
            kernels_us += event.self_device_time_total
        elif event.key == CAST:
            spent = event.device_time_total if on_cuda else event.cpu_time_total
            row |= {"casts": event.count, "casts_ms": spent / 1e3}
        if event.device_type == DeviceType.CPU and event.key.startswith("aten::"):
            row["operators"] += event.count
    return row | ({"kernels": kernels, "kernels_ms": kernels_us / 1e3} if on_cuda else {})


def optimizer(case: Case) -> dict[str, Any]:
    """AdamW's steps on random gradients, `least_bytes` that one must move, and its memory.

    On CUDA also `transient_mib`, which a settled step allocates at its peak and gives back.
    """
    model = Transformer(config(case["model"]), device=case["device"])
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    adam = adamw(parameters, case["optimizer"])
    adam.step()
    row: dict[str, Any] = {}
    if torch.device(case["device"]).type == "cuda":
        row["transient_mib"] = peak_over_mib(adam.step)
    times = timing.in_turns(
        {"optimizer": adam.step}, device=case["device"], warmup=1, repetitions=5, most=20,
        seconds=case["seconds"], flush_l2=False,
    )  # fmt: skip
    row |= summarize(times["optimizer"].samples_ms, "optimizer")
    moments = [m for s in adam.state.values() for m in s.values() if isinstance(m, torch.Tensor)]
    weights, state = (sum(t.nbytes for t in tensors) for tensors in (parameters, moments))
    return row | {
        "least_bytes": PASSES * weights, "tensors": len(parameters),
        "weights_mib": weights / MIB, "state_mib": state / MIB,
    }  # fmt: skip
