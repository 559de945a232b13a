"""Study 07's tables. Every function takes the frame of `results.load("07_attention")`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

from fusedlib.bench.attention.cases import problem_of
from fusedlib.bench.attention.problem import DIRECTIONS
from fusedlib.bench.attention.ways import WAYS
from fusedlib.study import published
from fusedlib.study.attention.selected import (
    INDUCTOR,
    PLAIN,
    at_width,
    counted,
    everywhere,
    longest,
    roof,
    rows,
    work,
)
from fusedlib.study.display import MISSING, number, percent
from fusedlib.study.selection import place

_SHAPE = ["head_dim", "context_length"]
_TIMES = {"forward": "forward_median_ms", "backward": "backward_median_ms", "both": "median_ms"}
TITLES = {PLAIN: "eager", INDUCTOR: "compiled"}


def empty(*columns: str, index: str = "way") -> pd.DataFrame:
    """A table with its header alone, for what has not been measured."""
    return pd.DataFrame(columns=list(columns), index=pd.Index([], name=index))


def course(frame: pd.DataFrame) -> pd.DataFrame:
    """The course's table in fp32, eager and compiled: times, memory before backward and at most."""
    found = rows(frame, "course", None)
    found = found[(found["format"] == "fp32") & found["provider"].isin(list(TITLES))]
    return _by_shape(found, ("forward", "backward"), _course_memory, TITLES)


def published_grid(frame: pd.DataFrame) -> pd.DataFrame:
    """The grid of the published script: its times and its five columns of memory."""
    found = rows(frame, "published", None)
    return _by_shape(found, tuple(_TIMES), _published_memory, [PLAIN])


def _by_shape(
    found: pd.DataFrame, directions: Iterable[str],
    memory: Callable[[pd.Series | None], dict[str, str]], held_by: Iterable[str],
) -> pd.DataFrame:  # fmt: skip
    """A row a width and context; times of plain and compiled, then the memory of `held_by`."""
    if found.empty:
        return empty("forward, ms", "backward, ms", index="context")
    lines: dict[tuple[int, int], dict[tuple[str, str], str]] = {}
    for (width, context), part in found.groupby(_SHAPE):
        line: dict[tuple[str, str], str] = {}
        by_way = {row["provider"]: row for _, row in part.iterrows()}
        for name, title in TITLES.items():
            for direction in directions:
                row = by_way.get(name)
                line[f"{title}, ms", direction] = cell(row, _TIMES[direction])
        for name in held_by:
            for title, value in memory(by_way.get(name)).items():
                line[f"{TITLES[name]}, MiB", title] = value
        lines[int(width), int(context)] = line
    return _table(lines, "width", "context")


def _table(lines: Mapping[Any, Mapping[tuple[str, str], str]], *index: str) -> pd.DataFrame:
    """Rows by two keys, columns by group and name."""
    table = pd.DataFrame(list(lines.values()))
    table.columns = pd.MultiIndex.from_tuples(list(table.columns))
    table.index = pd.MultiIndex.from_tuples(list(lines), names=list(index))
    return table


def _course_memory(row: pd.Series | None) -> dict[str, str]:
    return {
        "before backward": cell(row, "operands_mib", "after_forward_mib", digits=4),
        "peak": cell(row, "operands_mib", "peak_mib", digits=4),
    }


def _published_memory(row: pd.Series | None) -> dict[str, str]:
    """Its columns, read as: the operands; with the forward's; at most; the two differences."""
    back = MISSING
    if row is not None and pd.notna(row["peak_mib"]):
        back = number(float(row["peak_mib"] - row["after_forward_mib"]), 3)
    return {
        "model": cell(row, "operands_mib"),
        "model+fwd": cell(row, "operands_mib", "after_forward_mib"),
        "model+fwd+back": cell(row, "operands_mib", "peak_mib"),
        "fwd": cell(row, "after_forward_mib"), "back": back,
    }  # fmt: skip


def cell(row: pd.Series | None, *columns: str, digits: int = 3) -> str:
    """The sum of some columns, the status of a row without figures, a dash where there is none."""
    if row is None:
        return MISSING
    if row["status"] != "ok":
        return str(row["status"])
    total = sum(float(row[name]) for name in columns)
    return MISSING if pd.isna(total) else number(total, digits)


def backends(frame: pd.DataFrame) -> pd.DataFrame:
    """Forward and backward together, ms, of every way against the context, at one width."""
    found = at_width(frame, None)
    if found.empty:
        return empty(*WAYS, index="context")
    shown = [name for name in WAYS if (found["provider"] == name).any()]
    lines = {}
    for (kind, context), part in found.groupby(["format", "context_length"], sort=False):
        by_way = {row["provider"]: row for _, row in part.iterrows()}
        lines[kind, int(context)] = {name: cell(by_way.get(name), "median_ms") for name in shown}
    table = pd.DataFrame.from_dict(lines, orient="index", columns=shown)
    table.index = pd.MultiIndex.from_tuples(list(lines), names=["format", "context"])
    return table


def rates(frame: pd.DataFrame) -> pd.DataFrame:
    """At the longest context: times with interval, FLOP/s of the products, share of the roof."""
    lines: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for _, row in longest(frame).iterrows():
        line: dict[tuple[str, str], str] = {}
        ceiling = roof(frame, row["format"])
        for direction in DIRECTIONS:
            flops, moved = work(row, direction)
            seconds = row[f"{direction}_median_ms"] / 1e3
            line[direction, "ms"] = _interval(row, f"{direction}_")
            line[direction, "TFLOP/s"] = number(flops / seconds / 1e12, 3)
            share = MISSING
            if ceiling and counted(row["provider"]):
                share = percent(max(flops / ceiling[0], moved / ceiling[1]) / seconds)
            line[direction, "of the roof"] = share
        line["against float64", "error of out"] = number(float(row["y_error"]), 2)
        lines[row["format"], row["provider"]] = line
    if not lines:
        return empty("forward, ms", "backward, ms")
    return _table(lines, "format", "way")


def _interval(row: pd.Series, prefix: str) -> str:
    low, high = (float(row[f"{prefix}median_{end}_ms"]) for end in ("low", "high"))
    middle = number(float(row[f"{prefix}median_ms"]), 3)
    return f"{middle} ({number(low, 3)}–{number(high, 3)})"


def memory(frame: pd.DataFrame) -> pd.DataFrame:
    """At the longest context: kept and held at most, counted and measured, MiB."""
    lines: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for _, row in longest(frame).iterrows():
        squares = problem_of(row).square * problem_of(row).itemsize / 2**20
        lines[row["format"], row["provider"]] = {
            ("kept, MiB", "counted"): _mib(row["counted_kept_mib"]),
            ("kept, MiB", "hooks"): _mib(row["kept_mib"]),
            ("over Q, K, V and dout, MiB", "after forward"): _mib(row["after_forward_mib"]),
            ("over Q, K, V and dout, MiB", "peak"): _mib(row["peak_mib"]),
            ("over Q, K, V and dout, MiB", "peak, counted"): _mib(row["counted_peak_mib"]),
            ("in B T² elements", "kept"): number(row["kept_mib"] / squares, 3),
            ("in B T² elements", "peak"): _over(row["peak_mib"], squares),
        }
    if not lines:
        return empty("kept, MiB", "peak, MiB")
    return _table(lines, "format", "way")


def _mib(value: float) -> str:
    return MISSING if pd.isna(value) else number(float(value), 4)


def _over(value: float, unit: float) -> str:
    return MISSING if pd.isna(value) else number(float(value) / unit, 3)


def beside_published(frame: pd.DataFrame) -> pd.DataFrame:
    """The published times of an Apple M4, ms, and those of every machine at the same shapes."""
    columns: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for row in published.load("attention").itertuples():
        key = (TITLES[INDUCTOR if row.compile else PLAIN], f"{row.context_length}·{row.d_model}")
        place_of = f"published, {row.device}"
        columns.setdefault((place_of, row.direction), {})[key] = number(row.mean_ms, 3)
    keys = list(next(iter(columns.values())))
    found = everywhere(frame)
    for _, row in found[found["grid"] == "published"].iterrows():
        key = (TITLES[row["provider"]], f"{row['context_length']}·{row['head_dim']}")
        for direction, column in _TIMES.items():
            columns.setdefault((place(row), direction), {})[key] = number(float(row[column]), 3)
    body = {
        (place_of, direction.replace("forward+backward", "both")): [
            cells.get(key, MISSING) for key in keys
        ]
        for (place_of, direction), cells in columns.items()
    }
    index = pd.MultiIndex.from_tuples(keys, names=["form", "context·width"])
    return pd.DataFrame(body, index=index)
