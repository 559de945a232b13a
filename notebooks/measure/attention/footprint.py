"""What a rival was seen to hold: tensors kept for backward, and the allocator's own counts."""

from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import timing
from fusedlib.bench.rivals import Workload
from fusedlib.bench.settings import MIB
from measure import pass_memory


def measure(work: Workload, dout: Tensor) -> dict[str, Any]:
    """Figures in MiB of one forward and backward pass; call it once all kernels have run.

    Returns:
        `kept_mib` and `kept`: storages that autograd keeps besides the operands, each named by the
        first tensor seen in it. `operands_mib`: Q, K, V and dout. `after_forward_mib` (out
        included), `forward_peak_mib` and `peak_mib`: what the allocator had handed out over the
        operands. On the host these add up its allocations one by one; MPS counts no peak.
    """
    work.reset()
    operands = [*work.leaves.values(), dout]
    figures = {"operands_mib": sum(t.untyped_storage().nbytes() for t in operands) / MIB}
    kept = pass_memory.kept_for_backward(work)
    figures |= {"kept_mib": kept["mib"], "kept": kept["tensors"], "backward_node": kept["backward"]}
    seen = {"cuda": _cuda, "mps": _mps}.get(dout.device.type, _host)(work, dout)
    work.reset()
    names = ("after_forward_mib", "forward_peak_mib", "peak_mib")
    held = {name: n if n is None else n / MIB for name, n in zip(names, seen, strict=True)}
    return figures | held


_Seen = tuple[float, float | None, float | None]  # bytes after forward, its peak, the whole peak


def _cuda(work: Workload, dout: Tensor) -> _Seen:
    timing.synchronize(dout.device)
    torch.cuda.reset_peak_memory_stats(dout.device)
    base = torch.cuda.memory_allocated(dout.device)
    y = work.forward()
    after, ahead = torch.cuda.memory_allocated(dout.device), torch.cuda.max_memory_allocated()
    y.backward(dout)
    return after - base, ahead - base, torch.cuda.max_memory_allocated() - base


def _mps(work: Workload, dout: Tensor) -> _Seen:
    timing.synchronize(dout.device)
    base = torch.mps.current_allocated_memory()
    y = work.forward()
    timing.synchronize(dout.device)
    after = torch.mps.current_allocated_memory()
    y.backward(dout)
    return after - base, None, None


def _host(work: Workload, dout: Tensor) -> _Seen:
    trace = pass_memory.trace(work.forward, dout)
    live = [sum(parts) * MIB for parts in zip(*trace.live_mib().values(), strict=True)]
    done = trace.forward_events
    return live[done - 1], max(live[:done]), max(live)
