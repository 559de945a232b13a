"""The floors that the project set itself over Liger, and whether study 03's rows hold them.

Every function takes the frame of `regimes.gains` and measures nothing.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd

from fusedlib.study.display import number
from fusedlib.study.kernels import regimes
from fusedlib.study.kernels.regimes import NARROW, Regime


class Floor(NamedTuple):
    """Least ratio of Liger's time to ours at every shape of a regime, of one width if given."""

    regime: Regime
    way: str
    least: float
    width: int | None = None


FLOORS = (
    Floor(Regime("bf16", "models", "python"), "forward", 1.03),
    Floor(Regime("bf16", "models", "python"), "forward+backward", 1.02),
    Floor(Regime("fp32", "many", "python"), "forward", 2.5, NARROW),
    Floor(Regime("fp32", "many", "python"), "forward+backward", 2.5, NARROW),
    Floor(Regime("bf16", "few", "python"), "forward+backward", 2.0),
    Floor(Regime("bf16", "few", "graph"), "forward+backward", 1.0),
)
"""As the project's plan states them, before anything was measured."""
REGIMES = tuple(dict.fromkeys(floor.regime for floor in FLOORS))
DIGITS = 4  # a floor can be missed by less than three digits show
LAUNCHED = {"python": "from Python", "graph": "in CUDA graphs"}


def name(part: pd.DataFrame, regime: Regime) -> str:
    """A regime in words, with the sizes of its rows."""
    return f"{regimes.title(part, regime.format, regime.size)}, {LAUNCHED[regime.launch]}"


def held(found: pd.DataFrame) -> Iterator[tuple[Floor, pd.DataFrame]]:
    """Each floor that has rows, with its rows against Liger."""
    for floor in FLOORS:
        part = regimes.of(found, floor.regime)
        part = part[(part["rival"] == "Liger") & (part["way"] == floor.way)]
        if floor.width is not None:
            part = part[part["hidden_size"] == floor.width]
        if len(part):
            yield floor, part


def table(found: pd.DataFrame) -> pd.DataFrame:
    """Each floor with the measured ratios and at how many shapes it holds."""
    lines, index = [], []
    for floor, part in held(found):
        good = part["ratio"] >= floor.least
        index.append((name(part, floor.regime), floor.way))
        lines.append(
            {
                "floor": number(floor.least, DIGITS),
                "measured": regimes.span(part["ratio"], DIGITS),
                "held at": f"{int(good.sum())} of {len(part)} shapes",
            }
        )
    if not lines:
        return pd.DataFrame(columns=["not measured"])
    names = ["work", "direction"]
    return pd.DataFrame(lines, index=pd.MultiIndex.from_tuples(index, names=names))


def sentence(found: pd.DataFrame, where: str) -> str | None:
    """How many floors hold at every timed shape, and each that is missed with its least ratio."""
    missed, count = [], 0
    for floor, part in held(found):
        count += 1
        worst = part.loc[part["ratio"].idxmin()]
        if worst["ratio"] < floor.least:
            missed.append(
                f"{name(part, floor.regime)}, {floor.way}: {number(worst['ratio'], DIGITS)} at "
                f"{worst['shape']} where {number(floor.least, DIGITS)} was the floor"
            )
    if not count:
        return None
    text = (
        f"Of the project's {count} floors over Liger, {count - len(missed)} hold at every timed "
        f"shape on {where}"
    )
    return f"{text}; missed are {'; '.join(missed)}." if missed else f"{text}."
