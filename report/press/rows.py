"""Verbs over recorded rows: what a notebook shows in one to five lines.

    rows = study("03_kernels")
    bf16 = rows.of(dtype="bf16", direction="forward+backward", launch="interleaved")
    bf16.speed(of="fused").points(y="model")

A selection remembers what was chosen and writes its caption. Labels, units, names and orders come
from the study's columns (`measure.study.Column`). Ratios are taken inside a session, where all ran
interleaved; a figure is of the newest recording, with the range over all. Rows that differ in
something that was not chosen are refused.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import pandas as pd

from fusedlib.bench import machine as machines
from measure import study as studies
from measure.racing import rivals
from measure.recording import results
from measure.study import Column, SentenceError, Study
from press import display, plots, style
from press.analysis import NoRowsError, over_recordings, ratios, unmeasured
from press.published import MACHINE

THIS = "this machine"
TIME = "median_ms"
RATIO = Column("times as fast", "3×")
WORDS = {"ratio": RATIO, TIME: Column("time", "3 ms"), "machine": Column("GPU"),
         "provider": Column("implementation"), "status": Column("status"),
         "reason": Column("reason")}  # fmt: skip
"""Columns that all studies share."""
MOST_MACHINES = 3
WORDED = ("title", "caption", "name", "note")
"""Options of a picture or table that are words, and not handed on to what draws it."""


class _Kept(dict[str, Any]):
    """What was chosen, by column. It never changes: pandas copies what a frame remembers for each
    selection, deeply, which was a fifth of the time of a study's claims.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Kept":
        return self


class Rows(pd.DataFrame):
    """Rows of one study; a data frame whose selections remember themselves.

    `attrs` holds `study` (its name), `kept` (what was chosen, by column), and `value` (the column
    that is drawn: a time, or a ratio after `speed`).
    """

    @property
    def _constructor(self) -> "type[Rows]":
        return Rows

    # --- choosing --------------------------------------------------------------------------------

    def of(self, **chosen: Any) -> "Rows":
        """The rows whose columns have these values; a list offers several, None is a missing one.

        A value may be written as it is recorded ("bfloat16") or as it is shown ("bf16").

        Raises:
            ValueError: an unknown column, or no row has the value; with those there are.
        """
        rows = self
        for name, wanted in chosen.items():
            rows = rows._with_value(name, wanted if isinstance(wanted, list) else [wanted])
            rows = rows._remember(kept=_Kept(rows._kept | {name: wanted}))
        return rows._remember()

    def but(self, **left_out: Any) -> "Rows":
        """The rows without those whose columns have these values."""
        rows = self
        for name, values in left_out.items():
            listed = values if isinstance(values, list) else [values]
            rows = rows[~rows[name].isin(rows._recorded(name, listed))]
        return rows._remember()

    def beside(self, tables: pd.DataFrame) -> "Rows":
        """These rows and those of published tables, as `press.published.as_rows` gives them.

        Other rows of the study may stand beside, too. Published rows are of no machine. A picture
        gives them filled marks where `by` and `panel` tell them apart, else marks of their own; a
        table gives them a column.
        """
        order = list(dict.fromkeys([*self["machine"].cat.categories, MACHINE]))
        both = Rows(pd.concat([pd.DataFrame(self), pd.DataFrame(tables)], ignore_index=True))
        both["machine"] = pd.Categorical(both["machine"], order)
        both.attrs = dict(self.attrs)
        return both

    # --- comparing -------------------------------------------------------------------------------

    def speed(self, *, of: str | None = None, over: str | None = None) -> "Rows":
        """How many times as fast, in the same session: `of` as each other, or each as `over`.

        Args:
            of: an implementation; each other one's row says how many times as fast `of` is.
            over: an implementation; each other one's row says how many times as fast it is.

        Raises:
            ValueError: both or none are given, or no session has that implementation.
        """
        if (of is None) == (over is None):
            raise SentenceError("speed takes one of `of` and `over`: whose speed, or beside whose")
        base = self._recorded("provider", [of or over])[0]
        compared = Rows(ratios(self[self._has_figures()], base))
        compared["machine"] = compared["machine"].astype(self["machine"].dtype)
        if not len(compared):
            there = ", ".join(map(style.label, self["provider"].dropna().unique()))
            raise NoRowsError(
                f"no session of these rows has {style.label(base)} beside another; there are "
                f"{there}"
            )
        if of:
            compared["ratio"] = 1 / compared["ratio"].astype(float)
        sides = (
            f"{style.label(base)} against each other one" if of else f"against {style.label(base)}"
        )
        compared.attrs = self.attrs | {"value": "ratio", "sides": sides}
        return compared

    def per(self, *keys: str) -> "Rows":
        """A line a group of these columns: `value` is the newest recording's, `low` and `high`
        their range, `n` how many recordings.

        Raises:
            ValueError: rows of a group differ in something that neither was chosen nor is a key.
        """
        rows = self._measured()
        by = list(dict.fromkeys([*keys, "machine"]))
        rows._require_alike(by)
        lines = Rows(over_recordings(rows, by, self._value))
        lines.attrs = dict(self.attrs)
        return lines

    def extent(self, by: str = "provider") -> dict[str, tuple[float, float]]:
        """Least and greatest over cases, by name; of each case in the newest recording.

        Raises:
            ValueError: the rows are of more than one machine.
        """
        self._require_one_machine()
        rows = self._measured()
        cases = over_recordings(rows, [by, "case"], self._value)
        ends = cases.groupby(by, observed=True)["value"].agg(["min", "max"])
        return {str(name): (low, high) for name, low, high in ends.itertuples()}

    def count(self, column: str) -> int:
        """How many different values a column has."""
        return int(self._column(column).nunique())

    # --- showing ---------------------------------------------------------------------------------

    def points(
        self, y: str, x: str | None = None, by: str = "provider",
        panel: str | Sequence[str] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Draw a row a value of `y`, and on it a mark a name in `by`.

        Args:
            x: the column that is drawn; by default the ratio after `speed`, else the time.
            panel: a panel a value; of several columns a panel each combination.
            options: `title`, `name`, `note` of the figure, or `caption` in place of the title and
                of what was chosen; others go to `press.plots`.
        """
        rows = self._drawing(x)
        reference = 1.0 if rows._value == "ratio" else None
        look = {"reference": reference, "share": True, **options}
        rows._draw(plots.points, "value", y, by, panel, look)

    def lines(
        self, x: str, y: str | None = None, by: str = "provider",
        panel: str | Sequence[str] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Draw a line a name in `by` over `x`; `y` is by default the ratio or the time."""
        rows = self._drawing(y)
        reference = 1.0 if rows._value == "ratio" else None
        scales = {"logx": rows._says(x).log, "logy": rows._says(rows._value).log}
        rows._draw(plots.lines, x, "value", by, panel, {"reference": reference, **scales} | options)

    def bars(
        self, y: str, x: str | None = None, by: str = "provider",
        panel: str | Sequence[str] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Draw lying bars, a category a value of `y`; parts named in `by` beside each other, or
        stacked with `stacked=True`. Stacked bars are a bar a machine and have no whiskers, unless
        `span` names two columns, the least and the greatest of what a bar's parts come to.
        """
        self._drawing(x)._draw(plots.bars, "value", y, by, panel, options)

    def table(
        self, rows: str | Sequence[str], columns: str = "provider",
        value: str | Sequence[str] | None = None, cell: str = "newest", **options: Any,
    ) -> None:  # fmt: skip
        """Show a table of one value, a column a name and, of several machines, a machine.

        Args:
            rows: columns of which each combination is a line.
            value: the column that is shown; by default the ratio after `speed`, else the time. Of
                several each has a column, in place of `columns`: of numbers the newest
                recording's, the last of texts. Of one text each different one is listed.
            cell: "newest" of the recordings, or "extent", the least and the greatest over cases.
            options: `title`, `name`, `note`, or `caption` in place of the title and of what was
                chosen.
        """
        keys = [rows] if isinstance(rows, str) else list(rows)
        if value is not None and not isinstance(value, str):
            return self._facts(keys, value, options)
        shown = self._drawing(value)
        tables = set(shown["machine"]) - {*shown._machines}
        heads = [columns, "machine"] if len(shown._machines) + len(tables) > 1 else [columns]
        if not pd.api.types.is_numeric_dtype(shown[shown._value]):
            cells = shown._texts([*keys, *heads])
        else:
            extent = cell == "extent"
            cells = shown._extents([*keys, *heads]) if extent else shown.per(*keys, *heads)
        frame = shown._named(cells, [*keys, *heads])
        placed = frame.set_index([*keys, *heads])["value"].to_dict()
        lines, across = (
            list(dict.fromkeys(frame[names].sort_values(names).itertuples(index=False, name=None)))
            for names in (keys, heads)
        )
        wide = pd.DataFrame(
            [[placed.get((*line, *head)) for head in across] for line in lines],
            pd.MultiIndex.from_tuples(lines, names=[shown._says(key).label for key in keys]),
            pd.MultiIndex.from_tuples(across) if heads[1:] else [head for (head,) in across],
        )
        formats = {shown._says(key).label: shown._says(key).format for key in keys}
        formats = {label: spec for label, spec in formats.items() if spec}
        formats[""] = shown._says(shown._value).format
        display.table(wide, formats=formats, **shown._words("table", options))
        return None

    def unmeasured(self, by: str = "provider", **options: Any) -> None:
        """Show which cases have no figure, named by a column, and why."""
        rows = self.assign(**{by: [self._as_read(by, name) for name in self._column(by)]})
        words = self._words("table", {"title": "Cases without a figure"} | options)
        display.table(unmeasured(rows, by), empty="none", **words)

    def explore(self, *menus: str) -> "Rows":
        """The first choices of these columns that have rows together, and in words which others
        there are: `rows.explore("dtype").points(y="model")`. One that was chosen before is kept.
        """
        values = {n: self._ordered(n, self._column(n).dropna().unique()) for n in menus}
        there = self[self._has_figures()][list(menus)].dropna()
        at = there.apply(lambda column: column.map(values[column.name].index).astype(int))
        if not len(at):
            return self
        first = at.sort_values(list(menus)).iloc[0]
        chosen = {name: values[name][first[name]] for name in menus}
        others = {name: [v for v in values[name] if v != chosen[name]] for name in menus}
        text = "; ".join(
            f"{self._says(name).label}: {', '.join(self._as_read(name, v) for v in listed)}"
            for name, listed in others.items() if listed
        )  # fmt: skip
        if text:
            name, value = next((name, listed[0]) for name, listed in others.items() if listed)
            written = self._as_read(name, value) if isinstance(value, str) else value.item()
            display.prose(
                f"Others to see: {text}. Write, say, `.of({name}={written!r})` before `.explore`."
            )
        return self.of(**chosen)

    def caption(self) -> str:
        """What is shown and what was chosen, in words; of one machine alone also which."""
        kept = {name: value for name, value in self._kept.items() if name != "machine"}
        chosen = [self._as_read(name, value) for name, value in kept.items()]
        value = self._says(self._value).label if self._value else ""
        what = f"{value}, {self.attrs['sides']}" if "sides" in self.attrs else value
        choice = f"({', '.join(chosen)})" if chosen else ""
        text = f"{what[:1].upper()}{what[1:]} {choice}".strip() or "What was measured"
        if len(self._machines) > 1:
            return f"{text}."
        return f"{', '.join([text, *map(self._machine_label, self._machines)])}."

    def _marks(self, cards: Sequence[str], first: str) -> str:
        """Which marks are whose, where a picture shows several machines."""
        names = map(self._machine_label, cards)
        marks = zip([first, "open marks", "crosses", "plus signs"], names, strict=False)
        text = ", ".join(f"{mark}: {name}" for mark, name in marks)
        return f" {text}." if cards[1:] else ""

    # --- parts -----------------------------------------------------------------------------------

    @property
    def study(self) -> Study:
        """What the rows are of."""
        return studies.load(self.attrs["study"])

    @property
    def _kept(self) -> dict[str, Any]:
        return dict(self.attrs.get("kept", {}))

    @property
    def _value(self) -> str:
        return str(self.attrs.get("value", TIME))

    @property
    def _machines(self) -> list[str]:
        """Those that have a row, the leading one first; published rows are of none."""
        there = {*(self[self._has_figures()] if "status" in self else self)["machine"]}
        there -= {MACHINE}
        return [str(name) for name in self["machine"].cat.categories if name in there]

    def _has_figures(self) -> pd.Series:
        """Which rows' figures may be shown."""
        return self["status"].isin(self.study.shown)

    def _remember(self, **attributes: Any) -> "Rows":
        chosen = Rows(self.copy(deep=False))
        chosen.attrs = self.attrs | attributes
        return chosen

    def _says(self, column: str) -> Column:
        """What a column means; one that no study declares is called as it is."""
        return self.study.columns.get(column) or WORDS.get(column) or Column(column)

    def _column(self, name: str) -> pd.Series:
        if name not in self:
            known = [c for c in (*self.study.columns, *WORDS) if c in self]
            raise SentenceError(
                f"{self.attrs['study']} has no column {name!r}; those that its pictures use: "
                f"{', '.join(dict.fromkeys(known))}; all: rows.columns"
            )
        return self[name]

    def _recorded(self, name: str, values: Iterable[Any]) -> list[Any]:
        """Values as they are recorded, of values as they are shown."""
        self._column(name)
        names = rivals.labels() if name == "provider" else self._says(name).names
        if name == "machine":
            names = {m: machines.label(m) for m in self["machine"].cat.categories}
        back = {shown: recorded for recorded, shown in names.items()}
        if name == "machine" and machines.key() in names:
            back[THIS] = machines.key()
        return [back.get(v, v) if isinstance(v, str) else v for v in values]

    def _with_value(self, name: str, values: list[Any]) -> "Rows":
        recorded = self._recorded(name, values)
        column = self[name]
        keep = column.isin([v for v in recorded if v is not None])
        if None in recorded:
            keep |= column.isna()
        there = column.dropna().unique()
        absent = [v for v in recorded if v is not None and v not in there]
        if absent and (len(absent) == len(recorded) or name in self.study.columns):
            known = ", ".join(self._as_read(name, v) for v in self._ordered(name, there))
            kept = ", ".join(f"{n} = {self._as_read(n, v)}" for n, v in self._kept.items())
            where = f" of those with {kept}" if kept else ""
            wanted = values[recorded.index(absent[0])]
            raise NoRowsError(
                f"no row{where} has {name} = {wanted!r}; there are {known or 'none at all'}"
            )
        return self[keep]

    def _ordered(self, name: str, values: Iterable[Any]) -> list[Any]:
        """Values in the order in which they are shown."""
        slots = {rival.name: rival.slot for rival in rivals.RIVALS.values()}
        dtype = self[name].dtype
        order: Any = dtype.categories if isinstance(dtype, pd.CategoricalDtype) else ()
        shared: dict[str, Any] = {"provider": sorted(slots, key=slots.__getitem__)}
        known = [*(self._says(name).names or shared.get(name, order))]
        listed = [v for v in values if not pd.isna(v)]
        if not known and all(isinstance(v, Number) for v in listed):
            return sorted(listed)
        order = {value: at for at, value in enumerate(known)}
        return sorted(listed, key=lambda v: order.get(v, len(order)))

    def _as_read(self, name: str, value: Any) -> str:
        if isinstance(value, list):
            return " or ".join(self._as_read(name, one) for one in value)
        if name == "provider":
            return style.label(str(value))
        if name == "machine":
            return self._machine_label(str(value))
        if value is None or (isinstance(value, float) and pd.isna(value)):
            return "none"
        says = self._says(name)
        if isinstance(value, bool | np.bool_) and value not in says.names:
            return says.label if value else f"no {says.label}"
        number = isinstance(value, Number)
        if number and value not in says.names:
            return display.formatted(
                value, says.format or (",d" if float(value).is_integer() else "")
            )
        return str(says.names.get(value, value))

    @staticmethod
    def _machine_label(name: str) -> str:
        return THIS if name == machines.key() else machines.label(name)

    def _named(self, frame: pd.DataFrame, columns: Iterable[str]) -> pd.DataFrame:
        """A frame whose columns read as they are shown, in the order in which they are shown."""
        named = {}
        for name in columns:
            order = self._ordered(name, frame[name].unique())
            numbers = not self._says(name).names and pd.api.types.is_numeric_dtype(frame[name])
            whole = numbers and all(v == int(v) for v in order)
            plain = [int(v) for v in order] if whole else order
            texts = plain if numbers else [self._as_read(name, v) for v in order]
            read = dict(zip(order, texts, strict=True))
            categories = list(dict.fromkeys(texts))
            named[name] = pd.Categorical(frame[name].map(read), categories, ordered=True)
        return pd.DataFrame(frame).assign(**named).sort_values(list(columns))

    def _drawing(self, value: str | None) -> "Rows":
        """The rows with the column that is drawn."""
        if value is not None:
            self._column(value)
        rows = self._remember(value=value or self._value)
        if len(rows._machines) > MOST_MACHINES:
            names = ", ".join(map(self._machine_label, rows._machines))
            raise SentenceError(
                f"a picture tells three machines apart, not {names}: choose with .of(machine=...)"
            )
        return rows

    def _measured(self) -> "Rows":
        """The rows that have a figure."""
        rows = self[self._has_figures() & self[self._value].notna()]
        if not len(rows):
            raise NoRowsError(f"none of these rows has a {self._says(self._value).label}")
        return rows._remember()

    def _require_one_machine(self) -> None:
        if len(self._machines) > 1:
            names = ", ".join(map(self._machine_label, self._machines))
            raise SentenceError(f"these rows are of {names}: choose one, as with .of(machine=...)")

    def _require_alike(self, keys: Sequence[str]) -> None:
        """Refuse to merge rows that differ in a field of their cases that is no key.

        Fields that repeat a measurement, such as a seed, may differ.
        """
        may_differ = {*keys, *self.study.repeats}
        fields = [f for f in self.study.fields if f in self and f not in may_differ]
        # A name may be a field of some cases and a list of figures of others.
        lists = {f: self[f].map(str) for f in fields if self[f].map(type).eq(list).any()}
        groups = self.assign(**lists).groupby([*keys, "recording"], observed=True, dropna=False)
        counts = groups[fields].nunique(dropna=False).max()
        if differing := [name for name in fields if counts[name] > 1]:
            name = differing[0]
            values = self._ordered(name, self[name].unique())
            there = ", ".join(self._as_read(name, v) for v in values[:6])
            raise SentenceError(
                f"these rows differ in {', '.join(differing)} ({name}: {there}): choose with "
                f".of({name}=...), or give each a panel"
            )

    def _extents(self, keys: Sequence[str]) -> pd.DataFrame:
        """Least and greatest over the cases of a group, as `value`, in the newest recording."""
        cases = over_recordings(self._measured(), [*keys, "case"], self._value)
        groups = cases.groupby([*keys], observed=True)["value"]
        return groups.agg(lambda each: (each.min(), each.max())).reset_index()

    def _texts(self, keys: Sequence[str]) -> pd.DataFrame:
        """Of each group the different texts, as and in the order in which they are shown."""
        rows = self._measured()
        rows._require_alike(list(dict.fromkeys([*keys, "machine"])))

        def listed(texts: pd.Series) -> str:
            ordered = self._ordered(self._value, texts.unique())
            return ", ".join(self._as_read(self._value, text) for text in ordered)

        each = rows.groupby([*keys], observed=True, dropna=False)[self._value].agg(listed)
        return each.rename("value").reset_index()

    def _facts(self, keys: list[str], values: Sequence[str], options: Mapping[str, Any]) -> None:
        """A table with a column a figure: the newest recording's, of a text the last."""
        for name in (*keys, *values):
            self._column(name)
        keys = [*keys, "machine"] if self._machines[1:] else keys
        rows = self[self._has_figures()]._remember()
        each = rows.groupby(keys, observed=True, sort=False)
        texts = {name: not pd.api.types.is_numeric_dtype(rows[name]) for name in values}
        if not all(texts.values()):
            rows._require_alike(list(dict.fromkeys([*keys, "machine"])))
        cells = pd.DataFrame({
            name: each[name].last() if texts[name]
            else over_recordings(rows, keys, name).set_index(keys)["value"]
            for name in values
        }).reindex(each.size().index)  # fmt: skip
        frame = self._named(cells.reset_index(), keys).set_index(keys)
        frame = frame.rename_axis([self._says(key).label for key in keys])
        formats = {self._says(name).label: self._says(name).format for name in values}
        display.table(
            frame.rename(columns={name: self._says(name).label for name in values}),
            formats={name: spec for name, spec in formats.items() if spec},
            **self._remember(value="")._words("table", options),
        )

    def _draw(
        self, plot: Callable[..., plots.Picture], x: str, y: str, by: str,
        panel: str | Sequence[str] | None, options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        panels = [] if panel is None else [panel] if isinstance(panel, str) else list(panel)
        drawn = {name for name in (x, y) if name != "value"}
        keys = [*dict.fromkeys([*panels, *drawn, by])]
        for name in keys:
            self._column(name)
        lines = self.per(*keys)
        if span := options.get("span"):
            whole = [name for name in dict.fromkeys([*keys, "machine"]) if name != by]
            ends = self.groupby(whole, observed=True).agg({span[0]: "min", span[1]: "max"})
            joined = lines.drop(columns=["low", "high"]).join(
                ends.set_axis(["low", "high"], axis=1), on=whole
            )
            lines = joined._remember()
        frame = self._named(lines, [*keys, "machine"])
        if by == "provider":  # `plots` gives names their labels, and colours by name
            frame[by] = frame[by].astype(str).map({style.label(n): n for n in lines[by].unique()})
        for slot, name in enumerate(self._says(by).names.values()):
            with contextlib.suppress(ValueError):  # it has a colour, the same in every figure
                style.register(name, first=slot)
        if panels:
            texts = frame[panels].astype(object).fillna("").astype(str)
            frame["panel"] = [", ".join(filter(None, row)) for row in texts.itertuples(index=False)]
        value = self._says(self._value)
        titles = {"xlabel" if x == "value" else "ylabel": value.label}
        if plot is plots.lines:
            titles["xlabel"] = self._says(x).label
        ranged = (frame["low"] < frame["high"]).any() and (span or not options.get("stacked"))
        wide = {"low": "low", "high": "high"} if ranged else {}
        own = {k: v for k, v in options.items() if k not in (*WORDED, "span")}
        card = "machine" if frame["machine"].nunique() > 1 else None
        if card and options.get("stacked"):  # no marks of others lie on parts: a bar a machine
            names = frame["machine"].astype(str)
            frame, card = frame.assign(**{y: frame[y].astype(str) + ", " + names}), None
        picture = plot(
            frame, x, y, by, panel="panel" if panels else None, spec=value.format, card=card,
            **(titles | wide | own),
        )  # fmt: skip
        words = self._words("figure", options)
        bars = plot is plots.bars
        if card:
            cards = plots.cards(frame, card, [by, *(["panel"] if panels else [])])
            words["caption"] += self._marks(cards, "Bars" if bars else "Filled marks")
        if wide and not span:
            ends = {plots.lines: "Bands", plots.points: "Bars"}.get(plot, "Whiskers")
            words["caption"] += f" {ends}: range over recordings."
        words.pop("note", None)
        display.figure(picture, **words)

    def _words(self, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Caption, name and note of a figure or table."""
        title = options.get("title")
        caption = f"{title.rstrip('.')}. {self.caption()}" if title else self.caption()
        if given := options.get("caption"):
            only = self._machines[:1] if len(self._machines) == 1 else []
            caption = " ".join([given, *(f"{self._machine_label(name)}." for name in only)])
        short = re.sub(r"^\d+_", "", self.attrs["study"])
        words = re.findall(r"[a-z0-9]+", f"{short} {title or self.caption()}".lower())
        return {
            "caption": caption, "name": options.get("name") or "-".join(words[:8]),
            "note": options.get("note"), "machines": self._machines,
        }  # fmt: skip


def study(name: str, shown: str | None = None) -> Rows:
    """All rows of a study, whatever became of them, with the columns that follow from others.

    Args:
        name: of the study, such as "03_kernels" or "kernels".
        shown: a machine, such as "H200" or "this machine"; by default those whose recordings are
            part of the repository.

    Raises:
        ValueError: an unknown study, or a machine that has no rows of it.
    """
    rows = _rows(results.Recorder(studies.load(name).name, profile="quick"))
    every = [str(machine) for machine in rows["machine"].cat.categories]
    if shown is None:
        return rows[rows["machine"].isin(_recorded_machines())]._remember()
    key = machines.key() if shown == THIS else next(
        (m for m in every if shown in (m, machines.label(m))), shown
    )  # fmt: skip
    chosen = rows[rows["machine"] == key]
    if not len(chosen):
        there = [rows._machine_label(m) for m in every if (rows["machine"] == m).any()]
        how = "; the measuring cell gives it some" if shown == THIS else ""
        raise NoRowsError(
            f"{shown} has no rows of {rows.study.name}; those that have: {', '.join(there)}{how}"
        )
    return chosen._remember()


def run_here(name: str, sizes: Mapping[str, Any] | None = None, **knobs: Any) -> Rows:
    """Measure on this machine what its recording lacks; the recorded rows with this machine's.

    Args:
        name: of the study.
        sizes: of what is measured, by the names of the study's `Sizes`, and `profile`.
        knobs: further ones, which come first.

    Raises:
        ValueError: an unknown name or a value that does not fit, with what is allowed.
    """
    recorder = studies.measure(name, sizes or {}, **knobs)
    rows = _rows(recorder)
    return rows[rows["machine"].isin({*_recorded_machines(), machines.key()})]._remember()


def _rows(recorder: results.Recorder) -> Rows:
    one = studies.load(recorder.study)
    rows = Rows(one.derived(recorder.rows()))
    rows.attrs = {"study": one.name}
    return rows


def _recorded_machines() -> set[str]:
    return {recording.machine for recording in results.recordings() if recording.is_committed}
