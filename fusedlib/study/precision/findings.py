"""What study 02, precision and accumulation, found: sentences computed from rows, never typed.

Each function takes the frame of `results.load("02_precision")` and gives sentences; without usable
rows it gives one sentence that says so, except `headline`, which gives none.
"""

import numpy as np
import pandas as pd

from fusedlib.bench import formats
from fusedlib.study.display import number
from fusedlib.study.precision import tables
from fusedlib.study.precision.tables import described, exponent, rows_of, source
from fusedlib.study.precision.torch_itself import (
    no_rows,
    places,
    torch_itself,
    with_article,
)
from fusedlib.study.wording import listed

STUDY = "02_precision"
# A sum's error is put down to one part when that part is at least this share of both.
MOSTLY = 0.9


def four_sums(frame: pd.DataFrame) -> list[str]:
    """Whether the published values are reproduced, and for which their explanation holds."""
    rows = rows_of(frame, "four_sums")
    if rows.empty:
        return no_rows("four_sums")
    values = tables.published_sums()
    known = rows[rows["provider"].isin(list(values))]
    wanted = known["provider"].map(lambda name: f"{values[name]:.4f}")
    same = int((known["displayed"] == wanted).sum())
    verb = "agree" if same == len(known) else "agree only in part"
    sentences = [
        f"Published and measured sums {verb}: {same} of {len(known)} measured values, from "
        f"{places(tables.placed(known))}, equal the published ones in every published digit."
    ]
    return sentences + _explanation(source(frame, "four_sums", "cpu"))


def _explanation(rows: pd.DataFrame) -> list[str]:
    """For which sums the error is representation, as published, and for which accumulation."""
    if rows.empty:
        return []
    shares = {row["provider"]: tables.representation_share(row) for _, row in rows.iterrows()}
    holds = [name for name, share in shares.items() if share >= MOSTLY]
    fails = [name for name, share in shares.items() if share < 1 - MOSTLY]
    sentences = []
    if holds:
        least = min(shares[name] for name in holds)
        share = "all" if least == 1 else f"at least {least:.1%}"
        sentences.append(
            "The published explanation, that fp16 cannot represent 0.01, holds for "
            f"{listed(holds)}: representation is {share} of the error there."
        )
    for name in fails:
        row = rows[rows["provider"] == name].iloc[0]
        parts = float(row["representation_error"]), float(row["accumulation_error"])
        ratio = abs(parts[1] / parts[0]) if parts[0] else float("inf")
        opposite = ", of the opposite sign" if parts[0] * parts[1] < 0 else ""
        sentences.append(
            f"It does not hold for the {name} sum: representation contributes "
            f"{tables.signed(parts[0])}, accumulation {tables.signed(parts[1])}, {number(ratio)} "
            f"times as much{opposite}."
        )
    return sentences


def growth(frame: pd.DataFrame) -> list[str]:
    """How errors of sums grow with the number of terms, and which method stops the growth."""
    rows = source(frame, "growth")
    if rows.empty:
        return no_rows("growth")
    n_terms, top = tables.common_terms(rows), int(rows["n_terms"].max())
    sentences = []
    uniform = rows[rows["distribution"] == "uniform"]
    plain = uniform[(uniform["method"] == "sequential") & (uniform["n_terms"] == top)]
    lost = plain[plain["relative_error"] > 0.5].sort_values("relative_error", ascending=False)
    if len(lost):
        named = [f"{row['dtype']} {row['relative_error']:.1%}" for _, row in lost.iterrows()]
        sentences.append(
            f"Adding {top:,} uniform terms one by one loses most of the sum in short formats "
            f"(relative error: {listed(named)})."
        )
    fp32 = uniform[(uniform["provider"] == "sequential fp32") & (uniform["n_terms"] >= 100)]
    slope = exponent(fp32, "n_terms") if len(fp32) else None
    if slope is not None:
        last = fp32.loc[fp32["n_terms"].idxmax()]
        scale = formats.get("fp32").unit_roundoff * float(last["n_terms"])
        sentences.append(
            f"In fp32 the same error grows as $n^{{{slope:.2f}}}$ and reaches "
            f"{number(last['relative_error'], 2)} at n = {last['n_terms']:,.0f}; the worst case nu "
            f"is {number(scale / last['relative_error'], 2)} times larger."
        )
    at = uniform[(uniform["n_terms"] == n_terms) & (uniform["dtype"] == "fp32")]
    errors = dict(zip(at["method"], at["relative_error"], strict=True))
    if {"sequential", "pairwise", "kahan"} <= set(errors) and min(errors.values()) > 0:
        gains = [number(errors["sequential"] / errors[m], 2) for m in ("pairwise", "kahan")]
        sentences.append(
            f"At n = {n_terms:,} in fp32, the median error of adding uniform terms one by one is "
            f"{gains[0]} times that of pairwise and {gains[1]} times that of Kahan's summation."
        )
    return sentences + _kahan_limits(rows)


def _kahan_limits(rows: pd.DataFrame) -> list[str]:
    """Where Kahan's sum of equal terms leaves its bound 2u, if it does: n u^2 has then grown
    beyond u.
    """
    sentences = []
    kahan = rows[(rows["method"] == "kahan") & (rows["distribution"] == "constant")]
    for dtype in tables.FORMAT_ORDER:
        u = formats.get(dtype).unit_roundoff
        over = kahan[(kahan["dtype"] == dtype) & (kahan["relative_error"] > 4 * u)]
        if len(over):
            first = over.loc[over["n_terms"].idxmin()]
            n_terms = float(first["n_terms"])
            sentences.append(
                f"Kahan's sum is not safe in {dtype}: at n = {n_terms:,.0f} equal terms its error "
                f"is {number(first['relative_error'] / u, 2)} u. The second term of its bound, "
                f"2u + O(nu²), is of the order of {number(n_terms * u, 2)} u there."
            )
    return sentences


def stagnation(frame: pd.DataFrame) -> list[str]:
    """Where sums stop growing, and whether the formula says so."""
    rows = source(frame, "stagnation")
    if rows.empty:
        return no_rows("stagnation")
    right = int((rows["value"] == rows["predicted_value"]).sum())
    small = rows[rows["term_text"] == "0.01"]
    stops = [
        f"{row['dtype']} at {row['value']:,.0f}"
        for dtype in reversed(tables.FORMAT_ORDER)
        for _, row in small[small["dtype"] == dtype].iterrows()
    ]
    stops_text = f" Adding 0.01 stops for good in {listed(stops)}." if stops else ""
    return [
        f"The formula for the value at which a sum of equal terms stops growing is right in "
        f"{right} of {len(rows)} cases.{stops_text}"
    ]


def dots(frame: pd.DataFrame) -> list[str]:
    """What an fp32 accumulator is worth in a dot product, and what then limits it."""
    rows = source(frame, "dots")
    if rows.empty:
        return no_rows("dots")
    k = int(rows["k"].max())
    at = rows[(rows["k"] == k) & (rows["distribution"] == "uniform")]
    cells = at.set_index(["dtype", "accumulator"])
    sentences = []
    for dtype in ("fp16", "bf16"):
        if (dtype, "fp32") in cells.index and (dtype, dtype) in cells.index:
            wide, same = cells.loc[(dtype, "fp32")], cells.loc[(dtype, dtype)]
            sentences.append(
                f"Positive {dtype} dot products of length {k:,} err by "
                f"{number(same['relative_error'], 2)} with {with_article(dtype)} accumulator and "
                f"by {number(wide['relative_error'], 2)} with an fp32 one."
            )
    wide_rows = rows[(rows["accumulator"] == "fp32") & rows["dtype"].isin(["fp16", "bf16", "tf32"])]
    limited = wide_rows["representation_error"] > wide_rows["relative_error"]
    if len(wide_rows):
        sentences.append(
            f"With an fp32 accumulator the rounding of the inputs is the larger error in "
            f"{int(limited.sum())} of {len(wide_rows)} cases with fp16, bf16 or TF32 inputs."
        )
    return sentences


def tensor_core(frame: pd.DataFrame) -> list[str]:
    """How the tensor core's own accumulation errs, grows and leans."""
    rows = source(frame, "tensor_core", "cuda")
    if rows.empty:
        return [*tables.unavailable(frame, "tensor_core"), *_model_sentences(frame)] or no_rows(
            "tensor_core"
        )
    uniform = rows[rows["distribution"] == "uniform"]
    device = described(rows)
    sentences = []
    for dtype, group in uniform.groupby("dtype", sort=False):
        by = dict(list(group.groupby("provider")))
        if not {"in the tensor core", "promoted"} <= set(by):
            continue
        inside, promoted = by["in the tensor core"], by["promoted"]
        last = inside.loc[inside["k"].idxmax()]
        better = promoted.loc[promoted["k"].idxmax()]
        slope = exponent(inside, "k")
        grows = f", growing as $K^{{{slope:.2f}}}$" if slope is not None else ""
        ratio = number(last["relative_error"] / better["relative_error"], 2)
        sentences.append(
            f"Summing {last['k']:,.0f} positive {dtype} products inside the tensor core errs by "
            f"{number(last['relative_error'], 2)}{grows}, with {last['toward_zero_share']:.0%} of "
            f"the elements too small: a bias, as truncation gives. Promoting each block of 64 "
            f"leaves {number(better['relative_error'], 2)}, {ratio} times less ({device})."
        )
    return sentences + _cublas(uniform) + _model_sentences(frame)


def _cublas(uniform: pd.DataFrame) -> list[str]:
    """Which of the two ways cuBLAS's error resembles, at the largest K."""
    at = uniform[uniform["k"] == uniform["k"].max()].set_index(["dtype", "provider"])
    sentences = []
    for dtype in dict.fromkeys(uniform["dtype"]):
        keys = [(dtype, name) for name in ("cuBLAS", "in the tensor core", "promoted")]
        if not all(key in at.index for key in keys):
            continue
        own, inside, promoted = (float(at.loc[key, "relative_error"]) for key in keys)
        if min(own, inside, promoted) <= 0:
            continue
        nearer = np.argmin([abs(np.log(own / other)) for other in (inside, promoted)])
        like = ("unpromoted", "promoted")[int(nearer)]
        sentences.append(
            f"cuBLAS with {dtype} operands errs by {number(own, 2)} there, nearer to {like} "
            "accumulation."
        )
    return sentences


def _model_sentences(frame: pd.DataFrame) -> list[str]:
    """What the computed models of a chopping and a rounding accumulator predict."""
    rows = source(frame, "tensor_core", "cpu")
    if rows.empty:
        return []
    uniform = rows[rows["distribution"] == "uniform"]
    parts = []
    for provider, group in uniform.groupby("provider", sort=False):
        slope, last = exponent(group, "k"), group.loc[group["k"].idxmax()]
        if slope is not None:
            parts.append(
                f"{str(provider).removeprefix('model: ')} $K^{{{slope:.2f}}}$, "
                f"{number(last['relative_error'], 2)} at K = {last['k']:,.0f}"
            )
    return [f"Model of an accumulator, positive fp16 data: {'; '.join(parts)}."] if parts else []


def checklist(frame: pd.DataFrame) -> list[str]:
    """Practical advice, each item with the rows' figures behind it."""
    items = []
    sums = source(frame, "torch_sum")
    sums = sums[sums["provider"].isin(["torch.sum", "one by one"])] if len(sums) else sums
    bf16 = sums[sums["dtype"] == "bf16"] if len(sums) else sums
    if len(bf16) and {"torch.sum", "one by one"} <= set(bf16["provider"]):
        at = bf16[bf16["n_terms"] == bf16["n_terms"].max()].groupby("provider")["relative_error"]
        errors = at.max()
        items.append(
            "Never add to a running total held in half precision, such as a loss or a metric kept "
            f"across steps: {number(errors['one by one'], 2)} error against "
            f"{number(errors['torch.sum'], 2)} with `torch.sum`, over the same "
            f"{bf16['n_terms'].max():,.0f} bf16 terms."
        )
    stops = source(frame, "stagnation")
    one = (
        stops[(stops["term_text"] == "1") & stops["dtype"].isin(["bf16", "fp16"])]
        if len(stops)
        else stops
    )
    if len(one):
        counts = [f"{row['value']:,.0f} in {row['dtype']}" for _, row in one.iterrows()]
        items.append(f"Do not count in half precision: a counter stops at {listed(counts)}.")
    items += _checklist_products(frame)
    model = source(frame, "autocast_model")
    kept = (
        model[model["provider"].isin(["parameters", "gradients", "loss"])] if len(model) else model
    )
    if len(kept):
        wide = list(dict.fromkeys(kept[kept["output_dtype"] == "fp32"]["provider"]))
        if wide:
            items.append(
                f"Under autocast, expect {listed(wide)} in fp32; do not cast them by hand."
            )
    return items or ["No rows yet: run the notebook to compute this checklist."]


def _checklist_products(frame: pd.DataFrame) -> list[str]:
    items = []
    rows = source(frame, "dots")
    if len(rows):
        wide = rows[(rows["accumulator"] == "fp32") & rows["dtype"].isin(["fp16", "bf16"])]
        worst = wide.groupby("dtype")["total_error"].max()
        if len(worst):
            shown = [f"{name} {number(error, 2)}" for name, error in worst.items()]
            items.append(
                "Keep fp32 accumulators in dot products; what remains is the rounding of the "
                f"inputs (largest median total error: {listed(shown)})."
            )
    core = source(frame, "tensor_core", "cuda")
    if len(core):
        at = core[(core["distribution"] == "uniform") & (core["provider"] == "in the tensor core")]
        u = formats.get("fp32").unit_roundoff
        over = at[at["relative_error"] > 32 * u]
        if len(over):
            items.append(
                f"Promote to an ordinary fp32 addition when K reaches {over['k'].min():,.0f} and "
                "full fp32 accuracy is wanted: from there the tensor core's error on positive data "
                "is above 32 u."
            )
    return items


def findings(frame: pd.DataFrame) -> list[str]:
    """All findings, in the notebook's order."""
    parts = (four_sums, growth, stagnation, dots, torch_itself, tensor_core)
    return [sentence for part in parts for sentence in part(frame)]


def headline(frame: pd.DataFrame) -> list[str]:
    """Two or three sentences for the abstract; none without rows."""
    sentences = []
    if len(rows_of(frame, "four_sums")):
        sums = source(frame, "four_sums", "cpu")
        if len(sums):
            shares = {r["provider"]: tables.representation_share(r) for _, r in sums.iterrows()}
            fails = [name for name, share in shares.items() if share < 1 - MOSTLY]
            sentences.append(
                f"Of {len(shares)} published sums of 0.01, {len(shares) - len(fails)} err because "
                f"the term is rounded, as published; the {listed(fails)} sums because the "
                "additions are."
                if fails
                else f"All {len(shares)} published sums of 0.01 err because the term is rounded."
            )
    core = tensor_core(frame) if len(source(frame, "tensor_core", "cuda")) else []
    if core:
        return sentences + core[:1]
    return sentences + (dots(frame)[1:2] if len(source(frame, "dots")) else [])
