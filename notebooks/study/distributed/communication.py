"""What of a divided step is communication, how much of it is hidden, and the bandwidths."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from fusedlib.bench.timing import clock_for, synchronize
from study import trace
from study.distributed.engines import Engine
from study.settings import MIB
from study.trace import Piece

TRANSFERS, TRANSFER_MIB = 10, 64
STEP = "fusedlib: step"


def measured(engine: Engine) -> dict[str, Any]:
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
