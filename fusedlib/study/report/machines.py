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
    """One row a machine and set of versions."""
    names = {
        "machine": "machine", "python": "Python", "torch": "torch", "triton": "triton",
        "numpy": "numpy", "cuda": "CUDA", "driver": "driver", "os": "system",
    }  # fmt: skip
    return seen()[list(names)].rename(columns=names).drop_duplicates().reset_index(drop=True)


def dates() -> pd.DataFrame:
    """A line a machine: how many rows it has, the first and the newest day they were measured."""
    days = [
        (path.parent.name, row["measured_at"][:10])
        for folder in _folders()
        for path in sorted(folder.glob("*/*.jsonl"))
        if path.name != "machine.jsonl"
        for row in results.read_rows(path)
    ]
    frame = pd.DataFrame(days, columns=["machine", "day"])
    rows = frame.groupby("machine")["day"].agg(rows="count", first="min", newest="max")
    return rows.reset_index().assign(own=lambda f: f["machine"] == machines.key())


def _folders() -> list[Path]:
    return list(dict.fromkeys(p.resolve() for p in (paths.RECORDED, paths.results_dir())))


def _whole(value: float | None) -> str | None:
    return None if value is None or pd.isna(value) else f"{int(value)}"
