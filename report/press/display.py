"""What a notebook shows: prose, claims, tables, figures, each as one output with its meaning.

JupyterLab reads the usual mime types; the report reads the metadata `fusedlib` of the same output
(kind, caption, alternative text, name) and, for tables, the cells themselves as JSON.
Captions, notes, prose and claims are Markdown (maths in `$...$`); cells and alternative texts
are plain text.
"""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
from pandas.io.formats.style import Styler

from press.formats import MISSING, formatted, is_missing, number
from press.plots import Picture

TABLE_MIME = "application/vnd.fusedlib.table+json"
_NUMBER = re.compile(r"[−+±<>≤≥≈~]*\s*\d[\d,.  ]*(e[+-]?\d+)?(\s*([×±%–(/]|[^\W\d]).*)?")


def prose(text: str) -> None:
    """Show a Markdown paragraph whose numbers were interpolated from rows."""
    emit({"text/markdown": text, "text/plain": text}, {"kind": "prose"})


def claim(sentence: str, marks: Sequence[str], name: str) -> None:
    """Show a claim and a mark a machine; `press.say` calls this."""
    _check_name("claim", name)
    text = f"{sentence} *({'; '.join(marks)})*"
    meaning = {"kind": "claim", "name": name, "sentence": sentence, "marks": list(marks)}
    emit({"text/markdown": text, "text/plain": text.replace("*", "")}, meaning)


def table(
    frame: "pd.DataFrame | Styler", caption: str, name: str, note: str | None = None,
    topic: str = "",
) -> None:  # fmt: skip
    """Show a table.

    Args:
        frame: cells as strings, or numbers, which get four significant digits; None and NaN show
            as a dash. Columns may be a two-level MultiIndex (group, column). An index other than
            the plain 0..n-1 becomes the leading columns. Or from `press.show.table`, whose formats
            come with it.
        caption: Markdown; says what is shown, of which machine, in which unit.
        name: anchor in the report, of lower-case letters, digits and dashes; unique in a notebook.
        note: Markdown below the table.
        topic: whose rows they are, for the command that measures them again.
    """
    _check_name("table", name)
    frame = frame.data if isinstance(frame, Styler) else frame
    note = " ".join(filter(None, [note, _older(frame.attrs.get("of", ""))])) or None
    meaning: dict[str, Any] = {"caption": caption, "note": note, "name": name, "topic": topic}
    shown = pd.DataFrame({"not measured yet": []}) if frame.empty else frame
    content = table_json(shown, frame.attrs.get("formats")) | meaning
    heads = [" ".join(filter(None, names)) for names in content["columns"]]
    cells = pd.DataFrame(content["rows"], columns=heads)
    page = f"<p>{html.escape(caption)}</p>{cells.to_html(index=False)}"
    data = {TABLE_MIME: content, "text/html": page, "text/plain": cells.to_string(index=False)}
    emit(data, {"kind": "table", **meaning})


def figure(
    pictures: "Picture | Mapping[str, Picture]", caption: str, name: str, topic: str = ""
) -> None:
    """Show a picture of `press.show` as SVG, with its data, alternative text and dates.

    Args:
        pictures: one, or several by name, of which a reader of the page chooses one and the PDF has
            the first.
        caption: Markdown; says what is drawn, of which machine, what bands and bars mean.
        name: anchor in the report and its file in `figures`, of lower-case letters, digits and
            dashes; no other notebook has it.
        topic: whose rows it shows, for the command that measures them again.
    """
    _check_name("figure", name)
    tabs = pictures if isinstance(pictures, Mapping) else {"": pictures}
    frames = [one.data.assign(tab=tab) if tab else one.data for tab, one in tabs.items()]
    first = next(iter(tabs.values()))
    meaning: dict[str, Any] = {
        "kind": "figure", "caption": " ".join(filter(None, [caption, _older(first.of)])),
        "name": name, "alt": first.alt, "data": pd.concat(frames).to_csv(index=False),
        "topic": topic,
    }  # fmt: skip
    drawn = [
        {"name": tab, "svg": one.svg, "alt": one.alt, "of": one.of if one is not first else ""}
        for tab, one in tabs.items()
    ]
    if len(drawn) > 1:
        meaning["tabs"] = drawn
    page = "".join(f"<p>{html.escape(one['name'])}</p>{one['svg']}" for one in drawn)
    page = f"<div style='background: white'>{page}<p>{html.escape(meaning['caption'])}</p></div>"
    data = {"image/svg+xml": drawn[0]["svg"], "text/html": page, "text/plain": meaning["alt"]}
    emit(data, meaning)


def _older(of: str) -> str:
    """What is said of rows of another fusedlib."""
    return f"*Older rows: {of}.*" if of else ""


def table_json(frame: pd.DataFrame, formats: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Cells, headers and alignment of a frame as JSON.

    Returns:
        `columns`: for each column its header cells from the top (one or two); `stub`: how many
        leading columns name the row; `align`: "left" or "right" for each column; `rows`: cells.
    """
    formats, index = formats or {}, frame.index
    plain = isinstance(index, pd.RangeIndex) and index.name is None
    levels = [] if plain else [index.get_level_values(at) for at in range(index.nlevels)]
    stub = [[cell(value, formats.get(level.name)) for value in level] for level in levels]
    specs = [spec_of(label, formats) for label in frame.columns]
    body = [[cell(value, spec) for value in frame.iloc[:, at]] for at, spec in enumerate(specs)]
    heads = [["", "" if level.name is None else str(level.name)] for level in levels]
    return {
        "columns": [head[-frame.columns.nlevels :] for head in heads]
        + [[*map(cell, _parts(label))] for label in frame.columns],
        "stub": len(stub),
        "align": ["left"] * len(stub) + [_alignment(column) for column in body],
        "rows": [list(row) for row in zip(*_once(stub), *body, strict=True)],
    }


def _once(stub: Sequence[list[str]]) -> list[list[str]]:
    """Names of rows; an outer level shows a name in the first of its rows alone."""
    shown = [list(level) for level in stub]
    for depth, level in enumerate(shown[:-1], 1):
        keys = list(zip(*stub[:depth], strict=True))
        for at in range(1, len(keys)):
            if keys[at] == keys[at - 1]:
                level[at] = ""
    return shown


def header_groups(columns: Iterable[Sequence[str]]) -> list[tuple[str, int]]:
    """Neighbouring columns of one group as (label, span), from the top header level."""
    return [(label, len([*group])) for label, group in groupby(names[0] for names in columns)]


def spec_of(label: Any, formats: Mapping[str, str]) -> str | None:
    """The format of a column by its head, the lowest first."""
    return next((formats[name] for name in (*_parts(label)[::-1], "") if name in formats), None)


def _parts(label: Any) -> tuple[Any, ...]:
    return label if isinstance(label, tuple) else (label,)


def cell(value: object, spec: str | None = None) -> str:
    """A value as a cell of a table, by a spec of `press.formats` or by its type."""
    if spec is not None or is_missing(value):
        return " ".join(formatted(value, spec or "").split())
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if pd.api.types.is_integer(value):
        return f"{value:,}".replace("-", "−")
    if pd.api.types.is_float(value):
        return number(float(value), 4)  # type: ignore[arg-type]
    return " ".join(str(value).split())


def _alignment(cells: list[str]) -> str:
    filled = [cell for cell in cells if cell not in ("", MISSING)]
    numeric = sum(bool(_NUMBER.fullmatch(cell)) and len(cell) <= 32 for cell in filled)
    return "right" if filled and 2 * numeric >= len(filled) else "left"


def _check_name(kind: str, name: str) -> None:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(
            f"bad name of a {kind}: {name!r}. It becomes an anchor: lower-case letters, digits "
            'and single dashes, such as "warmup-forward"'
        )


def emit(data: dict[str, Any], meaning: dict[str, Any]) -> None:
    """Publish one output; outside a notebook the plain text is printed."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import display as publish

    if InteractiveShell.initialized():
        publish(data, raw=True, metadata={"fusedlib": meaning})
    else:
        print(data["text/plain"])
