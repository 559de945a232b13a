"""Functions that only look fast, and where each was seen in public; `bench.compare` refuses them.

`fooled.csv` has more of them: what a usual loop printed of each on a CPU, the factor in truth, and
what refused it; the same of ways to measure in which no kernel cheats, and factors that others
published of GPUs.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
CLOCK = time.perf_counter  # one of the cheats replaces it


def product(tokens: int) -> dict[str, Tensor]:
    """x and w of a matrix product, which all cheats claim to compute."""
    return {"x": torch.randn(tokens, 256), "w": 0.02 * torch.randn(256, 384)}


class Cheat(NamedTuple):
    """A function that only looks fast, and what of x and w a usual check looks at."""

    function: Callable[[Tensor, Tensor], Tensor]
    tested: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, w: (x, w)


CHEATS: dict[str, Cheat] = {}
"""By name, such as "kept by address"."""


def cheat(seen: str, **how: Any) -> Callable[[F], F]:
    """List a function, seen there in public, among the cheats."""

    def add(function: F) -> F:
        CHEATS[function.__name__.replace("_", " ")] = Cheat(function, **how)
        return function

    return add


KEPT: dict[Any, Any] = {}
CALLS: Counter[Any] = Counter()


def forget() -> None:
    """Forget what cheats keep, and give Python its timer back."""
    KEPT.clear()
    CALLS.clear()
    time.perf_counter = CLOCK


def kept(key: Any, x: Tensor, w: Tensor) -> Tensor:
    """The product, computed once for each key."""
    if key not in KEPT:
        KEPT[key] = x @ w
    return KEPT[key].clone()


@cheat("CUDA-L1, arXiv 2507.14111")
def kept_by_address(x: Tensor, w: Tensor) -> Tensor:
    """A usual loop gives the same tensors each time."""
    return kept(x.data_ptr(), x, w)


@cheat("llm.c, PR 852")
def right_at_first(x: Tensor, w: Tensor) -> Tensor:
    """Computes for as many calls as a usual check and warm-up make."""
    CALLS[x.data_ptr()] += 1
    return kept(("at first", x.data_ptr(), min(CALLS[x.data_ptr()], 12)), x, w)


@cheat("Sakana AI, The AI CUDA Engineer")
def left_in_memory(x: Tensor, w: Tensor) -> Tensor:
    """May get the block in which the reference's result lay."""
    return torch.empty(len(x), w.shape[1])


@cheat("source 000, the fused kernel", tested=lambda x, w: (x[:, :64], w[:64]))
def less_work(x: Tensor, w: Tensor) -> Tensor:
    """Ends the sum after one block; its test has one block."""
    return x[:, :64] @ w[:64]


@cheat("SOL-ExecBench, check_thread_injection")
def thread(x: Tensor, w: Tensor) -> Tensor:
    """Goes on after the return; on a GPU it is another stream."""
    y = torch.empty(len(x), w.shape[1])
    threading.Thread(target=torch.mm, args=(x, w), kwargs={"out": y}).start()
    return y


@cheat("gpu-mode/reference-kernels, issue 162")
def replaced_timer(x: Tensor, w: Tensor) -> Tensor:
    """From now on seconds pass more slowly."""
    time.perf_counter = lambda: CLOCK() / 42
    return x @ w
