"""The report's tables of machines: hardware and versions, from the descriptions beside the rows."""

import pandas as pd

from fusedlib.study.display import quantity


def hardware(seen: pd.DataFrame) -> pd.DataFrame:
    """One row a machine and hardware, from `results.machines_seen()`."""
    rows = pd.DataFrame(
        {
            "Machine": seen["machine"],
            "Own": seen["own"].map({True: "own", False: ""}),
            "Device": seen["device_name"],
            "Count": seen["device_count"].map(_whole),
            "Device memory": seen["device_memory_gib"].map(lambda v: quantity(v, "GiB")),
            "Power limit": seen["power_limit_w"].map(lambda v: quantity(v, "W")),
            "CPU": seen["cpu"],
            "Cores": seen["cpu_cores"].map(_whole),
            "Memory": seen["memory_gib"].map(lambda v: quantity(v, "GiB")),
        }
    )
    return rows.drop_duplicates().reset_index(drop=True)


def software(seen: pd.DataFrame) -> pd.DataFrame:
    """One row a machine and set of versions, from `results.machines_seen()`."""
    names = {
        "machine": "Machine", "python": "Python", "torch": "torch", "triton": "triton",
        "numpy": "numpy", "cuda": "CUDA", "driver": "Driver", "os": "System",
    }  # fmt: skip
    rows = seen[list(names)].rename(columns=names)
    return rows.drop_duplicates().reset_index(drop=True)


def _whole(value: float | None) -> str | None:
    return None if value is None or pd.isna(value) else f"{int(value)}"
