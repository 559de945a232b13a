"""Study 04 in sentences: findings and the abstract's part, every number from rows or counts."""

from fractions import Fraction

import pandas as pd

from fusedlib.bench import ledger, memory
from fusedlib.study.display import number, percent, quantity
from fusedlib.study.memory import published_fit, tables
from fusedlib.study.selection import leading, no_finding, place

MISSING = no_finding("04_memory", "step has been recorded")
# The shape that the project's aims for memory are stated at.
MAIN = "8192·4096·14336"
CLOSE = 0.03
# Blocks of CUDA's allocator are whole multiples of 512 bytes; small tensors are not the subject.
LEAST_MIB = 1.0


def answer(frame: pd.DataFrame) -> str:
    """The study's question answered: what fusing saves, and where the limits come from."""
    if tables.steps(frame).empty:
        return MISSING
    sentences = [shape_sentence, peaks_sentence, tokens_sentence, limit_sentence]
    return " ".join(s for sentence in sentences if (s := sentence(frame)))


def findings(frame: pd.DataFrame) -> list[str]:
    """What the rows say besides the `answer`, one sentence or two each."""
    if tables.steps(frame).empty:
        return [MISSING]
    sentences = [
        published_sentence, square_sentence, input_sentence, stack_sentence, depth_sentence,
        plain_sentence,
    ]  # fmt: skip
    return [s for sentence in sentences if (s := sentence(frame))]


def headline(frame: pd.DataFrame) -> list[str]:
    """The abstract's sentences about this study."""
    if tables.steps(frame).empty:
        return [MISSING]
    sentences = [shape_sentence, peaks_sentence, limit_sentence, stack_sentence]
    return [s for sentence in sentences if (s := sentence(frame))]


def largest(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps of the leading machine at `MAIN` or, where that was not measured, the largest shape."""
    rows = leading(tables.main_shapes(frame))
    if rows.empty:
        return rows
    rows = rows.sort_values("counted_total_mib", ascending=False, kind="stable")
    named = rows[[tables.shape_of(row) == MAIN for _, row in rows.iterrows()]]
    first = (named if len(named) else rows).iloc[0]
    same = (rows[tables.SHAPE] == first[tables.SHAPE]).all(axis=1)
    return rows[same].sort_values("rank")


def peaks_sentence(frame: pd.DataFrame) -> str | None:
    """Peak of fused over Liger's at every main shape, and why it is above 1 where it is."""
    rows = leading(tables.main_shapes(frame))
    if rows.empty:
        return None
    wide = rows.pivot_table(index=tables.SHAPE, columns="provider", values="peak_mib")
    if not {"fused", "liger"} <= set(wide.columns):
        return None
    ratio = (wide["fused"] / wide["liger"]).dropna().sort_values()
    said = [f"{number(v, 3)} at {'·'.join(map(str, k[:3]))}" for k, v in ratio.items()]
    text = f"Of Liger's peak fused takes {', '.join(said)}"
    if (ratio > 1).any():
        text += (
            "; where it is above 1 no order of the backward's products holds less: they are one "
            "operation to autograd, which gives d_x and all weights' gradients at its end"
        )
    return f"{text} ({place(rows.iloc[0])})."


def shape_sentence(frame: pd.DataFrame) -> str | None:
    """Kept and peak of everybody at the largest shape, the least peak first."""
    rows = largest(frame)
    if rows.empty:
        return None
    rows = rows.sort_values(["peak_mib", "saved_mib"], kind="stable")
    said = [
        f"{r['provider']} {number(r['saved_mib'], 4)} and {number(r['peak_mib'], 4)}"
        for _, r in rows.iterrows()
    ]
    first = rows.iloc[0]
    return (
        f"One step at {tables.shape_of(first)} in {first['dtype']} on {place(first)} keeps for "
        f"backward, and holds at its peak over weights and inputs, in MiB: {'; '.join(said)}."
    )


def agreement_sentence(frame: pd.DataFrame) -> str | None:
    """How far counting and measuring differ, and by what where it is more than `CLOSE`."""
    rows = leading(tables.steps(frame))
    rows = rows[rows["counted_peak_mib"] >= LEAST_MIB] if len(rows) else rows
    if rows.empty:
        return None
    off = (rows["peak_mib"] / rows["counted_peak_mib"] - 1).abs()
    good = rows[off <= CLOSE]
    text = (
        f"On {place(rows.iloc[0])} the counted peak meets the measured one within "
        f"{percent(CLOSE)} in {len(good)} of {len(rows)} steps"
    )
    if len(good):
        text += f" (there at most {percent(off[off <= CLOSE].max())} apart)"
    parts = []
    for name, group in rows[off > CLOSE].groupby("provider", sort=False):
        worst = group.loc[off[group.index].idxmax()]
        parts.append(f"{name} differs in {len(group)}, most at {_difference(worst)}")
    return f"{text}{'; ' if parts else ''}{'; '.join(parts)}.{_witness(rows)}"


def _difference(row: pd.Series) -> str:
    """A difference in MiB and in units of F, which tell which tensor it is."""
    away = row["peak_mib"] - row["counted_peak_mib"]
    units = away / ledger.F.mib(memory.problem_of(row))
    return (
        f"{tables.shape_of(row)} {row['dtype']} by {number(away, 3)} MiB, {number(units, 2)} "
        "times tokens · intermediate"
    )


def _witness(rows: pd.DataFrame) -> str:
    """Whether the allocator's own peak and its events, summed, say the same."""
    if not (rows["device_type"] == "cuda").all():
        return " The allocator there keeps no peak of its own: the figures are its events, summed."
    apart = (rows["peak_mib"] - rows["events_peak_mib"]).abs()
    told = rows["complete"].astype(bool)
    return (
        f" The allocator's own peak is that of its events within "
        f"{quantity(apart[told].max(), 'MiB', 2)} in {int(told.sum())} of them."
    )


def published_sentence(_: pd.DataFrame) -> str:
    """The published peaks as counts, from the published figures alone."""
    read, rows = published_fit.readings(), published_fit.ratios()
    liger, fused = read["liger"], read["fused"]
    same = int((rows["read"].round(2) == rows["published"]).sum())
    return (
        f"The published grid is {liger.weights} W + {liger.activations} A + "
        f"{number(liger.constant_mib, 3)} MB for Liger and {fused.weights} W + "
        f"{fused.activations} A + {number(fused.constant_mib, 3)} MB for the fused layer, to "
        f"{number(max(liger.off_mib, fused.off_mib) + 0.05, 1)} MB, where W is one weight matrix "
        f"and A one activation; the same counts give {same} of {len(rows)} ratios of the published "
        "sweep to their last digit."
    )


def limit_sentence(_: pd.DataFrame) -> str:
    """Where the published limit comes from, from the published figures alone."""
    liger, fused = (published_fit.readings()[name].weights for name in ("liger", "fused"))
    return (
        f"The published ratio's limit, {liger}/{fused} = {number(liger / fused, 2)}, is that of "
        f"three weights and three gradients to three weights and {_words(fused - 3)}: what was "
        "saved are gradients that were never computed."
    )


def _words(gradients: int) -> str:
    return "one gradient" if gradients == 1 else f"{gradients} gradients"


def square_sentence(frame: pd.DataFrame) -> str | None:
    """The published sweep with all gradients: the limit counted, the widest measured."""
    rows = leading(tables.squares(frame))
    if rows.empty:
        return None
    rows = rows[rows["tokens"] == rows["tokens"].min()]
    widest = rows[rows["hidden_size"] == rows["hidden_size"].max()]
    by = dict(zip(widest["provider"], widest["total_mib"], strict=True))
    other, rival = _pair(by)
    if rival is None:
        return None
    tends = _limit_ratio(rival, other, None)
    return (
        f"With all gradients on both sides {rival} over {other} tends to {number(tends, 3)} as the "
        f"width grows at {int(widest['tokens'].iloc[0])} tokens: each holds three weights and "
        f"three gradients, and W outgrows the rest. Measured at width "
        f"{int(widest['hidden_size'].iloc[0]):,} on {place(widest.iloc[0])}: "
        f"{number(by[rival] / by[other], 4)}."
    )


def _pair(by: dict[str, float]) -> tuple[str, str | None]:
    """Whom to compare: Liger over fused, or what there is instead."""
    if {"liger", "fused"} <= by.keys():
        return "fused", "liger"
    return ("inductor", "eager") if {"inductor", "eager"} <= by.keys() else ("", None)


def _limit_ratio(rival: str, other: str, width: Fraction | None) -> float:
    """The ratio of whole peaks, weights and inputs included, that counting tends to."""
    books = ledger.of(rival), ledger.of(other)
    above, below = (book.limit(width, base=True) for book in books)
    return float(above / below)


def tokens_sentence(frame: pd.DataFrame) -> str | None:
    """What kept and peak tend to as the tokens grow."""
    rows = leading(tables.growing(frame))
    if rows.empty:
        return None
    most = rows[rows["tokens"] == rows["tokens"].max()].set_index("provider")
    other, rival = _pair(dict.fromkeys(most.index, 0.0))
    if rival is None:
        return None
    kept = {n: ledger.of(n).kept().inner for n in (rival, other)}
    first = most.iloc[0]
    width = Fraction(int(first["intermediate_size"]), int(first["hidden_size"]))
    above, below = (ledger.of(n).limit(width) for n in (rival, other))
    measured = most["saved_mib"][rival] / most["saved_mib"][other]
    peak = most["peak_mib"][rival] / most["peak_mib"][other]
    return (
        f"As the tokens grow, what {rival} keeps over what {other} keeps is {kept[rival]} F / "
        f"{kept[other]} F = {number(kept[rival] / kept[other], 3)} (measured at "
        f"{int(first['tokens']):,} tokens: {number(measured, 3)}), and their peaks over base, "
        f"where gradients of weights no longer count, tend to {number(float(above / below), 3)} "
        f"(measured: {number(peak, 3)})."
    )


def input_sentence(frame: pd.DataFrame) -> str | None:
    """What save="input" gives in one MLP, measured, and why it is little there."""
    rows = largest(frame)
    if rows.empty:
        return None
    by = rows.set_index("provider")
    if not {"fused", "fused (input)"} <= set(by.index):
        return None
    kept, peak = (
        [quantity(by[f"{what}_mib"][name], "MiB", 4) for name in ("fused (input)", "fused")]
        for what in ("saved", "peak")
    )
    return (
        f'`save="input"` keeps {kept[0]} there against {kept[1]}, yet a single MLP peaks at '
        f"{peak[0]} against {peak[1]}: what is computed again must be held while its layer is in "
        "backward. It pays where many layers wait."
    )


def slopes(frame: pd.DataFrame, dtype: str, held: bool) -> pd.DataFrame:
    """MiB a layer between the two deepest measured stacks of each rival, and as counted."""
    rows = leading(tables.stack_rows(frame))
    found: list[dict[str, object]] = []
    if rows.empty:
        return pd.DataFrame(found)
    rows = rows[(rows["dtype"] == dtype) & (rows["held"] == held)]
    for name, group in rows.groupby("provider", sort=False):
        two = group.sort_values("layers").tail(2)
        if len(two) == 2:
            layers = two["layers"].diff().iloc[1]
            cells = {
                c: two[f"{c}_mib"].diff().iloc[1] / layers for c in ("total_peak", "counted_total")
            }
            found.append({"provider": name, **cells, "row": two.iloc[-1]})
    return pd.DataFrame(found)


def stack_sentence(frame: pd.DataFrame) -> str | None:
    """MiB a layer in deep stacks, and the ratio that follows."""
    rows = leading(tables.stack_rows(frame))
    if rows.empty:
        return None
    tried = [(dtype, slopes(frame, dtype, True)) for dtype in ("bfloat16", "float32")]
    # Half precision, unless its stacks were not measured for a pair of rivals.
    dtype, found = max(tried, key=lambda each: min(len(each[1]), 2))
    if found.empty:
        return None
    row = found["row"].iloc[0]
    said = [
        f"{number(r.total_peak, 4)} MiB with {r.provider} (counted: {number(r.counted_total, 4)})"
        for r in found.itertuples()
    ]
    text = (
        f"In a deep stack at {tables.shape_of(row)} in {dtype} on {place(row)}, gradients held, "
        f"each layer more costs {', '.join(said)}"
    )
    cost = dict(zip(found["provider"], found["total_peak"], strict=True))
    other, rival = _pair(cost)
    if rival is None:
        return text + "."
    return f"{text}: the ratio {rival} / {other} tends to {number(cost[rival] / cost[other], 3)}."


def depth_sentence(frame: pd.DataFrame) -> str | None:
    """The published stack's slopes, read, beside ours with all gradients in fp32."""
    (liger, _, _), (fused, _, _) = (published_fit.slopes()[n] for n in ("liger", "fused"))
    text = (
        f"The published stack grows by {number(liger, 3)} MB a layer with Liger and "
        f"{number(fused, 3)} with the fused layer, so its ratio tends to {number(liger / fused, 3)}"
    )
    if reading := published_fit.stack_reading():
        tokens, width, counts = reading
        (w, a), (v, b) = counts["liger"], counts["fused"]
        text += (
            f"; of its grid's sizes only {tokens} tokens at width {width:,} gives whole counts, "
            f"{w} W + {a} A against {v} W + {b} A a layer"
        )
    found = slopes(frame, "float32", True)
    cost = dict(zip(found["provider"], found["total_peak"], strict=True)) if len(found) else {}
    other, rival = _pair(cost)
    if rival is None:
        return text + "."
    return (
        f"{text}. Three weights and three gradients a layer on both sides leave "
        f"{number(cost[rival] / cost[other], 3)} at {tables.shape_of(found['row'].iloc[0])}."
    )


def plain_sentence(frame: pd.DataFrame) -> str | None:
    """How fused ran in fp32, which decides what it keeps."""
    rows = leading(tables.steps(frame))
    if rows.empty or "path" not in rows:
        return None
    said = {
        "plain": "runs PyTorch's own lines, and keeps and holds what those do",
        "split": "splits its factors in two fp16 parts, which are temporaries as large as they",
    }
    rows = rows[(rows["provider"] == "fused") & rows["path"].isin(list(said))]
    parts = []
    for path, group in rows.groupby("path"):
        tokens = ", ".join(f"{n:,.0f}" for n in sorted(set(group["tokens"])))
        parts.append(f"at {tokens} tokens fused {said[str(path)]}")
    if not parts:
        return None
    return f"In {rows['dtype'].iloc[0]} on {place(rows.iloc[0])}, {'; '.join(parts)}."
