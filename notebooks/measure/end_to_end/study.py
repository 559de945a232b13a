"""Study 06: whole training steps, alone, interleaved, under load and under the profiler; and what
the columns mean."""

from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from measure import study
from measure.end_to_end import cases, races
from measure.end_to_end.measure import measure
from measure.racing import roofline, sustained
from measure.racing.cases import Case
from measure.study import Column, Experiment, Positive, Study
from models import flops
from models.transformer import SIZES, config

AUTOCAST = ["fp32", "bf16 autocast"]
DTYPES = ["float32", "bfloat16"]
Cases = list[dict[str, Any]]


class Sizes(study.Sizes):
    """Models, contexts and seconds of study 06."""

    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """cuda, mps, cpu, or auto for the best there is"""
    models: list[str] = ["nano", "micro"]
    """sizes of the Transformer, smallest first"""
    contexts: Annotated[list[int], Field(min_length=1)] = [16]
    """tokens a sequence; the first is the one looked at closely"""
    precisions: list[str] = ["fp32", "bf16 autocast"]
    """fp32, bf16 autocast (weights in fp32) and bf16 (weights too)"""
    whole: list[str] = []
    """sizes that are also compiled, at the first context"""
    chosen: list[str] = ["nano"]
    """sizes with other MLPs, and with sdpa in place of plain attention"""
    providers: list[str] = ["eager", "fused", "liger"]
    """MLPs by rival, `all` for every one"""
    split: list[str] = []
    """sizes with every fp32 projection by fusedlib.linear"""
    loaded: list[str] = []
    """sizes whose other MLPs also run sustained, with energy"""
    load_seconds: Annotated[float, Field(ge=0.01, le=60)] = 0.2
    """seconds of a sustained measurement, after heating"""
    profiled: list[str] = []
    """sizes also run under the profiler"""
    cpu: list[str] = []
    """sizes also run on the CPU at the first context"""
    mps: list[str] = ["small"]
    """sizes also run on Apple's GPU, where there is one"""
    seconds: Annotated[float, Field(ge=0)] = 0.05
    """a step alone is measured for so long at least"""
    gemm_size: Positive = 256
    """of the square product taken as ceiling"""

    @property
    def shared(self) -> dict[str, Any]:
        """What all cases share."""
        return cases.setting(self.device, seconds=self.seconds)

    @property
    def first(self) -> list[int]:
        """The context that is looked at closely."""
        return self.contexts[:1]

    @property
    def longest(self) -> list[int]:
        """The longest context."""
        return [max(self.contexts)]


def _alone(sizes: Sizes) -> Cases:
    shared, precisions = sizes.shared, sizes.precisions
    listed = cases.steps(shared, sizes.models, sizes.first, precisions, inference=True)
    listed += roofline.cases(
        sizes.where, DTYPES, gemm_size=sizes.gemm_size, copy_mib=64, repetitions=7
    )
    listed += cases.steps(shared, sizes.models, sizes.contexts[1:], precisions)
    listed += cases.steps(shared, sizes.chosen, sizes.longest, precisions, attention="sdpa")
    listed += cases.optimizers(shared, sizes.models)
    for device, models in (("mps", sizes.mps), ("cpu", sizes.cpu)):
        elsewhere = cases.setting(device, seconds=sizes.seconds)
        listed += cases.steps(elsewhere, models, sizes.first, ["fp32"])
    return listed


def _turns(sizes: Sizes) -> Cases:
    shared, first = sizes.shared, sizes.first
    halves = [name for name in ("bf16", "bf16 autocast") if name in sizes.precisions]
    return [
        *cases.races(shared, "mlp", sizes.chosen, first, ["fp32"], sizes.providers),
        *cases.races(shared, "mlp", sizes.chosen, sizes.longest, halves, sizes.providers),
        *cases.races(shared, "model", sizes.whole, first, AUTOCAST),
        *cases.races(shared, "model", sizes.split, first, ["fp32"], ["eager", "linear"]),
    ]


def _under_load(sizes: Sizes) -> list[Case]:
    shared, names = sizes.shared, sizes.providers
    listed = cases.races(shared, "mlp", sizes.loaded, sizes.first, ["fp32"], names)
    listed += cases.races(shared, "mlp", sizes.loaded, sizes.longest, ["bf16"], names)
    return [*sustained.loaded_cases(listed, seconds=sizes.load_seconds)]


def _products(sizes: Sizes) -> Cases:
    return sustained.products(
        sizes.where, DTYPES, size=sizes.gemm_size, seconds=sizes.load_seconds
    )  # fmt: skip


def _profiles(sizes: Sizes) -> Cases:
    return cases.steps(
        sizes.shared, sizes.profiled, sizes.first, AUTOCAST, experiment="profile"
    )  # fmt: skip


# --- what its columns mean -----------------------------------------------------------------------

BOTH = "both passes"
PARTS = {"forward": "forward", "backward": "backward", "both": BOTH, "optimizer": "optimizer",
         "step": "step"}  # fmt: skip
SHEETS = {
    "H200": {"fp32": 67e12, "bf16": 989.5e12},
    "H100": {"fp32": 67e12, "bf16": 989.5e12},
    "RTX PRO 6000": {"fp32": 125e12, "bf16": 500e12},
}
"""FLOP/s of dense products by the data sheet. For bf16 NVIDIA's sheets have it with sparsity: half
of it; of the RTX PRO 6000 an eighth of its 4000 TOPS in sparse fp4."""
TEXTS = ["model", "precision", "attention", "provider", "ceiling", "device", "device_type",
         "device_name", "dtype", "optimizer", "samples_ms", "session"]  # fmt: skip
FIGURES = ["context_length", "flops", "tokens", "flops_per_s", "bytes_per_s", "median_ms",
           "compile_s", "held_mib", "both_peak_mib", "transient_mib", "least_bytes", "joules",
           *(f"{name}_median_ms" for name in PARTS)]  # fmt: skip
COLUMNS = {
    "experiment": Column(
        "experiment",
        names={"step": "steps alone", "mlp": "steps with another MLP", "model": "whole models",
               "optimizer": "AdamW alone", "sustained": "steps under load",
               "profile": "steps under the profiler"},
    ),
    "model": Column("size", names={name: name for name in SIZES}),
    "context_length": Column("context", ",d", log=True),
    "precision": Column("precision", names={name: name for name in cases.WEIGHTS}),
    "attention": Column("attention", names={"plain": "plain attention", "sdpa": "SDPA"}),
    "optimizer": Column("AdamW", names={name: name for name in cases.OPTIMIZERS}),
    "mode": Column("mode", names={"eager": "eager", "compiled": "compiled"}),
    "host": Column("device", names={False: "on the device", True: "on the host's CPU"}),
    "part": Column("part", names={name: name for name in PARTS.values()}),
    "shape": Column("size·context"),
    "layer": Column("size·context precision"),
    "median_ms": Column("time", "3 ms"),
    "part_share": Column("share of the step", "2%"),
    "mfu": Column("share of the peak", "2%"),
    "cast_gain": Column("autocast, times as fast as fp32", "3×"),
    "step_median_ms": Column("step", "3 ms"),
    "kernels": Column("kernels", ",d"),
    "kernels_ms": Column("time of all kernels", "3 ms"),
    "casts": Column("casts", ",d"),
    "casts_ms": Column("time of casts", "3 ms"),
    "optimizer_median_ms": Column("time", "3 ms"),
    "compile_s": Column("compiling", "3 s"),
    "repaid": Column("repaid after, steps", ",d"),
    "held_gib": Column("over what was there before", "3 GiB"),
    "peak_gib": Column("peak", "3 GiB"),
    "gradients_error": Column("gradients' error", "2"),
    "token_mj": Column("energy of a token", "3 mJ"),
    "power_w": Column("power", "3 W"),
    "sm_mhz": Column("clock", "4 MHz"),
    "transient_gib": Column("temporary memory", "3 GiB"),
    "copy_ms": Column("at the rate of a small copy", "3 ms"),
}  # fmt: skip


def described(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    `provider` of a step alone is PyTorch, "eager". `mode` tells eager steps alone from compiled
    models; eager models that ran interleaved with compiled ones have none. `host` marks steps on
    the CPU of a GPU's host. `mfu` is the FLOPs of forward and backward a second over the peak: of
    the data sheet where it is known, else of a large product in the same recording. `cast_gain`:
    fp32's time over that of autocast, in the same recording. `repaid`: after how many steps the
    compiler's seconds are saved again. `copy_ms`: the time of AdamW's bytes at the rate of a copy
    of 64 MiB, in the same recording.
    """
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *TEXTS, *FIGURES])))
    rows = rows.assign(**rows[FIGURES].apply(pd.to_numeric, errors="coerce"))
    single = rows["experiment"].isin(["step", "profile"])
    compiled = (rows["experiment"] == "model") & (rows["provider"] == "inductor")
    sizes = zip(rows["model"], rows["context_length"], strict=True)
    rows = rows.assign(
        provider=rows["provider"].mask(single, "eager"),
        shape=[f"{model}·{context:.0f}" for model, context in sizes],
        mode=compiled.map({True: "compiled"}).mask(rows["experiment"] == "step", "eager"),
        host=rows["device"] != rows["device_type"],
    )
    rows["layer"] = rows["shape"] + " " + rows["precision"].astype(object)
    eager = rows[(rows["experiment"] == "model") & (rows["provider"] == "eager")]
    before = eager.drop_duplicates("session").set_index("session")["step_median_ms"]
    saved_ms = rows["session"].map(before) - rows["step_median_ms"]
    return rows.assign(
        mfu=_share_of_peak(rows), cast_gain=_cast_gain(rows),
        repaid=(1e3 * rows["compile_s"] / saved_ms).where(saved_ms > 0).where(compiled),
        held_gib=rows["held_mib"] / 1024, peak_gib=rows["both_peak_mib"] / 1024,
        transient_gib=rows["transient_mib"] / 1024,
        copy_ms=1e3 * rows["least_bytes"] / _copy_rate(rows),
        token_mj=1e3 * rows["joules"] / rows["tokens"],
    )  # fmt: skip


def _share_of_peak(rows: pd.DataFrame) -> pd.Series:
    """Of each row that has FLOPs of forward and backward, their rate over the peak."""
    kind = rows["precision"].map(lambda name: "fp32" if name == "fp32" else "bf16")
    sheet = [
        next((peaks[k] for name, peaks in SHEETS.items() if name in str(device)), None)
        for device, k in zip(rows["device_name"], kind, strict=True)
    ]
    at = rows[["machine", "recording"]].astype(str).assign(kind=kind)
    products = rows["ceiling"] == "gemm"
    here = rows["dtype"][products].map({"float32": "fp32", "bfloat16": "bf16"})
    rates = rows["flops_per_s"][products].groupby(
        [at["machine"][products], at["recording"][products], here.rename("kind")]
    )
    measured = at.join(rates.max().rename("rate"), on=list(at))["rate"]
    peak = pd.Series(sheet, rows.index, dtype=float).fillna(measured)
    return rows["flops"] / (rows["both_median_ms"] / 1e3) / peak.mask(rows["host"])


def _copy_rate(rows: pd.DataFrame) -> pd.Series:
    """Of each row the bytes a second of its recording's copy."""
    at = [rows[name].astype(str) for name in ("machine", "recording")]
    copied = rows["bytes_per_s"].where(rows["ceiling"] == "copy")
    return copied.groupby(at).transform("max")


def _cast_gain(rows: pd.DataFrame) -> pd.Series:
    """Of each row under autocast, fp32's time for forward and backward over its own."""
    keys = ["machine", "recording", "experiment", "provider", "model", "context_length",
            "attention", "host"]  # fmt: skip
    at = rows[[*keys, "precision", "both_median_ms"]].astype({"machine": str})
    at = at[rows["both_median_ms"].notna()]
    cast, fp32 = (at[at["precision"] == name] for name in ("bf16 autocast", "fp32"))
    before = fp32.groupby(keys)["both_median_ms"].median().rename("fp32_ms")
    return cast.join(before, on=keys)["fp32_ms"] / cast["both_median_ms"]


def by_part(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each step a row a part: `part`, its `median_ms` and `samples_ms`, and `part_share` of the
    step. Each part has sessions of its own; a row of something else has no part and stays."""
    rows = rows.copy()  # of many single columns pandas warns
    pieces = [rows[rows["step_median_ms"].isna() & rows["both_median_ms"].isna()].assign(part=None)]
    for column, name in PARTS.items():
        there = rows[rows[f"{column}_median_ms"].notna() & rows["both_median_ms"].notna()]
        ms = there[f"{column}_median_ms"]
        samples = there.get(f"{column}_samples_ms", pd.Series(index=there.index, dtype=object))
        pieces.append(there.assign(
            part=name, median_ms=ms, samples_ms=samples, part_share=ms / there["step_median_ms"],
            session=there["session"].map(lambda session, name=name: f"{session} {name}"),
        ))  # fmt: skip
    every = pd.concat(pieces)
    every.attrs = dict(rows.attrs)
    return every


def from_tables(tables: pd.DataFrame) -> pd.DataFrame:
    """The course report's means in the columns of the study's own rows; a precision that it does
    not state stands as fp32. Its tables that differ in warm-up alone are study 05's."""
    tables = tables[(tables["source"] == "001") & ~tables["table"].str.contains("arm.up")]
    names = {"float32": "fp32", "bfloat16 autocast": "bf16 autocast", "not stated": "fp32"}
    shapes = tables[["model", "context_length", "batch_size"]].itertuples(index=False)
    compiled = tables["compile"].fillna(False).astype(bool)
    both = tables["direction"] == "forward+backward"
    rows = tables.assign(
        experiment=compiled.map({True: "model", False: "step"}),
        provider=compiled.map({True: "inductor", False: "eager"}), attention="plain",
        precision=tables["precision"].replace(names), device_name=tables["device"],
        device=tables["backend"], device_type="cuda", both_median_ms=tables["mean_ms"].where(both),
        context_length=tables["context_length"].astype(float),
        flops=[flops.count(config(m, context_length=int(t), attention="plain"), int(b), int(t))
               for m, t, b in shapes],
    )  # fmt: skip
    return described(rows).assign(
        part=rows["direction"].replace("forward+backward", BOTH), median_ms=rows["mean_ms"],
        device=rows["backend"],
    )  # fmt: skip


STUDY = Study(
    "06_end_to_end", Sizes,
    [
        Experiment("steps alone", measure, _alone),
        Experiment("steps in turns", races.RACE, _turns),
        Experiment("steps under load", races.LOADED, _under_load),
        Experiment("products under load", sustained.product, _products),
        # The profiler comes last: what it leaves behind could slow a step.
        Experiment("profiles", measure, _profiles),
    ],
    COLUMNS, described,
)  # fmt: skip
