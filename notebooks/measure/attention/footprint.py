"""What a rival was seen to hold: tensors kept for backward, and the allocator's own counts."""

from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import allocations, timing
from fusedlib.bench.rivals import Workload

MIB = 2**20


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
    figures |= _kept(work)
    seen = {"cuda": _cuda, "mps": _mps}.get(dout.device.type, _host)(work, dout)
    work.reset()
    names = ("after_forward_mib", "forward_peak_mib", "peak_mib")
    held = {name: n if n is None else n / MIB for name, n in zip(names, seen, strict=True)}
    return figures | held


def _kept(work: Workload) -> dict[str, Any]:
    known = {leaf.untyped_storage().data_ptr() for leaf in work.leaves.values()}
    found: dict[int, tuple[int, str]] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in known:
            shape = "·".join(map(str, tensor.shape))
            text = f"{shape} {str(tensor.dtype).removeprefix('torch.')}"
            found.setdefault(storage.data_ptr(), (storage.nbytes(), text))
            held.append(tensor.detach())  # so that no address comes twice

    # There is no backward. Given back to autograd, a saved output (P) would keep itself for good.
    with torch.autograd.graph.saved_tensors_hooks(pack, _never):
        y = work.forward()
    backward = y.grad_fn.name() if y.grad_fn is not None else None
    return {
        "kept_mib": sum(nbytes for nbytes, _ in found.values()) / MIB,
        "kept": sorted(text for _, text in found.values()),
        "backward_node": backward,
    }


def _never(packed: None) -> Tensor:
    raise AssertionError("no backward runs through a graph that kept nothing")


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
    trace = allocations.trace(work.forward, dout)
    live = [sum(parts) * MIB for parts in zip(*trace.live_mib().values(), strict=True)]
    done = trace.forward_events
    return live[done - 1], max(live[:done]), max(live)
