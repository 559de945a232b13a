"""Study 03: the SwiGLU MLP alone, in turns, under load and at lengths that change."""

from itertools import product
from statistics import median
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from measure import lengths, study, swiglu
from measure.racing import rivals, roofline, sustained
from measure.racing.cases import Case
from measure.study import Column, Experiment, Positive, Size, Study

TURNS, ENDS = ("python", "graph"), ("forward", "forward+backward")
Cases = list[dict[str, Any]]


class Sizes(study.Sizes):
    """Shapes, rivals and rounds of study 03."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cuda, cpu, or auto for the best there is"""
    rivals: list[str] = ["all"]
    """who is measured: names of measure.swiglu, or all"""
    models: list[str] = ["64·128·384"]
    """tokens·hidden·intermediate of real models, bf16"""
    tuned: list[str] = []
    """the same that our tiles were tuned on"""
    also: list[str] = []
    """who else runs at both lists of shapes"""
    searched: list[str] = []
    """those of both lists where `searchers` run too"""
    searchers: list[str] = ["quack-searched"]
    """who takes minutes a shape to search for its fastest kernels"""
    under_load: list[str] = ["all"]
    """who of them also runs sustained, at both lists of shapes"""
    load_seconds: Annotated[float, Field(ge=0.01, le=60)] = 1.0
    """seconds of a sustained measurement, after heating"""
    large_fp32: list[str] = []
    """shapes in fp32, at both settings of torch's products"""
    also_fp32: list[str] = []
    """who else runs at them"""
    sweep_tokens: Positive = 16
    """tokens of the sweep over widths"""
    sweep_widths: list[Positive] = [64, 256]
    """hidden = intermediate, fp32 and each of half_dtypes"""
    graph_width: Positive = 16_384
    """widest layer of the sweep that is also captured in a graph"""
    grid_tokens: list[Positive] = [32]
    """tokens of the grid"""
    grid_widths: list[Positive] = [64]
    """hidden = intermediate of the grid"""
    half_dtypes: list[Literal["bfloat16", "float16"]] = []
    """half-precision dtypes of sweep and grid"""
    changing: list[str] = ["eager", "fused"]
    """who meets new lengths; light: all that need no compiler"""
    lengths_bf16: Annotated[int, Field(ge=1, le=1000)] = 5
    """how many random lengths"""
    lengths_fp32: Annotated[int, Field(ge=1, le=1000)] = 3
    """the same in fp32"""
    longest: Size = 40
    """the longest one possible"""
    lengths_hidden: Size = 128
    """hidden size of the layer that meets them"""
    lengths_intermediate: Size = 384
    """its intermediate size"""
    repetitions: Annotated[int, Field(ge=2, le=1000)] = 5
    """rounds of each problem"""
    gemm_size: Size = 256
    """rows and columns of the product that is the ceiling"""
    copy_mib: Size = 32
    """size of the copy that is the ceiling"""


def ceilings(sizes: Sizes) -> Cases:
    """What the device reaches: a copy, and a product a format."""
    return roofline.cases(
        sizes.where, ["float32", "float32 high", "bfloat16"],
        gemm_size=sizes.gemm_size, copy_mib=sizes.copy_mib, repetitions=sizes.repetitions,
    )  # fmt: skip


def races(sizes: Sizes) -> Cases:
    """The layer alone: models' shapes, large ones in fp32, the published grid and sweep.

    Raises:
        ValueError: a shape of `searched` that is neither of `models` nor of `tuned`.
    """
    shared: dict[str, Any] = {"device": sizes.where, "repetitions": sizes.repetitions}
    halves: dict[str, Any] = {"dtype": "bfloat16", "directions": ENDS, **shared}
    known = [*sizes.models, *sizes.tuned]
    if unknown := [shape for shape in sizes.searched if shape not in known]:
        raise ValueError(
            f"searched has {unknown[0]}, which models and tuned have not: they have "
            f"{', '.join(known)}"
        )
    cases = []
    for group, shapes, launches in (
        ("models", sizes.models, TURNS[:1]), ("tuned", sizes.tuned, TURNS)
    ):  # fmt: skip
        grouped: dict[str, Any] = {"group": group, "launches": launches, **halves}
        cases += swiglu.cases(shapes, [*sizes.rivals, *sizes.also], **grouped)
        # Of one group with the others: all at a shape are timed in turns.
        here = [shape for shape in shapes if shape in sizes.searched]
        cases += swiglu.cases(here, sizes.searchers, **grouped)
    for precision in ("highest", "high"):
        cases += swiglu.cases(
            sizes.large_fp32, [*sizes.rivals, *sizes.also_fp32], dtype="float32",
            precision=precision, directions=ENDS, group="large fp32", **shared,
        )  # fmt: skip
    for dtype in ["float32", *sizes.half_dtypes]:
        grid = [(m, d, d) for m, d in product(sizes.grid_tokens, sizes.grid_widths)]
        cases += swiglu.cases(
            grid, sizes.rivals, dtype=dtype, group="grid", frozen=True, **shared
        )  # fmt: skip
        for width in sizes.sweep_widths:
            cases += swiglu.cases(
                [(sizes.sweep_tokens, width, width)], sizes.rivals, dtype=dtype, group="sweep",
                directions=ENDS, launches=TURNS if width <= sizes.graph_width else TURNS[:1],
                **shared,
            )  # fmt: skip
    return cases


def loads(sizes: Sizes) -> list[Case]:
    """Models' shapes under load."""
    alone: dict[str, Any] = {
        "directions": ENDS, "dtype": "bfloat16", "device": sizes.where, "repetitions": 1
    }  # fmt: skip
    return [
        case for group, shapes in (("models", sizes.models), ("tuned", sizes.tuned))
        for case in sustained.loaded_cases(
            swiglu.cases(shapes, sizes.under_load, group=group, **alone),
            seconds=sizes.load_seconds,
        )
    ]  # fmt: skip


def changing_lengths(sizes: Sizes) -> Cases:
    """Lengths that a rival meets for the first time."""
    layer = {
        "hidden_size": sizes.lengths_hidden, "intermediate_size": sizes.lengths_intermediate
    }  # fmt: skip
    return [
        case for dtype, count in (("bfloat16", sizes.lengths_bf16), ("float32", sizes.lengths_fp32))
        for case in lengths.cases(
            sizes.changing, lengths=count, most=sizes.longest, dtype=dtype, device=sizes.where,
            warmed=["fused"], **layer,
        )
    ]  # fmt: skip


SHAPE = ["tokens", "hidden_size", "intermediate_size"]
USED = ["flops", "launch", "warmed", "first_ms", "second_ms", "made"]
WARMED_UP = "fusedlib, warmed up"
MODELS = {
    "8192·3584·18944": "Qwen2.5-7B", "4096·5120·13824": "Llama-2-13B",
    "8192·3072·8192": "Llama-3.2-3B", "8192·2048·5632": "TinyLlama",
    "4096·4096·12288": "Qwen3-8B", "2048·7168·20480": "Yi-34B", "4096·5120·17920": "Phi-4",
    "16384·1536·8960": "Qwen2.5-1.5B", "8192·4096·14336": "Mistral-7B",
    "4096·4096·11008": "Llama-2-7B", "16384·2048·8192": "Llama-3.2-1B",
    "4096·8192·28672": "Llama-3-70B",
}  # fmt: skip
"""Whose MLP a shape is: tokens, hidden size and intermediate size, joined by dots."""
COLUMNS = {
    "dtype": Column("dtype", names={"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}),
    "direction": Column(
        "direction",
        names={"forward": "forward", "backward": "backward",
               "forward+backward": "forward and backward"},
    ),
    "weight_gradients": Column("weight gradients"),
    "launch": Column(
        "regime",
        names={"python": "interleaved", "sustained": "sustained", "graph": "in a CUDA graph"},
    ),
    "group": Column(
        "shapes",
        names={"models": "shapes of models", "tuned": "shapes tuned on",
               "large fp32": "large layers", "grid": "published grid",
               "sweep": "published sweep", "searched": "with a search"},
    ),
    "precision": Column(
        "torch's fp32 setting", names={"highest": 'torch set to "highest"', "high": '"high"'}
    ),
    "model": Column("model", names={name: name for name in MODELS.values()}),
    "shape": Column("tokens·hidden·intermediate"),
    "tokens": Column("tokens", ",d", log=True),
    "hidden_size": Column("hidden size", ",d", log=True),
    "y_error": Column("relative error of the output", "2"),
    "tflops": Column("TFLOP/s", "3"),
    "search_s": Column("search and compilation", "2 s"),
    "arm": Column("implementation"),
    "binaries": Column("kernels compiled", ",d"),
    "warm_s": Column("warm_up", "3 s"),
    "first_use_ms": Column("first call of all", "3 ms"),
    "compile_s": Column("all calls that compile, above their second", "3 s"),
    "new_length_ms": Column("another first call, above its second", "2 ms"),
}  # fmt: skip


def described(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    `shape` and `model` are the layer's; a loaded row's `launch` is "sustained". `tflops` are the
    products' 10¹² operations a second. Of changing lengths `arm` tells whether all was warmed up,
    and `new_length_ms` is the median over calls that compiled nothing: the first of a length less
    the second.
    """
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *SHAPE, *USED])))
    parts = [pd.to_numeric(rows[name], errors="coerce") for name in SHAPE]
    shapes = ["·".join(f"{n:.0f}" for n in sizes) for sizes in zip(*parts, strict=True)]
    lengths = rows[["first_ms", "second_ms", "made"]].itertuples(index=False, name=None)
    return rows.assign(
        shape=shapes, model=[MODELS.get(shape, shape) for shape in shapes],
        launch=rows["launch"].mask(rows["experiment"] == "sustained", "sustained"),
        tflops=rows["flops"].astype(float) / rows["median_ms"].astype(float) / 1e9,
        arm=rows["provider"].map(rivals.labels()).where(rows["warmed"].ne(True), WARMED_UP),
        new_length_ms=[_above_second(*each) for each in lengths],
    )  # fmt: skip


def _above_second(first: Any, second: Any, compiled: Any) -> float | None:
    """Median over lengths that compiled no kernel: the first call less the second, ms."""
    if not isinstance(first, list):
        return None
    calls = zip(first, second, compiled, strict=True)
    return median([a - b for a, b, kernels in calls if not kernels] or [float("nan")])


STUDY = Study(
    "03_kernels", Sizes,
    [
        Experiment("ceilings", roofline.measure, ceilings),
        Experiment("races", swiglu.RACE, races),
        Experiment("under load", sustained.loaded_race(swiglu.RACE), loads),
        Experiment("lengths", lengths.measure, changing_lengths),
    ],
    COLUMNS, described,
)  # fmt: skip
