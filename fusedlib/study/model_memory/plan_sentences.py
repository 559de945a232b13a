"""Study 09's sentences about activation checkpointing, every number from rows or formulas."""

from math import isclose, sqrt
from typing import Any

import pandas as pd

from fusedlib.bench.model_memory import cases
from fusedlib.models import activations, checkpointed
from fusedlib.study.display import number, quantity
from fusedlib.study.model_memory import selected
from fusedlib.study.model_memory.selected import MIB, size

AUTOGRADS = "no Python frame"  # what a row says of a block that no Python line asked for


def _plans(frame: pd.DataFrame, *, fits: bool | None = None) -> pd.DataFrame:
    """Plans at the last context and precision; with `fits` the last where no plan at all does
    (not).
    """
    rows, last = selected.checkpoints(frame, None), selected.groups(frame, fits=fits)[-1:]
    return rows[rows["group"].isin(last)]


def _kind(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    return rows[(rows["plan"] == kind) & (rows["status"] == "ok") & rows["peak_mib"].notna()]


def spacing_sentence(frame: pd.DataFrame) -> str | None:
    """The spacing of least peak, measured, against the formula's and the square root's."""
    rows = _kind(_plans(frame, fits=True), "segments")
    rows = rows if len(rows) else _kind(_plans(frame), "segments")
    if rows.empty:
        return None
    best = rows.loc[rows["peak_mib"].idxmin()]
    shape = cases.shape_of(best)
    root = sqrt(shape.num_layers)
    near = rows.loc[(rows["blocks"] - root).abs().idxmin()]
    block = activations.of_block(shape, best["precision"], best["device"])
    ratio = activations.total(block) / activations.tensor_bytes(shape, best["precision"])
    least = checkpointed.best_size(shape, best["precision"], best["device"], "segments")
    formula = min((_counted(row), row["blocks"]) for _, row in rows.iterrows())[1]
    text = (
        f"With checkpoints {best['model']} at context {best['context_length']:g} in "
        f"{best['precision']} holds least, {size(best['peak_mib'])} over weights and gradients, "
        f"with one every {_blocks(best['blocks'])}"
        f"{', as by formula' if formula == best['blocks'] else ''}"
    )
    if near["blocks"] != best["blocks"]:
        text += f"; with one every {_blocks(near['blocks'])} it holds {size(near['peak_mib'])}"
    return (
        f"{text}. The square root of {shape.num_layers} blocks, {number(root, 2)}, would be best "
        f"if a block kept no more than its input; it keeps {number(ratio)} times that, which by "
        f"formula makes {number(least, 2)} the best."
    )


def _counted(row: Any) -> int:
    shape, batch = cases.shape_of(row), int(row["batch_size"])
    held = checkpointed.held_bytes(
        shape, row["precision"], row["device"], cases.plan_of(row), batch
    )
    return max(held.values())


def _blocks(count: float) -> str:
    return "block" if count == 1 else f"{count:g} blocks"


def price_sentence(frame: pd.DataFrame) -> str | None:
    """What checkpoints save in memory and cost in time, by how many blocks have one."""
    pair = _price(frame)
    if pair is None:
        return None
    none, row = pair
    text = (
        f"A checkpoint at every block of {row['model']} at context {row['context_length']:g} in "
        f"{row['precision']} takes the peak over weights and gradients from "
        f"{size(none['peak_mib'])} to {size(row['peak_mib'])} and the time of forward and backward "
        f"to {_times(row)}; a backward being two forwards, one more forward would be "
        f"{number(4 / 3)}."
    )
    some = _kind(_plans(frame, fits=True), "first")
    said = [
        f"at the first {_blocks(one['blocks'])} alone it holds {size(one['peak_mib'])} and takes "
        f"{_times(one)}"
        for _, one in some.iterrows()
    ]
    return f"{text} With one {'; '.join(said)}." if said else text


def _times(row: Any) -> str:
    ends = f"{number(row['ratio_low'])} to {number(row['ratio_high'])}"
    return f"{quantity(row['ratio'], '×')} ({ends})"


def briefly(frame: pd.DataFrame) -> str | None:
    """`price_sentence` in a clause."""
    pair = _price(frame)
    if pair is None:
        return None
    none, row = pair
    return (
        f"a checkpoint at every block takes what context {row['context_length']:g} in "
        f"{row['precision']} needs besides weights and gradients from {size(none['peak_mib'])} to "
        f"{size(row['peak_mib'])}, in {number(row['ratio'])} times the time "
        f"({number(row['ratio_low'])} to {number(row['ratio_high'])})"
    )


def _price(frame: pd.DataFrame) -> tuple[Any, Any] | None:
    """The rows of no checkpoint and of one at every block, where both fit."""
    rows = _plans(frame, fits=True)
    single, whole = _kind(rows, "segments"), _kind(rows, "none")
    single = single[single["blocks"] == 1]
    return None if single.empty or whole.empty else (whole.iloc[0], single.iloc[0])


def nested_sentence(frame: pd.DataFrame) -> str | None:
    """What nesting gives over the best single level, and its price."""
    rows = _plans(frame, fits=True)
    rows = rows if len(rows) else _plans(frame)
    nested, single = (_kind(rows, kind) for kind in ("nested", "segments"))
    if nested.empty or single.empty:
        return None
    deep = nested.loc[nested["peak_mib"].idxmin()]
    flat = single.loc[single["peak_mib"].idxmin()]
    time = quantity(deep["median_ms"] / flat["median_ms"], "×")
    saved = flat["peak_mib"] - deep["peak_mib"]
    if saved <= 0 or isclose(flat["peak_mib"], deep["peak_mib"], rel_tol=1e-3):
        gain = "no less memory than the best single level"
    else:
        gain = f"{size(saved)} less than the best single level"
    of = "least with segments of" if len(nested) > 1 else "with segments of"
    return (
        f"Nested checkpoints, {of} {_blocks(deep['blocks'])}, take {gain} at "
        f"context {deep['context_length']:g} in {deep['precision']}, in {time} of its time."
    )


def fitting_sentence(frame: pd.DataFrame) -> str | None:
    """Where only checkpointing makes a pass fit."""
    rows = _plans(frame, fits=False)
    fine = _kind(rows, "segments")
    if fine.empty:
        return None
    best = fine.loc[fine["peak_mib"].idxmin()]
    whole = rows[rows["plan"] == "none"].iloc[0]
    need = cases.counted_peak(dict(whole)) / MIB
    return (
        f"At context {best['context_length']:g} in {best['precision']} {best['model']} does not "
        f"fit without checkpoints ({size(need)} by formula, weights and gradients included); with "
        f"one every {_blocks(best['blocks'])} a pass holds {size(best['peak_mib'])} over them and "
        f"takes {quantity(best['median_ms'], 'ms')}."
    )


def casts_sentence(frame: pd.DataFrame) -> str | None:
    """What autocast's cache of cast weights does to checkpointing."""
    rows = selected.checkpoints(frame)
    rows = _kind(rows[rows["precision"] == "bf16 autocast"], "segments")
    if rows.empty:
        return None
    best = rows.loc[rows["peak_mib"].idxmin()]
    casts = activations.cast_weights(cases.shape_of(best), best["precision"]) / MIB
    return (
        f"Under autocast a checkpoint does not let go of the cast weights: they stay in its cache "
        f"to the end of the forward, {size(casts)} of the {size(best['peak_mib'])} that "
        f"{best['model']} at context {best['context_length']:g} holds at the least"
        f"{_end(best)}, with one every {_blocks(best['blocks'])}."
    )


def _end(row: Any) -> str:
    return " (in the forward)" if row["peak_in"] == "forward" else ""


def inside_sentence(frame: pd.DataFrame) -> str | None:
    """By how much plans that peak in the backward hold more than counted, and which blocks do."""
    rows = _plans(frame, fits=True)
    rows = _kind(rows[rows["peak_in"] == "backward"], "segments")
    if rows.empty:
        return None
    over = rows["peak_mib"] - [_counted(row) / MIB for _, row in rows.iterrows()]
    row = rows.iloc[0]
    own = [
        (count, n)
        for count, n, at in zip(
            row["largest_count"], row["largest_bytes"], row["largest_where"], strict=True
        )
        if at.startswith(AUTOGRADS)
    ]
    low, high = size(over.min()), size(over.max())
    text = (
        f"What is not counted is what comes and goes inside a block's backward: "
        f"{low if low == high else f'{low} to {high}'} in {len(rows)} plans at context "
        f"{row['context_length']:g} in {row['precision']}"
    )
    if not own:
        return f"{text}."
    count, each = own[0]
    alike = ", each a tensor of tokens · d_ff" if each == _inner_bytes(row) else ""
    return (
        f"{text}; the largest that autograd asked for itself are {count:g} of {size(each / MIB)}"
        f"{alike}."
    )


def _inner_bytes(row: Any) -> int:
    """Bytes of a tensor tokens · d_ff as the products give it."""
    shape = cases.shape_of(row)
    tokens = int(row["batch_size"]) * shape.context_length
    return tokens * shape.d_ff * activations.widths(row["precision"]).product
