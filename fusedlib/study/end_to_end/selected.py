"""Which rows of study 06 a table, figure or sentence takes, and what they are a share of.

Every function takes the frame of `results.load("06_end_to_end")` and measures nothing.
"""

from typing import Any

import pandas as pd

from fusedlib.bench.end_to_end.cases import MODES, PRECISIONS
from fusedlib.models.transformer import SIZES, TransformerConfig, config
from fusedlib.study.end_to_end import peaks
from fusedlib.study.kernels.rows import ceilings
from fusedlib.study.selection import leading, per_machine, place, rows_of

CONTEXT = 256
"""The context length of the published tables."""

DIRECTIONS = {"forward": "forward", "backward": "backward", "forward+backward": "both"}
FORMATS = {"fp32": "fp32", "bf16 autocast": "bf16", "bf16": "bf16"}
"""The format of a precision's products."""

_SECTIONS = ("forward", "backward", "both", "optimizer", "step", "inference")
_FIGURES = ("median_ms", "median_low_ms", "median_high_ms", "mean_ms", "std_ms", "n")
COLUMNS = (
    "machine", "profile", "device_type", "device_name", "own", "status", "reason", "device",
    "experiment", "model", "context_length", "precision", "mode", "attention", "mlp", "optimizer",
    "batch_size", "tokens", "tokens_per_s", "flops_per_s", "forward_flops", "backward_flops",
    "peak_mib", "both_peak_mib", "held_mib", "weights_mib", "gradients_mib", "state_mib",
    "transient_mib", "least_bytes",
    "compile_s", "compile_steps", "graphs", "recompiled", "kernels", "busy_ms", "operators",
    "casts", "casts_ms", "logits_error", "gradients_error",
    *(f"{part}_{figure}" for part in _SECTIONS for figure in _FIGURES),
    *(f"{p}_speedup{end}" for p in ("both", "step") for end in ("", "_low", "_high")),
)  # fmt: skip
_ORDERS = {
    "model": list(SIZES), "precision": list(PRECISIONS), "mode": list(MODES),
    "mlp": ["eager", "inductor", "liger", "fused"],
    "optimizer": ["for-loop", "foreach", "fused"], "device": ["cuda", "mps", "cpu"],
}  # fmt: skip
_SORTED = ["device", "model", "context_length", "precision", "mode", "attention", "mlp"]


def ordered(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with all columns there are, sizes and precisions in their order, and `place`."""
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *COLUMNS])))
    rows = rows.assign(place=[place(row) for _, row in rows.iterrows()])
    ranks = {
        name: rows[name].map({value: at for at, value in enumerate(values)})
        for name, values in _ORDERS.items()
    }
    keys = [*_SORTED, "optimizer"]
    by = pd.DataFrame({k: ranks.get(k, rows[k]) for k in keys}, index=rows.index)
    return rows.loc[by.sort_values(keys, kind="stable").index]


def experiment(frame: pd.DataFrame, name: str, status: str | None = "ok") -> pd.DataFrame:
    """Rows of one experiment of the leading machine, on its GPU where they were measured there."""
    rows = leading(rows_of(frame, name, None))
    rows = ordered(rows if status is None else rows[rows["status"] == status])
    best = rows[rows["device"] == rows["device_type"]]
    return best if len(best) else rows


def steps(frame: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Measured steps of the leading machine whose fields are as wanted; plain attention."""
    rows = experiment(frame, "step")
    for name, value in {"attention": "plain", **wanted}.items():
        rows = rows[rows[name] == value]
    return rows


def context(frame: pd.DataFrame) -> int:
    """The context length that is looked at: the published one where it was measured."""
    there = set(experiment(frame, "step", None)["context_length"].dropna().astype(int))
    return CONTEXT if CONTEXT in there or not there else min(there)


def everywhere(frame: pd.DataFrame, device: str, precision: str, mode: str) -> pd.DataFrame:
    """Steps of every machine on one kind of device, whatever their status, plain attention.

    At the published context where the machine has it, else at its smallest. Compiled: the whole
    model where it was measured, else block by block.
    """
    rows = ordered(per_machine(rows_of(frame, "step", None)))
    rows = rows[(rows["device"] == device) & (rows["precision"] == precision)]
    rows = rows[(rows["attention"] == "plain") & rows["mode"].ne("eager").eq(mode != "eager")]
    kept = []
    for _, part in rows.groupby("machine", sort=False):
        there = set(part["context_length"])
        part = part[part["context_length"] == (CONTEXT if CONTEXT in there else min(there))]
        measured = part["status"].eq("ok").sort_values(ascending=False, kind="stable").index
        kept.append(part.loc[measured].drop_duplicates("model"))
    return pd.concat(kept) if kept else rows


def shape(row: Any) -> TransformerConfig:
    """The model of a row."""
    return config(row.model, context_length=int(row.context_length), attention=row.attention)


def products(frame: pd.DataFrame) -> pd.DataFrame:
    """Rates of large products by `machine`, `place` and `format`, in FLOP/s (`flops_per_s`)."""
    needed = ("ceiling", "dtype", "size", "flops_per_s", "bytes_per_s")
    return ceilings(frame.reindex(columns=list(dict.fromkeys([*frame.columns, *needed]))))


def ceiling(frame: pd.DataFrame, row: Any) -> float | None:
    """The rate of a large product in the row's format, FLOP/s, as measured on its machine."""
    if row.device != row.device_type:
        return None
    found = products(frame)
    mine = found[(found["machine"] == row.machine) & (found["format"] == FORMATS[row.precision])]
    return None if mine.empty else float(mine["flops_per_s"].iloc[0])


def utilisation(row: Any) -> float | None:
    """MFU: model FLOPs of forward and backward a second, over the data sheet's peak; or None."""
    if row.device != row.device_type or pd.isna(row.flops_per_s):
        return None
    peak = peaks.peak(row.device_name, FORMATS[row.precision])
    return None if peak is None else row.flops_per_s / peak


def busy(row: Any) -> float | None:
    """Share of a step's time, without the profiler, in which a kernel runs; None on a CPU."""
    return None if pd.isna(row.busy_ms) else min(row.busy_ms / row.both_median_ms, 1.0)


def lacking(frame: pd.DataFrame, name: str) -> str | None:
    """Which cases of an experiment have no figures, and why; None where all have."""
    rows = rows_of(frame, name, None)
    if rows.empty:
        return "No rows yet: `make study ONLY=06_end_to_end` measures them."
    rows = ordered(leading(rows))
    told: dict[str, list[str]] = {}
    for row in rows[rows["status"] != "ok"].itertuples():
        parts = [row.model, row.context_length, row.precision, row.mode, row.mlp, row.optimizer]
        said = " ".join(f"{p:g}" if isinstance(p, float) else str(p) for p in parts if pd.notna(p))
        # Each exhaustion says other numbers of bytes.
        why = row.status if row.status == "oom" else f"{row.status} ({row.reason})"
        told.setdefault(why, []).append(f"{said} on {row.device}")
    if not told:
        return None
    return "No figures: " + "; ".join(f"{', '.join(w)}: {why}" for why, w in told.items()) + "."
