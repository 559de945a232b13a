"""Pictures: what `press.show` chose, drawn in panels as lines, dots, bars or areas.

Marks are a frame, a row a mark: its `value`; its `place`, a category or under a line a number; its
name in `by`; and where there are several its `panel`. Texts are categories in their order.
"""

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from press import style
from press.columns import column
from press.formats import formatted, tick, unit

SPAN, SPAN_OF_LOG = 30, 3
"""From which factor on an axis is logarithmic, and that of a column that says `log`."""
MOST_NAMED = 24


@dataclass(frozen=True)
class Picture:
    """A figure with the data behind it, a text for who cannot see it, and in `of` the days and
    commits of its rows by machine, where some are of another fusedlib.

    As the last value of a cell it shows itself; `press.display.figure` gives it caption and name.
    """

    figure: Figure
    data: pd.DataFrame
    alt: str
    of: str = ""

    @cached_property  # a figure's layout moves a little when it is drawn again
    def svg(self) -> str:
        """The figure as SVG."""
        return style.svg(self.figure)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[Any, Any]:
        data = {"image/svg+xml": self.svg, "text/plain": self.alt}
        return data, {"image/svg+xml": {"needs_background": "light"}}


@dataclass(frozen=True)
class Chart:
    """Marks, how each name looks, and what the axis of numbers says.

    Args:
        label: what the numbers are; `spec` is their format, whose unit the axis has, too.
        place: the column that the places are of.
        log: whether the axis is logarithmic.
        reference: where a thin line says "as much as".
        stacked: whether names are parts of one bar.
    """

    marks: pd.DataFrame
    looks: Mapping[str, dict[str, Any]]
    label: str
    spec: str
    place: str
    log: bool = False
    reference: float | None = None
    stacked: bool = False

    @property
    def title(self) -> str:
        """Of the axis."""
        label = unit(self.spec)
        return f"{self.label}, {label}" if label and label != "×" else self.label

    @property
    def order(self) -> list[str]:
        """The categories, from below."""
        return [*self.marks["place"].cat.categories][::-1]

    def numbers(self, ax: Axes, axis: Any) -> None:
        """The axis of numbers: its ticks, and the line that they are compared with."""
        across = axis is ax.xaxis
        if self.log:
            # an error of zero is a gap
            ax.set_xscale("log") if across else ax.set_yscale("log", nonpositive="mask")
            low, high = ax.get_xlim() if across else ax.get_ylim()
            decades = np.log10(high / low)  # the fewer, the more ticks in each
            subs = (1, 1.5, 2, 3, 4, 6) if decades < 1 else (1, 2, 5) if decades < 2.5 else (1,)
            axis.set_major_locator(LogLocator(subs=subs))
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda v, _: tick(v, self.spec)))
        if self.reference is not None:
            draw = ax.axvline if across else ax.axhline
            draw(self.reference, color=style.MUTED, linestyle=(0, (4, 2)), linewidth=1.1)

    def alt(self, kind: str) -> str:
        """What was drawn, name by name: the ends of each line, or all values of a few."""
        parts = []
        keys = [name for name in ("panel", "by") if name in self.marks]
        for key, line in self.marks.groupby(keys, sort=False, observed=True):
            shown = line if len(self.marks) <= MOST_NAMED else line.iloc[[0, -1]].drop_duplicates()
            values = [
                f"{formatted(value, self.spec)} at {place}"
                for value, place in zip(shown["value"], shown["place"], strict=True)
            ]
            parts.append(f"{', '.join(map(str, key))}: {', '.join(values)}")
        return f"{kind}: {self.label} by {self.place}. {'; '.join(parts)}."


Kind = Callable[[Chart, list[tuple[Axes, pd.DataFrame]]], None]


def draw(kind: Kind, chart: Chart) -> Figure:
    """A chart in its panels, at most two of them side by side."""
    parts: list[tuple[Any, pd.DataFrame]] = [("", chart.marks)]
    if "panel" in chart.marks:
        parts = list(chart.marks.groupby("panel", sort=False, observed=True))
    columns = min(len(parts), 2)
    rows, height = -(-len(parts) // columns), 3.0
    if kind is not lines:
        each = 0.33 if kind is dots else 0.2 * max(_side_by_side(chart), 1.4)
        height = 0.9 + each * len(chart.order)
    fig = Figure(figsize=(6.4, height * rows + 0.2))
    axes = fig.subplots(rows, columns, squeeze=False, sharey=True)
    for unused in axes.flat[len(parts) :]:
        unused.set_axis_off()
    for ax, (name, _) in zip(axes.flat, parts, strict=False):
        ax.set_title(textwrap.fill(str(name), 72 // columns))  # beside its neighbour's
    kind(chart, [(ax, part) for ax, (_, part) in zip(axes.flat, parts, strict=False)])
    if kind is lines:
        axes.flat[0].set_ylabel(chart.title)
        return fig
    for ax in axes.flat[: len(parts)]:
        ax.set_yticks(range(len(chart.order)), chart.order)
        chart.numbers(ax, ax.xaxis)
        ax.set_xlabel(chart.title)
    return fig


def lines(chart: Chart, panels: list[tuple[Axes, pd.DataFrame]]) -> None:
    """A line a name over the numbers in `place`; none over the gap where it lacks one."""
    places = chart.marks["place"]
    grid = sorted(places.unique())
    for ax, part in panels:
        for name, line in part.groupby("by", sort=False, observed=True):
            heights = line.set_index("place")["value"].reindex(grid)
            ax.plot(grid, heights, label=str(name), **chart.looks[name])
        if is_log(chart.place, places):
            whole = all(float(v).is_integer() for v in grid)
            powers = whole and all(float(np.log2(v)).is_integer() for v in grid)
            ax.set_xscale("log", base=2 if powers or not whole else 10)
            if whole and not powers:
                ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: formatted(v, ",d")))
        if len(grid) <= 10 and places.dtype.kind == "i":
            ax.set_xticks(grid, [formatted(v, ",d") for v in grid])
            ax.xaxis.set_minor_locator(NullLocator())
            if len(grid) > 5:
                ax.tick_params(axis="x", labelsize=8, labelrotation=30)
        chart.numbers(ax, ax.yaxis)
        ax.set_xlabel(column(chart.place).label)


def dots(chart: Chart, panels: list[tuple[Axes, pd.DataFrame]]) -> None:
    """A row a category in `place`, a marker a name: near one a bar from zero would show nothing."""
    order, names = chart.order, list(dict.fromkeys(chart.marks["by"]))
    for ax, part in panels:
        if ax is not panels[0][0]:
            ax.sharex(panels[0][0])
        at_rows = part.groupby("place", observed=True)["by"]
        named = {at: [n for n in names if n in {*here}] for at, here in at_rows}
        apart = min(0.7 / max(map(len, named.values()), default=1), 0.18)
        for name in names:
            own = part[part["by"] == name]
            heights = [
                order.index(at) - (named[at].index(name) - (len(named[at]) - 1) / 2) * apart
                for at in own["place"]
            ]
            looks = chart.looks[name] | {"markersize": 4.5, "linestyle": ""}
            ax.plot(own["value"].to_numpy(float), heights, label=str(name), **looks)
        ax.set_ylim(-0.6, len(order) - 0.4)
        for at in range(0, len(order), 2):  # bands: whose row a mark is in
            ax.axhspan(at - 0.5, at + 0.5, color=style.MUTED, alpha=0.09, linewidth=0)


def bars(chart: Chart, panels: list[tuple[Axes, pd.DataFrame]]) -> None:
    """Lying bars, a row a category in `place`; names are parts of a bar, or bars side by side.

    A row's length (of stacked bars the sum) stands at its end. Where each row has one name, its bar
    lies in the middle.
    """
    order, names = chart.order, list(dict.fromkeys(chart.marks["by"]))
    each = _side_by_side(chart)
    size = 0.74 / each
    for ax, part in panels:
        start = np.zeros(len(order))
        for at, name in enumerate(names):
            own = part[part["by"] == name].set_index("place")["value"]
            length = own.reindex(order).to_numpy(dtype=float)
            shift = 0.0 if each == 1 else -(at - (each - 1) / 2) * size
            drawn = ax.barh(
                np.arange(len(order)) + shift, np.nan_to_num(length), height=size * 0.94,
                left=start if chart.stacked else 0.0, color=chart.looks[name]["color"],
                linewidth=0.0, label=str(name),
            )  # fmt: skip
            if chart.stacked:
                start = start + np.nan_to_num(length)
                length = np.where(start > 0, start, np.nan)  # of the parts so far
            if not chart.stacked or at == len(names) - 1:
                ends = [formatted(v, chart.spec) if np.isfinite(v) else "" for v in length]
                ax.bar_label(drawn, ends, padding=3, fontsize=8)
        ax.margins(x=0.14)
        ax.set_xlim(left=0)
        ax.grid(axis="y", visible=False)


def _side_by_side(chart: Chart) -> int:
    """How many bars a row has room for."""
    names = chart.marks.groupby("place", observed=True)["by"].nunique()
    return 1 if chart.stacked or (names == 1).all() else chart.marks["by"].nunique()


def is_log(name: str, values: pd.Series) -> bool:
    """Whether the axis of a column's values is logarithmic."""
    least, most = values.min(), values.max()
    return bool(least > 0 and most / least > (SPAN_OF_LOG if column(name).log else SPAN))
