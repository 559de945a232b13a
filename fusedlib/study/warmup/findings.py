"""Study 01 in sentences: findings and the abstract's part, every number from a row."""

import numpy as np
import pandas as pd

from fusedlib.bench.warmup import MEASURED_STEPS
from fusedlib.study import published
from fusedlib.study.display import number, percent, quantity
from fusedlib.study.selection import leading, no_finding, place, rows_of
from fusedlib.study.warmup import published_spread
from fusedlib.study.warmup.tables import (
    CALLS,
    NEAR,
    after_warmup,
    first_steps,
    leading_steps,
    settled,
    settling,
    stages,
)

MISSING = no_finding("01_warmup", "step has been recorded")


def bias(frame: pd.DataFrame, direction: str, warmup: int) -> pd.DataFrame:
    """Mean of `MEASURED_STEPS` steps after `warmup`, over the settled time, by size.

    Columns `ratio`, `low`, `high`: the median and the extremes of the fresh processes of the
    leading machine.
    """
    rows = leading_steps(frame, direction)
    found = []
    for model, group in rows.groupby("model", sort=False):
        ratios = [after_warmup(s, warmup).mean() / settled(s) for s in group["samples_ms"]]
        found.append(
            {"model": model, "ratio": np.median(ratios), "low": min(ratios), "high": max(ratios)}
        )
    return pd.DataFrame(found)


def findings(frame: pd.DataFrame) -> list[str]:
    """What the rows say, one sentence or two each."""
    rows = leading_steps(frame)
    if rows.empty:
        return [MISSING]
    where = place(rows.iloc[0])
    sentences = [
        _bias_sentence(frame, where),
        _order_sentence(frame, where),
        _calls_sentence(frame),
        _stages_sentence(frame),
        _settled_sentence(frame, where),
        _compilation_sentence(frame),
        *published_spread.findings(),
        _negative_sentence(rows, where),
    ]
    return [s for s in sentences if s]


def headline(frame: pd.DataFrame) -> list[str]:
    """The abstract's sentences about this study."""
    rows = leading_steps(frame)
    if rows.empty:
        return [MISSING]
    where = place(rows.iloc[0])
    sentences = [_bias_sentence(frame, where), _order_sentence(frame, where), recommendation(frame)]
    return [s for s in sentences if s]


def _bias_sentence(frame: pd.DataFrame, where: str) -> str | None:
    cold, warm = (bias(frame, "forward+backward", w) for w in (0, 1))
    if cold.empty:
        return None
    worst, least = cold.loc[cold["ratio"].idxmax()], cold.loc[cold["ratio"].idxmin()]
    text = (
        f"On {where} the mean of {MEASURED_STEPS} steps without warm-up is "
        f"{number(worst['ratio'], 3)} times the settled step for size {worst['model']}"
    )
    if worst["model"] != least["model"]:
        text += f" and {number(least['ratio'], 3)} times for {least['model']}"
    left = (warm["ratio"] - 1).abs().max()
    return f"{text} (forward + backward); after one warm-up step it is off by {percent(left)}."


def _order_sentence(frame: pd.DataFrame, where: str) -> str | None:
    """Fresh processes against a shared one, on the leading machine."""
    rows = first_steps(frame, "forward+backward")
    if rows.empty:
        return None
    rows = rows[rows["place"] == where]
    fresh, shared = (rows[rows["isolation"] == i] for i in ("fresh", "shared"))
    later = shared[shared["position"] > 1]
    if fresh.empty or later.empty:
        return None
    first = shared[shared["position"] == 1].iloc[0]
    low, high = fresh["extra_ms"].min(), fresh["extra_ms"].max()
    most = later["extra_ms"].max()
    text = (
        f"In a process of its own every size pays for its first step: {number(low, 3)} to "
        f"{quantity(high, 'ms')} more than a settled one. Run one after the other in one process, "
        f"as the published tables were, the first size ({first['model']}) pays "
        f"{quantity(first['extra_ms'], 'ms')}, the later ones at most {quantity(most, 'ms')}: "
    )
    if most < 0.5 * first["extra_ms"]:
        return text + "that small models suffer most is an effect of their place in the list."
    return text + f"on {where} the place in the list does not decide it."


def _calls_sentence(frame: pd.DataFrame) -> str | None:
    rows = leading(rows_of(frame, "calls"))
    if rows.empty:
        return None
    row = rows.iloc[0]
    extra = {g: row[f"{g}_first_ms"] - row[f"{g}_settled_ms"] for g in CALLS}
    whole = row["step_first_ms"] - row["step_settled_ms"]
    group = max(extra, key=lambda g: extra[g])
    rest = whole - sum(max(v, 0.0) for v in extra.values())
    return (
        f"Of the {quantity(whole, 'ms')} that the first step of size {row['model']} takes beyond a "
        f"settled one on {place(row)}, under the profiler, {quantity(extra[group], 'ms')} pass in "
        f"CUDA calls for {CALLS[group]}, {quantity(extra['memory'], 'ms')} in "
        f"{row['memory_first_count']:.0f} calls for device memory, and {quantity(rest, 'ms')} "
        "outside any CUDA call that it shows: libraries loading and setting themselves up, Python "
        "running code for the first time."
    )


def _stages_sentence(frame: pd.DataFrame) -> str | None:
    rows = leading(stages(frame))
    if rows.empty:
        return None
    row = rows.iloc[0]
    kernels = row["corner_ms"] - row["corner_again_ms"]
    gemm = row["gemm_ms"] - row["gemm_again_ms"]
    left = row["first_ms"] - row["settled_ms"]
    return (
        f"Taken apart in a fresh process (size {row['model']}, {place(row)}): the device's context "
        f"takes {quantity(row['device_ms'], 'ms')}, the first matrix product "
        f"{quantity(gemm, 'ms')} more than the second, the first run of every kernel on a corner "
        f"of the batch {quantity(kernels, 'ms')} more than the second; after these the first whole "
        f"step takes {quantity(left, 'ms')} more than a settled one."
    )


def _settled_sentence(frame: pd.DataFrame, where: str) -> str | None:
    rows = settling(frame)
    rows = rows[rows["place"] == where]
    if rows.empty:
        return None
    never = rows[rows["until_settled"] < 0]
    good = rows[rows["until_settled"] >= 0]
    total = rows["steps"].iloc[0]
    parts = []
    if len(good):
        parts.append(
            f"the running median stays within {percent(NEAR)} of the settled time after at most "
            f"{good['until_settled'].max()} steps in {len(good)} of {len(rows)} sizes and "
            "directions"
        )
    if len(never):
        names = ", ".join(f"{r.model} {r.direction}" for r in never.itertuples())
        parts.append(
            f"within the {total} recorded steps it never stays there for {names}: "
            "the machine itself is not that steady"
        )
    return f"On {where} {'; '.join(parts)}."


def recommendation(frame: pd.DataFrame) -> str | None:
    """How many warm-up steps the leading machine's rows ask for, and where none helps."""
    rows = leading_steps(frame)
    if rows.empty:
        return None
    where = place(rows.iloc[0])
    counts = settling(frame)
    counts = counts[counts["place"] == where]
    helped = counts[counts["mean_needs"] >= 0]
    rest = counts[counts["mean_needs"] < 0]
    most = counts["steps"].iloc[0] - 2 * MEASURED_STEPS
    if helped.empty:
        return (
            f"On {where} no warm-up of up to {most} steps brings the {MEASURED_STEPS}-step mean "
            f"within {percent(NEAR)} of the settled time, in any of {len(counts)} cases: such a "
            "machine needs more repetitions and an interval, not more warm-up."
        )
    # The usual need; where the rare case needs more, jitter decides and the next sentence speaks.
    drop = int(np.ceil(np.median(helped["mean_needs"])))
    enough = int((helped["mean_needs"] <= drop).sum())
    text = (
        f"Recommendation from {where}: drop {drop} step{'' if drop == 1 else 's'}. That brings "
        f"the {MEASURED_STEPS}-step mean within {percent(NEAR)} of the settled time in {enough} "
        f"of {len(counts)} sizes and directions"
    )
    if len(rest):
        names = ", ".join(f"{r.model} {r.direction}" for r in rest.itertuples())
        spread = _jitter(rows, rest)
        text += f"; in {len(rest)} ({names}) no warm-up of up to {most} steps does: " + (
            f"settled steps themselves spread by up to {percent(spread)} there (p10 to p90)"
            if spread > NEAR
            else "the steps go on getting shorter or longer there"
        )
    return (
        f"{text}. Give the median with an interval, keep every step, and start a new process for "
        "each size."
    )


def _jitter(rows: pd.DataFrame, cases: pd.DataFrame) -> float:
    """Widest p10-to-p90 range of the settled steps of these cases, over their median."""
    names = set(zip(cases["model"], cases["direction"], strict=True))
    spreads = [
        float(np.subtract(*np.percentile(s[-MEASURED_STEPS:], [90, 10]))) / settled(s)
        for m, d, s in zip(rows["model"], rows["direction"], rows["samples_ms"], strict=True)
        if (m, d) in names
    ]
    return max(spreads)


def _compilation_sentence(frame: pd.DataFrame) -> str | None:
    rows = leading(rows_of(frame, "compilation"))
    if rows.empty:
        return None
    row = rows.iloc[0]
    saved = _eager_settled(frame, row) - row["settled_ms"]
    text = (
        f"Compiled with Inductor, the first step of size {row['model']} takes "
        f"{quantity(row['first_ms'] / 1e3, 's')} on {place(row)}, "
        f"{number(row['first_ms'] / row['settled_ms'], 3)} settled steps"
    )
    if saved > 0:
        return f"{text}; it has paid for itself after {row['first_ms'] / saved:,.0f} steps."
    return f"{text}, and a settled step is no faster than the eager one."


def _eager_settled(frame: pd.DataFrame, row: pd.Series) -> float:
    rows = stages(frame)
    if rows.empty:
        return float("nan")
    same = rows[(rows["machine"] == row["machine"]) & (rows["model"] == row["model"])]
    return float(same["settled_ms"].iloc[0]) if len(same) else float("nan")


def _negative_sentence(rows: pd.DataFrame, where: str) -> str | None:
    """The published negative backward time beside the smallest one measured inside a step."""
    samples = rows.get("backward_samples_ms")
    if samples is None or not samples.notna().any():
        return None
    measured = np.concatenate([np.asarray(s, float) for s in samples.dropna()])
    told = published.load("warmup")
    told = told[told["mean_ms"] < 0]
    if told.empty:
        return None
    first = told.iloc[0]
    return (
        f"A published table has a backward pass of {quantity(first['mean_ms'], 'ms')} (seed "
        f"{first['source']}, size {first['model']}, no warm-up): a difference of two averages. "
        f"Timed by marks inside the step, the shortest of {len(measured):,} backward passes on "
        f"{where} took {quantity(measured.min(), 'ms')}."
    )
