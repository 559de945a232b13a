"""Figures of study 06, each a pure function from the rows' frame to a Figure."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from fusedlib.bench.end_to_end.cases import PRECISIONS
from fusedlib.models.transformer import SIZES
from fusedlib.study import style
from fusedlib.study.display import number, percent
from fusedlib.study.end_to_end import beside
from fusedlib.study.end_to_end.selected import context, experiment, steps, utilisation

style.register("bf16 autocast", first=4)
PARTS = ("forward", "backward", "optimizer")
_SHORT = {"fp32": "fp32", "bf16 autocast": "autocast", "bf16": "bf16"}


def parts(frame: pd.DataFrame) -> Figure:
    """A step's forward, backward and optimizer as lying bars, a panel a precision, eager."""
    rows = steps(frame, context_length=context(frame), mode="eager")
    sizes = _sizes(rows)
    fig, axes = style.new(height=1.3 + 0.2 * max(len(sizes), 3), ncols=3, sharey=True)
    for ax, precision in zip(axes, PRECISIONS, strict=True):
        part = rows[rows["precision"] == precision].set_index("model")
        there = [m for m in sizes if m in part.index]
        at, start = [sizes.index(m) for m in there], [0.0] * len(there)
        for name in PARTS:
            values = [float(part[f"{name}_median_ms"][m]) for m in there]
            style.bars(ax, at, values, name, horizontal=True, start=start, size=0.62)
            start = [low + value for low, value in zip(start, values, strict=True)]
        style.title(ax, precision, fontsize=8.5)
        ax.set_xlabel("ms a step")
    axes[0].set_yticks(range(len(sizes)), sizes)
    axes[0].invert_yaxis()
    style.legend(fig)
    return fig


def ratio(frame: pd.DataFrame) -> Figure:
    """Backward over forward time by size: published, and measured in eager mode and compiled."""
    fig, axes = style.new(height=2.9, ncols=3, sharey=True)
    for precision in ("fp32", "bf16 autocast"):
        told = beside.told("cuda", precision, "eager")
        _by_size(axes[0], {one.model: one.ratio for one in told}, precision)
    style.title(axes[0], "published, eager", fontsize=8.5)
    for ax, compiled in zip(axes[1:], (False, True), strict=True):
        rows = steps(frame, context_length=context(frame))
        rows = rows[rows["mode"].ne("eager") == compiled].drop_duplicates(["model", "precision"])
        for precision, part in rows.groupby("precision", sort=False):
            values = (part["backward_median_ms"] / part["forward_median_ms"]).tolist()
            _by_size(ax, dict(zip(part["model"], values, strict=True)), str(precision))
        style.title(ax, f"measured, {'compiled' if compiled else 'eager'}", fontsize=8.5)
    for ax in axes:
        style.reference_line(ax, y=2.0, label="by FLOPs")
        ax.tick_params(axis="x", labelsize=6.5)
    axes[0].set_ylabel("backward / forward time")
    style.legend(fig)
    return fig


def shares(frame: pd.DataFrame) -> Figure:
    """Achieved share of each card's peak by size, a panel a precision, forward and backward."""
    fig, axes = style.new(height=2.9, ncols=2)
    for ax, precision in zip(axes, ("fp32", "bf16 autocast"), strict=True):
        for mode, line in (("eager", "-"), ("compiled", (0, (1.5, 1.2)))):
            told = {o.model: 100 * o.share for o in beside.told("cuda", precision, mode) if o.share}
            _by_size(ax, told, "published", f"published, {mode}", linestyle=line)
            rows = steps(frame, context_length=context(frame), precision=precision)
            rows = rows[rows["mode"].ne("eager") == (mode != "eager")].drop_duplicates("model")
            ours = {r.model: 100 * s for r in rows.itertuples() if (s := utilisation(r))}
            _by_size(ax, ours, "recorded", f"measured, {mode}", linestyle=line)
        ax.set_ylim(bottom=0)
        style.title(ax, precision, fontsize=8.5)
    axes[0].set_ylabel("% of the card's peak")
    style.legend(fig, ncols=4)
    return fig


def mlps(frame: pd.DataFrame) -> Figure:
    """Eager's forward and backward over those with another MLP, with 95 % intervals."""
    rows = experiment(frame, "mlp")
    rows = rows[(rows["mlp"] != "eager") & rows["both_speedup"].notna()]
    names = [_case(r) for r in rows.drop_duplicates(_KEYS).itertuples()]
    fig, ax = style.new(height=1.3 + 0.2 * max(len(names), 3))
    providers = list(dict.fromkeys(rows["mlp"]))
    for shift, mlp in enumerate(providers):
        part = rows[rows["mlp"] == mlp]
        at = [names.index(_case(r)) + 0.22 * (shift - (len(providers) - 1) / 2)
              for r in part.itertuples()]  # fmt: skip
        values, low, high = (part[f"both_speedup{end}"].to_numpy() for end in ("", "_low", "_high"))
        errors = [(values - low).clip(0), (high - values).clip(0)]
        ax.errorbar(
            values, at, xerr=errors, fmt=style.marker(mlp), color=style.colour(mlp), label=mlp,
            markersize=4.5, markeredgewidth=0.0, elinewidth=1.1, capsize=2.0,
        )  # fmt: skip
    style.reference_line(ax, x=1.0)
    ax.set_yticks(range(len(names)), names, fontsize=7.5)
    ax.set_ylim(max(len(names), 1) - 0.5, -0.5)
    ax.set_xlabel("eager's time / its, forward and backward of the whole model")
    # The default writes 1,000 for one.
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    style.legend(fig)
    return fig


_KEYS = ["model", "context_length", "precision"]


def _case(row: Any) -> str:
    return f"{row.model}·{int(row.context_length)}, {_SHORT[row.precision]}"


def _sizes(rows: pd.DataFrame) -> list[str]:
    there = set(rows["model"])
    return [m for m in SIZES if m in there]


def _by_size(
    ax: Axes, values: dict[str, float], name: str, label: str | None = None, **options: Any
) -> None:
    """A line over the sizes by name; matplotlib keeps their order as they come."""
    if values:
        style.line(ax, list(values), list(values.values()), name, label=label, **options)  # type: ignore[arg-type]


def parts_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `parts`."""
    rows = steps(frame, context_length=context(frame), mode="eager")
    said = [
        f"{r.model} in {r.precision}: "
        + ", ".join(f"{p} {number(getattr(r, f'{p}_median_ms'), 3)}" for p in PARTS)
        for r in rows.itertuples()
    ]
    return _told("Milliseconds of a step by part", said)


def ratio_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `ratio`."""
    rows = steps(frame, context_length=context(frame))
    said = [
        f"{r.model} in {r.precision}, {r.mode}: "
        f"{number(r.backward_median_ms / r.forward_median_ms, 3)}"
        for r in rows.itertuples()
    ]
    return _told("Backward over forward time by size; by FLOPs it is two", said)


def shares_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `shares`."""
    rows = steps(frame, context_length=context(frame))
    said = [
        f"{r.model} in {r.precision}, {r.mode}: {percent(share)}"
        for r in rows.itertuples() if (share := utilisation(r)) is not None
    ]  # fmt: skip
    return _told("Share of the card's peak by size, published and measured", said)


def mlps_alt(frame: pd.DataFrame) -> str:
    """Alternative text of `mlps`."""
    rows = experiment(frame, "mlp")
    rows = rows[rows["mlp"].ne("eager") & rows["both_speedup"].notna()]
    said = [f"{_case(r)}, {r.mlp}: {number(r.both_speedup, 3)}" for r in rows.itertuples()]
    return _told("Eager's time over that with another MLP, forward and backward", said)


def _told(what: str, said: list[str]) -> str:
    return f"{what}. {'; '.join(said) or 'No rows yet'}."
