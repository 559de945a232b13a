"""Which rows of study 09 a table, figure or sentence takes, and what it calls them.

Every function takes the frame of `results.load("09_model_memory")` and measures nothing.
"""

from typing import Any

import pandas as pd

from fusedlib.bench.model_memory.cases import counted
from fusedlib.bench.model_memory.program import MODES
from fusedlib.bench.model_memory.timeline import CATEGORIES
from fusedlib.models.activations import PRECISIONS
from fusedlib.study.display import MISSING, number, quantity
from fusedlib.study.selection import leading, place, rows_of

# What the categories are called where people read them.
TITLES = {
    "weights": "weights", "gradients": "gradients", "optimizer": "AdamW's moments",
    "activations": "kept activations", "casts": "cast weights", "other": "other",
    "temporaries": "temporaries",
}  # fmt: skip
SECTIONS = {
    "begin": "before the forward", "forward": "in the forward", "backward": "in the backward",
    "step": "in AdamW's update", "built": "while the model is built",
}  # fmt: skip
PLANS = ("none", "segments", "nested", "first")
_FIGURES = (
    "peak_mib", "requested_peak_mib", "reserved_peak_mib", "events_peak_mib", "peak_at",
    "moment_names", "moment_at", "live_at", "weights_bytes", "gradients_bytes", "state_bytes",
    "largest_count", "largest_bytes", "largest_category", "largest_where", "kept_sizes_bytes",
    "kept_sizes_count", "peak_in_forward_mib", "peak_in_backward_mib", "peak_in_step_mib",
    "plan", "blocks", "kept_mib", "peak_in", "median_ms", "median_low_ms", "median_high_ms",
    "ratio", "ratio_low", "ratio_high", "snapshot", "snapshot_mib", "mode", "model", "attention",
    "precision", "context_length", "batch_size", "device",
    *(f"{when}_{name}_mib" for when in ("live", "peak", "forward") for name in CATEGORIES),
)  # fmt: skip
GIB = 1024.0  # MiB
MIB = 2**20  # bytes


def passes(frame: pd.DataFrame, status: str | None = "ok") -> pd.DataFrame:
    """Watched passes of the leading machine, sorted by attention, context, precision and mode.

    `measured_mib` is the peak as CUDA's allocator counts it, elsewhere as its events sum up.
    """
    rows = _leading(frame, "pass", status)
    rows = rows.assign(
        measured_mib=rows["peak_mib"].where(rows["peak_mib"].notna(), rows["events_peak_mib"]),
        rank=[_rank(row) for row in rows.itertuples()],
    )
    return rows.sort_values("rank", kind="stable")


def checkpoints(frame: pd.DataFrame, status: str | None = "ok") -> pd.DataFrame:
    """Plans of checkpointing of the leading machine; `group` is their context and precision."""
    rows = _leading(frame, "checkpoint", status)
    found = [
        (int(c), str(p)) for c, p in zip(rows["context_length"], rows["precision"], strict=True)
    ]
    rank = [
        (c, PRECISIONS.index(p), PLANS.index(plan), blocks)
        for (c, p), plan, blocks in zip(found, rows["plan"], rows["blocks"], strict=True)
    ]
    return rows.assign(group=found, rank=rank).sort_values("rank", kind="stable")


def groups(frame: pd.DataFrame, *, fits: bool | None = None) -> list[tuple[int, str]]:
    """Contexts and precisions whose plans were run; with `fits` where no plan at all does (not)."""
    rows = checkpoints(frame, None)
    if fits is not None:
        whole = rows[(rows["plan"] == "none") & ((rows["status"] == "ok") == fits)]
        rows = rows[rows["group"].isin(list(whole["group"]))]
    return list(dict.fromkeys(rows["group"]))


def _leading(frame: pd.DataFrame, experiment: str, status: str | None) -> pd.DataFrame:
    wide = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *_FIGURES])))
    rows = leading(rows_of(wide, experiment, None))
    return rows if status is None else rows[rows["status"] == status]


def _rank(row: Any) -> tuple[Any, ...]:
    return (
        row.attention != "plain", int(row.context_length), PRECISIONS.index(row.precision),
        MODES.index(row.mode),
    )  # fmt: skip


def steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Full steps at the largest context with the published attention, a row a precision."""
    return largest(frame, "step")


def largest(frame: pd.DataFrame, mode: str) -> pd.DataFrame:
    """Passes of one mode at the largest context, plain attention where it was run."""
    rows = passes(frame)
    rows = rows[rows["mode"] == mode]
    rows = rows[rows["context_length"] == rows["context_length"].max()]
    plain = rows[rows["attention"] == "plain"]
    return plain if len(plain) else rows


def size(mib: float, digits: int = 3) -> str:
    """MiB with its unit, from two thousand on as GiB."""
    if pd.isna(mib):
        return MISSING
    return quantity(mib / GIB, "GiB", digits) if mib >= 2 * GIB else quantity(mib, "MiB", digits)


def unit(rows: pd.DataFrame) -> tuple[str, float]:
    """The unit of a table of these peaks, and its MiB: GiB where the largest has ten or more."""
    most = rows["measured_mib"].max() if len(rows) else float("nan")
    return ("GiB", GIB) if most >= 9.5 * GIB else ("MiB", 1.0)


def cell(mib: Any, scale: float, digits: int = 4) -> str:
    """A figure of a table in units of `scale` MiB; a dash for none."""
    return MISSING if mib is None or pd.isna(mib) else number(float(mib) / scale, digits)


def of(row: Any) -> str:
    """Model, context, batch, attention and precision of a row."""
    return (
        f"{row['model']} at context {int(row['context_length'])}, batch {int(row['batch_size'])}, "
        f"{row['attention']} attention, {row['precision']}"
    )


def work(rows: pd.DataFrame) -> str:
    """Model, batch and machine of rows, for captions."""
    if rows.empty:
        return "not measured yet"
    row = rows.iloc[0]
    return f"{row['model']}, batch {int(row['batch_size'])}, on {place(row)}"


def section(row: Any) -> str:
    """The part of the pass in which a row's peak lies."""
    for name, at in zip(row["moment_names"], row["moment_at"], strict=True):
        if at > row["peak_at"]:
            return SECTIONS[name.partition(" ")[0]]
    return "at the end"


def counted_mib(row: Any) -> dict[str, float]:
    """What the formulas say of a row's pass, MiB by category."""
    return {name: n / MIB for name, n in counted(dict(row)).items()}


def lacking(rows: pd.DataFrame) -> str | None:
    """Which of these passes or plans have no figures, and why; None where all have."""
    if rows.empty:
        return "No rows yet: `make study ONLY=09_model_memory` measures them."
    rows = rows[rows["status"] != "ok"]
    told: dict[str, list[str]] = {}
    for _, row in rows.iterrows():
        # A library's message goes on with figures of that very moment.
        reason = str(row["reason"]).split(". ")[0].splitlines()[0]
        what = row["mode"]
        if not isinstance(what, str):
            what = "no checkpoint" if not row["blocks"] else f"{row['plan']} of {row['blocks']:g}"
        told.setdefault(f"{row['status']}: {reason}", []).append(
            f"{what} at {int(row['context_length'])}, {row['attention']}, {row['precision']}"
        )
    return (
        "; ".join(f"{', '.join(who)}: {why}" for why, who in told.items()) + "." if told else None
    )
