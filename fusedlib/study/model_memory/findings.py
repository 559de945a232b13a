"""Study 09 in sentences: findings and the abstract's part, every number from rows or formulas."""

from collections.abc import Iterable
from math import isclose, sqrt
from typing import Any

import pandas as pd

from fusedlib.bench.model_memory import cases
from fusedlib.bench.model_memory.program import MODES
from fusedlib.models import activations, checkpointed
from fusedlib.study.display import number, percent, quantity
from fusedlib.study.model_memory import selected, tables
from fusedlib.study.model_memory.selected import MIB, TITLES, of, size
from fusedlib.study.selection import no_finding, place

MISSING = no_finding("09_model_memory", "pass has been recorded")


def answer(frame: pd.DataFrame) -> str:
    """The study's question answered."""
    return _joined(frame, [step_sentence, counted_sentence, spacing_sentence])


def headline(frame: pd.DataFrame) -> list[str]:
    """The abstract's sentences about this study."""
    return _said(frame, [cost_sentence, counted_sentence])


def findings(frame: pd.DataFrame) -> list[str]:
    """What the rows say besides the `answer`, a sentence or two each."""
    return _said(
        frame,
        [
            precision_sentence, gradients_sentence, attention_sentence, update_sentence,
            allocator_sentence, price_sentence, nested_sentence, fitting_sentence, casts_sentence,
        ],
    )  # fmt: skip


def _said(frame: pd.DataFrame, sentences: list[Any]) -> list[str]:
    return [s for sentence in sentences if (s := sentence(frame))] or [MISSING]


def _joined(frame: pd.DataFrame, sentences: list[Any]) -> str:
    return " ".join(_said(frame, sentences))


def cost_sentence(frame: pd.DataFrame) -> str | None:
    """What fills the memory at a step's peak, and what checkpoints at all blocks give and cost."""
    return _sentence(part for part in (_step(frame), _price(frame)) if part)


def _sentence(parts: Iterable[str]) -> str | None:
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else None


# --- a step --------------------------------------------------------------------------------------


def step_sentence(frame: pd.DataFrame) -> str | None:
    """What the peak of a full step is made of, in the widest precision that was run."""
    return _sentence(filter(None, [_step(frame)]))


def _step(frame: pd.DataFrame) -> str | None:
    rows = selected.steps(frame)
    if rows.empty:
        return None
    row = rows.iloc[0]
    held = {name: row[f"peak_{name}_mib"] for name in TITLES}
    ranked = sorted(held.items(), key=lambda item: -item[1])
    parts = [
        f"{TITLES[name]} {percent(v / row['events_peak_mib'])}" for name, v in ranked
        if v >= 0.005 * row["events_peak_mib"]
    ]  # fmt: skip
    return (
        f"a step of {of(row)} peaks at {size(row['measured_mib'])} {selected.section(row)} on "
        f"{place(row)}: {', '.join(parts)}"
    )


def counted_sentence(frame: pd.DataFrame) -> str | None:
    """How far formulas and measurement differ over all passes, kept and at the peak."""
    rows = selected.passes(frame)
    kept = rows[rows["mode"] == "forward"]
    if rows.empty or kept.empty:
        return None
    apart = [
        abs(kept_bytes(row) / sum(tables.kept_by_part(row).values()) - 1)
        for _, row in kept.iterrows()
    ]
    asked = rows["requested_peak_mib"].fillna(rows["events_peak_mib"])
    peaks = [
        asked[at] * MIB / cases.counted_peak({**dict(row), "experiment": "pass"}) - 1
        for at, row in rows.iterrows()
    ]
    worst = max(range(len(peaks)), key=lambda at: abs(peaks[at]))
    row, most = rows.iloc[worst], max(apart)
    differ = f"differ by at most {percent(most)}" if most else "agree to the byte"
    text = (
        f"What a forward keeps for backward is known before it runs: over {len(kept)} passes the "
        f"formula and autograd's own saved tensors {differ}."
    )
    if not peaks[worst]:
        return f"{text} So do the peaks of {len(peaks)} passes."
    return (
        f"{text} Peaks are within {percent(abs(peaks[worst]))} of what is counted in {len(peaks)} "
        f"passes, least so in {row['mode']} at context {row['context_length']:g} in "
        f"{row['precision']}."
    )


def kept_bytes(row: Any) -> float:
    """All that the hooks saw in one forward, casts of weights included."""
    names = [f"saved_{part.replace(' ', '_')}_bytes" for part in (*tables.PARTS, "casts")]
    return float(sum(row[n] for n in names if n in row and not pd.isna(row[n])))


def precision_sentence(frame: pd.DataFrame) -> str | None:
    """What autocast and pure bf16 take of fp32's peak, and why autocast saves so little."""
    rows = selected.steps(frame).set_index("precision")
    if "fp32" not in rows.index or len(rows) < 2:
        return None
    wide, parts = rows.loc["fp32"], []
    for name in rows.index.drop("fp32"):
        row = rows.loc[name]
        casts = row["forward_casts_mib"]
        also = f" and cast weights {size(casts)}" if casts else ""
        parts.append(
            f"{percent(row['measured_mib'] / wide['measured_mib'])} in {name}, where kept "
            f"activations are {size(row['forward_activations_mib'])}{also}"
        )
    text = (
        f"Against fp32, which keeps {size(wide['forward_activations_mib'])}, a step of "
        f"{wide['model']} at context {wide['context_length']:g} peaks at {'; at '.join(parts)}."
    )
    if "bf16 autocast" not in rows.index:
        return text
    return (
        f"{text} Autocast keeps weights, gradients and moments in fp32 and adds a bf16 copy of "
        "each matrix for as long as its backward is to come."
    )


def gradients_sentence(frame: pd.DataFrame) -> str | None:
    """A forward without gradients against one with them."""
    pairs = []
    for mode in MODES[:2]:
        rows = selected.largest(frame, mode)
        pairs.append(rows.set_index("precision")["measured_mib"])
    ratio = (pairs[1] / pairs[0]).dropna()
    if ratio.empty:
        return None
    rows = selected.largest(frame, MODES[1])
    said = [f"{number(v)} times in {name}" for name, v in ratio.items()]
    return (
        f"Under `no_grad` nothing is kept: with gradients a forward of {rows.iloc[0]['model']} at "
        f"context {rows.iloc[0]['context_length']:g} peaks at {', '.join(said)} of that, weights "
        "included."
    )


def attention_sentence(frame: pd.DataFrame) -> str | None:
    """What keeping the T by T weights costs against `scaled_dot_product_attention`."""
    rows = selected.passes(frame)
    rows = rows[rows["mode"] == "forward"]
    wide = rows.pivot_table(
        index=["precision", "context_length"], columns="attention", values="forward_activations_mib"
    )
    if not {"plain", "sdpa"} <= set(wide.columns):
        return None
    ratio = (wide["sdpa"] / wide["plain"]).dropna()
    if ratio.empty:
        return None
    longest = ratio.index.get_level_values(1).max()
    said = [
        f"{percent(ratio[precision, longest])} in {precision}"
        for precision in activations.PRECISIONS if (precision, longest) in ratio.index
    ]  # fmt: skip
    text = (
        f"Of what a model with plain attention keeps, one with `scaled_dot_product_attention` "
        f"keeps {', '.join(said)} at context {longest:g}"
    )
    short = rows[rows["context_length"] == rows["context_length"].min()]
    shortest = int(short["context_length"].iloc[0])
    if shortest == longest:
        return f"{text}."
    counted = max(_kept_as(row, "sdpa") / _kept_as(row, "plain") for _, row in short.iterrows())
    return (
        f"{text}, and by formula at most {percent(counted)} at {shortest}: only the attention "
        "weights grow with the square of the context."
    )


def _kept_as(row: Any, attention: str) -> int:
    """Bytes by formula that a row's pass keeps with an attention of this kind."""
    return cases.counted({**dict(row), "attention": attention})["activations"]


def update_sentence(frame: pd.DataFrame) -> str | None:
    """What AdamW's update adds to what is there when the backward is done."""
    rows = selected.steps(frame)
    rows = rows[rows["peak_in_step_mib"].notna()]
    if rows.empty:
        return None
    row = rows.iloc[0]
    stays = (row["weights_bytes"] + row["gradients_bytes"] + row["state_bytes"]) / MIB
    extra = row["peak_in_step_mib"] - stays - row["peak_other_mib"]
    why = (
        "list-wise AdamW takes the square roots of all second moments at once"
        if row["device"] == "cuda"
        else "one weight after another is updated there"
    )
    times = number(extra / (row["weights_bytes"] / MIB))
    return (
        f"AdamW's moments are twice the weights, {size(row['state_bytes'] / MIB)}, and its update "
        f"takes {size(extra)} more in {row['precision']}, {times} times the weights, because {why}."
    )


def allocator_sentence(frame: pd.DataFrame) -> str | None:
    """What lies between the sum of sizes and what the card must have free."""
    rows = selected.steps(frame)
    rows = rows[rows["requested_peak_mib"].notna()]
    if rows.empty:
        return None
    apart = (rows["events_peak_mib"] - rows["requested_peak_mib"]).abs().max()
    rounding = (rows["peak_mib"] - rows["requested_peak_mib"]).max()
    reserve = (rows["reserved_peak_mib"] - rows["peak_mib"]).max()
    return (
        f"The history's sum and the allocator's own count of bytes asked for differ by "
        f"{size(apart)} at the peak; rounding to whole blocks adds at most {size(rounding)}, "
        f"libraries' workspaces and data {size(rows['peak_other_mib'].max())}, and up to "
        f"{size(reserve)} more lie in reserve, which is what other programs see as taken."
    )


# --- checkpointing -------------------------------------------------------------------------------


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
        f"if a block kept no more than its input; it keeps {number(ratio)} times that, which makes "
        f"it {number(least, 2)}."
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
    """What checkpointing every block costs in time and saves in memory."""
    text = _price(frame)
    return text and _sentence(
        [text, f"a backward being two forwards, one more forward would be {number(4 / 3)}"]
    )


def _price(frame: pd.DataFrame) -> str | None:
    rows = _plans(frame, fits=True)
    single, whole = _kind(rows, "segments"), _kind(rows, "none")
    single = single[single["blocks"] == 1]
    if single.empty or whole.empty:
        return None
    row, none = single.iloc[0], whole.iloc[0]
    return (
        f"a checkpoint at every block of {row['model']} at context {row['context_length']:g} in "
        f"{row['precision']} takes the peak over weights and gradients from "
        f"{size(none['peak_mib'])} to {size(row['peak_mib'])} and the time of forward and backward "
        f"to {quantity(row['ratio'], '×')} ({number(row['ratio_low'])} to "
        f"{number(row['ratio_high'])})"
    )


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
    return (
        f"Nested checkpoints, least with segments of {_blocks(deep['blocks'])}, take {gain} at "
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
        f"{best['model']} at context {best['context_length']:g} holds at the least."
    )
