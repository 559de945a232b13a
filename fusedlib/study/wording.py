"""Lists and spans in words."""

from collections.abc import Iterable

import pandas as pd

from fusedlib.study.display import number, percent


def listed(parts: Iterable[str]) -> str:
    """One, another and a last; an empty text for none."""
    *before, last = list(parts) or [""]
    return f"{', '.join(before)} and {last}" if before else last


def span(values: "pd.Series[float]") -> str:
    """The least and greatest of some ratios, or the one there is."""
    return between(number(values.min(), 3), number(values.max(), 3))


def percents(values: Iterable[float]) -> str:
    """The least and greatest of some shares of one, in per cent."""
    known = list(values)
    return between(percent(min(known)), percent(max(known)))


def between(low: str, high: str) -> str:
    """Two ends, once where both read the same."""
    return low if low == high else f"{low} to {high}"
