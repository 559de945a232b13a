"""The report's tables of machines and recordings, from the results folders."""

from pathlib import Path

import pandas as pd

from fusedlib.bench import machine as machines
from fusedlib.bench import provenance, results
from press.formats import formatted


def seen() -> pd.DataFrame:
    """A line a run: machine, recording, and what `machine.json` says of it."""
    recordings = [
        {"machine": r.machine, "recording": r.name, "own": r.machine == machines.key()} | run
        for r in results.recordings() for run in r.runs
    ]  # fmt: skip
    columns = ["machine", "recording", "own", "began", *_FACTS]
    frame = (
        pd.DataFrame(recordings, columns=columns) if not recordings else pd.DataFrame(recordings)
    )
    return frame.sort_values(["machine", "began"]).reset_index(drop=True)


_FACTS = (
    "environment", "device_name", "device_memory_gib", "power_limit_w", "cpu", "cpu_cores",
    "memory_gib", "python", "torch", "triton", "numpy", "cuda", "driver", "os",
)  # fmt: skip


def hardware() -> pd.DataFrame:
    """One row a machine and hardware."""
    recordings = seen()
    rows = pd.DataFrame(
        {
            "machine": recordings["machine"].where(
                ~recordings["own"], recordings["machine"] + " (this one)"
            ),
            "device": recordings["device_name"],
            "memory": recordings["device_memory_gib"].map(lambda v: formatted(v, "3 GiB")),
            "power limit": recordings["power_limit_w"].map(lambda v: formatted(v, "3 W")),
            "CPU": recordings["cpu"],
            "cores": recordings["cpu_cores"].map(_whole),
            "RAM": recordings["memory_gib"].map(lambda v: formatted(v, "3 GiB")),
        }
    )
    return rows.drop_duplicates().reset_index(drop=True)


def software() -> pd.DataFrame:
    """One row a machine and set of versions, with the recordings made with it."""
    names = {
        "machine": "machine", "python": "Python", "torch": "torch", "triton": "triton",
        "numpy": "numpy", "cuda": "CUDA", "driver": "driver", "os": "system",
    }  # fmt: skip
    groups = seen().groupby(list(names), sort=False, dropna=False)["recording"]
    table = groups.agg(lambda recordings: ", ".join(sorted(set(recordings))))
    return table.rename("recordings").reset_index().rename(columns=names)


def packages() -> pd.DataFrame:
    """One row a study and machine: versions of the packages whose code its rows measured."""
    rows = _rows().dropna(subset=["version"])
    rows = rows.assign(version=rows["version"].str.split(", ")).explode("version")
    split = rows["version"].str.rsplit(" ", n=1)
    rows = rows.assign(package=split.str[0], version=split.str[1])
    told = rows.groupby(["study", "machine", "package"])["version"].agg(
        lambda versions: ", ".join(sorted(set(versions)))
    )
    return told.unstack("package").reset_index().rename_axis(columns=None)


def recorded() -> pd.DataFrame:
    """A line a recording: machine, studies, rows, days, commits, and how many files differ today.

    `differ` counts the files of the library and of what measures that are not what they were when
    the newest run of the recording began; it is no verdict on the numbers.
    """
    rows = _rows()
    lines = []
    for one in results.recordings():
        mine = rows[(rows["machine"] == one.machine) & (rows["recording"] == one.name)]
        days = mine["measured_at"].str[:10]
        lines.append(
            {
                "machine": one.machine, "recording": one.name, "profile": one.profile,
                "studies": ", ".join(path.stem[:2] for path in one.studies()),
                "rows": len(mine), "first": days.min(), "newest": days.max(),
                "commits": ", ".join(one.commits), "differ": len(provenance.differing(one.files)),
                "own": one.machine == machines.key(), "began": one.runs[-1].get("began"),
            }
        )  # fmt: skip
    columns = [
        "machine", "recording", "profile", "studies", "rows", "first", "newest", "commits",
        "differ", "own", "began",
    ]  # fmt: skip
    return pd.DataFrame(lines, columns=columns)


def dates() -> pd.DataFrame:
    """A line a machine: its rows, the first and the newest day, its commits, and files that differ.

    `differ` is of the recording whose files differ least.
    """
    groups = recorded().sort_values("began").groupby("machine", sort=True)
    spans = groups.agg(
        rows=("rows", "sum"), first=("first", "min"), newest=("newest", "max"),
        commits=("commits", lambda c: len({name for names in c for name in names.split(", ")})),
        newest_commit=("commits", lambda c: c.iloc[-1].split(", ")[-1]),
        least=("differ", "min"), most=("differ", "max"), own=("own", "any"),
    ).reset_index()  # fmt: skip
    return spans.assign(label=spans["machine"].map(machines.label))


def differing() -> pd.DataFrame:
    """A line a machine and folder: files that differ today from what a recording was made with."""
    names = {
        (one.machine, Path(name))
        for one in results.recordings() for name in provenance.differing(one.files)
    }  # fmt: skip
    files = pd.DataFrame(sorted(names), columns=["machine", "path"])
    files = files.assign(
        folder=[path.parent.as_posix() for path in files["path"]],
        name=[path.name for path in files["path"]],
    )
    groups = files.groupby(["machine", "folder"], sort=True)["name"]
    return groups.agg(files="count", which=", ".join).reset_index()


def _rows() -> pd.DataFrame:
    """Every row's machine, recording, study, versions and time."""
    fields = ["version", "measured_at"]
    rows = [
        {"machine": one.machine, "recording": one.name, "study": path.stem}
        | {name: row.get(name) for name in fields}
        for one in results.recordings() for path in one.studies()
        for row in results.read_rows(path)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["machine", "recording", "study", *fields])


def _whole(value: float | None) -> str | None:
    return None if value is None or pd.isna(value) else f"{int(value)}"
