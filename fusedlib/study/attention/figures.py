"""Figures of study 07, each a pure function from the rows' frame to a Figure."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from fusedlib.bench.attention import held
from fusedlib.bench.attention.cases import problem_of
from fusedlib.bench.attention.problem import AttentionProblem
from fusedlib.bench.attention.ways import WAYS
from fusedlib.study import style
from fusedlib.study.attention.selected import (
    FLASH,
    FORMATS,
    MIB,
    PLAIN,
    at_width,
    counted,
    roof,
    work,
)
from fusedlib.study.display import number
from fusedlib.study.selection import place

_PARTS = {"kept": "kept_mib", "peak": "peak_mib"}


def times(frame: pd.DataFrame) -> Figure:
    """Forward and backward together against the context, a line a way, a panel a format."""
    found = at_width(frame)
    fig, axes, formats = _panels(found, 2.9)
    for ax, kind in zip(axes, formats, strict=False):
        part = found[found["format"] == kind]
        for name, line in part.groupby("provider", sort=False):
            style.line(
                ax, line["context_length"], line["median_ms"], str(name), line["median_low_ms"],
                line["median_high_ms"],
            )  # fmt: skip
        _contexts(ax, part["context_length"])
        _decades(ax)
        style.title(ax, f"{kind}, width {int(part['head_dim'].iloc[0])}")
    axes[0].set_ylabel("forward+backward, ms")
    style.legend(fig, ncols=7)
    return fig


def memory(frame: pd.DataFrame, card_mib: float | None) -> Figure:
    """MiB kept for backward and held at most against the context, counted (lines) and measured.

    A panel a format; the dashed grey line is all the memory there is.
    """
    found = at_width(frame)
    fig, axes, formats = _panels(found, 3.1, sharey=True)
    for ax, kind in zip(axes, formats, strict=False):
        part = found[found["format"] == kind]
        _counted(ax, part, card_mib)
        plain = part[part["provider"] == PLAIN]
        style.points(ax, plain["context_length"], plain["kept_mib"], PLAIN, label="plain, kept")
        style.points(
            ax, plain["context_length"], plain["peak_mib"], PLAIN, label="plain, peak",
            markerfacecolor="none", markeredgewidth=1.0,
        )  # fmt: skip
        for name in dict.fromkeys(part["provider"]):
            if WAYS[name].fused:
                line = part[part["provider"] == name]
                style.points(
                    ax, line["context_length"], line["kept_mib"], name, label=f"{name}, kept"
                )
        _decades(ax)
        style.title(ax, f"{kind}, width {int(part['head_dim'].iloc[0])}")
    axes[0].set_ylabel("MiB over the operands")
    style.legend(fig, ncols=4)
    return fig


def _counted(ax: Axes, part: pd.DataFrame, card_mib: float | None) -> None:
    """Lines of the formulas, on to where plain attention's peak meets the memory there is."""
    first = problem_of(part.iloc[0])
    width, batch, dtype = first.head_dim, first.batch_size, first.dtype
    last, device = int(part["context_length"].max()), part["device"].iloc[0]
    if card_mib is not None:
        last = max(last, held.longest(card_mib * MIB, width, batch, dtype, device))
        style.reference_line(ax, y=card_mib, label="all there is")
    contexts = np.unique(np.geomspace(part["context_length"].min(), last, 60).astype(int))
    problems = [AttentionProblem(int(n), width, batch, dtype) for n in contexts]
    for name, title in ((PLAIN, "plain"), (FLASH, "without T × T")):
        kept = [sum((held.kept(name, p) or {}).values()) / MIB for p in problems]
        style.line(
            ax, contexts, kept, name, markers=False, linewidth=1.0, label=f"{title}, kept, counted"
        )
    peak = [held.plain_peak(p, device) / MIB for p in problems]
    style.line(
        ax, contexts, peak, PLAIN, markers=False, linewidth=1.0, linestyle=":",
        label="plain, peak, counted",
    )  # fmt: skip
    _contexts(ax, pd.Series(contexts))


def roofline(frame: pd.DataFrame) -> Figure:
    """FLOP/s of the products against FLOPs a byte, forward and backward, under the measured roof.

    A line a way whose traffic was counted, a mark a context; the largest mark is the longest. What
    stays in a cache may lie above the roof, which is that of memory.
    """
    found = at_width(frame)
    found = found[found["provider"].map(counted).astype(bool)]
    fig, axes, formats = _panels(found, 2.9)
    for ax, kind in zip(axes, formats, strict=False):
        part = found[found["format"] == kind]
        totals = np.array([work(row) for _, row in part.iterrows()], dtype=float)
        intensity = totals[:, 0] / totals[:, 1]
        rate = totals[:, 0] / part["median_ms"].to_numpy(float) / 1e9
        for name in dict.fromkeys(part["provider"]):
            at = (part["provider"] == name).to_numpy()
            style.line(ax, intensity[at], rate[at], name, linewidth=0.8, alpha=0.9)
            ax.plot(
                intensity[at][-1:], rate[at][-1:], color=style.colour(name),
                marker=style.marker(name), markersize=8,
            )  # fmt: skip
        if ceiling := roof(frame, kind):
            x = np.geomspace(intensity.min() / 2, intensity.max() * 2, 200)
            y = np.minimum(ceiling[0], x * ceiling[1]) / 1e12
            style.reference_line(
                ax, x=x.tolist(), y=y.tolist(), label="measured roof", color=style.INK
            )
        ax.set_xscale("log")
        _decades(ax)
        ax.set_xlabel("FLOPs a byte, counted")
        style.title(ax, f"{kind}, width {int(part['head_dim'].iloc[0])}")
    axes[0].set_ylabel("TFLOP/s of the products")
    style.legend(fig, ncols=8)
    return fig


def _panels(
    found: pd.DataFrame, height: float, **options: bool
) -> tuple[Figure, list[Axes], list[str]]:
    """A panel a format that was measured, one empty one where none was."""
    formats = [kind for kind in FORMATS if kind in set(found.get("format", ()))]
    fig, axes = style.new(height=height, ncols=max(len(formats), 1), squeeze=False, **options)
    return fig, list(axes[0]), formats


def _contexts(ax: Axes, contexts: pd.Series) -> None:
    """A logarithmic axis of contexts that says 4k for 4,096, every other one where they crowd."""
    ax.set_xscale("log", base=2)
    powers = range(
        int(np.floor(np.log2(contexts.min()))), int(np.ceil(np.log2(contexts.max()))) + 1
    )
    ax.xaxis.set_major_locator(FixedLocator([2.0**n for n in powers[:: 1 + (len(powers) > 6)]]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(
        FuncFormatter(lambda v, _: f"{v / 1024:g}k" if v >= 1024 else f"{v:g}")
    )
    ax.set_xlabel("context T")


def _decades(ax: Axes) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def times_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `times`."""
    return _alt("Time against context, a line a way, both axes logarithmic", frame, "median_ms")


def memory_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `memory`."""
    parts = [_ends(frame, column, f"{name} in MiB") for name, column in _PARTS.items()]
    what = "Memory against context, lines counted and marks measured, both axes logarithmic"
    return f"{what}. {' '.join(p for p in parts if p) or 'No rows yet.'}"


def roofline_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `roofline`."""
    return _alt("Rate of the products against FLOPs a byte, under the roof", frame, "median_ms")


def _alt(what: str, frame: pd.DataFrame, column: str) -> str:
    return f"{what}. {_ends(frame, column, 'in ms') or 'No rows yet.'}"


def _ends(frame: pd.DataFrame, column: str, what: str) -> str:
    """Of each way the first and the last value, for alternative texts."""
    found = at_width(frame)
    found = found[found[column].notna()] if len(found) else found
    parts = []
    for (kind, name), line in found.groupby(["format", "provider"], sort=False):
        first, last = line.iloc[0], line.iloc[-1]
        parts.append(
            f"{name} {kind} from {number(first[column], 3)} at {first['context_length']:,} to "
            f"{number(last[column], 3)} at {last['context_length']:,}"
        )
    return f"On {place(found.iloc[0])}, {what}: {'; '.join(parts)}." if parts else ""
