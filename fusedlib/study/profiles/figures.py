"""Figures of study 08, each a pure function from the rows' frame to a Figure."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from fusedlib.bench.profiles import classes
from fusedlib.bench.profiles.idle import PERCENTILES
from fusedlib.bench.profiles.work import INFERENCE
from fusedlib.models.transformer import config
from fusedlib.study import style
from fusedlib.study.display import number
from fusedlib.study.profiles import counted
from fusedlib.study.profiles.selected import (
    PRECISIONS,
    STEP,
    at_context,
    by_class,
    idle_share,
    plain,
    profiles,
    share,
    time_ms,
    unit,
)
from fusedlib.study.profiles.tables import attention_ratio, gap_us

style.register(classes.GEMM, classes.ELEMENTWISE)
style.register(classes.SOFTMAX, classes.COPY, first=3)
style.register(classes.REDUCTION, "others", first=5)
_DRAWN = (
    classes.GEMM, classes.SOFTMAX, classes.ELEMENTWISE, classes.REDUCTION, classes.COPY,
    classes.OPTIMIZER,
)  # fmt: skip
SHORTEST_US = 0.1
"""Shorter gaps are drawn here: the axis is logarithmic."""

_BARS = (INFERENCE, STEP)


def _panels(rows: pd.DataFrame, height: float) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """A panel for each of the first two precisions that have rows, with its rows and title."""
    found = [p for p in PRECISIONS if p in set(rows["precision"])][:2] or ["fp32"]
    fig, axes = style.new(height=height, ncols=len(found), squeeze=False, sharey=True)
    panels = []
    for ax, precision in zip(axes[0], found, strict=True):
        style.title(ax, precision, fontsize=8.5)
        panels.append((ax, rows[rows["precision"] == precision]))
    return fig, panels


def _by_size(ax: Axes, rows: pd.DataFrame, value: Callable[[Any], float], **options: Any) -> None:
    """A line a size against context."""
    for model, lines in rows.groupby("model", sort=False):
        contexts = [int(c) for c in lines["context_length"]]
        style.line(ax, contexts, [value(row) for row in lines.itertuples()], str(model), **options)


def shares(frame: pd.DataFrame) -> Figure:
    """Share of each class in the kernels' time, a bar for inference and one for a step.

    The palette tells seven names apart: small classes are drawn together.
    """
    rows = at_context(frame)
    places = {model: place for place, model in enumerate(dict.fromkeys(rows["model"]))}
    fig, panels = _panels(rows, 1.4 + 0.4 * max(len(places), 2))
    for ax, part in panels:
        _stacked(ax, list(part.itertuples()), places)
        ax.set_xlabel(f"% of the {unit(rows)}' time")
    bars = {_bar(place, n): f"{m} {w}" for m, place in places.items() for n, w in enumerate(_BARS)}
    panels[0][0].set_yticks(list(bars), list(bars.values()))
    panels[0][0].invert_yaxis()
    style.legend(fig, ncols=4)
    return fig


def _bar(place: int, number: int) -> float:
    """Where the bar of a size stands: its two lie close to each other."""
    return place + 0.4 * number


def _stacked(ax: Axes, rows: list[Any], places: dict[str, int]) -> None:
    entries = [(row, what) for row in rows for what in _BARS]
    at = [_bar(places[row.model], n) for row in rows for n, _ in enumerate(_BARS)]
    start = [0.0] * len(entries)
    for kind in (*_DRAWN, "others"):
        values = [100 * share(row, what, kind) for row, what in entries]
        if kind == "others":
            values = [100 - low for low in start]
        style.bars(ax, at, values, kind, horizontal=True, start=start, size=0.34)
        start = [low + value for low, value in zip(start, values, strict=True)]
    ax.set_xlim(0, 100)
    ax.grid(False, axis="y")


def gemm(frame: pd.DataFrame) -> Figure:
    """Share of matrix products against context, in a whole step and in the forward pass alone."""
    rows = plain(profiles(frame))
    fig, panels = _panels(rows, 3.0)
    for ax, part in panels:
        for what, options in _LINES.items():
            _by_size(ax, part, partial(_gemm_percent, what), **options)
        for what, options in _LINES.items():
            ax.plot([], [], color=style.MUTED, linestyle=options.get("linestyle", "-"), label=what)
        _contexts(ax, part)
    panels[0][0].set_ylabel(f"GEMM, % of the {unit(rows)}' time")
    style.legend(fig, ncols=7)
    return fig


# A name that begins with an underscore is left out of legends.
_LINES: dict[str, dict[str, Any]] = {
    STEP: {},
    INFERENCE: {"linestyle": (0, (4, 1.5)), "markers": False, "label": "_inference"},
}


def _gemm_percent(what: str, row: Any) -> float:
    return 100 * share(row, what, classes.GEMM)


def _idle_percent(row: Any) -> float:
    return 100 * idle_share(row)


def _contexts(ax: Axes, rows: pd.DataFrame) -> None:
    ax.set_xscale("log", base=2)
    known = sorted({int(c) for c in rows["context_length"]})
    if known:
        ax.set_xticks(known, [str(c) for c in known])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("context, tokens")


def attention(frame: pd.DataFrame) -> Figure:
    """The softmax's time over that of the products, against the ratios of FLOPs and bytes."""
    rows = plain(profiles(frame))
    fig, panels = _panels(rows, 3.0)
    for ax, part in panels:
        _by_size(ax, part, attention_ratio)
        _counted(ax, part)
        _contexts(ax, part)
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    panels[0][0].set_ylabel("softmax / products, forward")
    style.legend(fig, ncols=4)
    return fig


def _counted(ax: Axes, rows: pd.DataFrame) -> None:
    if rows.empty:
        return
    precision = str(rows["precision"].iloc[0])
    head_dim = config(rows["model"].iloc[0]).head_dim
    known = sorted({int(c) for c in rows["context_length"]})
    ratios = [counted.byte_ratio(precision, c, head_dim) for c in known]
    wide = f"counted (heads {head_dim} wide)"
    style.reference_line(ax, x=known, y=ratios, label=f"bytes, {wide}")
    flops = [counted.flop_ratio(head_dim)] * len(known)
    style.reference_line(ax, x=known, y=flops, label=f"FLOPs, {wide}", linestyle=":")


def idle(frame: pd.DataFrame) -> Figure:
    """Share of an unprofiled step in which the device was idle, against context."""
    rows = plain(profiles(frame))
    fig, panels = _panels(rows, 2.9)
    for ax, part in panels:
        _by_size(ax, part, _idle_percent)
        _contexts(ax, part)
        ax.set_ylim(0, 100)
    on_device = bool(len(rows)) and bool(rows["on_device"].iloc[0])
    panels[0][0].set_ylabel("idle, % of a step" if on_device else "outside operators, % of a step")
    style.legend(fig, ncols=5)
    return fig


def gaps(frame: pd.DataFrame) -> Figure:
    """How long the gaps between kernels are: the share of gaps below a length."""
    rows = at_context(frame)
    fig, panels = _panels(rows, 2.9)
    for ax, part in panels:
        for row in part[part["gap_percentiles_us"].notna()].itertuples():
            lengths = np.maximum(row.gap_percentiles_us, SHORTEST_US)
            style.line(ax, lengths, PERCENTILES, str(row.model))
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.set_xlabel("gap, µs")
    panels[0][0].set_ylabel("% of gaps that are shorter")
    style.legend(fig, ncols=5)
    return fig


def shares_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `shares`."""
    said = [
        f"{row.model} {row.precision}, {what}: "
        + ", ".join(f"{k} {100 * ms / time_ms(row, what):.0f}" for k, ms in
                    list(by_class(row, what).items())[:3])
        for row in at_context(frame).itertuples() for what in _BARS
    ]  # fmt: skip
    return f"Per cent of the kernels' time by class. {'; '.join(said) or 'No rows yet'}."


def gemm_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `gemm`."""
    return _told(
        frame, "Per cent of the kernels' time of a step in matrix products, by context",
        partial(_gemm_percent, STEP),
    )  # fmt: skip


def attention_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `attention`."""
    return _told(frame, "The softmax's time over that of both products", attention_ratio)


def idle_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `idle`."""
    return _told(frame, "Per cent of a step without work for the device", _idle_percent)


def gaps_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `gaps`."""
    rows = at_context(frame)
    rows = rows[rows["gap_percentiles_us"].notna()]
    said = [
        f"{r.model} {r.precision}: half below {number(gap_us(r, 50), 2)} µs, the longest "
        f"{number(gap_us(r, 100), 2)} µs"
        for r in rows.itertuples()
    ]
    return f"Share of the gaps between kernels below a length. {'; '.join(said) or 'No rows yet'}."


def _told(frame: pd.DataFrame, what: str, value: Callable[[Any], float]) -> str:
    said = []
    rows = plain(profiles(frame))
    for (precision, model), part in rows.groupby(["precision", "model"], sort=False):
        values = ", ".join(number(value(row), 2) for row in part.itertuples())
        contexts = ", ".join(str(int(c)) for c in part["context_length"])
        said.append(f"{model} {precision} at {contexts}: {values}")
    return f"{what}. {'; '.join(said) or 'No rows yet'}."
