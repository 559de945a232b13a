"""Which rows of study 08 a table, figure or sentence takes, and sums over their lists.

Every function takes the frame of `results.load("08_profile")`, or rows of it, and measures nothing.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from fusedlib.bench.profiles.measure import REST
from fusedlib.bench.profiles.work import INFERENCE, SECTIONS
from fusedlib.models.transformer import SIZES
from fusedlib.study.selection import leading, place, rows_of

STEP = "step"
WHAT = {
    INFERENCE: (INFERENCE,), "forward": ("forward",), "backward": ("backward",),
    "forward+backward": ("forward", "backward"), STEP: SECTIONS,
}  # fmt: skip
"""Sums of sections that tables and figures speak of."""

PUBLISHED_CONTEXT = 256
PRECISIONS = ("fp32", "bf16 autocast", "bf16")
_COLUMNS = (
    "machine", "profile", "device_type", "device_name", "own", "status", "reason", "experiment",
    "model", "context_length", "batch_size", "precision", "attention", "provider", "device",
    "step_median_ms", "profiled_ms", "ranged_ms", "on_device", "sections", "classes", "kernels",
    "parts", "kernels_ms", "busy_ms", "idle_ms", "late_ms", "gaps", "late_gaps", "lead_us",
    "gap_percentiles_us", "profiled_kernels", "control_samples_ms", "trace_mib", "trace_file",
    "trace_kept_mib", "trace_whole", "measured_at",
)  # fmt: skip


def profiles(frame: pd.DataFrame, status: str | None = "ok") -> pd.DataFrame:
    """Rows of the leading machine, by precision, size and context."""
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *_COLUMNS])))
    rows = leading(rows_of(frame, "profile", status))
    if rows.empty:
        return rows
    order = {name: at for at, name in enumerate([*PRECISIONS, *SIZES])}
    ranks = rows.assign(
        by_precision=rows["precision"].map(order), by_size=rows["model"].map(order),
        by_provider=rows["provider"].ne("eager"), by_attention=rows["attention"].ne("plain"),
    )  # fmt: skip
    keys = ["by_precision", "by_provider", "by_attention", "by_size", "context_length"]
    return ranks.sort_values(keys, kind="stable").drop(columns=[k for k in keys if k[:3] == "by_"])


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """The eager model with plain attention, as published."""
    return rows[(rows["provider"] == "eager") & (rows["attention"] == "plain")]


def context(rows: pd.DataFrame) -> int:
    """The context that tables of one context show: the published one, else the longest."""
    known = set(rows["context_length"])
    return PUBLISHED_CONTEXT if PUBLISHED_CONTEXT in known else int(max(known, default=0))


def at_context(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `plain` at that context."""
    rows = plain(profiles(frame))
    return rows[rows["context_length"] == context(rows)]


def largest(frame: pd.DataFrame, precision: str = "fp32") -> Any:
    """The row of the largest size in a precision at that context, None when there is none."""
    rows = at_context(frame)
    rows = rows[rows["precision"] == precision]
    return next(reversed(list(rows.itertuples())), None)


def where(rows: pd.DataFrame) -> str:
    """Where the rows were measured."""
    return place(rows.iloc[0]) if len(rows) else "no machine yet"


def unit(rows: pd.DataFrame) -> str:
    """What the rows count: kernels of a GPU or operators on a CPU."""
    return "operators" if len(rows) and not rows["on_device"].iloc[0] else "kernels"


def setting(rows: pd.DataFrame) -> str:
    """Context and batch of rows at one context, for captions."""
    if rows.empty:
        return "not measured yet"
    first = rows.iloc[0]
    return f"context {int(first['context_length'])}, batch {int(first['batch_size'])}"


def context_span(frame: pd.DataFrame) -> str:
    """Batch and what else holds for figures against the context, for captions."""
    rows = plain(profiles(frame))
    return f"batch {int(rows['batch_size'].iloc[0])}" if len(rows) else "not measured yet"


def named(row: Any) -> str:
    """A case in words, for captions."""
    others = [o for o in (row.attention, row.provider) if o not in ("plain", "eager")]
    text = f"size {row.model}, context {int(row.context_length)}, {row.precision}"
    return ", ".join([text, *others])


def summed(rows: Iterable[list[Any]], sections: Iterable[str]) -> list[list[Any]]:
    """The lines of a row's list that belong to these sections."""
    wanted = set(sections)
    return [line for line in rows if line[0] in wanted]


def time_ms(row: Any, what: str) -> float:
    """Time of the kernels of a sum of sections, a key of `WHAT`, in ms."""
    return float(sum(line[2] for line in summed(row.sections, WHAT[what])))


def calls(row: Any, what: str) -> int:
    """Kernels of a sum of sections."""
    return sum(line[1] for line in summed(row.sections, WHAT[what]))


def by_class(row: Any, what: str) -> dict[str, float]:
    """ms by class of a sum of sections, most first."""
    found: dict[str, float] = {}
    for _, kind, _, ms in summed(row.classes, WHAT[what]):
        found[kind] = found.get(kind, 0.0) + ms
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def by_kernel(row: Any, what: str) -> list[tuple[str, str, int, float]]:
    """Name, class, calls and ms of the kernels that a row names, most ms first."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for _, kind, name, count, ms in summed(row.kernels, WHAT[what]):
        if name != REST:
            seen = found.get((name, kind), (0, 0.0))
            found[name, kind] = (seen[0] + count, seen[1] + ms)
    ordered = sorted(found.items(), key=lambda entry: -entry[1][1])
    return [(*key, *figures) for key, figures in ordered]


def share(row: Any, what: str, kind: str) -> float:
    """Share of a class in the kernels' time of a sum of sections."""
    whole = time_ms(row, what)
    return by_class(row, what).get(kind, 0.0) / whole if whole else float("nan")


def part_ms(row: Any, section: str, *parts: str) -> float:
    """ms of parts of the model in a section, NaN where the row has no parts."""
    if not isinstance(row.parts, list):
        return float("nan")
    return float(sum(ms for s, part, _, ms in row.parts if s == section and part in parts))


def idle_share(row: Any) -> float:
    """Share of an unprofiled step in which the device had nothing to do.

    On a CPU: the share of a profiled step spent outside of operators, in Python.
    """
    if row.on_device:
        return max(1 - row.busy_ms / row.step_median_ms, 0.0)
    return max(1 - row.kernels_ms / row.profiled_ms, 0.0)


def control_ratio(row: Any) -> float:
    """A step after the profiler over one before it; NaN where none was timed after."""
    after = row.control_samples_ms
    known = isinstance(after, list) and after
    return float(np.median(after)) / row.step_median_ms if known else float("nan")


def missing(frame: pd.DataFrame) -> str | None:
    """Cases without figures and why, for a note below a table."""
    rows = profiles(frame, None)
    if rows.empty:
        return "No rows yet: `make study ONLY=08_profile` measures them."
    lacking = rows[rows["status"] != "ok"]
    if lacking.empty:
        return None
    told: dict[tuple[str, str], list[str]] = {}
    for row in lacking.itertuples():
        reason = str(row.reason).split(". ")[0] if isinstance(row.reason, str) else ""
        told.setdefault((str(row.status), "" if row.status == "oom" else reason), []).append(
            named(row)
        )
    said = [f"{s}{': ' + r if r else ''}: {'; '.join(who)}" for (s, r), who in told.items()]
    return f"Without figures: {'. '.join(said)}."
