"""Study 05: the published kernel and its repairs race Liger and our kernels in turns.

The published kernel is wrong and may not be imported from here: `notebooks/flawed_swiglu.py`
registers it and its repairs as rivals of the task `TASK`. It is the subject, so it is timed all the
same, as `measure.recording.results.Recorder.append` has it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fusedlib import reference
from fusedlib.bench import check, race, rivals, roofline
from fusedlib.bench.attempt import Unavailable, free_memory
from fusedlib.bench.cases import Case, grid
from fusedlib.bench.operation import Truth, plain_results
from fusedlib.bench.race import Checked, Figures
from measure import study, swiglu
from measure.mlp_problem import SwiGLUProblem, draw
from measure.pass_memory import mib_of, peak_over_mib
from measure.study import Experiment, Positive, Study

TASK = "published swiglu"
BLOCK, TEST_BLOCK = 64, 16  # of the published kernel, and of its published test
SETTINGS = (("float32", "highest"), ("float32", "high"), ("bfloat16", "highest"))


def rival_of(name: str) -> rivals.Rival:
    """The published kernel or a repair of that name, else a rival of study 03."""
    return rivals.get(TASK if name in rivals.names(TASK) else swiglu.TASK, name)


def cases(
    sizes: Iterable[tuple[int, int]], directions: Sequence[str], rival_names: Sequence[str], *,
    device: str, repetitions: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every rival in every setting and launch that it takes, at square sizes (tokens, width)."""
    problems = [
        square(tokens, width, dtype, direction, precision).fields()
        for tokens, width in sizes for dtype, precision in SETTINGS for direction in directions
    ]  # fmt: skip
    shared = {"experiment": "time", "device": device, "repetitions": repetitions}
    every = grid(shared, problem=problems, launch=race.LAUNCHES, provider=rival_names)
    return [case for case in every if case["dtype"] in rival_of(case["provider"]).dtypes]


def single_cases(
    experiment: str, sizes: Iterable[tuple[int, int]], rival_names: Sequence[str], device: str
) -> list[dict[str, Any]]:
    """Every rival at every square size, of `errors` or `peak`; fp32, forward and backward."""
    problems = [square(tokens, width).fields() for tokens, width in sizes]
    shared = {"experiment": experiment, "launch": "python", "device": device}
    return grid(shared, problem=problems, provider=rival_names)


def square(
    tokens: int, width: int, dtype: str = "float32", direction: str = "forward+backward",
    precision: str = "highest",
) -> SwiGLUProblem:  # fmt: skip
    """A problem as published: hidden and intermediate size alike.

    Raises:
        ValueError: a width that is no multiple of the kernel's block.
    """
    if width < 1 or width % block_of(tokens):
        raise ValueError(f"width {width} is no multiple of the kernel's block, {block_of(tokens)}")
    return SwiGLUProblem(tokens, width, width, dtype, direction, precision=precision)


def block_of(tokens: int) -> int:
    """Rows, columns and K of the published kernel's tiles; its test's where tokens are few."""
    return BLOCK if tokens >= BLOCK else TEST_BLOCK


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here, before anything is drawn."""
    if case["launch"] != "python" and torch.device(case["device"]).type != "cuda":
        raise Unavailable("CUDA graphs need a CUDA GPU")
    rival_of(case["provider"]).check_available(case["device"], case["dtype"])


class Setup(swiglu.Setup):
    """Study 03's setup, on which the published kernel and its repairs run too."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        with roofline.precision_of("high"):
            plain = plain_results(self.inputs, reference.swiglu_mlp)
        rounded = check.errors(plain, self.drawn.true)
        # Triton cuts the low bits of a TF32 factor off where cuBLAS rounds: twice the error.
        self.cut = {n: check.Errors(2 * e.norm, 2 * e.worst) for n, e in rounded.items()}

    def check(self, case: Case) -> Checked:
        """Set a rival up and hold it to the truth; what is published or repaired may be wrong."""
        one = rival_of(case["provider"])
        return super().check(case) if one.task == swiglu.TASK else self.checked(one, self.inputs)

    def error_figures(
        self, one: rivals.Rival, results: Mapping[str, Tensor], required: list[str],
        truth: Truth | None = None,
    ) -> Figures:  # fmt: skip
        """Errors of what arrived and, of what is published or repaired, what is wrong."""
        if one.task == swiglu.TASK:
            return super().error_figures(one, results, required, truth)
        truth = truth or self.drawn
        tf32 = "tf32" in one.traits
        baseline = self.cut if tf32 else truth.baseline
        dtype = torch.float16 if tf32 else self.inputs.dy.dtype
        distances = check.errors(results, truth.true)
        wrong = check.misses(distances, baseline, dtype, required)
        figures = {f"{name}_error": e.norm for name, e in distances.items()}
        return figures | ({"wrong": "; ".join(wrong)} if wrong else {})


RACE = replace(swiglu.RACE, setup=Setup, available=available)


def errors(case: Case) -> Figures:
    """Errors of a rival's output and gradients, and `wrong` where it is."""
    available(case)
    with RACE.settings(case):
        return Setup(case).check(case).figures


def peak(case: Case) -> Figures:
    """Peak of a step in MiB, weights and x counted, beside the weights and gradients in it."""
    if torch.device(case["device"]).type != "cuda":
        raise Unavailable("peaks are read from CUDA's allocator: no CUDA GPU here")
    figures = errors(case)
    free_memory()
    inputs = draw(SwiGLUProblem.of(case), case["device"])
    work = rival_of(case["provider"]).build(inputs)

    def step() -> None:
        work.reset()
        with RACE.settings(case):
            work.forward().backward(inputs.dy)

    step()  # libraries take their workspace in the first
    work.reset()
    top_mib = peak_over_mib(step)
    weights = [leaf for name, leaf in work.leaves.items() if name != "x"]
    held_mib = mib_of(weights)
    return figures | {
        "peak_mib": held_mib + mib_of([inputs.x]) + top_mib, "weights_mib": held_mib,
        "gradients_mib": mib_of(w.grad for w in weights),
    }  # fmt: skip


# --- the study -----------------------------------------------------------------------------------


Width = Annotated[int, Field(ge=64)]


class Sizes(study.Sizes):
    """Tokens and widths of study 05."""

    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """cuda, mps, cpu, or auto for the best there is"""
    tokens: Positive = 64
    """rows of x in the published sweep"""
    widths: list[Width] = [512]
    """widths of the forward sweep, multiples of 64"""
    apart_tokens: list[Positive] = [64]
    """rows of x where all steps are taken, both directions"""
    apart_width: Width = 512
    """their width, a multiple of 64"""
    error_widths: list[Width] = [64, 128, 256, 512, 1024]
    """widths of the errors, multiples of 64"""
    memory_widths: list[Width] = [512]
    """widths of the memory sweep, multiples of 64"""
    repetitions: Annotated[int, Field(ge=2, le=1000)] = 15
    """rounds in which all sides are timed in turns"""


def _timed() -> list[str]:
    return [*rivals.chosen(swiglu.TASK, ["light"]), *rivals.names(TASK, "timed")]


def _error_cases(sizes: Sizes) -> list[dict[str, Any]]:
    one_block = [(TEST_BLOCK, width) for width in (16, 32, *sizes.error_widths)]
    one_block += [(BLOCK, width) for width in sizes.error_widths]
    return single_cases("errors", one_block, rivals.names(TASK, "emulated"), sizes.where)


def _peak_cases(sizes: Sizes) -> list[dict[str, Any]]:
    wide = [(sizes.tokens, width) for width in sizes.memory_widths]
    return single_cases("peak", wide, _timed(), sizes.where)


def _timed_cases(sizes: Sizes) -> list[dict[str, Any]]:
    shared: dict[str, Any] = {"device": sizes.where, "repetitions": sizes.repetitions}
    apart = [(rows, sizes.apart_width) for rows in sizes.apart_tokens]
    swept = [(sizes.tokens, width) for width in sizes.widths]
    return [
        *cases(apart, ["forward", "forward+backward"], _timed(), **shared),
        *cases(swept, ["forward"], _timed(), **shared),
    ]


STUDY = Study(
    "05_anatomy", Sizes,
    [
        Experiment("errors", errors, _error_cases),
        Experiment("peaks", peak, _peak_cases),
        Experiment("times", RACE, _timed_cases),
    ],
    registers="flawed_swiglu",
)  # fmt: skip
