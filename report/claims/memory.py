"""What the study claims of the memory of a SwiGLU MLP and of stacks of them."""

import pandas as pd

from press.say import claim
from press.show import published
from study.memory import from_tables


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
