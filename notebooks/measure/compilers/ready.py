"""Getting an arm ready: what it may take, from which cache, and when it has settled."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn

from fusedlib.bench import timing
from fusedlib.bench.attempt import Unavailable, free_memory
from fusedlib.bench.settings import MIB, matmul_settings
from measure.end_to_end.races import _warm_compiler, graphs_compiled

LEAST_CALLS, MOST_CALLS = 4, 10  # before the clock; a CUDA graph is captured in the second


class TooLong(BaseException):
    """The time of this study is over; no `Exception`, which compilers catch and go on."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TooLong` inside when the time is up; only the main thread can be interrupted so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise TooLong

    handler = signal.signal(signal.SIGALRM, late)
    timer = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def empty_compile_cache(device: str) -> AbstractContextManager[Any]:
    """An empty compile cache on disk; on a CPU, where its headers alone take half a minute to
    compile anew, the one that is there.
    """
    from torch._inductor.utils import fresh_cache

    _warm_compiler(device)
    return fresh_cache() if device == "cuda" else nullcontext()


def call_until_compiled(call: Callable[[], object], device: str) -> dict[str, Any]:
    """Call until nothing compiles any more.

    Returns:
        `first_s`, the wall time of the first call; `compile_s`, that of all calls over that of as
        many of the fastest; `graphs` and `graph_breaks` of Dynamo; on CUDA `held_mib`, the peak of
        what is allocated in all calls but the first over what lay there before and still does.

    `held_mib` counts activations, gradients, results, and the workspaces of cuBLAS that the call
    needs. Of a CUDA graph it counts what its pool hands out while it is recorded, in the second
    call: the pool keeps that, but a replay allocates nothing. cuBLAS keeps a workspace (32 MiB on
    an H100) for each thread and stream that ever called it, and torch's CUDA graphs free them all
    before they record; so those of former calls are freed here first, for every arm alike.

    Raises:
        Unavailable: it goes on compiling.
    """
    from torch._dynamo.utils import counters

    counters.clear()
    on_cuda = device == "cuda"
    held = 0
    if on_cuda:
        torch._C._cuda_clearCublasWorkspaces()
        held = torch.cuda.memory_allocated()
    walls: list[float] = []
    before = -1
    while len(walls) < LEAST_CALLS or before != graphs_compiled():
        if len(walls) == MOST_CALLS:
            raise Unavailable(f"still compiles after {MOST_CALLS} calls")
        before, begin = graphs_compiled(), time.perf_counter()
        call()
        timing.synchronize(device)
        walls.append(time.perf_counter() - begin)
        if on_cuda and len(walls) == 1:
            torch.cuda.reset_peak_memory_stats()
    figures: dict[str, Any] = {
        "first_s": walls[0], "compile_s": sum(walls) - len(walls) * min(walls),
        "graphs": graphs_compiled(), "graph_breaks": sum(counters["graph_break"].values()),
        "cold_cache": on_cuda,
    }  # fmt: skip
    if on_cuda:
        held = min(held, torch.cuda.memory_allocated())
        figures["held_mib"] = (torch.cuda.max_memory_allocated() - held) / MIB
    return figures


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[nn.Module]:
    """The same weights, exactly, in fp32 for a while, with products in IEEE fp32."""
    kinds = {p: p.dtype for p in model.parameters()}
    for parameter in kinds:
        parameter.data = parameter.data.float()
    try:
        with matmul_settings("highest", True):
            yield model
    finally:
        for parameter, kind in kinds.items():
            parameter.grad, parameter.data = None, parameter.data.to(kind)
        free_memory()
