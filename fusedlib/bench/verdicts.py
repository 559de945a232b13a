"""What a table of published times or ratios says against itself: `fusedlib.bench.verdict`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from numbers import Real
from typing import TYPE_CHECKING, Any

from fusedlib.bench.attempt import extra

if TYPE_CHECKING:
    import pandas as pd

COUNTS = {"3/2": 1.5, "2": 2.0, "3": 3.0, "4": 4.0}  # six matrices to four, three products to one
NUMBERS = ["time_ms", "std_ms", "ratio", "flops", "bytes"]
LEAST_ROWS, LAST_DIGIT, SAME_MULTIPLE, PLATEAU, NEAR = 4, 2e-5, 1e-3, 0.02, 0.03


@dataclass(frozen=True)
class Card:
    """Peaks of a card: FLOP/s by dtype, bytes/s of its memory, bytes that its L2 cache holds."""

    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    l2_bytes: float = 0.0


CARDS = {
    name: Card(dict(zip(("float32", "tf32", "float16", "bfloat16"), rates, strict=True)), *memory)
    for name, rates, memory in (
        ("L4", (30.3e12, 60e12, 121e12, 121e12), (300e9, 48e6)),
        ("A100", (19.5e12, 156e12, 312e12, 312e12), (2039e9, 40e6)),
        ("H100", (67e12, 494.7e12, 989.4e12, 989.4e12), (3350e9, 50e6)),
        ("H200", (67e12, 494.7e12, 989.4e12, 989.4e12), (4800e9, 50e6)),
    )
}  # by NVIDIA's data sheets: the largest variant, dense products


def verdict(
    table: pd.DataFrame | Iterable[Mapping[str, Any]], card: str | Card | None = None
) -> pd.DataFrame:
    """List what cannot be, or was not measured, in a table; `factor` is how far over a bound.

        bench.verdict(published.assign(flops=6 * tokens * width**2, dtype="float32"), "L4")

    Found are, as `kind`: "impossible", more FLOP/s or bytes/s than the card has; "precision", more
    than its float32 units have; "no spread"; "negative", a time below zero; "difference", times
    that are others less a third; "repeat", times that are others times a constant; "counts", a
    ratio that tends to one of work as sizes grow: something may be left out.

    Args:
        table: a row a time or ratio. Columns by name: `time_ms` or `ratio`, `std_ms` (the spread),
            `flops` and `bytes` that a row's work needs, `dtype`. Texts, booleans and whole numbers
            in other columns say which row it is.
        card: a name in `CARDS`, or peaks. Without, no rate is looked at.

    Raises:
        ValueError: no time and no ratio, an unknown card or dtype, or a card and no work; or a
            number that is none: text, NaN, infinite, or, but for a time, not above zero.
    """
    pd = extra("pandas")
    frame = pd.DataFrame(table).reset_index(drop=True)
    there = f"it has {', '.join(map(str, frame)) or 'none'}"
    if not {"time_ms", "ratio"} & {*frame}:
        raise ValueError(f"a table needs a column time_ms or ratio, {there}: rename one of them")
    if card is not None and not ({"flops", "bytes"} & {*frame} and "time_ms" in frame):
        raise ValueError(f"a rate needs time_ms, and flops or bytes of each row's work; {there}")
    texts = frame.drop(columns=NUMBERS, errors="ignore").select_dtypes(exclude=["float", "Float64"])
    labels = [name for name in texts if texts[name].nunique(dropna=False) > 1]
    for name in (name for name in NUMBERS if name in frame):
        _require_numbers(frame, name, labels)
    sizes = [name for name in labels if pd.api.types.is_integer_dtype(frame[name])]
    findings = [*_rates(frame, labels, card)] if card is not None else []
    findings += _spreads(frame, labels) if "time_ms" in frame else ()
    for label in [n for n in labels if n not in sizes] if "time_ms" in frame else ():
        findings += _alike(frame, labels, label)
    for size in sizes if "ratio" in frame else ():
        findings += _counts(frame, [name for name in labels if name != size], size)
    return pd.DataFrame(findings, columns=["kind", "where", "finding", "factor"])


def _require_numbers(frame: pd.DataFrame, name: str, labels: Sequence[str]) -> None:
    """Raise ValueError at a row that nothing can be said of; a time below zero is a finding."""
    for at, value in enumerate(frame[name]):
        finite = isinstance(value, Real) and math.isfinite(value)
        if not finite or (value <= 0 and name != "time_ms" and (value, name) != (0, "std_ms")):
            allowed = {"time_ms": "", "std_ms": " of at least 0"}.get(name, " above 0")
            raise ValueError(
                f"row {at} ({_where(frame.iloc[at], labels)}) has the {name} {value!r}, not a "
                f"finite number{allowed}: correct it, or leave the row out"
            )


def _where(row: Mapping[Any, Any], labels: Sequence[str]) -> str:
    return ", ".join(f"{name} {row[name]}" for name in labels) or "all rows"


def _rates(frame: pd.DataFrame, labels: list[str], card: str | Card) -> Iterator[tuple[Any, ...]]:
    if isinstance(card, str) and card not in CARDS:
        raise ValueError(f"unknown card {card!r}; known: {', '.join(CARDS)}; or give a Card(...)")
    peaks = CARDS[card] if isinstance(card, str) else card
    dtypes = [*frame["dtype"].unique()] if "dtype" in frame else ["no dtype"]
    if "flops" in frame and not {*dtypes} <= {*peaks.flops_per_s}:
        known, got = (", ".join(map(str, names)) for names in (peaks.flops_per_s, dtypes))
        raise ValueError(f"the column dtype decides the peak, one of {known}; got {got}")
    for row in frame[frame["time_ms"] > 0].to_dict("records"):
        seconds, where = row["time_ms"] / 1e3, _where(row, labels)
        moved, flops = row.get("bytes", 0.0), row.get("flops", 0.0) / seconds
        if moved - peaks.l2_bytes > peaks.bytes_per_s * seconds:
            factor = moved / seconds / peaks.bytes_per_s
            text = f"{moved / seconds / 1e9:.3g} GB/s are {factor:.3g} times the memory's peak"
            yield "impossible", where, text, factor
        own = peaks.flops_per_s[row["dtype"]] if flops else 0.0
        most = peaks.flops_per_s.get("tf32", own) if row.get("dtype") == "float32" else own
        if flops > own:
            kind, bound = ("precision", own) if flops <= most else ("impossible", most)
            name = row["dtype"] if bound == own else "tf32"
            text = f"{flops / 1e12:.3g} TFLOP/s are {flops / bound:.3g} times the peak in {name}"
            yield kind, where, text, flops / bound


def _spreads(frame: pd.DataFrame, labels: list[str]) -> Iterator[tuple[Any, ...]]:
    if "std_ms" not in frame:
        text = f"{len(frame)} times have no spread (std_ms): nobody can tell how much is chance"
        yield "no spread", "all rows", text, None
    for row in frame[frame["time_ms"] <= 0].to_dict("records"):
        yield "negative", _where(row, labels), f"{row['time_ms']:.4g} ms cannot be measured", None


def _alike(frame: pd.DataFrame, labels: list[str], label: str) -> Iterator[tuple[Any, ...]]:
    """Times side by side, a column each value of a label: repeats and differences."""
    import numpy as np

    by = frame.groupby(label, dropna=False)
    free = [n for n in labels if n != label and (by[n].nunique(dropna=False) > 1).any()]
    texts = frame[[*free, label]].astype(object).fillna("").astype(str)
    texts = texts.assign(time=frame["time_ms"], std=frame.get("std_ms", np.nan), all="")
    each = texts.groupby(["all", *free, label], sort=False)[["time", "std"]].mean()
    wide, spread = (each[value].unstack(label)[texts[label].unique()] for value in each)
    times, stds, names = wide.replace(0.0, np.nan).to_numpy(), spread.to_numpy(), [*wide]
    for one, other in combinations(range(len(names)), 2):
        multiples = (times[:, other] / times[:, one])[~np.isnan(times[:, one] + times[:, other])]
        same = len(multiples) and np.ptp(multiples) <= SAME_MULTIPLE * abs(multiples).max()
        if same and wide[names[one]].nunique() >= LEAST_ROWS <= len(multiples):
            what = "digit for digit" if (multiples == 1).all() else f"times {multiples[0]:.4g}"
            text = f"{names[other]} is {names[one]} {what} in {len(multiples)} rows"
            yield "repeat", f"{label} {names[other]}", text, float(multiples[0])
    for whole, part in permutations(range(len(names)), 2):
        off = abs((times[:, whole] - times[:, part])[:, None] - times)
        added = np.hypot(stds[:, whole], stds[:, part])[:, None]
        apart = (off > LAST_DIGIT * abs(times[:, [whole]])) | (abs(added - stds) > 1e-3 * added)
        found = {*np.flatnonzero(((~np.isnan(off)).sum(0) >= LEAST_ROWS) & ~apart.any(0))}
        for derived in sorted(found - {whole, part}):
            if "std_ms" in frame or names[derived] < names[part]:  # else by the same sum
                rest = f"{names[whole]} less {names[part]} in {(~np.isnan(off[:, derived])).sum()}"
                whose = "it" if "std_ms" in frame else "one of the two"
                text = f"{names[derived]} is {rest} rows: {whose} was not measured"
                yield "difference", f"{label} {names[derived]}", text, None


def _counts(frame: pd.DataFrame, free: list[str], size: str) -> Iterator[tuple[Any, ...]]:
    known = frame.dropna(subset=[size]).assign(all="")
    for _, group in known.groupby(["all", *free], dropna=False):
        ratios = group.sort_values(size)["ratio"].to_numpy()
        if len(ratios) < LEAST_ROWS or group[size].duplicated().any():
            continue
        first, before, last = (ratios if ratios[-1] > 1 else 1 / ratios)[[0, -2, -1]]
        for name, count in COUNTS.items():
            near = abs((last + before) / 2 - count) <= NEAR * count
            if near and abs(last - before) <= PLATEAU * last and abs(first - count) > NEAR * count:
                text = f"tends to {name} as {size} grows: a ratio of work that is left out?"
                yield "counts", _where(group.iloc[0], free), text, count
