"""Figures of study 04, each a pure function from the rows' frame to a Figure."""

from fractions import Fraction

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from fusedlib.bench import ledger
from fusedlib.study import style
from fusedlib.study.display import number
from fusedlib.study.memory import published_fit, tables
from fusedlib.study.memory.findings import largest
from fusedlib.study.selection import leading, place

style.register("saved", "gradients", "temporaries", "y")
style.register("fused (input)", first=7)
_TITLES = {"output": "y"}


def through_a_step(frame: pd.DataFrame) -> Figure:
    """MiB over base after each allocation and release of one step, by what it is; a panel a rival.

    At the largest main shape of the leading machine; the dashed line is the counted peak.
    """
    rows = _told(frame)
    columns = min(max(len(rows), 1), 3)
    down = -(-max(len(rows), 1) // columns)
    fig, axes = style.new(
        height=0.7 + 1.75 * down, ncols=columns, nrows=down, squeeze=False, sharey=True
    )
    for ax, (_, row) in zip(axes.flat, rows.iterrows(), strict=False):
        _areas(ax, row)
        style.title(ax, f"{row['provider']}: {number(row['peak_mib'], 3)} MiB", fontsize=8.5)
    for ax in list(axes.flat)[len(rows) :]:
        ax.set_axis_off()
    for ax in axes[:, 0]:
        ax.set_ylabel("MiB over base")
    for ax in axes[-1]:
        ax.set_xlabel("allocations and releases")
    style.legend(fig)
    return fig


def _told(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps at the largest main shape whose every allocation was seen."""
    rows = largest(frame)
    return rows[rows["live_output_mib"].notna()] if len(rows) else rows


def _areas(ax: Axes, row: pd.Series) -> None:
    below = np.zeros(len(row["live_output_mib"]))
    events = np.arange(1, len(below) + 1)
    for name in ("output", "saved", "gradients", "temporaries"):
        above = below + np.asarray(row[f"live_{name}_mib"], float)
        shown = _TITLES.get(name, name)
        ax.fill_between(
            events, below, above, step="post", color=style.colour(shown), label=shown, linewidth=0
        )
        below = above
    style.reference_line(ax, y=float(row["counted_peak_mib"]), label="counted peak")
    style.reference_line(ax, x=float(row["forward_events"]) + 0.5, linestyle=":")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def ratios(frame: pd.DataFrame) -> Figure:
    """Left: Liger over fused against width, published, read and measured. Right: against tokens."""
    fig, (left, right) = style.new(height=3.2, ncols=2)
    _widths(left, frame)
    _tokens(right, frame)
    style.legend(fig, ncols=3)
    return fig


def _widths(ax: Axes, frame: pd.DataFrame) -> None:
    told = published_fit.ratios()
    style.points(ax, told["width"], told["published"], "published", markersize=6)
    style.line(ax, told["width"], told["read"], "published", label="published, read as counts",
               markers=False)  # fmt: skip
    limits = [published_fit.readings()[n].weights for n in ("liger", "fused")]
    style.reference_line(ax, y=limits[0] / limits[1])
    style.reference_line(ax, y=1.0, label="limits")
    rows = leading(tables.squares(frame))
    if len(rows):
        rows = rows[rows["tokens"] == rows["tokens"].min()]
        for rival in ("eager", "liger"):
            pair = _over(rows, rival, "fused", "hidden_size", "total_mib")
            style.line(ax, pair.index, pair, rival, label=f"{rival} / fused, all gradients")
    ax.set_xlabel("width = hidden = intermediate")
    ax.set_ylabel("ratio of peaks")
    style.title(ax, f"{int(told['tokens'].iloc[0])} tokens, fp32, everything held", fontsize=8.5)
    _powers(ax)


def _tokens(ax: Axes, frame: pd.DataFrame) -> None:
    rows = leading(tables.growing(frame))
    ax.set_xlabel("tokens")
    if rows.empty:
        style.title(ax, "tokens growing: not measured yet", fontsize=8.5)
        return
    first = rows.iloc[0]
    width = Fraction(int(first["intermediate_size"]), int(first["hidden_size"]))
    other = "fused" if "fused" in set(rows["provider"]) else "inductor"
    for rival in dict.fromkeys(rows["provider"]):
        if rival == other or rival.startswith("fused"):
            continue
        peak = _over(rows, rival, other, "tokens", "peak_mib")
        if len(peak) < 2:
            continue
        style.line(ax, peak.index, peak, rival, label=f"{rival} / {other}, over base")
        limit = ledger.of(rival).limit(width) / ledger.of(other).limit(width)
        style.reference_line(ax, y=float(limit))
    sizes = f"{int(first['hidden_size'])}·{int(first['intermediate_size'])}"
    if not ax.lines:
        style.title(ax, "tokens growing: no two rivals here", fontsize=8.5)
        return
    style.title(ax, f"{sizes}, {first['dtype']}, over base", fontsize=8.5)
    _powers(ax)


def _over(rows: pd.DataFrame, rival: str, other: str, by: str, figure: str) -> pd.Series:
    wide = rows.pivot_table(index=by, columns="provider", values=figure)
    if rival not in wide or other not in wide:
        return pd.Series(dtype=float)
    return (wide[rival] / wide[other]).dropna()


def _powers(ax: Axes) -> None:
    """A logarithmic axis that says 4k and not 4,096; every second power where they are many."""
    ax.set_xscale("log", base=2)
    low, high = ax.get_xlim()
    exponents = range(int(np.ceil(np.log2(low))), int(np.floor(np.log2(high))) + 1)
    step = 1 if len(exponents) <= 6 else 2
    ax.xaxis.set_major_locator(FixedLocator([2.0**e for e in exponents[::step]]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(
        FuncFormatter(lambda v, _: f"{v / 1024:g}k" if v >= 1024 else f"{v:g}")
    )


def stack(frame: pd.DataFrame) -> Figure:
    """MiB at the peak against layers, measured (marks) and counted (lines), half precision first.

    Left without gradients from an earlier pass, right with them held.
    """
    rows = leading(tables.stack_rows(frame, None))
    fig, axes = style.new(height=3.1, ncols=2, sharey=True)
    if rows.empty:
        return fig
    dtype = "bfloat16" if "bfloat16" in set(rows["dtype"]) else rows["dtype"].iloc[0]
    for ax, held in zip(axes, (False, True), strict=True):
        part = rows[(rows["dtype"] == dtype) & (rows["held"] == held)]
        for name, group in part.groupby("provider", sort=False):
            counted = group["counted_total_mib"]
            style.line(ax, group["layers"], counted, str(name), markers=False, linewidth=1.0)
            good = group[group["status"] == "ok"]
            if len(good):
                style.points(ax, good["layers"], good["total_peak_mib"], str(name))
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
        _powers(ax)
        ax.set_xlabel("layers")
        style.title(ax, "gradients held" if held else "first pass, no gradients yet")
    axes[0].set_ylabel("MiB at the peak")
    style.legend(fig)
    return fig


def through_a_step_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `through_a_step`."""
    parts = [
        f"{r['provider']} peaks at {number(r['peak_mib'], 3)} MiB, of it saved "
        f"{number(r['peak_saved_mib'], 3)} and temporary {number(r['peak_temporaries_mib'], 3)}"
        for _, r in _told(frame).iterrows()
    ]
    return _alt("Areas of memory held through one step, a panel a rival", parts)


def ratios_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `ratios`."""
    told = published_fit.ratios()
    parts = [
        f"published from {told['published'].iloc[0]:.2f} at width {told['width'].iloc[0]} to "
        f"{told['published'].iloc[-1]:.2f} at {told['width'].iloc[-1]}, on the curve of counts"
    ]
    rows = leading(tables.squares(frame))
    if len(rows):
        pair = _over(rows, "liger", "fused", "hidden_size", "total_mib")
        parts += [f"measured with all gradients {v:.3f} at {int(w)}" for w, v in pair.items()]
    return _alt("Ratio of peak memory against width and against tokens", parts)


def stack_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `stack`."""
    rows = leading(tables.stack_rows(frame))
    if rows.empty:
        return _alt("Peak memory against layers", [])
    deepest = rows[rows["layers"] == rows["layers"].max()]
    parts = [
        f"{r['provider']} in {r['dtype']}, {r['layers']} layers, gradients "
        f"{'held' if r['held'] else 'new'}: {number(r['total_peak_mib'], 4)} MiB on {place(r)}"
        for _, r in deepest.iterrows()
    ]
    return _alt("Peak memory against layers, lines counted, marks measured", parts)


def _alt(what: str, parts: list[str]) -> str:
    return f"{what}. {'; '.join(parts)}." if parts else f"{what}. No rows yet."
