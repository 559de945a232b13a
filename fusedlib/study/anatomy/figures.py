"""Figures of study 05, each a pure function from the rows' frame to a Figure."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from fusedlib.study import style
from fusedlib.study.anatomy.selected import DIRECTIONS, STEPS, chain, experiment, panels
from fusedlib.study.display import number

WRONG, RIGHT = style.PALETTE[1], style.PALETTE[0]
_TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10)


def waterfall(frame: pd.DataFrame) -> Figure:
    """From the claimed factor to the true one: a bar from one step's factor to the next one's."""
    chosen = panels(frame)
    titles = list(STEPS.values())
    fig, axes = style.new(
        height=1.0 + 2.2 * len(chosen) / 2, ncols=2, nrows=len(chosen) // 2, squeeze=False,
        sharey=True, sharex=True,
    )  # fmt: skip
    for ax, (tokens, width, direction) in zip(axes.flat, chosen, strict=True):
        _bars(ax, chain(frame, tokens, width, direction), titles)
        style.title(ax, f"{tokens} × {width}, {DIRECTIONS[direction]}", fontsize=8.5)
    for ax in axes[-1]:
        ax.set_xlabel("Liger's time / the other side's")
    low, high = _range(frame, chosen)
    axes[0][0].set_xscale("log")
    axes[0][0].set_xlim(low, high)
    axes[0][0].set_ylim(len(titles) - 0.4, -0.6)
    for ax in axes.flat:
        ax.xaxis.set_major_locator(FixedLocator([t for t in _TICKS if low <= t <= high]))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
    axes[0][0].set_yticks(range(len(titles)), titles, fontsize=7.5)
    style.legend(fig)
    return fig


def _range(frame: pd.DataFrame, chosen: list[tuple[int, int, str]]) -> tuple[float, float]:
    factors = [f for at in chosen for f in chain(frame, *at)["factor"]]
    return 0.75 * min([*factors, 0.9]), 3.4 * max([*factors, 1.1])


def _bars(ax: Axes, rows: pd.DataFrame, titles: list[str]) -> None:
    style.reference_line(ax, x=1.0)
    before = 1.0
    for row in rows.itertuples():
        at, after = titles.index(row.title), float(row.factor)
        colour = WRONG if row.wrong else RIGHT
        label = "wrong result" if row.wrong else "right result"
        style.bars(
            ax, [at], [after - before], label, start=before, horizontal=True, size=0.62,
            color=to_rgba(colour, 0.3 if row.wrong else 1.0), edgecolor=colour, linewidth=0.9,
        )  # fmt: skip
        ax.plot([after, after], [at - 0.38, at + 0.38], color=style.INK, linewidth=1.4)
        said = f"{number(after, 3)}{' wrong' if row.wrong else ''}"
        style.text(ax, max(after, before) * 1.06, at, said, va="center", fontsize=7.0)
        before = after


def errors(frame: pd.DataFrame) -> Figure:
    """Error of the published kernel's y against width, a line a block."""
    rows = experiment(frame, "correctness")
    rows = rows[(rows["implementation"] == "published, emulated") & (rows["inputs"] == "random")]
    fig, ax = style.new(height=2.5)
    for (block, group), name in zip(rows.groupby("block"), ("liger", "eager"), strict=False):
        group = group.sort_values("hidden_size")
        style.line(
            ax, group["hidden_size"].astype(float), group["y_error"].astype(float), name,
            label=f"published kernel (wrong), block of {int(block)}",
        )  # fmt: skip
    if len(rows):
        widths = sorted(rows["hidden_size"].astype(int).unique())
        ax.set_xscale("log", base=2)
        ax.set_xticks(widths, [str(w) for w in widths])
    style.reference_line(ax, y=1.0)
    ax.set_ylim(-0.05, 1.25)
    ax.set_xlabel("width D of the square problem")
    ax.set_ylabel("‖y − reference‖ / ‖reference‖")
    style.legend(ax, loc="center right")
    return fig


def waterfall_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `waterfall`."""
    parts = []
    for tokens, width, direction in panels(frame):
        rows = chain(frame, tokens, width, direction)
        told = ", ".join(
            f"{r.title} {number(r.factor, 3)}{' (wrong)' if r.wrong else ''}"
            for r in rows.itertuples()
        )
        parts.append(f"{tokens} × {width}, {DIRECTIONS[direction]}: {told or 'nothing yet'}")
    return f"Bars from one factor over Liger to the next, a row a step. {'; '.join(parts)}."


def errors_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `errors`."""
    rows = experiment(frame, "correctness")
    rows = rows[(rows["implementation"] == "published, emulated") & (rows["inputs"] == "random")]
    parts = [
        f"block {int(r.block)}, width {int(r.hidden_size)}: {number(r.y_error, 3)}"
        for r in rows.sort_values(["block", "hidden_size"]).itertuples()
    ]
    return f"Error of y against width for the published kernel. {'; '.join(parts) or 'No rows'}."
