"""The report's tables of machines and recordings, from the results folders."""

import os
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import pandas as pd

from fusedlib.bench import machine as machines
from measure.recording import provenance, results
from measure.recording.jsonl import read_objects
from press.formats import formatted
from study import rows as topics
from study import run

_HARDWARE = {
    "machine": "machine", "device_name": "device", "device_memory_gib": "memory",
    "power_limit_w": "power limit", "cpu": "CPU", "cpu_cores": "cores", "memory_gib": "RAM",
}  # fmt: skip
_SPECS = {"memory": "3 GiB", "power limit": "3 W", "cores": ",d", "RAM": "3 GiB"}
_SOFTWARE = {
    "machine": "machine", "python": "Python", "torch": "torch", "triton": "triton",
    "numpy": "numpy", "cuda": "CUDA", "driver": "driver", "os": "system",
}  # fmt: skip


class _Recording(NamedTuple):
    """A recording: its runs, and the hash of each file of code of the newest."""

    machine: str
    name: str
    profile: str
    runs: Sequence[Mapping[str, Any]]
    files: Mapping[str, str]


def _recordings() -> list[_Recording]:
    """Every recording, of studies and of topics."""
    by_name = {
        (one.machine, one.name): _Recording(
            one.machine, one.name, one.profile, one.runs, one.files
        )
        for one in results.recordings()
    }  # fmt: skip
    sets: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in topics.recordings().to_dict("records"):
        sets.setdefault((line["machine"], line["set"]), []).append(line)
    for key, lines in sets.items():
        files = lines[-1].get("files")
        known = files if isinstance(files, dict) else {}
        by_name.setdefault(key, _Recording(*key, lines[-1]["profile"], lines, known))
    return sorted(by_name.values(), key=lambda one: (one.machine, str(one.runs[-1].get("began"))))


def runs() -> pd.DataFrame:
    """A line a run: machine, recording, and what is known of it."""
    lines = [
        {"machine": one.machine, "recording": one.name, "own": one.machine == machines.key()}
        | {name: value for name, value in each.items() if name != "machine"}
        for one in _recordings() for each in one.runs
    ]  # fmt: skip
    columns = dict.fromkeys(["machine", "recording", "own", "began", *_HARDWARE, *_SOFTWARE])
    return pd.DataFrame(lines, columns=list(columns)).sort_values(["machine", "began"])


def hardware() -> pd.DataFrame:
    """One row a machine and hardware."""
    rows = runs()
    name = rows["machine"].where(~rows["own"].astype(bool), rows["machine"] + " (this one)")
    rows = rows.assign(machine=name)[list(_HARDWARE)].rename(columns=_HARDWARE)
    rows = rows.assign(**{c: [formatted(v, spec) for v in rows[c]] for c, spec in _SPECS.items()})
    return rows.drop_duplicates().reset_index(drop=True)


def software() -> pd.DataFrame:
    """One row a machine and set of versions, with the recordings made with it."""
    groups = runs().groupby(list(_SOFTWARE), sort=False, dropna=False)["recording"]
    return groups.agg(_listed).rename("recordings").reset_index().rename(columns=_SOFTWARE)


def packages() -> pd.DataFrame:
    """One row a study and machine: versions of the packages whose code its rows measured."""
    rows = _rows().dropna(subset=["version"])
    rows = rows.assign(version=rows["version"].str.split(", ")).explode("version")
    rows[["package", "version"]] = rows["version"].str.rsplit(" ", n=1, expand=True)
    versions = rows.groupby(["study", "machine", "package"])["version"].agg(_listed)
    return versions.unstack("package").reset_index().rename_axis(columns=None)


def recorded() -> pd.DataFrame:
    """A line a recording: machine, studies, rows, days, commits, and how many files differ today.

    `differ` counts the files of the library and of what measures that are not what they were when
    the newest run of the recording began; whether the numbers still hold it does not say.
    """
    columns = [
        "machine", "recording", "profile", "studies", "rows", "first", "newest", "commits",
        "differ", "own", "began",
    ]  # fmt: skip
    rows, lines = _rows(), []
    for one in _recordings():
        own = rows[(rows["machine"] == one.machine) & (rows["recording"] == one.name)]
        days, names = own["measured_at"].str[:10], dict.fromkeys(own["study"])
        commits = dict.fromkeys(str(each.get("commit") or "unknown")[:7] for each in one.runs)
        lines.append((
            one.machine, one.name, one.profile, ", ".join(name.split("_")[0] if name[0].isdigit()
                                                          else name for name in names),
            len(days), days.min(), days.max(), ", ".join(commits),
            len(provenance.differing(one.files)), one.machine == machines.key(),
            one.runs[-1].get("began"),
        ))  # fmt: skip
    return pd.DataFrame(lines, columns=columns)


def _rows() -> pd.DataFrame:
    """Every row's machine, recording, study or topic, versions and time."""
    rows = [
        (one.machine, one.name, path.stem, row.get("version"), row.get("measured_at"))
        for one in results.recordings() for path in one.studies()
        for row in results.read_rows(path)
    ]  # fmt: skip
    of_topics = topics.recordings()
    sets = {
        (line.machine, line.id): line.set for line in of_topics.itertuples()
    } if len(of_topics) else {}  # fmt: skip
    here = os.environ.get(results.REPLAY) != "committed"
    for folder, topic in product(topics.folders(here=here), run.topics()):
        path = folder / f"{topic}.jsonl"
        for row in read_objects(path) if path.exists() else ():
            name = sets.get((folder.name, row["recording"]))
            when = row["measured_at"]
            rows.append((folder.name, str(name), topic, row.get("version"), when))
    return pd.DataFrame(rows, columns=["machine", "recording", "study", "version", "measured_at"])


def _listed(names: pd.Series) -> str:
    return ", ".join(sorted({*names}))
