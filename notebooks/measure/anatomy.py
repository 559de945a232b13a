"""Study 02: the published kernel and its repairs race Liger and our kernels in turns.

The published kernel is wrong and may not be imported from here: `notebooks/flawed_swiglu.py`
registers it and its repairs as rivals of the task `TASK`. It is the subject, so it is timed all the
same, as `measure.recording.results.Recorder.append` has it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from fusedlib import reference
from fusedlib.bench import check, turns
from fusedlib.bench.attempt import Unavailable, free_memory
from fusedlib.bench.problem import Truth, plain_results
from fusedlib.bench.turns import Checked, Figures
from fusedlib.bench.verdicts import CARDS
from measure import study
from measure.pass_memory import mib_of, peak_over_mib
from measure.racing import rivals, roofline
from measure.racing.cases import Case, grid
from measure.racing.race import Race
from measure.racing.rivals import Bound, Rival, Task, Workload
from measure.recording import results
from measure.study import Column, Experiment, Positive, Study
from study import mlp
from study.mlp import Inputs, SwiGLUProblem, draw

TASK = Task[[Inputs], Workload | Bound]("published swiglu")
BLOCK, TEST_BLOCK = 64, 16  # of the published kernel, and of its published test
SETTINGS = (("float32", "highest"), ("float32", "high"), ("bfloat16", "highest"))


def rival_of(name: str) -> Rival[[Inputs], Workload | Bound]:
    """The published kernel or a repair of that name, else a rival of study 03."""
    return rivals.get(TASK if name in rivals.names(TASK) else mlp.TASK, name)


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
    every = grid(shared, problem=problems, launch=turns.LAUNCHES, provider=rival_names)
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


class Setup(mlp.Setup):
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
        return super().check(case) if one.task == mlp.TASK else self.checked(one, self.inputs)

    def error_figures(
        self, name: str, results: Mapping[str, Tensor], required: list[str],
        truth: Truth | None = None,
    ) -> Figures:  # fmt: skip
        """Errors of what arrived and, of what is published or repaired, what is wrong."""
        one = rival_of(name)
        if one.task == mlp.TASK:
            return super().error_figures(name, results, required, truth)
        truth = truth or self.drawn
        tf32 = "tf32" in one.traits
        baseline = self.cut if tf32 else truth.baseline
        dtype = torch.float16 if tf32 else self.inputs.dy.dtype
        distances = check.errors(results, truth.true)
        wrong = check.misses(distances, baseline, dtype, required)
        figures = {f"{result}_error": e.norm for result, e in distances.items()}
        return figures | ({"wrong": "; ".join(wrong)} if wrong else {})


RACE = Race(
    setup=Setup, available=available, work=mlp.work, rival_fields=("weight_gradients",),
    fields=("tokens", "hidden_size", "intermediate_size", "dtype", "precision", "device"),
    settings=lambda case: roofline.precision_of(case["precision"]),
)  # fmt: skip


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
    work = rivals.workload(rival_of(case["provider"]), inputs)

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
    """Tokens and widths of study 02."""

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
    error_widths: list[Width] = [64, 128, 256]
    """widths of the errors, multiples of 64"""
    error_tokens: list[Annotated[int, Field(ge=16, le=256)]] = [16, 64]
    """rows of x where errors are taken, and rows, columns and K of the kernel's tiles there"""
    memory_widths: list[Width] = [512]
    """widths of the memory sweep, multiples of 64"""
    repetitions: Annotated[int, Field(ge=2, le=1000)] = 5
    """rounds in which all sides are timed in turns"""


def _timed() -> list[str]:
    return [*rivals.chosen(mlp.TASK, ["light"]), *rivals.names(TASK, "timed")]


def _error_cases(sizes: Sizes) -> list[dict[str, Any]]:
    """One block of tokens, at widths of one block, of two, and of more."""
    one_block = [
        (tokens, width) for tokens in sizes.error_tokens
        for width in dict.fromkeys([tokens, 2 * tokens, *sizes.error_widths]) if width >= tokens
    ]  # fmt: skip
    for tokens, width in one_block:
        if width % tokens:
            raise ValueError(f"error_widths: {width} is no multiple of {tokens}, in error_tokens")
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


STEPS = {  # what ran, and dtype, setting and launch of both sides; each + keeps the repairs above
    "kernel as published": ("published-kernel", "float32", "highest", "python"),
    "+ the sum over all of K": ("whole-sum", "float32", "highest", "python"),
    "+ gradients of all weights": ("all-gradients", "float32", "highest", "python"),
    "+ IEEE fp32, as Liger": ("ieee-products", "float32", "highest", "python"),
    "graphs: TF32 on both sides": ("all-gradients", "float32", "high", "graph"),
    "graphs: IEEE fp32 on both sides": ("ieee-products", "float32", "highest", "graph"),
    "graphs: fusedlib, fp32": ("fused", "float32", "highest", "graph"),
    "graphs: fusedlib, bf16": ("fused", "bfloat16", "highest", "graph"),
}  # fmt: skip
L4 = CARDS["L4"]
SHAPES = [f"{tokens}·{2**n}" for tokens in (64, 256, 1024) for n in range(9, 16)]
BLOCKS = [f"block of {size}" for size in (16, 32, 64, 128, 256)]
COLUMNS = {
    "experiment": Column("experiment", names={"errors": "by plain PyTorch", "peak": "of a step"}),
    "step": Column("step", names={step: step for step in STEPS}),
    "result": Column("result", names={"right": "right", "wrong": "wrong"}),
    "direction": Column(
        "direction", names={"forward": "forward", "forward+backward": "forward and backward"}
    ),
    "dtype": Column("dtype", names={"float32": "fp32", "bfloat16": "bf16"}),
    "precision": Column("torch's setting", names={"highest": '"highest"', "high": '"high"'}),
    "launch": Column("launch", names={"python": "from Python", "graph": "in a CUDA graph"}),
    "shape": Column("tokens·width", names={shape: shape for shape in SHAPES}),
    "tokens": Column("tokens", ",d", log=True),
    "series": Column("published", names={n: n for n in ("grid", "second version", "sweep")}),
    "hidden_size": Column("width", ",d", log=True),
    "num_layers": Column("layers", ",d", log=True),
    "block": Column("block", names={name: name for name in BLOCKS}),
    "y_error": Column("relative error of y", "2"),
    "d_x_error": Column("of dx", "2"),
    "d_w_gate_error": Column("of d gate", "2"),
    "d_w_up_error": Column("of d up", "2"),
    "d_w_down_error": Column("of d down", "2"),
    "peak_mib": Column("peak memory", "5 MiB"),
    "peak_ratio": Column("Liger's peak memory over this one's", "3×"),
    "bandwidth_share": Column("of the L4's bandwidth", "3%"),
    "fp32_share": Column("of the L4's fp32 rate", "3%"),
}  # fmt: skip
USED = [
    "median_ms", "samples_ms", "peak_mib", "peak_ratio", "num_layers", "path", "session",
    "series",
    *(f"{results.PROTOCOL}{name}" for name in ("median_ms", "samples_ms")),
]  # fmt: skip


def described(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    The time of a wrong kernel, taken by the published protocol, stands beside the others' here:
    `result` says which is wrong. `step` is a link of `STEPS`. `peak_ratio` is Liger's peak over
    that of a row. The shares are of an L4's rates, as if all of the forward pass were computed.
    """
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *USED])))
    for name in ("median_ms", "samples_ms"):
        rows[name] = rows[name].where(rows[name].notna(), rows[results.PROTOCOL + name])
    rows["precision"] = rows["precision"].fillna("highest")
    steps = {ran: step for step, ran in STEPS.items()}
    ran = zip(*(rows[n] for n in ("provider", "dtype", "precision", "launch")), strict=True)
    at = ["machine", "recording", "tokens", "hidden_size"]
    liger = rows[(rows["provider"] == "liger") & rows["peak_mib"].notna()].drop_duplicates(at)
    of_liger = rows[at].merge(liger[[*at, "peak_mib"]], how="left", on=at)["peak_mib"]
    tokens, width = (rows[name].astype(float) for name in at[2:])
    per_s = 1e3 / rows["median_ms"].where(rows["direction"] == "forward").astype(float)
    moved = 4 * (3 * width**2 + 2 * tokens * width)  # bytes: three weights and x in, y out
    ratio = of_liger.set_axis(rows.index) / rows["peak_mib"]
    return rows.assign(
        step=[steps.get(one) for one in ran],
        result=rows["status"].map({"ok": "right", "wrong": "wrong"}),
        shape=[f"{t:.0f}·{w:.0f}" if t == t and w == w else None
               for t, w in zip(tokens, width, strict=True)],
        block=tokens.map("block of {:.0f}".format),
        peak_ratio=rows["peak_ratio"].fillna(ratio), bandwidth_share=moved * per_s / L4.bytes_per_s,
        fp32_share=6 * tokens * width**2 * per_s / L4.flops_per_s["float32"],
    )  # fmt: skip


def from_tables(
    times: pd.DataFrame, factors: pd.DataFrame, peaks: pd.DataFrame
) -> pd.DataFrame:  # fmt: skip
    """The published grid, sweeps and peaks in the columns of the study's own rows.

    `series` is "grid" where absolute figures are "second version" where the kernel is
    its second version, and "sweep" where factors alone are published. `ratio` is how many times as
    fast as the implementation in `over`. What is published as "backward" took three times as long
    as the forward pass: it includes it.
    """
    second = times["weight_gradient"].fillna(False).astype(bool)
    times = times.assign(
        experiment="time", series=second.map({True: "second version", False: "grid"}),
        implementation=times["implementation"].mask(
            second & (times["implementation"] == "fused"), "second version"
        ),
    )  # fmt: skip
    at = ["table", "direction", "batch_size", "d_model"]
    liger = times[times["implementation"] == "liger"].set_index(at)["time_ms"]
    times = times.assign(
        ratio=times[at].merge(liger, on=at, how="left")["time_ms"] / times["time_ms"]
    )
    of_peaks = factors["quantity"] == "peak memory"
    forward = factors["quantity"] == "forward time"
    factors = factors.assign(
        implementation="fused", series="sweep",
        experiment=of_peaks.map({True: "peak", False: "time"}),
        direction=forward.map({True: "forward", False: "forward+backward"}),
        ratio=factors["liger_over_fused"].mask(of_peaks),
        peak_ratio=factors["liger_over_fused"].where(of_peaks),
    )  # fmt: skip
    stacked = peaks["num_layers"].notna()
    peaks = peaks.assign(
        direction="forward+backward", series="grid",
        experiment=stacked.map({True: "stack", False: "peak"}),
    )  # fmt: skip
    rows = pd.concat([times, factors, peaks], ignore_index=True).rename(
        columns={"batch_size": "tokens", "d_model": "hidden_size", "implementation": "provider",
                 "time_ms": "median_ms", "peak_mb": "peak_mib"}
    )  # fmt: skip
    right = rows["provider"] == "liger"
    return described(
        rows.assign(
            dtype="float32", precision="highest", launch="python", over="Liger",
            case=[f"published {n}" for n in range(len(rows))],
            provider=rows["provider"].replace("fused", "published-kernel"),
            direction=rows["direction"].replace("backward", "forward+backward"),
            status=right.map({True: "ok", False: "wrong"}),
        )
    )  # fmt: skip


STUDY = Study(
    "02_anatomy", Sizes,
    [
        Experiment("errors", errors, _error_cases),
        Experiment("peaks", peak, _peak_cases),
        Experiment("times", RACE, _timed_cases),
    ],
    COLUMNS, described, shown=("ok", "wrong"), registers="flawed_swiglu",
)  # fmt: skip
