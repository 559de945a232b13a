"""torch.compile around a measurement: from which cache, when it has settled, and for how long."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from types import FrameType
from typing import Any

import torch

from fusedlib.bench import timing
from fusedlib.bench.attempt import Unavailable
from study.settings import MIB

LEAST_CALLS, MOST_CALLS = 4, 10  # before the clock; a CUDA graph is captured in the second
MOST_GRAPHS = 64  # of one function, such as a model's forward, for which all arms of a race ask


class TooLong(BaseException):
    """The time of this study is over; no `Exception`, which compilers catch and go on."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TooLong` inside when the time is up; in the main thread."""

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

    warm_compiler(device)
    return fresh_cache() if device == "cuda" else nullcontext()


@cache
def warm_compiler(device: str) -> None:
    """Compile next to nothing once, so that no model pays for imports and worker processes."""
    weights = torch.ones(8, 8, device=device, requires_grad=True)
    with suppress(Exception):  # whoever needs the compiler meets the same, and has a row for it
        torch.compile(lambda w: (w @ w).sin().sum())(weights).backward()


def graphs_compiled() -> int:
    """Graphs that Dynamo compiled in this process."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def graphs_refused() -> int:
    """How often Inductor made no CUDA graph where it was asked for one, in this process."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def never_eager() -> AbstractContextManager[Any]:
    """Inside, torch.compile takes up to `MOST_GRAPHS` graphs of a function, where by itself it runs
    the ninth one uncompiled without a word; one more is an error.
    """
    import torch._dynamo

    return torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, fail_on_recompile_limit_hit=True)


def call_until_compiled(
    call: Callable[[], object], device: str, least: int = LEAST_CALLS
) -> dict[str, Any]:
    """Call at least so often, and until nothing compiles any more.

    Gives `compile_s`, the wall time of all calls over that of as many of the fastest; Dynamo's
    `graphs`; on CUDA `held_mib`, the peak of what is allocated in all calls but the first over what
    lay there before and still does. Of a CUDA graph it counts what its pool hands out while it is
    recorded, in the second call. cuBLAS keeps a workspace for each thread and stream that ever
    called it, and torch's CUDA graphs free them all before they record; so those of former calls
    are freed here first, for every arm alike.
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
    while len(walls) < least or before != graphs_compiled():
        if len(walls) == MOST_CALLS:
            raise Unavailable(f"still compiles after {MOST_CALLS} calls")
        before, begin = graphs_compiled(), time.perf_counter()
        call()
        timing.synchronize(device)
        walls.append(time.perf_counter() - begin)
        if on_cuda and len(walls) == 1:
            torch.cuda.reset_peak_memory_stats()
    compile_s = sum(walls) - len(walls) * min(walls)
    figures: dict[str, Any] = {"compile_s": compile_s, "graphs": graphs_compiled()}
    if on_cuda:
        held = min(held, torch.cuda.memory_allocated())
        figures["held_mib"] = (torch.cuda.max_memory_allocated() - held) / MIB
    return figures
