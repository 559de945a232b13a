"""Study 07's sentences about memory, every number from rows or counts."""

import pandas as pd

from fusedlib.bench.attention import held
from fusedlib.bench.attention.cases import problem_of
from fusedlib.study.attention.selected import (
    MIB,
    PLAIN,
    at,
    at_width,
    brief,
    by_format,
    rows,
    shape,
    where,
)
from fusedlib.study.display import percent, quantity

CLOSE = 0.03
# What is smaller than this is a matter of the allocator's blocks, not of a formula.
LEAST_MIB = 1.0
_OOM = "CUDA out of memory. "
# Of all that is held: less of it does not show.
LITTLE = 0.25


def mib(value: float) -> str:
    """A quantity in MiB."""
    return quantity(value, "MiB", 3)


def capacity_sentence(frame: pd.DataFrame, card_mib: float | None) -> str | None:
    """The context at which plain attention alone fills the memory there is, by the formula."""
    found = at_width(frame)
    if card_mib is None or found.empty:
        return None
    told = []
    for part in by_format(found):
        p = problem_of(part.iloc[0])
        fits = held.longest(
            card_mib * MIB, p.head_dim, p.batch_size, p.dtype, part["device"].iloc[0]
        )
        told.append(f"{fits:,} in {part['format'].iloc[0]}")
    return (
        f"By the formula one plain attention of batch {found['batch_size'].iloc[0]} with one head "
        f"fills the {quantity(card_mib / 1024, 'GiB', 3)} of {where(frame)} at a context of "
        f"{' and '.join(told)}."
    )


def agreement_sentence(frame: pd.DataFrame) -> str | None:
    """How far counted and measured bytes are apart: kept by every way, and plain's peak."""
    found = rows(frame)
    parts = []
    for title, column, counted in (
        ("what is kept", "kept_mib", "counted_kept_mib"),
        ("plain attention's peak", "peak_mib", "counted_peak_mib"),
    ):
        known = found[found[counted].notna() & found[column].notna() & (found[column] > LEAST_MIB)]
        if known.empty:
            continue
        off = (known[column] / known[counted] - 1).abs()
        most = off[off <= CLOSE].max()
        apart = f"at most {percent(most)} apart" if most else "to the byte"
        text = f"{title}, in {int((off <= CLOSE).sum())} of {len(known)} cases ({apart})"
        worst = known.loc[off.idxmax()]
        if off.max() > CLOSE:
            text += (
                f", furthest off {worst['provider']} at {at(worst)}: {mib(worst[column])} for "
                f"{mib(worst[counted])} counted"
            )
        parts.append(text)
    if not parts:
        return None
    return (
        f"Counted and measured bytes, where they are more than {mib(LEAST_MIB)}, agree within "
        f"{percent(CLOSE)} on {where(frame)}: {'; '.join(parts)}."
    )


def oom_sentence(frame: pd.DataFrame) -> str | None:
    """What ran out of memory, what was asked for, and what still ran at that context."""
    found = at_width(frame, None)
    gone = found[found["status"].isin(["oom", "oom (predicted)"])]
    told: list[str] = []
    for context, part in gone.groupby("context_length"):
        ran = found[(found["context_length"] == context) & (found["status"] == "ok")]
        said = [
            f"{r.provider} in {r.format} ({brief(r.reason).removeprefix(_OOM)})"
            for r in part.itertuples()
        ]
        alive = ", ".join(
            f"{r.provider} in {r.format} ({mib(r.peak_mib)})" for r in ran.itertuples()
        )
        text = f"{'at' if not told else 'At'} context {context:,} {', '.join(said)}"
        told.append(f"{text}; what ran there, with its peak: {alive}" if alive else text)
    return f"Out of memory on {where(frame)}: {'. '.join(told)}." if told else None


def grid_sentence(frame: pd.DataFrame) -> str | None:
    """How little of what is held the T² terms are in the published script's grid."""
    found = rows(frame, "published")
    found = found[found["provider"] == PLAIN]
    if found.empty:
        return None
    share = found["counted_kept_mib"] / (found["operands_mib"] + found["peak_mib"])
    least, most = found.loc[share.idxmin()], found.loc[share.idxmax()]
    text = (
        f"In the grid of the published script the T² terms kept are between "
        f"{percent(share.min())} (at {shape(least)}) and {percent(share.max())} (at "
        f"{shape(most)}) of all that is held"
    )
    return f"{text}: it cannot show what the matrix costs." if share.max() < LITTLE else f"{text}."
