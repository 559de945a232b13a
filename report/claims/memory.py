"""What the study claims of the memory of a SwiGLU MLP and of stacks of them."""

import pandas as pd

from press.say import claim
from press.show import published
from study.memory import from_tables

KEPT = {"eager": 4, "liger": 3, "fused": 2, "fused-input": 0}
"""Tensors of tokens times intermediate size that each keeps for backward."""


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
    rows = from_tables(published("memory"))
    grid = rows[rows["table"] == "mlp_memory_compare.py"].astype({"tokens": int})
    fits = {}
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
