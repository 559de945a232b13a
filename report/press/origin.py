"""Of which days and which code rows are, in a few words."""

import pandas as pd

NEWEST = "2026-11-28"
"""From when on the recorded code of fusedlib is the release's."""


def older(rows: pd.DataFrame) -> bool:
    """Whether some of these rows are of older code than the release's."""
    return "began" in rows and bool((rows["began"].dropna().astype(str) < NEWEST).any())


def origin(rows: pd.DataFrame) -> str:
    """Days and commits of rows, such as "21–25 Nov, 3 commits"; empty for rows that have none."""
    if "commit" not in rows or not (first := days(rows)):
        return ""
    commits = sorted({str(commit)[:7] for commit in rows["commit"].dropna()})
    code = " ".join(commits) if len(commits) < 3 else f"{len(commits)} commits"
    return ", ".join(filter(None, [first, code]))


def days(rows: pd.DataFrame) -> str:
    """Days of rows, such as "21–25 Nov"; empty for rows that have none."""
    if "began" not in rows or rows["began"].isna().all():
        return ""
    every = pd.to_datetime(rows["began"].dropna().astype(str)).sort_values()
    first, last = (f"{day.day} {day:%b}" for day in (every.iloc[0], every.iloc[-1]))
    if first[-3:] == last[-3:] and first != last:
        first = first[:-4]
    return "–".join(dict.fromkeys([first, last]))


def stated(rows: pd.DataFrame) -> str:
    """The origin of rows by machine, where some are older than the release's code, else empty."""
    if "machine" not in rows or not older(rows):
        return ""
    of = rows[rows["began"].notna()].groupby("machine", sort=False, observed=True)
    return "; ".join(f"{name} {origin(own)}" for name, own in of if len(own))
