"""The report's tables of machines and recordings, from the recordings and their rows."""

import os
from itertools import product

import pandas as pd

from fusedlib.bench import machine as machines
from press.formats import formatted
from study import provenance, run
from study import rows as recorded_rows
from study.files import read_objects
from study.rows import REPLAY

_HARDWARE = {
    "machine": "machine", "device_name": "device", "device_memory_gib": "memory",
    "power_limit_w": "power limit", "cpu": "CPU", "cpu_cores": "cores", "memory_gib": "RAM",
}  # fmt: skip
_SPECS = {"memory": "3 GiB", "power limit": "3 W", "cores": ",d", "RAM": "3 GiB"}
_SOFTWARE = {
    "machine": "machine", "python": "Python", "torch": "torch", "triton": "triton",
    "numpy": "numpy", "cuda": "CUDA", "driver": "driver", "os": "system",
}  # fmt: skip


def runs() -> pd.DataFrame:
    """A line a run: machine, recording, and what is known of it."""
    lines = recorded_rows.recordings().rename(columns={"set": "recording"})
    columns = dict.fromkeys(["machine", "recording", "began", "commit", "profile", "files",
                             *_HARDWARE, *_SOFTWARE])  # fmt: skip
    lines = lines.reindex(columns=list(columns))
    return lines.assign(own=lines["machine"] == machines.key()).sort_values(["machine", "began"])


def hardware() -> pd.DataFrame:
    """One row a machine and hardware."""
    rows = runs()
    name = rows["machine"].where(~rows["own"], rows["machine"] + " (this one)")
    rows = rows.assign(machine=name)[list(_HARDWARE)].rename(columns=_HARDWARE)
    rows = rows.assign(**{c: [formatted(v, spec) for v in rows[c]] for c, spec in _SPECS.items()})
    return rows.drop_duplicates().reset_index(drop=True)


def software() -> pd.DataFrame:
    """One row a machine and set of versions, with the recordings made with it."""
    groups = runs().groupby(list(_SOFTWARE), sort=False, dropna=False)["recording"]
    return groups.agg(_listed).rename("recordings").reset_index().rename(columns=_SOFTWARE)


def packages() -> pd.DataFrame:
    """One row a topic and machine: versions of the packages whose code its rows measured."""
    rows = _rows().dropna(subset=["version"])
    rows = rows.assign(version=rows["version"].str.split(", ")).explode("version")
    rows[["package", "version"]] = rows["version"].str.rsplit(" ", n=1, expand=True)
    versions = rows.groupby(["topic", "machine", "package"])["version"].agg(_listed)
    return versions.unstack("package").reset_index().rename_axis(columns=None)


def recorded() -> pd.DataFrame:
    """A line a recording: machine, topics, rows, days, commits, and how many files differ today.

    `differ` counts the files of the library and of what measures that are not what they were when
    the newest run of the recording began; whether the numbers still hold it does not say.
    """
    rows, lines = _rows(), []
    for (machine, name), each in runs().groupby(["machine", "recording"], sort=False):
        own = rows[(rows["machine"] == machine) & (rows["recording"] == name)]
        days, newest = own["measured_at"].str[:10], each.iloc[-1]
        commits = dict.fromkeys(str(commit)[:7] for commit in each["commit"].fillna("unknown"))
        files = newest["files"] if isinstance(newest["files"], dict) else {}
        lines.append({
            "machine": machine, "recording": name, "profile": newest["profile"],
            "topics": ", ".join(dict.fromkeys(own["topic"])), "rows": len(days),
            "first": days.min(), "newest": days.max(), "commits": ", ".join(commits),
            "differ": len(provenance.differing(files)), "own": bool(newest["own"]),
            "began": newest["began"],
        })  # fmt: skip
    frame = pd.DataFrame(lines)
    return frame.sort_values(["machine", "began"]).reset_index(drop=True) if lines else frame


def _rows() -> pd.DataFrame:
    """Every row's machine, recording, topic, versions and time."""
    every = recorded_rows.recordings()
    sets = {(line.machine, line.id): line.set for line in every.itertuples()}
    here = os.environ.get(REPLAY) != "committed"
    rows = [
        (folder.name, sets[folder.name, row["recording"]], topic, row.get("version"),
         row["measured_at"])
        for folder, topic in product(recorded_rows.folders(here=here), run.topics())
        if (path := folder / f"{topic}.jsonl").exists()
        for row in read_objects(path)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["machine", "recording", "topic", "version", "measured_at"])


def _listed(names: pd.Series) -> str:
    return ", ".join(sorted({*names}))
