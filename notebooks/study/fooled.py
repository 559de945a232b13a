"""Ways to be fooled by a benchmark: a function each, and where each was seen in public.

    x, w = torch.randn(512, 256), torch.randn(256, 384)
    print(bench.compare(torch.matmul, {"mine": kept_by_address}, {"x": x, "w": w}))

A cheat takes what its reference takes, by default x and w of a matrix product. A protocol takes
`Loops` and gives two factors: what a usual loop prints, and what a careful one finds.
`fooled.csv` has what each printed, and factors that others published of GPUs: `table` shows it, and
`python -m study.fooled` measures its CPU's rows anew.
"""

import gc
import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch
from torch import Tensor

from fusedlib.bench import compare

FILE = Path(__file__).with_name("fooled.csv")
Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
CLOCK = time.perf_counter  # one of the cheats replaces it
UNSEEN = "not refused"


def product(tokens: int) -> dict[str, Tensor]:
    """x and w of a matrix product."""
    return {"x": torch.randn(tokens, 256), "w": 0.02 * torch.randn(256, 384)}


@dataclass(frozen=True)
class Cheat:
    """A function that only looks fast.

    Attributes:
        group: what it fools: the clock, or the check of its work.
        seen: where, in public.
        reference: what it claims to compute.
        inputs: of it, by name, of so many rows; or a function of a seed that gives them.
        tested: of those what a usual check looks at.
        backward: whether gradients are computed as well.
    """

    function: Function
    group: str
    seen: str
    reference: Function = torch.matmul
    inputs: Callable[[int], Any] = product
    tested: Callable[..., Sequence[Tensor]] = lambda *values: values
    backward: bool = False


CHEATS: dict[str, Cheat] = {}
"""By name, such as "kept by address"."""
PROTOCOLS: dict[str, tuple[Function, dict[str, str]]] = {}
"""By name, with `group`, `seen`, and `caught`: what in `compare` refuses it."""


def cheat(group: str, seen: str, **how: Any) -> Callable[[F], F]:
    """List a function among the cheats; see `Cheat`."""

    def add(function: F) -> F:
        CHEATS[_name(function)] = Cheat(function, group, seen, **how)
        return function

    return add


def protocol(group: str, seen: str, caught: str) -> Callable[[F], F]:
    """List a way of measuring in which no kernel cheats."""

    def add(function: F) -> F:
        PROTOCOLS[_name(function)] = function, {"group": group, "seen": seen, "caught": caught}
        return function

    return add


def _name(function: Function) -> str:
    return function.__name__.replace("_", " ")


# --- cheats ------------------------------------------------------------------------------------

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


@cheat("work", "CUDA-L1, arXiv 2507.14111")
def kept_by_address(x: Tensor, w: Tensor) -> Tensor:
    """A usual loop gives the same tensors each time."""
    return kept(x.data_ptr(), x, w)


@cheat("work", "kernelbench.com, benchmarks/hard/DEVLOG.md")
def kept_by_version(x: Tensor, w: Tensor) -> Tensor:
    """`x.mul_(2)` counts the version of x up, `x.data.mul_(2)` does not."""
    return kept((x.data_ptr(), x._version), x, w)


@cheat("work", "kernelbench.com, benchmarks/hard/DEVLOG.md")
def kept_by_three_values(x: Tensor, w: Tensor) -> Tensor:
    """Misses what changes elsewhere."""
    return kept(tuple(x.flatten()[[0, 999, -1]].tolist()), x, w)


@cheat("work", "llm.c, PR 852")
def right_at_first(x: Tensor, w: Tensor) -> Tensor:
    """Computes for as many calls as a usual check and warm-up make."""
    CALLS[x.data_ptr()] += 1
    return kept(("at first", x.data_ptr(), min(CALLS[x.data_ptr()], 12)), x, w)


@cheat("work", "Sakana AI, The AI CUDA Engineer")
def left_in_memory(x: Tensor, w: Tensor) -> Tensor:
    """May get the block in which the reference's result lay."""
    return torch.empty(len(x), w.shape[1])


@cheat("work", "source 000, the fused kernel", tested=lambda x, w: (x[:, :64], w[:64]))
def less_work(x: Tensor, w: Tensor) -> Tensor:
    """Ends the sum after one block; its test has one block."""
    return x[:, :64] @ w[:64]


@cheat("clock", "SOL-ExecBench, check_thread_injection")
def thread(x: Tensor, w: Tensor) -> Tensor:
    """Goes on after the return; on a GPU it is another stream."""
    y = torch.empty(len(x), w.shape[1])
    threading.Thread(target=torch.mm, args=(x, w), kwargs={"out": y}).start()
    return y


@cheat("clock", "gpu-mode/reference-kernels, issue 162")
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


@cheat("clock", "CUDA-L1, issue 12")
def lazy_tensor(x: Tensor, w: Tensor) -> Tensor:
    """Is read after the clock."""
    y = torch.empty(len(x), w.shape[1]).as_subclass(Lazy)
    y.work = lambda: x @ w
    return y


@cheat("work", "KernelBench, zero_out_kernel")
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


@cheat("work", "ngc92/pygpubench, PR 7")
def answer_found(x: Tensor, w: Tensor) -> Tensor:
    """Searches once: a search in each call passes, and takes longer than this product."""
    if "answer" not in KEPT:
        KEPT["answer"] = search(x, w)
    return KEPT["answer"].clone()


@cheat("work", "source 000, backward", backward=True)
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


@cheat("work", "kernelbench.com, v3/docs/rewardhack_cases.md", reference=_norm, inputs=_long)
def identity(x: Tensor) -> Tensor:
    """Is nearly a LayerNorm of random numbers, where rows are long and weights are one."""
    return x.clone()


@cheat("work", "Liger-Kernel, log in PR 1357", reference=partial(torch.softmax, dim=-1),
       inputs=_wide)  # fmt: skip
def loose_tolerance(x: Tensor) -> Tensor:
    """All values of a softmax of wide rows are small."""
    return torch.zeros_like(x)


@cheat("work", "METR, 2025-02-14", reference=_mean_of_softmax, inputs=_wide)
def constant_problem(x: Tensor) -> Tensor:
    """There is nothing to compute: the careful loop is fooled too."""
    return torch.full((len(x),), 1 / x.shape[1])


@cheat("work", "kernelbench.com, rewardhack_cases.md")
def lower_precision(x: Tensor, w: Tensor) -> Tensor:
    """Than the problem asks for."""
    return (x.bfloat16() @ w.bfloat16()).float()


def _masked(x: Tensor, w: Tensor, keep: Tensor) -> Tensor:
    return (x * keep) @ w


def _masks(tokens: int) -> Callable[[int], dict[str, Tensor]]:
    given = product(tokens)
    return lambda seed: given | {"keep": torch.rand(tokens, 256) > 0.5 * (seed > 0)}


@cheat("work", "kernelbench.com, hard/DEVLOG.md", reference=_masked, inputs=_masks)
def shaped_to_the_test(x: Tensor, w: Tensor, keep: Tensor) -> Tensor:
    """The test's mask masks nothing. Only inputs that are a function of a seed show it."""
    return x @ w


@cheat("work", "KernelGuard, rule SILENT_FALLBACK")
def silent_fallback(x: Tensor, w: Tensor) -> Tensor:
    """Is right, and is not its author's: a profiler shows whose kernels ran."""
    try:
        return torch.ops.mine.product(x, w)
    except AttributeError:
        return x @ w


# --- protocols ---------------------------------------------------------------------------------


@dataclass
class Loops:
    """Operands of a matrix product, and the two loops that factors come from."""

    operands: list[Tensor]
    repetitions: int

    def usual_ms(self, f: Function, *inputs: Tensor) -> float:
        """ms of a call, as a usual loop has it: the same tensors each time, the fastest of five."""
        given, loops = inputs or self.operands, []
        for _ in range(5):
            f(*given)
            loops.append(_ms(f, *given, calls=self.repetitions))
        return min(loops)

    def true(self, mine: Function, reference: Function) -> float:
        """How many times as fast as the reference a function is with new values in each call, each
        result read; not a number where one is wrong.
        """
        least = [math.inf, math.inf]
        for new in [self._new() for _ in range(2 * self.repetitions)]:
            (right, reference_ms), (y, mine_ms) = _read(reference, *new), _read(mine, *new)
            if not (y - right).norm() <= 1e-3 * right.norm():
                return math.nan
            least = [min(least[0], reference_ms), min(least[1], mine_ms)]
        return least[0] / least[1]

    def _new(self) -> list[Tensor]:
        return [
            (t * (0.5 + torch.rand(())) if t.is_floating_point() else t)
            .detach().requires_grad_(t.requires_grad) for t in self.operands
        ]  # fmt: skip


def _ms(f: Function, *inputs: Tensor, calls: int = 1) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        f(*inputs)
    return 1e3 * (time.perf_counter() - begin) / calls


def _read(f: Function, *inputs: Tensor) -> tuple[Tensor, float]:
    """The result and ms until it has been read, its threads waited for, by a clock of our own."""
    others, begin = {*threading.enumerate()}, CLOCK()
    y = f(*inputs)
    for other in {*threading.enumerate()} - others:
        other.join()
    float(y.sum())
    return y, 1e3 * (CLOCK() - begin)


@protocol("clock", "tritonbench, PR 411", "compare has two rounds of warm-up")
def rival_compiles(loops: Loops) -> tuple[float, float]:
    """Ten calls of each without warm-up: torch.compile traces in its first."""
    compiled = torch.compile(torch.matmul, backend="eager")
    traced, plain = (_ms(f, *loops.operands, calls=10) for f in (compiled, torch.matmul))
    return traced / plain, loops.true(torch.matmul, compiled)


@protocol("clock", "triton, PR 8384",
          "compare clears before its clock, and times a call of nothing")  # fmt: skip
def cleared_in_the_clock(loops: Loops) -> tuple[float, float]:
    """The clearing hides a difference: who computes twice looks less slow than it is."""
    buffer = torch.empty(2**26, dtype=torch.int8)

    def twice(x: Tensor, w: Tensor) -> Tensor:
        return 0.5 * (x @ w + x @ w)

    once, both = (
        loops.usual_ms(lambda *inputs, f=f: (buffer.zero_(), f(*inputs)))
        for f in (torch.matmul, twice)
    )
    return once / both, loops.true(twice, torch.matmul)


@protocol("clock", "triton, PR 10149",
          "not refused: the time is right, of a size that nobody runs")  # fmt: skip
def small_problem(loops: Loops) -> tuple[float, float]:
    """One row measures how many calls Python makes; the true factor is that of all rows."""

    def in_eight(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([x @ part for part in w.chunk(8, 1)], 1)

    x, w = loops.operands
    eight, one = (loops.usual_ms(f, x[:1], w) for f in (in_eight, torch.matmul))
    return eight / one, loops.true(torch.matmul, in_eight)


@protocol("comparison", "Hugging Face kernels, cli/benchmark.py", "compare times all in turns")
def reference_timed_once(loops: Loops) -> tuple[float, float]:
    """And before it is warm: of a shape that no call has had."""
    x, w = loops.operands
    cold = _ms(torch.matmul, torch.randn(len(x) + 1, 256), w)
    return cold / loops.usual_ms(torch.matmul), loops.true(torch.matmul, torch.matmul)


@protocol("comparison", "ml-engineering, benchmarks/README.md",
          "compare takes the median of pairs")  # fmt: skip
def best_of_many(loops: Loops) -> tuple[float, float]:
    """The fastest of fifty calls against the mean of fifty others."""
    mine, theirs = ([_ms(torch.matmul, *loops.operands) for _ in range(50)] for _ in range(2))
    return statistics.mean(theirs) / min(mine), loops.true(torch.matmul, torch.matmul)


@protocol("comparison", "CUDA-L1, arXiv 2507.14111v8", "compare gives one ratio a problem")
def mean_of_ratios(loops: Loops) -> tuple[float, float]:
    """Of two kernels each is faster than the other, here by invented times."""
    ratios = [10.0 / 1.0, 1.0 / 10.0]
    return statistics.mean(ratios), statistics.geometric_mean(ratios)


@protocol("comparison", "CUDA-L1, arXiv 2507.14111v8", UNSEEN)
def slow_baseline(loops: Loops) -> tuple[float, float]:
    """`compare` knows no rival but those that it is given."""

    def row_by_row(x: Tensor, w: Tensor) -> Tensor:
        return torch.stack([row @ w for row in x])

    printed = loops.usual_ms(row_by_row) / loops.usual_ms(torch.matmul)
    return printed, loops.true(torch.matmul, torch.matmul)


# --- what each prints --------------------------------------------------------------------------


def shown(one: Cheat, tokens: int, repetitions: int) -> tuple[float, float, str]:
    """What a usual loop prints of a cheat, what is true, and what refuses it."""
    forget()
    inputs = one.inputs(tokens)
    values = list((inputs(0) if callable(inputs) else inputs).values())
    tested = [t.clone() for t in one.tested(*values)]
    _in_memory = one.reference(*tested)  # alive, where a cheat may search for it
    one.reference(*tested)  # freed: where its result lay, the cheat's may find the answer
    close = torch.allclose(one.function(*tested), one.reference(*tested), rtol=1e-2, atol=1e-2)
    time.perf_counter = CLOCK
    [line] = compare(
        one.reference, {"it": one.function}, inputs, rounds=5, backward=one.backward
    ).lines  # fmt: skip
    mine, honest = (_gradients(f) if one.backward else f for f in (one.function, one.reference))
    same, new = (  # a cheat may destroy its own
        Loops([t.clone().requires_grad_(one.backward) for t in values], repetitions)
        for _ in range(2)
    )
    forget()
    honest_ms = same.usual_ms(honest)
    printed = honest_ms / same.usual_ms(mine)
    forget()
    true = new.true(mine, honest)
    forget()
    return printed, true, f"usual check {'passed' if close else 'failed'}; {line.reason or UNSEEN}"


def _gradients(f: Function) -> Function:
    """The function that gives all gradients of f in one tensor."""

    def flat(*inputs: Tensor) -> Tensor:
        grads = torch.autograd.grad(f(*inputs).sum(), inputs, materialize_grads=True)
        return torch.cat([grad.flatten() for grad in grads])

    return flat


def measured(tokens: int = 512, repetitions: int = 10) -> pd.DataFrame:
    """A row a way to be fooled, on this CPU: the factor that is printed, the true one (not a number
    where the result is wrong), and what refuses it.
    """
    torch.set_num_threads(1)
    rows = []
    for name, one in CHEATS.items():
        printed, true, caught = shown(one, tokens, repetitions)
        rows.append((one.group, name, "CPU", printed, true, caught, one.seen))
    loops = Loops([*product(tokens).values()], repetitions)
    for name, (function, says) in PROTOCOLS.items():
        rows.append((says["group"], name, "CPU", *function(loops), says["caught"], says["seen"]))
    return pd.DataFrame(rows, columns=list(table()))


def table() -> pd.DataFrame:
    """Every way to be fooled, as recorded: those that ran on a CPU, then GPUs' that others
    published. Without a true factor the result was wrong, or the publisher gives none.
    """
    return pd.read_csv(FILE)


if __name__ == "__main__":
    others = table().query("where != 'CPU'")
    pd.concat([measured(), others]).round({"printed": 3, "true": 3}).to_csv(FILE, index=False)
