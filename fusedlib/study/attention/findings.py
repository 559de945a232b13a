"""Study 07 in sentences: findings and the abstract's part, every number from rows or counts."""

import pandas as pd

from fusedlib.bench.attention import held
from fusedlib.bench.attention.cases import problem_of
from fusedlib.bench.attention.problem import SQUARE_PASSES
from fusedlib.bench.attention.ways import WAYS
from fusedlib.study import published
from fusedlib.study.attention.selected import (
    INDUCTOR,
    MIB,
    PLAIN,
    at_width,
    brief,
    roof,
    rows,
    where,
    work,
)
from fusedlib.study.attention.tables import longest
from fusedlib.study.display import number, percent, quantity

MISSING = "There is no finding yet: no row has been recorded. `make study ONLY=07_attention` does."
CLOSE = 0.03
# What is smaller than this is a matter of the allocator's blocks, not of a formula.
LEAST_MIB = 1.0


def answer(frame: pd.DataFrame, card_mib: float | None) -> str:
    """The study's question answered: what the T × T matrix costs, and what does without it."""
    found = [kept_sentence(frame), time_sentence(frame), capacity_sentence(frame, card_mib)]
    return " ".join(s for s in found if s) or MISSING


def findings(frame: pd.DataFrame) -> list[str]:
    """What the rows say besides the `answer`, one sentence or two each."""
    sentences = [
        agreement_sentence, grows_sentence, crossing_sentence, bound_sentence, rate_sentence,
        width_sentence, compiled_sentence, ratio_sentence, oom_sentence, check_sentence,
        grid_sentence,
    ]  # fmt: skip
    found = [s for sentence in sentences if (s := sentence(frame))]
    return [*(found or [MISSING]), published_sentence()]


def headline(frame: pd.DataFrame) -> list[str]:
    """The abstract's sentences about this study."""
    found = [kept_sentence(frame), time_sentence(frame), bound_sentence(frame)]
    return [s for s in found if s] or [MISSING]


def _at(row: pd.Series) -> str:
    return (
        f"context {row['context_length']:,}, width {row['head_dim']}, batch {row['batch_size']} in "
        f"{row['format']}"
    )


def _by_format(found: pd.DataFrame) -> list[pd.DataFrame]:
    return [part for _, part in found.groupby("format", sort=False)]


def _fused(part: pd.DataFrame) -> pd.DataFrame:
    """Rows of the ways that keep no T × T matrix, the fastest first."""
    fused = part["provider"].isin([name for name, way in WAYS.items() if way.fused])
    return part[fused].sort_values("median_ms")


def kept_sentence(frame: pd.DataFrame) -> str | None:
    """What plain attention keeps and holds at the longest context, and the best of the others."""
    told = []
    for part in _by_format(longest(frame)):
        plain, fused = part[part["provider"] == PLAIN], _fused(part)
        if plain.empty or fused.empty:
            continue
        row, best = plain.iloc[0], fused.iloc[0]
        told.append(
            f"at {_at(row)} plain attention keeps {_mib(row['kept_mib'])} for its backward pass "
            f"and holds {_mib(row['peak_mib'])} at its peak, {best['provider']} "
            f"{_mib(best['kept_mib'])} and {_mib(best['peak_mib'])}"
        )
    return f"On {where(frame)}, {'; '.join(told)}." if told else None


def _mib(value: float) -> str:
    return quantity(value, "MiB", 3)


def time_sentence(frame: pd.DataFrame) -> str | None:
    """Plain attention's time over that of each other way at the longest context."""
    told = []
    for part in _by_format(longest(frame)):
        others = part[(part["provider"] != PLAIN) & part["speedup"].notna()]
        if others.empty or not (part["provider"] == PLAIN).any():
            continue
        said = [
            f"{r.provider} {number(r.speedup, 3)} ({number(r.speedup_low, 3)}–"
            f"{number(r.speedup_high, 3)})"
            for r in others.sort_values("speedup", ascending=False).itertuples()
        ]
        told.append(f"at {_at(others.iloc[0])}: {', '.join(said)}")
    if not told:
        return None
    return f"Plain attention's time over another's, forward and backward, {'; '.join(told)}."


def capacity_sentence(frame: pd.DataFrame, card_mib: float | None) -> str | None:
    """The context at which plain attention alone fills the memory there is, by the formula."""
    found = at_width(frame)
    if card_mib is None or found.empty:
        return None
    told = []
    for part in _by_format(found):
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
        text = (
            f"{title}, in {int((off <= CLOSE).sum())} of {len(known)} cases (at most "
            f"{percent(off[off <= CLOSE].max())} apart)"
        )
        worst = known.loc[off.idxmax()]
        if off.max() > CLOSE:
            text += (
                f", furthest off {worst['provider']} at {_at(worst)}: {_mib(worst[column])} for "
                f"{_mib(worst[counted])} counted"
            )
        parts.append(text)
    if not parts:
        return None
    return (
        f"On {where(frame)} counted and measured bytes agree within {percent(CLOSE)}: "
        f"{'; '.join(parts)}."
    )


def grows_sentence(frame: pd.DataFrame) -> str | None:
    """By what factor time and kept bytes grow when the context doubles, at its longest."""
    told = []
    for part in _by_format(at_width(frame)):
        best = _fused(longest(part))
        for name in (PLAIN, *best["provider"].head(1)):
            line = part[part["provider"] == name].set_index("context_length").sort_index()
            pairs = [n for n in line.index if 2 * n in line.index]
            if not pairs:
                continue
            half, whole = line.loc[pairs[-1]], line.loc[2 * pairs[-1]]
            told.append(
                f"{name} in {half['format']} from {pairs[-1]:,} to {2 * pairs[-1]:,} "
                f"{number(whole['median_ms'] / half['median_ms'], 3)} and "
                f"{number(whole['kept_mib'] / half['kept_mib'], 3)}"
            )
    if not told:
        return None
    return f"When the context doubles, time and kept bytes grow by factors: {'; '.join(told)}."


def crossing_sentence(frame: pd.DataFrame) -> str | None:
    """From which context on the best fused way is faster, and from which it keeps less."""
    found = at_width(frame)
    told = []
    for part in _by_format(found):
        wide = part.pivot_table(index="context_length", columns="provider", values="median_ms")
        fused = [name for name in wide.columns if WAYS[name].fused]
        if PLAIN not in wide or not fused:
            continue
        ahead = wide[fused].min(axis=1) < wide[PLAIN]
        ahead = ahead[wide[PLAIN].notna()]
        p = problem_of(part.iloc[0])
        told.append(
            f"{part['format'].iloc[0]}: faster at {int(ahead.sum())} of {len(ahead)} contexts"
            f"{_since(ahead)}, and by the formula fewer bytes kept from a context of "
            f"{number(held.crossing(p.head_dim, p.batch_size, p.dtype), 2)} on"
        )
    if not told:
        return None
    return (
        f"The fastest way without a T × T matrix against plain attention at width "
        f"{found['head_dim'].iloc[0]}, {'; '.join(told)}."
    )


def _since(ahead: pd.Series) -> str:
    behind = [n for n, won in ahead.items() if not won]
    if not behind:
        return ""
    return f" (not at {', '.join(f'{n:,}' for n in behind)})"


def bound_sentence(frame: pd.DataFrame) -> str | None:
    """How much of plain attention's time its T × T traffic takes at the copy's bandwidth.

    More than half of it, and more than the products: that is said to bound it.
    """
    told = []
    for part in _by_format(longest(frame)):
        plain, ceiling = part[part["provider"] == PLAIN], roof(frame, part["format"].iloc[0])
        if plain.empty or ceiling is None:
            continue
        row = plain.iloc[0]
        seconds = row["median_ms"] / 1e3
        products, traffic = (n / most / seconds for n, most in zip(work(row), ceiling, strict=True))
        text = (
            f"at {_at(row)}, its {sum(SQUARE_PASSES.values())} reads and writes of B T² elements "
            f"alone take {percent(traffic)} at the bandwidth of a copy, its products "
            f"{percent(products)} at the rate of a plain product"
        )
        told.append(f"{text}: memory bounds it" if traffic > max(products, 0.5) else text)
    return f"Of plain attention's time {'; '.join(told)}." if told else None


def rate_sentence(frame: pd.DataFrame) -> str | None:
    """FLOP/s of the products, plain and the fastest fused, and the share of the product's rate."""
    told = []
    for part in _by_format(longest(frame)):
        ceiling = roof(frame, part["format"].iloc[0])
        chosen = [part[part["provider"] == PLAIN], _fused(part).head(1)]
        for row in (r for rest in chosen for _, r in rest.iterrows()):
            rate = work(row)[0] / row["median_ms"] * 1e3
            share = f" ({percent(rate / ceiling[0])} of a plain product's)" if ceiling else ""
            told.append(
                f"{row['provider']} in {row['format']} {number(rate / 1e12, 3)} TFLOP/s{share}"
            )
    if not told:
        return None
    return f"Products executed a second at the longest context: {', '.join(told)}."


def width_sentence(frame: pd.DataFrame) -> str | None:
    """How time grows from the narrowest to the widest head at the longest context."""
    found = rows(frame, "course")
    told = []
    for part in _by_format(found):
        part = part[part["context_length"] == part["context_length"].max()]
        whole = longest(frame)
        best = _fused(whole[whole["format"] == part["format"].iloc[0]])
        for name in (PLAIN, *best["provider"].head(1)):
            line = part[part["provider"] == name].sort_values("head_dim")
            if line["head_dim"].nunique() < 2:
                continue
            first, last = line.iloc[0], line.iloc[-1]
            told.append(
                f"{name} in {first['format']} {number(last['median_ms'] / first['median_ms'], 3)}, "
                f"from {first['head_dim']} to {last['head_dim']}"
            )
    if not told:
        return None
    context = int(found["context_length"].max())
    return f"At context {context:,} a wider head takes so many times longer: {'; '.join(told)}."


def compiled_sentence(frame: pd.DataFrame) -> str | None:
    """What compiling plain attention gives over the course's grid, and what Inductor keeps."""
    found = rows(frame, "course")
    found = found[(found["provider"] == INDUCTOR) & found["speedup"].notna()]
    if found.empty:
        return None
    told = []
    for part in _by_format(found):
        most, least = (part.loc[part["speedup"].agg(f)] for f in ("idxmax", "idxmin"))
        last = part[part["context_length"] == part["context_length"].max()].iloc[-1]
        squares = problem_of(last).square * problem_of(last).itemsize / MIB
        told.append(
            f"{part['format'].iloc[0]} {number(least['speedup'], 3)} (at {_shape(least)}) to "
            f"{number(most['speedup'], 3)} (at {_shape(most)}) times as fast, keeping "
            f"{number(last['kept_mib'] / squares, 3)} times B T² elements at {_shape(last)}, "
            f"holding {number(last['peak_mib'] / squares, 3)} times as many at its peak"
        )
    return f"Compiled by Inductor, plain attention is in {'; '.join(told)}."


def _shape(row: pd.Series) -> str:
    return f"{row['context_length']:,}·{row['head_dim']}"


def ratio_sentence(frame: pd.DataFrame) -> str | None:
    """Backward time over forward time beside the same ratio of FLOPs."""
    told = []
    for part in _by_format(longest(frame)):
        said = []
        for _, row in part.iterrows():
            flops = work(row, "backward")[0] / work(row, "forward")[0]
            ratio = row["backward_median_ms"] / row["forward_median_ms"]
            said.append(f"{row['provider']} {number(ratio, 3)} ({number(flops, 2)})")
        told.append(f"{part['format'].iloc[0]}: {', '.join(said)}")
    if not told:
        return None
    return (
        "Backward time over forward time (FLOPs likewise) at the longest context, "
        f"{'; '.join(told)}."
    )


def oom_sentence(frame: pd.DataFrame) -> str | None:
    """What ran out of memory, what was asked for, and what still ran at that context."""
    found = at_width(frame, None)
    gone = found[found["status"] == "oom"]
    told = []
    for context, part in gone.groupby("context_length"):
        ran = found[(found["context_length"] == context) & (found["status"] == "ok")]
        said = [f"{r.provider} in {r.format} ({brief(r.reason)})" for r in part.itertuples()]
        alive = ", ".join(
            f"{r.provider} in {r.format} with {_mib(r.peak_mib)}" for r in ran.itertuples()
        )
        text = f"at context {context:,} {'; '.join(said)}"
        told.append(f"{text}; it ran {alive}" if alive else text)
    return f"Out of memory on {where(frame)}: {'. '.join(told)}." if told else None


def check_sentence(frame: pd.DataFrame) -> str | None:
    """How many cases were held against float64, and who missed it."""
    found = rows(frame, None, None)
    found = found[found["status"].isin(["ok", "wrong"])]
    if found.empty:
        return None
    wrong = found[found["status"] == "wrong"]
    said = [f"{r.provider} in {r.format} at {r.context_length:,}·{r.head_dim}: {r.reason}"
            for r in wrong.itertuples()]  # fmt: skip
    text = (
        f"Output and all three gradients were held against float64 at full size in {len(found)} "
        f"cases; {len(found) - len(wrong)} passed"
    )
    return f"{text}; rejected: {'; '.join(said)}." if said else f"{text}."


def grid_sentence(frame: pd.DataFrame) -> str | None:
    """How little of what is held the T² terms are in the published script's grid."""
    found = rows(frame, "published")
    found = found[found["provider"] == PLAIN]
    if found.empty:
        return None
    share = found["counted_kept_mib"] / (found["operands_mib"] + found["peak_mib"])
    least, most = found.loc[share.idxmin()], found.loc[share.idxmax()]
    return (
        f"In the grid of the published script the T² terms kept are between "
        f"{percent(share.min())} (at {_shape(least)}) and {percent(share.max())} (at "
        f"{_shape(most)}) of all that is held: it cannot show what the matrix costs."
    )


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
