"""`make record`: one recording of what the full profile measures, quickly decided claims first.

What it will take is known beforehand, from the last recording's own times. It can be stopped and
resumed, at the same commit on the same type of card, over as many half hours as it takes.
"""

import io
import math
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from fusedlib.bench import machine as machines
from measure import study as studies
from measure.recording import paths, provenance, results
from measure.recording.files import write_whole
from measure.recording.results import Recording
from press import replay, say
from press.analysis import NoRowsError
from press.claims import Claim
from press.running.config import Config, ConfigError
from press.variables import environment
from study import run as topics
from study.rows import load

STUDY_S = 20.0
"""Seconds that a study takes before its cases: a new process, imports."""
UNKNOWN_S = 5.0
UNITS = "plan"
"""Key of the units in `code.json`."""
MOST_USED_GIB = 2.0  # of a card on which nothing runs; the driver keeps some of it


@dataclass(frozen=True)
class Unit:
    """Cases of a study that are measured together: those of one race, or a single one."""

    study: str
    cases: tuple[str, ...]
    claims: int  # how many rest on one of them
    seconds: float  # what they took in the last recording, or an estimate


def units(config: Config, only: Sequence[str] = ()) -> list[Unit]:
    """What the full profile measures, the units of the claim that takes the least time first, and
    last those on which no claim rests: a recording that ends early decides as many as it can.

    Claims are those of the notebooks, as they are stated over the repository's recordings. Where
    the code was carried without git, the units come from what `make pack` wrote.
    """
    packed = provenance.packed().get(UNITS)
    if packed is not None:
        all_units = [Unit(**{**unit, "cases": tuple(unit["cases"])}) for unit in packed]
        names = {study.name for study in config.select(only)}
        return [unit for unit in all_units if unit.study in names]

    ordered: list[tuple[float, Unit]] = []
    with replay.recorded_rows():
        for study in filter(config.studies.__contains__, config.select(only)):
            if study.name in topics.topics():
                ordered += _of_topic(study.name)
                continue
            parts = config.with_details([study])
            stated = [claim for part in parts for claim in _stated(part.notebook)]
            selected = [{*claim.selection["case"]} for claim in stated]
            rows = results.Recorder(study.name, profile="full").rows()
            listed = [*_of_study(study.name, rows, selected)]
            costs = [sum(u.seconds for u in listed if wanted & {*u.cases}) for wanted in selected]
            for unit in listed:
                rests = [c for c, w in zip(costs, selected, strict=True) if w & {*unit.cases}]
                ordered.append((min(rests, default=math.inf), unit))
    return [unit for _, unit in sorted(ordered, key=lambda pair: (pair[0], pair[1].seconds))]


def _of_topic(topic: str) -> Iterator[tuple[float, Unit]]:
    """The races of a topic, each with the time that the quickest claim on it takes in all."""
    stated = say.every(topic)
    needed = [{race for race, _ in say.required(topic, c.of(say.rows_of(topic)))} for c in stated]
    took = load(topic).groupby("race")["took_s"]
    typical_s, known = took.mean().median(), took.sum()
    times = {
        race: float(known.get(race, len(cases) * (typical_s or UNKNOWN_S)))
        for race, cases in topics.races(topic, "full", device="cuda").items()
    }  # fmt: skip
    costs = [sum(times.get(race, 0.0) for race in races) for races in needed]
    for race, seconds in times.items():
        rests = [cost for cost, races in zip(costs, needed, strict=True) if race in races]
        yield min(rests, default=math.inf), Unit(topic, (race,), len(rests), seconds)


def _stated(notebook: Path) -> list[Claim]:
    """The claims of a notebook; none where it asks for rows that nobody has recorded yet."""
    try:
        return replay.analysis_of(notebook).claims
    except NoRowsError:
        return []


def _of_study(study: str, rows: Any, selected: list[set[str]]) -> Iterator[Unit]:
    """The units of one study; those raced together are one: in the newest rows, whichever machine
    they are of, for code that checks more takes longer than a card that is slower."""
    last = rows.sort_values("measured_at", kind="stable").drop_duplicates("case", keep="last")
    last = last.set_index("case").reindex(columns=["took_s", "session"])
    times = last["took_s"].dropna()
    typical_s = statistics.median(times) if len(times) else UNKNOWN_S
    races: dict[str, list[str]] = {}
    for case in studies.full_cases(study):
        session = last["session"].get(case)
        races.setdefault(session if isinstance(session, str) else case, []).append(case)
    for cases in races.values():
        seconds = sum(float(times.get(case, typical_s)) for case in cases)
        claims = sum(bool(wanted & {*cases}) for wanted in selected)
        yield Unit(study, tuple(cases), claims, seconds)


def left(units: Iterable[Unit], folder: Path) -> list[Unit]:
    """The units of which a recording's folder lacks a case, or has one that is tried again."""
    rows = [row for path in folder.glob("*.jsonl") for row in results.read_rows(path)]
    there = {row["case"] for row in rows if row["status"] not in results.TRIED_AGAIN}
    listed = list(units)
    for topic in {unit.study for unit in listed} & {*topics.topics()}:
        races = {race for unit in listed if unit.study == topic for race in unit.cases}
        there |= races - topics.lacking(topic, folder.name).keys()
    return [unit for unit in listed if not there.issuperset(unit.cases)]


def within(units: Iterable[Unit], minutes: float) -> list[Unit]:
    """The first units that fit the time, with what each study takes besides."""
    chosen: list[Unit] = []
    left, studies = 60 * minutes, set()
    for unit in units:
        cost = unit.seconds + (STUDY_S if unit.study not in studies else 0.0)
        if cost <= left:
            chosen.append(unit)
            studies.add(unit.study)
            left -= cost
    return chosen


def summary(units: Iterable[Unit]) -> str:
    """A line a study: cases, those that claims rest on, and minutes."""
    lines = [(u.study, len(u.cases), len(u.cases) * bool(u.claims), u.seconds / 60) for u in units]
    table = pd.DataFrame(lines, columns=["study", "cases", "for claims", "minutes"])
    table = table.groupby("study", sort=False).sum().rename_axis(None)
    table["minutes"] += STUDY_S / 60
    table.loc["all"] = table.sum()
    counts = dict.fromkeys(["cases", "for claims"], int)
    return str(table.astype(counts).to_string(float_format="{:.1f}".format))


def check_ready() -> None:
    """Raise a ConfigError unless this machine and this code may record."""
    facts = machines.describe()
    if facts.device_type != "cuda":
        raise ConfigError(
            f"a recording is made on a CUDA GPU; {facts.device_name} is none. `make study` "
            "measures what this machine can"
        )
    check_clean()
    if busy := machines.others_on_card(MOST_USED_GIB):
        raise ConfigError(
            f"{busy} on the card; a measurement beside others is no recording. Wait until they "
            "have ended, or stop them"
        )


def check_clean() -> None:
    """Raise a ConfigError unless the code is a commit's."""
    commit, dirty = provenance.commit()
    if commit is None:
        raise ConfigError(
            "nobody can tell which commit this code is: there is no git here, and no "
            f"{provenance.PACKED}. Run `make pack` where the code has git, and carry that file too"
        )
    if dirty is not False:
        changed = provenance.changed()
        raise ConfigError(
            f"the code differs from commit {commit[:7]}: {', '.join(changed[:5])}"
            f"{' and more' if len(changed) > 5 else ''}. Commit first, and `make pack` again where "
            "the code is carried"
        )


def chosen_name(name: str, folder: Path, facts: machines.Machine) -> str:
    """This name, or without one that of this code's newest recording, else day and commit.

    Code is what measures: a commit that changed a text, or which cases there are, goes on with the
    recording of the commit before.
    """
    commit, _ = provenance.commit()
    existing = [Recording.read(path.parent) for path in folder.glob(f"*/{results.DESCRIPTION}")]
    known, sets = {recording.name for recording in existing}, topics.recorded(folder)
    existing += [
        Recording(folder / name, lines[0]["profile"], tuple(lines), lines[-1]["files"] or {})
        for name, lines in sets.items() if name not in known
    ]  # fmt: skip
    other = {r.name: _other_code(r, facts) for r in existing}
    if not name:
        alike = [
            r for r in existing
            if not other[r.name] and r.profile == "full" and r.name != results.ASSEMBLED
        ]  # fmt: skip
        new = f"{datetime.now(UTC):%Y-%m-%d}-{(commit or '')[:7]}"
        return max(alike, key=lambda r: str(r.runs[-1]["began"])).name if alike else new
    if reason := other.get(name):
        raise ConfigError(f"the recording {name} is of {reason}. Give another NAME=")
    return name


def _other_code(recording: Recording, facts: machines.Machine) -> str:
    """What of a recording's card and code is not this one's, in words; empty where all is."""
    card = recording.runs[-1]["device_name"]
    if card != facts.device_name:
        return f"{card}; this is {facts.device_name}"
    changed = [path for path in provenance.differing(recording.files) if path.endswith(".py")]
    if not changed:
        return ""
    more = " and more" if len(changed) > 3 else ""
    return f"commit {recording.commits[-1]}; since then changed {', '.join(changed[:3])}{more}"


def record(
    chosen: Sequence[Unit], name: str, minutes: float, run: Callable[[str, Path, float], bool],
    packed: Path | None = None,
) -> bool:  # fmt: skip
    """Measure units into a recording, a study after the other; whether any failed.

    `run` gets a study, a file of the chosen cases' ids and the end of the time, in seconds since
    1970; it measures, and says whether it failed. After so many minutes no further case begins;
    after each study, or when it is interrupted, the folder `packed` gets the recording as one file.
    """
    folder = paths.results_dir() / machines.key() / name
    until, failed = time.time() + 60 * minutes, False
    with tempfile.TemporaryDirectory(prefix="fusedlib-record-") as own:
        listed = Path(own) / "cases.txt"
        listed.write_text("\n".join(case for unit in chosen for case in unit.cases))
        for study in dict.fromkeys(unit.study for unit in chosen):
            if time.time() > until:
                break
            try:
                with environment({results.RECORDING: name, "FRESH": None}):
                    failed |= run(study, listed, until)
            finally:  # also of a study that is interrupted
                if packed is not None:
                    print(f"packed {pack(folder, packed)}", flush=True)
    return failed


def measure(study: str, cases: Path, until: float) -> bool:
    """Measure the listed cases of a study in a process of their own; whether it failed."""
    command = [sys.executable, "-m", "press", "measure", study, str(cases), f"{until:.0f}"]
    began = time.monotonic()
    status = subprocess.run(command, cwd=paths.ROOT, check=False).returncode
    print(f"{study}: status {status} after {time.monotonic() - began:.0f} s", flush=True)
    return status != 0


def pack(folder: Path, target: Path) -> Path:
    """A recording as one compressed file, `<machine>.<recording>.tar.xz`, written whole."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz") as archive:
        if folder.exists():
            archive.add(folder, f"{folder.parent.name}/{folder.name}")
        for name, text in topics.carried(folder.name).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    path = target / f"{folder.parent.name}.{folder.name}.tar.xz"
    return write_whole(path, content.getvalue())


def carry(config: Config) -> Path:
    """Write commit, hashes and plan beside the code, for a machine that has no git."""
    check_clean()
    return provenance.pack(**{UNITS: [asdict(unit) for unit in units(config)]})
