"""What a rival was seen to hold: tensors kept for backward, and the allocator's own counts."""

from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import timing
from study.allocator import kept, mib_of, passed, peak
from study.rivals import Workload
from study.settings import MIB


def measure(work: Workload, dout: Tensor) -> dict[str, Any]:
    """Figures in MiB of one forward and backward pass; call it once all kernels have run.

    Returns:
        `kept_mib` and `kept`: storages that autograd keeps besides the operands, each named by the
        first tensor seen in it. `operands_mib`: Q, K, V and dout. `after_forward_mib` (out
        included) and `peak_mib`: what the allocator had handed out over the operands. On the host
        these add up its allocations one by one; MPS counts no peak.
    """
    work.reset()
    keeps = kept(work.forward, work.leaves.values())
    seen = {"cuda": _cuda, "mps": _mps}.get(dout.device.type, _host)(work, dout)
    work.reset()
    return {
        "operands_mib": mib_of([*work.leaves.values(), dout]),
        "kept_mib": sum(each.nbytes for each in keeps) / MIB,
        "kept": sorted(each.tensor for each in keeps),
        "after_forward_mib": seen[0], "peak_mib": seen[1],
    }  # fmt: skip


_Seen = tuple[float, float | None]  # MiB after forward, and at the peak


def _cuda(work: Workload, dout: Tensor) -> _Seen:
    base, after = torch.cuda.memory_allocated(), []

    def both() -> None:
        y = work.forward()
        after.append(torch.cuda.memory_allocated())
        y.backward(dout)

    most = peak(both, "cuda")
    return (after[0] - base) / MIB, most


def _mps(work: Workload, dout: Tensor) -> _Seen:
    timing.synchronize(dout.device)
    base = torch.mps.current_allocated_memory()
    y = work.forward()
    timing.synchronize(dout.device)
    after = torch.mps.current_allocated_memory()
    y.backward(dout)
    return (after - base) / MIB, None


def _host(work: Workload, dout: Tensor) -> _Seen:
    trace = passed(work.forward, dout)
    live = [sum(parts) for parts in zip(*trace.live_mib().values(), strict=True)]
    return live[trace.forward_events - 1], max(live)
