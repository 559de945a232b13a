"""Figures of study 03, each a pure function from the rows' frame to a Figure."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from fusedlib.study import style
from fusedlib.study.kernels import rows as select
from fusedlib.study.kernels.rows import LAUNCHES, PRODUCTS, PROVIDERS, compared, versus
from fusedlib.study.kernels.tables import published_factors
from fusedlib.study.selection import leading

MOST_COLUMNS = 2
# Factors that lie further apart are drawn on a logarithmic axis.
MOST_LINEAR = 3


def speedup_by_width(frame: pd.DataFrame, way: str = "forward+backward") -> Figure:
    """Eager's time over each rival's against the width, a panel a format and launch."""
    rows = leading_rows(frame)
    found = versus(select.sweep(rows[rows["way"] == way]), "eager")
    panels = list(dict.fromkeys(zip(found["format"], found["launch"], strict=True)))
    fig, axes = _panels(panels, height=2.3)
    for ax, (kind, launch) in zip(axes, panels, strict=False):
        part = found[(found["format"] == kind) & (found["launch"] == launch)]
        for provider in _present(part):
            line = part[part["provider"] == provider].sort_values("hidden_size")
            style.line(
                ax, line["hidden_size"], line["ratio"], provider, line["low"], line["high"],
                label=_named(provider),
            )  # fmt: skip
        style.title(ax, f"{kind}, {LAUNCHES[launch]}", fontsize=8.5)
        _log_widths(ax, part["hidden_size"])
        style.reference_line(ax, y=1.0)
        if len(part) and part["ratio"].max() > MOST_LINEAR * part["ratio"].min():
            _log_factors(ax)
        ax.set_xlabel("D = F")
    axes[0].set_ylabel("eager's time / time")
    style.legend(fig)
    return fig


def published_and_measured(frame: pd.DataFrame) -> Figure:
    """Liger's time over fused's against the width: published, and measured by format and launch."""
    rows = leading_rows(frame)
    found = versus(select.sweep(rows), select.REFERENCE)
    found = found[found["provider"] == select.SUBJECT]
    ways = ["forward", "backward"]
    fig, axes = _panels(ways, height=2.6)
    told = published_factors()
    fewest = min((tokens for _, tokens, _ in told), default=0)
    for ax, way in zip(axes, ways, strict=True):
        points = {d: v for (w, b, d), v in told.items() if w == way and b == fewest}
        style.line(
            ax,
            list(points),
            list(points.values()),
            "published",
            label="published (L4)",
            color=style.INK,
        )
        part = found[found["way"] == way]
        for (kind, launch), line in part.groupby(["format", "launch"], sort=True):
            ordered = line.sort_values("hidden_size")
            style.line(
                ax, ordered["hidden_size"], ordered["ratio"], kind.lower(), ordered["low"],
                ordered["high"], label=f"measured, {kind}, {LAUNCHES[launch]}",
                linestyle="-" if launch == "python" else (0, (5, 1.5)),
            )  # fmt: skip
        style.title(ax, way, fontsize=8.5)
        _log_widths(ax, pd.Series(sorted(points)))
        style.reference_line(ax, y=1.0)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("D = F")
    axes[0].set_ylabel("Liger's time / fused's time")
    style.legend(fig, ncols=3)
    return fig


def roofline(frame: pd.DataFrame, way: str = "forward+backward") -> Figure:
    """Rates against FLOPs a compulsory byte under the measured roof, a panel a format."""
    rows = leading_rows(frame)
    found = device_times(rows[rows["way"] == way])
    roofs = select.ceilings(frame)
    formats = [f for f in ("fp32", "TF32", "bf16", "fp16") if f in set(found["format"])]
    fig, axes = _panels(formats, height=2.8)
    for ax, kind in zip(axes, formats, strict=False):
        part = found[found["format"] == kind]
        intensity = part["flops"] / part["compulsory_bytes"]
        rates = part["flops"] / part["median_ms"] / 1e9
        for provider in _present(part):
            at = part["provider"] == provider
            style.points(
                ax, intensity[at].tolist(), rates[at].tolist(), provider, label=_named(provider),
                alpha=0.8,
            )  # fmt: skip
        ax.set_xscale("log")
        _log_factors(ax)
        roof = roofs[(roofs["machine"] == part["machine"].iloc[0]) & (roofs["format"] == kind)]
        if len(roof):
            x = np.geomspace(intensity.min() / 4, intensity.max() * 4, 200)
            top = roof["flops_per_s"].iloc[0]
            y = np.minimum(top, x * roof["bytes_per_s"].iloc[0]) / 1e12
            style.reference_line(
                ax, x=x.tolist(), y=y.tolist(), label="measured roof", color=style.INK
            )
        style.title(ax, kind, fontsize=8.5)
        ax.set_xlabel("FLOPs / compulsory byte")
        ax.xaxis.set_minor_formatter(NullFormatter())
        # At least a decade, so that small differences are not drawn large.
        top_shown = max(ax.get_ylim()[1], rates.max() * 1.3)
        ax.set_ylim(min(rates.min() / 2, top_shown / 10), top_shown)
    axes[0].set_ylabel("TFLOP/s")
    style.legend(fig)
    return fig


def over_products(frame: pd.DataFrame) -> Figure:
    """Each rival's time over that of the plain products at the shapes of language models."""
    rows = leading_rows(frame)
    found = device_times(select.shapes(rows), "python")
    found = versus(found, PRODUCTS)
    ways = ["forward", "forward+backward"]
    fig, axes = _panels(ways, height=2.9, sharey=True)
    for ax, way in zip(axes, ways, strict=True):
        part = found[found["way"] == way]
        shapes = list(dict.fromkeys(part["shape"]))
        present = _present(part)
        for place, provider in enumerate(present):
            told = part[part["provider"] == provider].set_index("shape").reindex(shapes)
            shift = (place - (len(present) - 1) / 2) * 0.7 / max(len(present), 1)
            style.points(
                ax, (np.arange(len(shapes)) + shift).tolist(), 1 / told["ratio"], provider,
                1 / told["high"], 1 / told["low"], label=_named(provider),
            )  # fmt: skip
        ax.set_xticks(range(len(shapes)), [s.replace("·", "·\n", 1) for s in shapes], fontsize=6.5)
        style.reference_line(ax, y=1.0)
        style.title(ax, way, fontsize=8.5)
    axes[0].set_ylabel("time / the products alone")
    style.legend(fig)
    return fig


def device_times(rows: pd.DataFrame, first: str = "graph") -> pd.DataFrame:
    """Rows of one launch for each problem: `first`, by default the graph, where it was timed."""
    if rows.empty:
        return rows
    keys = ["machine", "format", "shape", "way"]
    has = rows.groupby(keys)["launch"].transform(lambda launches: first in set(launches))
    return rows[(rows["launch"] == first) | ~has]


def leading_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """`compared` rows of the machine that the headline speaks of."""
    return leading(compared(frame))


def _present(rows: pd.DataFrame) -> list[str]:
    return [p for p in PROVIDERS if p in set(rows["provider"])]


def _named(provider: str) -> str:
    return "plain products" if provider == PRODUCTS else provider


def _panels(panels: Sequence[object], height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    columns = min(max(len(panels), 1), MOST_COLUMNS)
    lines = -(-max(len(panels), 1) // columns)
    fig, axes = style.new(
        height=height * lines + 0.3, ncols=columns, nrows=lines, squeeze=False, **options
    )
    flat = list(axes.flat)
    for unused in flat[max(len(panels), 1) :]:
        unused.set_axis_off()
    return fig, flat


def _log_factors(ax: Axes) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    ax.yaxis.set_minor_formatter(
        FuncFormatter(lambda v, _: f"{v:g}" if f"{v:e}"[0] in "25" else "")
    )
    ax.tick_params(axis="y", which="minor", labelsize=7)


def _log_widths(ax: Axes, widths: pd.Series) -> None:
    if widths.empty:
        return
    ax.set_xscale("log", base=2)
    ticks = sorted(set(widths))
    ax.set_xticks(ticks, [f"{int(w):d}" for w in ticks], fontsize=6.5)
    ax.xaxis.set_minor_formatter(NullFormatter())


def ratios_alt(frame: pd.DataFrame, other: str, provider: str | None = None) -> str:
    """Alternative text of the ratio figures: median over the widths, by rival, format, launch."""
    found = versus(select.sweep(leading_rows(frame)), other)
    if provider is not None:
        found = found[found["provider"] == provider]
    parts = [
        f"{name}, {kind}, {LAUNCHES[launch]}, {way}: {group['ratio'].median():.2f}"
        for (name, kind, launch, way), group in found.groupby(
            ["provider", "format", "launch", "way"], sort=True
        )
    ]
    return _alt(f"Time of {other} over that of each line, median over the widths", parts)


def roofline_alt(frame: pd.DataFrame, way: str = "forward+backward") -> str:
    """Alternative text of `roofline`."""
    rows = leading_rows(frame)
    found = device_times(rows[rows["way"] == way])
    share = found["roof_ms"] / found["median_ms"]
    parts = [
        f"{name}, {kind}: {share[group.index].min():.2f} to {share[group.index].max():.2f}"
        for (name, kind), group in found.groupby(["provider", "format"], sort=True)
    ]
    return _alt("Rate against intensity under the measured roof; share of the roof reached", parts)


def over_products_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `over_products`."""
    rows = device_times(select.shapes(leading_rows(frame)), "python")
    parts = [
        f"{r.provider} {r.way} at {r.shape}: {1 / r.ratio:.3f}"
        for r in versus(rows, PRODUCTS).itertuples()
        if r.way in ("forward", "forward+backward")
    ]
    return _alt("Points: time over that of the plain products", parts)


def _alt(what: str, parts: list[str]) -> str:
    return f"{what}. {'; '.join(parts)}." if parts else f"{what}. No rows yet."
