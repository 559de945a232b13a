"""Study 09 in sentences: findings and the abstract's part, every number from rows or formulas."""

from typing import Any

import pandas as pd

from fusedlib.bench.model_memory import cases
from fusedlib.bench.model_memory.program import MODES
from fusedlib.models import activations
from fusedlib.study.display import number, percent
from fusedlib.study.model_memory import plan_sentences as plans
from fusedlib.study.model_memory import selected, tables
from fusedlib.study.model_memory.selected import MIB, TITLES, of, size
from fusedlib.study.selection import no_finding, place

MISSING = no_finding("09_model_memory", "pass has been recorded")


def answer(frame: pd.DataFrame) -> str:
    """The study's question answered."""
    return _joined(frame, [step_sentence, counted_sentence, plans.spacing_sentence])


def headline(frame: pd.DataFrame) -> list[str]:
    """The abstract's sentences about this study."""
    return _said(frame, [cost_sentence, counted_sentence])


def findings(frame: pd.DataFrame) -> list[str]:
    """What the rows say besides the `answer`, a sentence or two each."""
    return _said(
        frame,
        [
            precision_sentence, gradients_sentence, attention_sentence, update_sentence,
            allocator_sentence, plans.price_sentence, plans.nested_sentence,
            plans.fitting_sentence, plans.casts_sentence, plans.inside_sentence,
        ],
    )  # fmt: skip


def _said(frame: pd.DataFrame, sentences: list[Any]) -> list[str]:
    return [s for sentence in sentences if (s := sentence(frame))] or [MISSING]


def _joined(frame: pd.DataFrame, sentences: list[Any]) -> str:
    return " ".join(_said(frame, sentences))


def cost_sentence(frame: pd.DataFrame) -> str | None:
    """A step's peak with its largest part, and what checkpoints at all blocks give and cost."""
    rows, parts = selected.steps(frame), []
    if len(rows):
        row = rows.iloc[0]
        name, most = _parts(row)[0]
        parts.append(
            f"a step of {row['model']} at context {row['context_length']:g}, batch "
            f"{row['batch_size']:g} in {row['precision']} peaks at {size(row['measured_mib'])} on "
            f"{place(row)}, {percent(most)} of it {name}"
        )
    if price := plans.briefly(frame):
        parts.append(price)
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else None


# --- a step --------------------------------------------------------------------------------------


def step_sentence(frame: pd.DataFrame) -> str | None:
    """What the peak of a full step is made of, in the widest precision that was run."""
    rows = selected.steps(frame)
    if rows.empty:
        return None
    row = rows.iloc[0]
    parts = [f"{name} {percent(share)}" for name, share in _parts(row)]
    return (
        f"A step of {of(row)} peaks at {size(row['measured_mib'])} {selected.section(row)} on "
        f"{place(row)}: {', '.join(parts)}."
    )


def _parts(row: Any) -> list[tuple[str, float]]:
    """Titles and shares of what the peak is made of, the largest first, but for what hardly is."""
    held = {TITLES[name]: row[f"peak_{name}_mib"] / row["events_peak_mib"] for name in TITLES}
    return [(n, v) for n, v in sorted(held.items(), key=lambda item: -item[1]) if v >= 0.005]


def counted_sentence(frame: pd.DataFrame) -> str | None:
    """How far formulas and measurement differ over all passes, kept and at the peak."""
    rows = selected.passes(frame)
    kept = rows[rows["mode"] == "forward"]
    if rows.empty or kept.empty:
        return None
    apart = [abs(kept_bytes(row) - counted_bytes(row)) for _, row in kept.iterrows()]
    asked = rows["requested_peak_mib"].fillna(rows["events_peak_mib"])
    peaks = [
        asked[at] * MIB / cases.counted_peak({**dict(row), "experiment": "pass"}) - 1
        for at, row in rows.iterrows()
    ]
    worst = max(range(len(peaks)), key=lambda at: abs(peaks[at]))
    row, most = rows.iloc[worst], max(range(len(apart)), key=lambda at: apart[at])
    differ = "agree to the byte"
    if apart[most]:
        whole = counted_bytes(kept.iloc[most]) / MIB
        differ = f"differ by at most {tables.signed(apart[most] / MIB)[1:]} of {size(whole)}"
    text = (
        f"What a forward keeps for backward is known before it runs: over {len(kept)} passes the "
        f"formula and autograd's own saved tensors {differ}."
    )
    if not peaks[worst]:
        return f"{text} So do the peaks of {len(peaks)} passes."
    return (
        f"{text} Peaks are within {percent(abs(peaks[worst]))} of what is counted in {len(peaks)} "
        f"passes, least so in {row['mode']} at context {row['context_length']:g} in "
        f"{row['precision']}: workspaces and what comes and goes inside a block are not counted."
    )


def kept_bytes(row: Any) -> float:
    """All that the hooks saw in one forward, casts of weights included."""
    names = [f"saved_{part.replace(' ', '_')}_bytes" for part in (*tables.PARTS, "casts")]
    return float(sum(row[n] for n in names if n in row and not pd.isna(row[n])))


def counted_bytes(row: Any) -> int:
    """All that one forward keeps by formula, casts of weights included."""
    return sum(tables.kept_by_part(row).values())


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
        f"Under `no_grad` no activation is kept. With gradients a forward of "
        f"{rows.iloc[0]['model']} at context {rows.iloc[0]['context_length']:g} peaks so many "
        f"times higher, weights included: {', '.join(said)}."
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
        f"{_whatever_the_context(frame, row)}"
    )


def _whatever_the_context(frame: pd.DataFrame, step: Any) -> str:
    """How little a step's peak changes with the context where each peak lies in the update."""
    rows = selected.passes(frame)
    same = ("mode", "precision", "attention")
    rows = rows[(rows[list(same)] == [step[name] for name in same]).all(axis=1)]
    parts = {selected.section(row) for _, row in rows.iterrows()}
    if len(rows) < 2 or parts != {selected.SECTIONS["step"]}:
        return ""
    least, most = size(rows["measured_mib"].min()), size(rows["measured_mib"].max())
    spread = least if least == most else f"{least} to {most}"
    return (
        f" A step's peak lies there at every context from {rows['context_length'].min():g} to "
        f"{rows['context_length'].max():g}: {spread}."
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
    agree = f"differ by {size(apart)}" if apart else "agree to the byte"
    return (
        f"At a step's peak the history's sum and the allocator's own count of bytes asked for "
        f"{agree}; rounding to whole blocks adds at most {size(rounding)}, workspaces of cuBLAS "
        f"and data make {size(rows['peak_other_mib'].max())} of the peak, and up to "
        f"{size(reserve)} more lie in reserve, which is what other programs see as taken."
    )
