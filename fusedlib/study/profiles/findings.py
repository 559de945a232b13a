"""Study 08 in sentences: findings and the abstract's part, all from rows."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from fusedlib.bench.profiles import classes
from fusedlib.bench.profiles.work import INFERENCE
from fusedlib.models.transformer import config
from fusedlib.study.display import number, percent
from fusedlib.study.profiles import counted
from fusedlib.study.profiles.selected import (
    STEP,
    at_context,
    by_class,
    by_kernel,
    calls,
    control_ratio,
    idle_share,
    largest,
    named,
    plain,
    profiles,
    setting,
    share,
    time_ms,
    unit,
    where,
)
from fusedlib.study.profiles.tables import attention_ratio
from fusedlib.study.selection import no_finding

MISSING = no_finding("08_profile")


def findings(frame: pd.DataFrame) -> list[str]:
    """What the rows say."""
    found = [
        _gemm(frame), _kernels(frame), _others(frame), _attention(frame), _idle(frame),
        _autocast(frame), _compiled(frame), _overhead(frame),
    ]  # fmt: skip
    return [s for s in found if s] or [MISSING]


def headline(frame: pd.DataFrame) -> list[str]:
    """The abstract's sentences about this study."""
    found = [_steps(frame), _attention(frame)]
    return [s for s in found if s] or [MISSING]


def _fp32(frame: pd.DataFrame) -> list[Any]:
    """Rows in fp32 at the context of the tables, by size."""
    rows = at_context(frame)
    return list(rows[rows["precision"] == "fp32"].itertuples())


def _setting(frame: pd.DataFrame) -> str:
    rows = at_context(frame)
    return f"on {where(rows)} ({setting(rows)})"


def _steps(frame: pd.DataFrame) -> str | None:
    """Matrix products' share of a step by precision, and the device's idle time."""
    rows = at_context(frame)
    told = []
    for precision, part in rows.groupby("precision", sort=False):
        known = list(part.itertuples())
        ends = known if len(known) == 1 else [known[0], known[-1]]
        shares = " to ".join(f"{percent(share(r, STEP, classes.GEMM))} ({r.model})" for r in ends)
        told.append(f"{shares} in {precision}")
    if not told:
        return None
    worst = max(rows.itertuples(), key=idle_share)
    nothing, step = "the device is idle", "a step"
    if not worst.on_device:
        nothing, step = "no operator runs", "a profiled step"
    return (
        f"Of the {unit(rows)}' time of a training step matrix products take, {_setting(frame)}, "
        f"{' and '.join(told)}; {nothing} for up to {percent(idle_share(worst))} of {step} "
        f"({worst.model}, {worst.precision})."
    )


def _gemm(frame: pd.DataFrame) -> str | None:
    """How the share of matrix products moves from inference to training."""
    rows = _fp32(frame)
    if not rows:
        return None
    told = [
        f"{r.model} {percent(share(r, INFERENCE, classes.GEMM))} of the forward pass alone, "
        f"{percent(share(r, 'forward+backward', classes.GEMM))} of forward and backward, "
        f"{percent(share(r, STEP, classes.GEMM))} of a step with AdamW"
        for r in ([rows[0]] if len(rows) == 1 else [rows[0], rows[-1]])
    ]
    return (
        f"Matrix products take, {_setting(frame)}, fp32, of the {unit(at_context(frame))}' time: "
        f"{'; '.join(told)}."
    )


def _kernels(frame: pd.DataFrame) -> str | None:
    """The most expensive kernel of the forward pass and of the whole step."""
    row = largest(frame)
    if row is None:
        return None
    names, told = [], []
    for what in ("forward", STEP):
        name, _, count, ms = by_kernel(row, what)[0]
        names.append(name)
        told.append(f"({count:,} calls, {percent(ms / time_ms(row, what))})")
    other = "the same" if names[0] == names[1] else f"`{names[1]}`"
    return (
        f"At {named(row)}, most time of the forward pass goes to `{names[0]}` {told[0]}; of the "
        f"whole step to {other} {told[1]}."
    )


def _others(frame: pd.DataFrame) -> str | None:
    """What takes time beside matrix products in the forward pass."""
    row = largest(frame)
    if row is None:
        return None
    others = [(k, ms) for k, ms in by_class(row, "forward").items() if k != classes.GEMM][:3]
    whole = time_ms(row, "forward")
    told = ", ".join(f"{kind} {percent(ms / whole)}" for kind, ms in others)
    return (
        f"Beside them in the forward pass at {named(row)}: {told}; {calls(row, STEP):,} "
        f"{unit(at_context(frame))} make a step."
    )


def _attention(frame: pd.DataFrame) -> str | None:
    """The softmax against the products: time, FLOPs and bytes."""
    rows = plain(profiles(frame))
    rows = rows[rows["precision"] == "fp32"]
    ratios = [attention_ratio(r) for r in rows.itertuples()]
    known = [
        (v, r) for v, r in zip(ratios, rows.itertuples(), strict=True) if np.isfinite(v) and v > 0
    ]
    if not known:
        return None
    low, high = min(known, key=lambda k: k[0]), max(known, key=lambda k: k[0])
    row = high[1]
    head_dim = config(row.model).head_dim
    counted_bytes = counted.byte_ratio(row.precision, row.context_length, head_dim)
    span = _between([low[0], high[0]], 2)
    return (
        f"In plain attention in fp32 on {where(rows)} the softmax takes {span} of the time of "
        f"both products (forward), most at {named(row)}. There it has "
        f"{number(counted.flop_ratio(head_dim), 2)} of their FLOPs and {number(counted_bytes, 2)} "
        f"of their bytes; over all cases its time follows {_nearer(known)}."
    )


def _between(values: Iterable[float], digits: int) -> str:
    """The least and the greatest of the values, once where both read the same."""
    known = list(values)
    ends = [number(min(known), digits), number(max(known), digits)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _nearer(known: list[tuple[float, Any]]) -> str:
    """Which of the counted ratios the measured ones are nearer to, by factors."""
    away = {"its bytes": 0.0, "its FLOPs": 0.0}
    for ratio, row in known:
        head_dim = config(row.model).head_dim
        moved = counted.byte_ratio(row.precision, row.context_length, head_dim)
        away["its bytes"] += abs(math.log(ratio / moved))
        away["its FLOPs"] += abs(math.log(ratio / counted.flop_ratio(head_dim)))
    near, far = sorted(away, key=lambda name: away[name])
    factors = [number(math.exp(away[name] / len(known)), 2) for name in (near, far)]
    return f"{near} more closely than {far} (off by a factor of {factors[0]} against {factors[1]})"


def _idle(frame: pd.DataFrame) -> str | None:
    """Where the device waits for the host."""
    rows = plain(profiles(frame))
    if rows.empty:
        return None
    shares = [(idle_share(r), r) for r in rows.itertuples()]
    worst, best = max(shares, key=lambda s: s[0]), min(shares, key=lambda s: s[0])
    if not worst[1].on_device:
        return (
            f"On {where(rows)} a profiled step is outside of every operator, in Python, for "
            f"{percent(best[0])} ({named(best[1])}) to {percent(worst[0])} ({named(worst[1])}) "
            "of its time."
        )
    bound = [r for s, r in shares if s > 0.1]
    each = 1e3 * worst[1].step_median_ms / calls(worst[1], STEP)
    return (
        f"On {where(rows)} the device is idle for {percent(best[0])} ({named(best[1])}) to "
        f"{percent(worst[0])} ({named(worst[1])}) of an unprofiled step; more than a tenth of it "
        f"in {len(bound)} of {len(shares)} cases. Where it waits most, the host issues a kernel "
        f"every {number(each, 2)} µs."
    )


def _autocast(frame: pd.DataFrame) -> str | None:
    """What autocast adds and what it takes away."""
    rows = at_context(frame)
    told = []
    pairs = []
    for _, part in rows.groupby("model", sort=False):
        by = {r.precision: r for r in part.itertuples()}
        if {"fp32", "bf16 autocast"} <= set(by):
            pairs.append((by["fp32"], by["bf16 autocast"]))
    for before, after in pairs if len(pairs) < 2 else (pairs[0], pairs[-1]):
        copies = [number(by_class(r, STEP).get(classes.COPY, 0.0), 2) for r in (before, after)]
        products = [number(by_class(r, STEP).get(classes.GEMM, 0.0), 2) for r in (before, after)]
        told.append(
            f"{before.model}: {calls(before, STEP):,} to {calls(after, STEP):,} {unit(rows)}, "
            f"products {products[0]} to {products[1]} ms of a step, copies and casts {copies[0]} "
            f"to {copies[1]} ms"
        )
    if not told:
        return None
    return f"From fp32 to bf16 autocast, {_setting(frame)}: {'; '.join(told)}."


def _compiled(frame: pd.DataFrame) -> str | None:
    """What Inductor changes in a step."""
    rows = profiles(frame)
    told = []
    things = unit(rows)
    keys = ("model", "context_length", "precision", "attention")
    for row in rows[rows["provider"] == "inductor"].itertuples():
        same = rows[rows["provider"] == "eager"]
        for key in keys:
            same = same[same[key] == getattr(row, key)]
        for eager in same.itertuples():
            told.append(
                f"{named(row)}: {calls(eager, STEP):,} to {calls(row, STEP):,} {things}, "
                f"their time {number(time_ms(eager, STEP), 3)} to {number(time_ms(row, STEP), 3)} "
                f"ms, products {number(by_class(eager, STEP).get(classes.GEMM, 0.0), 3)} to "
                f"{number(by_class(row, STEP).get(classes.GEMM, 0.0), 3)} ms"
            )
    return f"Compiled, on {where(rows)}: {'; '.join(told)}." if told else None


def _overhead(frame: pd.DataFrame) -> str | None:
    """What watching costs."""
    rows = profiles(frame)
    if rows.empty:
        return None
    ratios = (rows["profiled_ms"] / rows["step_median_ms"]).dropna()
    ranged = (rows["ranged_ms"] / rows["step_median_ms"]).dropna()
    text = f"The profiler makes a step on {where(rows)} {_between(ratios, 3)} times as long"
    if len(ranged):
        text += f", with named ranges {_between(ranged, 3)} times"
    after = [ratio for r in rows.itertuples() if np.isfinite(ratio := control_ratio(r))]
    if after:
        text += (
            f"; once it is off again a step takes {_between(after, 3)} times what it took before"
        )
    return f"{text}. Shares are of the {unit(rows)}' own time, and idle time is told without it."
