"""The few selections that every study shares; everything else is pandas in the notebook's cells.

Rows come from `Recorder.rows()`: one line a case and recording. A ratio is taken inside a session,
where both sides ran in turns; a figure is of the newest recording, with the range over all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from measure.study import SentenceError


class NoRowsError(SentenceError):
    """Rows that were asked for are not there: nothing was measured that could answer."""


def leading(rows: pd.DataFrame) -> str:
    """The machine that figures and tables of a study show, whichever of its rows are selected."""
    return str(rows["machine"].cat.categories[0])


def ratios(
    rows: pd.DataFrame, baseline: str, by: Sequence[str] = ("session",),
    value: str = "median_ms",
) -> pd.DataFrame:  # fmt: skip
    """How many times the baseline's value is each row's, as column `ratio`; above 1 is less.

    Args:
        rows: of one or more recordings; both sides of a ratio are from the same one.
        baseline: whose value is divided, by the name of its provider.
        by: what both sides share. Rows of one session were timed in turns.
        value: column that is compared. Of times the samples are pairs where both sides ran in
            turns, and the ratio is the median over the pairs.

    Returns:
        The rows but the baseline's, those without a partner left out.
    """
    keys = ["machine", "recording", *by]
    samples = value.replace("median_ms", "samples_ms")
    measured = rows[rows[value].notna()] if value in rows else rows.iloc[:0]
    names = (value, samples, "in_turns")
    lines = zip(*(_column(measured, name) for name in names), strict=True)
    figures = [dict(zip(names, line, strict=True)) for line in lines]
    sessions = list(zip(*(_column(measured, key) for key in keys), strict=True))
    is_base = [provider == baseline for provider in _column(measured, "provider")]
    partners: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for session, line, base in zip(sessions, figures, is_base, strict=True):
        if base:
            partners.setdefault(session, line)
    sides = [
        None if base else partners.get(session)
        for session, base in zip(sessions, is_base, strict=True)
    ]
    paired = [partner is not None for partner in sides]
    found = [
        _ratio(partner, line, value, samples)
        for partner, line in zip(sides, figures, strict=True) if partner is not None
    ]  # fmt: skip
    both = pd.DataFrame(measured[np.array(paired, dtype=bool)]).reset_index(drop=True)
    both.attrs = {}
    for name in both.select_dtypes("category"):  # they name the baseline, too
        both[name] = both[name].astype(object)
    ratio = pd.Series(found, name="ratio", dtype=float)
    return pd.concat([both.infer_objects(), ratio], axis=1)


def _column(rows: pd.DataFrame, name: str) -> list[Any]:
    """A column's values; None for one that is missing, which equals itself."""
    if name not in rows:
        return [None] * len(rows)
    return rows[name].astype(object).where(rows[name].notna(), None).tolist()


def _ratio(
    partner: Mapping[str, Any], row: Mapping[str, Any], value: str, samples: str
) -> float:  # fmt: skip
    ours, theirs = row[samples], partner[samples]
    lists = isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs)
    if lists and row["in_turns"] is not False:
        return float(np.median(np.asarray(theirs) / np.asarray(ours)))
    return float(partner[value] / row[value])


def over_recordings(rows: pd.DataFrame, by: Sequence[str], value: str) -> pd.DataFrame:
    """A line a group: `value` of the newest recording, `low` and `high` their range, `n`."""
    rows = rows.sort_values("measured_at", kind="stable") if "measured_at" in rows else rows
    each = rows.groupby([*by, "recording"], observed=True, sort=False, dropna=False)[value].median()
    groups = each.groupby(list(by), observed=True, sort=False, dropna=False)
    table = groups.agg(value="last", low="min", high="max", n="count").reset_index()
    return table[table["value"].notna()]


def energy(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows measured under load, with `token_mj`, mJ a token, and `roof_mj` beside it.

    The roof is what the row's FLOPs would take at the joules a FLOP of a plain product of its dtype
    under load, in the same recording: `measure.racing.sustained`'s "product" among `rows`.
    """
    columns = ["dtype", "joules", "flops", "tokens", "median_ms", "power_w", "sm_mhz"]
    measured = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *columns])))
    measured = measured[measured["joules"].notna()].astype({"joules": float, "flops": float})
    keys = ["machine", "recording", "dtype"]
    plain = measured[measured["experiment"] == "product"]
    of_flop = plain["joules"].div(plain["flops"]).groupby([plain[k] for k in keys], observed=True)
    loaded = measured[measured["experiment"] == "sustained"].copy()
    roof = loaded.join(of_flop.median().rename("of_flop"), on=keys)["of_flop"] * loaded["flops"]
    return loaded.assign(
        token_mj=1e3 * loaded["joules"] / loaded["tokens"], roof_mj=1e3 * roof / loaded["tokens"]
    )


def unmeasured(rows: pd.DataFrame, column: str = "provider") -> pd.DataFrame:
    """Why cases have no figure: status and reason with who and how many, the commonest first."""
    rest = rows[rows["status"] != "ok"]
    brief = rest.assign(reason=rest["reason"].fillna("").map(_brief))
    counts = brief.groupby(["status", "reason"], sort=False).agg(
        who=(column, lambda names: ", ".join(dict.fromkeys(map(str, names)))),
        cases=("case", "nunique"),
    )
    return counts.sort_values("cases", ascending=False).reset_index()


def _brief(reason: str) -> str:
    """A reason's first sentences, without what torch says of its allocator's settings."""
    text = " ".join(str(reason).split())
    for end in (" Tried to allocate", " GPU 0 has", " This is likely due", " If reserved"):
        text = text.partition(end)[0]
    return text.rstrip(".")
