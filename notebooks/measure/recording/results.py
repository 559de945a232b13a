"""Recordings: what was measured, one flat JSON object a line, written the moment it is measured.

    <results>/<machine>/<recording>/<study>.jsonl    rows: a case, its status and its figures
    <results>/<machine>/<recording>/machine.json     what all of them share, once

A recording is made by one profile, at one commit, on one type of card, over as many runs as it
takes; `machine.json` has an entry for each run (commit, host, device, driver, versions) and the
hash of each file of code. A row's run is the last that began before it was measured. Recordings are
data: what lies in the folder counts, whatever became of the code since.

A machine's folder that holds a `.gitignore` is a visitor's; all others are part of the repository.
Its file `.measuring` says who is measuring there now: one run at a time does.
"""

import hashlib
import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedlib.bench import machine as machines
from measure.racing.cases import STATUSES, Case, Row, differing, label
from measure.racing.memory import looking_through_new_objects
from measure.recording import paths, provenance
from measure.recording.files import write_whole
from measure.recording.jsonl import (
    ResultsError,
    TornLineWarning,
    append_object,
    read_objects,
    writing,
)
from measure.recording.progress import progress
from measure.recording.turns import turn

if TYPE_CHECKING:
    import pandas as pd

    from measure.racing.race import Race

SCHEMA = 2
# A failed case may have failed by bad luck and an unavailable one may have been installed since.
TRIED_AGAIN = ("failed", "unavailable")
HEAD = ("case", "measured_at", "took_s", "status", "reason")
FRAME = ("machine", "recording", "profile", "study", "device_type", "device_name", "own")
PROTOCOL = "published_protocol_"
DESCRIPTION = "machine.json"
ASSEMBLED = "assembled"
"""Name of a recording that was put together from several runs, none of which had all cases."""
RECORDING = "FUSEDLIB_RECORDING"
LOCK = ".measuring"

REPLAY = "FUSEDLIB_REPLAY"
REPLAYED: ContextVar[str] = ContextVar("REPLAYED", default="")
"""Set while cells run over the rows there are, and measure nothing: "all" of them, or those that
are "committed"."""


@contextmanager
def replaying(rows: str = "") -> Iterator[None]:
    """While the block runs nothing is measured, and these rows are read.

    Args:
        rows: "all" or "committed"; by default those of a block around this one, else all.
    """
    chosen, before = rows or REPLAYED.get() or "all", os.environ.get(REPLAY)
    token = REPLAYED.set(chosen)
    os.environ[REPLAY] = chosen  # for topics, which may be read in another process
    try:
        yield
    finally:
        REPLAYED.reset(token)
        if before is None:
            del os.environ[REPLAY]
        else:
            os.environ[REPLAY] = before


def case_id(study: str, case: Mapping[str, Any]) -> str:
    """Identity of a case: the hash of its study and all its fields, whatever their order."""
    text = json.dumps([study, dict(case)], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of one file in the order they were written.

    Raises:
        ResultsError: a line that is not a JSON object, or a row without case or status.
    """
    rows = read_objects(path)
    for number, row in enumerate(rows, 1):
        if lacking := [name for name in ("case", "status") if not isinstance(row.get(name), str)]:
            raise ResultsError(
                f"{path}: row {number} lacks {', '.join(lacking)}; it was not written by fusedlib. "
                "Move the line elsewhere and run again."
            )
    return rows


@dataclass(frozen=True)
class Recording:
    """One recording's folder.

    Attributes:
        profile: whose parameters its cases have.
        runs: a description of commit, host, device and versions for each run, the oldest first.
        files: hash of each file of code by its path, of the newest run.
    """

    folder: Path
    profile: str
    runs: tuple[dict[str, Any], ...]
    files: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> "Recording":
        """From its `machine.json`.

        Raises:
            ResultsError: the file is missing, damaged, or of a newer schema.
        """
        path = folder / DESCRIPTION
        try:
            description = json.loads(path.read_text(encoding="utf-8"))
            schema, profile = description["schema"], description["profile"]
            runs = tuple(description["runs"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ResultsError(
                f"{path} cannot be read ({type(error).__name__}: {error}); rows beside it are of "
                "no known machine. Restore the file from git, or move the folder elsewhere."
            ) from None
        if schema > SCHEMA:
            raise ResultsError(
                f"{path} has schema {schema}, this fusedlib reads up to {SCHEMA}. "
                "Update fusedlib, or point FUSEDLIB_RESULTS to another folder."
            )
        return cls(folder, profile, runs, description.get("files", {}))

    @property
    def machine(self) -> str:
        """Name of the machine's folder."""
        return self.folder.parent.name

    @property
    def name(self) -> str:
        """Of the recording, unique on its machine."""
        return self.folder.name

    @property
    def is_committed(self) -> bool:
        """Whether it is part of the repository and not a visitor's."""
        return is_committed(self.folder.parent)

    @property
    def commits(self) -> list[str]:
        """Those that its runs were made at, the oldest first, each once."""
        return list(dict.fromkeys(str(run.get("commit") or "unknown")[:7] for run in self.runs))

    def studies(self) -> list[Path]:
        """Its files of rows."""
        return sorted(self.folder.glob("*.jsonl"))


def recordings(directory: Path | None = None) -> list[Recording]:
    """All recordings of a folder; by default the repository's and the visitor's own.

    While those that are committed are replayed, the repository's alone.

    Raises:
        ResultsError: a folder of rows has no readable `machine.json`.
    """
    committed = directory is None and REPLAYED.get() == "committed"
    own = [] if committed else [paths.results_dir()]
    folders = [directory] if directory else [paths.RECORDED, *own]
    rows = (path for folder in folders for path in sorted(folder.glob("*/*/*.jsonl")))
    with_rows = {path.parent.resolve(): path.parent for path in rows}
    return [
        Recording.read(folder) for folder in with_rows.values()
        if not committed or is_committed(folder.parent)
    ]  # fmt: skip


def is_committed(machine: Path) -> bool:
    """Whether a machine's folder is part of the repository and not a visitor's."""
    return not (machine / ".gitignore").exists()


def check(studies: Iterable[str] | None = None, directory: Path | None = None) -> list[str]:
    """Read all rows of these studies (None: of all) and the descriptions of their recordings.

    Returns what was dropped on the way (torn last lines), a sentence each.

    Raises:
        ResultsError: the first file that cannot be read, with the reason.
    """
    names = None if studies is None else set(studies)
    with warnings.catch_warnings(record=True) as dropped:
        warnings.simplefilter("always", TornLineWarning)
        for recording in recordings(directory):
            for path in recording.studies():
                if names is None or path.stem in names:
                    read_rows(path)
    return [str(warning.message) for warning in dropped]


@dataclass
class Recorder:
    """Writes the rows of one study on this machine and knows which need not be measured again.

        recorder.race(RACE, cases)

    Rows go into the recording named by `$FUSEDLIB_RECORDING`; else into the newest one of this
    machine and profile that has rows of the study, else into the newest one; with `fresh`, and
    where there is none, into a new one named by the day.

    While another run measures on this machine, this one waits, and says so; then it measures what
    that one has left.

    Args:
        fresh: measure everything anew; by default when `$FRESH` is set to anything but 0.
        only: ids of the cases that are measured; by default all.
        until: seconds since 1970; from then on no case begins.
        commit: of the code, and whether the code differs from it.
    """

    study: str
    profile: str
    fresh: bool | None = None
    directory: Path | None = None
    only: Collection[str] | None = None
    until: float = math.inf
    machine: machines.Machine = field(default_factory=machines.describe)
    commit: provenance.Commit = field(default_factory=provenance.commit)
    measured: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        if self.fresh is None:
            self.fresh = os.environ.get("FRESH", "0") not in ("", "0")
        self._folder = (self.directory or paths.results_dir()) / self.machine.key
        self._pending: dict[str, Case] = {}
        self._described = False
        self._clock = time.monotonic()
        self._look()

    def _look(self) -> None:
        """Choose the recording, until something was written or kept there, and read its rows."""
        if not (self.measured or self.skipped):
            self.recording = os.environ.get(RECORDING) or self._chosen()
            self.path = self._folder / self.recording / f"{self.study}.jsonl"
        rows = read_rows(self.path) if self.path.exists() else []
        self._newest = {row["case"]: row for row in rows}

    def _chosen(self) -> str:
        """The recording that a stopped or repeated run goes on with, or a new one."""
        own = [
            Recording.read(path.parent) for path in self._folder.glob(f"*/{DESCRIPTION}")
            if path.parent.name != ASSEMBLED
        ]  # fmt: skip
        own = [recording for recording in own if recording.profile == self.profile]
        if own and not self.fresh:
            # Of two that began within a second the one whose name counts on: day, day.2, day.10.
            return max(
                (self._has_rows(r.name), str(r.runs[-1]["began"]), len(r.name), r.name) for r in own
            )[-1]
        day = datetime.now(UTC).date().isoformat()
        if self.profile != "full":
            day += f"-{self.profile}"
        names = (day if n == 1 else f"{day}.{n}" for n in count(1))
        return next(name for name in names if not self._has_rows(name))

    def _has_rows(self, recording: str) -> bool:
        return (self._folder / recording / f"{self.study}.jsonl").exists()

    def rows(self) -> "pd.DataFrame":
        """Rows of every recording of every machine as one tidy frame.

        Of each machine the profile `full` where it has rows of it. `own` tells this machine's rows.
        `machine` is a categorical that names this machine even where it has none; its first
        category is the one that figures and tables show: one recorded in full, on a GPU, this one
        before others, with most experiments, then most cases that are ok, and most cases. Of a
        case that a recording measured twice, the later row.
        """
        import pandas as pd

        newest: dict[tuple[str, ...], dict[str, Any]] = {}
        for recording in recordings(self.directory):
            path = recording.folder / f"{self.study}.jsonl"
            if not path.exists():
                continue
            shared = {
                "machine": recording.machine, "recording": recording.name,
                "profile": recording.profile, "study": self.study,
                **{name: recording.runs[-1].get(name) for name in ("device_type", "device_name")},
            }  # fmt: skip
            for row in read_rows(path):
                newest[recording.machine, recording.name, row["case"]] = shared | row
        full = {r["machine"] for r in newest.values() if r["profile"] == "full"}
        chosen = [r for r in newest.values() if r["profile"] == "full" or r["machine"] not in full]
        frame = pd.DataFrame(chosen) if chosen else pd.DataFrame(columns=[*FRAME, *HEAD])
        on_gpu = set(frame.loc[frame["device_type"] == "cuda", "machine"])
        ran = frame[frame["status"] == "ok"]
        counts = [
            ran.groupby("machine")["experiment"].nunique() if "experiment" in ran else {},
            ran.groupby("machine")["case"].nunique(),
            frame.groupby("machine")["case"].nunique(),
        ]  # fmt: skip
        own = machines.key()
        names = sorted(
            {*frame["machine"], own}, reverse=True,
            key=lambda name: (
                name in full, name in on_gpu, name == own,
                *(count.get(name, 0) for count in counts), name,
            ),
        )  # fmt: skip
        frame["machine"] = pd.Categorical(frame["machine"], categories=names)
        frame = frame.assign(own=frame["machine"] == own)
        frame.attrs["study"] = self.study
        return frame

    def missing(self, cases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Of the cases that may be measured those that the recording has no row of yet, or one that
        is tried again, and those of rivals that this notebook defines, whose code may have changed.
        """
        from measure.racing import rivals  # takes torch, which who reads rows need not wait for

        todo = []
        for case in cases:
            _check_case(case)
            name = case_id(self.study, case)
            row = self._newest.get(name)
            lacks = row is None or self.fresh or row["status"] in TRIED_AGAIN
            lacks = lacks or rivals.is_own(str(case.get("provider")))
            if lacks and (self.only is None or name in self.only):
                todo.append(dict(case))
        return todo

    def has(self, cases: Iterable[Case]) -> bool:
        """Whether none of these cases, which are timed together, needs to be: `skip` of a race.

        Those that lack a row are expected by the next `record`, and so are the others, which are
        timed again beside them.
        """
        asked = list(cases)
        if not self.missing(asked):
            self.skipped += sum(case_id(self.study, case) in self._newest for case in asked)
            return True
        for case in asked:
            self._pending[case_id(self.study, case)] = case if len(asked) == 1 else _alike(case)
        return False

    def race(self, spec: "Race", cases: Iterable[Case]) -> None:
        """Race the cases that the recording lacks, and those that are timed together with them;
        none while rows are replayed.
        """
        from measure.racing.race import race

        self._measure(cases, lambda todo: race(spec, todo, skip=self.has))

    def sweep(
        self, cases: Iterable[Case], measure: Callable[[Case], dict[str, Any]]
    ) -> None:  # fmt: skip
        """Measure the cases that the recording lacks; none while rows are replayed."""
        from measure.racing.sweep import sweep

        self._measure(cases, lambda todo: sweep(todo, measure, skip=self.has))

    def _measure(
        self, cases: Iterable[Case], rows: Callable[[list[Case]], Generator[Row, None, None]]
    ) -> None:
        if REPLAYED.get():
            return
        asked = list(cases)
        if not self.missing(asked):
            self.record(rows(asked))
            return
        on_cpu = all(case.get("device") == "cpu" for case in asked)
        searched = looking_through_new_objects() if on_cpu else nullcontext()
        with turn_on(self._folder, self.study, self.is_over), searched:
            self._look()  # another run may have measured them meanwhile
            self.record(rows(asked))

    def record(self, rows: Generator[Row, None, None]) -> None:
        """Write each row as it comes, show how far it is, and say at the end what was done.

        When the time is over no further case begins: what was timed together is recorded whole.

        Raises:
            ResultsError: a row could not be written; the generator is closed.
        """
        pending, self._pending = self._pending, {}
        names = differing(pending.values())
        self._clock = time.monotonic()
        in_session = False
        with closing(rows), progress(self.study, len(pending)) as shown:
            while in_session or not self.is_over():
                if pending:
                    shown.case(label(next(iter(pending.values())), names))
                if (row := next(rows, None)) is None:
                    break
                self.append(row.case, row.figures, status=row.status, reason=row.reason)
                if pending.pop(case_id(self.study, row.case), None) is not None:
                    shown.done()
                in_session = "session" in row.figures and _alike(row.case) in pending.values()
        print(self.summary())

    def is_over(self) -> bool:
        """Whether the time to measure is over."""
        return time.time() > self.until

    def append(
        self, case: Mapping[str, Any], figures: Mapping[str, Any] | None = None,
        *, status: str = "ok", reason: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Write one row, flushed to disk before this returns, and give it back.

        Nothing is written of a case that was not asked for and cannot be measured here.

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
        if taken := sorted(set(figures) & {*FRAME, *HEAD, *case}):
            raise ValueError(f"figures may not be named like the row's own fields: {taken}")
        before, self._clock = self._clock, time.monotonic()
        row = {
            "case": case_id(self.study, case),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "took_s": round(self._clock - before, 1), "status": status, "reason": reason,
            **{k: plain(v) for k, v in case.items()}, **finite(figures),
        }  # fmt: skip
        if status != "unavailable" or self.only is None or row["case"] in self.only:
            self._write(row)
        return row

    def _write(self, row: dict[str, Any]) -> None:
        before = self._newest.get(row["case"])
        self._newest[row["case"]] = row
        same = ("status", "reason")
        if row["status"] == "unavailable" and before and all(before[k] == row[k] for k in same):
            return  # still unavailable for the same reason: nothing new to record
        if not self._described:
            run = self.machine.as_dict() | dict(zip(("commit", "dirty"), self.commit, strict=True))
            describe(self.path.parent, self.profile, run | {"began": row["measured_at"]})
            self._described = True
        append_object(self.path, row)
        self.measured += 1

    def summary(self) -> str:
        """What this run did, for people."""
        text = f"{self.study}: {self.measured} rows written"
        if self.skipped:
            text += f", {self.skipped} unchanged rows kept (FRESH=1 measures them anew)"
        return f"{text} · {self.path}"


def describe(folder: Path, profile: str, run: Mapping[str, Any]) -> None:
    """Note in a recording's `machine.json` that a run on this machine writes rows from now on.

    A run at the commit and in the environment of the one before goes on with it.

    Raises:
        ResultsError: the folder cannot be written, or its recording has another profile.
    """
    path = folder / DESCRIPTION
    with turn_on(folder.parent, folder.name):
        before = Recording.read(folder) if path.exists() else None
        if before and before.profile != profile:
            raise ResultsError(
                f"{folder} is a recording of the profile {before.profile}, not {profile}; give "
                "another name with FUSEDLIB_RECORDING"
            )
        runs = before.runs if before else ()
        alike = ("environment", "commit", "dirty", "host", "boot_id", "gpu_uuid")
        if runs and all(runs[-1].get(name) == run[name] for name in alike):
            return
        shared = {"schema": SCHEMA, "profile": profile, "runs": [*runs, run]}
        shared["files"] = provenance.files()
        with writing(path):
            write_whole(path, json.dumps(shared, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def turn_on(
    machine: Path, study: str, is_over: Callable[[], bool] = lambda: False
) -> Iterator[None]:  # fmt: skip
    """The turn of a study on the machine of this folder, which is made where there is none.

    Raises:
        ResultsError: the folder cannot be written.
    """
    with writing(machine):
        _make(machine)
    with turn(machine / LOCK, study, is_over):
        yield


def _make(machine: Path) -> None:
    """Make a machine's folder. That of one that nobody named gets a `.gitignore` with it: it is a
    visitor's, and no part of the repository.
    """
    if machine.exists():
        return
    machine.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=machine.parent) as unfinished:
        made = Path(unfinished) / machine.name
        made.mkdir()
        if not os.environ.get(machines.NAME):
            (made / ".gitignore").write_text("*\n")
        try:
            made.rename(machine)
        except OSError:
            if not machine.exists():  # else another run was first
                raise


def plain(value: Any) -> Any:
    """A value as JSON knows it: numpy and torch scalars become Python's."""
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{value!r} ({type(value).__name__}) is no plain value; rows are flat")


def finite(figures: Mapping[str, Any]) -> dict[str, Any]:
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


def _alike(case: Case) -> Case:
    """What a case shares with those that are timed together with it."""
    return {name: value for name, value in case.items() if name != "provider"}


def _check_case(case: Mapping[str, Any]) -> None:
    for name, value in case.items():
        if name in (*HEAD, *FRAME):
            raise ValueError(f"a case may not have a field named {name!r}: the row's head has it")
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise ValueError(f"case field {name}={value!r} is no plain scalar; cases are flat")
