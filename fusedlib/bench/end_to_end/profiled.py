"""One forward and backward under torch's profiler: kernels, the device's busy time, and casts.

A cast is `aten::_to_copy`, by which a tensor changes its dtype; its time is that of the kernels it
launches, on the CPU that of the operator. Busy time is the sum of all kernels' times: they follow
one another in one stream. What it is a share of is the same step without the profiler.
"""

from typing import Any

import torch
from torch.autograd import DeviceType

from fusedlib.bench import timing
from fusedlib.bench.allocations import quiet
from fusedlib.bench.end_to_end import running
from fusedlib.bench.end_to_end.cases import Case

CAST = "aten::_to_copy"


def measure(case: Case) -> dict[str, Any]:
    """Times of the step, then of one under the profiler: `operators`, `casts` and `casts_ms`.

    On CUDA also `kernels` and `busy_ms`; on MPS the profiler sees operators of the host alone.
    """
    trainer = running.trainer(case, "forward+backward")
    trainer.call = running.autocast(case, trainer.model)
    for _ in range(case["warmup"]):
        trainer.step()
    row = running.figures(case, running.collect(trainer.step, case))
    activities = [torch.profiler.ProfilerActivity.CPU]
    if case["device"] == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profile = torch.profiler.profile(activities=activities)
    with quiet():
        profile.start()
    try:
        trainer.step()
        timing.synchronize(case["device"])
    finally:
        with quiet():
            profile.stop()
    return row | _counted(profile, on_cuda=case["device"] == "cuda")


def _counted(profile: torch.profiler.profile, *, on_cuda: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"operators": 0, "casts": 0, "casts_ms": 0.0}
    kernels, busy_us = 0, 0.0
    for event in profile.key_averages():
        # A range's event on the device spans its kernels and is none itself.
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kernels += event.count
            busy_us += event.self_device_time_total
        elif event.key == CAST:
            spent = event.device_time_total if on_cuda else event.cpu_time_total
            found |= {"casts": event.count, "casts_ms": spent / 1e3}
        if event.device_type == DeviceType.CPU and event.key.startswith("aten::"):
            found["operators"] += event.count
    return found | ({"kernels": kernels, "busy_ms": busy_us / 1e3} if on_cuda else {})
