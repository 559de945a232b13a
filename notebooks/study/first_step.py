"""Where the first step's extra time goes: stages in a fresh process, and the driver's own calls."""

import re
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType

from fusedlib.bench.attempt import Unavailable, is_out_of_memory
from fusedlib.bench.timing import synchronize
from study.profiler import profiling
from study.trainer import Trainer

# A corner of the batch: every kernel of the step runs, on next to no data.
CORNER = (1, 16)
SETTLING, SETTLED = 5, 5
# What a host-side CUDA call is for; kernels are loaded lazily inside their first launch.
CALLS = {
    "memory": r"^cu(da)?(Malloc|Free|Mem(Alloc|Free|Create|Map|Release|Address|SetAccess)|Host)",
    "load": r"^cu(da)?(Module|Library|Kernel|Func|Occupancy|Link)",
    "launch": r"^cu(da)?(Launch|GraphLaunch)",
    "copy": r"^cu(da)?(Memcpy|Memset)",
    "wait": r"^cu(da)?\w*(Synchronize|StreamWait|EventQuery)",
    "other_calls": r"^cu(da)?[A-Z]",
}


def _timed(device: torch.device | str, work: Callable[[], object]) -> float:
    """Wall time of `work` and the device's work it starts, in ms."""
    begin = time.perf_counter()
    work()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def _whole(trainer: Trainer) -> dict[str, float]:
    """The first steps, and `settled_ms`: the median of this very process's late ones."""
    whole = [_timed(trainer.device, trainer.step) for _ in range(SETTLING + SETTLED)]
    late = median(whole[SETTLING:])
    return {"first_ms": whole[0], "second_ms": whole[1], "settled_ms": late}


def stages(start: dict[str, float], **problem: Any) -> dict[str, Any]:
    """Entry of a fresh process: does one by one, and times, what a first step does all at once.

    Wall times in ms: `device_ms` (context and first allocation), `build_ms` (model, data,
    optimizer), `gemm_ms` (first matrix product: library load, handle, workspace) beside
    `gemm_again_ms`, `corner_ms` (first run of every kernel on a corner of the batch) beside
    `corner_again_ms`, then `first_ms`, `second_ms` and `settled_ms` of whole steps.
    """
    device = problem["device"]
    figures = dict(start)
    figures["device_ms"] = _timed(device, lambda: torch.zeros(1, device=device))
    built: list[Trainer] = []
    figures["build_ms"] = _timed(device, lambda: built.append(Trainer(**problem)))
    trainer = built[0]
    dtype = next(trainer.model.parameters()).dtype
    square = torch.randn(128, 128, device=device).to(dtype)
    synchronize(device)
    figures["gemm_ms"] = _timed(device, lambda: square @ square)
    figures["gemm_again_ms"] = _timed(device, lambda: square @ square)
    figures["corner_ms"] = _timed(device, lambda: trainer.step(part=CORNER))
    figures["corner_again_ms"] = _timed(device, lambda: trainer.step(part=CORNER))
    return {**figures, **_whole(trainer)}


def compilation(start: dict[str, float], **problem: Any) -> dict[str, Any]:
    """Entry of a fresh process: wall times in ms of the first steps through `torch.compile`.

    The compile cache on disk is turned off, so that the first step really compiles.
    """
    torch.compiler.config.force_disable_caches = True
    trainer = Trainer(**problem)
    try:
        return {**start, **_whole(trainer)}
    except Exception as error:
        if is_out_of_memory(error):
            raise
        first = str(error).strip().splitlines()[0]
        raise Unavailable(f"torch.compile does not work here: {first}") from error


def calls(start: dict[str, float], **problem: Any) -> dict[str, Any]:
    """Entry of a fresh process: the CUDA calls of the very first step and of a settled one.

    For each group of `CALLS`: `<group>_first_ms`, `<group>_settled_ms` (host time spent in such
    calls) and `<group>_first_count`, `<group>_settled_count`; `kernels_..._ms` is the device's own
    time in kernels, `step_..._ms` the whole step under the profiler.
    """
    trainer = Trainer(**problem)
    figures: dict[str, Any] = dict(start)
    figures.update(_profiled(trainer, "first"))
    for _ in range(SETTLING):
        trainer.step()
    figures.update(_profiled(trainer, "settled"))
    return figures


def _profiled(trainer: Trainer, when: str) -> dict[str, Any]:
    with profiling("cuda") as profile:
        step_ms = _timed("cuda", trainer.step)
    time_ms = dict.fromkeys(CALLS, 0.0)
    count = dict.fromkeys(CALLS, 0)
    kernels_ms = 0.0
    for event in profile.key_averages():
        # An operator repeats the time of its kernels, an annotation that of all it spans.
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kernels_ms += event.self_device_time_total / 1e3
        group = next((g for g, pattern in CALLS.items() if re.search(pattern, event.key)), None)
        if group:
            time_ms[group] += event.self_cpu_time_total / 1e3
            count[group] += event.count
    return {
        f"step_{when}_ms": step_ms,
        f"kernels_{when}_ms": kernels_ms,
        **{f"{g}_{when}_ms": v for g, v in time_ms.items()},
        **{f"{g}_{when}_count": v for g, v in count.items()},
    }
