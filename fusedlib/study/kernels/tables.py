"""Study 03's tables, each a pure function from the rows' frame."""

from collections.abc import Callable, Sequence

import pandas as pd

from fusedlib.study import published
from fusedlib.study.display import MISSING, number
from fusedlib.study.kernels import regimes
from fusedlib.study.kernels import rows as select
from fusedlib.study.kernels.floors import LAUNCHED
from fusedlib.study.kernels.regimes import FORMATS, WAYS, Regime
from fusedlib.study.kernels.rows import DIRECTIONS, PRODUCTS, PROVIDERS, compared, versus
from fusedlib.study.selection import per_machine, place, rows_of

Select = Callable[[pd.DataFrame], pd.DataFrame]
DASH = "A dash, or a rival that is not here: it has no time; the table of rivals says why."
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
    """Median ms by machine, format, direction and shape, of all rivals with any time here."""
    found = part(compared(frame, None))
    found = found[(found["launch"] == launch) & found["format"].isin(formats)]
    timed = set(found[found["status"] == "ok"]["provider"])
    columns = [p for p in PROVIDERS if p in timed]
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for way, title in DIRECTIONS.items():
        for _, row in found[found["way"] == way].iterrows():
            key = (row["place"], row["format"], title, row["shape"])
            told = MISSING if row["status"] == "unavailable" else str(row["status"])
            text = number(row["median_ms"], 4) if row["status"] == "ok" else told
            cells.setdefault(key, {})[row["provider"]] = text
    # Where everybody was unavailable there is nothing to show.
    known = [k for k, told in cells.items() if set(told.values()) != {MISSING}]
    order = sorted(known, key=lambda k: (k[0], FORMATS.index(k[1])))
    body = [{p: cells[k].get(p, MISSING) for p in columns} for k in order]
    keys = [(f"{place}: {kind} {way}", shape) for place, kind, way, shape in order]
    return _indexed(body, keys, ["what", "shape"], columns or ["no rows"])


def fusion_table(frame: pd.DataFrame, part: Select, launch: str) -> pd.DataFrame:
    """What the products alone take of each rival's time, with its interval, and the roof's share.

    The products' share is the most that fusion could ever reach: 1 means nothing else costs time.
    """
    found = part(compared(frame))
    found = found[(found["launch"] == launch) & found["way"].isin(["forward", "forward+backward"])]
    found = found.sort_values(["place", *select.SHAPE, "way"], kind="stable")
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


def gains_table(found: pd.DataFrame) -> pd.DataFrame:
    """Liger's time, and the fastest rival's, over ours by regime, least to greatest over shapes.

    Takes the frame of `regimes.gains`. "no gain" counts shapes and directions in which the fastest
    rival takes no longer.
    """
    body, index = [], []
    for kind, size in regimes.present(found):
        for launch in LAUNCHED:
            part = regimes.of(found, Regime(kind, size, launch))
            if part.empty:
                continue
            best = regimes.best(part)
            sides = {"Liger": part[part["rival"] == "Liger"], "fastest": best}
            cells = {
                (way, name): _spread(side, way) for way in WAYS for name, side in sides.items()
            }
            lost = f"{int((best['low'] <= 1).sum())} of {len(best)}"
            body.append(cells | {("", "no gain in"): lost})
            index.append((regimes.format_title(kind), regimes.size_title(part, size), launch))
    if not index:
        return pd.DataFrame(columns=["not measured"])
    names = ["format", "size", "launch"]
    table = pd.DataFrame(body, index=pd.MultiIndex.from_tuples(index, names=names))
    table.columns = pd.MultiIndex.from_tuples(table.columns)
    return table


def _spread(rows: pd.DataFrame, way: str) -> str:
    ratios = rows[rows["way"] == way]["ratio"]
    return regimes.span(ratios) if len(ratios) else MISSING


def published_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Liger's time over fused's: published, and measured by format and launch.

    Of the measured formats those are shown that have the published sweep, not single sizes of it.
    """
    told = published_factors()
    measured = versus(compared(frame), select.REFERENCE)
    square = measured["hidden_size"] == measured["intermediate_size"]
    measured = measured[square & (measured["provider"] == select.SUBJECT)]
    columns: dict[tuple[str, str], dict[tuple[str, int, int], str]] = {}
    for (where, kind, launch), group in measured.groupby(["place", "format", "launch"], sort=True):
        keys = zip(group["way"], group["tokens"], group["hidden_size"], strict=True)
        ratios = [_ratio(*r) for r in group[["ratio", "low", "high"]].itertuples(index=False)]
        cells = {k: r for k, r in zip(keys, ratios, strict=True) if k in told}
        if len({width for _, _, width in cells}) > 1:
            columns[(where, f"{kind} {launch}")] = cells
    index = pd.MultiIndex.from_tuples(
        [(DIRECTIONS[w], f"{b} × {d}") for w, b, d in told], names=["direction", "B × D"]
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
    """Version, settings and largest error of y by machine and rival, and what kept it."""
    found = per_machine(rows_of(frame, "swiglu", None))
    if found.empty:
        return pd.DataFrame(columns=["no rows"])
    found = found.assign(format=[select.format_of(r) for _, r in found.iterrows()])
    found = found.assign(place=[place(r) for _, r in found.iterrows()])
    formats = [kind for kind in FORMATS if kind in set(found["format"])]
    groups = list(found.groupby(["place", "provider"], sort=True))
    body = [_rival(group, formats) for _, group in groups]
    index = pd.MultiIndex.from_tuples([key for key, _ in groups], names=["on", "rival"])
    table = pd.DataFrame(body, index=index)
    table.columns = pd.MultiIndex.from_tuples(table.columns)
    return table


def _rival(group: pd.DataFrame, formats: Sequence[str]) -> dict[tuple[str, str], str]:
    timed, rest = group[group["status"] == "ok"], group[group["status"] != "ok"]
    reasons = [f"{r['status']}: {r['reason']}" for _, r in rest.iterrows()]
    errors = timed.groupby("format")["y_error"].max()
    told = {
        # A cell is plain text: names stand in it without Markdown's marks.
        name: "; ".join(dict.fromkeys(str(v).replace("`", "") for v in timed[name].dropna()))
        for name in ("version", "settings")
    }
    return {
        ("", "version"): told["version"] or MISSING,
        ("", "settings"): told["settings"] or MISSING,
        **{
            ("largest error of y", kind): number(errors[kind], 2) if kind in errors else MISSING
            for kind in formats
        },
        ("", "timed"): f"{len(timed)} of {len(group)}",
        ("", "without a time"): "; ".join(dict.fromkeys(reasons)) or MISSING,
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
