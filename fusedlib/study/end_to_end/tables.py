"""Study 06's tables. Every function takes the frame of `results.load("06_end_to_end")`."""

import math
from typing import Any

import pandas as pd

from fusedlib.bench.end_to_end.cases import PRECISIONS
from fusedlib.study.display import MISSING, number, percent
from fusedlib.study.end_to_end import peaks
from fusedlib.study.end_to_end.selected import (
    busy,
    ceiling,
    context,
    experiment,
    ordered,
    products,
    steps,
    utilisation,
)
from fusedlib.study.selection import leading, rows_of

GIB = 1024
"""MiB."""

SHORT = {"eager": "eager", "compiled": "whole", "compiled blocks": "blocks"}
"""A mode's name in a narrow column."""


def made(lines: dict[Any, dict[str, str]], names: list[str], columns: list[str]) -> pd.DataFrame:
    """A table of its lines; the header alone when there is none."""
    if not lines:
        return pd.DataFrame(columns=columns, index=pd.Index([], name=names[0]))
    keys = list(lines)
    index: Any = (
        pd.Index(keys, name=names[0]) if len(names) == 1
        else pd.MultiIndex.from_tuples(keys, names=names)
    )  # fmt: skip
    return pd.DataFrame(list(lines.values()), index=index, columns=columns)


def cell(value: Any, digits: int = 3) -> str:
    """A number, a dash for none."""
    return MISSING if value is None or pd.isna(value) else number(float(value), digits)


def many(value: Any) -> str:
    """A whole number, a dash for none."""
    return MISSING if value is None or pd.isna(value) else f"{value:,.0f}"


def gib(mib: Any) -> str:
    """MiB in GiB, a dash for none."""
    return MISSING if mib is None or pd.isna(mib) else number(mib / GIB, 3)


def share(value: float | None) -> str:
    """A share of one in per cent, a dash for none."""
    return MISSING if value is None or pd.isna(value) else percent(value)


def interval(row: Any, name: str) -> str:
    """A median with its 95 % interval."""
    ends = (getattr(row, f"{name}_median_{end}ms") for end in ("", "low_", "high_"))
    middle, low, high = (cell(value) for value in ends)
    return f"{middle} ({low}–{high})"


def grid(frame: pd.DataFrame, precision: str) -> pd.DataFrame:
    """All steps of the leading machine in one precision, whatever their status."""
    rows = experiment(frame, "step", None)
    rows = rows[rows["precision"] == precision]
    columns = [
        "forward, ms", "backward, ms", "step, ms (95 %)", "tokens/s", "TFLOP/s", "MFU",
        "GiB", "compile, s",
    ]  # fmt: skip
    lines = {}
    for row in rows.itertuples():
        mode = SHORT[row.mode] if row.attention == "plain" else row.attention
        key = (row.model, f"{int(row.context_length)}", mode)
        lines[key] = dict(zip(columns, _step(row, len(columns)), strict=True))
    return made(lines, ["size", "context", "mode"], columns)


def _step(row: Any, width: int) -> list[str]:
    if row.status != "ok":
        return [row.status, *[MISSING] * (width - 1)]
    return [
        cell(row.forward_median_ms), cell(row.backward_median_ms), interval(row, "step"),
        number(row.tokens_per_s, 3), number(row.flops_per_s / 1e12, 3), share(utilisation(row)),
        gib(row.peak_mib), cell(row.compile_s) + again(row),
    ]  # fmt: skip


def again(row: Any) -> str:
    """A mark for a row in which a graph was compiled during the measured steps."""
    return " †" if pd.notna(row.recompiled) and row.recompiled > 0 else ""


def rates(frame: pd.DataFrame) -> pd.DataFrame:
    """Forward and backward, eager: shares of the data sheet's peak and of a large product."""
    rows = steps(frame, context_length=context(frame), mode="eager")
    lines: dict[str, dict[tuple[str, str], str]] = {}
    for row in rows.itertuples():
        roof = ceiling(frame, row)
        lines.setdefault(row.model, {}).update({
            (row.precision, "MFU"): share(utilisation(row)),
            (row.precision, "of GEMM"): share(None if roof is None else row.flops_per_s / roof),
        })  # fmt: skip
    return grouped(lines, "size")


def grouped(lines: dict[str, dict[tuple[str, str], str]], name: str) -> pd.DataFrame:
    """A table whose columns stand in groups, in the order of the precisions."""
    if not lines:
        return made({}, [name], ["no rows yet"])
    there = dict.fromkeys(column for line in lines.values() for column in line)
    columns = [c for precision in PRECISIONS for c in there if c[0] == precision]
    cells = [[line.get(c, MISSING) for c in columns] for line in lines.values()]
    return pd.DataFrame(
        cells, index=pd.Index(list(lines), name=name), columns=pd.MultiIndex.from_tuples(columns)
    )


def roofs(frame: pd.DataFrame) -> pd.DataFrame:
    """What the data sheets say and what was measured, by machine and card, in TFLOP/s."""
    columns = ["fp32, data sheet", "fp32, GEMM", "bf16, data sheet", "bf16, GEMM", "sheet"]
    lines: dict[str, dict[str, str]] = {}
    found = products(frame)
    for place, part in found.groupby("place", sort=False):
        measured = part.set_index("format")["flops_per_s"].to_dict()
        lines[place] = _roof(peaks.of(str(place)), measured, columns)
    for part_of_name, sheet in peaks.PEAKS.items():
        if not any(part_of_name in name for name in lines):
            lines[part_of_name] = _roof(sheet, {}, columns)
    return made(lines, ["card"], columns)


def _roof(sheet: peaks.Peak | None, measured: dict[str, float], columns: list[str]) -> Any:
    rates: list[float | None] = []
    for form in ("fp32", "bf16"):
        rates += [getattr(sheet, form, None), measured.get(form)]
    cells = [MISSING if rate is None else number(rate / 1e12, 3) for rate in rates]
    return dict(zip(columns, [*cells, sheet.source if sheet else "none in our table"], strict=True))


def ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Backward time over forward time by size, precision and mode; by FLOPs it is two."""
    rows = steps(frame, context_length=context(frame))
    lines: dict[str, dict[tuple[str, str], str]] = {}
    for row in rows.itertuples():
        ratio = row.backward_median_ms / row.forward_median_ms
        lines.setdefault(row.model, {})[row.precision, SHORT[row.mode]] = number(ratio, 3)
    return grouped(lines, "size")


def casts(frame: pd.DataFrame) -> pd.DataFrame:
    """Forward and backward under the profiler: kernels, how busy the device is, casts."""
    columns = [
        "kernels", "operators", "both, ms", "kernels' time, ms", "busy", "casts", "casts, ms",
        "casts of kernels' time",
    ]  # fmt: skip
    lines = {}
    for row in experiment(frame, "profile").itertuples():
        cells = [
            many(row.kernels), many(row.operators), cell(row.both_median_ms),
            cell(row.busy_ms), share(busy(row)), many(row.casts), cell(row.casts_ms),
            share(row.casts_ms / row.busy_ms),
        ]  # fmt: skip
        lines[row.model, row.precision] = dict(zip(columns, cells, strict=True))
    return made(lines, ["size", "precision"], columns)


def compiling(frame: pd.DataFrame) -> pd.DataFrame:
    """What compilation costs and gives, and after how many steps it has paid for itself."""
    columns = ["eager, ms", "compiled, ms", "saved", "compile, s", "repaid, steps", "again"]
    lines = {}
    for row, eager, steps_needed in repaid(frame):
        if row.context_length != context(frame):
            continue
        saved = 1 - row.step_median_ms / eager
        cells = [
            cell(eager), cell(row.step_median_ms), share(saved), cell(row.compile_s),
            "never" if steps_needed is None else number(steps_needed, 3),
            f"{int(row.recompiled)}×" if row.recompiled else "no",
        ]  # fmt: skip
        key = (row.model, row.precision, SHORT[row.mode])
        lines[key] = dict(zip(columns, cells, strict=True))
    return made(lines, ["size", "precision", "compiled"], columns)


def by_context(frame: pd.DataFrame) -> pd.DataFrame:
    """Time of a step compiled block by block over eager's, by size, precision and context."""
    lines: dict[str, dict[tuple[str, str], str]] = {}
    for row, eager, _ in repaid(frame):
        if row.mode == "compiled blocks":
            column = row.precision, f"{int(row.context_length)}"
            ratio = percent(row.step_median_ms / eager) + again(row)
            lines.setdefault(row.model, {})[column] = ratio
    return grouped(lines, "size")


def repaid(frame: pd.DataFrame) -> list[tuple[Any, float, float | None]]:
    """Compiled rows with eager's ms for the same step, and the steps until they have paid."""
    rows = steps(frame)
    keys = ["model", "context_length", "precision"]
    eager = rows[rows["mode"] == "eager"].set_index(keys)["step_median_ms"].to_dict()
    found = []
    for row in rows[rows["mode"] != "eager"].itertuples():
        before = eager.get((row.model, row.context_length, row.precision))
        if before is None:
            continue
        gain = before - row.step_median_ms
        found.append((row, float(before), 1e3 * row.compile_s / gain if gain > 0 else None))
    return found


def attention(frame: pd.DataFrame) -> pd.DataFrame:
    """Plain attention and scaled_dot_product_attention in the whole step."""
    columns = ["plain, ms", "sdpa, ms", "plain / sdpa", "plain, GiB", "sdpa, GiB"]
    lines = {}
    for fused, plain in attention_pairs(frame):
        cells = [
            plain.status if plain.status != "ok" else cell(plain.both_median_ms),
            cell(fused.both_median_ms),
            cell(plain.both_median_ms / fused.both_median_ms), gib(plain.both_peak_mib),
            gib(fused.both_peak_mib),
        ]  # fmt: skip
        key = (fused.model, f"{int(fused.context_length)}", fused.precision)
        lines[key] = dict(zip(columns, cells, strict=True))
    return made(lines, ["size", "context", "precision"], columns)


def attention_pairs(frame: pd.DataFrame) -> list[tuple[Any, Any]]:
    """Eager steps with sdpa, each with that of plain attention, whatever the latter's status."""
    keys = ["model", "context_length", "precision"]
    rows = experiment(frame, "step", None)
    rows = rows[(rows["mode"] == "eager") & (rows["attention"] == "plain")]
    plain = {tuple(getattr(r, k) for k in keys): r for r in rows.itertuples()}
    fused = steps(frame, mode="eager", attention="sdpa").itertuples()
    pairs = [(row, plain.get(tuple(getattr(row, k) for k in keys))) for row in fused]
    return [(row, other) for row, other in pairs if other is not None]


def mlps(frame: pd.DataFrame) -> pd.DataFrame:
    """The step with each provider's MLP: time, eager's over it, what both passes hold, errors."""
    columns = [
        "both, ms", "step, ms", "both, eager's / its", "step, eager's / its", "held, GiB",
        "gradients' error",
    ]  # fmt: skip
    lines = {}
    for row in experiment(frame, "mlp", None).itertuples():
        cells = [row.status, *[MISSING] * (len(columns) - 1)]
        if row.status == "ok":
            cells = [
                cell(row.both_median_ms), cell(row.step_median_ms) + again(row),
                speedup(row, "both"),
                speedup(row, "step"), gib(row.held_mib), cell(row.gradients_error, 2),
            ]  # fmt: skip
        key = (f"{row.model}·{int(row.context_length)}", row.precision, row.mlp)
        lines[key] = dict(zip(columns, cells, strict=True))
    return made(lines, ["size·context", "precision", "MLP"], columns)


def speedup(row: Any, part: str) -> str:
    """A ratio of paired samples with its 95 % interval, a dash for none."""
    values = [getattr(row, f"{part}_speedup{end}") for end in ("", "_low", "_high")]
    if any(pd.isna(v) for v in values):
        return MISSING
    middle, low, high = (number(v, 3) for v in values)
    return f"{middle} ({low}–{high})"


def optimizers(frame: pd.DataFrame) -> pd.DataFrame:
    """AdamW's step alone: time, traffic, share of a step, its state and what it takes for a moment.

    Shares are of an eager fp32 step at the context looked at: its forward and backward and this
    step, and its peak (that of AdamW foreach).
    """
    columns = [
        "step, ms (95 %)", "GB/s at least", "of a step", "state, GiB", "of the peak",
        "moment's, GiB",
    ]  # fmt: skip
    both = steps(frame, context_length=context(frame), mode="eager", precision="fp32")
    rest = both.set_index("model")["both_median_ms"].to_dict()
    peak = pd.to_numeric(both.set_index("model")["peak_mib"]).to_dict()
    lines = {}
    rows = ordered(leading(rows_of(frame, "optimizer", None)))
    for row in rows.itertuples():
        cells = [row.status, *[MISSING] * (len(columns) - 1)]
        if row.status == "ok":
            own, others = row.optimizer_median_ms, rest.get(row.model)
            cells = [
                interval(row, "optimizer"), number(row.least_bytes / own / 1e6, 3),
                share(None if others is None else own / (own + others)),
                gib(row.state_mib), share(row.state_mib / peak.get(row.model, math.nan)),
                gib(row.transient_mib),
            ]  # fmt: skip
        lines[row.model, row.optimizer] = dict(zip(columns, cells, strict=True))
    return made(lines, ["size", "AdamW"], columns)
