"""Rows shown: dots, lines, bars, areas and tables of a frame as `study.rows.load` gives it.

    rows = load("kernels").query("group == 'models' and dtype == 'bfloat16' and launch == 'python'")
    dots(ratio(rows, over="products"), "ratio", "model", panel="direction", most=7)

What a column means stands in `notebooks/study/columns.toml`: label, unit, names of its values, and
their order. Rows that differ in something that was not chosen are refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from numbers import Number

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from pandas.io.formats.style import Styler

from press import display, plots, style
from press.columns import (
    column,
    columns,
    looks,
    ordered_values,
    read,
    value_labels,
)
from press.formats import is_missing
from press.origin import stated
from press.plots import Picture
from press.published import published

__all__ = ["areas", "bars", "columns", "dots", "lines", "published", "table"]

Columns = str | Sequence[str]


# --- pictures ------------------------------------------------------------------------------------


def dots(
    rows: pd.DataFrame, x: str, y: str, by: str = "provider", *, panel: str | None = None,
    reference: float | None = None, most: int = 4, title: str = "",
) -> Picture:  # fmt: skip
    """A row a category in `y`, and on it a mark a name in `by` at its `x`.

    Args:
        rows: a row a case, as `study.rows.load` gives them. Those whose status is not "ok" have no
            mark.
        x: a column of numbers.
        y: a column whose values are the categories.
        by: a column whose values are the series.
        panel: a panel a value of this column.
        reference: where a thin line stands; of the column "ratio" by default at 1.
        most: how many series there may be.
        title: above the picture.

    Raises:
        ValueError: a column is missing, there are more series, or rows on one mark differ in
            something that was not chosen, such as their machine; with what to do.
    """
    reference = 1.0 if x == "ratio" and reference is None else reference
    return _picture(plots.dots, rows, x, y, by, panel, most, title, reference)


def lines(
    rows: pd.DataFrame, x: str, y: str, by: str = "provider", *, panel: str | None = None,
    most: int = 4, title: str = "",
) -> Picture:  # fmt: skip
    """A line a name in `by` over the numbers in `x`, at the height `y`; else as `dots`.

    Raises:
        ValueError: as of `dots`; or `x` has no numbers.
    """
    reference = 1.0 if y == "ratio" else None
    return _picture(plots.lines, rows, y, x, by, panel, most, title, reference)


def bars(
    rows: pd.DataFrame, x: str, y: str, by: str = "provider", *, panel: str | None = None,
    stacked: bool = False, reference: float | None = None, most: int = 4, title: str = "",
) -> Picture:  # fmt: skip
    """Lying bars from 0 to `x`, a group a category in `y`; else as `dots`.

    A name in `by` is a bar, or with `stacked` a part of one. Their axis is never logarithmic.

    Raises:
        ValueError: as of `dots`.
    """
    reference = 1.0 if x == "ratio" and reference is None else reference
    return _picture(plots.bars, rows, x, y, by, panel, most, title, reference, stacked=stacked)


@matplotlib.rc_context(style.RC)
def areas(panels: Mapping[str, pd.DataFrame], phases: Sequence[str]) -> Picture:
    """What is held over time, a panel a frame: stacked areas.

    Args:
        panels: by title, MiB by part as `study.allocator.Watch.phases` gives them; a column that
            is no value of `part` in columns.toml is left out.
        phases: what the time between 0 and 1, 1 and 2, and so on is called.
    """
    fig, known = Figure(figsize=(6.4, 2.6)), column("part").names
    axes = fig.subplots(1, max(len(panels), 1), sharey=True, squeeze=False)
    names = {n for frame in panels.values() for n, one in frame.items() if n in known and one.any()}
    ordered = ordered_values("part", names)
    colours = [style.look(slot)["color"] for slot in looks("part", ordered).values()]
    said = []
    for ax, (title, frame) in zip(axes.flat, panels.items(), strict=True):
        parts, labels = frame[ordered], value_labels("part", ordered)
        ax.stackplot(frame.index, parts.to_numpy().T, labels=labels, linewidth=0, colors=colours)
        ax.set_title(title)
        ax.set_xlim(0, len(phases))
        ax.set_xticks([at + 0.5 for at in range(len(phases))], phases)
        ax.grid(axis="x", visible=False)
        held = parts.sum(axis=1)
        phase = phases[min(int(held.idxmax()), len(phases) - 1)]
        said.append(f"{title}: at most {held.max():.3g} MiB, in {phase}")
    axes.flat[0].set_ylabel("MiB")
    style.legend(fig)
    data = pd.concat(dict(panels), names=["panel", "time"])
    return Picture(fig, data.reset_index(), f"Areas: MiB by part. {'; '.join(said)}.")


@matplotlib.rc_context(style.RC)
def _picture(
    kind: plots.Kind, rows: pd.DataFrame, value: str, at: str, by: str, panel: str | None,
    most: int, title: str, reference: float | None = None, stacked: bool = False,
) -> Picture:  # fmt: skip
    every = [*dict.fromkeys([*_listed(panel), by, at])]
    numbers = [value, *([at] if kind is plots.lines else [])]
    marks = _with_marks(rows, numbers, [*numbers, by, at], every)
    if marks.empty:
        return _nothing(rows, value, title)
    _require_alike(marks, every, "mark", 'a panel each: panel="{}"')
    of, keys = stated(marks), [*dict.fromkeys([*every, *marks.columns.intersection(["machine"])])]
    groups = marks.groupby(keys, dropna=False, observed=True, sort=False)
    marks = groups[[value]].median().reset_index()  # over repetitions
    names = ordered_values(by, marks[by])
    if len(names) > most:
        raise ValueError(
            f"{len(names)} values of {by} are more than the {most} that a picture tells apart: "
            f'choose, as with rows.query("{by} in {names[:most]}"), or most={len(names)} for all'
        )
    labels = pd.DataFrame({name: _labelled(name, marks[name]) for name in every})
    labels = labels.sort_values(every, kind="stable")
    marks = marks.loc[labels.index]
    place = _whole(marks[at]) if kind is plots.lines else labels[at]
    shown = pd.DataFrame({"value": marks[value], "place": place, "by": labels[by]})
    if panel:
        shown["panel"] = labels[panel]
    machines = [] if "machine" not in marks else marks["machine"].dropna().unique()
    where = f" ({read('machine', machines[0])})" if len(machines) == 1 else ""
    slots = looks(by, names)
    styles = {
        text: style.look(slot) | (style.RING if value in column(by).rings else {})
        for text, (value, slot) in zip(value_labels(by, names), slots.items(), strict=True)
    }  # fmt: skip
    chart = plots.Chart(
        shown, styles,
        column(value).label + where, column(value).format, at,
        kind is not plots.bars and plots.is_log(value, marks[value]), reference, stacked,
    )  # fmt: skip
    fig = plots.draw(kind, chart)
    if by != at:  # else the axis has the names
        style.legend(fig)
    if title:
        fig.suptitle(title, x=0.01, ha="left", fontsize=11)
    alt = chart.alt("Points" if kind is plots.dots else kind.__name__.capitalize())
    alt = f"{title.rstrip('.')}. {alt}" if title else alt
    return Picture(fig, marks[[*keys, value]].reset_index(drop=True), alt, of)


def _with_marks(
    rows: pd.DataFrame, numbers: list[str], needed: list[str], every: list[str]
) -> pd.DataFrame:
    """The rows that have numbers and a place."""
    if rows.empty:
        return rows
    _require_columns(rows, [*numbers, *every])
    there = rows[rows["status"] == "ok"] if "status" in rows else rows
    there = there.dropna(subset=list(dict.fromkeys(needed)))
    for name in numbers:
        if texts := [v for v in there[name] if not isinstance(v, Number)]:
            raise ValueError(f"{name} is no column of numbers, it has {texts[0]!r}: take another")
    return there.astype(dict.fromkeys(numbers, float))


def _nothing(rows: pd.DataFrame, value: str, title: str) -> Picture:
    """A picture that says why nothing is drawn."""
    counts = rows["status"].value_counts().items() if "status" in rows else ()
    found = ", ".join(f"{read('status', status)}: {n}" for status, n in counts) or "none is there"
    text = f"Nothing to draw: no row of {len(rows)} has a mark at {column(value).label} ({found})."
    fig = Figure(figsize=(6.4, 0.8))
    fig.text(0.01, 0.5, "\n".join(filter(None, [title, text])), fontsize=9)
    return Picture(fig, rows.iloc[:0], f"{title}. {text}" if title else text)


# --- tables --------------------------------------------------------------------------------------


def table(
    rows: pd.DataFrame, index: Columns, columns: Columns | None = None,
    values: Columns = "median_ms",
) -> Styler:  # fmt: skip
    """A pandas Styler with labels and units, to which `press.display.table` gives caption and name:
    of one value by `index` and `columns`, or of several values, a column each.

    Args:
        rows: as `study.rows.load` gives them. Several machines have a column each, of several
            values a line each. A number of a row whose status is not "ok" is a dash, unless the
            table shows "status" too.
        index: columns of which each combination is a line.
        columns: a column whose values are heads.
        values: of numbers or texts.

    Raises:
        ValueError: a column is missing; rows in one cell differ in something that was not chosen;
            several values have `columns`, too.
    """
    keys, heads, names = _listed(index), _listed(columns), _listed(values)
    if heads and names[1:]:
        raise ValueError(f"of several values each is a column: leave out columns={columns!r}")
    _require_columns(rows, [*keys, *heads, *names])
    if "machine" in rows and rows["machine"].nunique() > 1 and "machine" not in keys + heads:
        (keys if names[1:] else heads).append("machine")
    every = [*keys, *heads]
    shown = pd.DataFrame({name: _labelled(name, rows[name]) for name in every})
    flawed = rows["status"] != "ok" if "status" in rows else pd.Series(False, rows.index)
    cells = {}
    for name in names:
        cell, numeric = rows[name], rows[name].dtype.kind in "iuf"
        if numeric and "status" not in every + names:
            cell = cell.mask(flawed)
        there = rows[cell.notna()]
        there = there if numeric else there.drop_duplicates([*every, name])
        _require_alike(there, every, "cell", 'a line each: index=[..., "{}"]')
        cell = cell if numeric else cell.map(lambda one, name=name: read(name, one), "ignore")
        groups = cell.groupby([shown[key] for key in every], observed=True)
        cells[column(name).label] = groups.median() if numeric else groups.first()
    frame = pd.DataFrame(cells)
    formats = {column(name).label: column(name).format for name in names if column(name).format}
    if heads:
        frame = frame.iloc[:, 0].unstack(heads).sort_index(axis=1)
        formats = {"": column(names[0]).format} if formats else {}
        frame.columns = _index(frame.columns, [None] * len(heads))
    frame.index = _index(frame.index, [column(key).label for key in keys])
    frame.attrs = {"formats": formats, "of": stated(rows[~flawed])}
    styled = Styler(frame, uuid="fusedlib", cell_ids=False)
    for head in frame.columns:
        styled.format(partial(display.cell, spec=display.spec_of(head, formats)), subset=[head])
    return styled


def _index(index: pd.Index, names: list[str | None]) -> pd.Index:
    """An index of categories as one of texts."""
    if index.nlevels > 1:
        return pd.MultiIndex.from_tuples(list(index), names=names)
    return pd.Index(list(map(str, index)), name=names[0])


# --- rows that are shown -------------------------------------------------------------------------


def _labelled(name: str, values: pd.Series) -> pd.Series:
    """A column as it reads, its values in order."""
    ordered = ordered_values(name, values)
    place = {value: at for at, value in enumerate(ordered)}
    codes = [place[None if is_missing(value) else value] for value in values]
    texts = value_labels(name, ordered)
    return pd.Series(pd.Categorical.from_codes(codes, texts, ordered=True), values.index)


def _whole(values: pd.Series) -> pd.Series:
    return values.astype(int) if (values == values.round()).all() else values


def _listed(names: Columns | None) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def _require_columns(rows: pd.DataFrame, names: Iterable[str]) -> None:
    if absent := [name for name in dict.fromkeys(names) if name not in rows]:
        known = ", ".join(name for name in columns() if name in rows)
        how = ": study.rows.ratio adds it" if absent[0] == "ratio" else f"; it has {known}"
        raise ValueError(f"the frame has no column {absent[0]!r}{how}")


def _require_alike(rows: pd.DataFrame, keys: list[str], where: str, instead: str) -> None:
    """Refuse rows of one mark or cell that differ in something that is not among `keys`."""
    known = columns()
    repeats = [name for name, says in known.items() if says.repeats and name in rows]
    groups = rows.groupby(keys, dropna=False, observed=True)
    fields = [name for name, says in known.items() if says.field and name in rows]
    differing = [n for n in fields if n not in keys and (groups[n].nunique(dropna=False) > 1).any()]
    if differing:
        name = min(differing, key=lambda one: rows[one].nunique())  # one that others follow from
        values = [value for value in ordered_values(name, rows[name]) if value is not None]
        raise ValueError(
            f"rows that lie on one {where} differ in {', '.join(differing)} ({name}: "
            f"{', '.join(map(repr, values[:6]))}): choose, as with "
            f'rows.query("{name} == {values[0]!r}"), or {instead.format(name)}'
        )
    twice = rows[rows.duplicated(list(dict.fromkeys([*keys, *repeats])), keep=False)]
    if len(twice):  # in something that columns.toml does not call a field
        texts = twice.drop(columns=[*keys, *repeats]).select_dtypes(exclude="floating").map(str)
        counts = texts.groupby(twice.groupby(keys, dropna=False, observed=True).ngroup()).nunique()
        others = [*counts.columns[(counts > 1).any()]][:3] or ["their figures alone"]
        raise ValueError(
            f"rows that lie on one {where} differ in {', '.join(others)}: choose one of each"
        )
