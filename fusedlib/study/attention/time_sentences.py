"""Study 07's sentences about time, every number from rows or counts."""

import pandas as pd

from fusedlib.bench.attention import held
from fusedlib.bench.attention.cases import problem_of
from fusedlib.bench.attention.problem import SQUARE_PASSES
from fusedlib.bench.attention.ways import WAYS
from fusedlib.study.attention.selected import (
    INDUCTOR,
    MIB,
    PLAIN,
    at,
    at_width,
    by_format,
    fused_first,
    longest,
    roof,
    rows,
    shape,
    work,
)
from fusedlib.study.display import number, percent


def time_sentence(frame: pd.DataFrame) -> str | None:
    """Plain attention's time over that of each other way at the longest context."""
    told = []
    for part in by_format(longest(frame)):
        others = part[(part["provider"] != PLAIN) & part["speedup"].notna()]
        if others.empty or not (part["provider"] == PLAIN).any():
            continue
        said = [
            f"{r.provider} {number(r.speedup, 3)} ({number(r.speedup_low, 3)}–"
            f"{number(r.speedup_high, 3)})"
            for r in others.sort_values("speedup", ascending=False).itertuples()
        ]
        told.append(f"at {at(others.iloc[0])}: {', '.join(said)}")
    if not told:
        return None
    return f"Plain attention's time over another's, forward and backward, {'; '.join(told)}."


def grows_sentence(frame: pd.DataFrame) -> str | None:
    """By what factor time and kept bytes grow when the context doubles, at its longest."""
    told = []
    for part in by_format(at_width(frame)):
        best = fused_first(longest(part))
        for name in (PLAIN, *best["provider"].head(1)):
            line = part[part["provider"] == name].set_index("context_length").sort_index()
            pairs = [n for n in line.index if 2 * n in line.index]
            if not pairs:
                continue
            half, whole = line.loc[pairs[-1]], line.loc[2 * pairs[-1]]
            told.append(
                f"{name} in {half['format']} {number(whole['median_ms'] / half['median_ms'], 3)} "
                f"and {number(whole['kept_mib'] / half['kept_mib'], 3)} (from {pairs[-1]:,} to "
                f"{2 * pairs[-1]:,})"
            )
    if not told:
        return None
    return f"When the context doubles, time and kept bytes grow by factors: {'; '.join(told)}."


def crossing_sentence(frame: pd.DataFrame) -> str | None:
    """From which context on the best fused way is faster, and from which it keeps less."""
    found = at_width(frame)
    told = []
    for part in by_format(found):
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

    The larger of that and the products' share at their rate is the bound.
    """
    told = []
    for part in by_format(longest(frame)):
        plain, ceiling = part[part["provider"] == PLAIN], roof(frame, part["format"].iloc[0])
        if plain.empty or ceiling is None:
            continue
        row = plain.iloc[0]
        seconds = row["median_ms"] / 1e3
        products, traffic = (n / most / seconds for n, most in zip(work(row), ceiling, strict=True))
        text = (
            f"in {row['format']} at {shape(row)} its {sum(SQUARE_PASSES.values())} reads and "
            f"writes of B T² elements would take {percent(traffic)} at the bandwidth of a copy, "
            f"its products {percent(products)} at the rate of a plain product"
        )
        told.append(f"{text}: {'memory' if traffic > products else 'arithmetic'} is its roof")
    return f"Of plain attention's time, {'; '.join(told)}." if told else None


def rate_sentence(frame: pd.DataFrame) -> str | None:
    """FLOP/s of the products, plain and the fastest fused, and the share of the product's rate."""
    told = []
    for part in by_format(longest(frame)):
        ceiling = roof(frame, part["format"].iloc[0])
        chosen = [part[part["provider"] == PLAIN], fused_first(part).head(1)]
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
    for part in by_format(found):
        part = part[part["context_length"] == part["context_length"].max()]
        whole = longest(frame)
        best = fused_first(whole[whole["format"] == part["format"].iloc[0]])
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
    for part in by_format(found):
        most, least = (part.loc[part["speedup"].agg(f)] for f in ("idxmax", "idxmin"))
        last = part[part["context_length"] == part["context_length"].max()].iloc[-1]
        squares = problem_of(last).square * problem_of(last).itemsize / MIB
        told.append(
            f"{part['format'].iloc[0]} {_gain(least)} to {_gain(most)} times as fast; at "
            f"{shape(last)} it keeps {number(last['kept_mib'] / squares, 3)} B T² elements and "
            f"holds {number(last['peak_mib'] / squares, 3)} B T² at its peak"
        )
    return f"Compiled by Inductor, plain attention is in {'; in '.join(told)}."


def _gain(row: pd.Series) -> str:
    return (
        f"{number(row['speedup'], 3)} ({number(row['speedup_low'], 3)}–"
        f"{number(row['speedup_high'], 3)}, at {shape(row)})"
    )


def ratio_sentence(frame: pd.DataFrame) -> str | None:
    """Backward time over forward time beside the same ratio of FLOPs."""
    told = []
    for part in by_format(longest(frame)):
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
