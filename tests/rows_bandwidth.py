"""What `rms_norm` and `rope` reach of a copy's bandwidth: `python rows_bandwidth.py [TILE LOADED
PER_PROCESSOR]` on a GPU, 8192 tokens in bf16. A step is a CUDA graph over three sets of operands,
so that no launch's host time counts and the L2 keeps little; medians of 20 replays.
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fusedlib.kernels import rms_norm, rope

TOKENS, SETS = 8192, 3


def microseconds(calls: list[Callable[[], object]]) -> float:
    """A call's time: all calls in one graph, and the median of its replays."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * 5:
            call()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (5 * len(calls)))
    return statistics.median(times)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def main() -> None:
    if sys.argv[1:]:
        rms_norm.TILE, rms_norm.LOADED, rms_norm.PER_PROCESSOR = map(int, sys.argv[1:])
    print(torch.cuda.get_device_name(), rms_norm.TILE, rms_norm.LOADED, rms_norm.PER_PROCESSOR)
    for width, head_dim in ((2048, 64), (4096, 128)):
        measure(width, head_dim)


def measure(width: int, head_dim: int, heads: int = 32, key_heads: int = 8) -> None:
    size = TOKENS * width * 2
    sets = [[draw(TOKENS, width) for _ in range(4)] for _ in range(SETS)]
    weight, rstd = draw(width), torch.rand(TOKENS, device="cuda")
    per_head = (TOKENS // 4, heads, head_dim), (TOKENS // 4, key_heads, head_dim)
    turned = [[draw(4, *shape).transpose(1, 2) for shape in per_head] for _ in range(SETS)]
    cos, sin = torch.rand(2, 1, TOKENS // 4, head_dim, device="cuda").bfloat16()

    def back(a: list[Tensor], wants_weight: bool) -> object:
        return rms_norm.rms_norm_bwd(*a[:3], weight, rstd, True, wants_weight)

    works: dict[str, tuple[Callable[[list[Tensor]], object], list[list[Tensor]], float]] = {
        "copy": (lambda a: a[0].copy_(a[1]), sets, 2),
        "norm": (lambda a: rms_norm.rms_norm_fwd(a[0], weight, None, 1e-6, True), sets, 2),
        "norm + residual": (
            lambda a: rms_norm.rms_norm_fwd(a[0], weight, a[1], 1e-6, True), sets, 4),
        "norm + residual back": (lambda a: back(a, True), sets, 4),
        "norm + residual back, no dw": (lambda a: back(a, False), sets, 4),
        "rope": (lambda a: rope.rope_call(*a, cos, sin, None, False), turned, 2.5),
        "rope back": (lambda a: rope.rope_call(*a, cos, sin, None, True), turned, 2.5),
    }  # fmt: skip
    speed = 0.0
    for name, (work, operands, tensors) in works.items():
        time = microseconds([partial(work, a) for a in operands])
        reached = tensors * size / time / 1e6
        speed = speed or reached
        print(f"{width} {name:28}{time:8.1f} µs {reached:6.2f} TB/s {reached / speed:5.0%}")


if __name__ == "__main__":
    main()
