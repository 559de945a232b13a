"""What other machines show, beside the one that leads: in the same tables, figures and paragraphs.

A notebook's analysis runs once more for each, with its rows in the leader's place. Where a table,
a figure or a paragraph then differs, the other's stands below it, each under its machine's name.
"""

import re
from collections.abc import Iterable, Mapping
from io import StringIO
from typing import Any

import pandas as pd

from fusedlib.bench import machine as machines
from fusedlib.bench import results
from press.display import TABLE_MIME, figure_data, table_data
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
    """Put what other machines show into a notebook's outputs.

    Args:
        notebook: executed with the leading machine's rows; changed in place.
        leader: the leading machine.
        views: the same notebook executed with each other machine's rows in the lead.
    """
    floats = {name: _floats(view) for name, view in views.items()}
    cells = {name: {cell.id: cell for cell in view.cells} for name, view in views.items()}
    for cell in notebook.cells:
        for number, output in enumerate(_shown(cell)):
            meaning = output["metadata"].get("fusedlib", {})
            kind, name = meaning.get("kind"), meaning.get("name")
            if kind in ("table", "figure"):
                others = {m: o for m, f in floats.items() if (o := f.get((kind, name)))}
            elif kind == "prose":
                others = {m: o for m, c in cells.items() if (o := _prose(c.get(cell.id), number))}
            else:
                continue
            merge = {"table": _tables, "figure": _figures, "prose": _paragraphs}[kind]
            apart = {m: other for m, other in others.items() if _differs(kind, output, other)}
            if apart:
                merge(output, {leader: output, **apart})


def _shown(cell: Any) -> list[Any]:
    outputs = cell.get("outputs", []) if cell is not None and cell.cell_type == "code" else []
    return [output for output in outputs if output.get("output_type") == "display_data"]


def _floats(notebook: Any) -> dict[tuple[str, str], Any]:
    return {
        (meaning["kind"], meaning["name"]): output
        for cell in notebook.cells for output in _shown(cell)
        if (meaning := output["metadata"].get("fusedlib", {})).get("kind") in ("table", "figure")
    }  # fmt: skip


def _prose(cell: Any, number: int) -> Any:
    outputs = _shown(cell)
    output = outputs[number] if number < len(outputs) else None
    kind = output and output["metadata"].get("fusedlib", {}).get("kind")
    return output if kind == "prose" else None


def _differs(kind: str, one: Output, other: Output) -> bool:
    """Whether another machine shows something, and not the same."""
    return bool(_content(kind, other) and _content(kind, one) != _content(kind, other))


def _content(kind: str, output: Output) -> Any:
    if kind == "figure":
        return output["metadata"]["fusedlib"].get("data")
    return (
        output["data"][TABLE_MIME]["rows"] if kind == "table" else output["data"]["text/markdown"]
    )


def _tables(output: Output, of: Mapping[str, Output]) -> None:
    """Rows of each machine below a row with its name; a column that one lacks has dashes there."""
    contents = {machine: found["data"][TABLE_MIME] for machine, found in of.items()}
    contents = {machine: content for machine, content in contents.items() if content["rows"]}
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
        at = [tuple(column) for column in content["columns"]]
        known = [n if at[n : n + 1] == [c] else at.index(c) if c in at else None
                 for n, c in enumerate(columns)]  # fmt: skip
        rows += [["—" if n is None else row[n] for n in known] for row in content["rows"]]
    caption = _caption([content["caption"] for content in contents.values()])
    merged = {
        **first, "columns": [list(c) for c in columns], "align": align,
        "rows": rows, "stub": max(first["stub"], 1), "caption": caption,
    }  # fmt: skip
    if not first["stub"]:
        merged["align"][0] = "left"
    output["data"] = table_data(merged)


def _figures(output: Output, of: Mapping[str, Output]) -> None:
    """One drawing below the other, and one table of data with a column `machine`.

    A drawing of no rows, of a machine that measured other things, is left out.
    """
    leader = next(iter(of))
    of = {m: found for m, found in of.items() if m == leader or not _empty(found)}
    if [*of] == [leader]:
        return
    meanings = {machine: found["metadata"]["fusedlib"] for machine, found in of.items()}
    frames = [
        pd.read_csv(StringIO(meaning["data"])).assign(machine=machine)
        for machine, meaning in meanings.items()
        if not _empty(of[machine]) and meaning.get("data")
    ]
    drawn = svg.stacked(
        [(machines.label(m), found["data"]["image/svg+xml"]) for m, found in of.items()]
    )
    alt = " ".join(f"{machines.label(m)}: {meaning['alt']}" for m, meaning in meanings.items())
    data = pd.concat(frames).to_csv(index=False) if frames else None
    caption = _caption([meaning["caption"] for meaning in meanings.values()])
    own = meanings[next(iter(of))] | {"alt": alt, "data": data, "caption": caption}
    output["data"] = figure_data(drawn, own)
    output["metadata"] = {"fusedlib": own}


def _empty(figure: Output) -> bool:
    """Whether a figure has data, and no row of them below the names of their columns."""
    data = figure["metadata"]["fusedlib"].get("data")
    return data is not None and len(data.strip().splitlines()) < 2


def _caption(captions: list[str]) -> str:
    """The captions as one: where they differ, in a machine's name say, what each says."""
    first, *others = ([*_WORD.findall(caption)] for caption in dict.fromkeys(captions))
    if not others:
        return "".join(first)
    same = [len({*words}) == 1 for words in zip(first, *others, strict=False)]
    start = same.index(False) if False in same else len(same)
    shortest = min(map(len, (first, *others))) - start
    back = [len({*words}) == 1 for words in zip(*(w[::-1] for w in (first, *others)), strict=False)]
    end = min(back.index(False) if False in back else len(back), shortest)
    parts = ["".join(words[start : len(words) - end]) for words in (first, *others)]
    return "".join([*first[:start], " and ".join(parts), *first[len(first) - end :]])


def _paragraphs(output: Output, of: Mapping[str, Output]) -> None:
    """One paragraph where only numbers differ, each with the others' in parentheses; else all."""
    texts = {machines.label(m): found["data"]["text/markdown"] for m, found in of.items()}
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
