"""Study 08 in sentences: findings and the abstract's part, all from rows."""

import math
from typing import Any

import numpy as np
import pandas as pd

from fusedlib.bench.profiles import classes
from fusedlib.bench.profiles.work import INFERENCE
from fusedlib.models.transformer import config
from fusedlib.study.display import number, percent
from fusedlib.study.profiles import counted, pace
from fusedlib.study.profiles.selected import (
    STEP,
    at_context,
    by_class,
    by_kernel,
    calls,
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
        pace.gaps(frame), pace.unsteady(frame), _autocast(frame), _compiled(frame),
        pace.overhead(frame), pace.afterwards(frame),
    ]  # fmt: skip
    return [s for s in found if s] or [MISSING]


def headline(frame: pd.DataFrame) -> list[str]:
    """The abstract's sentences about this study."""
    found = [_steps(frame), _shortly(frame)]
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
        f"Of the {unit(rows)}' time of a training step {_setting(frame)}, matrix products take "
        f"{' and '.join(told)}; {nothing} for up to {percent(idle_share(worst))} of {step} "
        f"({worst.model}, {worst.precision})."
    )


def _gemm(frame: pd.DataFrame) -> str | None:
    """How the share of matrix products moves from inference to training, by precision."""
    rows = at_context(frame)
    told = []
    for precision, part in rows.groupby("precision", sort=False):
        known = list(part.itertuples())
        each = [_moves(r) for r in ([known[0]] if len(known) == 1 else [known[0], known[-1]])]
        told.append(f"in {precision} {', '.join(each)}")
    if not told:
        return None
    return (
        f"Of the {unit(rows)}' time matrix products take, {_setting(frame)}, in the forward pass "
        f"alone, in forward and backward, and in a step with AdamW: {'; '.join(told)}."
    )


def _moves(row: Any) -> str:
    """A size's shares from inference over both passes to the whole step."""
    found = [
        percent(share(row, what, classes.GEMM)) for what in (INFERENCE, "forward+backward", STEP)
    ]
    return f"{found[0]}, {found[1]} and {found[2]} ({row.model})"


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


def _softmax(frame: pd.DataFrame) -> dict[str, list[tuple[float, Any]]]:
    """The softmax's time over the products', forward, with its row, by precision."""
    found: dict[str, list[tuple[float, Any]]] = {}
    for row in plain(profiles(frame)).itertuples():
        ratio = attention_ratio(row)
        if np.isfinite(ratio) and ratio > 0:
            found.setdefault(row.precision, []).append((ratio, row))
    return found


def _attention(frame: pd.DataFrame) -> str | None:
    """The softmax against the products: time, FLOPs and bytes, by precision."""
    found = _softmax(frame)
    if not found:
        return None
    told = [
        f"{_span(known)} in {precision} {_counted(known)}" for precision, known in found.items()
    ]
    return (
        f"In plain attention on {where(profiles(frame))} the softmax takes, of the time of both "
        f"products (forward, all sizes and contexts), {'; '.join(told)}."
    )


def _shortly(frame: pd.DataFrame) -> str | None:
    """The softmax against the products by time and FLOPs alone."""
    found = _softmax(frame)
    if not found:
        return None
    told = " and ".join(f"{_span(known)} in {precision}" for precision, known in found.items())
    heads = {config(row.model).head_dim for known in found.values() for _, row in known}
    flops = pace.between([counted.flop_ratio(head) for head in heads], 2)
    return (
        f"In plain attention on {where(profiles(frame))} the softmax takes {told} of the time of "
        f"both products (forward), with {flops} of their FLOPs."
    )


def _span(known: list[tuple[float, Any]]) -> str:
    return pace.between([value for value, _ in known], 2)


def _counted(known: list[tuple[float, Any]]) -> str:
    """The counted ratios of these cases, and which the measured ones are nearer to, by factors."""
    flops, moved = [], []
    for _, row in known:
        head_dim = config(row.model).head_dim
        flops.append(counted.flop_ratio(head_dim))
        moved.append(counted.byte_ratio(row.precision, row.context_length, head_dim))
    away = {name: _factor(known, counts) for name, counts in (("FLOPs", flops), ("bytes", moved))}
    near, far = sorted(away, key=lambda name: away[name])
    return (
        f"(counted, its FLOPs are {pace.between(flops, 2)} of theirs and its bytes "
        f"{pace.between(moved, 2)}: its time is nearer to the {near}, a factor of "
        f"{number(away[near], 2)} away, than to the {far}, {number(away[far], 2)})"
    )


def _factor(known: list[tuple[float, Any]], counts: list[float]) -> float:
    """By what factor the measured ratios differ from the counted ones, a geometric mean."""
    away = [abs(math.log(value / count)) for (value, _), count in zip(known, counts, strict=True)]
    return math.exp(sum(away) / len(away))


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
                f"{named(row)}: a step {number(eager.step_median_ms, 3)} to "
                f"{number(row.step_median_ms, 3)} ms, {calls(eager, STEP):,} to "
                f"{calls(row, STEP):,} {things}, "
                f"their time {number(time_ms(eager, STEP), 3)} to {number(time_ms(row, STEP), 3)} "
                f"ms, products {number(by_class(eager, STEP).get(classes.GEMM, 0.0), 3)} to "
                f"{number(by_class(row, STEP).get(classes.GEMM, 0.0), 3)} ms"
            )
    return f"Compiled, on {where(rows)}: {'; '.join(told)}." if told else None
