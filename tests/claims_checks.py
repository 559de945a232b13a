"""A claim says of which machines it does not hold, and a changed row makes it fail.

A headline holds on the machine that leads, and a claim about published tables holds.

`tests/test_report_paper.py` applies it to the claims of the notebooks, which it executes.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from measure.recording import results
from press import claims as stating
from press import published
from press.analysis import leading
from press.claims import Claim

with results.replaying("committed"):
    RECORDED = {one.machine for one in results.recordings()}


def check_each_holds_or_says_where_not(claims: list[Claim]) -> None:
    for claim in claims:
        by_machine = {
            s.machine: s for s in claim.standings if s.machine in {*RECORDED, published.MACHINE}
        }
        for name, standing in by_machine.items():
            assert not standing.errors, f"{claim.name} on {name}: {standing.errors}"
            wrong = [e for e in standing.evaluations if e.holds is False]
            held_to = (leading(claim.selection),) if claim.headline else ()
            if wrong and name not in (*held_to, published.MACHINE):
                held = (
                    f"holds in {standing.held} of {standing.measured}"
                    if standing.held and standing.repeats == stating.MEASURED
                    else "does not hold"
                )
                assert held in standing.text and standing.text in claim.summary(), claim.name
            else:
                assert not wrong, f"{claim.name} on {name}: {wrong}"
        assert any(s.measured for s in by_machine.values()), f"{claim.name}: not measured anywhere"
        assert "—" not in claim.sentence(), f"{claim.name}: {claim.sentence()}"


def check_some_change_makes_each_false(claims: list[Claim]) -> None:
    for claim in claims:
        for standing in (s for s in claim.standings if s.measured):
            told = {evaluation.recording for evaluation in standing.answers}
            for recorded, part in stating.complete(claim.selection, standing.machine):
                if recorded not in told:
                    continue
                changed = (claim.evaluate(p, recorded).holds for p in perturbed(part))
                assert any(holds is False for holds in changed), f"{claim.name} cannot fail"


def perturbed(rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """For each value of each varying key: times, memory, energy, utilisation and the largest size
    that fits tenfold up or down, or out of memory.
    """
    ends = ("_ms", "_mib", "_error", "_gib", "_s", "_bytes", "largest", "joules", "mfu")
    figures = [c for c in rows if c.endswith(ends)]
    others = [
        c for c in rows
        if c not in figures and pd.api.types.is_numeric_dtype(rows[c]) and rows[c].notna().any()
    ]  # fmt: skip
    for name in keys_of(rows):
        for value in rows[name].dropna().unique():
            at = rows[name] == value
            for factor in (10.0, 0.1):
                yield scaled(rows, at, figures, factor)
            yield rows.assign(
                status=np.where(at, "oom", rows["status"]),
                **{c: [None if hit else v for v, hit in zip(rows[c], at, strict=True)]
                   for c in figures},
            )  # fmt: skip
    everywhere = pd.Series(True, index=rows.index)
    for factor in (10.0, 0.1):
        for column in (*figures, *others):
            yield scaled(rows, everywhere, [column], factor)


def keys_of(rows: pd.DataFrame) -> list[str]:
    """Columns that tell the cases of a selection apart."""
    return [
        c for c in rows
        if c not in ("case", "measured_at", "session", "reason", "settings", "version")
        and all(isinstance(v, str | int | bool | np.integer) for v in rows[c])
        and 2 <= rows[c].nunique() <= 40
    ]  # fmt: skip


def scaled(rows: pd.DataFrame, at: pd.Series, columns: list[str], factor: float) -> pd.DataFrame:
    def times(value):
        if isinstance(value, list):
            return [v * factor if isinstance(v, float | int) else v for v in value]
        return value * factor if isinstance(value, float | int) else value

    return rows.assign(
        **{c: [times(v) if hit else v for v, hit in zip(rows[c], at, strict=True)] for c in columns}
    )
