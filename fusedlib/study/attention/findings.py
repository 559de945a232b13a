"""Study 07 in sentences: findings and the abstract's part, every number from rows or counts."""

import pandas as pd

from fusedlib.study import published
from fusedlib.study.attention import memory_sentences as memory
from fusedlib.study.attention import time_sentences as times
from fusedlib.study.attention.selected import (
    PLAIN,
    at,
    by_format,
    fused_first,
    longest,
    rows,
    shape,
    where,
)
from fusedlib.study.display import number, quantity
from fusedlib.study.selection import no_finding

MISSING = no_finding("07_attention")


def answer(frame: pd.DataFrame, card_mib: float | None) -> str:
    """The study's question answered: what the T × T matrix costs, and what does without it."""
    found = [cost_sentence(frame), memory.capacity_sentence(frame, card_mib)]
    return " ".join(s for s in found if s) or MISSING


def findings(frame: pd.DataFrame) -> list[str]:
    """What the rows say besides the `answer`, one sentence or two each."""
    sentences = [
        times.time_sentence, times.grows_sentence, times.crossing_sentence, times.bound_sentence,
        times.rate_sentence, times.width_sentence, times.compiled_sentence, times.ratio_sentence,
        memory.agreement_sentence, memory.oom_sentence, check_sentence, memory.grid_sentence,
    ]  # fmt: skip
    found = [s for sentence in sentences if (s := sentence(frame))]
    return [*(found or [MISSING]), published_sentence()]


def headline(frame: pd.DataFrame) -> list[str]:
    """The abstract's sentences about this study, the first one short."""
    pairs = _pairs(frame)[:1]
    first = [
        f"Forward and backward at {at(plain)}, on {where(frame)}: plain attention holds "
        f"{memory.mib(plain['peak_mib'])} at its peak and takes "
        f"{quantity(plain['median_ms'], 'ms', 3)}; {best['provider']}, without a T × T matrix, "
        f"{memory.mib(best['peak_mib'])} and {quantity(best['median_ms'], 'ms', 3)}{_faster(best)}."
        for plain, best in pairs
    ]
    bound = times.bound_sentence(frame)
    return [*first, *([bound] if bound else [])] or [MISSING]


def cost_sentence(frame: pd.DataFrame) -> str | None:
    """Bytes and time of plain attention and of the fastest without the matrix, at the longest."""
    told = [
        f"at {at(plain)} plain attention {_held(plain)}; {best['provider']}, the fastest way "
        f"without a T × T matrix, {_held(best)}{_faster(best)}."
        for plain, best in _pairs(frame)
    ]
    return f"Forward and backward on {where(frame)}: {' '.join(told)}" if told else None


def _pairs(frame: pd.DataFrame) -> list[tuple[pd.Series, pd.Series]]:
    """A format each, at its longest context: plain attention and the fastest fused way."""
    pairs = []
    for part in by_format(longest(frame)):
        plain, fused = part[part["provider"] == PLAIN], fused_first(part)
        if len(plain) and len(fused):
            pairs.append((plain.iloc[0], fused.iloc[0]))
    return pairs


def _held(row: pd.Series) -> str:
    return (
        f"keeps {memory.mib(row['kept_mib'])} for its backward pass, holds "
        f"{memory.mib(row['peak_mib'])} at its peak and takes {quantity(row['median_ms'], 'ms', 3)}"
    )


def _faster(row: pd.Series) -> str:
    if pd.isna(row["speedup"]):
        return ""
    ends = f"{number(row['speedup_low'], 3)}–{number(row['speedup_high'], 3)}"
    return f", {number(row['speedup'], 3)} times as fast ({ends})"


def check_sentence(frame: pd.DataFrame) -> str | None:
    """How many cases were held against float64, and who missed it."""
    found = rows(frame, None, None)
    found = found[found["status"].isin(["ok", "wrong"])]
    if found.empty:
        return None
    wrong = found[found["status"] == "wrong"]
    said = [
        f"{name} in {kind} at {', '.join(shape(row) for _, row in part.iterrows())} (the first: "
        f"{part['reason'].iloc[0]})"
        for (name, kind), part in wrong.groupby(["provider", "format"], sort=False)
    ]
    text = (
        f"Output and all three gradients were held against float64 at full size in {len(found)} "
        f"cases; {len(found) - len(wrong)} passed"
    )
    return f"{text}; rejected: {'; '.join(said)}." if said else f"{text}."


def published_sentence() -> str:
    """What the published tables hold by themselves."""
    bytes_told, told = published.load("attention_memory"), published.load("attention")
    zero = int((bytes_told["value"] == 0).sum())
    keys = ["compile", "d_model", "direction"]
    odd = 0
    pairs = 0
    for _, part in told.groupby(keys):
        means = part.sort_values("context_length")["mean_ms"].to_numpy()
        pairs += len(means) - 1
        odd += int((means[1:] < means[:-1]).sum())
    device = ", ".join(sorted(set(told["device"])))
    return (
        f"Of the published memory figures ({device}) {zero} of {len(bytes_told)} are 0. Of the "
        f"{pairs} pairs of published times that differ in the context alone, {odd} have the longer "
        "context faster."
    )
