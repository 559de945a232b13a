"""What notebook `01_fooled` measures with: a usual loop, a careful one, the list of its lies."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fusedlib import bench
from press import plots

Function = Callable[..., Any]
Named = Mapping[str, Tensor]
CLOCK = time.perf_counter  # one of the lies replaces it
LOOPS = 5
SEEN = {
    "thread": "SOL-ExecBench, check_thread_injection",
    "lazy tensor": "CUDA-L1, issue 12",
    "replaced timer": "gpu-mode/reference-kernels, issue 162",
    "rival compiles": "tritonbench, PR 411",
    "cleared in the clock": "triton, PR 8384",
    "small problem": "triton, PR 10149",
    "kept by address": "CUDA-L1, arXiv 2507.14111",
    "kept by version": "kernelbench.com, benchmarks/hard/DEVLOG.md",
    "kept by three values": "kernelbench.com, benchmarks/hard/DEVLOG.md",
    "right at first": "llm.c, PR 852",
    "left in memory": "Sakana AI, The AI CUDA Engineer",
    "inputs destroyed": "KernelBench, zero_out_kernel",
    "answer found": "ngc92/pygpubench, PR 7",
    "less work": "source 000, the fused kernel",
    "missing gradient": "source 000, backward",
    "identity": "kernelbench.com, v3/docs/rewardhack_cases.md",
    "loose tolerance": "Liger-Kernel, log in PR 1357",
    "constant problem": "METR, 2025-02-14",
    "lower precision": "kernelbench.com, rewardhack_cases.md",
    "shaped to the test": "kernelbench.com, hard/DEVLOG.md",
    "silent fallback": "KernelGuard, rule SILENT_FALLBACK",
    "reference timed once": "Hugging Face kernels, cli/benchmark.py",
    "best of many": "ml-engineering, benchmarks/README.md",
    "mean of ratios": "CUDA-L1, arXiv 2507.14111v8",
    "slow baseline": "CUDA-L1, arXiv 2507.14111v8",
}
"""Where each lie was seen in public."""
CAUGHT = {
    "rival compiles": "compare has two rounds of warm-up",
    "cleared in the clock": "compare clears before its clock, and times a call of nothing",
    "small problem": "not refused: the time is right, of a size that nobody runs",
    "reference timed once": "compare times all in turns",
    "best of many": "compare takes the median of pairs",
    "mean of ratios": "compare gives one ratio a problem",
    "slow baseline": "not refused",
}
"""What refuses a lie of a protocol, which `Lies.show` cannot run."""


def once_ms(f: Function, *inputs: Tensor) -> float:
    """ms of one call."""
    begin = time.perf_counter()
    f(*inputs)
    return 1e3 * (time.perf_counter() - begin)


def read_ms(f: Function, *inputs: Tensor) -> tuple[Tensor, float]:
    """The result and ms until it has been read, its threads waited for, by a clock of our own."""
    others, begin = {*threading.enumerate()}, CLOCK()
    y = f(*inputs)
    for thread in {*threading.enumerate()} - others:
        thread.join()
    float(y.sum())
    return y, 1e3 * (CLOCK() - begin)


def drawn_like(tensors: list[Tensor]) -> list[Tensor]:
    """New tensors with the values of these times a random number; what is no float as it is."""
    scaled = [t * (0.5 + torch.rand(())) if t.is_floating_point() else t for t in tensors]
    return [t.detach().requires_grad_(t.requires_grad) for t in scaled]


def gradients(f: Function) -> Function:
    """The function that gives all gradients of f in one tensor."""

    def flat(*inputs: Tensor) -> Tensor:
        grads = torch.autograd.grad(f(*inputs).sum(), inputs, materialize_grads=True)
        return torch.cat([grad.flatten() for grad in grads])

    return flat


class Lies:
    """The lies that were told on this machine: `rows` by name, `functions` of those that have one.

    Args:
        reference: what a cheat claims to compute.
        inputs: of it, by name.
        repetitions: calls of a loop.
    """

    def __init__(self, reference: Function, inputs: Named, repetitions: int) -> None:
        self.reference, self.inputs, self.repetitions = reference, inputs, repetitions
        self.rows: dict[str, dict[str, Any]] = {}
        self.functions: dict[str, tuple[Function, Function, list[Tensor]]] = {}

    def usual_ms(self, f: Function, *inputs: Tensor) -> float:
        """ms of a call, as a usual loop has it: the same tensors each time, the fastest of five."""
        loops = []
        for _ in range(LOOPS):
            f(*inputs)
            begin = time.perf_counter()
            for _ in range(self.repetitions):
                f(*inputs)
            loops.append(1e3 * (time.perf_counter() - begin) / self.repetitions)
        return min(loops)

    def true_factor(
        self, mine: Function, reference: Function, inputs: list[Tensor] | None = None
    ) -> float:
        """How many times as fast as the reference a function is with new values in each call, each
        result read; not a number where one is wrong.
        """
        least = [math.inf, math.inf]
        given = list(self.inputs.values()) if inputs is None else inputs
        for new in [drawn_like(given) for _ in range(2 * self.repetitions)]:
            (right, reference_ms), (y, mine_ms) = read_ms(reference, *new), read_ms(mine, *new)
            if not (y - right).norm() <= 1e-3 * right.norm():
                return math.nan
            least = [min(least[0], reference_ms), min(least[1], mine_ms)]
        return least[0] / least[1]

    def note(self, group: str, name: str, printed: float, true: float, caught: str = "") -> None:
        """Print one line of the list and keep it.

        Args:
            printed: the factor that a usual loop prints.
            true: that of the careful loop, not a number where the result is wrong.
            caught: what refuses it, by default what `CAUGHT` says.
        """
        caught, seen = caught or CAUGHT.get(name, "not refused"), SEEN.get(name, "nowhere yet")
        self.rows[name] = {
            "group": group, "lie": name, "where": "CPU", "printed": printed, "true": true,
            "caught": caught, "seen": seen,
        }  # fmt: skip
        right = "none: the result is wrong" if math.isnan(true) else f"{true:.2f}×"
        print(f"{name}: printed {printed:.3g}×, true {right}\n  {caught}\n  seen: {seen}")

    def show(
        self, group: str, name: str, cheat: Function, *,
        reference: Function | None = None, inputs: Named | Callable[[int], Named] | None = None,
        tested: tuple[Tensor, ...] | None = None, backward: bool = False,
    ) -> None:  # fmt: skip
        """Run the usual check, the usual loop, the careful one and `bench.compare` on a cheat.

        Args:
            reference: what it claims to compute, by default that of all.
            inputs: of it, by default those of all; or a function of a seed.
            tested: what the usual check takes, by default the inputs.
            backward: whether gradients are computed as well.
        """
        reference, given = reference or self.reference, inputs or self.inputs
        values = list((given(0) if callable(given) else given).values())
        kept = [t.clone() for t in tested or values]
        _in_memory = reference(*kept)  # alive, where a cheat may search for it
        reference(*kept)  # freed: where its result lay, the cheat's may find the answer
        close = torch.allclose(cheat(*kept), reference(*kept), rtol=1e-2, atol=1e-2)
        [line] = bench.compare(reference, {name: cheat}, given, rounds=5, backward=backward).lines
        mine, honest = (gradients(f) if backward else f for f in (cheat, reference))
        mine_in, new = ([t.clone().requires_grad_(backward) for t in values] for _ in range(2))
        self.functions[name] = mine, honest, new
        reference_ms = self.usual_ms(honest, *mine_in)
        printed = reference_ms / self.usual_ms(mine, *mine_in)
        true = self.true_factor(mine, honest, new)
        time.perf_counter = CLOCK
        check = f"usual check {'passed' if close else 'failed'}"
        self.note(group, name, printed, true, f"{check}; {line.reason or 'not refused'}")

    def call_by_call(self, name: str) -> pd.DataFrame:
        """ms of ten calls each, of a cheat with the same and with new values, and of the reference.

        Raises:
            ValueError: no function was shown under this name.
        """
        if name not in self.functions:
            raise ValueError(f"lie is {name!r}, not one of {', '.join(self.functions)}")
        mine, reference, inputs = self.functions[name]
        new = [drawn_like(inputs) for _ in range(10)]
        same = [inputs] * 10
        ways = {"same values": (mine, same), "new values": (mine, new), "honest": (reference, same)}
        rows = [{"call": call, "which": way, "ms": read_ms(f, *values)[1]}
                for way, (f, given) in ways.items()
                for call, values in enumerate(given, 1)]  # fmt: skip
        time.perf_counter = CLOCK
        return pd.DataFrame(rows)


def factors(rows: pd.DataFrame) -> plots.Picture:
    """The picture of printed and true factors, a line a lie."""
    long = rows.sort_values("printed").melt(["lie"], ["printed", "true"], "which", "factor")
    return plots.points(
        long, "factor", "lie", "which", spec="3×", logx=True, reference=1.0,
        xlabel="times as fast as the reference", height=0.8 + 0.18 * len(rows),
    )  # fmt: skip
