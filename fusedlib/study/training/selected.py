"""Which rows of study 10 a table, figure or sentence takes, and what it says of their size.

Every function takes the frame of `results.load("10_mnist")` and measures nothing.
"""

from typing import Any

import numpy as np
import pandas as pd

from fusedlib.bench.training import mnist
from fusedlib.study import published
from fusedlib.study.selection import leading, place, rows_of

CONVOLUTIONS, ALONE = "convolutions", "swiglu only"
PUBLISHED_WIDTH = 4096
PROTOCOL = "published_protocol_"
BASELINE = "eager"
ARMS = ("eager", "liger", "inductor", "fused", "frozen", "flawed")
PRECISIONS = ("fp32", "tf32", "bf16")
UNTRAINED = ("frozen", "flawed")
TIMES = ("epoch_train_s", "epoch_test_s")
PARTS = ("data", "forward", "backward", "optimizer")
_SAMPLES = tuple(f"{part}_samples_ms" for part in (*PARTS, "replay"))
_PACE = ("median_ms", "samples_ms", "speedup", "speedup_low", "speedup_high", *_SAMPLES)
_COLUMNS = (
    "machine", "profile", "device_type", "device_name", "own", "status", "reason", "experiment",
    "network", "arm", "precision", "seed", "epochs", "window", "train_images", "test_images",
    "width", "batch_size", "source", "launch", "losses", "confusion", "epoch_test_loss",
    "epoch_correct", "epoch_gate_change", "epoch_up_change", "epoch_gate_gradient_norm",
    "epoch_up_gradient_norm", "trained_parameters", "layer_parameters", "layer_backward",
    "h_error", "d_x_error", "d_w_gate_error", "d_w_up_error", "d_w_gate_up_error",
    "missing_gradients", "repeat_difference", "graph_difference", "steps", *TIMES, *_PACE,
    *(PROTOCOL + name for name in (*TIMES, *_PACE)),
)  # fmt: skip


def experiment(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Rows of one experiment with figures, of the leading machine's largest setting.

    `wrong` tells the arms that miss the reference; their times, published as they are, stand in
    the usual columns. Sorted by precision, arm and seed.
    """
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *_COLUMNS])))
    rows = rows_of(frame, name, None)
    trained = name in ("run", "epoch")
    measured = rows["losses"].notna() if trained else rows["status"].notna()
    rows = leading(rows[rows["status"].isin(["ok", "wrong"]) & measured]).copy()
    for size in ("train_images", "width"):
        group = rows.groupby("network", dropna=False)[size] if name == "run" else rows[size]
        rows = rows[rows[size] == (group.transform("max") if name == "run" else group.max())]
    wrong = rows["status"] == "wrong"
    for figure in (*TIMES, *_PACE):
        rows[figure] = rows[figure].where(~wrong, rows[PROTOCOL + figure])
    rows = rows.assign(wrong=wrong, who=[who(r) for r in rows.itertuples()])
    order = [_rank(r) for r in rows.itertuples()]
    return rows.assign(rank=order).sort_values(["rank", "seed"], kind="stable")


def who(row: Any) -> str:
    """An arm and its precision, and that it is wrong."""
    if not isinstance(row.arm, str):
        return ""
    return f"{row.arm} {row.precision}{' (wrong)' if row.arm == 'flawed' else ''}"


def _rank(row: Any) -> int:
    if not isinstance(row.arm, str):
        return 0
    untrained = row.arm in UNTRAINED
    return 100 * untrained + 10 * PRECISIONS.index(row.precision) + ARMS.index(row.arm)


def runs(frame: pd.DataFrame, network: str) -> pd.DataFrame:
    """Training runs on one network, each arm's and seed's longest."""
    rows = experiment(frame, "run")
    rows = rows[rows["network"] == network]
    longest = rows.groupby(["who", "seed"])["epochs"].transform("max")
    return rows[rows["epochs"] == longest]


def where(rows: pd.DataFrame) -> str:
    """Where the rows were measured."""
    return place(rows.iloc[0]) if len(rows) else "no machine yet"


def size(rows: pd.DataFrame) -> str:
    """What was trained on, and how that differs from the published run; for every caption."""
    if rows.empty:
        return "not measured yet"
    row = rows.iloc[0]
    whole = (mnist.SHAPES["y_train"][0], mnist.SHAPES["y_test"][0])
    parts = [
        _of(row["train_images"], whole[0], "training images"),
        _of(row["test_images"], whole[1], "test images"),
    ]
    if "network" not in row or row["network"] != ALONE:
        width = int(row["width"])
        less = width != PUBLISHED_WIDTH
        parts.append(f"width {width:,}{f' instead of {PUBLISHED_WIDTH:,}' if less else ''}")
    else:
        parts.append(f"width {int(row['width']):,}")
    epochs, told = rows["epochs"].max(), int(published.load("mnist")["epoch"].max())
    if pd.notna(epochs):
        ends = sorted({int(e) for e in rows["epochs"].dropna()})
        said = " or ".join(str(e) for e in ends)
        parts.append(f"{said} of {told} epochs" if ends != [told] else f"{told} epochs")
        seeds = rows["seed"].nunique()
        parts.append(f"{seeds} seed{'s' if seeds > 1 else ''}")
    small = row["train_images"] < whole[0]
    return f"{'**a subset:** ' if small else ''}{', '.join(parts)}"


def _of(count: float, whole: int, what: str) -> str:
    return f"{int(count):,} {what}" if count == whole else f"{int(count):,} of {whole:,} {what}"


def unavailable(frame: pd.DataFrame, name: str) -> str | None:
    """Which arms have no figures in an experiment, and why; None where all have."""
    rows = rows_of(frame, name, None)
    if rows.empty:
        return "No rows yet: `make study ONLY=10_mnist` measures them."
    rows = leading(rows)
    lacking = rows[~rows["status"].isin(["ok", "wrong"])]
    if lacking.empty:
        return None
    names = lacking.reindex(columns=["arm", "precision", "reason"])
    told: dict[str, list[str]] = {}
    for row in names.itertuples():
        said = f"{row.arm} {row.precision}" if isinstance(row.arm, str) else name
        told.setdefault(str(row.reason), []).append(said)
    parts = [f"{', '.join(dict.fromkeys(arms))}: {reason}" for reason, arms in told.items()]
    return f"No figures for {'; '.join(parts)}."


def curve(rows: pd.DataFrame) -> np.ndarray:
    """Training loss of one arm's runs, [seeds, windows], cut to the shortest."""
    found = [np.asarray(losses, float) for losses in rows["losses"]]
    shortest = min(len(losses) for losses in found)
    return np.stack([losses[:shortest] for losses in found])


def gaps(rows: pd.DataFrame, arm: pd.DataFrame) -> np.ndarray:
    """Training loss less that of eager fp32 at the same seed and data order, [seeds, windows]."""
    base = rows[rows["who"] == f"{BASELINE} fp32"].set_index("seed")
    both = [seed for seed in arm["seed"] if seed in base.index]
    if not both:
        return np.zeros((0, 0))
    own = arm.set_index("seed").loc[both]
    shared = curve(pd.concat([own, base.loc[both]]))
    return shared[: len(both)] - shared[len(both) :]


def epoch_means(rows: pd.DataFrame, epoch: int | None = None) -> np.ndarray:
    """Mean training loss of one epoch, counted from 1, of each run; of its last where none said."""
    found = []
    for losses, epochs in zip(rows["losses"], rows["epochs"].astype(int), strict=True):
        each, at = len(losses) // epochs, epoch or epochs
        found.append(np.mean(losses[(at - 1) * each : at * each]))
    return np.asarray(found)
