"""Rivals whose definition is another today than when the rows beside them were recorded.

A row of other code counts as it is; the paper lists such rivals beside the recordings.
"""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fusedlib.bench import machine as machines
from measure import study as studies
from measure.racing import rivals
from measure.racing.rivals import Rival
from measure.recording import paths, provenance, results
from press import style

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


def table() -> pd.DataFrame:
    """A line a study: `implementations` in its rows of the full profile that are defined otherwise
    today, and the `machines` whose rows these are."""
    files = {(one.machine, one.name): one.files for one in results.recordings()}
    lines = []
    for study in studies.names():
        rows = results.Recorder(study, profile="full").rows()
        shown = rows["status"].eq("ok") & rows["profile"].eq("full")
        if pairs := redefined(rows[shown], files):
            names = [name for name in rivals.labels() if any(name == other for other, _ in pairs)]
            lines.append({
                "study": study, "implementations": "; ".join(map(style.label, names)),
                "machines": ", ".join(sorted({machines.label(machine) for _, machine in pairs})),
            })  # fmt: skip
    return pd.DataFrame(lines, columns=["study", "implementations", "machines"])
