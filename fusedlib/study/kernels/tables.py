"""Study 03's tables, each a pure function from the rows' frame."""

from collections.abc import Callable, Sequence

import pandas as pd

from fusedlib.study import published
from fusedlib.study.display import MISSING, number
from fusedlib.study.kernels import rows as select
from fusedlib.study.kernels.rows import DIRECTIONS, PRODUCTS, PROVIDERS, compared, versus
from fusedlib.study.selection import per_machine, place, rows_of

Select = Callable[[pd.DataFrame], pd.DataFrame]
DASH = "A dash: not available here; the table of rivals says why."
PUBLISHED_WAYS = {"forward time": "forward", "backward time": "backward"}


def ceilings_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Measured ceilings by machine and format."""
    found = select.ceilings(frame)
    index = pd.MultiIndex.from_arrays([found["place"], found["format"]], names=["on", "format"])
    body = {
        "product TFLOP/s": [number(v / 1e12, 4) for v in found["flops_per_s"]],
        "copy TB/s": [number(v / 1e12, 3) for v in found["bytes_per_s"]],
        "FLOP/byte at the ridge": [
            number(r.flops_per_s / r.bytes_per_s, 3) for r in found.itertuples()
        ],
    }
    return pd.DataFrame(body, index=index)


def times_table(frame: pd.DataFrame, part: Select, launch: str, formats: list[str]) -> pd.DataFrame:
    """Median ms by machine, format, direction and shape; a dash where a rival cannot run."""
    found = part(compared(frame, None))
    found = found[(found["launch"] == launch) & found["format"].isin(formats)]
    found = found.sort_values(["place", "format"], kind="stable")
    columns = [p for p in PROVIDERS if p in set(found["provider"])]
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for way, title in DIRECTIONS.items():
        for _, row in found[found["way"] == way].iterrows():
            key = (f"{row['place']}: {row['format']} {title}", row["shape"])
            told = MISSING if row["status"] == "unavailable" else str(row["status"])
            text = number(row["median_ms"], 4) if row["status"] == "ok" else told
            cells.setdefault(key, {})[row["provider"]] = text
    order = sorted(cells, key=lambda k: _place_and_format(k[0]))
    index = pd.MultiIndex.from_tuples(order, names=["what", "shape"])
    body = [[cells[k].get(p, MISSING) for p in columns] for k in order]
    return pd.DataFrame(body, index=index, columns=columns or ["no rows"])


def _place_and_format(what: str) -> tuple[str, str]:
    where, _, rest = what.rpartition(": ")
    return where, rest.partition(" ")[0]


def fusion_table(frame: pd.DataFrame, part: Select, launch: str) -> pd.DataFrame:
    """What the products alone take of each rival's time, with its interval, and the roof's share.

    The products' share is the most that fusion could ever reach: 1 means nothing else costs time.
    """
    found = part(compared(frame))
    found = found[(found["launch"] == launch) & found["way"].isin(["forward", "forward+backward"])]
    body, index = [], []
    for row in versus(found, PRODUCTS).itertuples():
        what = f"{row.place}: {row.format} {DIRECTIONS[row.way]}"
        index.append((what, row.shape, row.provider))
        body.append(
            {
                "products / time": _ratio(row.ratio, row.low, row.high),
                "roof / time": number(row.roof_ms / row.median_ms, 3),
                "TFLOP/s": number(row.flops / row.median_ms / 1e9, 3),
            }
        )
    names = ["what", "shape", "provider"]
    return _indexed(body, index, names, ["products / time", "roof / time", "TFLOP/s"])


def published_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Liger's time over fused's: published, and measured by format and launch."""
    told = published_factors()
    measured = versus(compared(frame), select.REFERENCE)
    measured = measured[measured["provider"] == select.SUBJECT]
    columns: dict[tuple[str, str], dict[tuple[str, int, int], str]] = {}
    for row in measured.itertuples():
        title = f"{row.format} {row.launch}"
        if row.hidden_size == row.intermediate_size:
            key = (row.way, int(row.tokens), int(row.hidden_size))
            cells = columns.setdefault((row.place, title), {})
            cells[key] = _ratio(row.ratio, row.low, row.high)
    index = pd.MultiIndex.from_tuples(
        [(DIRECTIONS[w], str(b), str(d)) for w, b, d in told], names=["direction", "B", "D"]
    )
    body = {("published", "seed 000"): [number(v, 3) for v in told.values()]}
    body |= {name: [cells.get(k, MISSING) for k in told] for name, cells in columns.items()}
    return pd.DataFrame(body, index=index)


def published_factors() -> dict[tuple[str, int, int], float]:
    """Published Liger over fused by direction, tokens and width: stated, or of stated times.

    The sweep's "backward" does not say whose gradients it has; it stands under backward.
    """
    told: dict[tuple[str, int, int], float] = {}
    for row in published.load("swiglu_ratios").itertuples():
        if row.quantity in PUBLISHED_WAYS:
            key = (PUBLISHED_WAYS[row.quantity], int(row.batch_size), int(row.d_model))
            told[key] = float(row.liger_over_fused)
    times = published.load("swiglu_times")
    keys = ["direction", "weight_gradient", "batch_size", "d_model"]
    for (direction, trained, batch, width), group in times.groupby(keys, dropna=False):
        by = group.set_index("implementation")["time_ms"]
        way = "frozen" if trained is False else direction
        told.setdefault((way, int(batch), int(width)), float(by["liger"] / by["fused"]))
    ways = list(DIRECTIONS)
    return dict(sorted(told.items(), key=lambda item: (ways.index(item[0][0]), *item[0][1:])))


def rivals_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Version, settings and largest error of y by machine, rival and format, and what kept it."""
    found = per_machine(rows_of(frame, "swiglu", None))
    body, index = [], []
    if len(found):
        found = found.assign(format=[select.format_of(r) for _, r in found.iterrows()])
        groups = found.groupby(["machine", "provider", "format"], sort=True)
        for (_, provider, kind), group in groups:
            timed = group[group["status"] == "ok"]
            index.append((place(group.iloc[0]), provider, kind))
            body.append(_rival(group, timed))
    columns = ["version", "settings", "largest error of y", "timed", "without a time"]
    return _indexed(body, index, ["on", "provider", "format"], columns)


def _rival(group: pd.DataFrame, timed: pd.DataFrame) -> dict[str, str]:
    rest = group[group["status"] != "ok"]
    reasons = [f"{r['status']}: {r['reason']}" for _, r in rest.iterrows()]
    some = timed.iloc[0] if len(timed) else None
    told = some["settings"] if some is not None else None
    return {
        "version": str(some["version"]) if some is not None else MISSING,
        "settings": str(told) if isinstance(told, str) else MISSING,
        "largest error of y": number(timed["y_error"].max(), 2) if some is not None else MISSING,
        "timed": f"{len(timed)} of {len(group)}",
        "without a time": "; ".join(dict.fromkeys(reasons)) or MISSING,
    }


def _ratio(value: float, low: float, high: float) -> str:
    return f"{number(value, 3)} ({number(low, 3)}–{number(high, 3)})"


def _indexed(
    body: list[dict[str, str]],
    index: Sequence[tuple[str, ...]],
    names: list[str],
    columns: list[str],
) -> pd.DataFrame:
    if not index:
        return pd.DataFrame(columns=columns)
    return pd.DataFrame(body, index=pd.MultiIndex.from_tuples(index, names=names), columns=columns)
