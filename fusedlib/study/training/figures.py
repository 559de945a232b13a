"""Figures of study 10, each a pure function from the rows' frame to a Figure."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from fusedlib.study import style
from fusedlib.study.display import number
from fusedlib.study.training.selected import (
    ALONE,
    CONVOLUTIONS,
    PARTS,
    curve,
    experiment,
    gaps,
    runs,
)
from fusedlib.study.training.tables import confusion, correct, median

style.register("frozen", "flawed", first=4)
style.register("data", first=4)
_DASHES = {"fp32": "-", "tf32": (0, (1.5, 1.2)), "bf16": (0, (5, 1.5))}
UNTRAINED = ("frozen", "flawed")
MOST_BANDS = 4  # more lie over one another
SETTLED = 0.25  # of the epochs in a panel; before, runs may leave the frame
SMOOTH = 9
"""Windows of steps in a running mean of the curves."""


def _smooth(values: np.ndarray) -> np.ndarray:
    """Running mean along the last axis, over at most a fourth of it."""
    width = max(1, min(SMOOTH, values.shape[-1] // 4))
    kernel = np.ones(width) / width
    return np.apply_along_axis(lambda row: np.convolve(row, kernel, mode="valid"), -1, values)


def _band(ax: Axes, part: pd.DataFrame, values: np.ndarray, *, ends: bool = True) -> None:
    """Mean over seeds, with the range as a band if `ends`, against epochs."""
    row = part.iloc[0]
    windows = values.shape[-1]
    smooth = _smooth(values)
    each = windows / part["epochs"].min()
    at = (np.arange(smooth.shape[-1]) + (windows - smooth.shape[-1]) / 2 + 0.5) / each
    band = (smooth.min(axis=0), smooth.max(axis=0)) if ends else ()
    style.line(
        ax, at, smooth.mean(axis=0), row["arm"], *band,
        label=row["who"], markers=False, linestyle=_DASHES[row["precision"]],
    )  # fmt: skip


def curves(frame: pd.DataFrame) -> Figure:
    """Training loss over the epochs, a panel a network.

    Of the arms that trained longest: eager in fp32, ours, and those whose gate does not learn. The
    others lie upon them; `apart` shows by how much.
    """
    fig, axes = style.new(height=3.3, ncols=2)
    titles = {CONVOLUTIONS: "with convolutions", ALONE: "SwiGLU only"}
    for ax, (network, title) in zip(axes, titles.items(), strict=True):
        rows = runs(frame, network)
        told = (rows["who"] == "eager fp32") | rows["arm"].isin(["fused", *UNTRAINED])
        longest = rows["epochs"] == rows["epochs"].max()
        for _, part in rows[told & longest].groupby("who", sort=False):
            _band(ax, part, curve(part))
        ax.set_yscale("log")
        for axis_format in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            axis_format(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
        ax.set_xlabel("epochs")
        style.title(ax, title, fontsize=8.5)
    axes[0].set_ylabel("training loss")
    style.legend(fig, ncols=4)
    return fig


def _frame(ax: Axes) -> None:
    """Limits of y that hold the lines and bands from `SETTLED` on, and zero."""
    points = [line.get_xydata() for line in ax.lines]
    points += [path.vertices for band in ax.collections for path in band.get_paths()]
    if not points:
        return
    every = np.concatenate(points)
    late = every[every[:, 0] >= SETTLED * every[:, 0].max(), 1]
    low, high = min(late.min(), 0.0), max(late.max(), 0.0)
    space = 0.15 * (high - low) or 1e-6
    ax.set_ylim(low - space, high + space)


def apart(frame: pd.DataFrame) -> Figure:
    """Training loss less eager's at the same seed, a panel for the trained arms and one for all."""
    fig, axes = style.new(height=3.0, ncols=2)
    rows = runs(frame, CONVOLUTIONS)
    for ax, everybody in zip(axes, (False, True), strict=True):
        shown = rows.loc[rows["arm"].isin(UNTRAINED) == everybody, "who"].nunique()
        for name, part in rows.groupby("who", sort=False):
            untrained = part["arm"].iloc[0] in UNTRAINED
            found = gaps(rows, part)
            if name == "eager fp32" or not found.size or untrained is not everybody:
                continue
            _band(ax, part, found, ends=shown <= MOST_BANDS)
        _frame(ax)
        style.reference_line(ax, y=0.0)
        ax.set_xlabel("epochs")
        title = "gate and up not trained" if everybody else "gate and up trained"
        style.title(ax, title, fontsize=8.5)
    axes[0].set_ylabel("training loss − eager's")
    style.legend(fig, ncols=4)
    return fig


def parts(frame: pd.DataFrame) -> Figure:
    """A step's parts as lying bars, an arm a bar; the same step in a CUDA graph as a mark."""
    rows = experiment(frame, "pace")
    rows = rows[rows["source"] == "device"]
    graphs = rows[rows["launch"] == "graph"].set_index("who")["median_ms"]
    rows = rows[rows["launch"] == "python"]
    fig, ax = style.new(height=1.2 + 0.24 * max(len(rows), 2))
    start = [0.0] * len(rows)
    at = list(range(len(rows)))
    for part in PARTS:
        values = [median(row, part) for row in rows.itertuples()]
        style.bars(ax, at, values, part, horizontal=True, start=start, size=0.62)
        start = [low + value for low, value in zip(start, values, strict=True)]
    known = [(n, graphs[who]) for n, who in enumerate(rows["who"]) if who in graphs]
    if known:
        places, times = zip(*known, strict=True)
        ax.plot(times, places, "|", color=style.INK, markersize=11, label="whole, in a CUDA graph")
    ax.set_yticks(at, list(rows["who"]))
    ax.invert_yaxis()
    ax.set_xlabel("ms a step")
    style.legend(fig)
    return fig


def confusions(frame: pd.DataFrame) -> Figure:
    """Wrong answers in per cent of a digit's images, a panel for eager and one for frozen."""
    rows = runs(frame, ALONE)
    names = [n for n in ("eager fp32", "frozen fp32") if n in set(rows["who"])]
    fig, axes = style.new(height=3.1, ncols=2)
    shares = [_wrong(rows[rows["who"] == name]) for name in names]
    top = max((s.max() for s in shares), default=1.0) or 1.0
    for ax in axes:
        ax.grid(False)
        ax.set_xticks(range(10))
        ax.set_yticks(range(10))
        ax.set_xlabel("answer")
    for ax, name, share in zip(axes, names, shares, strict=False):
        ax.imshow(share, cmap="Blues", vmin=0, vmax=top)
        for digit, answer in zip(*np.nonzero(share >= 0.3 * top), strict=True):
            colour = "#ffffff" if share[digit, answer] > 0.6 * top else "#000000"
            ax.text(answer, digit, number(share[digit, answer], 2), color=colour, fontsize=5.5,
                    ha="center", va="center")  # fmt: skip
        style.title(ax, f"{name}, % of a digit's images", fontsize=8.5)
    axes[0].set_ylabel("digit")
    return fig


def _wrong(part: pd.DataFrame) -> np.ndarray:
    counts = confusion(part).astype(float)
    share = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    np.fill_diagonal(share, 0.0)
    return share


def curves_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `curves`."""
    return _told(frame, "Training loss against epochs", lambda part: curve(part)[:, -1])


def apart_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `apart`."""
    rows = runs(frame, CONVOLUTIONS)
    return _told(
        frame, "Training loss less eager's at the same seed, against epochs",
        lambda part: found.mean(axis=1) if (found := gaps(rows, part)).size else np.zeros(1),
    )  # fmt: skip


def _told(frame: pd.DataFrame, what: str, value: Callable[[pd.DataFrame], Any]) -> str:
    said = []
    for network in (CONVOLUTIONS, ALONE):
        for name, part in runs(frame, network).groupby("who", sort=False):
            mean = float(np.mean(value(part)))
            said.append(f"{name}, {network}: {number(mean, 3)} at the end")
    return f"{what}. {'; '.join(said) or 'No rows yet'}."


def parts_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `parts`."""
    rows = experiment(frame, "pace")
    rows = rows[(rows["source"] == "device") & (rows["launch"] == "python")]
    said = [
        f"{row.who}: " + ", ".join(f"{part} {number(median(row, part), 2)}" for part in PARTS)
        for row in rows.itertuples()
    ]
    return f"Milliseconds of a step by part. {'; '.join(said) or 'No rows yet'}."


def confusions_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `confusions`."""
    said = [
        f"{name}: {number(float(np.mean(correct(part))), 4)} % right"
        for name, part in runs(frame, ALONE).groupby("who", sort=False)
    ]
    return f"Wrong answers by digit, SwiGLU only. {'; '.join(said) or 'No rows yet'}."
