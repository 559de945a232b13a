"""What ours gives and where it gives nothing, at a glance, from the rows of studies 03 and 04.

The README's first screen and the report's abstract show it; every number is a rival's time, or
memory, over ours.
"""

import pandas as pd

from fusedlib.study.display import MISSING, number
from fusedlib.study.kernels import floors, regimes
from fusedlib.study.kernels.figures import leading_rows
from fusedlib.study.memory import tables as memory
from fusedlib.study.selection import leading

WORK = "work (number of shapes)"
SHORT = {"forward": "fwd", "forward+backward": "fwd+bwd"}


def table(kernels: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """A line a regime of the project's floors, the last one memory; cells are strings.

    Args:
        kernels: rows of study 03.
        steps: rows of study 04.

    Columns: Liger's time over ours forward and forward+backward, then every other timed rival's
    forward+backward, least to greatest over the shapes. In the last line the two columns of Liger's
    are what is kept after the forward pass and the peak of both.
    """
    found = regimes.gains(leading_rows(kernels))
    rivals = [name for name in regimes.RIVALS if name in set(found["rival"])]
    columns = [("Liger", way) for way in regimes.WAYS]
    columns += [(name, regimes.WAYS[1]) for name in rivals if name != "Liger"]
    lines = {}
    for regime in floors.REGIMES:
        part = regimes.of(found, regime)
        if part.empty:
            continue
        shapes = part["shape"].nunique()
        lines[f"{floors.name(part, regime)} ({shapes})"] = [
            _span(part[(part["rival"] == rival) & (part["way"] == way)]["ratio"])
            for rival, way in columns
        ]
    ratios = memory_ratios(steps)
    if len(ratios):
        name = f"memory, bf16, shapes of language models: kept, peak ({len(ratios)})"
        lines[name] = [
            _span(ratios.get((rival.lower(), "saved" if way == "forward" else "peak"), []))
            for rival, way in columns
        ]
    titles = [f"{rival} {SHORT[way]}" for rival, way in columns]
    return pd.DataFrame.from_dict(lines, orient="index", columns=titles).rename_axis(WORK)


def _span(values: pd.Series | list[float]) -> str:
    known = [float(v) for v in values if not pd.isna(v)]
    return regimes.span(known) if known else MISSING


def memory_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Each rival's memory over ours by main shape of the leading machine.

    Index: tokens·hidden·intermediate. Columns: (rival, "saved" or "peak").
    """
    rows = leading(memory.main_shapes(frame))
    if rows.empty or "fused" not in set(rows["provider"]):
        return pd.DataFrame()
    rows = rows.assign(shape=[memory.shape_of(row) for _, row in rows.iterrows()])
    parts: dict[tuple[str, str], pd.Series] = {}
    for what in ("saved", "peak"):
        wide = rows.pivot_table(index="shape", columns="provider", values=f"{what}_mib")
        ours = wide["fused"]
        others = [name for name in wide.columns if not name.startswith("fused")]
        parts |= {(name, what): wide[name] / ours for name in others}
    return pd.DataFrame(parts)


def nothing(kernels: pd.DataFrame, steps: pd.DataFrame) -> list[str]:
    """Where the best rival needs no more than ours: a clause a kind of work, memory last."""
    clauses = regimes.nothing(regimes.gains(leading_rows(kernels)), brief=True)
    ratios = memory_ratios(steps)
    if ratios.empty:
        return clauses
    least = ratios[[c for c in ratios.columns if c[1] == "peak"]].min(axis=1)
    lost = least[least <= 1].sort_values()
    if len(lost):
        told = ", ".join(f"{number(v, 3)} at {shape}" for shape, v in lost.items())
        clauses.append(f"peak memory in bf16 ({len(lost)} of {len(least)} shapes: {told})")
    return clauses
