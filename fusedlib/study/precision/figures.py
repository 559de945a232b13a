"""Figures of study 02, precision and accumulation: pure functions from rows to a Figure."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fusedlib.bench import formats
from fusedlib.study import style
from fusedlib.study.precision.tables import FORMAT_ORDER, METHOD_ORDER, source

FLOOR = 1e-11  # an error of zero is drawn here, at the lower edge
TITLES = {"constant": "0.01 each time", "uniform": "uniform in [0, 1)", "normal": "standard normal"}
# TF32 and fp16 have the same precision: hollow markers show where one lies on the other.
HOLLOW: dict[str, Any] = {"markerfacecolor": "none", "markeredgewidth": 1.0, "markersize": 6.5}
SOLID, DOTTED = "-", (0, (1, 1.2))

style.register("sequential", "pairwise", "kahan")
style.register("in the tensor core", "promoted", "cuBLAS", "IEEE fp32")


def _empty(ax: Axes, text: str = "no rows yet") -> None:
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes, color=style.INK)


def _logarithmic(ax: Axes, x_label: str, base: int = 10) -> None:
    ax.set_xscale("log", base=base)
    ax.set_yscale("log")
    ax.set_xlabel(x_label)


def _curve(ax: Axes, rows: pd.DataFrame, x: str, name: str, label: str, **options: Any) -> None:
    """Median with the range over the seeds; zero errors sit on the floor."""
    ordered = rows.sort_values(x)
    low, middle, high = (
        ordered[f"relative_error{end}"].clip(lower=FLOOR) for end in ("_low", "", "_high")
    )
    style.line(ax, ordered[x], middle, name, low, high, label=label, **options)


def _theory(ax: Axes, x: np.ndarray, y: np.ndarray, **options: Any) -> None:
    """A bound, drawn as far as it stays below 1."""
    style.reference_line(ax, x=list(x[y <= 1]), y=list(y[y <= 1]), **options)


def _panels(keys: Sequence[str], height: float) -> tuple[Figure, Sequence[Axes]]:
    """A panel for each key side by side with one scale; a note where there is none."""
    fig, axes = style.new(height=height, ncols=max(len(keys), 1), sharey=True, squeeze=False)
    if not keys:
        _empty(axes[0][0])
    return fig, axes[0]


def _distributions(rows: pd.DataFrame) -> list[str]:
    """Distributions of the rows, in the order of `TITLES`."""
    return [d for d in TITLES if len(rows) and d in set(rows["distribution"])]


def sums_by_format(frame: pd.DataFrame) -> Figure:
    """Error of adding one by one against n: a panel a distribution, a line a format, nu and
    sqrt(n)u behind.
    """
    rows = source(frame, "growth")
    distributions = _distributions(rows)
    fig, axes = _panels(distributions, height=3.3)
    for ax, distribution in zip(axes, distributions, strict=False):
        _logarithmic(ax, "terms $n$")
        style.title(ax, TITLES[distribution])
        part = rows[(rows["distribution"] == distribution) & (rows["method"] == "sequential")]
        x = np.geomspace(part["n_terms"].min(), part["n_terms"].max(), 60)
        for dtype in (d for d in FORMAT_ORDER if d in set(part["dtype"]) and d != "tf32"):
            u = formats.get(dtype).unit_roundoff
            ink = {"color": style.colour(dtype), "alpha": 0.75, "linewidth": 0.8}
            _theory(ax, x, x * u, **ink)
            _theory(ax, x, np.sqrt(x) * u, linestyle=DOTTED, **ink)
        for dtype in (d for d in FORMAT_ORDER if d in set(part["dtype"])):
            extra = HOLLOW if dtype == "tf32" else {}
            _curve(ax, part[part["dtype"] == dtype], "n_terms", dtype, dtype, **extra)
    bounds = {"$nu$": (0, (4, 2)), r"$\sqrt{n}\,u$": DOTTED} if distributions else {}
    for label, linestyle in bounds.items():
        axes[0].plot([], [], color=style.MUTED, linestyle=linestyle, linewidth=1, label=label)
    axes[0].set_ylabel(r"error / $\sum|x_i|$")
    axes[0].set_ylim(FLOOR * 10, 3)
    style.legend(fig, ncols=6)
    return fig


def sums_by_method(frame: pd.DataFrame, distribution: str = "uniform") -> Figure:
    """Error against n of each method: a panel a format, with nu, log2(n)u and u."""
    rows = source(frame, "growth")
    rows = rows[rows["distribution"] == distribution] if len(rows) else rows
    dtypes = [d for d in FORMAT_ORDER if len(rows) and d in set(rows["dtype"]) and d != "tf32"]
    fig, axes = _panels(dtypes, height=3.1)
    bounds: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "$nu$": lambda n: n,
        r"$u\log_2 n$": lambda n: np.log2(n),
        "$u$": lambda n: np.ones_like(n),
    }
    dashes = ((0, (4, 2)), (0, (4, 1.5, 1, 1.5)), DOTTED)
    for ax, dtype in zip(axes, dtypes, strict=False):
        _logarithmic(ax, "terms $n$")
        part = rows[rows["dtype"] == dtype]
        u = formats.get(dtype).unit_roundoff
        style.title(ax, f"{dtype}, $u = 2^{{{int(np.log2(u))}}}$")
        x = np.geomspace(part["n_terms"].min(), part["n_terms"].max(), 60)
        for (label, bound), linestyle in zip(bounds.items(), dashes, strict=True):
            _theory(ax, x, bound(x) * u, label=label, linestyle=linestyle)
        for method in (m for m in METHOD_ORDER if m in set(part["method"])):
            _curve(ax, part[part["method"] == method], "n_terms", method, method)
    axes[0].set_ylabel(r"error / $\sum|x_i|$")
    axes[0].set_ylim(1e-9, 3)
    style.legend(fig, ncols=6)
    return fig


def dots(frame: pd.DataFrame) -> Figure:
    """Error of dot products against K: solid with an fp32 accumulator, dotted with the inputs' own
    format.
    """
    rows = source(frame, "dots")
    names = _distributions(rows)
    fig, axes = _panels(names, height=3.4)
    for ax, distribution in zip(axes, names, strict=False):
        _logarithmic(ax, "length $K$", base=2)
        style.title(ax, TITLES[distribution])
        part = rows[rows["distribution"] == distribution]
        x = np.geomspace(part["k"].min(), part["k"].max(), 60)
        u = formats.get("fp32").unit_roundoff
        _theory(ax, x, x * u, label="$Ku$, fp32")
        _theory(ax, x, np.sqrt(x) * u, label=r"$\sqrt{K}\,u$, fp32", linestyle=DOTTED)
        for dtype in (d for d in FORMAT_ORDER if d in set(part["dtype"])):
            for accumulator, linestyle in (("fp32", SOLID), (dtype, DOTTED)):
                some = part[(part["dtype"] == dtype) & (part["accumulator"] == accumulator)]
                if len(some) and not (dtype == "fp32" and linestyle is DOTTED):
                    label = f"{dtype} into {accumulator}"
                    extra = HOLLOW if dtype == "tf32" else {}
                    _curve(ax, some, "k", dtype, label, linestyle=linestyle, **extra)
    axes[0].set_ylabel(r"error / $\sum|x_iy_i|$")
    axes[0].set_ylim(1e-9, 3)
    style.legend(fig, ncols=4)
    return fig


def tensor_core(frame: pd.DataFrame, dtype: str = "fp16") -> Figure:
    """Error of accumulation against K: measured ways in colour, the two models in grey."""
    rows = _accumulated(frame, dtype=dtype)
    names = _distributions(rows)
    fig, axes = _panels(names, height=3.3)
    for ax, distribution in zip(axes, names, strict=False):
        _logarithmic(ax, "length $K$", base=2)
        style.title(ax, TITLES[distribution])
        part = rows[rows["distribution"] == distribution]
        _ways(ax, part.assign(relative_error=part["relative_error"].clip(lower=FLOOR)))
    axes[0].set_ylabel("error  ‖C′ − C‖ / ‖C‖")
    style.legend(fig, ncols=3)
    return fig


def bias(frame: pd.DataFrame, distribution: str = "uniform") -> Figure:
    """Share of elements whose result is too small, against K: a panel an operand format."""
    rows = _accumulated(frame, distribution=distribution)
    dtypes = list(dict.fromkeys(rows["dtype"])) if len(rows) else []
    fig, axes = _panels(dtypes, height=2.9)
    for ax, dtype in zip(axes, dtypes, strict=False):
        ax.set_xscale("log", base=2)
        ax.set_xlabel("length $K$")
        style.title(ax, f"{dtype} operands")
        style.reference_line(ax, y=0.5, linestyle=SOLID, linewidth=0.8)
        _ways(ax, rows[rows["dtype"] == dtype], "toward_zero_share")
    axes[0].set_ylabel("share too small in magnitude")
    axes[0].set_ylim(0, 1.05)
    style.legend(fig, ncols=3)
    return fig


def _accumulated(frame: pd.DataFrame, **wanted: str) -> pd.DataFrame:
    """Rows of accumulation with these fields: measured on a GPU, and the models of it."""
    parts = [source(frame, "tensor_core", device) for device in ("cuda", "cpu")]
    rows = pd.concat([part for part in parts if len(part)] or parts[:1])
    for field, value in wanted.items():
        rows = rows[rows[field] == value] if len(rows) else rows
    return rows


def _ways(ax: Axes, rows: pd.DataFrame, figure: str = "relative_error") -> None:
    """A line for each way of accumulating, a grey one for a model of it."""
    for provider, group in rows.groupby("provider", sort=False):
        ordered = group.sort_values("k")
        x, y = list(ordered["k"]), list(ordered[figure])
        if str(provider).startswith("model"):
            linestyle = DOTTED if "chop" in str(provider) else (0, (4, 2))
            style.reference_line(ax, x=x, y=y, label=str(provider), linestyle=linestyle)
        else:
            style.line(ax, x, y, str(provider))
