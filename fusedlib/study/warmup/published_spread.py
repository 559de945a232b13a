"""What the published warm-up tables tell about how they were made: arithmetic on their figures."""

import math

import pandas as pd

from fusedlib.study import published
from fusedlib.study.display import number
from fusedlib.study.warmup.tables import SIZE_ORDER

# Seed 004 states ten measured steps; seed 001 states no number and is read as having the same.
STEPS = 10


def one_slow_step(mean_ms: float, std_ms: float, steps: int = STEPS) -> tuple[float, float]:
    """Extra time of one slow step among `steps`, and the time of all others, from mean and std.

    With n - 1 steps of time r and one of r + e, the mean is r + e / n and the sample standard
    deviation e / sqrt(n); so e = std · sqrt(n) and r = mean - e / n.
    """
    extra = std_ms * math.sqrt(steps)
    return extra, mean_ms - extra / steps


def slow_step_table() -> pd.DataFrame:
    """Published tables without warm-up, each read as one slow step among ten, in ms."""
    rows = published.load("warmup")
    rows = rows[rows["direction"].isin(["forward", "forward+backward"])]
    body, index = [], []
    for (source, direction, model), group in rows.groupby(["source", "direction", "model"]):
        cold = group[group["warmup_steps"] == 0]
        # Last: the most warm-up steps, or the main table, which does not state its own.
        warm = group.sort_values("warmup_steps", na_position="last").iloc[-1]
        if cold.empty:
            continue
        mean, std = float(cold["mean_ms"].iloc[0]), float(cold["std_ms"].iloc[0])
        extra, rest = one_slow_step(mean, std)
        index.append((f"seed {source}", direction, model))
        body.append(
            {
                "no warm-up": f"{number(mean, 4)} ± {number(std, 2)}",
                "slow step +": number(extra, 3),
                "all others": number(rest, 4),
                "warmed up": number(float(warm["mean_ms"]), 4),
            }
        )
    names = ["published by", "direction", "size"]
    table = pd.DataFrame(body, index=pd.MultiIndex.from_tuples(index, names=names))
    order = table.index.get_level_values("size").map(SIZE_ORDER.index)
    return table.iloc[sorted(range(len(table)), key=lambda i: (index[i][:2], order[i]))]


def subtracted() -> tuple[int, int]:
    """How many published backward rows are total minus forward to their digits, and of how many."""
    rows = published.load("end_to_end").query("source == '001'")
    keys = ["table", "backend", "model", "precision", "compile"]
    wide = rows.pivot_table(index=keys, columns="direction", values=["mean_ms", "std_ms"])
    mean, std = wide["mean_ms"], wide["std_ms"]
    off_mean = (mean["forward+backward"] - mean["forward"] - mean["backward"]).abs()
    combined = (std["forward"] ** 2 + std["forward+backward"] ** 2) ** 0.5
    off_std = (combined - std["backward"]).abs()
    # Six significant digits are published; a difference inherits the larger number's last one.
    same = (off_mean <= 2e-5 * mean["forward+backward"]) & (off_std <= 2e-5 * combined)
    return int(same.sum()), len(wide)


def findings() -> list[str]:
    """What follows from the published figures alone."""
    same, rows = subtracted()
    return [
        f"In {same} of {rows} rows of seed 001 the published backward time is the total minus the "
        "forward time, and its standard deviation the root of the sum of both squares, to the "
        "published digits: the backward pass was never timed, and its error is made of two others."
    ]
