"""The same eager step, measured by more than one experiment: how far its times agree."""

import pandas as pd

from fusedlib.study.display import number
from fusedlib.study.end_to_end.selected import context, experiment, steps
from fusedlib.study.wording import between, listed


def times(frame: pd.DataFrame) -> dict[tuple[str, str], list[float]]:
    """Medians of forward and backward in ms by size and precision, where there are several.

    From the grid, the profile's unprofiled steps, and the comparison of MLPs with eager's; all at
    the context looked at.
    """
    others = [experiment(frame, name) for name in ("profile", "mlp")]
    rows = pd.concat(
        [steps(frame, mode="eager"), others[0], others[1][others[1]["mlp"] == "eager"]]
    )
    rows = rows[(rows["context_length"] == context(frame)) & rows["both_median_ms"].notna()]
    grouped = rows.groupby(["model", "precision"], sort=False)["both_median_ms"]
    return {(str(m), str(p)): sorted(v) for (m, p), v in grouped if len(v) > 1}


def finding(frame: pd.DataFrame) -> str | None:
    """What the same step took each time."""
    found = times(frame)
    if not found:
        return None
    said = [
        f"{model} in {precision} {between(number(each[0], 3), number(each[-1], 3))} ms"
        for (model, precision), each in found.items()
    ]
    place = steps(frame)["place"].iloc[0] if len(steps(frame)) else "this machine"
    return (
        f"Eager's forward and backward at context {context(frame)} were measured by up to "
        f"{max(map(len, found.values()))} of these experiments, on {place}: {listed(said)}. A "
        "ratio of two cases is known no better than this; only MLPs were measured in turns."
    )
