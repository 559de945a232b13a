"""Study 03 in sentences: findings and the abstract's part, every number from a row."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from fusedlib.study import published
from fusedlib.study.display import number, quantity
from fusedlib.study.kernels.figures import device_times, leading_rows
from fusedlib.study.kernels.rows import DIRECTIONS, LAUNCHES, PRODUCTS, REFERENCE, SUBJECT, versus
from fusedlib.study.kernels.tables import published_factors
from fusedlib.study.selection import leading, place, rows_of

MISSING = "There is no finding yet: no problem has been timed. `make study ONLY=03_kernels` does."
FORMATS = ("bf16", "fp16", "fp32", "TF32")
BOUND = {"compute": "bound by arithmetic", "bandwidth": "bound by memory bandwidth", "": ""}


def findings(frame: pd.DataFrame) -> list[str]:
    """What the rows say, one sentence or two each."""
    rows = leading_rows(frame)
    if rows.empty:
        return [MISSING]
    where = rows["place"].iloc[0]
    sentences = [
        *_subject_sentences(frame, rows, where),
        *_share_sentences(rows, where),
        _roof_sentence(rows, where),
        _launch_sentence(rows, where),
        _published_sentence(rows, where),
        protocol(),
    ]
    return [s for s in sentences if s]


def headline(frame: pd.DataFrame) -> list[str]:
    """The abstract's sentences about this study."""
    rows = leading_rows(frame)
    if rows.empty:
        return [MISSING]
    where = rows["place"].iloc[0]
    found = versus(rows, REFERENCE)
    found = found[(found["provider"] == SUBJECT) & (found["way"] == "forward+backward")]
    summary = _summary(found, where) if len(found) else _untimed(frame, where)
    sentences = [summary, *list(_share_sentences(rows, where))[:1]]
    sentences.append(_published_sentence(rows, where) or "")
    return [s for s in sentences if s]


def _subject_sentences(frame: pd.DataFrame, rows: pd.DataFrame, where: str) -> Iterator[str]:
    """Fused against Liger by format, bound and launch; why not, where fused was not timed."""
    found = versus(rows, REFERENCE)
    ways = ("forward", "forward+backward")
    found = found[(found["provider"] == SUBJECT) & found["way"].isin(ways)]
    if found.empty:
        yield _untimed(frame, where)
        return
    keys = ["format", "bound", "launch"]
    for (kind, bound, launch), group in _in_order(found, keys):
        parts = [_range(group[group["way"] == way], way) for way in ways]
        yield (
            f"{kind}, {BOUND[bound]}, launched {_launched(launch)} on {where}: Liger's time over "
            f"ours is {'; '.join(p for p in parts if p)}."
        )


def _summary(found: pd.DataFrame, where: str) -> str:
    """Least and largest ratio by format, bound and launch, in one sentence."""
    parts = []
    for (kind, bound, launch), group in _in_order(found, ["format", "bound", "launch"]):
        low, high = number(group["ratio"].min(), 3), number(group["ratio"].max(), 3)
        parts.append(
            f"{kind}, {BOUND[bound]}, {_launched(launch)}: {low} to {high}"
            if len(group) > 1
            else f"{kind}, {BOUND[bound]}, {_launched(launch)}: {low}"
        )
    return (
        f"Liger's time over ours on {where}, forward and backward with all gradients, over "
        f"{found['shape'].nunique()} shapes: {'; '.join(parts)}. Above one, ours is faster."
    )


def _launched(launch: str) -> str:
    return "from Python" if launch == "python" else "as a CUDA graph"


def _range(group: pd.DataFrame, way: str) -> str:
    """Least and largest ratio with their shapes, and in how many cases either side is faster."""
    if group.empty:
        return ""
    least, most = group.loc[group["ratio"].idxmin()], group.loc[group["ratio"].idxmax()]
    text = _told(most)
    if len(group) > 1:
        text = f"{_told(least)} to {text}"
    faster, slower = int((group["low"] > 1).sum()), int((group["high"] < 1).sum())
    level = len(group) - faster - slower
    return (
        f"{DIRECTIONS[way]} {text}; ours is faster in {faster}, slower in {slower} and neither in "
        f"{level} of {_shapes(len(group))} (95 % intervals)"
    )


def _told(row: pd.Series) -> str:
    low, high = number(row["low"], 3), number(row["high"], 3)
    return f"{number(row['ratio'], 3)} ({low}–{high}) at {row['shape']}"


def _untimed(frame: pd.DataFrame, where: str) -> str:
    told = leading(rows_of(frame, "swiglu", None))
    told = told[told["status"] != "ok"]
    told = told[told["provider"].isin([SUBJECT, REFERENCE])]
    reasons = dict.fromkeys(f"{r['provider']}: {r['reason']}" for _, r in told.iterrows())
    because = "; ".join(reasons) or "the rows hold none of them"
    return f"On {where} fused and Liger were not timed side by side ({because})."


def _share_sentences(rows: pd.DataFrame, where: str) -> Iterator[str]:
    """What the products alone take of the fastest and of eager's time: the room for fusion."""
    found = versus(device_times(rows, "python"), PRODUCTS)
    found = found[found["way"] == "forward+backward"]
    for (kind, bound), group in _in_order(found, ["format", "bound"]):
        eager = group[group["provider"] == "eager"]
        if eager.empty:
            continue
        least, most = eager["ratio"].min(), eager["ratio"].max()
        best = group.loc[group.groupby("shape")["median_ms"].idxmin()]
        names = best["provider"].value_counts()
        winners = ", ".join(f"{name} {count}" for name, count in names.items())
        yield (
            f"{kind}, {BOUND[bound]}, forward and backward from Python on {where}: the matrix "
            f"products alone take {_span(least, most)} of eager's time "
            f"({_shapes(len(eager))}), so fusion could save at most the rest; the fastest was "
            f"{winners} (number of shapes)."
        )


def _roof_sentence(rows: pd.DataFrame, where: str) -> str | None:
    found = device_times(rows[rows["way"] == "forward+backward"])
    found = found[(found["provider"] != PRODUCTS) & found["roof_ms"].notna()]
    if found.empty:
        return None
    share = found["roof_ms"] / found["median_ms"]
    parts = []
    for kind, group in found.groupby("format", sort=True):
        top = share[group.index].idxmax()
        row = group.loc[top]
        parts.append(
            f"{_percent(share[top])} of it in {kind} ({row['provider']} at {row['shape']})"
        )
    return (
        f"The roof on {where} is its own plain product and copy. The nearest that any rival comes "
        f"to it, forward and backward, is {', '.join(parts)}."
    )


def _launch_sentence(rows: pd.DataFrame, where: str) -> str | None:
    """What Python costs: the same problem launched from Python and as a graph."""
    found = rows[(rows["way"] == "forward+backward") & (rows["provider"] != PRODUCTS)]
    keys = ["format", "shape", "provider"]
    both = found.pivot_table(index=keys, columns="launch", values="median_ms").dropna()
    if both.empty or set(both.columns) != set(LAUNCHES):
        return None
    ratio = both["python"] / both["graph"]
    (kind, shape, provider), most = ratio.idxmax(), ratio.max()
    near = int((ratio < 1.05).sum())
    return (
        f"Launching from Python costs most for {provider} at {shape} in {kind}: "
        f"{quantity(both['python'][ratio.idxmax()], 'ms')} against "
        f"{quantity(both['graph'][ratio.idxmax()], 'ms')} as a CUDA graph, {number(most, 3)} times "
        f"as much; in {near} of {len(ratio)} cases the two differ by less than a twentieth "
        f"({where}, forward and backward)."
    )


def _published_sentence(rows: pd.DataFrame, where: str) -> str | None:
    told = published_factors()
    found = versus(rows[(rows["launch"] == "python")], REFERENCE)
    found = found[(found["provider"] == SUBJECT) & (found["format"] == "fp32")]
    pairs = [
        (told[key], row["ratio"])
        for _, row in found.iterrows()
        if (key := (row["way"], row["tokens"], row["hidden_size"])) in told
        and row["hidden_size"] == row["intermediate_size"]
    ]
    if not pairs:
        return None
    claimed, measured = zip(*pairs, strict=True)
    return (
        f"Published for a fused kernel against Liger (seed 000, {published.source('000')['device']}"
        f"): {number(min(claimed), 3)} to {number(max(claimed), 3)} times faster. Measured on "
        f"{where} in the same sizes, fp32, with all gradients right: {number(min(measured), 3)} to "
        f"{number(max(measured), 3)} times, over {len(pairs)} cases."
    )


def protocol() -> str:
    """What the published source measured, as far as its own figures say it."""
    memory = published.load("swiglu_memory").dropna(subset=["batch_size"])
    largest = memory[memory["implementation"] == "liger"].sort_values("d_model").iloc[-1]
    width, peak = int(largest["d_model"]), float(largest["peak_mb"])
    # Three weights and three gradients of width²; the rest of the peak is activations.
    size = peak * 2**20 / (6 * width**2)
    return (
        "The published source states neither dtype nor the precision of fp32 products. Its memory "
        f"does: {number(peak, 6)} MB at D = {width} is {number(size, 3)} bytes an element of three "
        "square weights and three gradients, so fp32 and F = D; the precision is then taken as "
        'torch\'s own default, "highest".'
    )


def _in_order(rows: pd.DataFrame, keys: list[str]) -> list[tuple[Any, pd.DataFrame]]:
    """Groups by format and bound: bf16 first, and what arithmetic bounds before bandwidth."""
    groups = list(rows.groupby(keys, sort=True))
    return sorted(groups, key=lambda g: (FORMATS.index(g[0][0]), g[0][1] != "compute"))


def _span(least: float, most: float) -> str:
    return _percent(least) if least == most else f"{_percent(least)} to {_percent(most)}"


def _shapes(count: int) -> str:
    return f"{count} shape{'' if count == 1 else 's'}"


def _percent(share: float) -> str:
    return f"{number(100 * share, 3)} %"


def where_measured(frame: pd.DataFrame) -> str:
    """The machine that the findings speak of."""
    rows = leading(rows_of(frame, "swiglu"))
    return place(rows.iloc[0]) if len(rows) else "no machine yet"
