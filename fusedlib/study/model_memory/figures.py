"""Figures of study 09, each a pure function from the rows' frame to a Figure."""

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from fusedlib.bench.model_memory import cases
from fusedlib.bench.model_memory.timeline import CATEGORIES
from fusedlib.models import activations, checkpointed
from fusedlib.models.checkpointed import Plan
from fusedlib.study import style
from fusedlib.study.model_memory import selected
from fusedlib.study.model_memory.selected import GIB, MIB, TITLES, size

style.register("kept activations")
style.register(
    "gradients", "temporaries", "weights", "AdamW's moments", "cast weights", "other", first=1
)
# Items of a block, as the figure of what is kept groups them.
ITEMS = {
    "input, input / rms": "in the norms", "1 / rms": "in the norms",
    "the norm's output": "norms' outputs", "q, k, v, mixed heads": "q, k, v, mixed heads",
    "its output, heads apart": "q, k, v, mixed heads",
    "log of the softmax's sums": "attention weights or sums",
    "attention weights": "attention weights or sums", "causal mask": "attention weights or sums",
    "gate, silu(gate), up, h": "gate, silu(gate), up, h",
}  # fmt: skip
style.register(*dict.fromkeys(ITEMS.values()))
PLANS = {
    "segments": "segments", "nested": "nested segments", "first": "first blocks",
    "none": "no checkpoint",
}  # fmt: skip
style.register(*PLANS.values())
_STACK = ("weights", "optimizer", "gradients", "activations", "casts", "other", "temporaries")


def through_steps(frame: pd.DataFrame) -> Figure:
    """Memory held at each allocation of two full steps, by what it is; a panel a precision.

    At the largest context; dotted lines end building, forwards, backwards and updates.
    """
    rows = selected.steps(frame)
    count = max(len(rows), 1)
    fig, axes = style.new(
        height=0.8 + 1.75 * count, nrows=count, squeeze=False, sharey=True, sharex=False
    )
    scale, unit = _scale(rows["events_peak_mib"])
    top = float(rows["events_peak_mib"].max()) / scale if len(rows) else 1.0
    for ax, (_, row) in zip(axes.flat, rows.iterrows(), strict=False):
        _areas(ax, row, scale, top)
        peak = f"peak {size(row['events_peak_mib'])} {selected.section(row)}"
        style.title(ax, f"{row['precision']}: {peak}", fontsize=8.5)
        ax.set_ylabel(unit)
    axes[-1, 0].set_xlabel("allocations and releases")
    style.legend(fig, ncols=4)
    return fig


def _scale(mib: pd.Series) -> tuple[float, str]:
    return (GIB, "GiB") if len(mib) and mib.max() >= 9.5 * GIB else (1.0, "MiB")


def _areas(ax: Axes, row: Any, scale: float, top: float) -> None:
    at = np.asarray(row["live_at"], float) + 1
    below = np.zeros(len(at))
    assert set(_STACK) == set(CATEGORIES)
    for name in _STACK:
        above = below + np.asarray(row[f"live_{name}_mib"], float) / scale
        shown = TITLES[name]
        ax.fill_between(at, below, above, color=style.colour(shown), label=shown, linewidth=0)
        below = above
    edges = [0, *row["moment_at"]]
    for name, low, high in zip(row["moment_names"], edges, edges[1:], strict=False):
        style.reference_line(ax, x=float(high), linestyle=":", linewidth=0.8)
        if high - low > 0.04 * at[-1] and not name.startswith("begin"):
            style.text(ax, (low + high) / 2, 1.03 * top, _word(name), ha="center", fontsize=7)
    ax.set_xlim(0, at[-1])
    ax.set_ylim(0, 1.16 * top)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def _word(moment: str) -> str:
    word, _, number = moment.partition(" ")
    return f"{'update' if word == 'step' else word} {number}".replace("built ", "build")


def through_steps_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `through_steps`."""
    parts = [
        f"{row['precision']} peaks at {size(row['events_peak_mib'])} {selected.section(row)}, of "
        f"it weights {size(row['peak_weights_mib'])}, gradients {size(row['peak_gradients_mib'])}, "
        f"moments {size(row['peak_optimizer_mib'])}, kept activations "
        f"{size(row['peak_activations_mib'])}, temporaries {size(row['peak_temporaries_mib'])}"
        for _, row in selected.steps(frame).iterrows()
    ]
    return _alt("Areas of memory held through two steps, a panel a precision", parts)


def kept(frame: pd.DataFrame) -> Figure:
    """What one block keeps by formula, a bar an attention and precision; marks: hooks, a block.

    At the shortest and the longest context that were measured, a panel each.
    """
    rows = selected.passes(frame)
    rows = rows[rows["mode"] == "forward"]
    found = sorted(set(rows["context_length"].astype(int))) or [0]
    contexts = list(dict.fromkeys([found[0], found[-1]]))
    fig, axes = style.new(height=3.0, ncols=len(contexts), squeeze=False, sharey=True)
    for ax, context in zip(axes.flat, contexts, strict=True):
        part = rows[rows["context_length"] == context]
        _bars(ax, part)
        style.title(ax, f"context {context}" if context else "not measured yet", fontsize=8.5)
    axes[0, 0].set_ylabel("MiB a block")
    style.legend(fig, ncols=3)
    return fig


def _bars(ax: Axes, rows: pd.DataFrame) -> None:
    names = []
    for place, (_, row) in enumerate(rows.iterrows()):
        shape, batch = cases.shape_of(row), int(row["batch_size"])
        found: Counter[str] = Counter()
        for item in activations.of_block(shape, row["precision"], row["device"], batch):
            found[ITEMS[item.what]] += item.nbytes
        start = 0.0
        for name in dict.fromkeys(ITEMS.values()):
            style.bars(ax, [place], [found[name] / MIB], name, start=start, size=0.7)
            start += found[name] / MIB
        style.points(
            ax, [place], [seen_a_block(row)], "other", label="autograd's hooks", color=style.INK,
            fmt="_", markersize=11, markeredgewidth=1.2,
        )  # fmt: skip
        names.append(f"{row['precision'].replace(' ', chr(10))}\n{row['attention']}")
    ax.set_xticks(range(len(names)), names, fontsize=6.5)
    ax.grid(axis="x", visible=False)


def seen_a_block(row: Any) -> float:
    """MiB that autograd's hooks saw for one block."""
    parts = ("attention_norm", "attention", "mlp_norm", "mlp")
    found = [float(row[f"saved_{part}_bytes"]) for part in parts]
    return sum(found) / cases.shape_of(row).num_layers / MIB


def kept_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `kept`."""
    rows = selected.passes(frame)
    rows = rows[rows["mode"] == "forward"]
    parts = [f"{selected.of(row)}: {size(seen_a_block(row))}" for _, row in rows.iterrows()]
    return _alt("Bars of what one block keeps by formula, marks as measured", parts)


def checkpointing(frame: pd.DataFrame) -> Figure:
    """Left: peak against the blocks of a segment, lines counted, marks measured. Right: peak
    against time. A row of panels a context and precision; dashed: the square root of all blocks.
    """
    rows = selected.checkpoints(frame)
    groups = list(dict.fromkeys(rows["group"])) or [(0, "")]
    fig, axes = style.new(
        height=0.5 + 2.6 * len(groups), ncols=2, nrows=len(groups), squeeze=False, sharey="row"
    )
    for (left, right), group in zip(axes, groups, strict=True):
        part = rows[[g == group for g in rows["group"]]]
        if part.empty:
            style.title(left, "not measured yet", fontsize=8.5)
            continue
        scale, unit = _scale(part["peak_mib"])
        _spacing(left, part, scale)
        _trade(right, part, scale)
        left.set_ylabel(f"{unit} over weights and gradients", fontsize=8)
        style.title(left, f"context {group[0]}, {group[1]}", fontsize=8.5)
    axes[-1, 0].set_xlabel("blocks in a segment")
    axes[-1, 1].set_xlabel("ms, forward and backward")
    style.legend(fig, ncols=4)
    return fig


def _spacing(ax: Axes, rows: pd.DataFrame, scale: float) -> None:
    first = rows.iloc[0]
    shape, batch = cases.shape_of(first), int(first["batch_size"])
    for kind in ("segments", "nested"):
        part = rows[rows["plan"] == kind]
        if part.empty:
            continue
        spread = range(1, shape.num_layers + 1)
        held = [
            checkpointed.held_bytes(
                shape, first["precision"], first["device"], Plan(kind, k), batch
            )
            for k in spread
        ]  # fmt: skip
        peak = [max(h.values()) / MIB / scale for h in held]
        style.line(ax, spread, peak, PLANS[kind], markers=False, linewidth=1.0)
        style.points(ax, part["blocks"], part["peak_mib"] / scale, PLANS[kind])
    style.reference_line(ax, x=float(shape.num_layers**0.5), label="√ of all blocks")
    for value in rows[rows["plan"] == "none"]["peak_mib"]:
        style.reference_line(ax, y=float(value / scale), linestyle=":", label="no checkpoint")
    ax.set_xscale("log", base=2)
    ticks = [2**n for n in range(8) if 2**n <= shape.num_layers]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    _memory_axis(ax, rows["peak_mib"], scale)


def _memory_axis(ax: Axes, mib: pd.Series, scale: float) -> None:
    """From zero, or logarithmic with plain numbers where plans differ more than six times."""
    if mib.max() < 6 * mib.min():
        ax.set_ylim(0, 1.08 * mib.max() / scale)
        return
    ax.set_yscale("log", base=2)
    # Room for what is written beside the highest mark.
    ax.set_ylim(top=max(ax.get_ylim()[1], 1.6 * mib.max() / scale))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def _trade(ax: Axes, rows: pd.DataFrame, scale: float) -> None:
    for kind, part in rows.groupby("plan", sort=False):
        ends = part["median_ms"] - part["median_low_ms"], part["median_high_ms"] - part["median_ms"]
        style.points(ax, part["median_ms"], part["peak_mib"] / scale, PLANS[str(kind)], xerr=ends)
        for _, row in part.iterrows():
            ax.annotate(
                f"{row['blocks']:g}" if row["blocks"] else "none",
                (row["median_ms"], row["peak_mib"] / scale), fontsize=6.5,
                xytext=(3, 3), textcoords="offset points", color=style.INK,
            )  # fmt: skip
    ax.margins(x=0.12)


def checkpointing_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `checkpointing`."""
    parts = [
        f"context {row['context_length']:g} in {row['precision']}, {row['plan']} "
        f"{row['blocks']:g}: "
        f"{size(row['peak_mib'])} in {row['median_ms']:.4g} ms"
        for _, row in selected.checkpoints(frame).iterrows()
    ]
    return _alt("Peak memory against segment size and against time", parts)


def _alt(what: str, parts: list[str]) -> str:
    return f"{what}. {'; '.join(parts)}." if parts else f"{what}. No rows yet."
