"""Study 03 in sentences: findings and the abstract's part, every number from a row."""

from collections.abc import Iterator, Sequence

import pandas as pd

from fusedlib.study import published
from fusedlib.study.display import number, percent, quantity
from fusedlib.study.kernels import floors, regimes
from fusedlib.study.kernels.figures import device_times, leading_rows
from fusedlib.study.kernels.floors import REGIMES
from fusedlib.study.kernels.regimes import Regime
from fusedlib.study.kernels.rows import (
    LAUNCHES,
    PRODUCTS,
    REFERENCE,
    SUBJECT,
    rejected,
    versus,
)
from fusedlib.study.kernels.tables import published_factors
from fusedlib.study.selection import leading, no_finding, place, rows_of

MISSING = no_finding("03_kernels", "problem has been timed")


def _about(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Rows of the machine that is spoken of, what ours gives in them, and the machine's name."""
    rows = leading_rows(frame)
    return rows, regimes.gains(rows), rows["place"].iloc[0] if len(rows) else ""


def findings(frame: pd.DataFrame) -> list[str]:
    """What the rows say besides the `answer`, one sentence or two each."""
    rows, found, where = _about(frame)
    if rows.empty:
        return [MISSING]
    sentences = [
        _rejected_sentence(frame),
        _nothing_sentence(found, regimes.nothing(found)) if len(found) else None,
        floors.sentence(found, where),
        _accuracy_sentence(rows, where),
        *_share_sentences(rows, where),
        _roof_sentence(rows, where),
        _launch_sentence(rows, where),
        _published_sentence(rows, where),
    ]
    return [s for s in sentences if s]


def _rejected_sentence(frame: pd.DataFrame) -> str | None:
    if clauses := "; ".join(rejected(frame)):
        return f"The check against float64 rejected, and so left without a time: {clauses}."
    return None


def headline(frame: pd.DataFrame) -> list[str]:
    """The abstract's sentences about this study."""
    rows, found, where = _about(frame)
    if rows.empty:
        return [MISSING]
    sentences = [
        _gain_sentence(found, where) or _untimed(frame, where),
        _rejected_sentence(frame),
        _nothing_sentence(found) if len(found) else None,
        *list(_share_sentences(rows, where))[:1],
        _published_sentence(rows, where),
    ]
    return [s for s in sentences if s]


def answer(frame: pd.DataFrame) -> str:
    """The study's question answered: what ours gives, and where it gives nothing."""
    rows, found, where = _about(frame)
    if rows.empty:
        return MISSING
    if found.empty:
        return _untimed(frame, where)
    clauses = regimes.nothing(found, brief=True)
    return " ".join(filter(None, [_gain_sentence(found, where), _nothing_sentence(found, clauses)]))


def room(frame: pd.DataFrame) -> list[str]:
    """What fusion could save at most, for a text that has the gains in a table already."""
    rows = leading_rows(frame)
    return [] if rows.empty else list(_share_sentences(rows, rows["place"].iloc[0]))


def _gain_sentence(found: pd.DataFrame, where: str) -> str | None:
    """Liger's time over ours in the regimes of the floors, or in all where none was measured."""
    kinds = [Regime(*kind, launch) for kind in regimes.present(found) for launch in LAUNCHES]
    parts = []
    for regime in [r for r in REGIMES if r in kinds] or kinds:
        part = regimes.of(found, regime)
        ratios = part[(part["rival"] == "Liger") & (part["way"] == "forward+backward")]["ratio"]
        if len(ratios):
            parts.append(f"{regimes.span(ratios)} ({floors.name(part, regime)})")
    if not parts:
        return None
    return (
        f"On {where}, forward and backward with all gradients, Liger takes this many times our "
        f"time: {', '.join(parts)}."
    )


def _nothing_sentence(found: pd.DataFrame, clauses: Sequence[str] = ()) -> str:
    """In how many cases the fastest rival is not slower, and where if clauses are given."""
    cases = regimes.best(found)
    lost = cases[cases["low"] <= 1]
    if lost.empty:
        return f"In none of {len(cases)} cases is a rival as fast as ours."
    where = f": {'; '.join(clauses)}" if clauses else ""
    return (
        f"Ours gives nothing, that is, the fastest rival takes no longer, in {len(lost)} of "
        f"{len(cases)} cases (a shape, direction and launch each), and down to "
        f"{number(lost['ratio'].min(), 3)} of our time{where}."
    )


def _accuracy_sentence(rows: pd.DataFrame, where: str) -> str | None:
    """Error of y of ours over Liger's in fp32, problem by problem."""
    found = rows[(rows["format"] == "fp32") & (rows["launch"] == "python")]
    errors = found.pivot_table(index=["shape", "way"], columns="provider", values="y_error")
    if not {SUBJECT, REFERENCE} <= set(errors.columns):
        return None
    ratio = (errors[SUBJECT] / errors[REFERENCE]).dropna()
    if ratio.empty:
        return None
    larger = int((ratio > 1).sum())
    text = (
        f'In fp32 "highest" on {where} the error of our y is {regimes.span(ratio)} times Liger\'s, '
        f"and larger than it in {larger} of {len(ratio)} problems"
    )
    return f"{text}, most at {ratio.idxmax()[0]}." if larger else f"{text}."


def _untimed(frame: pd.DataFrame, where: str) -> str:
    told = leading(rows_of(frame, "swiglu", None))
    told = told[told["status"] != "ok"]
    told = told[told["provider"].isin([SUBJECT, REFERENCE])]
    reasons = dict.fromkeys(f"{r['provider']}: {r['reason']}" for _, r in told.iterrows())
    because = "; ".join(reasons) or "the rows hold none of them"
    return f"On {where} fused and Liger were not timed side by side ({because})."


def _share_sentences(rows: pd.DataFrame, where: str) -> Iterator[str]:
    """What the products alone take of eager's and of our time: the room for fusion."""
    found = versus(device_times(rows, "python"), PRODUCTS)
    found = regimes.sized(found[found["way"] == "forward+backward"])
    for kind, size in regimes.present(found):
        part = found[(found["format"] == kind) & (found["size"] == size)]
        eager, ours = (part[part["provider"] == name]["ratio"] for name in ("eager", SUBJECT))
        # Elsewhere fp32 products are split on the tensor cores: plain ones are no bound.
        if eager.empty or size not in ("models", "few"):
            continue
        text = (
            f"{regimes.title(part, kind, size)}, forward and backward from Python on {where}: the "
            f"matrix products alone take {_percents(eager)} of eager's time "
            f"({_shapes(len(eager))}), so fusion could save at most the rest"
        )
        yield f"{text}; of ours they take {_percents(ours)}." if len(ours) else f"{text}."


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
            f"{percent(share[top], 3)} of it in {kind} ({row['provider']} at {row['shape']})"
        )
    text = (
        f"The roof on {where} is its own plain product and copy. The nearest that anybody comes "
        f"to it, forward and backward, is {', '.join(parts)}."
    )
    if ((share > 1) & (found["provider"] == SUBJECT) & (found["format"] == "fp32")).any():
        text += (
            " Ours lies above the roof of fp32, which is that of IEEE products: it splits each "
            "factor and multiplies the parts on the tensor cores."
        )
    return text


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


def _percents(shares: pd.Series) -> str:
    return f"{regimes.span(100 * shares)} %"


def _shapes(count: int) -> str:
    return f"{count} shape{'' if count == 1 else 's'}"


def where_measured(frame: pd.DataFrame) -> str:
    """The machine that the findings speak of."""
    rows = leading(rows_of(frame, "swiglu"))
    return place(rows.iloc[0]) if len(rows) else "no machine yet"
