"""Study 10's tables. Every function takes the frame of `results.load("10_mnist")`."""

from typing import Any

import numpy as np
import pandas as pd

from fusedlib.study import published
from fusedlib.study.display import MISSING, number
from fusedlib.study.training.selected import (
    ALONE,
    CONVOLUTIONS,
    PARTS,
    epoch_means,
    experiment,
    gaps,
    runs,
    where,
)

LOGS = {"Liger": "Liger", "Fused no weight-grad": "published kernel (wrong)"}
"""The published logs that are no copy of another; the study of a speed-up says which one is."""


def empty(*columns: str, index: str = "arm") -> pd.DataFrame:
    """A table with its header alone, for what has not been measured."""
    return pd.DataFrame(columns=list(columns), index=pd.Index([], name=index))


def layer(frame: pd.DataFrame) -> pd.DataFrame:
    """Each arm's layer against the reference: errors in norm, and the backward that ran."""
    rows = runs(frame, CONVOLUTIONS).drop_duplicates("who")
    body = {}
    for row in rows.itertuples():
        errors = [row.d_w_gate_error, row.d_w_up_error, row.d_w_gate_up_error]
        known = [e for e in errors if pd.notna(e)]
        absent = "none arrives" if row.wrong else "frozen"
        body[row.who] = {
            "error of h": number(row.h_error, 2), "of dx": number(row.d_x_error, 2),
            "of gate and up gradients": number(max(known), 2) if known else absent,
            "backward that ran": row.layer_backward,
            "weights trained": f"{int(row.trained_parameters):,}",
        }  # fmt: skip
    if not body:
        return empty("error of h", "of dx", "of gate and up gradients")
    return pd.DataFrame.from_dict(body, orient="index").rename_axis("arm")


def outcomes(frame: pd.DataFrame, network: str) -> pd.DataFrame:
    """What each arm's training came to: losses, the gap to eager, correct answers, over seeds."""
    rows = runs(frame, network)
    body = {}
    for name, part in rows.groupby("who", sort=False):
        apart = gaps(rows, part)
        each = len(part["losses"].iloc[0]) // int(part["epochs"].iloc[0])
        last = apart[:, -each:].mean(axis=1) if apart.size else apart
        body[name] = {
            "epochs": int(part["epochs"].min()), "seeds": len(part),
            "training loss, last epoch": spread(epoch_means(part)),
            "less eager's, same seed": MISSING if name == "eager fp32" else spread(last, True),
            "test loss": spread([row[-1] for row in part["epoch_test_loss"]]),
            "correct, %": spread(correct(part)),
        }  # fmt: skip
    if not body:
        return empty("epochs", "seeds", "training loss, last epoch", "test loss", "correct, %")
    return pd.DataFrame.from_dict(body, orient="index").rename_axis("arm")


def correct(part: pd.DataFrame) -> list[float]:
    """Per cent of the test images that each run classifies after its last epoch."""
    return [
        100 * row.epoch_correct[-1] / row.test_images for row in part.itertuples()
    ]  # fmt: skip


def spread(values: Any, signed: bool = False) -> str:
    """Mean and range over seeds, one value where they are all alike."""
    found = np.asarray(values, float)
    if not found.size:
        return MISSING
    low, mean, high = (_figure(v, signed) for v in (found.min(), found.mean(), found.max()))
    return mean if low == high else f"{mean} ({low} to {high})"


def _figure(value: float, signed: bool) -> str:
    if signed:
        return f"{value:+.4f}".replace("-", "−")
    return f"{value:.2f}" if value >= 10 else f"{value:.4f}"


def beside_published(frame: pd.DataFrame) -> pd.DataFrame:
    """Times of an epoch, losses and answers, published and measured.

    Times are those of one epoch launched from Python, losses those of the longest runs.
    """
    lines: dict[tuple[str, str], dict[str, str]] = {}
    told = published.load("mnist")
    for table, name in LOGS.items():
        part = told[told["table"] == table].sort_values("epoch")
        losses = part["test_loss"].tolist()
        share = 100 * part["correct"].iloc[-1] / part["images"].iloc[-1]
        times = {"its own": part["train_ms"].median() / 1e3, "test": part["test_ms"].median() / 1e3}
        lines[f"published: {name}", part["device"].iloc[0]] = _line(times, losses, share)
    clocked = experiment(frame, "epoch")
    for name, part in runs(frame, CONVOLUTIONS).groupby("who", sort=False):
        losses = np.asarray([r[: int(part["epochs"].min())] for r in part["epoch_test_loss"]])
        own = clocked[clocked["who"] == name].set_index("source")
        times = {s: own["epoch_train_s"].get(s, [np.nan])[0] for s in ("device", "loader")}
        times["test"] = own["epoch_test_s"].get("device", [np.nan])[0]
        lines[name, where(part)] = _line(times, losses.mean(axis=0), float(np.mean(correct(part))))
    table = pd.DataFrame.from_dict(lines, orient="index")
    table.index = pd.MultiIndex.from_tuples(list(lines), names=["run", "on"])
    return table


def _line(times: dict[str, float], losses: Any, share: float) -> dict[str, str]:
    loader = times.get("its own", times.get("loader", np.nan))
    return {
        "epochs": str(len(losses)), "DataLoader, s an epoch": cell(loader),
        "data on the device, s": cell(times.get("device", np.nan)), "test, s": cell(times["test"]),
        "test loss, epoch 1": f"{losses[0]:.4f}", "last epoch": f"{losses[-1]:.4f}",
        "correct, %": f"{share:.2f}",
    }  # fmt: skip


def change(frame: pd.DataFrame) -> pd.DataFrame:
    """How far the layer's weights have moved since the start, relatively, after each epoch."""
    return _by_epoch(frame, "epoch_gate_change", "epoch_up_change")


def gradients(frame: pd.DataFrame) -> pd.DataFrame:
    """Norms of the gradients of the layer's weights, means over each epoch."""
    return _by_epoch(frame, "epoch_gate_gradient_norm", "epoch_up_gradient_norm")


def _by_epoch(frame: pd.DataFrame, gate: str, up: str) -> pd.DataFrame:
    """An arm a line; gate's columns by epoch, then up's."""
    rows = runs(frame, CONVOLUTIONS)
    if rows.empty:
        return empty("epoch 1")
    lines = {}
    for name, part in rows.groupby("who", sort=False):
        lines[name] = {
            (title, f"epoch {n}"): _mean(values)
            for title, column in (("gate", gate), ("up", up))
            for n, values in enumerate(_seen(part[column]).T, 1)
        }
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis("arm").fillna(MISSING)


def _seen(column: pd.Series) -> np.ndarray:
    return np.asarray([[np.nan if v is None else v for v in row] for row in column])


def _mean(values: np.ndarray) -> str:
    return "none" if np.isnan(values).all() else number(float(values.mean()), 3)


def pace(frame: pd.DataFrame) -> pd.DataFrame:
    """A step's parts, its rate, and the same step in a CUDA graph; data on the device."""
    rows = experiment(frame, "pace")
    rows = rows[rows["source"] == "device"]
    graphs = rows[rows["launch"] == "graph"].set_index("who")["median_ms"]
    lines, index = [], []
    for row in rows[rows["launch"] == "python"].itertuples():
        step = float(row.median_ms)
        graph = graphs.get(row.who, float("nan"))
        index.append(row.who)
        lines.append(
            {
                **{f"{part}, ms": number(median(row, part), 3) for part in PARTS},
                "step, ms": number(step, 3), "steps/s": number(1e3 / step, 3),
                "images/s": number(1e3 * row.batch_size / step, 3),
                "eager's time / its": _ratio(row), "in a graph, ms": cell(graph),
            }
        )  # fmt: skip
    if not lines:
        return empty(*(f"{part}, ms" for part in PARTS), "step, ms")
    return pd.DataFrame(lines, index=pd.Index(index, name="arm"))


def median(row: Any, part: str) -> float:
    """Median ms of one part of a step."""
    return float(np.median(getattr(row, f"{part}_samples_ms")))


def cell(value: float) -> str:
    """A number at three digits, a dash for none."""
    return MISSING if pd.isna(value) else number(float(value), 3)


def _ratio(row: Any) -> str:
    if pd.isna(row.speedup):
        return MISSING
    return f"{row.speedup:.2f} ({row.speedup_low:.2f}–{row.speedup_high:.2f})"


def data(frame: pd.DataFrame) -> pd.DataFrame:
    """The two sources of data: alone, and what a step takes with each."""
    alone = experiment(frame, "data")
    steps = experiment(frame, "pace")
    steps = steps[steps["launch"] == "python"]
    names = {"device": "on the device", "loader": "DataLoader, one worker"}
    both = steps.groupby("who", sort=False)["source"].transform("nunique") == 2
    arms = list(dict.fromkeys(steps[both]["who"]))
    lines = []
    for row in alone.itertuples():
        ms = float(row.median_ms)
        part = steps[steps["source"] == row.source].set_index("who")["median_ms"]
        lines.append(
            {
                "ms a batch": number(ms, 3), "images/s": number(1e3 * row.batch_size / ms, 3),
                "60,000 images, s": number(ms * 60 / row.batch_size, 3),
                **{f"step of {arm}, ms": cell(part.get(arm, float("nan"))) for arm in arms},
            }
        )  # fmt: skip
    if not lines:
        return empty("ms a batch", "images/s", index="data")
    index = pd.Index([names[s] for s in alone["source"]], name="data")
    return pd.DataFrame(lines, index=index)


def repeats(frame: pd.DataFrame) -> pd.DataFrame:
    """Largest difference of the losses when a run is repeated, and when a graph makes it."""
    rows = experiment(frame, "repeat")
    body = {
        row.who: {
            "steps": str(int(row.steps)), "run again": _difference(row.repeat_difference),
            "in a CUDA graph": _difference(row.graph_difference),
        }
        for row in rows.itertuples()
    }  # fmt: skip
    if not body:
        return empty("steps", "run again", "in a CUDA graph")
    return pd.DataFrame.from_dict(body, orient="index").rename_axis("arm")


def _difference(value: float) -> str:
    if pd.isna(value):
        return MISSING
    return "none, bit for bit" if value == 0 else number(float(value), 2)


def confusion(part: pd.DataFrame) -> np.ndarray:
    """Answers of all runs together, [true digit, answer]."""
    return np.sum([np.reshape(counts, (10, 10)) for counts in part["confusion"]], axis=0)


def missed(frame: pd.DataFrame, network: str = CONVOLUTIONS) -> pd.DataFrame:
    """By digit: how often each arm misses it over all seeds, and the answer it gives instead."""
    rows = runs(frame, network)
    columns: dict[tuple[str, str], list[str]] = {}
    for name, part in rows.groupby("who", sort=False):
        if name.split()[0] not in ("eager", "fused", "frozen", "flawed"):
            continue
        counts = confusion(part)
        errors = counts - np.diag(np.diag(counts))
        share = 100 * errors.sum(axis=1) / np.maximum(counts.sum(axis=1), 1)
        columns[name, "missed, %"] = [f"{v:.2f}" for v in share]
        columns[name, "most often as"] = [
            str(int(e.argmax())) if e.any() else MISSING for e in errors
        ]
    if not columns:
        return empty("missed, %", index="digit")
    return pd.DataFrame(columns, index=pd.Index(range(10), name="digit"))


def alone(frame: pd.DataFrame) -> pd.DataFrame:
    """The network without convolutions, where the layer has to learn."""
    return outcomes(frame, ALONE)
