"""The plot vocabulary: lines, points and bars from a tidy frame, with labels where the eye is.

Each returns a `Picture`: the figure, the data that was drawn, and an alternative text made of them.
Names have one colour, the same in every figure.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from fusedlib.bench import machine as machines
from press import style
from press.formats import formatted, tick, unit
from press.published import MACHINE

# A label of a line takes this share of an axis's height.
_LINE = 0.075
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


def lines(
    frame: pd.DataFrame, x: str, y: str, by: str, *, panel: str | None = None, spec: str = "",
    logx: bool = False, logy: bool = False, low: str | None = None, high: str | None = None,
    reference: float | None = None, xlabel: str | None = None,
    ylabel: str | None = None, height: float = 3.0, columns: int = 2, share: bool = True,
    zero: bool = False, card: str | None = None, legend: bool = True,
) -> Picture:  # fmt: skip
    """A line a name in `by`, labelled at its end, a panel a value of `panel`.

    Args:
        frame: tidy, a line a point; x, y, by, panel, low and high name its columns, the last two
            the ends of a band.
        spec: format of y; its unit stands in the axis's title.
        reference: where a thin line says "as much as".
        height: of a row of panels in inches.
        columns: panels side by side.
        share: whether panels share the vertical axis.
        zero: whether the vertical axis begins at zero.
        card: a column whose first value has filled marks, the second open ones, the third crosses,
            the fourth plus signs.
        legend: whether names are written at the lines; else the caller gives them a legend.

    A name that lacks an x that others of its card have gets no line over the gap. Where each line
    is one mark, its name stands below it.
    """
    data = _data(frame, [x, y, by, panel, low, high, card])
    cards = _cards(data, card, by, panel)
    fig, axes = _panels(data, panel, height, columns, share)
    labelled: list[tuple[Axes, list[tuple[float, float, str]]]] = []
    for ax, part in _each(axes, data, panel):
        grid = sorted(data[x].unique()) if share else sorted(part[x].unique())
        named: dict[str, tuple[float, float]] = {}  # of the first card that has the name
        for (name, one), line in part.groupby([by, cards], sort=False, observed=True):
            of_card = set(data[x][cards == one])
            own = [value for value in grid if value in of_card]
            full = line.drop_duplicates(x).set_index(x).reindex(own)
            style.line(
                ax, own, full[y], str(name), full[low] if low else None,
                full[high] if high else None, **mark(one),
            )  # fmt: skip
            if not one or str(name) not in named:
                last = line.sort_values(x).iloc[-1]
                named[str(name)] = (float(last[x]), float(last[y]))
        _scales(ax, logx, logy, grid, spec)
        if reference is not None:
            style.reference_line(ax, y=reference)
        ax.set_xlabel(xlabel or x)
        labelled.append((ax, [(*end, name) for name, end in named.items()]))
    single = data.groupby([c for c in (by, panel, card) if c], observed=True).size().max() == 1
    for ax, ends in labelled:  # when every panel has widened the axis that they share
        if zero and not logy:
            ax.set_ylim(bottom=0)
        if legend:
            (_mark_labels if single else _end_labels)(ax, ends)
    axes[0].set_ylabel(_title(ylabel or y, spec))
    return Picture(fig, data, _alt("Lines", data, x, y, by, panel, spec, ylabel, card))


def points(
    frame: pd.DataFrame, x: str, y: str, by: str, *, panel: str | None = None, spec: str = "",
    logx: bool = False, low: str | None = None, high: str | None = None,
    reference: float | None = None, xlabel: str | None = None, height: float | None = None,
    columns: int = 2, card: str | None = None, share: bool = False, legend: bool = True,
) -> Picture:  # fmt: skip
    """A row a category in `y`, a marker a name in `by` at its value `x`, bars from low to high.

    For ratios near one, where a bar from zero would show nothing. `card` as in `lines`; with
    `share` the panels share the horizontal axis. Without `legend` the caller gives it one.
    """
    data = _data(frame, [x, y, by, panel, low, high, card])
    data["_card"] = _cards(data, card, by, panel)
    order = _ordered(data[y])[::-1]
    names = list(dict.fromkeys(data[by]))
    tall = height or 0.9 + 0.33 * len(order)
    fig, axes = _panels(data, panel, tall, columns)
    if share:
        for ax in axes[1:]:
            ax.sharex(axes[0])
    for ax, part in _each(axes, data, panel):
        rows_at = part.groupby(y, observed=True)
        beside = {v: [n for n in names if n in set(rows_of[by])] for v, rows_of in rows_at}
        apart = min(0.7 / max(map(len, beside.values()), default=1), 0.18)
        for name, one in ((name, one) for name in names for one in sorted({*part["_card"]})):
            own = part[(part[by] == name) & (part["_card"] == one)]
            has_name = data["_card"][data[by] == name]
            rows = [
                order.index(v) - (beside[v].index(name) - (len(beside[v]) - 1) / 2) * apart
                for v in own[y]
            ]
            drawn: dict[str, Any] = {
                "marker": style.marker(str(name)), "linestyle": "", "markersize": 4.5,
                "color": style.colour(str(name)), "markeredgewidth": 0, "elinewidth": 1.1,
                "capsize": 2, "label": "" if one > min(has_name) else str(name),
            } | mark(one)  # fmt: skip
            drawn.pop("linewidth", None)
            ax.errorbar(own[x].to_numpy(float), rows, xerr=_error_bars(own, x, low, high), **drawn)
        ax.set_yticks(range(len(order)), [str(v) for v in order])
        ax.set_ylim(-0.6, len(order) - 0.4)
        for at in range(0, len(order), 2):  # bands: whose row a mark is in
            ax.axhspan(at - 0.5, at + 0.5, color=style.MUTED, alpha=0.09, linewidth=0)
        if logx:
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(_log_locator(*ax.get_xlim()))
            ax.xaxis.set_minor_formatter(NullFormatter())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: tick(v, spec)))
        if reference is not None:
            style.reference_line(ax, x=reference)
        ax.set_xlabel(_title(xlabel or x, spec))
    if legend and card and 1 in {*data["_card"]}:
        name = next(iter(data.loc[data["_card"] == 1, card]))
        look = {"marker": "o", "linestyle": "", "color": style.MUTED} | mark(1)
        axes[0].plot([], [], **look, label=f"open: {machines.label(name)}")
    if legend:
        style.legend(fig)
    text = _alt("Points", data, y, x, by, panel, spec, xlabel, card)
    return Picture(fig, data.drop(columns="_card"), text)


def bars(
    frame: pd.DataFrame, x: str, y: str, by: str, *, panel: str | None = None, spec: str = "",
    stacked: bool = False, low: str | None = None, high: str | None = None,
    xlabel: str | Mapping[str, str] | None = None, columns: int = 2, values: bool = True,
    card: str | None = None, logx: bool = False, reference: float | None = None,
    legend: bool = True,
) -> Picture:  # fmt: skip
    """Lying bars of length `x`, a row a category in `y`; parts named in `by` stacked or beside.

    `values` writes each row's length (of stacked bars the sum) at its end. `xlabel` names the axis,
    or by panel the axis of each. Where each row has one name, its bar lies in the middle. Bars are
    of the first value in `card`; the others are marks on them. Of stacked bars `low` and `high` are
    the ends of a line over the whole bar.
    """
    units = xlabel if isinstance(xlabel, Mapping) else {}
    xlabel = " or ".join(units.values()) if isinstance(xlabel, Mapping) else xlabel
    every = _data(frame, [x, y, by, panel, low, high, card])
    every["_card"] = _cards(every, card, by, panel)
    order = _ordered(every[y])[::-1]
    names = list(dict.fromkeys(every[by]))
    alone = not every.empty and (every.groupby(y, observed=True)[by].nunique() == 1).all()
    each = 1 if stacked or alone else len(names)
    tall = 0.9 + 0.2 * len(order) * max(each, 1.4)
    fig, axes = _panels(every, panel, tall, columns)
    for ax, shown in _each(axes, every, panel):
        part, marks = (shown[shown["_card"].eq(0) == first] for first in (True, False))
        start = np.zeros(len(order))
        size = 0.74 / each
        for at, name in enumerate(names):
            own = part[part[by] == name].drop_duplicates(y).set_index(y).reindex(order)
            length = own[x].to_numpy(dtype=float)
            shift = 0.0 if stacked or alone else -(at - (each - 1) / 2) * size
            rows = np.arange(len(order)) + shift
            error = None if stacked else _error_bars(own, x, low, high)
            drawn = ax.barh(
                rows, np.nan_to_num(length), height=size * 0.94, left=start if stacked else 0.0,
                xerr=None if error is None else np.nan_to_num(error), ecolor=style.INK, capsize=2.5,
                color=style.colour(str(name)), linewidth=0.0, label=str(name),
            )  # fmt: skip
            if stacked:
                start = start + np.nan_to_num(length)
                length = np.where(start > 0, start, np.nan)  # of the parts so far
            if values and (not stacked or at == len(names) - 1):
                ends = [formatted(v, spec) if np.isfinite(v) else "" for v in length]
                padding = 8 if every["_card"].any() else 3  # room for the marks of others
                ax.bar_label(drawn, ends, padding=padding, fontsize=8, color=style.INK)
            others = marks[marks[by] == name].groupby("_card")
            for one, own in others if not stacked else ():
                marked = [order.index(v) + shift for v in own[y]]
                look = {**mark(one), "linestyle": "", "color": style.INK}
                ax.plot(own[x], marked, **{"marker": "D", **look})
        if stacked and low and high:
            ends = part.groupby(y, observed=True)[[low, high]].first().reindex(order).astype(float)
            middle, half = ends.mean(axis=1), (ends[high] - ends[low]) / 2
            ax.errorbar(middle, range(len(order)), xerr=half, fmt="none",
                        ecolor=style.INK, elinewidth=1.6, capsize=3.5)  # fmt: skip
        ax.set_yticks(range(len(order)), [str(v) for v in order])
        ax.margins(x=0.14 if values else 0.04)
        if logx:
            ax.set_xscale("log")
        else:
            ax.set_xlim(left=0)
        if reference is not None:
            style.reference_line(ax, x=reference)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: tick(v, spec)))
        ax.grid(axis="y", visible=False)
        title = ax.get_title(loc="left").replace("\n", " ")
        ax.set_xlabel(_title(units.get(title, xlabel or x), spec))
    if legend and len(names) > 1:
        style.legend(fig)
    text = _alt("Bars", every, y, x, by, panel, spec, xlabel, card)
    return Picture(fig, every.drop(columns="_card"), text)


# --- parts ---------------------------------------------------------------------------------------


def _data(frame: pd.DataFrame, columns: Sequence[str | None]) -> pd.DataFrame:
    used = list(dict.fromkeys(c for c in columns if c is not None))
    return frame[used].dropna(subset=[c for c in columns[:2] if c]).reset_index(drop=True)


def _ordered(values: pd.Series) -> list[Any]:
    """Different values: of a categorical in its order, else as they come."""
    there = list(dict.fromkeys(values))
    if isinstance(values.dtype, pd.CategoricalDtype):
        return [value for value in values.dtype.categories if value in there]
    return there


def cards(data: pd.DataFrame, card: str, apart: Sequence[str]) -> list[str]:
    """Those in the column `card` that have marks of their own, in order.

    Published rows look like the first card's where the columns `apart` tell them from all others.
    """
    published = data[card] == MACHINE
    ours, others = (
        data.loc[which, [*apart]].drop_duplicates() for which in (published, ~published)
    )
    alone = ours.merge(others).empty and not others.empty
    names = dict.fromkeys(data[card].sort_values())
    return [str(name) for name in names if name != MACHINE or not alone]


def _cards(data: pd.DataFrame, card: str | None, by: str, panel: str | None) -> pd.Series:
    """The place of each row's card among those that have marks of their own."""
    if card is None:
        return pd.Series(0, data.index, name="_card")
    names = cards(data, card, [by, panel] if panel else [by])
    order = {name: at for at, name in enumerate(names)}
    return data[card].map(lambda name: order.get(name, 0)).astype(int).rename("_card")


def mark(card: int) -> dict[str, Any]:
    """How marks of a card look: filled, open, a cross, a plus sign."""
    if card == 0:
        return {}
    look = {"marker": "x" if card == 2 else "+"} if card > 1 else {"markerfacecolor": "none"}
    return {**look, "markeredgewidth": 1.1, "linewidth": 0.8, "markersize": 5.0}


def _panels(
    data: pd.DataFrame, panel: str | None, height: float, columns: int, share: bool = True
) -> tuple[Figure, list[Axes]]:
    count = max(data[panel].nunique(), 1) if panel else 1
    columns = min(count, columns)
    rows = -(-count // columns)
    fig, axes = style.new(height * rows + 0.2, columns, rows, squeeze=False, sharey=share)
    flat = list(axes.flat)
    for unused in flat[count:]:
        unused.set_axis_off()
    return fig, flat[:count]


def _each(
    axes: list[Axes], data: pd.DataFrame, panel: str | None
) -> Iterator[tuple[Axes, pd.DataFrame]]:
    if panel is None or data.empty:
        yield axes[0], data
        return
    columns = len({round(ax.get_position().x0, 3) for ax in axes})
    width = 72 // columns  # a longer title would lie on its neighbour's
    for ax, (title, part) in zip(axes, data.groupby(panel, sort=False, observed=True), strict=True):
        style.title(ax, textwrap.fill(str(title), width))
        yield ax, part


def _error_bars(rows: pd.DataFrame, x: str, low: str | None, high: str | None) -> np.ndarray | None:
    """How far error bars reach to both sides of a value, as matplotlib takes it."""
    if not low or not high:
        return None
    ends = np.stack([rows[x] - rows[low], rows[high] - rows[x]]).astype(float)
    return np.clip(ends, 0, None)


def _log_locator(low: float, high: float) -> LogLocator:
    """Ticks of a logarithmic axis between two ends: the fewer decades, the more in each."""
    decades = np.log10(high / low)
    subs = (1, 1.5, 2, 3, 4, 6) if decades < 1 else (1, 2, 5) if decades < 2.5 else (1,)
    return LogLocator(subs=subs)


def _scales(ax: Axes, logx: bool, logy: bool, grid: list, spec: str) -> None:
    if logx:
        whole = all(float(v).is_integer() for v in grid)
        powers = whole and all(float(np.log2(v)).is_integer() for v in grid)
        ax.set_xscale("log", base=2 if powers or not whole else 10)
        if whole and not powers:
            ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: formatted(v, ",d")))
    if logy:
        ax.set_yscale("log", nonpositive="mask")  # an error of zero is a gap
        ax.yaxis.set_major_locator(_log_locator(*ax.get_ylim()))
        ax.yaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: tick(v, spec)))
    if len(grid) <= 10 and all(isinstance(v, int | np.integer) for v in grid):
        ax.set_xticks(grid, [formatted(v, ",d") for v in grid])
        ax.xaxis.set_minor_locator(NullLocator())
        if len(grid) > 5:
            ax.tick_params(axis="x", labelsize=8, labelrotation=30)


def _end_labels(ax: Axes, ends: list[tuple[float, float, str]]) -> None:
    """Names at the right ends of their lines, pushed apart where they would lie on one another."""
    ax.margins(x=0.02)
    ax.autoscale_view()
    to_axes = ax.transData + ax.transAxes.inverted()
    points_at = [to_axes.transform((x, y)) for x, y, _ in ends]
    order = sorted(range(len(ends)), key=lambda at: points_at[at][1])
    heights = [float(points_at[at][1]) for at in order]
    for _ in range(60):
        for below, above in zip(range(len(order)), range(1, len(order)), strict=False):
            gap = heights[above] - heights[below]
            if gap < _LINE:
                heights[below] -= (_LINE - gap) / 2
                heights[above] += (_LINE - gap) / 2
        shift = max(0.0, heights[-1] - 1.0) if heights else 0.0
        heights = [h - shift for h in heights]
    for at, height in zip(order, heights, strict=True):
        name = ends[at][2]
        ax.annotate(
            name, xy=(1.0, height), xycoords="axes fraction", xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=9, color=style.colour(name),
            annotation_clip=False,
        )  # fmt: skip


def _mark_labels(ax: Axes, ends: list[tuple[float, float, str]]) -> None:
    """Names below their marks."""
    ax.margins(x=0.12, y=0.12)
    for x, y, name in ends:
        ax.annotate(
            name, xy=(x, y), xytext=(0, -6), textcoords="offset points", va="top",
            ha="center", fontsize=9, color=style.colour(name),
        )  # fmt: skip


def _title(text: str, spec: str) -> str:
    label = unit(spec)
    return f"{text}, {label}" if label and label != "×" else text


def _alt(
    kind: str, data: pd.DataFrame, x: str, y: str, by: str, panel: str | None, spec: str,
    label: str | None, card: str | None,
) -> str:  # fmt: skip
    """What was drawn, name by name: the ends of each line, or every value where there are few."""
    if data.empty:
        return "Nothing measured yet."
    parts = []
    keys = [name for name in (panel, by, card) if name is not None]
    for key, line in data.groupby(keys, sort=False, observed=True):
        names = ", ".join(str(k) for k in (key if isinstance(key, tuple) else (key,)))
        shown = line if len(data) <= MOST_NAMED else line.iloc[[0, -1]].drop_duplicates()
        values = [f"{formatted(p[y], spec)} at {p[x]}" for p in shown.to_dict("records")]
        parts.append(f"{names}: {', '.join(values)}")
    return f"{kind}: {label or y} by {x}. {'; '.join(parts)}."
