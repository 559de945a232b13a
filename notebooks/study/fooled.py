"""Functions that only look fast, and where each was seen in public.

    x, w = torch.randn(512, 256), torch.randn(256, 384)
    print(bench.compare(torch.matmul, {"mine": kept_by_address}, {"x": x, "w": w}))

A cheat takes what its reference takes, by default x and w of a matrix product. `fooled.csv` has
what a usual loop printed of each on a CPU, the factor in truth, and what refused it; the same of
ways to measure in which no kernel cheats, and factors that others published of GPUs.
"""

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
CLOCK = time.perf_counter  # one of the cheats replaces it


def product(tokens: int) -> dict[str, Tensor]:
    """x and w of a matrix product."""
    return {"x": torch.randn(tokens, 256), "w": 0.02 * torch.randn(256, 384)}


@dataclass(frozen=True)
class Cheat:
    """A function that only looks fast.

    Attributes:
        reference: what it claims to compute.
        inputs: of it, by name, of so many rows; or a function of a seed that gives them.
        tested: of those what a usual check looks at.
        backward: whether gradients are computed as well.
    """

    function: Function
    reference: Function = torch.matmul
    inputs: Callable[[int], Any] = product
    tested: Callable[..., Sequence[Tensor]] = lambda *values: values
    backward: bool = False


CHEATS: dict[str, Cheat] = {}
"""By name, such as "kept by address"."""


def cheat(seen: str, **how: Any) -> Callable[[F], F]:
    """List a function, seen there in public, among the cheats; see `Cheat`."""

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


@cheat("kernelbench.com, benchmarks/hard/DEVLOG.md")
def kept_by_version(x: Tensor, w: Tensor) -> Tensor:
    """`x.mul_(2)` counts the version of x up, `x.data.mul_(2)` does not."""
    return kept((x.data_ptr(), x._version), x, w)


@cheat("kernelbench.com, benchmarks/hard/DEVLOG.md")
def kept_by_three_values(x: Tensor, w: Tensor) -> Tensor:
    """Misses what changes elsewhere."""
    return kept(tuple(x.flatten()[[0, 999, -1]].tolist()), x, w)


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


class Lazy(torch.Tensor):
    """Computes when somebody reads it."""

    work: Callable[[], Tensor]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute, then do what was asked for."""
        done = [arg.work() if isinstance(arg, Lazy) else arg for arg in args]
        return function(*done, **(kwargs or {}))


@cheat("CUDA-L1, issue 12")
def lazy_tensor(x: Tensor, w: Tensor) -> Tensor:
    """Is read after the clock."""
    y = torch.empty(len(x), w.shape[1]).as_subclass(Lazy)
    y.work = lambda: x @ w
    return y


@cheat("KernelBench, zero_out_kernel")
def inputs_destroyed(x: Tensor, w: Tensor) -> Tensor:
    """The reference, called afterwards, agrees."""
    x.zero_()
    return torch.zeros(len(x), w.shape[1])


def search(x: Tensor, w: Tensor) -> Tensor:
    """The answer, which the benchmark keeps in the same process; `compare` lets it pass."""
    mean = x.mean(0) @ w
    tensors = (t for t in gc.get_objects() if type(t) is torch.Tensor)
    outputs = (t.float() for t in tensors if t.shape == (len(x), len(mean)))
    return min(outputs, key=lambda t: (t.mean(0) - mean).norm().nan_to_num(torch.inf)).clone()


@cheat("ngc92/pygpubench, PR 7")
def answer_found(x: Tensor, w: Tensor) -> Tensor:
    """Searches once: a search in each call passes, and takes longer than this product."""
    if "answer" not in KEPT:
        KEPT["answer"] = search(x, w)
    return KEPT["answer"].clone()


@cheat("source 000, backward", backward=True)
def missing_gradient(x: Tensor, w: Tensor) -> Tensor:
    """The test looks at outputs."""
    return x @ w.detach()


def _norm(x: Tensor) -> Tensor:
    return torch.layer_norm(x, x.shape[1:])


def _mean_of_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1).mean(-1)


def _long(tokens: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 2**19)}


def _wide(tokens: int) -> dict[str, Tensor]:
    return {"x": torch.randn(64, 2**14)}


@cheat("kernelbench.com, v3/docs/rewardhack_cases.md", reference=_norm, inputs=_long)
def identity(x: Tensor) -> Tensor:
    """Is nearly a LayerNorm of random numbers, where rows are long and weights are one."""
    return x.clone()


@cheat("Liger-Kernel, log in PR 1357", reference=partial(torch.softmax, dim=-1),
       inputs=_wide)  # fmt: skip
def loose_tolerance(x: Tensor) -> Tensor:
    """All values of a softmax of wide rows are small."""
    return torch.zeros_like(x)


@cheat("METR, 2025-02-14", reference=_mean_of_softmax, inputs=_wide)
def constant_problem(x: Tensor) -> Tensor:
    """There is nothing to compute: the careful loop is fooled too."""
    return torch.full((len(x),), 1 / x.shape[1])


@cheat("kernelbench.com, rewardhack_cases.md")
def lower_precision(x: Tensor, w: Tensor) -> Tensor:
    """Than the problem asks for."""
    return (x.bfloat16() @ w.bfloat16()).float()


def _masked(x: Tensor, w: Tensor, keep: Tensor) -> Tensor:
    return (x * keep) @ w


def _masks(tokens: int) -> Callable[[int], dict[str, Tensor]]:
    given = product(tokens)
    return lambda seed: given | {"keep": torch.rand(tokens, 256) > 0.5 * (seed > 0)}


@cheat("kernelbench.com, hard/DEVLOG.md", reference=_masked, inputs=_masks)
def shaped_to_the_test(x: Tensor, w: Tensor, keep: Tensor) -> Tensor:
    """The test's mask masks nothing. Only inputs that are a function of a seed show it."""
    return x @ w


@cheat("KernelGuard, rule SILENT_FALLBACK")
def silent_fallback(x: Tensor, w: Tensor) -> Tensor:
    """Is right, and is not its author's: a profiler shows whose kernels ran."""
    try:
        return torch.ops.mine.product(x, w)
    except AttributeError:
        return x @ w
