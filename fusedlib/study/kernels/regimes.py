"""Study 03's problems in a few regimes, and what ours gives in each over every rival.

Every function takes the frame of `rows.compared` and measures nothing.
"""

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd

from fusedlib.study.display import number
from fusedlib.study.kernels.rows import SUBJECT, versus

WAYS = ("forward", "forward+backward")
FORMATS = ("bf16", "fp16", "fp32", "TF32")
# Columns of the tables: a rival's settings count as one, the best of them at each problem.
RIVALS = {
    "Liger": ("liger",),
    "eager": ("eager",),
    "Inductor": ("inductor", "inductor-max"),
    "QuACK": ("quack",),
}
# Ends of the published grid: up to FEW tokens the launches and the weights decide, from MANY on the
# products; beyond NARROW no published grid went.
FEW, MANY, NARROW = 64, 1024, 4096
SIZES = ("models", "many", "some", "few", "wide")


class Regime(NamedTuple):
    """One kind of work: format, size (one of `SIZES`), launch ("python" or "graph")."""

    format: str
    size: str
    launch: str


def size_of(tokens: int, hidden: int, intermediate: int) -> str:
    """The size class of a problem, one of `SIZES`."""
    if hidden != intermediate:
        return "models"
    if tokens >= MANY:
        return "many"
    if tokens > FEW:
        return "some"
    return "few" if hidden <= NARROW else "wide"


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """What ours gives: one row for each timed problem, direction (of `WAYS`), launch and rival.

    Adds `size` and `rival` (a key of `RIVALS`), and `ratio`, `low`, `high`: the rival's time over
    ours, from the pairs of a session; above 1 ours is faster.
    """
    rows = rows[rows["way"].isin(WAYS)]
    parts = [
        versus(rows[rows["provider"].isin([SUBJECT, provider])], provider).assign(rival=rival)
        for rival, providers in RIVALS.items() for provider in providers
    ]  # fmt: skip
    found = sized(pd.concat(parts, ignore_index=True))
    return _least(found, ["format", "shape", "way", "launch", "rival"])


def sized(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with their `size`."""
    sizes = zip(rows["tokens"], rows["hidden_size"], rows["intermediate_size"], strict=True)
    return rows.assign(size=[size_of(*each) for each in sizes])


def best(found: pd.DataFrame) -> pd.DataFrame:
    """Rows of `gains` against the fastest rival of each problem, direction and launch."""
    return _least(found, ["format", "shape", "way", "launch"])


def _least(found: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    if found.empty:
        return found
    return found.loc[found.groupby(keys, sort=False)["ratio"].idxmin()]


def of(found: pd.DataFrame, regime: Regime) -> pd.DataFrame:
    """Rows of `gains` that lie in one regime."""
    same = [found[field] == value for field, value in regime._asdict().items()]
    return found[same[0] & same[1] & same[2]]


def title(found: pd.DataFrame, kind: str, size: str) -> str:
    """What the rows of one format and size are, in words with their own sizes."""
    return f"{format_title(kind)}, {size_title(found, size)}"


def format_title(kind: str) -> str:
    """A format as torch's users say it."""
    return {"fp32": 'fp32 "highest"', "TF32": 'fp32 "high" (TF32)'}.get(kind, kind)


def size_title(found: pd.DataFrame, size: str) -> str:
    """A size class in words, with the numbers of tokens and widths that the rows have."""
    if size == "models":
        return "shapes of language models"
    tokens = counts(found["tokens"])
    text = f"{tokens} token{'' if tokens == '1' else 's'}"
    # Only at few tokens does the width part two sizes.
    by_width = size in ("few", "wide")
    return f"{text}, D = F = {counts(found['hidden_size'])}" if by_width else text


def span(values: Iterable[float], digits: int = 3) -> str:
    """Least and largest value at so many significant digits, one where they look the same."""
    return _ends([number(value, digits) for value in sorted(values)])


def counts(values: Iterable[float]) -> str:
    """Least and largest of whole numbers."""
    return _ends([f"{int(value):,}" for value in sorted(values)])


def _ends(told: list[str]) -> str:
    return "–".join(dict.fromkeys((told[0], told[-1])))


def present(found: pd.DataFrame) -> list[tuple[str, str]]:
    """Formats and sizes of the rows in their order, bf16 and language models first."""
    pairs = set(zip(found["format"], found["size"], strict=True))
    return sorted(pairs, key=lambda p: (FORMATS.index(p[0]), SIZES.index(p[1])))


def nothing(found: pd.DataFrame, *, brief: bool = False) -> list[str]:
    """Where ours is not clearly faster than the fastest rival: a clause a format and size.

    Counted by case, a case being a shape, a direction and a launch, and by the lower end of the
    95 % interval. Unless `brief`, the clause names the rival and the case of the least ratio.
    """
    clauses = []
    for kind, size in present(found):
        part = found[(found["format"] == kind) & (found["size"] == size)]
        cases = best(part)
        lost = cases[cases["low"] <= 1]
        if lost.empty:
            continue
        worst = lost.loc[lost["ratio"].idxmin()]
        how = "from Python" if worst["launch"] == "python" else "in a CUDA graph"
        detail = "" if brief else f", with {worst['rival']} {worst['way']} {how}"
        down = (
            f"down to {number(worst['ratio'], 3)}" if worst["ratio"] <= 1
            else "not certainly above 1"
        )  # fmt: skip
        clauses.append(
            f"{title(part, kind, size)} ({len(lost)} of {len(cases)} cases, {down}{detail})"
        )
    return clauses
