"""What the columns of study 13's rows mean, and those that follow from others."""

from typing import Any

import numpy as np
import pandas as pd

from measure.recording import results
from measure.study import Column
from measure.training.network import PRECISIONS

STEP = ("forward", "backward", "optimizer", "data")
PARTS = (*STEP, "replay")
"""Parts of a step that are timed; in a CUDA graph all but the data is one replay."""
PACKED = "PyTorch, packed"
"""`fusedlib.swiglu` where it ran PyTorch's own operations, gate and up in one product."""
EPOCH = {
    "correct_images": "epoch_correct", "test_loss": "epoch_test_loss",
    "gate_change": "epoch_gate_change", "gate_gradient_norm": "epoch_gate_gradient_norm",
    "train_s": "epoch_train_s", "test_s": "epoch_test_s",
}  # fmt: skip
"""Figures of an epoch, by the list of a run that has them."""
ERRORS = ("h_error", "d_x_error", "d_w_gate_error", "d_w_up_error")
USED = [
    *EPOCH.values(), *ERRORS, *(f"{part}_samples_ms" for part in PARTS), "losses", "epochs", "seed",
    "layer_backward", "median_ms", "samples_ms", "session", "source", "launch",
    "graph_difference", "repeat_difference",
]  # fmt: skip

COLUMNS = {
    "experiment": Column(
        "experiment",
        names={"run": "training", "pace": "steps by their parts", "epoch": "timed epochs",
               "repeat": "runs repeated", "data": "batches, nobody training"},
    ),
    "network": Column(
        "network",
        names={"convolutions": "after convolutions",
               "published": "after convolutions, published log",
               "swiglu only": "without convolutions"},
    ),
    "precision": Column("precision", names={name: name for name in PRECISIONS}),
    "launch": Column("launch", names={"python": "from Python", "graph": "in a CUDA graph"}),
    "source": Column("data from", names={"device": "the device", "loader": "a DataLoader"}),
    "train_images": Column("training images", ",d", names={60_000: "all training images"}),
    "epoch": Column("epoch", ",d"),
    "seed": Column("seed", ",d"),
    "test_error": Column("test images missed", "2%", log=True),
    "correct": Column("correct", "4%"),
    "test_loss": Column("test loss", "3", log=True),
    "late_loss": Column("training loss of the last epoch", "3"),
    "gate_change": Column("relative change of the gate weights", "2"),
    "gate_gradient_norm": Column("norm of the gate's gradient", "2"),
    "train_s": Column("an epoch", "3 s"),
    "test_s": Column("its test", "2 s"),
    "part": Column("part", names={part: part for part in PARTS}),
    "part_ms": Column("time of a step", "3 ms"),
    "layer_backward": Column("backward that ran"),
    "h_error": Column("error of h", "2"),
    "d_x_error": Column("of dx", "2"),
    "d_w_gate_error": Column("of d gate", "2"),
    "d_w_up_error": Column("of d up", "2"),
}  # fmt: skip


def described(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    Times of a wrong kernel, taken by the published protocol, stand beside the others'. Where
    fusedlib ran PyTorch's own operations the provider is `PACKED`. Of a run the figures of its last
    epoch: `epoch`, `test_error` and `correct` (shares of the test images), those in `EPOCH`, and
    `late_loss`, the mean training loss.
    """
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *USED])))
    for name in (n for n in USED if n.endswith("_ms") or n in EPOCH.values()):
        if (own := results.PROTOCOL + name) in rows:
            rows[name] = rows[name].where(rows[name].notna(), rows[own])
    packed = rows["provider"].eq("fused") & rows["layer_backward"].eq("MulBackward0")
    last = {name: rows[of].map(_last).astype(float) for name, of in EPOCH.items()}
    correct = last.pop("correct_images") / rows["test_images"].astype(float)
    lists = zip(rows["losses"], rows["epochs"], strict=True)
    return rows.assign(
        **last, correct=correct, test_error=1 - correct, epoch=rows["epochs"].astype(float),
        provider=rows["provider"].mask(packed, PACKED),
        late_loss=[np.mean(v[-len(v) // int(n) :]) if isinstance(v, list) else None
                   for v, n in lists],
    ).astype({"late_loss": float}).copy()  # fmt: skip


def longest(rows: pd.DataFrame) -> pd.DataFrame:
    """The runs of most epochs, of those with most images, of those the widest layer, of each
    recording and network."""
    for name in ("epochs", "train_images", "width"):
        size = rows[name].astype(float)
        keys = [rows[key] for key in ("machine", "recording", "network")]
        rows = rows[size == size.groupby(keys, observed=True).transform("max")]
    return rows


def by_epoch(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each run a row an epoch: `epoch` and the figures of its end."""
    runs = rows[rows["epoch_correct"].map(lambda v: isinstance(v, list))]
    epochs = runs.assign(
        **{name: runs[of] for name, of in EPOCH.items()},
        epoch=[range(1, len(v) + 1) for v in runs["epoch_correct"]],
    ).explode([*EPOCH, "epoch"])
    epochs = epochs.astype(dict.fromkeys(EPOCH, float) | {"epoch": int})
    correct = epochs["correct_images"] / epochs["test_images"].astype(float)
    return epochs.assign(correct=correct, test_error=1 - correct)


def by_part(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each timed step a row a part: `part` and `part_ms`, the median of its samples."""
    steps = rows[rows["experiment"] == "pace"]
    parts = [
        steps.assign(part=part, part_ms=steps[f"{part}_samples_ms"].map(_median).astype(float))
        for part in PARTS
    ]
    return pd.concat(parts).dropna(subset="part_ms")


def from_tables(log: pd.DataFrame) -> pd.DataFrame:
    """The published log in the columns of `by_epoch`: Liger's run and that of the kernel.

    Its third section repeats Liger's digit for digit and is left out. Its precision is torch's
    default: IEEE products, TF32 convolutions.
    """
    runs = {"Liger": "liger", "Fused no weight-grad": "published-kernel"}
    log = log[log["table"].isin(runs)]
    correct = log["correct"] / log["images"]
    return log.assign(
        experiment="run", network="published", precision="fp32", provider=log["table"].map(runs),
        correct=correct, test_error=1 - correct, test_images=log["images"], seed=0,
        train_s=log["train_ms"] / 1e3, test_s=log["test_ms"] / 1e3,
    )  # fmt: skip


def _last(figures: Any) -> float | None:
    """The last epoch's figure, None where none arrived."""
    return figures[-1] if isinstance(figures, list) else None


def _median(samples: Any) -> float | None:
    return float(np.median(samples)) if isinstance(samples, list) else None
