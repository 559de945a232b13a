"""Study 08's tables. Every function takes the frame of `results.load("08_profile")`."""

from typing import Any

import pandas as pd

from fusedlib import paths
from fusedlib.bench.profiles import classes
from fusedlib.bench.profiles.idle import PERCENTILES
from fusedlib.models.transformer import config
from fusedlib.study.display import number
from fusedlib.study.profiles import counted
from fusedlib.study.profiles.selected import (
    STEP,
    WHAT,
    at_context,
    by_class,
    by_kernel,
    calls,
    context,
    control_ratio,
    idle_share,
    largest,
    part_ms,
    plain,
    profiles,
    share,
    summed,
    time_ms,
    unit,
)

TOP = 8
"""Kernels that a table names."""

AROUND = ("block/attention/scale", "block/attention/mask")
PRODUCTS = ("block/attention/scores", "block/attention/values")
SOFTMAX = "block/attention/softmax"


def empty(*columns: str) -> pd.DataFrame:
    """A table without rows."""
    return pd.DataFrame(columns=list(columns))


def by_classes(frame: pd.DataFrame) -> pd.DataFrame:
    """Time by class of kernel in each section, of one case: ms and share."""
    row = largest(frame)
    if row is None:
        return empty("class", "ms")
    columns: dict[tuple[str, str], dict[str, str]] = {}
    present: list[str] = []
    for what in WHAT:
        found, whole = by_class(row, what), time_ms(row, what)
        columns[what, "ms"] = {kind: number(ms, 3) for kind, ms in found.items()}
        columns[what, "%"] = {kind: f"{100 * ms / whole:.1f}" for kind, ms in found.items()}
        present += [kind for kind in found if kind not in present]
    order = [kind for kind in classes.CLASSES if kind in present]
    table = pd.DataFrame(columns).reindex(order).rename_axis("class")
    table.loc["all"] = [
        number(time_ms(row, what), 3) if shown == "ms" else "100" for what, shown in columns
    ]
    return table


def top(frame: pd.DataFrame, what: str, precision: str = "fp32") -> pd.DataFrame:
    """The kernels of one case that take most time in a sum of sections, and the rest."""
    row = largest(frame, precision)
    if row is None:
        return empty("kernel", "class", "calls", "ms", "%")
    named = by_kernel(row, what)[:TOP]
    whole = time_ms(row, what)
    lines = [_kernel(*kernel, whole) for kernel in named]
    if rest := calls(row, what) - sum(count for _, _, count, _ in named):
        left = whole - sum(ms for *_, ms in named)
        lines.append(_kernel(f"{rest:,} others", "", rest, left, whole))
    return pd.DataFrame(lines)


def _kernel(name: str, kind: str, count: int, ms: float, whole: float) -> dict[str, str]:
    return {
        "kernel": name, "class": kind, "calls": f"{count:,}", "ms": number(ms, 3),
        "%": f"{100 * ms / whole:.1f}",
    }  # fmt: skip


def gemm_shares(frame: pd.DataFrame) -> pd.DataFrame:
    """Share of matrix products in the kernels' time, by size and sum of sections."""
    rows = at_context(frame)
    lines = [
        {
            **{(what, "GEMM, %"): _points(share(row, what, classes.GEMM)) for what in WHAT},
            (STEP, "calls"): f"{calls(row, STEP):,}",
            (STEP, "ms"): number(time_ms(row, STEP), 3),
        }
        for row in rows.itertuples()
    ]  # fmt: skip
    if not lines:
        return empty("GEMM, %")
    table = pd.DataFrame(lines, index=_index(rows, "precision", "model"))
    table.columns = pd.MultiIndex.from_tuples(table.columns)
    return table


def _points(value: float) -> str | None:
    return None if pd.isna(value) else f"{100 * value:.1f}"


def _index(rows: pd.DataFrame, *names: str) -> pd.MultiIndex:
    titles = [n.replace("model", "size").replace("context_length", "context") for n in names]
    return pd.MultiIndex.from_frame(rows[list(names)].astype(str), names=titles)


def parts(frame: pd.DataFrame) -> pd.DataFrame:
    """Time of one case by part of the model, the blocks added up."""
    row = largest(frame)
    if row is None or not isinstance(row.parts, list):
        return empty("part", "forward, ms", "backward, ms")
    names = list(dict.fromkeys(part for section, part, *_ in row.parts if section != "optimizer"))
    whole = sum(ms for section, _, _, ms in row.parts)
    times = {n: [part_ms(row, s, n) for s in ("forward", "backward")] for n in names}
    names.sort(key=lambda n: -sum(times[n]))
    lines = [
        {
            "forward, ms": number(times[n][0], 3), "backward, ms": number(times[n][1], 3),
            "backward / forward": number(times[n][1] / times[n][0], 2) if times[n][0] else None,
            "of the step, %": f"{100 * sum(times[n]) / whole:.1f}",
        }
        for n in names
    ]  # fmt: skip
    lines.append(
        {
            "forward, ms": None, "backward, ms": None, "backward / forward": None,
            "of the step, %": f"{100 * part_ms(row, 'optimizer', 'no part') / whole:.1f}",
        }
    )  # fmt: skip
    return pd.DataFrame(lines, index=pd.Index([*names, "optimizer"], name="part of the model"))


def attention_ratio(row: Any, section: str = "forward") -> float:
    """The softmax's time over that of both products; NaN where either is not known."""
    products = part_ms(row, section, *PRODUCTS)
    return part_ms(row, section, SOFTMAX) / products if products else float("nan")


def attention(frame: pd.DataFrame) -> pd.DataFrame:
    """Softmax against products in plain attention: times, FLOPs, bytes; two sizes' of many."""
    rows = plain(profiles(frame))
    rows = rows[rows["parts"].notna()]
    sizes = list(dict.fromkeys(rows["model"]))
    rows = rows[rows["model"].isin([*sizes[:1], *sizes[-1:]])]
    lines = []
    for row in rows.itertuples():
        head_dim = config(row.model).head_dim
        ratio = counted.byte_ratio(row.precision, row.context_length, head_dim)
        lines.append(
            {
                ("forward, ms", "products"): number(part_ms(row, "forward", *PRODUCTS), 3),
                ("forward, ms", "scale, mask"): number(part_ms(row, "forward", *AROUND), 3),
                ("forward, ms", "softmax"): number(part_ms(row, "forward", SOFTMAX), 3),
                ("softmax / products", "time"): _ratio(attention_ratio(row)),
                ("softmax / products", "FLOPs"): _ratio(counted.flop_ratio(head_dim)),
                ("softmax / products", "bytes"): _ratio(ratio),
                ("softmax / products", "time, backward"): _ratio(attention_ratio(row, "backward")),
            }
        )
    if not lines:
        return empty("softmax / products")
    table = pd.DataFrame(lines, index=_index(rows, "precision", "model", "context_length"))
    table.columns = pd.MultiIndex.from_tuples(table.columns)
    return table


def _ratio(value: float, digits: int = 2) -> str | None:
    return None if pd.isna(value) else number(value, digits)


def idle(frame: pd.DataFrame) -> pd.DataFrame:
    """Idle share without the profiler, by size and context."""
    rows = plain(profiles(frame))
    if rows.empty:
        return empty("context")
    shares = rows.assign(idle=[_points(idle_share(r)) for r in rows.itertuples()])
    table = shares.pivot_table(
        index=["precision", "model"], columns="context_length", values="idle", aggfunc="first",
        sort=False,
    )  # fmt: skip
    table = table[sorted(table.columns)]
    table.columns = [f"context {int(c)}, %" for c in table.columns]
    return table.rename_axis(["precision", "size"])


def gaps(frame: pd.DataFrame) -> pd.DataFrame:
    """Gaps between kernels and how far the host was ahead, at one context, under the profiler.

    The host issues a step in the time that it spends in the three sections.
    """
    rows = at_context(frame)
    rows = rows[rows["gaps"].notna()]
    lines = [
        {
            ("step", "kernels"): f"{int(r.profiled_kernels):,}",
            ("step", "gaps"): f"{int(r.gaps):,}",
            ("gap, µs", "median"): number(gap_us(r, 50), 3),
            ("gap, µs", "longest"): number(gap_us(r, 100), 3),
            ("of the step, %", "idle"): _points(r.idle_ms / (r.idle_ms + r.busy_ms)),
            ("of the step, %", "for the host"): _points(r.late_ms / (r.idle_ms + r.busy_ms)),
            ("host, ms", "issues"): number(sum(s[4] for s in summed(r.sections, WHAT[STEP])), 3),
            ("host, ms", "is ahead"): number(r.lead_us / 1e3, 3),
        }
        for r in rows.itertuples()
    ]  # fmt: skip
    if not lines:
        return empty("kernels", "gaps")
    table = pd.DataFrame(lines, index=_index(rows, "precision", "model"))
    table.columns = pd.MultiIndex.from_tuples(table.columns)
    return table


def gap_us(row: Any, percentile: int) -> float:
    """A percentile of the gaps' lengths, one of those that a row keeps."""
    return float(row.gap_percentiles_us[PERCENTILES.index(percentile)])


def overhead(frame: pd.DataFrame) -> pd.DataFrame:
    """A step without the profiler, with it, with named ranges, and after; eager and compiled."""
    rows = profiles(frame)
    rows = rows[rows["context_length"] == context(rows)]
    lines = [
        {
            ("a step, ms", "without"): number(r.step_median_ms, 3),
            ("a step, ms", "profiler"): number(r.profiled_ms, 3),
            ("a step, ms", "ranges too"): None if pd.isna(r.ranged_ms) else number(r.ranged_ms, 3),
            ("over without", "profiler"): _ratio(r.profiled_ms / r.step_median_ms, 3),
            ("over without", "ranges too"): _ratio(r.ranged_ms / r.step_median_ms, 3),
            ("over without", "after"): _ratio(control_ratio(r), 3),
        }
        for r in rows.assign(ranged_ms=pd.to_numeric(rows["ranged_ms"])).itertuples()
    ]  # fmt: skip
    if not lines:
        return empty("a step, ms")
    table = pd.DataFrame(lines, index=_index(rows, "precision", "provider", "attention", "model"))
    table.columns = pd.MultiIndex.from_tuples(table.columns)
    return table


def compiled(frame: pd.DataFrame) -> pd.DataFrame:
    """What compiling changes: the same step eager and by Inductor, and with fused attention."""
    rows = profiles(frame)
    others = rows[(rows["provider"] != "eager") | (rows["attention"] != "plain")]
    keys = ["model", "context_length", "precision"]
    asked = set(others[keys].itertuples(index=False, name=None))
    rows = rows[[case in asked for case in rows[keys].itertuples(index=False, name=None)]]
    lines = [
        {
            ("a step", "ms"): number(r.step_median_ms, 3),
            ("a step", "idle, %"): _points(idle_share(r)),
            ("its " + unit(rows), "calls"): f"{calls(r, STEP):,}",
            ("its " + unit(rows), "ms"): number(time_ms(r, STEP), 3),
            **{
                ("of which, ms", kind): number(by_class(r, STEP).get(kind, 0.0), 3)
                for kind in (classes.GEMM, classes.ELEMENTWISE, classes.SOFTMAX, classes.ATTENTION)
            },
        }
        for r in rows.itertuples()
    ]  # fmt: skip
    if not lines:
        return empty("a step")
    index = [
        (f"{r.model}, {int(r.context_length)}, {r.precision}", f"{r.attention}, {r.provider}")
        for r in rows.itertuples()
    ]
    names = ["size, context, precision", "attention, by"]
    table = pd.DataFrame(lines, index=pd.MultiIndex.from_tuples(index, names=names))
    table.columns = pd.MultiIndex.from_tuples(table.columns)
    return table.sort_index(level=0, sort_remaining=False, kind="stable")


def not_compiled(frame: pd.DataFrame) -> str | None:
    """That no compiled model was measured, for a note."""
    rows = profiles(frame)
    return None if rows["provider"].eq("inductor").any() else "No compiled model was measured."


def traces(frame: pd.DataFrame) -> pd.DataFrame:
    """The traces that were kept, by size and precision, and how many of them lie here."""
    rows = profiles(frame)
    rows = rows[rows["trace_file"].notna()]
    folder = paths.traces_dir()
    lines, index = [], []
    for key, part in rows.groupby(["precision", "model"], sort=False):
        index.append(key)
        lines.append(
            {
                "files": len(part), "with operators": int(part["trace_whole"].eq(True).sum()),
                "MiB, largest": number(part["trace_kept_mib"].max(), 2),
                "as recorded, MiB": number(part["trace_mib"].max(), 2),
                "here": sum((folder / name).exists() for name in part["trace_file"]),
            }
        )  # fmt: skip
    if not lines:
        return empty("files", "MiB, largest")
    names = ["precision", "size"]
    return pd.DataFrame(lines, index=pd.MultiIndex.from_tuples(index, names=names))
