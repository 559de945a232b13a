"""The report's tables of machines and recordings, from the results folders."""

import pandas as pd

from fusedlib.bench import machine as machines
from measure.recording import provenance, results
from press.formats import formatted

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
    """A line a run: machine, recording, and what `machine.json` says of it."""
    lines = [
        {"machine": one.machine, "recording": one.name, "own": one.machine == machines.key()} | run
        for one in results.recordings() for run in one.runs
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
    for one in results.recordings():
        days = rows.loc[rows["folder"] == one.folder, "measured_at"].str[:10]
        lines.append((
            one.machine, one.name, one.profile, ", ".join(path.stem[:2] for path in one.studies()),
            len(days), days.min(), days.max(), ", ".join(one.commits),
            len(provenance.differing(one.files)), one.machine == machines.key(),
            one.runs[-1].get("began"),
        ))  # fmt: skip
    return pd.DataFrame(lines, columns=columns)


def _rows() -> pd.DataFrame:
    """Every row's machine, folder, study, versions and time."""
    rows = [
        (one.machine, one.folder, path.stem, row.get("version"), row.get("measured_at"))
        for one in results.recordings() for path in one.studies()
        for row in results.read_rows(path)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["machine", "folder", "study", "version", "measured_at"])


def _listed(names: pd.Series) -> str:
    return ", ".join(sorted({*names}))
