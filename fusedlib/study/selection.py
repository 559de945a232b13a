"""Which rows a table or figure takes, and what their place is called."""

import pandas as pd

_NOTHING = "There is no finding yet"


def rows_of(frame: pd.DataFrame, experiment: str, status: str | None = "ok") -> pd.DataFrame:
    """All rows of one experiment with this status, or with any when it is None."""
    if frame.empty or "experiment" not in frame:
        return frame.iloc[0:0]
    keep = frame["experiment"] == experiment
    if status is not None:
        keep &= frame["status"] == status
    return frame[keep]


def per_machine(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of every machine, each machine's from one profile: `full` where it has that."""
    if rows.empty:
        return rows
    best = rows.groupby("machine")["profile"].transform(
        lambda profiles: "full" if "full" in set(profiles) else profiles.iloc[0]
    )
    return rows[rows["profile"] == best]


def leading(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the one machine a headline speaks of: full before quick, GPU before CPU, then own."""
    if rows.empty:
        return rows
    groups = [group for _, group in per_machine(rows).groupby("machine", sort=True)]

    def rank(group: pd.DataFrame) -> tuple[bool, bool, bool]:
        first = group.iloc[0]
        return first["profile"] == "full", first["device_type"] == "cuda", bool(first["own"])

    return max(groups, key=rank)


def place(row: pd.Series) -> str:
    """Where a row was measured, for headers and sentences."""
    name = str(row["device_name"])
    if row.get("device") == "cpu" and row["device_type"] != "cpu":
        name = f"CPU beside {name}"
    return f"this machine ({name})" if row["own"] else name


def placed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `place`."""
    if rows.empty:
        return rows.assign(place=pd.Series(dtype=str))
    return rows.assign(place=[place(row) for _, row in rows.iterrows()])


def no_finding(study: str, what: str = "row has been recorded") -> str:
    """What stands where a study's sentences would, as long as it has no rows for them."""
    return f"{_NOTHING}: no {what}. `make study ONLY={study}` does."


def is_finding(sentence: str) -> bool:
    """Whether a sentence says more than `no_finding`."""
    return not sentence.startswith(_NOTHING)
