"""Sentences about the model with another MLP: where it is faster, where slower, what it holds."""

from typing import Any

import pandas as pd

from fusedlib.study.display import number, quantity
from fusedlib.study.end_to_end.selected import experiment
from fusedlib.study.end_to_end.tables import GIB
from fusedlib.study.wording import listed, span

OURS = "fused"


def findings(frame: pd.DataFrame) -> list[str | None]:
    """All of them; None for one that the rows cannot make."""
    return [_ratios(frame), _intervals(frame), _slower(frame), _held(frame), _rejected(frame)]


def summary(frame: pd.DataFrame) -> str | None:
    """fusedlib's MLP in one sentence: the best, the worst with its parts, and what is held."""
    rows = _compared(frame)
    rows = rows[rows["mlp"] == OURS].sort_values("both_speedup", kind="stable")
    if rows.empty:
        return None
    worst, best = (r for r in rows.iloc[[0, -1]].itertuples())
    text = (
        f"With fusedlib's MLP alone, eager's time for forward and backward of the whole model over "
        f"its is {number(best.both_speedup, 3)} at best ({_case(best)})"
    )
    if len(rows) > 1:
        text += (
            f" and {number(worst.both_speedup, 3)} at worst ({_case(worst)}{_parts(frame, worst)})"
        )
    saved = _eager(frame, best)
    if saved is not None and pd.notna(best.held_mib):
        text += (
            f"; at its best both passes hold {quantity(best.held_mib / GIB, 'GiB')}, eager's "
            f"{quantity(saved.held_mib / GIB, 'GiB')}"
        )
    return f"{text}."


def _compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Measured rows of another MLP that have a ratio to eager's."""
    rows = experiment(frame, "mlp")
    return rows[(rows["mlp"] != "eager") & rows["both_speedup"].notna()]


def _eager(frame: pd.DataFrame, row: Any) -> Any | None:
    """Eager's row of the same case."""
    rows = experiment(frame, "mlp")
    for key in ("model", "context_length", "precision"):
        rows = rows[rows[key] == getattr(row, key)]
    return next(rows[rows["mlp"] == "eager"].itertuples(), None)


def _case(row: Any) -> str:
    return f"{row.model}·{int(row.context_length)}, {row.precision}"


def _parts(frame: pd.DataFrame, row: Any) -> str:
    """Eager's forward and backward over those of a row, from their means.

    Means of the parts add up to that of both, so that a ratio of both lies between theirs; medians
    of times with two modes do not.
    """
    eager = _eager(frame, row)
    if eager is None or pd.isna(row.forward_mean_ms):
        return ""
    forward, backward = (
        number(getattr(eager, f"{p}_mean_ms") / getattr(row, f"{p}_mean_ms"), 3)
        for p in ("forward", "backward")
    )
    return f": its forward {forward}, its backward {backward}"


def _ratios(frame: pd.DataFrame) -> str | None:
    rows = _compared(frame)
    if rows.empty:
        return None
    said = []
    for (length, precision), part in rows.groupby(["context_length", "precision"], sort=False):
        spans = [f"{mlp} {span(own['both_speedup'])}" for mlp, own in part.groupby("mlp")]
        said.append(f"in {precision} at context {length:g} {listed(spans)}")
    models = listed(dict.fromkeys(rows["model"]))
    return (
        f"With another MLP alone, on {rows['place'].iloc[0]} ({models}), eager's time for forward "
        f"and backward of the whole model over its is {'; '.join(said)}."
    )


def _intervals(frame: pd.DataFrame) -> str | None:
    """In how many cases each is faster or slower by the interval of its paired ratio."""
    rows = _compared(frame)
    if rows.empty:
        return None
    said = [
        f"{mlp} {(part['both_speedup_low'] > 1).sum()} and {(part['both_speedup_high'] < 1).sum()} "
        f"of {len(part)}"
        for mlp, part in rows.groupby("mlp")
    ]
    return (
        "Cases in which another MLP is faster and slower than eager's, by the 95 % interval of "
        f"forward and backward: {listed(said)}; in the others the interval holds 1."
    )


def _slower(frame: pd.DataFrame) -> str | None:
    """Every case that is slower than eager's, ours first, with what its parts do."""
    rows = _compared(frame)
    rows = rows[rows["both_speedup_high"] < 1]
    if rows.empty:
        return None
    rows = rows.assign(other=rows["mlp"] != OURS).sort_values(["other", "both_speedup"])
    said = [
        f"{r.mlp} at {_case(r)} {number(r.both_speedup, 3)}"
        f"{'' if r.other else _parts(frame, r)} (the whole step {number(r.step_speedup, 3)})"
        for r in rows.itertuples()
    ]
    return (
        "Slower than with eager's MLP by the 95 % interval, as eager's time for forward and "
        f"backward over its: {'; '.join(said)}."
    )


def _held(frame: pd.DataFrame) -> str | None:
    """What forward and backward hold with each MLP, at the largest size."""
    rows = experiment(frame, "mlp")
    rows = rows[rows["held_mib"].notna()]
    if rows["mlp"].nunique() < 2:
        return None
    rows = rows[rows["model"] == rows["model"].iloc[-1]]
    said = []
    for (length, precision), part in rows.groupby(["context_length", "precision"], sort=False):
        each = [f"{r.mlp} {quantity(r.held_mib / GIB, 'GiB')}" for r in part.itertuples()]
        said.append(f"in {precision} at context {length:g} {listed(each)}")
    return (
        f"Over weights, moments and all else that stays, forward and backward of "
        f"{rows['model'].iloc[0]} hold at most, by MLP, {'; '.join(said)}."
    )


def _rejected(frame: pd.DataFrame) -> str | None:
    rows = experiment(frame, "mlp", None)
    rows = rows[rows["status"] == "wrong"]
    if rows.empty:
        return None
    said = [
        f"{r.mlp} at {r.model}, context {int(r.context_length)}, in {r.precision} ({r.reason})"
        for r in rows.itertuples()
    ]
    return f"Rejected before the clock on {rows['place'].iloc[0]}: {listed(said)}."
