"""The published figures that stand beside ours: data of the repository, never typed into prose.

Tables are `report/published/*.csv`, tidy, a row a figure or pair of figures, units in the column
names, each row naming its source; `sources.toml` beside them says what the sources are.
"""

import tomllib
from functools import cache
from typing import Any

import pandas as pd

from study import paths

MACHINE = "published"
"""The machine of published rows: a claim over them says that it speaks of published tables."""
WARMUP = "warmup"
"""The rows of `end_to_end` that differ in warm-up only."""
OF_TOPIC = {
    "kernels": ("swiglu_times", "swiglu_ratios"),
    "anatomy": ("swiglu_times", "swiglu_ratios", "swiglu_memory"),
    "memory": ("swiglu_memory", "swiglu_ratios"),
    "warmup": (WARMUP,),
    "end_to_end": ("end_to_end",),
    "attention": ("attention", "attention_memory"),
    "llama": ("llama",),
    "compilers": ("litgpt",),
    "precision": ("accumulation",),
    "mnist": ("mnist",),
}
"""Tables that stand beside a topic's rows."""
_WHOLE = (
    "warmup_steps", "benchmark_steps", "context_length", "batch_size", "d_model", "num_layers",
    "sharding_stage",
)  # fmt: skip
_TYPES = {
    "source": "string", **dict.fromkeys(("compile", "weight_gradient"), "boolean"),
    **dict.fromkeys(_WHOLE, "Int64"),
}  # fmt: skip


@cache
def sources() -> dict[str, dict[str, Any]]:
    """What the sources are, by id: `title`, `what`, `device`, `file`, `notes` and more."""
    return tomllib.loads((paths.PUBLISHED / "sources.toml").read_text(encoding="utf-8"))


def load(table: str) -> pd.DataFrame:
    """One published table as a tidy frame; what a source does not state is missing."""
    known = sorted([WARMUP, *(path.stem for path in paths.PUBLISHED.glob("*.csv"))])
    if table not in known:
        raise ValueError(f"unknown published table {table!r}; known: {', '.join(known)}")
    file = "end_to_end" if table == WARMUP else table
    frame = pd.read_csv(paths.PUBLISHED / f"{file}.csv", dtype=_TYPES)
    if table == WARMUP:
        eager_fp32 = frame["precision"].eq("float32") & frame["compile"].eq(False)
        frame = frame[eager_fp32.fillna(False) | frame["source"].eq("004")].reset_index(drop=True)
    return frame


def as_cases(table: str) -> pd.DataFrame:
    """A published table in the form of rows, each a race of its own, for a claim about it."""
    frame = load(table)
    frame = frame.astype({"source": object}).assign(
        machine=MACHINE, set=MACHINE, race=[f"{MACHINE} {n}" for n in range(len(frame))],
        profile=MACHINE, status="ok",
    )  # fmt: skip
    return frame if "provider" in frame else frame.assign(provider="")
