"""Of which days and which code rows are, in a few words."""

import pandas as pd

from study import provenance
from study.rows import recordings

NOT_MEASURED = ("fusedlib/bench/", "fusedlib/__init__.py")
"""Of fusedlib what no row is about: the clock, the names and the version."""


def older(rows: pd.DataFrame) -> bool:
    """Whether some of these rows are of another fusedlib than the one that lies here."""
    if not {"began", "commit"} <= {*rows}:
        return False
    whose = rows.loc[rows["began"].notna(), ["began", "commit"]]
    return not {*whose.itertuples(index=False, name=None)} <= _of_this_code()


def _of_this_code() -> set[tuple[str, str]]:
    """Beginning and commit of the recordings that had each file of fusedlib as it is now."""
    now = {
        content for name, content in provenance.files().items()
        if name.startswith("fusedlib/") and not name.startswith(NOT_MEASURED)
    }  # fmt: skip
    lines = recordings().to_dict("records")
    had = ((line, line.get("files")) for line in lines)
    return {
        (line["began"], line["commit"]) for line, files in had
        if isinstance(files, dict) and now <= {*files.values()}
    }  # fmt: skip


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
    """The days by machine, of those machines some of whose rows are of other code, and the commit
    where there is one."""
    if "machine" not in rows or not older(rows):
        return ""
    of = rows[rows["began"].notna()].groupby("machine", sort=False, observed=True)
    old = {name: own for name, own in of if older(own)}
    return "; ".join(
        f"{name} {origin(own) if own['commit'].nunique() == 1 else days(own)}"
        for name, own in old.items()
    )
