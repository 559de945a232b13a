"""Rows: what was measured, one flat JSON object a line, written the moment it is measured.

A row lies in `<results>/<machine>/<study>.jsonl`. Its case (the fields that say what was asked
for), its profile and the fingerprint of the code that measured it decide whether a later run
measures it again. The description of the machine lies beside the rows in `machine.jsonl`, once
a change.
"""

import ast
import hashlib
import inspect
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fusedlib import paths
from fusedlib.bench import machine as machines
from fusedlib.bench.jsonl import ResultsError, TornLineWarning, append_object, read_objects

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
STATUSES = ("ok", "wrong", "unavailable", "oom", "oom (predicted)", "failed")
# A failed case may have failed by bad luck and an unavailable one may have been installed since.
TRIED_AGAIN = ("failed", "unavailable")
HEAD = (
    "schema", "study", "profile", "machine", "environment", "device_type", "device_name",
    "commit", "dirty", "code", "case", "measured_at", "status", "reason",
)  # fmt: skip
# What tells one row from another; without these nothing can be looked up.
IDENTITY = ("machine", "profile", "case", "code", "status")

__all__ = [
    "SCHEMA", "STATUSES", "Recorder", "ResultsError", "Unavailable",
    "check", "code_fingerprint", "import_rows", "load", "machines_seen", "read_rows",
]  # fmt: skip


class Unavailable(Exception):  # noqa: N818 (a state of affairs, not an error)
    """Raised by a measure function: this case cannot run here, for the reason given."""


def code_fingerprint(*modules: ModuleType) -> str:
    """Fingerprint of what measures: the modules' code and the versions of torch and triton.

    Comments, docstrings and layout do not count, so that a better explanation costs no new run.
    """
    digest = hashlib.sha256()
    for module in modules:
        tree = ast.parse(inspect.getsource(module))
        for node in ast.walk(tree):
            if _has_docstring(node):
                node.body = node.body[1:]  # type: ignore[attr-defined]
        digest.update(f"{module.__name__}\n{ast.dump(tree)}\n".encode())
    for package in ("torch", "triton"):
        digest.update(f"{package}={machines.version_of(package)}\n".encode())
    return digest.hexdigest()[:12]


def _has_docstring(node: ast.AST) -> bool:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, holders) and ast.get_docstring(node, clean=False) is not None


def case_id(study: str, case: Mapping[str, Any]) -> str:
    """Identity of a case: the hash of all its fields, whatever their order."""
    text = json.dumps([study, dict(case)], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of one file in the order they were written.

    Raises:
        ResultsError: a line that is not a JSON object, a row from a newer schema, or one without
            the fields that every row has.
    """
    rows = read_objects(path)
    for number, row in enumerate(rows, 1):
        schema = row.get("schema")
        if not isinstance(schema, int) or schema < 1:
            raise ResultsError(
                f"{path}: row {number} has schema {schema!r}, not a whole number from 1; "
                "it was not written by fusedlib. Move the line elsewhere and run again."
            )
        if schema > SCHEMA:
            raise ResultsError(
                f"{path}: row {number} has schema {schema}, this fusedlib reads up to {SCHEMA}. "
                "Update fusedlib, or point FUSEDLIB_RESULTS to another folder."
            )
        if lacking := [name for name in IDENTITY if not isinstance(row.get(name), str)]:
            raise ResultsError(
                f"{path}: row {number} lacks {', '.join(lacking)}; it was not written by fusedlib. "
                "Move the line elsewhere and run again."
            )
    return rows


def check(studies: Iterable[str] | None = None, directory: Path | None = None) -> list[str]:
    """Read all rows of these studies (None: of all) and the descriptions of the machines.

    Returns what was dropped on the way (torn last lines), a sentence each.

    Raises:
        ResultsError: the first file that cannot be read, with the reason.
    """
    names = ["*"] if studies is None else [*sorted(studies), "machine"]
    with warnings.catch_warnings(record=True) as dropped:
        warnings.simplefilter("always", TornLineWarning)
        for name in names:
            for path in _files(directory, name):
                (read_objects if path.name == "machine.jsonl" else read_rows)(path)
    return [str(warning.message) for warning in dropped]


@dataclass
class Recorder:
    """Writes the rows of one study on this machine and knows which need not be measured again.

    Args:
        study: name of the study, the file's name.
        profile: profile that the rows are filed under.
        code: `code_fingerprint` of the modules that measure.
        fresh: measure everything anew; by default when `$FRESH` is set to anything but 0.
        directory: results folder; by default `paths.results_dir()`.
        machine: description of the machine; by default this one.
    """

    study: str
    profile: str
    code: str
    fresh: bool | None = None
    directory: Path | None = None
    machine: machines.Machine = field(default_factory=machines.describe)
    measured: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        if self.fresh is None:
            self.fresh = os.environ.get("FRESH", "0") not in ("", "0")
        folder = (self.directory or paths.results_dir()) / self.machine.key
        self.path = folder / f"{self.study}.jsonl"
        self._machine_path = folder / "machine.jsonl"
        rows = read_rows(self.path) if self.path.exists() else []
        self._newest = {(r["case"], r["profile"]): r for r in rows}

    def missing(self, cases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The cases that have no row of this profile and code yet; the others count as skipped."""
        todo = []
        for case in cases:
            _check_case(case)
            row = self._newest.get((case_id(self.study, case), self.profile))
            current = row is not None and row["code"] == self.code
            if current and not self.fresh and row["status"] not in TRIED_AGAIN:  # type: ignore[index]
                self.skipped += 1
            else:
                todo.append(dict(case))
        return todo

    def append(
        self, case: Mapping[str, Any], figures: Mapping[str, Any] | None = None,
        *, status: str = "ok", reason: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Write one row, flushed to disk before this returns, and give it back.

        Raises:
            ValueError: unknown status, or figures whose names the case or the row's head holds.
            ResultsError: the row could not be written (disk full, folder not writable).
        """
        if status not in STATUSES:
            raise ValueError(f"status {status!r} is unknown; known are {', '.join(STATUSES)}")
        _check_case(case)
        figures = dict(figures or {})
        if taken := sorted(set(figures) & (set(HEAD) | set(case))):
            raise ValueError(f"figures may not be named like the row's own fields: {taken}")
        facts = self.machine
        row = {
            "schema": SCHEMA, "study": self.study, "profile": self.profile,
            "machine": facts.key, "environment": facts.environment,
            "device_type": facts.device_type, "device_name": facts.device_name,
            "commit": facts.commit, "dirty": facts.dirty, "code": self.code,
            "case": case_id(self.study, case),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "status": status, "reason": reason,
            **{k: plain(v) for k, v in case.items()}, **_finite(figures),
        }  # fmt: skip
        self._write(row)
        return row

    def _write(self, row: dict[str, Any]) -> None:
        key = (row["case"], row["profile"])
        before = self._newest.get(key)
        self._newest[key] = row
        same = ("status", "reason", "code")
        if row["status"] == "unavailable" and before and all(before[k] == row[k] for k in same):
            return  # still unavailable for the same reason: nothing new to record
        described = read_objects(self._machine_path) if self._machine_path.exists() else []
        if self.machine.environment not in {d.get("environment") for d in described}:
            append_object(self._machine_path, {"schema": SCHEMA, **self.machine.as_dict()})
        append_object(self.path, row)
        self.measured += 1

    def summary(self) -> str:
        """What this run did, for people."""
        text = f"{self.study}: {self.measured} rows written"
        if self.skipped:
            text += f", {self.skipped} unchanged rows kept (FRESH=1 measures them anew)"
        return f"{text} · {self.path}"


def plain(value: Any) -> Any:
    """A value as JSON knows it: numpy and torch scalars become Python's."""
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{value!r} ({type(value).__name__}) is no plain value; rows are flat")


def _finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no inf and nan: such a figure becomes null and is named in `nonfinite`."""
    out: dict[str, Any] = {}
    bad: list[str] = []
    for name, value in figures.items():
        value = plain(value)
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(v, float) and not math.isfinite(v) for v in parts):
            bad.append(f"{name}={value}")
            value = None
        out[name] = value
    return {**out, "nonfinite": bad} if bad else out


def _check_case(case: Mapping[str, Any]) -> None:
    for name, value in case.items():
        if name in HEAD:
            raise ValueError(f"a case may not have a field named {name!r}: the row's head has it")
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise ValueError(f"case field {name}={value!r} is no plain scalar; cases are flat")


def _files(directory: Path | None, name: str) -> list[Path]:
    return sorted((directory or paths.results_dir()).glob(f"*/{name}.jsonl"))


def load(
    study: str, *, directory: Path | None = None, profile: str | None = None,
    status: str | None = None,
) -> "pd.DataFrame":  # fmt: skip
    """Rows of a study from all machines as one tidy frame, the newest of each case and profile.

    Column `own` tells the rows of the machine this runs on. Without rows the frame is empty, with
    the columns that every row has.
    """
    import pandas as pd

    newest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for path in _files(directory, study):
        for row in read_rows(path):
            newest[(row["machine"], row["profile"], row["case"])] = row
    rows = [
        row for row in newest.values()
        if (profile is None or row["profile"] == profile)
        and (status is None or row["status"] == status)
    ]  # fmt: skip
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(HEAD))
    frame.insert(4, "own", frame["machine"] == machines.key())
    return frame


def machines_seen(directory: Path | None = None) -> "pd.DataFrame":
    """Descriptions of all machines that have rows, one line each time something changed there."""
    import pandas as pd

    found = [d for path in _files(directory, "machine") for d in read_objects(path)]
    names = machines.Machine.names()
    frame = pd.DataFrame(found, columns=["schema", "key", *(n for n in names if n != "key")])
    return frame.rename(columns={"key": "machine"}).assign(
        own=lambda f: f.machine == machines.key()
    )


@dataclass(frozen=True)
class ImportSummary:
    """What `import_rows` did."""

    files: int
    added: int
    known: int

    def __str__(self) -> str:
        """For people."""
        return f"{self.added} rows added from {self.files} files, {self.known} were there already"


def import_rows(source: Path, destination: Path | None = None) -> ImportSummary:
    """Bring the rows of another results folder into this one, each row once, none changed.

    Raises:
        ResultsError: `source` holds no `<machine>/<study>.jsonl`, or a file in it is damaged.
    """
    files = sorted(source.glob("*/*.jsonl"))
    if not files:
        raise ResultsError(
            f"{source} holds no <machine>/<study>.jsonl; give the folder that holds the machines"
        )
    # Everything is read before anything is written: a damaged file stops the whole import.
    loaded = {f: read_objects(f) if f.name == "machine.jsonl" else read_rows(f) for f in files}
    added = known = 0
    for path, rows in loaded.items():
        target = (destination or paths.results_dir()) / path.parent.name / path.name
        there = {_line(r) for r in read_objects(target)} if target.exists() else set()
        for row in rows:
            if _line(row) in there:
                known += 1
                continue
            append_object(target, row)
            added += 1
    return ImportSummary(len(files), added, known)


_line = partial(json.dumps, sort_keys=True)
