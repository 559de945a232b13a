"""Study 07: causal attention interleaved, the device's ceilings, and what the columns mean."""

from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from measure import study
from measure.attention import problem, races
from measure.attention.problem import AttentionProblem
from measure.racing import rivals, roofline
from measure.racing.settings import MIB
from measure.study import Column, Experiment, Positive, Size, Study

Cases = list[dict[str, Any]]


class Sizes(study.Sizes):
    """Contexts, widths and rivals of study 07."""

    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """cuda, mps, cpu, or auto for the best there is"""
    contexts: list[int] = [256, 512]
    """tokens a sequence"""
    widths: list[int] = [64, 16]
    """of the one head; the first with all implementations"""
    dtypes: list[str] = ["float32"]
    """dtypes of all tensors"""
    ways: list[str] = ["all"]
    """implementations that are measured; all: every one that need not compile"""
    compiled: list[str] = []
    """besides: "inductor float32 64", or at one context "flex float32 64 1024\""""
    published_contexts: list[int] = [16, 32]
    """of the published script's grid, fp32"""
    published_widths: list[int] = [256, 1024]
    """of that grid"""
    long_contexts: list[int] = []
    """beyond the course's, until plain attention does not fit"""
    batch_size: Positive = 8
    """sequences"""
    repetitions: Annotated[int, Field(ge=1, le=1000)] = 3
    """rounds that are measured"""
    gemm_size: Size = 256
    """rows and columns of the product that is the ceiling"""
    copy_mib: Size = 32
    """size of the copy that is the ceiling"""


def _ceilings(sizes: Sizes) -> Cases:
    return roofline.cases(
        sizes.where, sizes.dtypes, gemm_size=sizes.gemm_size, copy_mib=sizes.copy_mib,
        repetitions=sizes.repetitions,
    )  # fmt: skip


def _races(sizes: Sizes) -> Cases:
    shared: dict[str, Any] = {
        "batch_size": sizes.batch_size, "repetitions": sizes.repetitions, "device": sizes.where
    }  # fmt: skip
    asked = rivals.chosen(races.TASK, sizes.ways)
    few = [name for name in asked if name == races.BASELINE or races.is_fused(name)]
    script = [races.BASELINE, "inductor"] if sizes.compiled else [races.BASELINE]
    contexts, first, dtypes = sizes.contexts, sizes.widths[:1], sizes.dtypes
    more = {"more": sizes.compiled, **shared}
    return [
        *races.cases("course", contexts, first, dtypes, sizes.ways, **more),
        *races.cases("long", sizes.long_contexts, first, dtypes, few, **shared),
        *races.cases(
            "published", sizes.published_contexts, sizes.published_widths, ["float32"], script,
            **shared,
        ),
        *races.cases("course", contexts, sizes.widths[1:], dtypes[:1], few, **more),
        *races.cases("course", contexts[:1], sizes.widths[1:], dtypes[1:], few, **more),
    ]  # fmt: skip


# --- what its columns mean -----------------------------------------------------------------------

SHAPE = ["context_length", "head_dim", "batch_size"]
FIGURES = ["operands_mib", "kept_mib", "peak_mib", "flops_per_s", "bytes_per_s"]
COLUMNS = {
    "dtype": Column("dtype", names={"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}),
    "direction": Column(
        "direction",
        names={"forward": "forward", "backward": "backward", problem.BOTH: "forward and backward"},
    ),
    "grid": Column(
        "grid",
        names={"course": "course", "long": "longer contexts", "published": "published grid"},
    ),
    "context_length": Column("context T", ",d", log=True),
    "head_dim": Column("head width E", ",d", log=True),
    "median_ms": Column("time", "3 ms", log=True),
    "peak_mib": Column("peak besides Q, K, V and dO", "3 MiB", log=True),
    "kept_squares": Column("saved", "2"),
    "kept_counted": Column("saved, by hand", "2"),
    "peak_squares": Column("peak", "2"),
    "peak_counted": Column("peak, by hand", "2"),
    "whole_peak_mib": Column("peak with Q, K, V and dO, MiB", "4"),
    "products_ms": Column("products, at least", "2 ms"),
    "traffic_ms": Column("reads and writes, at least", "2 ms"),
    "bound_share": Column("least time, of the time", "2%"),
}  # fmt: skip


def described(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    `fused` tells whether an implementation keeps no T x T matrix. Saved for backward and the peak,
    in B x T x T matrices: `kept_squares` and `peak_squares`, by hand `kept_counted` and
    `peak_counted`, which no count has where torch chooses. `whole_peak_mib` is the peak with Q, K,
    V and dO. Of implementations whose work can be counted, at
    the ceilings of the same recording: `products_ms` and `traffic_ms`, the least that FLOPs and
    bytes take, and `bound_share`, the larger of the two over the time.
    """
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *SHAPE, *FIGURES])))
    rows = rows.assign(**rows[[*SHAPE, *FIGURES]].apply(pd.to_numeric, errors="coerce"))
    ran = rows["provider"].notna()
    counts = {at: _counts(row) for at, row in rows[ran].iterrows()}
    by_hand = pd.DataFrame.from_dict(counts, orient="index").reindex(rows.index)
    ceilings = rows[~ran].astype({"machine": str}).groupby(["machine", "recording"])
    copies = ceilings["bytes_per_s"].max().rename("copy")
    of_dtype = rows[~ran].astype({"machine": str}).groupby(["machine", "recording", "dtype"])
    rates = of_dtype["flops_per_s"].max().rename("rate")
    at = rows[["machine", "recording", "dtype"]].astype({"machine": str})
    at = at.join(copies, on=["machine", "recording"]).join(rates, on=list(at))
    products, traffic = 1e3 * by_hand["flops"] / at["rate"], 1e3 * by_hand["bytes"] / at["copy"]
    squares = by_hand["square"] / MIB
    return rows.assign(
        fused=by_hand["fused"],
        kept_squares=rows["kept_mib"] / squares, peak_squares=rows["peak_mib"] / squares,
        kept_counted=by_hand["kept"] / by_hand["square"],
        peak_counted=by_hand["peak"] / by_hand["square"],
        whole_peak_mib=rows["operands_mib"] + rows["peak_mib"],
        products_ms=products, traffic_ms=traffic,
        bound_share=products.combine(traffic, max) / rows["median_ms"].astype(float),
    )  # fmt: skip


def _counts(row: pd.Series) -> dict[str, Any]:
    """What is counted of a row, in bytes and FLOPs; nothing where torch chooses."""
    one, form = AttentionProblem.of(row), races.counted_form(row["provider"])
    counted: dict[str, Any] = {"square": one.square, "fused": races.is_fused(row["provider"])}
    if form:
        counted["kept"] = sum(problem.kept(form, one).values())
    if form in (races.BASELINE, races.FUSED):
        fused = form == races.FUSED
        counted["flops"] = problem.flops(one, row["direction"], fused=fused)
        counted["bytes"] = problem.traffic(one, row["direction"], fused=fused)
    if form == races.BASELINE:
        counted["peak"] = problem.plain_peak(one, row["device"])
    return counted


def from_tables(times: pd.DataFrame, memory: pd.DataFrame) -> pd.DataFrame:
    """Published means and memory in the columns of the study's own rows.

    Memory: "model+fwd+back mem" is read as the peak with Q, K, V and dO.
    """
    memory = memory[memory["quantity"] == "model+fwd+back mem"].assign(
        direction=problem.BOTH, whole_peak_mib=memory["value"]
    )
    rows = pd.concat([times, memory], ignore_index=True)
    return rows.assign(
        experiment=races.EXPERIMENT, grid="published", head_dim=rows["d_model"].astype(float),
        context_length=rows["context_length"].astype(float), median_ms=rows["mean_ms"],
        dtype="float32", provider=rows["compile"].map({False: races.BASELINE, True: "inductor"}),
        case=[f"published {n}" for n in range(len(rows))],
    )  # fmt: skip


STUDY = Study(
    "07_attention", Sizes,
    [
        Experiment("ceilings", roofline.measure, _ceilings),
        Experiment("attention", races.RACE, _races),
    ],
    COLUMNS, described,
)  # fmt: skip
