"""torch.compile of a model whole or block by block, its time, and whether it compiled again.

An event is a graph that Dynamo has not seen: its counter says how many there were. Compilation is
over with the first step that brings no event; its time is the wall time of the steps before, less
that of as many settled steps. A measured step that brings an event is no step of the model, and
marks its row.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import timing
from fusedlib.bench.results import Unavailable
from fusedlib.bench.sweep import is_out_of_memory
from fusedlib.models.transformer import Transformer

# A step that still compiles after so many others never settles.
MOST_STEPS = 8


def events() -> int:
    """Graphs compiled by Dynamo in this process since it was last reset."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextmanager
def cold() -> Iterator[None]:
    """An empty cache on disk and nothing compiled in this process, before and after."""
    from torch._inductor.utils import fresh_cache

    _forget()
    with fresh_cache(), warnings.catch_warnings():
        # This study wants its fp32 products in fp32, which Inductor takes for an oversight.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def prepare(device: str, backend: str) -> None:
    """Compile next to nothing once, so that no model pays for imports and worker processes.

    Raises:
        Unavailable: torch.compile does not work here.
    """
    weights = torch.ones(8, 8, device=device, requires_grad=True)
    with cold(), _told():
        torch.compile(lambda w: (w @ w).sin().sum(), backend=backend)(weights).backward()


def compiled(
    model: Transformer, mode: str, backend: str = "inductor"
) -> Callable[[Tensor], Tensor]:
    """The model as one compiled function, or itself with each block through one shared graph.

    Raises:
        ValueError: not a compiled mode.
    """
    if mode == "compiled":
        whole: Callable[[Tensor], Tensor] = torch.compile(model, dynamic=False, backend=backend)
        return whole
    if mode != "compiled blocks":
        raise ValueError(f"mode must be 'compiled' or 'compiled blocks', got {mode!r}")
    for block in model.blocks:
        block.compile(dynamic=False, backend=backend)
    return model


def settle(step: Callable[[], object], device: str) -> dict[str, Any]:
    """Step until nothing compiles any more.

    Returns:
        `compile_s`, the wall time of the steps that compiled over that of as many that did not,
        their number (`compile_steps`) and that of `graphs`.

    Raises:
        Unavailable: torch.compile does not work here, or goes on compiling.
    """
    start, seconds = events(), 0.0
    for count in range(MOST_STEPS):
        before, begin = events(), time.perf_counter()
        with _told():
            step()
        timing.synchronize(device)
        spent = time.perf_counter() - begin
        if events() == before:
            compile_s = seconds - count * spent
            return {"compile_s": compile_s, "compile_steps": count, "graphs": events() - start}
        seconds += spent
    raise Unavailable(f"torch.compile still compiles after {MOST_STEPS} steps")


@contextmanager
def _told() -> Iterator[None]:
    """Whatever torch.compile stumbles over as `Unavailable`, but for memory."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Unavailable(f"torch.compile does not work here: {first[:200]}") from error
