"""Rows: what was measured, one flat JSON object a line, written the moment it is measured.

A row lies in `<results>/<machine>/<study>.jsonl`. Its case (the fields that say what was asked
for), its profile and the fingerprint of the code that measured it decide whether a later run
measures it again. A row belongs to a recording: one run of the study on one machine. All recordings
whose code is current count together. The description of the machine lies beside the rows in
`machine.jsonl`, once a change.

Where code changed in form only, an entry in `<results>/carried.toml` says which rows still count,
and why they measure the same.
"""

import hashlib
import json
import math
import os
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedlib import paths
from fusedlib.bench import machine as machines
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.code import Code
from fusedlib.bench.jsonl import ResultsError, TornLineWarning, append_object, read_objects

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
STATUSES = ("ok", "wrong", "unavailable", "oom", "oom (predicted)", "failed")
# A failed case may have failed by bad luck and an unavailable one may have been installed since.
TRIED_AGAIN = ("failed", "unavailable")
HEAD = (
    "schema", "study", "profile", "machine", "environment", "device_type", "device_name",
    "commit", "dirty", "code", "recording", "case", "measured_at", "status", "reason",
)  # fmt: skip
PROTOCOL = "published_protocol_"
RECORDING, CASES, PLAN = "FUSEDLIB_RECORDING", "FUSEDLIB_CASES", "FUSEDLIB_PLAN"
# What tells one row from another; without these nothing can be looked up.
IDENTITY = ("machine", "profile", "case", "code", "status")

__all__ = [
    "SCHEMA", "STATUSES", "Recorder", "ResultsError", "Unavailable",
    "check", "import_rows", "machines_seen", "read_rows",
]  # fmt: skip


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


def recording_of(row: Mapping[str, Any]) -> str:
    """The recording that a row belongs to; of one written before there were any, day and commit."""
    day, commit = str(row.get("measured_at", ""))[:10], str(row.get("commit") or "")[:7]
    return str(row.get("recording") or f"{day} {commit}".strip())


@dataclass(frozen=True)
class Carried:
    """Rows of former code that count as rows of today's: `<results>/carried.toml`.

    An entry names a study, the fingerprints that its rows hold (`old`, one or a list, whole or
    without the rival's part), the parts of the new one (`harness`, `problem`, and `rivals` by name;
    rivals that it does not name keep their part of a fingerprint given without it), which rows
    (`where`, fields and values) and `why` they measure the same. Where a change touched nothing but
    rivals, a `[[same]]` names the new part of each former one (`rivals`), for all studies, with
    `where` and `why` likewise; it is looked at after the entries, one `[[same]]` after the other.
    """

    entries: tuple[Mapping[str, Any], ...] = ()
    same: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def load(cls, directory: Path | None = None) -> "Carried":
        """The entries beside the rows; none without a file.

        Raises:
            ResultsError: the file is not TOML, or an entry lacks a field.
        """
        path = (directory or paths.RECORDED) / "carried.toml"
        if not path.exists():
            return cls()
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ResultsError(f"{path} is not valid TOML: {error}") from None
        kinds = {
            "carried": {"study", "old", "harness", "problem", "why"},
            "same": {"rivals", "why"},
        }
        for kind, needed in kinds.items():
            for number, entry in enumerate(found.get(kind, []), 1):
                if lacking := sorted(needed - set(entry)):
                    raise ResultsError(f"{path}: {kind} {number} lacks {', '.join(lacking)}")
        return cls(*(tuple(found.get(kind, [])) for kind in kinds))

    def code_of(self, row: Mapping[str, Any]) -> str:
        """The fingerprint that a row counts as having."""
        shared, _, own = self._carried_code(row).rpartition("-")
        parts = own.split(".")
        for entry in self.same:
            if _is_of(row, entry):
                parts = [entry["rivals"].get(part, part) for part in parts]
        return f"{shared}-{'.'.join(parts)}" if shared else own

    def _carried_code(self, row: Mapping[str, Any]) -> str:
        code = str(row["code"])
        shared, _, last = code.rpartition("-")
        for entry in self.entries:
            olds = [entry["old"]] if isinstance(entry["old"], str) else entry["old"]
            if entry["study"] != row.get("study") or not {code, shared} & set(olds):
                continue
            if _is_of(row, entry):
                kept = last if shared in olds else "none"
                own = entry.get("rivals", {}).get(row.get("provider"), kept)
                return f"{entry['harness']}-{entry['problem']}-{own}"
        return code


def _is_of(row: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    return all(row.get(name) in values for name, values in entry.get("where", {}).items())


@dataclass
class Recorder:
    """Writes the rows of one study on this machine and knows which need not be measured again.

    Args:
        study: name of the study, the file's name.
        profile: profile that the rows are filed under.
        code: what measures, for the fingerprint of each row.
        fresh: measure everything anew; by default when `$FRESH` is set to anything but 0.
        directory: results folder; by default `paths.results_dir()`.
        machine: description of the machine; by default this one.
    """

    study: str
    profile: str
    code: str | Code
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
        self._carried = Carried.load(self.directory)
        current = [r for r in rows if self._is_current(r) and r["profile"] == self.profile]
        self._named = os.environ.get(RECORDING)
        listed = os.environ.get(CASES)
        self._only = set(Path(listed).read_text().split()) if listed else None
        self.recording = self._named or self._next_recording(rows, current)
        if self._named:
            rows = [r for r in rows if recording_of(r) == self._named]
        self._newest = {(r["case"], r["profile"]): r for r in rows}

    def _next_recording(self, rows: list[dict[str, Any]], current: list[dict[str, Any]]) -> str:
        """The one that a stopped or repeated run goes on with, or a new one named by the day."""
        if current and not self.fresh:
            return recording_of(current[-1])
        today = datetime.now(UTC).date().isoformat()
        taken = {recording_of(r) for r in rows}
        names = (today if n == 1 else f"{today}.{n}" for n in count(1))
        return next(name for name in names if name not in taken)

    def code_of(self, case: Mapping[str, Any]) -> str:
        """Fingerprint of the code that measures a case now."""
        return self.code if isinstance(self.code, str) else self.code.of(case)

    def _is_current(self, row: dict[str, Any]) -> bool:
        return self._carried.code_of(row) == self.code_of(row)

    def rows(self) -> "pd.DataFrame":
        """Rows of every machine whose code is current, of all recordings, as one tidy frame.

        Of machines that are recorded in this repository and of this one; of each the profile
        `full` where it has rows of it. `own` tells this machine's rows. `machine` is a categorical
        that names this machine even where it has none; its first category is the one that figures
        and tables show: recorded in full, on a GPU, else this one. Of a case that a recording
        measured twice, the later row.
        """
        import pandas as pd

        newest: dict[tuple[str, ...], dict[str, Any]] = {}
        for path in _files(self.directory, self.study):
            for row in read_rows(path):
                if self._is_current(row):
                    row = {**row, "recording": recording_of(row)}
                    at = ("machine", "profile", "recording", "case")
                    newest[tuple(row[name] for name in at)] = row
        full = {r["machine"] for r in newest.values() if r["profile"] == "full"}
        chosen = [r for r in newest.values() if r["profile"] == "full" or r["machine"] not in full]
        frame = pd.DataFrame(chosen) if chosen else pd.DataFrame(columns=list(HEAD))
        on_gpu = set(frame.loc[frame["device_type"] == "cuda", "machine"])
        names = sorted(
            {*frame["machine"], machines.key()}, reverse=True,
            key=lambda name: (name in full, name in on_gpu, name == machines.key(), name),
        )  # fmt: skip
        frame["machine"] = pd.Categorical(frame["machine"], categories=names)
        frame = frame.assign(own=frame["machine"] == machines.key())
        frame.attrs["study"] = self.study
        return frame

    def missing(self, cases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The cases that have no row of this profile and code yet; the others count as skipped.

        Where `$FUSEDLIB_RECORDING` names a recording, no row of it; where `$FUSEDLIB_CASES` names a
        file of case ids, those cases alone. Where `$FUSEDLIB_PLAN` names a file, none: they are
        listed there, a line each that begins with its id.
        """
        todo = []
        for case in cases:
            _check_case(case)
            name = case_id(self.study, case)
            if self._only is not None and name not in self._only:
                continue
            row = self._newest.get((name, self.profile))
            kept = row is not None and self._is_current({**row, **case})
            if kept and not self.fresh and row["status"] not in TRIED_AGAIN:  # type: ignore[index]
                self.skipped += 1
            else:
                todo.append(dict(case))
        if not (plan := os.environ.get(PLAN)):
            return todo
        with Path(plan).open("a", encoding="utf-8") as lines:
            for case in todo:
                lines.write(f"{case_id(self.study, case)} {self.study} {json.dumps(case)}\n")
        return []

    def append(
        self, case: Mapping[str, Any], figures: Mapping[str, Any] | None = None,
        *, status: str = "ok", reason: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Write one row, flushed to disk before this returns, and give it back.

        Where `$FUSEDLIB_PLAN` names a file the case is listed there, as by `missing`, and no row
        written; where `$FUSEDLIB_CASES` does, no row of a case that was not asked for and cannot be
        measured here.

        A figure `wrong` with a reason makes the row wrong: it is a published result that is timed
        all the same, as its authors did, and its times go by names of their own, `PROTOCOL` before
        each, so that they compare nothing.

        Raises:
            ValueError: unknown status, or figures whose names the case or the row's head holds.
            ResultsError: the row could not be written (disk full, folder not writable).
        """
        if status not in STATUSES:
            raise ValueError(f"status {status!r} is unknown; known are {', '.join(STATUSES)}")
        _check_case(case)
        figures = dict(figures or {})
        if why := figures.pop("wrong", None):
            times = ("_ms", "_s")
            figures = {PROTOCOL + n if n.endswith(times) else n: v for n, v in figures.items()}
            status, reason = "wrong", why
        if taken := sorted(set(figures) & (set(HEAD) | set(case))):
            raise ValueError(f"figures may not be named like the row's own fields: {taken}")
        facts = self.machine
        row = {
            "schema": SCHEMA, "study": self.study, "profile": self.profile,
            "machine": facts.key, "environment": facts.environment,
            "device_type": facts.device_type, "device_name": facts.device_name,
            "commit": facts.commit, "dirty": facts.dirty, "code": self.code_of(case),
            "recording": self.recording, "case": case_id(self.study, case),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "status": status, "reason": reason,
            **{k: plain(v) for k, v in case.items()}, **_finite(figures),
        }  # fmt: skip
        if os.environ.get(PLAN):
            self.missing([case])  # what cannot be measured here may be elsewhere
        elif status != "unavailable" or self._only is None or row["case"] in self._only:
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
    """Files of a name below a folder; by default the repository's and the visitor's own."""
    folders = [directory] if directory else [paths.RECORDED, paths.results_dir()]
    return list(dict.fromkeys(p for d in folders for p in sorted(d.glob(f"*/{name}.jsonl"))))


def machines_seen(directory: Path | None = None) -> "pd.DataFrame":
    """Descriptions of all machines that have rows, one line each time something changed there."""
    import pandas as pd

    read = (d for path in _files(directory, "machine") for d in read_objects(path))
    found = list({json.dumps(d, sort_keys=True): d for d in read}.values())
    names = [fact.name for fact in fields(machines.Machine) if fact.name != "key"]
    frame = pd.DataFrame(found, columns=["schema", "key", *names])
    return frame.rename(columns={"key": "machine"}).assign(
        own=lambda f: f.machine == machines.key()
    )


def import_rows(source: Path, destination: Path | None = None, machine: str | None = None) -> str:
    """Bring the rows of another results folder into this one, each once, changed only as asked.

    Args:
        source: the folder that holds the machines.
        destination: another results folder than `paths.results_dir()`.
        machine: file all rows under this name, for a run that nobody gave the machine's name; it
            has rows already, and of each environment that is brought.

    Returns how many there were, for people.

    Raises:
        ResultsError: `source` holds no `<machine>/<study>.jsonl`, a file in it is damaged, or
            `machine` was never seen with an environment of its rows.
    """
    files = sorted(source.glob("*/*.jsonl"))
    if not files:
        raise ResultsError(
            f"{source} holds no <machine>/<study>.jsonl; give the folder that holds the machines"
        )
    folder = destination or paths.results_dir()
    # Everything is read before anything is written: a damaged file stops the whole import.
    loaded = {f: read_objects(f) if f.name == "machine.jsonl" else read_rows(f) for f in files}
    if machine:
        seen = folder / machine / "machine.jsonl"
        known = {d["environment"] for d in (read_objects(seen) if seen.exists() else [])}
        brought = {str(row.get("environment")) for rows in loaded.values() for row in rows}
        if strange := sorted(brought - known):
            raise ResultsError(
                f"{source} holds rows of the environment {', '.join(strange)}, which "
                f"{machine!r} has none of in {folder}; import them under their own name"
            )
    added = present = 0
    for path, rows in loaded.items():
        target = folder / (machine or path.parent.name) / path.name
        name = "key" if path.name == "machine.jsonl" else "machine"
        there = {_line(r) for r in read_objects(target)} if target.exists() else set()
        for row in rows:
            filed = {**row, name: machine} if machine else row
            if _line(filed) in there:
                present += 1
                continue
            append_object(target, filed)
            added += 1
    return f"{added} rows added from {len(files)} files, {present} were there already"


_line = partial(json.dumps, sort_keys=True)
