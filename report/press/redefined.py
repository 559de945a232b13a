"""Rivals whose definition is another today than when the rows beside them were recorded.

A row of other code counts as it is; a table or figure that shows such a rival says so.
"""

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd

from fusedlib.bench import machine as machines
from fusedlib.bench import rivals
from fusedlib.bench.rivals import Rival
from measure.recording import paths, provenance, results
from press import style
from press.display import TABLE_MIME, figure_data, table_data

CASE = ["machine", "recording", "race", "experiment", "provider", "settings"]


def redefined(
    rows: pd.DataFrame, files: Mapping[tuple[str, str], Mapping[str, str]]
) -> set[tuple[str, str]]:
    """Rivals in these rows whose file is none of those that the row's recording hashed, by name,
    each with the machine of the row.

    Args:
        rows: with columns `machine`, `recording` and `provider`. The field `race`, else
            `experiment`, says which task's rival it is; else the row's `settings` tell.
        files: hash by path of each machine's recordings; of one that has none nothing is known.
    """
    today, pairs = provenance.files(), set()
    for row in rows.reindex(columns=CASE).drop_duplicates().to_dict("records"):
        then = files[row["machine"], row["recording"]].values()
        for one in _rivals_of(row):
            now = today.get(_file_of(one))  # None: defined outside the code, as in a cell
            if then and now and now not in then:
                pairs.add((one.name, row["machine"]))
    return pairs


def _rivals_of(row: Mapping[str, Any]) -> list[Rival]:
    named = [one for one in rivals.RIVALS.values() if one.name == row["provider"]]
    of_task = [one for one in named if one.task in (row["race"], row["experiment"])]
    return of_task or [one for one in named if one.settings == row["settings"]]


def _file_of(one: Rival) -> str:
    """Path of the file that defines a rival, as `machine.json` has it."""
    build: Any = one.build
    while isinstance(build, functools.partial):
        build = build.func
    file = Path(getattr(sys.modules[build.__module__], "__file__", None) or "")
    return file.relative_to(paths.ROOT).as_posix() if file.is_relative_to(paths.ROOT) else str(file)


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


def displayed(notebook: Any) -> Iterator[tuple[str, Any]]:
    """Tables and figures, each with which of both it is."""
    for cell in notebook.cells:
        shown = [o for o in cell.get("outputs", []) if o.get("output_type") == "display_data"]
        for output in shown:
            kind = output["metadata"].get("fusedlib", {}).get("kind")
            if kind in ("table", "figure"):
                yield kind, output


def mention(notebook: Any, studies: Sequence[str]) -> None:
    """Say so beside each table and figure of an executed notebook that shows such a rival."""
    files = {(one.machine, one.name): one.files for one in results.recordings()}
    machines_shown = shown_machines(studies)
    pairs: set[tuple[str, str]] = set()
    for study in studies:
        rows = results.Recorder(study, profile="full").rows()
        pairs |= redefined(
            rows[rows["status"].eq("ok") & rows["machine"].isin(machines_shown)], files
        )
    names = [name for name in rivals.labels() if any(name == other for other, _ in pairs)]
    for kind, output in displayed(notebook):
        words = {*_words(output)}
        named = [name for name in names if words & {name, style.label(name)}]
        if not named:
            continue
        where = [m for m in machines_shown if any((name, m) in pairs for name in named)]
        sentence = (
            f"Recorded on {' and '.join(map(machines.label, where))} with another definition than "
            f"today's: {'; '.join(map(style.label, named))}."
        )
        meaning, target = output["metadata"]["fusedlib"], "note" if kind == "table" else "caption"
        meaning[target] = f"{meaning[target] or ''} {sentence}".strip()
        if kind == "table":
            output["data"] = table_data(output["data"][TABLE_MIME] | {"note": meaning["note"]})
        else:
            output["data"] = figure_data(output["data"]["image/svg+xml"], meaning)


def _words(output: Any) -> Iterator[str]:
    """The cells of a table, or the texts in a figure's data."""
    content = output["data"].get(TABLE_MIME)
    if content is not None:
        for cells in (*content["columns"], *content["rows"]):
            yield from cells
    elif data := output["metadata"]["fusedlib"].get("data"):
        for _, column in pd.read_csv(StringIO(data), dtype=str).items():
            yield from column.dropna().unique()
