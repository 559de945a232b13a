"""Study 09's tables. Every function takes the frame of `results.load("09_model_memory")`."""

from collections import Counter
from typing import Any

import pandas as pd

from fusedlib.bench.model_memory import cases
from fusedlib.bench.model_memory.program import MODES
from fusedlib.models import activations, checkpointed
from fusedlib.study.display import MISSING, number, quantity
from fusedlib.study.model_memory import selected
from fusedlib.study.model_memory.selected import MIB, TITLES, cell

PARTS = ("attention norm", "attention", "mlp norm", "mlp", "last norm", "output", "loss")


def empty() -> pd.DataFrame:
    """A table for what has not been measured."""
    return pd.DataFrame(columns=["not measured"])


def peaks(frame: pd.DataFrame) -> pd.DataFrame:
    """Peak of every pass by precision and mode."""
    rows = selected.passes(frame, None)
    if rows.empty:
        return empty()
    unit, scale = selected.unit(rows)
    body: dict[tuple[str, int], dict[tuple[str, str], str]] = {}
    for _, row in rows.iterrows():
        line = body.setdefault((row["attention"], int(row["context_length"])), {})
        text = cell(row["measured_mib"], scale, 3) if row["status"] == "ok" else None
        line[f"{row['precision']}, {unit}", _brief(row["mode"])] = text or str(row["status"])
    return _framed(body, ["attention", "context"], [
        (f"{p}, {unit}", _brief(m)) for p in activations.PRECISIONS for m in MODES
    ])  # fmt: skip


def _brief(mode: str) -> str:
    return mode.removeprefix("forward, ")


def _framed(
    body: dict[Any, dict[tuple[str, str], str]], names: list[str], order: list[tuple[str, str]]
) -> pd.DataFrame:
    table = pd.DataFrame.from_dict(body, orient="index").fillna(MISSING)
    table = table[[column for column in order if column in table]]
    table.columns = pd.MultiIndex.from_tuples(table.columns)
    table.index = (
        pd.MultiIndex.from_tuples(list(body), names=names)
        if len(names) > 1
        else pd.Index(list(body), name=names[0])
    )
    return table


def counted_and_measured(frame: pd.DataFrame) -> pd.DataFrame:
    """A full step at the largest context: each thing by formula, and the measured less that."""
    rows = selected.steps(frame)
    if rows.empty:
        return empty()
    body: dict[str, dict[tuple[str, str], str]] = {}
    for _, row in rows.iterrows():
        counted = selected.counted_mib(row)
        measured = {
            "weights": row["weights_bytes"] / MIB, "gradients": row["gradients_bytes"] / MIB,
            "optimizer": row["state_bytes"] / MIB, "activations": row["forward_activations_mib"],
            "casts": row["forward_casts_mib"],
        }  # fmt: skip
        lines = [(TITLES[name], counted[name], measured[name]) for name in measured]
        for name, held in cases.moments(dict(row)).items():
            at = {"forward": "forward", "loss": "backward", "update": "step"}[name]
            title = {"forward": "end of the forward", "loss": "the loss's backward"}.get(
                name, "AdamW's update"
            )
            lines.append((f"peak, {title}", sum(held.values()) / MIB, row[f"peak_in_{at}_mib"]))
        for title, formula, found in lines:
            cells = body.setdefault(title, {})
            cells[row["precision"], "counted"] = cell(formula, 1, 5)
            cells[row["precision"], "difference"] = signed(found - formula)
    return _framed(body, ["what"], [
        (p, c) for p in rows["precision"] for c in ("counted", "difference")
    ])  # fmt: skip


def signed(mib: float) -> str:
    """A signed difference in the unit that suits it."""
    if pd.isna(mib):
        return MISSING
    size = abs(mib) * MIB
    if size < 0.5:
        return "0"
    sign = "+" if mib > 0 else "−"
    if size < 10_000:
        return f"{sign}{number(size, max(len(str(int(size))), 1))} B"
    return f"{sign}{quantity(size / MIB, 'MiB', 3)}"


def allocator(frame: pd.DataFrame) -> pd.DataFrame:
    """Sum of the sizes at the peak, what the allocator adds, and what it keeps in reserve."""
    rows = selected.steps(frame)
    if rows.empty:
        return empty()
    body = {}
    for _, row in rows.iterrows():
        asked = row["requested_peak_mib"]
        body[row["precision"]] = {
            "peak lies": selected.section(row),
            "events": cell(row["events_peak_mib"], 1, 5),
            "allocator": cell(asked, 1, 5),
            "rounding": cell(round(row["peak_mib"] - asked, 2), 1, 3),
            "other": cell(row["peak_other_mib"], 1, 3),
            "reserved": cell(row["reserved_peak_mib"], 1, 5),
        }
    return pd.DataFrame.from_dict(body, orient="index").rename_axis("precision")


def kept(frame: pd.DataFrame) -> pd.DataFrame:
    """What a forward pass keeps for backward by part, counted and as autograd's hooks saw it."""
    rows = selected.passes(frame)
    rows = rows[rows["mode"] == "forward"]
    if rows.empty:
        return empty()
    rows = rows[rows["context_length"] == rows["context_length"].max()]
    body: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for _, row in rows.iterrows():
        formula = kept_by_part(row)
        for part in (*PARTS, "casts"):
            line = body.setdefault((row["attention"], TITLES.get(part, part)), {})
            found = row.get(f"saved_{part.replace(' ', '_')}_bytes")
            found = 0.0 if found is None or pd.isna(found) else float(found)
            line[row["precision"], "counted"] = cell(formula[part], MIB)
            line[row["precision"], "difference"] = signed((found - formula[part]) / MIB)
    return _framed(body, ["attention", "part"], [
        (p, c) for p in activations.PRECISIONS for c in ("counted", "difference")
    ])  # fmt: skip


def kept_by_part(row: Any) -> Counter[str]:
    """Bytes by formula that all blocks and the head keep, by part; `casts` of weights apart."""
    shape, precision, batch = cases.shape_of(row), row["precision"], int(row["batch_size"])
    found: Counter[str] = Counter()
    for item in activations.of_block(shape, precision, row["device"], batch):
        found[item.part] += shape.num_layers * item.nbytes
    for item in activations.of_head(shape, precision, batch):
        found[item.part] += item.nbytes
    found["casts"] = activations.cast_weights(shape, precision)
    return found


def one_tensor(frame: pd.DataFrame) -> pd.DataFrame:
    """One activation by its shape, and how many blocks of just that size a forward left."""
    rows = selected.passes(frame)
    rows = rows[
        (rows["mode"] == "forward") & (rows["attention"] == rows["attention"].iloc[:1].max())
    ]
    if rows.empty:
        return empty()
    body = {}
    for _, row in rows.iterrows():
        shape, batch = cases.shape_of(row), int(row["batch_size"])
        each = activations.tensor_bytes(shape, row["precision"], batch)
        items = shape.num_layers * activations.of_block(
            shape, row["precision"], row["device"], batch
        )
        items += activations.of_head(shape, row["precision"], batch)
        seen = dict(zip(row["kept_sizes_bytes"], row["kept_sizes_count"], strict=True))
        body[row["precision"], int(row["context_length"])] = {
            "batch · context · d_model · bytes": (
                f"{batch} · {shape.context_length} · {shape.d_model} · "
                f"{activations.widths(row['precision']).stream}"
            ),
            "MiB": cell(each, MIB),
            "blocks counted": sum(i.count for i in items if i.each == each),
            "found": seen.get(each, 0),
        }
    table = pd.DataFrame.from_dict(body, orient="index")
    table.index = pd.MultiIndex.from_tuples(list(body), names=["precision", "context"])
    return table


def largest(frame: pd.DataFrame) -> pd.DataFrame:
    """The largest blocks that a step's last forward left, and the lines that asked for them."""
    rows = selected.steps(frame)
    if rows.empty:
        return empty()
    row = rows.iloc[0]
    body = [
        {
            "each, MiB": cell(n, MIB), "blocks": int(count), "together, MiB": cell(n * count, MIB),
            "what": TITLES[category], "asked for by": _lines(where),
        }
        for n, count, category, where in zip(
            row["largest_bytes"], row["largest_count"], row["largest_category"],
            row["largest_where"], strict=True,
        )
    ]  # fmt: skip
    return pd.DataFrame(body) if body else empty()


def _lines(where: str) -> str:
    """The two innermost lines, named without their folder."""
    parts = [part.rpartition("/")[2] for part in where.split(" ← ")]
    operation = [] if ":" in parts[0] else [parts.pop(0)]
    return " ← ".join([*operation, *parts[:2]]) or MISSING


def checkpointing(frame: pd.DataFrame) -> pd.DataFrame:
    """Each plan: peak over weights and gradients, counted and measured, and the time of a pass."""
    rows = selected.checkpoints(frame, None)
    if rows.empty:
        return empty()
    body = {}
    for _, row in rows.iterrows():
        shape, plan = cases.shape_of(row), cases.plan_of(row)
        held = checkpointed.held_bytes(
            shape, row["precision"], row["device"], plan, int(row["batch_size"])
        )
        fine = row["status"] == "ok"
        where = f"{row['group'][0]}, {row['group'][1]}"
        body[where, row["plan"], int(row["blocks"])] = {
            "segments": len(plan.segments(shape.num_layers)) or MISSING,
            "passes": plan.passes(shape.num_layers),
            "counted": cell(max(held.values()), MIB),
            "measured": cell(row["peak_mib"], 1) if fine else str(row["status"]),
            "ms": _interval(row, "median_ms", "median_low_ms", "median_high_ms"),
            "times none": _interval(row, "ratio", "ratio_low", "ratio_high"),
        }
    table = pd.DataFrame.from_dict(body, orient="index")
    table.index = pd.MultiIndex.from_tuples(list(body), names=["context", "plan", "blocks"])
    return table


def _interval(row: Any, middle: str, low: str, high: str) -> str:
    if pd.isna(row[middle]):
        return MISSING
    return f"{number(row[middle])} ({number(row[low])} to {number(row[high])})"
