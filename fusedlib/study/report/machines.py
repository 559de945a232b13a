"""The report's tables of machines: hardware, versions and rows, from the results folders."""

from pathlib import Path

import pandas as pd

from fusedlib import paths
from fusedlib.bench import machine as machines
from fusedlib.bench import results
from fusedlib.study.formats import formatted


def seen() -> pd.DataFrame:
    """Descriptions of the machines that have rows, in the repository or in the visitor's folder."""
    found = [results.machines_seen(folder) for folder in _folders()]
    return pd.concat(found).drop_duplicates().reset_index(drop=True)


def hardware() -> pd.DataFrame:
    """One row a machine and hardware."""
    found = seen()
    rows = pd.DataFrame(
        {
            "machine": found["machine"].where(~found["own"], found["machine"] + " (this one)"),
            "device": found["device_name"],
            "memory": found["device_memory_gib"].map(lambda v: formatted(v, "3 GiB")),
            "power limit": found["power_limit_w"].map(lambda v: formatted(v, "3 W")),
            "CPU": found["cpu"],
            "cores": found["cpu_cores"].map(_whole),
            "RAM": found["memory_gib"].map(lambda v: formatted(v, "3 GiB")),
        }
    )
    return rows.drop_duplicates().reset_index(drop=True)


def software() -> pd.DataFrame:
    """One row a machine and set of versions, with the studies that have rows of it, by number."""
    names = {
        "machine": "machine", "python": "Python", "torch": "torch", "triton": "triton",
        "numpy": "numpy", "cuda": "CUDA", "driver": "driver", "os": "system",
    }  # fmt: skip
    found = seen().merge(_rows(), on=["machine", "environment"], how="left")
    groups = found.groupby(list(names), sort=False, dropna=False)["study"]
    told = groups.agg(lambda studies: ", ".join(sorted({s[:2] for s in studies.dropna()})))
    return told.rename("studies").reset_index().rename(columns=names)


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


def dates() -> pd.DataFrame:
    """A line a machine: how many rows it has, the first and the newest day they were measured."""
    days = _rows().groupby("machine")["measured_at"]
    rows = days.agg(rows="count", first=lambda d: d.min()[:10], newest=lambda d: d.max()[:10])
    return rows.reset_index().assign(own=lambda f: f["machine"] == machines.key())


def _rows() -> pd.DataFrame:
    """Every row's study, machine, environment, versions and time."""
    fields = ["study", "environment", "version", "measured_at"]
    rows = [
        {"machine": path.parent.name, **{name: row.get(name) for name in fields}}
        for folder in _folders()
        for path in sorted(folder.glob("*/*.jsonl"))
        if path.name != "machine.jsonl"
        for row in results.read_rows(path)
    ]
    return pd.DataFrame(rows, columns=["machine", *fields])


def _folders() -> list[Path]:
    return list(dict.fromkeys(p.resolve() for p in (paths.RECORDED, paths.results_dir())))


def _whole(value: float | None) -> str | None:
    return None if value is None or pd.isna(value) else f"{int(value)}"
