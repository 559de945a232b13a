"""What other machines show, beside the one that leads: in the same tables, figures and paragraphs.

A notebook's analysis runs once more for each, with its rows in the leader's place. Where a table,
a figure or a paragraph then differs, the other's stands below it, each under its machine's name.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from itertools import takewhile
from typing import Any

import pandas as pd

from fusedlib.bench import machine as machines
from measure.recording import results
from press.display import TABLE_MIME, figure_data, table_data
from press.formats import MISSING
from press.pages import svg

Output = dict[str, Any]
_WORD = re.compile(r"\w+|\W")
_NUMBER = re.compile(
    r"(?<![A-Za-z\d.,])\d+(?:[.,]\d+)*(?:–\d+(?:[.,]\d+)*)*"
    r"(?:×|[ \N{NARROW NO-BREAK SPACE}]?%)?"
)


def shown_machines(studies: Iterable[str]) -> list[str]:
    """The machine that leads in these studies, then those with rows of the full profile there."""
    shown: dict[str, None] = {}
    leader = ""
    for study in studies:
        rows = results.Recorder(study, profile="full").rows()
        full = rows.loc[rows["profile"] == "full", "machine"].unique()
        names = [str(name) for name in rows["machine"].cat.categories]
        leader = leader or names[0]
        shown |= dict.fromkeys(name for name in names if name in full)
    return [leader, *(name for name in shown if name != leader)]


def put_beside(notebook: Any, leader: str, views: Mapping[str, Any]) -> None:
    """Put what other machines show into the outputs of the leader's notebook.

    `views` are the same notebook executed with each other machine's rows in the lead.
    """
    others = {machine: dict(displayed(view)) for machine, view in views.items()}
    for key, output in displayed(notebook):
        kind, *_ = key
        content, merge = {
            "table": (_rows, _tables), "figure": (_data, _figures), "prose": (_text, _paragraphs)
        }[kind]  # fmt: skip
        alike = {machine: shown[key] for machine, shown in others.items() if key in shown}
        apart = {m: o for m, o in alike.items() if content(o) and content(o) != content(output)}
        if apart:
            merge(output, {leader: output, **apart})


def displayed(notebook: Any) -> Iterator[tuple[tuple[str, ...], Output]]:
    """Tables and figures by their name, paragraphs by their cell and place in it."""
    for cell in notebook.cells:
        shown = [o for o in cell.get("outputs", []) if o.get("output_type") == "display_data"]
        for number, output in enumerate(shown):
            meaning = output["metadata"].get("fusedlib", {})
            if meaning.get("kind") in ("table", "figure"):
                yield (meaning["kind"], meaning["name"]), output
            elif meaning.get("kind") == "prose":
                yield ("prose", cell.id, str(number)), output


def _rows(table: Output) -> Any:
    return table["data"][TABLE_MIME]["rows"]


def _data(figure: Output) -> Any:
    return figure["metadata"]["fusedlib"].get("data")


def _text(prose: Output) -> Any:
    return prose["data"]["text/markdown"]


def _tables(output: Output, shown: Mapping[str, Output]) -> None:
    """Rows of each machine below a row with its name; a column that one lacks has dashes there."""
    contents = {m: o["data"][TABLE_MIME] for m, o in shown.items() if _rows(o)}
    first, *_ = contents.values()
    columns = [tuple(column) for column in first["columns"]]
    align = list(first["align"])
    for content in contents.values():
        for column, side in zip(map(tuple, content["columns"]), content["align"], strict=True):
            if column not in columns:
                columns.append(column)
                align.append(side)
    rows: list[list[str]] = []
    for machine, content in contents.items():
        rows.append([machines.label(machine), *[""] * (len(columns) - 1)])
        own = [tuple(column) for column in content["columns"]]
        at = [n if own[n : n + 1] == [column] else own.index(column) if column in own else None
              for n, column in enumerate(columns)]  # fmt: skip
        rows += [[MISSING if n is None else row[n] for n in at] for row in content["rows"]]
    if not first["stub"]:
        align[0] = "left"
    output["data"] = table_data({
        **first, "columns": [list(c) for c in columns], "align": align, "rows": rows,
        "stub": max(first["stub"], 1), "caption": _caption(c["caption"] for c in contents.values()),
    })  # fmt: skip


def _figures(output: Output, shown: Mapping[str, Output]) -> None:
    """One drawing below the other, and one table of data with a column `machine`.

    A drawing of no rows, of a machine that measured other things, is left out.
    """
    leader = next(iter(shown))
    shown = {m: figure for m, figure in shown.items() if m == leader or not _is_empty(figure)}
    if [*shown] == [leader]:
        return
    frames = [
        pd.read_csv(StringIO(_data(figure))).assign(machine=machine)
        for machine, figure in shown.items() if _data(figure) and not _is_empty(figure)
    ]  # fmt: skip
    meanings = {machines.label(m): figure["metadata"]["fusedlib"] for m, figure in shown.items()}
    drawings = [(machines.label(m), o["data"]["image/svg+xml"]) for m, o in shown.items()]
    merged = {
        **output["metadata"]["fusedlib"],
        "alt": " ".join(f"{label}: {meaning['alt']}" for label, meaning in meanings.items()),
        "data": pd.concat(frames).to_csv(index=False) if frames else None,
        "caption": _caption(meaning["caption"] for meaning in meanings.values()),
    }
    output["data"] = figure_data(svg.stacked(drawings), merged)
    output["metadata"] = {"fusedlib": merged}


def _is_empty(figure: Output) -> bool:
    """Whether a figure has data, and no row of them below the names of their columns."""
    data = _data(figure)
    return data is not None and len(data.strip().splitlines()) < 2


def _caption(captions: Iterable[str]) -> str:
    """The captions as one: where they differ, in a machine's name say, what each says."""
    words = [_WORD.findall(caption) for caption in dict.fromkeys(captions)]
    start = _common_start(words)
    rests = [caption[len(start) :][::-1] for caption in words]
    end = _common_start(rests)
    parts = ["".join(rest[len(end) :][::-1]) for rest in rests]
    return "".join([*start, " and ".join(parts), *end[::-1]])


def _common_start(lists: Sequence[Sequence[str]]) -> list[str]:
    alike = takewhile(lambda words: len({*words}) == 1, zip(*lists, strict=False))
    return [word for word, *_ in alike]


def _paragraphs(output: Output, shown: Mapping[str, Output]) -> None:
    """One paragraph where only numbers differ, each with the others' in parentheses; else all."""
    texts = {machines.label(m): _text(prose) for m, prose in shown.items()}
    (_, own), *others = texts.items()
    if len({_NUMBER.sub("#", text) for text in texts.values()}) == 1:
        numbers = {name: iter(_NUMBER.findall(text)) for name, text in others}

        def with_others(match: re.Match[str]) -> str:
            values = {name: next(each) for name, each in numbers.items()}
            apart = [f"{name}\N{NO-BREAK SPACE}{n}" for name, n in values.items() if n != match[0]]
            return f"{match[0]} ({', '.join(apart)})" if apart else match[0]

        text = _NUMBER.sub(with_others, own)
    else:
        text = "\n\n".join([own, *(f"*On the {name}:* {other}" for name, other in others)])
    output["data"] = {"text/markdown": text, "text/plain": text}
