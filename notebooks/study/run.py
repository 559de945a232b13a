"""Measuring a topic: what a notebook calls, and `make record`.

A race of which this machine lacks a row is measured whole, and its rows are appended together the
moment it ends: a run that is killed anywhere has lost that race at most, and goes on with it.
"""

import importlib
import json
import math
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
from tqdm import tqdm

import study
from fusedlib.bench import machine as machines
from fusedlib.bench.attempt import lost_device
from study import paths, provenance, rivals
from study import race as racing
from study.cases import Row, differing, label
from study.errors import SentenceError, SizesError
from study.files import append_objects, read_objects
from study.fits import looking_through_new_objects
from study.rows import HOW, RECORDINGS, REPLAY, key, load
from study.turns import turn_on

Case = dict[str, Any]
TRIED = "tried"
"""Figure of who was unavailable though nothing that is asked for beforehand is missing."""
RECORDING = "FUSEDLIB_RECORDING"
"""Names the set of recordings that rows go into."""
PROTOCOL = "published_protocol_"
_CARRIED = re.compile(rf"{re.escape(RECORDINGS)}|[a-z0-9][a-z0-9.-]*/\w+\.jsonl")
"""Names of the files of a recording that is carried."""
_ALIKE = ("environment", "commit", "dirty", "host", "boot_id", "gpu_uuid")


def sized(
    profiles: Mapping[str, Mapping[str, Any]], profile: str, given: Mapping[str, Any]
) -> SimpleNamespace:
    """The sizes of a profile with these values in place of its own: a topic's first line."""
    if profile not in profiles:
        raise SizesError(f"profile must be {' or '.join(profiles)}, not {profile!r}")
    own = profiles[profile]
    for name, value in given.items():
        if name not in own:
            raise SizesError(f"{name!r} is unknown; known: {', '.join(own)}")
        examples = [values[name] for values in profiles.values() if name in values]
        if not any(_fits(value, example) for example in examples):
            raise SizesError(f"{name} must be of the kind of {own[name]!r}, not {value!r}")
    return SimpleNamespace(**{**own, **given})


def _fits(value: Any, example: Any) -> bool:
    """Whether a value is of an example's kind; numbers are at least as positive."""
    if isinstance(example, list):
        kinds = example[:1] or [""]
        return isinstance(value, list) and all(_fits(one, kinds[0]) for one in value)
    if isinstance(example, bool) or isinstance(value, bool) or not isinstance(example, int | float):
        return isinstance(value, type(example))
    number = isinstance(value, int) or (isinstance(example, float) and isinstance(value, float))
    return number and math.isfinite(value) and (value > 0 or example <= 0)


def topics() -> list[str]:
    """Names of the topics: modules of `study` that say what they measure, and how. They are not
    imported: some modules cannot be where there is no Triton.
    """
    folder = Path(study.__file__).parent
    files = [*folder.glob("*.py"), *folder.glob("*/__init__.py")]
    named = {f.parent.name if f.stem == "__init__" else f.stem: f for f in files}
    texts = {name: file.read_text(encoding="utf-8") for name, file in named.items()}
    return sorted(name for name, text in texts.items() if "\nPROFILES = {" in text)


def topic(name: str) -> ModuleType:
    """The module of a topic."""
    known = topics()
    if name not in known:
        raise SentenceError(f"topic {name!r} is unknown; known: {', '.join(known)}")
    return importlib.import_module(f"study.{name}")


def races(name: str, profile: str = "quick", **sizes: Any) -> dict[str, list[Case]]:
    """The cases of a topic, those of a race together, by their race, in the order of the topic."""
    try:
        listed = topic(name).cases(profile, **sizes)
    except ValueError as error:
        raise SizesError(f"{name}: {error}") from None
    return grouped(name, listed)


def grouped(name: str, cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Cases of a topic by their race, each case once."""
    by_race: dict[str, list[Case]] = {}
    for case in cases:
        race = by_race.setdefault(key(name, case), [])
        if case not in race:
            race.append(case)
    return by_race


def run(
    name: str, profile: str = "quick", *, fresh: bool | None = None, until: float = math.inf,
    into: str = "", only: Sequence[str] | None = None, as_given: bool = False, **sizes: Any,
) -> pd.DataFrame:  # fmt: skip
    """Measure of a topic what this machine lacks, and give its rows with this machine's.

    A race is measured if one of its cases has no row, or one of fewer repetitions or seconds than
    it asks for, or one that failed, or that may be had now,
    which who was tried and refused may elsewhere or by other code; and if a notebook itself defines
    who runs. While rows are replayed nothing is measured.

    Args:
        profile: whose sizes hold where none are given: "quick", or "full" for a large GPU.
        fresh: measure all anew; by default when `$FRESH` is set to anything but 0.
        until: seconds since 1970; from then on no race begins.
        into: the set of recordings that the rows go into; by default `$FUSEDLIB_RECORDING`, else
            this machine's newest of the profile, or with `fresh` a new one.
        only: races that are measured, in this order; by default all in the topic's.
        as_given: whether a size that is quick's is meant so under another profile too; by default
            it is a notebook's knob that nobody turned.

    Raises:
        SizesError: an unknown size, or a value that does not fit.
        ResultsError: rows cannot be read or written.
    """
    quick = topic(name).PROFILES.get("quick", {})
    if profile != "quick" and not as_given:
        sizes = {n: value for n, value in sizes.items() if value != quick.get(n)}
    wanted = races(name, profile, **sizes)
    if only is not None:
        wanted = {race: wanted[race] for race in only if race in wanted}
    if REPLAY in os.environ:
        return load(name)
    fresh = os.environ.get("FRESH", "0") not in ("", "0") if fresh is None else fresh
    store = _Store(paths.results_dir() / machines.key(), name, profile)
    set_name = store.set_for(into or os.environ.get(RECORDING, ""), fresh)
    if store.lacking(wanted, set_name, fresh):

        def is_over() -> bool:
            return time.time() > until

        with turn_on(store.folder, name, is_over), _searched(wanted):
            # Another run may have measured them meanwhile.
            _measure(store, store.lacking(wanted, set_name, fresh), set_name, is_over)
    return load(name, here=True)


def _measure(
    store: "_Store", todo: Mapping[str, list[Case]], set_name: str, is_over: Callable[[], bool]
) -> None:
    """Measure these races, and append the rows of each the moment it ends.

    Raises:
        SentenceError: a failure after which every call fails, as an illegal access on the device.
            Who was first to fail has a row and nobody else of that race.
    """
    measure, written = topic(store.topic).measure, 0
    _require_device(store.topic)
    names = [n for n in differing(c for race in todo.values() for c in race) if n not in HOW]
    recording = ""
    try:
        how = {"desc": store.topic, "unit": "case", "mininterval": 1.0, "leave": False}
        with tqdm(total=sum(map(len, todo.values())), dynamic_ncols=True, **how) as shown:
            for race in todo.values():
                if is_over():
                    break
                shown.set_postfix_str(label(race[0], names), refresh=False)
                began, clock = datetime.now(UTC), time.monotonic()
                rows: list[Row] = measure(race)
                failed = [row for row in rows if row.status == "failed"]
                if lost := lost_device() if failed else "":
                    rows = [next((r for r in failed if lost in str(r.reason)), failed[0])]
                for row in rows:
                    if row.status == "unavailable" and store.may_be_had(row.case):
                        row.figures[TRIED] = True
                recording = recording or store.recording(set_name, began)
                seconds = (time.monotonic() - clock) / max(len(rows), 1)
                append_objects(
                    store.path, [_line(store.topic, row, recording, seconds) for row in rows]
                )
                written += len(rows)
                shown.update(len(race))
                if lost:
                    _require_device(f"{store.topic}: {label(rows[0].case, ['provider', *names])}")
    finally:
        racing.free()
    print(f"{store.topic}: {written} rows written · {store.path}")


def _require_device(who: str) -> None:
    if lost := lost_device():
        raise SentenceError(
            f"{who}: {lost}. Nothing runs in this process any more, so nobody else was measured: "
            "run it again, in a new process; races in which somebody failed then come last"
        )


def _searched(wanted: Mapping[str, list[Case]]) -> AbstractContextManager[None]:
    on_cpu = all(case.get("device") == "cpu" for race in wanted.values() for case in race)
    return looking_through_new_objects() if on_cpu else nullcontext()


@dataclass(frozen=True)
class _Store:
    """Where a topic's rows of this machine lie."""

    folder: Path
    topic: str
    profile: str

    @property
    def path(self) -> Path:
        return self.folder / f"{self.topic}.jsonl"

    @property
    def recordings_file(self) -> Path:
        """The file of recordings: beside a visitor's rows, else the repository's."""
        visitor = not self.folder.exists() or (self.folder / ".gitignore").exists()
        is_visitor = visitor and not os.environ.get(machines.NAME)
        return (self.folder if is_visitor else self.folder.parent) / RECORDINGS

    def recordings(self) -> list[dict[str, Any]]:
        """Those of this machine, the oldest first."""
        lines = read_objects(self.recordings_file) if self.recordings_file.exists() else []
        return [line for line in lines if line["machine"] == self.folder.name]

    def set_for(self, into: str, fresh: bool) -> str:
        """The set that a run writes into."""
        own = [line["set"] for line in self.recordings() if line["profile"] == self.profile]
        if into or (own and not fresh):
            return into or str(own[-1])
        day = f"{datetime.now(UTC):%Y-%m-%d}" + f"-{self.profile}" * (self.profile != "full")
        taken = {line["set"] for line in self.recordings()}
        names = (day if n == 1 else f"{day}.{n}" for n in range(1, len(taken) + 2))
        return next(name for name in names if name not in taken)

    def lacking(
        self, wanted: Mapping[str, list[Case]], set_name: str, fresh: bool
    ) -> dict[str, list[Case]]:
        """Of these races those that are to be measured; last those in which somebody failed."""
        of_set = {line["id"]: line for line in self.recordings() if line["set"] == set_name}
        lines = read_objects(self.path) if self.path.exists() and not fresh else []
        lines = [row for row in lines if row["recording"] in of_set]
        existing = {(row["race"], row["provider"]): row for row in lines}
        now = machines.describe().environment, provenance.commit()[0]
        by_this_code = {
            i for i, line in of_set.items() if now == (line["environment"], line["commit"])
        }

        def lacks(race: str, case: Case) -> bool:
            row = existing.get((race, case.get("provider")))
            if row is None or row["status"] == "failed":
                return True
            if rivals.is_own(str(case.get("provider"))):
                return True
            if any((case.get(n) or 0) > (row.get(n) or math.inf) for n in HOW - {"provider"}):
                return True
            was_tried = row.get(TRIED) and row["recording"] in by_this_code
            return row["status"] == "unavailable" and not was_tried and self.may_be_had(case)

        left = {race: cases for race, cases in wanted.items() if any(lacks(race, c) for c in cases)}
        failed = {race for (race, _), row in existing.items() if row["status"] == "failed"}
        return dict(sorted(left.items(), key=lambda item: item[0] in failed))

    def may_be_had(self, case: Mapping[str, Any]) -> bool:
        """Whether nothing that its topic asks for beforehand is missing here."""
        available = getattr(topic(self.topic), "available", None)
        if available is None:
            return False
        try:
            available(case)
        except Exception:
            return False
        return True

    def recording(self, set_name: str, began: datetime) -> str:
        """The id of this run's recording, noted where the run before was another."""
        commit, dirty = provenance.commit()
        facts = machines.describe().as_dict() | {"commit": commit, "dirty": dirty}
        own = [line for line in self.recordings() if line["set"] == set_name]
        if own and all(own[-1].get(name) == facts[name] for name in _ALIKE):
            return str(own[-1]["id"])
        number = f".{len(own) + 1}" * bool(own)
        line = {
            "id": f"{set_name}{number}", "set": set_name, "machine": self.folder.name,
            "profile": self.profile, **facts, "began": began.isoformat(timespec="seconds"),
            "files": provenance.files(),
        }  # fmt: skip
        append_objects(self.recordings_file, [json.loads(json.dumps(line))])
        return str(line["id"])


def _line(name: str, row: Row, recording: str, seconds: float) -> dict[str, Any]:
    """A row as it is written.

    A figure `wrong` with a reason makes the row wrong: it is a published result that is timed all
    the same, as its authors did, and its times go by names of their own, `PROTOCOL` before each.
    """
    case, figures = dict(row.case), dict(row.figures)
    status, reason = row.status, row.reason
    if why := figures.pop("wrong", None):
        figures = {PROTOCOL + n if n.endswith(("_ms", "_s")) else n: v for n, v in figures.items()}
        status, reason = "wrong", why
    head = {
        "race": key(name, case), "provider": case.pop("provider", None), "recording": recording,
        "session": figures.pop("session", None),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "took_s": round(seconds, 1), "status": status, "reason": reason,
    }  # fmt: skip
    if taken := sorted(figures.keys() & {*head, *case}):
        raise ValueError(f"figures may not be named like the row's own fields: {taken}")
    return {**head, **{k: plain(v) for k, v in case.items()}, **finite(figures)}


def plain(value: Any) -> Any:
    """A value as JSON knows it: numpy and torch scalars become Python's."""
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value.item() if hasattr(value, "item") else value


def finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no inf and nan: such a figure becomes null and is named in `nonfinite`."""
    out = {name: plain(value) for name, value in figures.items()}
    bad = [
        name for name, value in out.items()
        if any(isinstance(v, float) and not math.isfinite(v)
               for v in (value if isinstance(value, list) else [value]))
    ]  # fmt: skip
    named = {"nonfinite": [f"{name}={out[name]}" for name in bad]} if bad else {}
    return {**out, **dict.fromkeys(bad), **named}


def recorded(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The recordings of a machine's folder by their set, the oldest first."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for line in _Store(folder, "", "full").recordings():
        sets.setdefault(line["set"], []).append(line)
    return sets


def lacking(name: str, into: str) -> dict[str, list[Case]]:
    """What the profile full measures of a topic, on a CUDA GPU, and this machine's set lacks."""
    store = _Store(paths.results_dir() / machines.key(), name, "full")
    return store.lacking(races(name, "full", device="cuda"), into, fresh=False)


def carried(into: str) -> dict[str, str]:
    """What this machine's set of recordings has, as files by the name that they have in a folder
    of results: for a machine from which nothing else comes back. `add` takes them.
    """
    store = _Store(paths.results_dir() / machines.key(), "", "full")
    lines = [line for line in store.recordings() if line["set"] == into]
    ids = {line["id"] for line in lines}
    files = {RECORDINGS: lines} if lines else {}
    for path in sorted(store.folder.glob("*.jsonl")):
        rows = [row for row in read_objects(path) if row.get("recording") in ids]
        files |= {f"{store.folder.name}/{path.name}": rows} if rows else {}
    return {
        name: "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        for name, lines in files.items()
    }  # fmt: skip


def add(file: Path) -> int:
    """Add the rows of a file that was carried here to the folder of results; how many are new.

    Raises:
        SentenceError: it holds what no recording has, or another recording of a name that is known,
            whose rows would take the place of that one's. Nothing was added.
    """
    lines_by_file: dict[str, list[str]] = {}
    with tarfile.open(file) as archive:
        for member in archive.getmembers():
            read = archive.extractfile(member) if member.isfile() else None
            if read is None:
                continue
            if not _CARRIED.fullmatch(member.name):
                raise SentenceError(
                    f"{file} has {member.name!r}; only {RECORDINGS} and <machine>/<topic>.jsonl "
                    "are added. Pack what was measured by `make record PACKED=`"
                )
            lines_by_file[member.name] = read.read().decode().splitlines()
    results = paths.results_dir()
    existing = read_objects(results / RECORDINGS) if (results / RECORDINGS).exists() else []
    by_name = {(line["machine"], line["id"]): line for line in existing}
    for new in map(json.loads, lines_by_file.get(RECORDINGS, [])):
        if by_name.get((new["machine"], new["id"]), new) != new:
            raise SentenceError(
                f"{file}: a recording {new['id']} of {new['machine']} is there already, begun "
                f"{by_name[new['machine'], new['id']].get('began')}, and this one was begun "
                f"{new.get('began')}. One of them needs another name: measure with NAME="
            )
    added = 0
    for name, lines in lines_by_file.items():
        path = results / name
        before = {*path.read_text(encoding="utf-8").splitlines()} if path.exists() else set()
        fresh = [line for line in lines if line not in before]
        append_objects(path, map(json.loads, fresh))
        added += len(fresh) * (name != RECORDINGS)
    return added
