"""What is left of this module for studies that are not topics yet: see `study.allocator`."""

from collections.abc import Callable
from typing import Any

from measure.racing.rivals import Workload
from measure.racing.settings import MIB
from study import allocator
from study.allocator import mib_of, passed

__all__ = ["kept_for_backward", "mib_of", "peak_over_mib", "trace"]
trace = passed


def kept_for_backward(work: Workload) -> dict[str, Any]:
    """What autograd keeps: MiB in all, and tensors."""
    kept = allocator.kept(work.forward, work.leaves.values())
    tensors = sorted(each.tensor for each in kept)
    return {"mib": sum(each.nbytes for each in kept) / MIB, "tensors": tensors}


def peak_over_mib(work: Callable[[], object]) -> float:
    """Of CUDA's allocator."""
    return float(allocator.peak(work, "cuda") or 0.0)
