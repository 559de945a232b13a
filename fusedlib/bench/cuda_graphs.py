"""CUDA graphs of one workload: the same kernels replayed without Python between them."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fusedlib.bench.workload import Outputs, Workload, go_backward, named

WARMUP = 3


@dataclass(frozen=True)
class Captured:
    """A graph that can be replayed, and y and the gradients as its first replay left them."""

    replay: Callable[[], None]
    results: dict[str, Tensor]


def capture(workload: Workload, dy: Outputs, direction: str) -> Captured:
    """Capture "forward" or "forward+backward" of a workload on a CUDA GPU.

    Gradients are dropped before the capture, so that a replay writes them and never adds to them.
    The graph's memory lives as long as the result.

    Raises:
        ValueError: another direction. A backward alone cannot be captured fairly: a replay needs
            what the forward saved, which a rival may write over.
    """
    if direction not in ("forward", "forward+backward"):
        raise ValueError(f"a graph holds forward or forward+backward, not {direction!r}")
    backward = direction == "forward+backward"

    def once() -> Outputs:
        outputs: Outputs = workload.forward()
        if backward:
            go_backward(outputs, dy)
        return outputs

    workload.reset()
    side = side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            once()
            workload.reset()
    torch.cuda.current_stream().wait_stream(side)
    # What an earlier backward left in a cycle of references keeps its nodes of the parameters,
    # which accumulate on the stream of then: that ends a capture.
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = once()
    graph.replay()
    # Only now: what is not handed out as it lies, such as rows by turns, is copied here.
    given = {name: y.detach() for name, y in named(outputs).items()}
    results = {**given, **(workload.gradients() if backward else {})}
    workload.reset()
    torch.cuda.synchronize()
    return Captured(graph.replay, results)


@cache
def side_stream(device: int) -> torch.cuda.Stream:
    """The stream on which a device's workloads are warmed up: cuBLAS keeps 32 MiB for every stream
    that ever called it, and thirty captures held a gibibyte.
    """
    return torch.cuda.Stream(device)
