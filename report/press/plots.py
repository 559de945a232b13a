"""Pictures: a `Chart` says what is drawn, and is drawn in panels as lines, dots or bars.

A `Picture` is the figure, the data that was drawn, and an alternative text made of them. Names
have one colour, the same in every figure.
"""

import textwrap
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from press import style
from press.columns import column
from press.formats import formatted, tick, unit
from press.published import MACHINE

SPAN, SPAN_OF_LOG = 30, 3
"""From which factor on an axis is logarithmic, and that of a column that says `log`."""
MOST_NAMED = 24
_LOOK = "get_marker", "get_linestyle", "get_markerfacecolor"


@dataclass(frozen=True)
class Picture:
    """A figure with the data behind it and a text for who cannot see it.

    As the last value of a cell it shows itself; `press.display.figure` gives it caption and name.
    """

    figure: Figure
    data: pd.DataFrame
    alt: str
    of: str = ""
    """Days and commits of its rows by machine, where some are older than the release."""

    @cached_property  # a figure's layout moves a little when it is drawn again
    def svg(self) -> str:
        """The figure as SVG, with its text."""
        said = f'<svg role="img" aria-label="{escape(self.alt)}" '
        require_looks_apart(self.figure)
        return style.svg(self.figure).replace("<svg ", said, 1)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[Any, Any]:
        data = {"image/svg+xml": self.svg, "text/plain": self.alt}
        return data, {"image/svg+xml": {"needs_background": "light"}}


def require_looks_apart(figure: Figure) -> None:
    """Raise a ValueError where two names of a legend have one colour, marker and dash."""
    names: dict[Any, set[str]] = {}
    for ax in figure.axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            part: Any = handle[0] if isinstance(handle, tuple) else handle  # bars are several
            colour = (getattr(part, "get_color", None) or part.get_facecolor)()
            look = [str(getattr(part, get)()) for get in _LOOK if hasattr(part, get)]
            names.setdefault((to_rgba_array(colour).tobytes(), *look), set()).add(name)
    for alike in names.values():
        if len(alike) > 1:
            raise ValueError(f"{' and '.join(sorted(alike))} look alike in a picture")


@dataclass(frozen=True)
class Chart:
    """What a picture draws, and what its axis of numbers says.

    Args:
        rows: a row a mark: its `value`; its `place`, a category or under a line a number; its name
            in `by`; and where there are several its `panel` and `machine`. Texts are categories in
            their order.
        label: what the numbers are; `spec` is their format, whose unit the axis has, too.
        place: the column that the places are of.
        log: whether the axis is logarithmic.
        reference: where a thin line says "as much as".
        stacked: whether names are parts of one bar.
    """

    rows: pd.DataFrame
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

    @cached_property
    def marks(self) -> pd.DataFrame:
        """The rows with the `card` of each: 0 where marks are filled, 1 where they are open.

        Published ones look like the first machine's where name and panel tell them from all others.
        """
        if "machine" not in self.rows:
            return self.rows.assign(card=0)
        machine = self.rows["machine"]
        published = machine == MACHINE
        names = self.rows.filter(["by", "panel"]).apply(tuple, axis=1)
        if not names[published].isin(names[~published]).any():
            machine = machine.where(~published).cat.remove_unused_categories()
        return self.rows.assign(card=machine.cat.codes.clip(lower=0))

    def panels(self, height: float) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
        """A figure and the marks of each of its panels, at most two of them side by side."""
        parts: list[tuple[Any, pd.DataFrame]] = [("", self.marks)]
        if "panel" in self.marks:
            parts = list(self.marks.groupby("panel", sort=False, observed=True))
        columns = min(len(parts), 2)
        lines = -(-len(parts) // columns)
        fig, axes = style.new(height * lines + 0.2, columns, lines, squeeze=False, sharey=True)
        for unused in axes.flat[len(parts) :]:
            unused.set_axis_off()
        for ax, (name, _) in zip(axes.flat, parts, strict=False):
            style.title(ax, textwrap.fill(str(name), 72 // columns))  # beside its neighbour's
        return fig, [(ax, part) for ax, (_, part) in zip(axes.flat, parts, strict=False)]

    def categories(self, ax: Axes, order: list[Any]) -> None:
        """Both axes where a row is a category."""
        ax.set_yticks(range(len(order)), [str(v) for v in order])
        self.numbers(ax, ax.xaxis)
        ax.set_xlabel(self.title)

    def numbers(self, ax: Axes, axis: Any) -> None:
        """The axis of numbers: its ticks, and the line that they are compared with."""
        if self.log:
            across = axis is ax.xaxis
            # an error of zero is a gap
            ax.set_xscale("log") if across else ax.set_yscale("log", nonpositive="mask")
            low, high = ax.get_xlim() if across else ax.get_ylim()
            decades = np.log10(high / low)  # the fewer, the more ticks in each
            subs = (1, 1.5, 2, 3, 4, 6) if decades < 1 else (1, 2, 5) if decades < 2.5 else (1,)
            axis.set_major_locator(LogLocator(subs=subs))
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda v, _: tick(v, self.spec)))
        if self.reference is not None:
            at: dict[str, Any] = {axis.axis_name: self.reference}
            style.reference_line(ax, **at)

    def picture(self, kind: str, fig: Figure) -> Picture:
        """With what was drawn, name by name: the ends of each line, or all values of a few."""
        parts = []
        keys = [name for name in ("panel", "by", "machine") if name in self.rows]
        for key, line in self.rows.groupby(keys, sort=False, observed=True):
            shown = line if len(self.rows) <= MOST_NAMED else line.iloc[[0, -1]].drop_duplicates()
            values = [
                f"{formatted(value, self.spec)} at {place}"
                for value, place in zip(shown["value"], shown["place"], strict=True)
            ]
            parts.append(f"{', '.join(map(str, key))}: {', '.join(values)}")
        text = f"{kind}: {self.label} by {self.place}. {'; '.join(parts)}."
        return Picture(fig, self.rows, text)


def lines(chart: Chart) -> Picture:
    """A line a name over the numbers in `place`.

    A name that lacks one that others of its card have gets no line over the gap.
    """
    marks = chart.marks
    fig, panels = chart.panels(3.0)
    grid = sorted(marks["place"].unique())
    for ax, part in panels:
        for (name, card), line in part.groupby(["by", "card"], sort=False, observed=True):
            there = {*marks["place"][marks["card"] == card]}
            own = [at for at in grid if at in there]
            heights = line.drop_duplicates("place").set_index("place")["value"].reindex(own)
            style.line(ax, own, heights, str(name), **look(card))
        _places(ax, grid, is_log(chart.place, marks["place"]))
        chart.numbers(ax, ax.yaxis)
        ax.set_xlabel(column(chart.place).label)
    panels[0][0].set_ylabel(chart.title)
    return chart.picture("Lines", fig)


def _places(ax: Axes, grid: list, log: bool) -> None:
    """The axis below lines: few whole numbers are all its ticks."""
    if log:
        whole = all(float(v).is_integer() for v in grid)
        powers = whole and all(float(np.log2(v)).is_integer() for v in grid)
        ax.set_xscale("log", base=2 if powers or not whole else 10)
        if whole and not powers:
            ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: formatted(v, ",d")))
    if len(grid) <= 10 and all(isinstance(v, int | np.integer) for v in grid):
        ax.set_xticks(grid, [formatted(v, ",d") for v in grid])
        ax.xaxis.set_minor_locator(NullLocator())
        if len(grid) > 5:
            ax.tick_params(axis="x", labelsize=8, labelrotation=30)


def dots(chart: Chart) -> Picture:
    """A row a category in `place`, a marker a name: near one a bar from zero would show nothing."""
    marks = chart.marks
    order = [*marks["place"].cat.categories][::-1]
    names = list(dict.fromkeys(marks["by"]))
    first = {name: marks["card"][marks["by"] == name].min() for name in names}
    fig, panels = chart.panels(0.9 + 0.33 * len(order))
    for ax, _ in panels[1:]:
        ax.sharex(panels[0][0])
    for ax, part in panels:
        at_rows = part.groupby("place", observed=True)["by"]
        beside = {at: [n for n in names if n in {*there}] for at, there in at_rows}
        apart = min(0.7 / max(map(len, beside.values()), default=1), 0.18)
        for name, card in product(names, sorted({*part["card"]})):
            own = part[(part["by"] == name) & (part["card"] == card)]
            heights = [
                order.index(at) - (beside[at].index(name) - (len(beside[at]) - 1) / 2) * apart
                for at in own["place"]
            ]
            drawn: dict[str, Any] = {
                "marker": style.marker(str(name)), "linestyle": "", "markersize": 4.5,
                "color": style.colour(str(name)), "markeredgewidth": 0,
                "label": "" if card > first[name] else str(name),
            } | look(card)  # fmt: skip
            drawn.pop("linewidth", None)
            ax.plot(own["value"].to_numpy(float), heights, **drawn)
        ax.set_ylim(-0.6, len(order) - 0.4)
        for at in range(0, len(order), 2):  # bands: whose row a mark is in
            ax.axhspan(at - 0.5, at + 0.5, color=style.MUTED, alpha=0.09, linewidth=0)
        chart.categories(ax, order)
    return chart.picture("Points", fig)


def bars(chart: Chart) -> Picture:
    """Lying bars, a row a category in `place`; names are parts of a bar, or bars side by side.

    A row's length (of stacked bars the sum) stands at its end. Where each
    row has one name, its bar lies in the middle. Bars are of the first card, others are marks.
    """
    marks, stacked = chart.marks, chart.stacked
    order = [*marks["place"].cat.categories][::-1]
    names = list(dict.fromkeys(marks["by"]))
    alone = stacked or (marks.groupby("place", observed=True)["by"].nunique() == 1).all()
    each = 1 if alone else len(names)
    size = 0.74 / each
    fig, panels = chart.panels(0.9 + 0.2 * len(order) * max(each, 1.4))
    for ax, shown in panels:
        part, others = shown[shown["card"] == 0], shown[shown["card"] != 0]
        start = np.zeros(len(order))
        for at, name in enumerate(names):
            own = part[part["by"] == name].drop_duplicates("place").set_index("place")["value"]
            length = own.reindex(order).to_numpy(dtype=float)
            shift = 0.0 if alone else -(at - (each - 1) / 2) * size
            drawn = ax.barh(
                np.arange(len(order)) + shift, np.nan_to_num(length), height=size * 0.94,
                left=start if stacked else 0.0, color=style.colour(str(name)), linewidth=0.0,
                label=str(name),
            )  # fmt: skip
            if stacked:
                start = start + np.nan_to_num(length)
                length = np.where(start > 0, start, np.nan)  # of the parts so far
            if not stacked or at == len(names) - 1:
                ends = [formatted(v, chart.spec) if np.isfinite(v) else "" for v in length]
                padding = 8 if marks["card"].any() else 3  # room for the marks of others
                ax.bar_label(drawn, ends, padding=padding, fontsize=8, color=style.INK)
            for card, own in others[others["by"] == name].groupby("card"):
                drawn_as = {"marker": "D", **look(card), "linestyle": "", "color": style.INK}
                ax.plot(own["value"], [order.index(v) + shift for v in own["place"]], **drawn_as)
        ax.margins(x=0.14)
        ax.set_xlim(left=0)
        ax.grid(axis="y", visible=False)
        chart.categories(ax, order)
    return chart.picture("Bars", fig)


def look(card: int) -> dict[str, Any]:
    """How marks of a card look: filled, open, a cross."""
    if card == 0:
        return {}
    kind = {"marker": "x"} if card > 1 else {"markerfacecolor": "none"}
    return {**kind, "markeredgewidth": 1.1, "linewidth": 0.8, "markersize": 5.0}


def is_log(name: str, values: pd.Series) -> bool:
    """Whether the axis of a column's values is logarithmic."""
    least, most = values.min(), values.max()
    return bool(least > 0 and most / least > (SPAN_OF_LOG if column(name).log else SPAN))
