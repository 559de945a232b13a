"""What a notebook shows: prose, claims, tables, figures, each as one output with its meaning.

JupyterLab reads the usual mime types; the report reads the metadata `fusedlib` of the same output
(kind, caption, alternative text, name) and, for tables, the cells themselves as JSON.
Captions, notes, prose and claims are Markdown (maths in `$...$`); cells and alternative texts
are plain text.
"""

import contextlib
import html
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from fusedlib.bench import machine as machines
from press import style
from press.analysis import leading
from press.formats import MISSING, formatted, number
from press.plots import Picture
from press.running.config import STATIC

TABLE_MIME = "application/vnd.fusedlib.table+json"
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_NUMBER = re.compile(r"[−+±<>≤≥≈~]*\s*\d[\d,.  ]*(e[+-]?\d+)?(\s*([×±%–(/]|[^\W\d]).*)?")
LONG = 44
"""Characters from which a cell of the report may wrap."""


def prose(text: str) -> None:
    """Show a Markdown paragraph whose numbers were interpolated from rows."""
    _emit({"text/markdown": text, "text/plain": text}, {"kind": "prose"})


def claim(
    sentence: str, verdict: str, name: str, *, headline: bool, study: str,
    numbers: Mapping[str, str], verdicts: Sequence[dict[str, Any]],
) -> None:  # fmt: skip
    """Show a claim with its verdict; `press.claims` calls this."""
    _check("claim", name=name, sentence=sentence)
    text = f"**Claim.** {sentence}\n\n*{verdict}*"
    meaning = {
        "kind": "claim", "name": name, "sentence": sentence, "verdict": verdict,
        "headline": headline, "study": study, "numbers": dict(numbers),
        "verdicts": list(verdicts),
    }  # fmt: skip
    _emit({"text/markdown": text, "text/plain": f"{sentence} {verdict}"}, meaning)


def whose(rows: pd.DataFrame) -> None:
    """Say to whoever reads the notebook which machine its figures and numbers are of."""
    machine = leading(rows)
    text = "*Figures, tables and the numbers in claims are of this machine.*"
    if machine != machines.key():
        text = (
            f"*Figures, tables and the numbers in claims are of {machines.label(machine)}, "
            "recorded earlier. What this machine measured stands under “This machine”, and each "
            "claim says whether it holds here.*"
        )
    _emit({"text/markdown": text, "text/plain": text}, {"kind": "whose"})


def table(
    frame: pd.DataFrame, caption: str, name: str, note: str | None = None,
    formats: Mapping[str, str] | None = None, empty: str = "not measured yet",
) -> None:  # fmt: skip
    """Show a table.

    Args:
        formats: a spec such as "3 ms" by column name, of either header level, or by an index
            level's name; "" for all other columns. See `press.formats`.
        frame: cells as strings, or numbers, which get four significant digits; None and NaN show
            as a dash. Columns may be a two-level MultiIndex (group, column). An index other than
            the plain 0..n-1 becomes the leading columns.
        caption: Markdown; says what is shown, of which machine, in which unit.
        name: anchor in the report, of lower-case letters, digits and dashes; unique in a notebook.
        note: Markdown below the table.
        empty: what is said in place of a frame without rows.

    Raises:
        ValueError: no column, an empty caption, a bad name, more than two header levels.
    """
    _check("table", name=name, caption=caption)
    if frame.empty:
        frame = pd.DataFrame({empty: []})
    frame = _formatted(frame, formats or {})
    content = table_json(frame) | {"caption": caption, "note": note, "name": name}
    _emit(
        {
            TABLE_MIME: content,
            "text/html": table_html(content),
            "text/plain": frame.to_string(),
        },
        {"kind": "table", "caption": caption, "note": note, "name": name},
    )


def _formatted(frame: pd.DataFrame, formats: Mapping[str, str]) -> pd.DataFrame:
    """Columns and index levels as text by their specs; the unit of a spec stands in each cell."""
    if not formats:
        return frame
    shown = frame.copy().astype(object)
    for at, label in enumerate(frame.columns):
        names = label if isinstance(label, tuple) else (label,)
        spec = next((formats[n] for n in reversed(names) if n in formats), formats.get(""))
        if spec is not None:
            column = frame.iloc[:, at]
            shown.isetitem(at, [formatted(v, spec) for v in column])
    levels = list(frame.index.names)
    if any(name in formats for name in levels):
        keys = [key if isinstance(key, tuple) else (key,) for key in frame.index]
        text = [
            tuple(
                formatted(v, formats[n]) if n in formats else v
                for n, v in zip(levels, key, strict=True)
            )
            for key in keys
        ]
        shown.index = (
            pd.Index([key[0] for key in text], name=levels[0])
            if len(levels) == 1
            else pd.MultiIndex.from_tuples(text, names=levels)
        )
    return shown


def figure(fig: "Figure | Picture", caption: str, alt: str | None = None, name: str = "") -> None:
    """Show a figure as SVG and close it.

    Args:
        fig: from `press.plots`, whose data and alternative text come with it; or a
            matplotlib figure from `style.new`.
        caption: Markdown; says what is drawn, of which machine, what bands and bars mean.
        alt: what a reader who cannot see it should know, in plain text; of a `Picture` its own.
        name: anchor in the report, of lower-case letters, digits and dashes; unique in a notebook.

    Raises:
        ValueError: not a Figure, an empty caption or alternative text, a bad name.
    """
    data = None
    if isinstance(fig, Picture):
        data, alt, fig = fig.data.to_csv(index=False), alt or fig.alt, fig.figure
    if not isinstance(fig, Figure):
        raise ValueError(f"a figure must be a matplotlib Figure, got {type(fig).__name__}")
    _check("figure", name=name, caption=caption, alt=alt or "")
    style.say_empty(fig)
    drawn = style.svg(fig)
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close(fig)
    page = figure_html(name, drawn, caption)
    _emit(
        {"image/svg+xml": drawn, "text/html": page, "text/plain": alt},
        {"kind": "figure", "caption": caption, "alt": alt, "name": name, "data": data},
    )


def figure_html(name: str, drawn: str, caption: str) -> str:
    """HTML of a figure for JupyterLab."""
    return (
        f"<figure id='{name}' style='margin: 0'><div style='background: white'>{drawn}</div>"
        f"<figcaption>{_inline(caption)}</figcaption></figure>"
    )


def explore(show: Callable[..., None], **choices: Sequence[Any]) -> None:
    """Let a reader choose: `show` is called with one of each of the choices, at once with its own
    defaults where they are among them, else with the first.

    In JupyterLab the choices are widgets; where a notebook is executed for the report there is
    nobody to choose, and the first view stands alone.
    """
    if not all(map(len, choices.values())):
        return
    asked = {name: p.default for name, p in inspect.signature(show).parameters.items()}
    first = {
        name: asked[name] if asked.get(name) in list(options) else options[0]
        for name, options in choices.items()
    }
    if os.environ.get(STATIC):
        show(**first)
        return
    import ipywidgets

    chosen = {
        name: ipywidgets.Dropdown(options=list(options), value=first[name])
        for name, options in choices.items()
    }
    ipywidgets.interact(show, **chosen)


def table_json(frame: pd.DataFrame) -> dict[str, Any]:
    """Cells, headers and alignment of a frame as JSON.

    Returns:
        `columns`: for each column its header cells from the top (one or two); `stub`: how many
        leading columns name the row; `align`: "left" or "right" for each column; `rows`: cells.
    """
    if frame.columns.nlevels > 2:
        raise ValueError(
            f"a table has one or two header levels, got {frame.columns.nlevels}: join some names"
        )
    if not len(frame.columns):
        raise ValueError("a table needs at least one column; to say that there is no row, use note")
    stub = _stub(frame)
    columns = [["", label][-frame.columns.nlevels :] for label, _ in stub]
    columns += [
        [_cell(part) for part in (label if isinstance(label, tuple) else (label,))]
        for label in frame.columns
    ]
    body = [[_cell(value) for value in frame.iloc[:, at]] for at in range(len(frame.columns))]
    cells = [values for _, values in stub] + body
    return {
        "columns": columns,
        "stub": len(stub),
        "align": ["left"] * len(stub) + [_alignment(column) for column in body],
        "rows": [list(row) for row in zip(*cells, strict=True)],
    }


def table_html(content: Mapping[str, Any]) -> str:
    """HTML of a table's JSON for JupyterLab."""
    head, body = table_rows(content)
    note = content.get("note")
    return (
        f"<table class='fusedlib' id='{html.escape(content['name'])}'>"
        f"<caption style='text-align: left'>{_inline(content['caption'])}</caption>"
        f"<thead>{head}</thead><tbody>{body}</tbody></table>"
        + (f"<p class='fusedlib-note'>{_inline(note)}</p>" if note else "")
    )


def table_rows(content: Mapping[str, Any]) -> tuple[str, str]:
    """Head and body of a table: header groups span, row names are headers.

    Looks stand in classes for the report's style sheet, and again in `style` for JupyterLab, which
    takes no style sheet.
    """
    columns, align, stub = content["columns"], content["align"], content["stub"]
    head = ""
    if len(columns[0]) == 2:
        groups = [
            f'<th scope="colgroup" colspan="{span}" class="group" style="text-align: center">'
            f"{html.escape(label)}</th>"
            if label
            else f'<td colspan="{span}"></td>'
            for label, span in header_groups(columns)
        ]
        head = f"<tr>{''.join(groups)}</tr>"
    cells = [
        f'<th scope="col" class="{side}" style="text-align: {side}">{html.escape(column[-1])}</th>'
        for column, side in zip(columns, align, strict=True)
    ]
    rows: list[str] = []
    for row in content["rows"]:
        # A rule above the first row of a group of rows.
        starts = ' class="start"' if stub > 1 and rows and row[0] else ""
        rows.append(f"<tr{starts}>{''.join(_row_cells(row, stub, align))}</tr>")
    return f"{head}<tr>{''.join(cells)}</tr>", "\n".join(rows)


def header_groups(columns: Sequence[Sequence[str]]) -> list[tuple[str, int]]:
    """Neighbouring columns of one group as (label, span), from the top header level."""
    groups: list[tuple[str, int]] = []
    for top, *_ in columns:
        if groups and top and groups[-1][0] == top:
            groups[-1] = (top, groups[-1][1] + 1)
        else:
            groups.append((top, 1))
    return groups


def _row_cells(row: Sequence[str], stub: int, align: Sequence[str]) -> Iterator[str]:
    for at, (cell, side) in enumerate(zip(row, align, strict=True)):
        tag, scope = ("th", ' scope="row"') if at < stub else ("td", "")
        # A figure with its interval stays on one line.
        unbroken = "; white-space: nowrap" if tag == "td" and side == "right" else ""
        looks = f'class="{side}{" long" if len(cell) > LONG else ""}"'
        style = f'style="text-align: {side}{unbroken}"'
        yield f"<{tag}{scope} {looks} {style}>{html.escape(cell)}</{tag}>"


def _stub(frame: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """Label and cells of each index level that is shown; an outer level shows a name once."""
    index = frame.index
    plain = isinstance(index, pd.RangeIndex) and index.name is None
    if plain:
        return []
    if not isinstance(index, pd.MultiIndex):
        return [(_label(index.name), [_cell(value) for value in index])]
    levels = []
    for level in range(index.nlevels):
        keys = [entry[: level + 1] for entry in index]
        repeated = [
            level < index.nlevels - 1 and at > 0 and keys[at] == keys[at - 1]
            for at in range(len(keys))
        ]
        cells = ["" if same else _cell(key[-1]) for key, same in zip(keys, repeated, strict=True)]
        levels.append((_label(index.names[level]), cells))
    return levels


def _label(name: object) -> str:
    return "" if name is None else str(name)


def _cell(value: object) -> str:
    if isinstance(value, str):
        return " ".join(value.split())
    if value is None or (pd.api.types.is_scalar(value) and pd.isna(value)):
        return MISSING
    if isinstance(value, bool) or type(value).__name__ == "bool":
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


def _inline(text: str) -> str:
    """The little Markdown of a caption for JupyterLab, which typesets `$...$` by itself."""
    text = html.escape(text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)


def _check(kind: str, *, name: str, **texts: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"bad name of a {kind}: {name!r}. It becomes an anchor: lower-case letters, digits "
            'and single dashes, such as "warmup-forward"'
        )
    for what, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f'the {kind} "{name}" needs a text as {what}, got {text!r}')


_CAPTURES: list[list[dict[str, Any]]] = []


@contextlib.contextmanager
def captured() -> Iterator[list[dict[str, Any]]]:
    """Collect outputs, as a notebook file holds them, instead of publishing them."""
    outputs: list[dict[str, Any]] = []
    _CAPTURES.append(outputs)
    try:
        yield outputs
    finally:
        _CAPTURES.remove(outputs)


def _emit(data: dict[str, Any], meaning: dict[str, Any]) -> None:
    """Publish one output; outside a notebook the plain text is printed."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import display as publish

    known = {"fusedlib": meaning}
    if _CAPTURES:
        _CAPTURES[-1].append({"output_type": "display_data", "data": data, "metadata": known})
    elif InteractiveShell.initialized():
        publish(data, raw=True, metadata=known)
    else:
        print(data["text/plain"])
