"""What the study claims of the memory of a SwiGLU MLP and of stacks of them."""

import numpy as np
import pandas as pd

from press.say import claim
from press.show import published
from study.memory import from_tables

KEPT = {"eager": 4, "liger": 3, "fused": 2, "fused-input": 0}
"""Tensors of tokens times intermediate size that each keeps for backward."""
STEP = "experiment == 'step' and dtype == 'bfloat16'"


@claim(
    "memory/kept",
    "For backward a fused MLP keeps two thirds of what Liger keeps, half of PyTorch's; its peak "
    "falls less",
    of=lambda rows: rows.query(
        "experiment in ['saved', 'step'] and shape == '8192·4096·14336' and dtype == 'bfloat16'"
    ),
    repeats="counted",
)
def kept(rows: pd.DataFrame) -> tuple[dict, bool]:
    """For backward fusedlib keeps {fused:,d} MiB of an MLP of {shape} in bf16, and PyTorch
    {eager:,d} MiB, as counted by hand. Liger and torch.compile keep {liger:,d} MiB. The peak of a
    step is {peak:2%} of PyTorch's."""
    by = rows.pivot_table(["saved_f", "saved_mib", "peak_mib"], "provider", "experiment")
    mib, peak = by["saved_mib", "saved"], by["peak_mib", "step"]
    off = by["saved_f", "saved"].reindex(list(KEPT)).sub(list(KEPT.values())).abs()
    say = {**mib[["eager", "fused", "liger"]], "shape": rows["shape"].iloc[0]}
    say["peak"], alike = peak["fused"] / peak["eager"], mib["liger"] == mib["inductor"]
    return say, off.max(skipna=False) < 0.02 and alike and 0.5 < say["peak"] < 1


@claim("memory/peak", of=lambda rows: rows.query(STEP), repeats="counted")
def peak(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Over {n:,d} bf16 shapes the peak of a step with fusedlib, weights and inputs left out, ranges
    from {below:2%} below Liger's to {above:2%} above it."""
    mib = rows.pivot(index="shape", columns="provider", values="peak_mib")
    liger, compiled = ((mib["fused"] / mib[n] - 1).dropna() for n in ("liger", "inductor"))
    say = {"n": len(liger), "below": -liger.min(), "above": liger.max()}
    mixed = [ratio.min() < -0.15 and 0 < ratio.max() < 0.12 for ratio in (liger, compiled)]
    return say, all(mixed) and len(liger) > 4


@claim("memory/counted", of=lambda rows: rows.query(f"{STEP} and device == 'cuda'"),
       repeats="counted")  # fmt: skip
def counted(rows: pd.DataFrame) -> tuple[dict, bool]:
    """The sizes of the tensors, summed before anything runs, give the peak of CUDA's allocator
    within a thousandth in {met:,d} of {n:,d} bf16 steps."""
    known = rows[(rows["status"] == "ok") & rows["counted_mib"].notna()]
    off = (known["peak_mib"] / known["counted_mib"] - 1).abs()
    met = off < 0.001
    return {"met": met.sum(), "n": len(off)}, off.max() < 0.05 and met.mean() > 0.9


@claim(
    "memory/published",
    of=lambda rows: rows.query("experiment == 'step' and dtype == 'float32'"),
    repeats="counted",
)
def in_tables(rows: pd.DataFrame) -> tuple[dict, bool]:
    """The published peaks of Liger are those of {liger:,d} weights, the published layer's those of
    {ours:,d}, so that their ratio tends to {limit:3}. With all gradients on both sides Liger's
    peak, weights and inputs included, is {widest:3}× fusedlib's at the greatest width, where
    fusedlib runs plain PyTorch. Over the published sizes it ranges from {least:3}×, where fusedlib
    splits its products and holds more, to {most:3}×. Weights and inputs left out, fusedlib holds
    up to {beside:2%} more."""
    grid = _grid()
    is_liger = grid["provider"] == "liger"
    liger, ours = (round(_fitted(grid[which])[0]) for which in (is_liger, ~is_liger))
    by = rows.pivot(index=["hidden_size", "tokens"], columns="provider", values="whole_mib")
    over = (by["liger"] / by["fused"]).dropna().sort_index()
    alone = rows.pivot(index="shape", columns="provider", values="peak_mib")
    beside = (alone["fused"] / alone["liger"] - 1).max()
    widest = over.tail(1).max()  # NaN where a side has no figures
    say = {"liger": liger, "ours": ours, "limit": liger / ours, "widest": widest}
    say |= {"least": over.min(), "most": over.max(), "beside": beside}
    near = abs(widest - 1) < 0.01 and over.between(0.85, 1.05).all() and len(over) > 4
    plain = rows[rows["provider"] == "fused"].sort_values("hidden_size")["path"].iloc[-1]
    return say, near and (liger, ours) == (6, 4) and plain.startswith("plain")


def _grid() -> pd.DataFrame:
    rows = from_tables(published("memory"))
    return rows[rows["table"] == "mlp_memory_compare.py"].astype({"tokens": int})


def _fitted(part: pd.DataFrame) -> np.ndarray:
    """How many W and A = tokens · width, and how many MiB beside them, make the published peaks."""
    w, a = (part["hidden_size"] * part[n] * 4 / 2**20 for n in ("hidden_size", "tokens"))
    terms = np.stack([w, a, np.ones(len(part))], axis=1).astype(float)
    return np.linalg.lstsq(terms, part["whole_mib"].astype(float), rcond=None)[0]


@claim(
    "memory/published-stack",
    of=lambda rows: from_tables(published("memory")).query("layers.notna()"),
)
def published_stack(rows: pd.DataFrame) -> tuple[dict, bool]:
    """One more layer of the published stack holds {liger:3} MiB with Liger and {ours:3} MiB with
    the published layer. Both are whole numbers of tensors at {sizes:,d} of the published sizes:
    {tokens:,d} tokens of width {width:,d}. There they are {liger_w:,d} and {ours_w:,d} tensors of a
    weight's size beside activations; a layer with all its gradients holds six."""
    ends = rows.sort_values("layers").groupby("provider")[["total_peak_mib", "layers"]]
    cost = (ends.last() - ends.first()).astype(float).eval("total_peak_mib / layers")
    fits, grid = {}, _grid()
    for tokens, width in {*zip(grid["tokens"], grid["hidden_size"], strict=True)}:
        w, a = (width * n * 4 / 2**20 for n in (width, tokens))
        whole = {
            name: [i for i in range(7) for j in range(8) if abs(i * w + j * a - mib) < 0.05]
            for name, mib in cost.items()
        }
        if all(whole.values()):
            fits[tokens, width] = whole
    say = {"liger": cost["liger"], "ours": cost.drop("liger").iloc[0], "sizes": len(fits)}
    nowhere = (0, 0), {name: [9] for name in cost.index}
    (tokens, width), weights = next(iter(fits.items()), nowhere)
    liger_w, ours_w = weights["liger"][0], weights[cost.drop("liger").index[0]][0]
    say |= {"tokens": tokens, "width": width, "liger_w": liger_w, "ours_w": ours_w}
    return say, len(fits) == 1 and max(liger_w, ours_w) < 6


@claim(
    "memory/stack",
    of=lambda rows: rows.query("experiment == 'stack' and dtype == 'bfloat16' and held == True"),
    repeats="counted",
)
def stack(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In a deep stack of layers of {shape} in bf16, gradients held, one more layer costs {fused:,d}
    MiB with fusedlib where it costs {liger:,d} with Liger and {eager:,d} with PyTorch. Where
    fusedlib keeps x alone it costs {alone:,d}. {layers:,d} such layers fit one GPU only where x
    alone is kept."""
    ran = rows[rows["status"] == "ok"].sort_values("layers").groupby("provider")
    cost = ran["layer_mib"].last()
    deepest = rows[rows["layers"] == rows["layers"].max()]
    fits = [*deepest[deepest["status"] == "ok"]["provider"]]
    say = {name: cost[name] for name in ("eager", "liger", "fused")}
    say |= {"alone": cost["fused-input"], "layers": rows["layers"].max()}
    say["shape"] = rows["shape"].iloc[0]
    ordered = say["eager"] > 1.1 * say["liger"] > 1.3 * say["fused"] > 2 * say["alone"]
    return say, ordered and fits == ["fused-input"]
