"""Study 07 in sentences: findings and the abstract's part, every number from rows or counts."""

import pandas as pd

from fusedlib.study import published
from fusedlib.study.attention import memory_sentences as memory
from fusedlib.study.attention import time_sentences as times
from fusedlib.study.attention.selected import rows, shape
from fusedlib.study.selection import no_finding

MISSING = no_finding("07_attention")


def answer(frame: pd.DataFrame, card_mib: float | None) -> str:
    """The study's question answered: what the T × T matrix costs, and what does without it."""
    found = [
        memory.kept_sentence(frame), times.time_sentence(frame),
        memory.capacity_sentence(frame, card_mib),
    ]  # fmt: skip
    return " ".join(s for s in found if s) or MISSING


def findings(frame: pd.DataFrame) -> list[str]:
    """What the rows say besides the `answer`, one sentence or two each."""
    sentences = [
        memory.agreement_sentence, times.grows_sentence, times.crossing_sentence,
        times.bound_sentence, times.rate_sentence, times.width_sentence, times.compiled_sentence,
        times.ratio_sentence, memory.oom_sentence, check_sentence, memory.grid_sentence,
    ]  # fmt: skip
    found = [s for sentence in sentences if (s := sentence(frame))]
    return [*(found or [MISSING]), published_sentence()]


def headline(frame: pd.DataFrame) -> list[str]:
    """The abstract's sentences about this study."""
    sentences = [memory.kept_sentence, times.time_sentence, times.bound_sentence]
    return [s for sentence in sentences if (s := sentence(frame))] or [MISSING]


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
        f"Of the published memory figures ({device}) {zero} of {len(bytes_told)} are 0. Of its "
        f"{pairs} pairs of times that differ in the context alone, {odd} have the longer context "
        "faster."
    )
