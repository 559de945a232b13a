"""Study 06 in sentences: findings and the abstract's part, every number from a row."""

from typing import Any

import pandas as pd

from fusedlib.study import published
from fusedlib.study.display import number, percent, quantity
from fusedlib.study.end_to_end import beside, repeated, replaced
from fusedlib.study.end_to_end.selected import (
    busy,
    context,
    experiment,
    ordered,
    steps,
    utilisation,
)
from fusedlib.study.end_to_end.tables import GIB, attention_pairs, repaid
from fusedlib.study.selection import leading, no_finding, rows_of
from fusedlib.study.warmup.published_spread import STEPS, one_slow_step
from fusedlib.study.wording import between, listed, percents, span

MISSING = no_finding("06_end_to_end", "step has been recorded")
FP32, AUTOCAST = "fp32", "bf16 autocast"
# Backward and forward of a product: two products against one.
BY_FLOPS = 2
# Below this share of busy time the launches from Python decide.
LAUNCH_BOUND = 0.9


def findings(frame: pd.DataFrame) -> list[str]:
    """What the rows and the published figures say, a sentence or two each."""
    measured = [
        _ratio(frame), _inference(frame), _autocast(frame), _casts(frame), _compile(frame),
        _recompiled(frame), *replaced.findings(frame), _optimizer(frame), _attention(frame),
        _cards(frame), _memory(frame), repeated.finding(frame),
    ]  # fmt: skip
    found = [s for s in measured if s]
    return [*(found or [MISSING]), _published_autocast(), *_published_spread()]


def headline(frame: pd.DataFrame) -> list[str]:
    """The abstract's sentences about this study, the first of them the whole in one."""
    found = [_summary(frame), replaced.summary(frame)]
    return [s for s in found if s] or [MISSING]


def _summary(frame: pd.DataFrame) -> str | None:
    """What steps achieve of the card, what autocast and what compilation make of their time."""
    rows = steps(frame, context_length=context(frame), mode="eager")
    clauses = []
    if achieved := [s for p in (FP32, AUTOCAST) if (s := _achieved(rows, p))]:
        clauses.append(
            f"eager forward and backward reach {' and '.join(achieved)} of the card's peak"
        )
    if pairs := list(_pairs(frame).values()):
        ends = between(number(pairs[0], 3), number(pairs[-1], 3))
        clauses.append(f"autocast takes {ends} times fp32's time")
    if ratios := [r.step_median_ms / eager for r, eager, _ in _repaid_here(frame)]:
        clauses.append(f"a compiled step takes {percents(ratios)} of eager's")
    if not clauses:
        return None
    models = listed(dict.fromkeys([rows["model"].iloc[0], rows["model"].iloc[-1]]))
    sizes = models.replace(" and ", " to ")
    return f"On {_where(rows)} (context {context(frame)}, size {sizes}), {'; '.join(clauses)}."


def _achieved(rows: pd.DataFrame, precision: str) -> str | None:
    found = [utilisation(r) for r in rows[rows["precision"] == precision].itertuples()]
    known = [percent(share) for share in found if share is not None]
    return f"{between(known[0], known[-1])} ({precision})" if known else None


def _where(rows: pd.DataFrame) -> str:
    return str(rows["place"].iloc[0])


def _ratio(frame: pd.DataFrame) -> str | None:
    rows = steps(frame, context_length=context(frame), mode="eager", precision=FP32)
    if rows.empty:
        return None
    found = (rows["backward_median_ms"] / rows["forward_median_ms"]).tolist()
    said = listed(f"{number(r, 3)} at {m}" for r, m in zip(found, rows["model"], strict=True))
    compiled = steps(frame, context_length=context(frame), mode="compiled blocks", precision=FP32)
    without = compiled["backward_median_ms"] / compiled["forward_median_ms"]
    also = f" Compiled block by block, with fewer launches, it is {span(without)}."
    told = beside.told("cuda", FP32, "eager")
    others = listed(f"{number(one.ratio, 3)} at {one.model}" for one in told)
    return (
        f"By FLOPs a backward pass is {BY_FLOPS} forwards. By time, eager in fp32, it is {said} on "
        f"{_where(rows)} (context {context(frame)}), and {others} on the published "
        f"{told[0].device}.{also if len(compiled) else ''}"
    )


def _inference(frame: pd.DataFrame) -> str | None:
    rows = steps(frame, context_length=context(frame), mode="eager", precision=FP32)
    rows = rows[rows["inference_median_ms"].notna()]
    if rows.empty:
        return None
    found = rows["inference_median_ms"] / rows["forward_median_ms"]
    said = listed(f"{percent(f)} at {m}" for f, m in zip(found, rows["model"], strict=True))
    return (
        f"Without gradients and loss the same pass takes, of a training step's forward, {said} "
        f"(eager fp32, {_where(rows)}, context {context(frame)})."
    )


def _pairs(frame: pd.DataFrame) -> dict[str, float]:
    """Autocast's time over fp32's by size: eager, at the context looked at."""
    rows = steps(frame, context_length=context(frame), mode="eager")
    times = {p: g.set_index("model")["both_median_ms"] for p, g in rows.groupby("precision")}
    if not {FP32, AUTOCAST} <= set(times):
        return {}
    both = [m for m in times[FP32].index if m in times[AUTOCAST].index]
    return {model: float(times[AUTOCAST][model] / times[FP32][model]) for model in both}


def _autocast(frame: pd.DataFrame) -> str | None:
    found = _pairs(frame)
    if not found:
        return None
    rows = steps(frame, mode="eager")
    told = listed(f"{number(ratio, 3)} at {model}" for model, ratio in found.items())
    slower = [model for model, ratio in found.items() if ratio > 1]
    again = listed(
        f"{number(cast.both_median_ms / plain.both_median_ms, 3)} at {model}"
        for model, plain, cast in _profiled(frame)
    )
    return (
        f"On {_where(rows)} bf16 autocast's time over fp32's (forward and backward, eager, context "
        f"{context(frame)}) is {told}: "
        + (f"slower at {listed(slower)}." if slower else "faster at every size.")
        + (f" Measured once more beside the profile it is {again}." if again else "")
    )


def _profiled(frame: pd.DataFrame) -> list[tuple[str, Any, Any]]:
    """Sizes with their profiles in fp32 and under autocast."""
    pairs = []
    for model, part in experiment(frame, "profile").groupby("model", sort=False):
        by = {row.precision: row for row in part.itertuples()}
        if {FP32, AUTOCAST} <= set(by):
            pairs.append((str(model), by[FP32], by[AUTOCAST]))
    return pairs


def _casts(frame: pd.DataFrame) -> str | None:
    """Why: the kernels' time falls, what Python has to launch grows; fp32 against autocast."""
    pairs = _profiled(frame)
    if not pairs:
        return None
    said = "; ".join(_added(*pair) for pair in pairs)
    return (
        f"From fp32 to autocast, forward and backward on {_where(experiment(frame, 'profile'))}: "
        f"{said}.{_bound(pairs)}"
    )


def _bound(pairs: list[tuple[str, Any, Any]]) -> str:
    """Sizes at which autocast is slower though its kernels take less time."""
    slower = [
        model for model, plain, cast in pairs
        if cast.both_median_ms > plain.both_median_ms and (busy(cast) or 1.0) < LAUNCH_BOUND
        and cast.busy_ms < plain.busy_ms
    ]  # fmt: skip
    if not slower:
        return ""
    return (
        f" So autocast is slower at {listed(slower)} not by its kernels, which take less time than "
        "fp32's, but because the pass lasts as long as Python takes to launch it, and casts are "
        "more to launch."
    )


def _added(model: str, plain: Any, cast: Any) -> str:
    operators = f"{plain.operators:,.0f} to {cast.operators:,.0f} operators"
    if pd.isna(plain.kernels):
        return (
            f"{model} {operators}, of the latter {cast.casts:,.0f} casts that take "
            f"{quantity(cast.casts_ms, 'ms')}"
        )
    shares = [percent(busy(row) or 0.0) for row in (plain, cast)]
    return (
        f"{model} {operators}, {plain.kernels:,.0f} to {cast.kernels:,.0f} kernels, their time "
        f"{number(plain.busy_ms, 3)} to {number(cast.busy_ms, 3)} ms "
        f"({percent(cast.casts_ms / cast.busy_ms)} of it {cast.casts:,.0f} casts), the card busy "
        f"{shares[0]} to {shares[1]} of the time"
    )


def _compile(frame: pd.DataFrame) -> str | None:
    rows = _repaid_here(frame)
    if not rows:
        return None
    paying = [(row, eager, count) for row, eager, count in rows if count is not None]
    where = rows[0][0].place
    if not paying:
        return f"On {where} no compiled step is faster than eager's."
    soon, late = min(paying, key=lambda one: one[2]), max(paying, key=lambda one: one[2])
    said = (
        f"On {where} at context {context(frame)} a compiled step takes, of eager's time, "
        f"{_by_precision(rows)}. Compilation has paid for itself after {number(soon[2], 3)} steps "
        f"({_case(soon[0])})"
    )
    if late[0] is not soon[0]:
        said += f" to {number(late[2], 3)} ({_case(late[0])})"
    never = len(rows) - len(paying)
    return said + (f", and never in {never} of {len(rows)} cases." if never else ".")


def _by_precision(rows: list[tuple[Any, float, float | None]]) -> str:
    """The least and the greatest ratio to eager's step in each precision, with their cases."""
    found: dict[str, list[tuple[float, str]]] = {}
    for row, eager, _ in rows:
        case = f"{row.model}, {row.mode}"
        found.setdefault(row.precision, []).append((row.step_median_ms / eager, case))
    said = []
    for precision, ratios in found.items():
        ends = dict.fromkeys(f"{percent(r)} ({case})" for r, case in (min(ratios), max(ratios)))
        said.append(f"{' to '.join(ends)} in {precision}")
    return listed(said)


def _repaid_here(frame: pd.DataFrame) -> list[tuple[Any, float, float | None]]:
    return [r for r in repaid(frame) if r[0].context_length == context(frame)]


def _case(row: Any) -> str:
    return f"{row.model}, {row.precision}, {row.mode}"


def _recompiled(frame: pd.DataFrame) -> str | None:
    rows = steps(frame)
    rows = rows[rows["mode"] != "eager"]
    if rows.empty:
        return None
    again = rows[rows["recompiled"] > 0]
    last = int(rows["compile_steps"].max())
    first = "their first step" if last == 1 else f"their first {last} steps"
    said = "none" if again.empty else listed(_case(row) for row in again.itertuples())
    return (
        f"Of {len(rows)} compiled cases on {_where(rows)} a graph was compiled again during the "
        f"measured steps in {said}; all compilation was in {first}."
    )


def _optimizer(frame: pd.DataFrame) -> str | None:
    rows = ordered(leading(rows_of(frame, "optimizer")))
    if rows.empty:
        return None
    last = rows[rows["model"] == rows["model"].iloc[-1]]
    by = {row.optimizer: row for row in last.itertuples()}
    times = listed(f"{name} {quantity(r.optimizer_median_ms, 'ms')}" for name, r in by.items())
    row = next(iter(by.values()))
    rest = steps(frame, context_length=context(frame), mode="eager", precision=FP32)
    rest = rest[rest["model"] == row.model]
    both, peak = rest["both_median_ms"], pd.to_numeric(rest["peak_mib"]).dropna()
    held = f" and {percent(row.state_mib / peak.iloc[0])} of that step's peak" if len(peak) else ""
    share = ""
    if len(both):
        parts = [
            r.optimizer_median_ms / (r.optimizer_median_ms + both.iloc[0]) for r in by.values()
        ]
        share = f", {listed(percent(p) for p in parts)} of an eager fp32 step"
    return (
        f"AdamW on {_where(rows)} at {row.model}: {times}{share}; its state takes "
        f"{quantity(row.state_mib / GIB, 'GiB')}, {number(row.state_mib / row.weights_mib, 2)} "
        f"times the weights{held}{_transient(by)}."
    )


def _transient(by: dict[str, Any]) -> str:
    known = {name: row.transient_mib for name, row in by.items() if pd.notna(row.transient_mib)}
    if not known:
        return ""
    said = listed(f"{name} {quantity(mib / GIB, 'GiB')}" for name, mib in known.items())
    return f"; for a moment it takes {said} more"


def _attention(frame: pd.DataFrame) -> str | None:
    pairs = [(fused, plain) for fused, plain in attention_pairs(frame) if plain.status == "ok"]
    if not pairs:
        return None
    ratios = [(plain.both_median_ms / fused.both_median_ms, fused) for fused, plain in pairs]
    low, high = (pick(ratios, key=lambda pair: pair[0]) for pick in (min, max))
    return (
        f"Plain attention's forward and backward take {number(low[0], 3)} "
        f"({low[1].model}, {low[1].precision}) to {number(high[0], 3)} ({high[1].model}, "
        f"{high[1].precision}) times those with scaled_dot_product_attention, on "
        f"{high[1].place} at context {high[1].context_length:g}."
    )


def _cards(frame: pd.DataFrame) -> str | None:
    """Achieved share of each card's peak, for the largest size that both have."""
    said = []
    for precision in (FP32, AUTOCAST):
        told = {one.model: one for one in beside.told("cuda", precision, "eager")}
        rows = steps(frame, context_length=256, mode="eager", precision=precision)
        ours = [r for r in rows.itertuples() if r.model in told and utilisation(r) is not None]
        if not ours:
            continue
        row, one = ours[-1], told[ours[-1].model]
        assert one.share is not None
        said.append(
            f"{precision} {percent(utilisation(row) or 0.0)} on {row.place} and "
            f"{percent(one.share)} on {one.device} ({row.model})"
        )
    if not said:
        return None
    return f"Share of the card's peak, forward and backward, eager: {'; '.join(said)}."


def _memory(frame: pd.DataFrame) -> str | None:
    rows = experiment(frame, "step", None)
    over = rows[rows["status"].isin(["oom", "oom (predicted)"])]
    if over.empty:
        return None
    said = [
        f"{r.model} at context {int(r.context_length)} in {r.precision} "
        f"({r.mode if r.attention == 'plain' else r.attention}, {r.status})"
        for r in over.itertuples()
    ]
    return f"Memory did not suffice on {_where(over)} for {listed(said)}."


def _published_autocast() -> str:
    plain, cast = (
        {one.model: one.times["forward+backward"][0] for one in beside.told("cuda", p, "eager")}
        for p in (FP32, AUTOCAST)
    )
    slower = [m for m in plain if cast[m] > plain[m]]
    device = beside.told("cuda", FP32, "eager")[0].device
    return (
        f"Published, {device}: autocast takes longer than fp32 at {listed(slower)}, "
        f"{listed(f'{number(cast[m] / plain[m], 3)} times' for m in slower)}."
    )


def _published_spread() -> list[str]:
    """What the published backward times and the medium, compiled row can and cannot mean."""
    rows = published.load("end_to_end")
    backward = rows[(rows["source"] == "001") & (rows["direction"] == "backward")]
    bad = backward[backward["mean_ms"] < backward["std_ms"]]
    below = bad[bad["mean_ms"] < 0]
    row = next(o for o in beside.told("cuda", FP32, "compiled") if o.model == "medium")
    extra, rest = one_slow_step(*row.times["forward"])
    both = row.times["forward+backward"][0]
    return [
        f"Of {len(backward)} published backward times {len(bad)} are smaller than their own "
        f"standard deviation and {len(below)} below zero: a difference of two averages, of which "
        "one held a slow step.",
        f"Published, medium compiled: the forward's mean and spread are those of one step of "
        f"{quantity(extra + rest, 'ms')} among {STEPS}, the others at {quantity(rest, 'ms')}, as a "
        f"recompilation in a measured step leaves them. Then the backward pass takes "
        f"{quantity(both - rest, 'ms')}, not {quantity(row.times['backward'][0], 'ms')}.",
    ]
