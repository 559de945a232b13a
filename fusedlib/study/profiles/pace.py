"""Sentences about the host's pace: what the profiler costs, and how steady unprofiled steps are."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from fusedlib.study.display import number, percent
from fusedlib.study.profiles.selected import (
    at_context,
    control_ratio,
    named,
    plain,
    profiles,
    setting,
    unit,
    where,
)
from fusedlib.study.profiles.tables import gap_us


def between(values: Iterable[float], digits: int) -> str:
    """The least and the greatest of the values, once where both read the same."""
    known = list(values)
    ends = [number(min(known), digits), number(max(known), digits)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def gaps(frame: pd.DataFrame) -> str | None:
    """How long the gaps between kernels are under the profiler, and how many wait for a launch."""
    rows = at_context(frame)
    rows = rows[rows["gaps"].notna() & rows["on_device"].eq(True)]
    if rows.empty:
        return None
    known = list(rows.itertuples())
    medians = [(gap_us(r, 50), r) for r in known]
    late = [(r.late_ms / (r.idle_ms + r.busy_ms), r) for r in known]
    ends = [
        [pick(pairs, key=lambda pair: pair[0]) for pick in (min, max)] for pairs in (medians, late)
    ]
    lengths = " to ".join(f"{number(v, 3)} µs ({r.model}, {r.precision})" for v, r in ends[0])
    shares = " to ".join(f"{percent(v)} ({r.model}, {r.precision})" for v, r in ends[1])
    return (
        f"Under the profiler, {setting(rows)}, half of the gaps between a step's kernels are "
        f"shorter than {lengths}; gaps in which the next kernel was not launched yet are {shares} "
        "of a step."
    )


def overhead(frame: pd.DataFrame) -> str | None:
    """What watching costs, while it lasts and once it is over."""
    rows = profiles(frame)
    if rows.empty:
        return None
    ratios = (rows["profiled_ms"] / rows["step_median_ms"]).dropna()
    ranged = (rows["ranged_ms"] / rows["step_median_ms"]).dropna()
    text = f"The profiler makes a step on {where(rows)} {between(ratios, 3)} times as long"
    if len(ranged):
        text += f", with named ranges {between(ranged, 3)} times"
    return f"{text}. Shares are of the {unit(rows)}' own time, and idle time is told without it."


def afterwards(frame: pd.DataFrame) -> str | None:
    """A step after the profiler over one before it: the first case of the process, the others."""
    rows = profiles(frame).sort_values("measured_at", kind="stable")
    known = [(r, ratio) for r in rows.itertuples() if np.isfinite(ratio := control_ratio(r))]
    if not known:
        return None
    (first, ratio), others = known[0], [ratio for _, ratio in known[1:]]
    text = (
        "Once the profiler is off again a step takes, of its time before, "
        f"{number(ratio, 3)} times at the first case measured ({named(first)})"
    )
    if not others:
        return f"{text}."
    return (
        f"{text} and {between(others, 3)} times at the others, whose steps before it too were made "
        "after it had run in the process."
    )


def unsteady(frame: pd.DataFrame) -> str | None:
    """Sizes whose step was longer at a shorter context: the host's pace changed between them."""
    rows = plain(profiles(frame))
    rows = rows[rows["on_device"].eq(True)]
    told, pairs = [], 0
    for _, part in rows.groupby(["precision", "model"], sort=False):
        ordered = list(part.sort_values("context_length").itertuples())
        steps = list(itertools.pairwise(ordered))
        pairs += len(steps)
        told += [_longer(a, b) for a, b in steps if a.step_median_ms > b.step_median_ms]
    if not told:
        return None
    return (
        f"In {len(told)} of {pairs} pairs of neighbouring contexts the shorter one has the longer "
        f"step, though less to compute: {'; '.join(told)}. There the host sets the pace, and its "
        "pace changed between cases: such an idle share holds for that minute."
    )


def _longer(short: Any, long: Any) -> str:
    return (
        f"{short.model}, {short.precision}, {number(short.step_median_ms, 3)} ms at context "
        f"{int(short.context_length)} and {number(long.step_median_ms, 3)} ms at "
        f"{int(long.context_length)}"
    )
