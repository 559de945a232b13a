"""A published kernel that skips most of its work, and its repairs, beside Liger and our kernels.

The published kernel is wrong and is the subject, so it is timed all the same: its row is "wrong",
and its times are named `published_protocol_*`. It lies in `notebooks/flawed_swiglu.py`, where
`fusedlib` cannot import it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from flawed_swiglu import TASK, block_of
from fusedlib import reference
from fusedlib.bench import check
from fusedlib.bench.attempt import Unavailable, free_memory
from fusedlib.bench.problem import Truth, plain_results
from fusedlib.bench.turns import LAUNCHES, Checked, Figures
from study import allocator, mlp, rivals, roofline
from study.allocator import mib_of
from study.cases import Case, Row, device_of, grid
from study.mlp import Inputs, SwiGLUProblem, draw
from study.race import each, timed
from study.rivals import Bound, Rival, Workload
from study.run import sized

QUICK: dict[str, Any] = {
    "device": "auto",  # cuda, cpu, or auto for the best there is
    "tokens": 64,  # rows of x in the published sweep
    "widths": [512],  # of the forward sweep, multiples of 64: hidden = intermediate, as everywhere
    "apart_tokens": [64],  # rows of x where all steps are taken, both directions
    "apart_width": 512,  # their width, a multiple of 64
    "error_widths": [128],  # of the errors, beside which the kernel's tiles have 64 rows
    "memory_widths": [512],  # of the memory sweep
    "repetitions": 5,  # rounds of each race
}
WIDE = [512, 1024, 2048, 4096, 8192, 16384]
FULL = QUICK | {
    "widths": WIDE, "apart_tokens": [64, 1024], "apart_width": 4096, "memory_widths": WIDE,
    "error_widths": [4096], "repetitions": 15,
}  # fmt: skip
PROFILES = {"quick": QUICK, "full": FULL}
SETTINGS = (("float32", "highest"), ("float32", "high"), ("bfloat16", "highest"))


def cases(profile: str = "quick", **sizes: Any) -> list[dict[str, Any]]:
    """What is measured: errors of the published arithmetic in plain PyTorch, peaks, and races."""
    s = sized(PROFILES, profile, sizes)
    device = device_of(s.device)  # who is timed compiles nothing
    names = [*rivals.chosen(mlp.TASK, ["light"]), *rivals.names(TASK, "timed")]
    judged, held, swept = (
        [(s.tokens, width) for width in widths]
        for widths in (s.error_widths, s.memory_widths, s.widths)
    )
    apart = [(rows, s.apart_width) for rows in s.apart_tokens]
    rounds: dict[str, Any] = {"device": device, "repetitions": s.repetitions}
    return [
        *alone("errors", judged, rivals.names(TASK, "emulated"), device),
        *alone("peak", held, names, device),
        *races(apart, ["forward", "forward+backward"], names, **rounds),
        *races(swept, ["forward"], names, **rounds),
    ]


def races(
    sizes: Iterable[tuple[int, int]], directions: Sequence[str], names: Sequence[str], *,
    device: str, repetitions: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every rival in every setting and launch that it takes, at square sizes (tokens, width)."""
    problems = [
        square(tokens, width, dtype, direction, precision).fields()
        for tokens, width in sizes for dtype, precision in SETTINGS for direction in directions
    ]  # fmt: skip
    shared = {"experiment": "time", "device": device, "repetitions": repetitions}
    every = grid(shared, problem=problems, launch=LAUNCHES, provider=names)
    return [case for case in every if case["dtype"] in rival_of(case["provider"]).dtypes]


def alone(
    experiment: str, sizes: Iterable[tuple[int, int]], names: Sequence[str], device: str
) -> list[dict[str, Any]]:
    """Every rival at every square size, of `errors` or `peak`; fp32, forward and backward."""
    problems = [square(tokens, width).fields() for tokens, width in sizes]
    shared = {"experiment": experiment, "launch": "python", "device": device}
    return grid(shared, problem=problems, provider=names)


def square(
    tokens: int, width: int, dtype: str = "float32", direction: str = "forward+backward",
    precision: str = "highest",
) -> SwiGLUProblem:  # fmt: skip
    """A problem as published: hidden and intermediate size alike."""
    if width % block_of(tokens):
        raise ValueError(f"width {width} is no multiple of the kernel's block, {block_of(tokens)}")
    return SwiGLUProblem(tokens, width, width, dtype, direction, precision=precision)


def rival_of(name: str) -> Rival[[Inputs], Workload | Bound]:
    """The published kernel or a repair of that name, else a rival of the MLP."""
    return rivals.get(TASK if name in rivals.names(TASK) else mlp.TASK, name)


def measure(race: list[Case]) -> list[Row]:
    """A row a case: times in turns, errors, or the peak of a step."""
    if race[0]["experiment"] != "time":
        return each(race, errors if race[0]["experiment"] == "errors" else peak)
    return timed(
        race, Setup, rounds=int(race[0]["repetitions"]), available=available, work=mlp.work,
        same=("tokens", "hidden_size", "intermediate_size", "dtype", "precision", "device"),
        settings=lambda case: roofline.precision_of(case["precision"]),
    )  # fmt: skip


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here, before anything is drawn."""
    if torch.device(case["device"]).type != "cuda":
        if case["experiment"] == "peak":
            raise Unavailable("peaks are read from CUDA's allocator: no CUDA GPU here")
        if case["launch"] != "python":
            raise Unavailable("CUDA graphs need a CUDA GPU")
    rival_of(case["provider"]).check_available(case["device"], case["dtype"])


class Setup(mlp.Setup):
    """The MLP's setup, on which the published kernel and its repairs run too."""

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


def errors(case: Case) -> Figures:
    """Errors of a rival's output and gradients, and `wrong` where it is."""
    available(case)
    with roofline.precision_of(case["precision"]):
        return Setup(case).check(case).figures


def peak(case: Case) -> Figures:
    """Peak of a step in MiB, weights and x counted, beside the weights and gradients in it."""
    figures = errors(case)
    free_memory()
    inputs = draw(SwiGLUProblem.of(case), case["device"])
    work = rivals.workload(rival_of(case["provider"]), inputs)

    def step() -> None:
        work.reset()
        with roofline.precision_of(case["precision"]):
            work.forward().backward(inputs.dy)

    step()  # libraries take their workspace in the first
    work.reset()
    top_mib = allocator.peak(step, "cuda") or 0.0
    weights = [leaf for name, leaf in work.leaves.items() if name != "x"]
    held_mib = mib_of(weights)
    return figures | {
        "peak_mib": held_mib + mib_of([inputs.x]) + top_mib, "weights_mib": held_mib,
        "gradients_mib": mib_of(w.grad for w in weights),
    }  # fmt: skip


STEPS = {  # what ran, and torch's setting on both sides, in fp32; each + keeps the repairs above
    "kernel as published": ("published-kernel", "highest"),
    "+ the sum over all of K": ("whole-sum", "highest"),
    "+ gradients of all weights": ("all-gradients", "highest"),
    "+ TF32 on both sides": ("all-gradients", "high"),
    "IEEE fp32 on both sides": ("ieee-products", "highest"),
}
PROTOCOL = "published_protocol_"
USED = [
    "median_ms", "samples_ms", "peak_mib", "peak_ratio", "path", "series",
    f"{PROTOCOL}median_ms", f"{PROTOCOL}samples_ms",
]  # fmt: skip


def derive(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with `result`, right or wrong, `repair`, a link of `STEPS`, and `peak_ratio`, Liger's
    peak over that of a row. The time of a wrong kernel stands beside the others'.
    """
    at = ["machine", "set", "tokens", "hidden_size"]
    known = [*at, *USED, "status", "provider", "dtype", "precision", "launch", "direction"]
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *known])))
    for name in ("median_ms", "samples_ms"):
        rows[name] = rows[name].where(rows[name].notna(), rows[PROTOCOL + name])
    rows["precision"] = rows["precision"].fillna("highest")
    steps = {ran: step for step, ran in STEPS.items()}
    ran = zip(rows["provider"], rows["precision"], rows["dtype"], strict=True)
    liger = rows[(rows["provider"] == "liger") & rows["peak_mib"].notna()].drop_duplicates(at)
    of_liger = rows[at].merge(liger[[*at, "peak_mib"]], how="left", on=at)["peak_mib"]
    tokens, width = (rows[name].astype(float) for name in at[2:])
    ratio = of_liger.set_axis(rows.index) / rows["peak_mib"]
    return rows.assign(
        repair=[steps.get((who, at)) if dtype == "float32" else None for who, at, dtype in ran],
        result=rows["status"].map({"ok": "right", "wrong": "wrong"}),
        shape=[f"{t:.0f}·{w:.0f}" if t == t and w == w else None
               for t, w in zip(tokens, width, strict=True)],
        peak_ratio=rows["peak_ratio"].fillna(ratio),
    )  # fmt: skip


def from_tables(
    times: pd.DataFrame, factors: pd.DataFrame, peaks: pd.DataFrame
) -> pd.DataFrame:  # fmt: skip
    """The published grid, sweeps and peaks in the columns of the topic's own rows.

    `series` is "grid" where absolute figures are, "second version" where the kernel is its second
    version, and "sweep" where factors alone are published. What is published as "backward" took
    three times as long as the forward pass: it includes it.
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
    factors = factors.assign(
        implementation="fused", series="sweep",
        experiment=of_peaks.map({True: "peak", False: "time"}),
        direction=factors["quantity"].eq("forward time").map(
            {True: "forward", False: "forward+backward"}
        ),
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
    return derive(
        rows.assign(
            machine="published", set="published", profile="published", apart=False,
            race=[f"published {n}" for n in range(len(rows))],
            dtype="float32", precision="highest", launch="python",
            provider=rows["provider"].replace("fused", "published-kernel"),
            direction=rows["direction"].replace("backward", "forward+backward"),
            status=right.map({True: "ok", False: "wrong"}),
        )
    )  # fmt: skip
