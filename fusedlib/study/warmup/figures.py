"""Figures of study 01, each a pure function from the rows' frame to a Figure."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fusedlib.study import published, style
from fusedlib.study.selection import place
from fusedlib.study.warmup.tables import (
    STAGES,
    WARMUPS,
    after_warmup,
    first_steps,
    settled,
    steps,
)
from fusedlib.study.warmup.tables import stages as stage_rows

STAGE_COLOURS = dict(zip(STAGES, style.PALETTE, strict=True))


def each_step(frame: pd.DataFrame, direction: str = "forward+backward") -> Figure:
    """Time of every step from the very first, over the settled time; a panel a machine."""
    rows = steps(frame, "fresh", direction)
    machines = list(dict.fromkeys(rows["machine"]))
    fig, axes = style.new(height=3.0, ncols=max(len(machines), 1), squeeze=False)
    for ax, machine in zip(axes[0], machines, strict=False):
        part = rows[rows["machine"] == machine]
        for model, group in part.groupby("model", sort=False):
            relative = np.array([np.asarray(s) / settled(s) for s in group["samples_ms"]])
            count = np.arange(1, relative.shape[1] + 1)
            low, high = relative.min(axis=0), relative.max(axis=0)
            style.line(ax, count, np.median(relative, axis=0), model, low, high)
        _log_ratio(ax)
        ax.set_xlabel("step of the process")
        style.title(ax, place(part.iloc[0]))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 5, 10]))
    axes[0][0].set_ylabel("time / settled time")
    style.legend(fig)
    return fig


def _log_ratio(ax: Axes) -> None:
    ax.set_yscale("log")
    formatter = FuncFormatter(lambda v, _: f"{v:g}")
    ax.yaxis.set_major_formatter(formatter)
    ax.yaxis.set_minor_formatter(
        FuncFormatter(lambda v, _: f"{v:g}" if str(v).lstrip("0.")[0] in "25" else "")
    )
    style.reference_line(ax, y=1.0)


def bias_by_warmup(frame: pd.DataFrame, direction: str = "forward+backward") -> Figure:
    """Mean of ten steps over the settled time against warm-up steps: published and measured.

    For a published table "settled" is the mean of its source's main table, whose warm-up is not
    stated, or else of the one with the most warm-up steps.
    """
    rows = steps(frame, "fresh", direction)
    told = published.load("warmup").query("direction == @direction")
    panels: list[tuple[str, dict[str, tuple[list[int], np.ndarray]]]] = []
    for source, group in told.groupby("source"):
        panels.append((f"published, seed {source}", _published_bias(group)))
    for _, group in rows.groupby("machine", sort=False):
        panels.append((place(group.iloc[0]), _measured_bias(group)))
    fig, axes = style.new(height=2.9, ncols=len(panels), squeeze=False, sharey=True)
    for ax, (title, lines) in zip(axes[0], panels, strict=True):
        for model, (warmups, ratios) in lines.items():
            middle = np.median(ratios, axis=0)
            style.line(ax, warmups, middle, model, ratios.min(axis=0), ratios.max(axis=0))
        _log_ratio(ax)
        style.title(ax, title, fontsize=7.5)
        ax.set_xticks(list(WARMUPS))
        ax.set_xlabel("warm-up steps")
    axes[0][0].set_ylabel("mean of ten / settled")
    style.legend(fig)
    return fig


def _published_bias(group: pd.DataFrame) -> dict[str, tuple[list[int], np.ndarray]]:
    lines = {}
    for model, rows in group.groupby("model", sort=False):
        # Sorted last: the most warm-up steps, or the main table, which does not state its own.
        ordered = rows.sort_values("warmup_steps", na_position="last")
        ratios = (ordered["mean_ms"] / ordered["mean_ms"].iloc[-1]).to_numpy(float)
        stated = ordered["warmup_steps"].notna().to_numpy()
        warmups = [int(w) for w in ordered["warmup_steps"][stated]]
        lines[str(model)] = (warmups, ratios[stated][None])
    return lines


def _measured_bias(group: pd.DataFrame) -> dict[str, tuple[list[int], np.ndarray]]:
    lines = {}
    for model, rows in group.groupby("model", sort=False):
        ratios = [
            [after_warmup(s, w).mean() / settled(s) for w in WARMUPS] for s in rows["samples_ms"]
        ]
        lines[str(model)] = (list(WARMUPS), np.array(ratios))
    return lines


def fresh_and_shared(frame: pd.DataFrame, direction: str = "forward+backward") -> Figure:
    """The first step's extra time in a process of its own and in one that runs all sizes."""
    rows = first_steps(frame, direction)
    machines = list(dict.fromkeys(rows["machine"])) if len(rows) else []
    fig, axes = style.new(height=2.8, ncols=max(len(machines), 1), squeeze=False)
    for ax, machine in zip(axes[0], machines, strict=False):
        part = rows[rows["machine"] == machine]
        models = list(dict.fromkeys(part["model"]))
        at = {model: i for i, model in enumerate(models)}
        for shift, isolation in ((-0.2, "fresh"), (0.2, "shared")):
            chosen = part[part["isolation"] == isolation]
            spread = (chosen["extra_low_ms"], chosen["extra_high_ms"])
            style.bars(
                ax, [at[m] + shift for m in chosen["model"]], chosen["extra_ms"], isolation,
                *(spread if (chosen["processes"] > 1).all() else ()), size=0.38,
                label={"fresh": "a process for each size", "shared": "one process, in this order"}[
                    isolation
                ],
            )  # fmt: skip
        ax.set_xticks(range(len(models)), models)
        style.title(ax, part["place"].iloc[0])
    axes[0][0].set_ylabel("first step − settled step, ms")
    style.legend(fig)
    return fig


def stages(frame: pd.DataFrame) -> Figure:
    """What a fresh process does before a step is settled, a mark a stage on a logarithmic axis."""
    rows = stage_rows(frame)
    names = [f"{r['model']}\n{place(r)}" for _, r in rows.iterrows()]
    fig, ax = style.new(height=1.2 + 0.36 * max(len(rows), 1))
    for (name, title), mark in zip(STAGES.items(), style.MARKERS, strict=True):
        values = rows[name] if len(rows) else []
        at = list(range(len(rows)))
        colour = STAGE_COLOURS[name]
        ax.plot(values, at, linestyle="", marker=mark, color=colour, label=title, markersize=5.5)
    ax.set_yticks(range(len(rows)), names, fontsize=7.5)
    ax.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    if len(rows):  # a logarithmic axis of nothing cannot be drawn
        ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    ax.set_xlabel("wall time, ms")
    style.legend(fig, ncols=3)
    return fig


def each_step_alt(frame: pd.DataFrame, direction: str = "forward+backward") -> str:
    """Alternative text of `each_step`."""
    parts = []
    rows = steps(frame, "fresh", direction)
    for (_, model), group in rows.groupby(["machine", "model"], sort=False):
        first = np.median([s[0] / settled(s) for s in group["samples_ms"]])
        parts.append(f"{model} on {place(group.iloc[0])} starts at {first:.2g} times")
    return _alt("Step time over settled time against the step's number, a line a size", parts)


def bias_by_warmup_alt(frame: pd.DataFrame, direction: str = "forward+backward") -> str:
    """Alternative text of `bias_by_warmup`."""
    parts = []
    rows = steps(frame, "fresh", direction)
    for _, group in rows.groupby("machine", sort=False):
        for model, (_, ratios) in _measured_bias(group).items():
            middle = np.median(ratios, axis=0)
            where = f"{model} on {place(group.iloc[0])}"
            parts.append(f"{where}: {middle[0]:.2f} without, {middle[-1]:.2f} after the most")
    return _alt("Mean of ten steps over settled time against warm-up steps", parts)


def fresh_and_shared_alt(frame: pd.DataFrame, direction: str = "forward+backward") -> str:
    """Alternative text of `fresh_and_shared`."""
    rows = first_steps(frame, direction)
    parts = [
        f"{r.model} on {r.place}, {r.isolation} process: {r.extra_ms:.3g} ms"
        for r in rows.itertuples()
    ]
    return _alt("Bars: extra time of the first step by size", parts)


def stages_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `stages`."""
    parts = []
    for _, row in stage_rows(frame).iterrows():
        times = ", ".join(f"{title} {row[name]:.3g} ms" for name, title in STAGES.items())
        parts.append(f"{row['model']} on {place(row)}: {times}")
    return _alt("A row for each size and machine, a mark for each stage", parts)


def _alt(what: str, parts: list[str]) -> str:
    return f"{what}. {'; '.join(parts)}." if parts else f"{what}. No rows yet."
