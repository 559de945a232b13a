"""The SwiGLU MLP alone: in turns, under load, and at lengths that change."""

from statistics import median
from typing import Any

import pandas as pd

SHAPE = ["tokens", "hidden_size", "intermediate_size"]
MODELS = {
    "8192·3584·18944": "Qwen2.5-7B", "4096·5120·13824": "Llama-2-13B",
    "8192·3072·8192": "Llama-3.2-3B", "8192·2048·5632": "TinyLlama",
    "4096·4096·12288": "Qwen3-8B", "2048·7168·20480": "Yi-34B", "4096·5120·17920": "Phi-4",
    "16384·1536·8960": "Qwen2.5-1.5B", "8192·4096·14336": "Mistral-7B",
    "4096·4096·11008": "Llama-2-7B", "16384·2048·8192": "Llama-3.2-1B",
    "4096·8192·28672": "Llama-3-70B",
}  # fmt: skip
"""Whose MLP a shape is: tokens, hidden size and intermediate size, joined by dots."""


def derive(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    `shape` and `model` are the layer's, `tflops` the products' 10¹² operations a second. Of
    changing lengths `new_length_ms` is the median over calls that compiled nothing: the first of a
    length less the second.
    """
    used = [*SHAPE, "flops", "median_ms", "first_ms", "second_ms", "made"]
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *used])))
    parts = [pd.to_numeric(rows[name], errors="coerce") for name in SHAPE]
    shapes = ["·".join(f"{n:.0f}" for n in sizes) for sizes in zip(*parts, strict=True)]
    lengths = rows[["first_ms", "second_ms", "made"]].itertuples(index=False, name=None)
    return rows.assign(
        shape=shapes, model=[MODELS.get(shape, shape) for shape in shapes],
        tflops=rows["flops"].astype(float) / rows["median_ms"].astype(float) / 1e9,
        new_length_ms=[_above_second(*each) for each in lengths],
    )  # fmt: skip


def _above_second(first: Any, second: Any, compiled: Any) -> float | None:
    if not isinstance(first, list):
        return None
    calls = zip(first, second, compiled, strict=True)
    return median([a - b for a, b, kernels in calls if not kernels] or [float("nan")])
