"""Which rows of study 05 a table, figure or sentence takes, and the published figures beside them.

Every function takes the frame of `results.load("05_anatomy")` and measures nothing.
"""

import pandas as pd

from fusedlib.study import published
from fusedlib.study.selection import leading, place, rows_of

STEPS = {
    "claimed": "claimed",
    "redone": "redone as published",
    "reduction": "+ the whole sum over K",
    "gradients": "+ gradients of all weights",
    "precision": "+ IEEE fp32 on both sides",
    "launch": "+ CUDA graphs on both sides",
    "kernels": "+ fusedlib's kernels instead",
    "fusion": "+ bf16 on both sides",
}
ASIDE = {"tf32": "aside: TF32 on both sides"}
DIRECTIONS = {"forward": "forward", "forward+backward": "forward + backward"}
WRONG = "wrong"
_PREFIX = "published_protocol_"
_FIGURES = ("ms", "liger_ms", "ratio", "ratio_low", "ratio_high")
_COLUMNS = (
    "machine", "profile", "device_type", "device_name", "own", "status", "reason", "experiment",
    "step", "tokens", "hidden_size", "direction", "implementation", "block", "inputs", "y_error",
    "d_x_error", "d_w_gate_error", "d_w_up_error", "d_w_gate_up_error", "d_w_down_error",
    "missing_gradients", "compulsory_bytes", "flops", "peak_mib", "weights_mib", "gradients_mib",
    "rest_mib", "bytes_per_s", *_FIGURES, *(_PREFIX + f for f in _FIGURES),
)  # fmt: skip


def experiment(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Rows of one experiment that hold figures, right or wrong, of the leading machine."""
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *_COLUMNS])))
    rows = rows_of(frame, name, None)
    return leading(rows[rows["status"].isin(["ok", WRONG])])


def where(rows: pd.DataFrame) -> str:
    """Where the rows were measured."""
    return place(rows.iloc[0]) if len(rows) else "no machine yet"


def unavailable(frame: pd.DataFrame, name: str) -> str | None:
    """Why an experiment has no figures on this machine or any; None where it has."""
    if len(experiment(frame, name)):
        return None
    rows = rows_of(frame, name, None)
    if rows.empty:
        return "No rows yet: `make study ONLY=05_anatomy` measures them."
    reasons = dict.fromkeys(str(r) for r in rows["reason"].dropna())
    return f"No figures yet. {'; '.join(reasons)}."


def steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps in their order: `wrong`, `ms`, `liger_ms`, and Liger's time over ours as `ratio` with
    its interval; a wrong row's come from what the published protocol shows.
    """
    rows = experiment(frame, "step").copy()
    rows["wrong"] = rows["status"] == WRONG
    for figure in _FIGURES:
        rows[figure] = rows[figure].where(~rows["wrong"], rows[_PREFIX + figure])
    order = {name: at for at, name in enumerate([*STEPS, *ASIDE])}
    rows = rows[rows["ratio"].notna()].assign(rank=rows["step"].map(order))
    return rows.sort_values(["tokens", "hidden_size", "direction", "rank"])


def step(
    frame: pd.DataFrame, name: str, tokens: int, width: int, direction: str
) -> pd.Series | None:
    """One step's row, None where it has not been measured."""
    rows = steps(frame)
    rows = rows[
        (rows["step"] == name) & (rows["tokens"] == tokens)
        & (rows["hidden_size"] == width) & (rows["direction"] == direction)
    ]  # fmt: skip
    return rows.iloc[0] if len(rows) else None


def claims() -> pd.DataFrame:
    """What was published: `factor` by tokens, width, direction; grid times over sweep ratios.

    What the source calls backward runs forward and backward, without the gate and up weights'
    gradients; its "backward" sweep is left out, because its script is the forward one.
    """
    keys = ["batch_size", "d_model", "direction"]
    times = published.load("swiglu_times")
    times = times[~times["weight_gradient"].fillna(False)]
    wide = times.pivot(index=keys, columns="implementation", values="time_ms").reset_index()
    wide["factor"] = wide["liger"] / wide["fused"]
    sweep = published.load("swiglu_ratios").query("quantity == 'forward time'")
    sweep = sweep.assign(direction="forward", factor=sweep["liger_over_fused"])
    both = pd.concat([wide, sweep]).drop_duplicates(keys, keep="first")
    names = {"forward": "forward", "backward": "forward+backward"}
    return both.assign(direction=both["direction"].map(names)).rename(
        columns={"batch_size": "tokens", "d_model": "width"}
    )[["tokens", "width", "direction", "factor"]]


def claim(tokens: int, width: int, direction: str) -> float | None:
    """The published factor at a size, None where none was published."""
    rows = claims()
    rows = rows[
        (rows["tokens"] == tokens) & (rows["width"] == width) & (rows["direction"] == direction)
    ]
    return float(rows["factor"].iloc[0]) if len(rows) else None


def panels(frame: pd.DataFrame) -> list[tuple[int, int, str]]:
    """Sizes and directions that were taken apart whole; the published grid's corners without."""
    rows = steps(frame)
    whole = rows[rows["direction"] == "forward+backward"][["tokens", "hidden_size"]]
    sizes = list(dict.fromkeys(whole.itertuples(index=False, name=None))) or [
        (64, 4096), (1024, 4096),
    ]  # fmt: skip
    return [(int(t), int(w), d) for t, w in sizes for d in DIRECTIONS]


def chain(frame: pd.DataFrame, tokens: int, width: int, direction: str) -> pd.DataFrame:
    """The waterfall of one size: `step`, `title`, `factor`, `low`, `high`, `wrong`, in order."""
    found = []
    told = claim(tokens, width, direction)
    if told is not None:
        found.append({"step": "claimed", "factor": told, "wrong": True})
    for name in list(STEPS)[1:]:
        row = step(frame, name, tokens, width, direction)
        if row is not None:
            found.append(
                {
                    "step": name, "factor": row["ratio"], "low": row["ratio_low"],
                    "high": row["ratio_high"], "wrong": bool(row["wrong"]),
                }
            )  # fmt: skip
    columns = ["step", "factor", "low", "high", "wrong"]
    made = pd.DataFrame(found).reindex(columns=columns)
    return made.assign(title=made["step"].map(STEPS))
