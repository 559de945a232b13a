"""The published figures that stand beside ours: data of the repository, never typed into prose.

Tables are `report/published/*.csv`, tidy, a row a figure or pair of figures, units in the column
names, each row naming its source; `sources.toml` beside them says what the sources are.
"""

from collections.abc import Callable

import pandas as pd

from fusedlib.bench import paths

# Columns that hold no figure. Everything that is not a number is read as nullable text.
_TEXT = {"source": "string"}
MACHINE = "published"
"""The machine of `as_rows`: a claim over them says that it speaks of published tables."""
_NULLABLE = {
    "compile": "boolean",
    "weight_gradient": "boolean",
    "warmup_steps": "Int64",
    "benchmark_steps": "Int64",
    "context_length": "Int64",
    "batch_size": "Int64",
    "d_model": "Int64",
    "num_layers": "Int64",
    "sharding_stage": "Int64",
}


def _warmup(frame: pd.DataFrame) -> pd.DataFrame:
    eager_fp32 = frame["precision"].eq("float32") & frame["compile"].eq(False)
    return frame[eager_fp32.fillna(False) | frame["source"].eq("004")]


# Tables that are a part of a file: the file, and which rows of it.
_VIEWS: dict[str, tuple[str, Callable[[pd.DataFrame], pd.DataFrame]]] = {
    "warmup": ("end_to_end", _warmup),
}


def tables() -> list[str]:
    """Names that `load` knows, sorted."""
    return sorted([path.stem for path in paths.PUBLISHED.glob("*.csv")] + list(_VIEWS))


def load(table: str) -> pd.DataFrame:
    """One published table as a tidy frame; what a source does not state is missing.

    `end_to_end` holds all Transformer steps, `warmup` those of them that differ in warm-up only.
    Raises ValueError for an unknown table, listing the known ones.
    """
    if table not in tables():
        raise ValueError(f"unknown published table {table!r}; known: {', '.join(tables())}")
    file, select = _VIEWS.get(table, (table, None))
    frame = pd.read_csv(paths.PUBLISHED / f"{file}.csv", dtype=_TEXT)
    frame = frame.astype({name: kind for name, kind in _NULLABLE.items() if name in frame})
    return frame if select is None else select(frame).reset_index(drop=True)


def as_rows(table: str, study: str) -> pd.DataFrame:
    """A published table in the form of rows, each a case of its own, for a claim of this study."""
    frame = load(table)
    frame = frame.astype({"source": object}).assign(
        machine=pd.Categorical([MACHINE] * len(frame)), recording="as published", own=False,
        profile=MACHINE, device_type="cuda", status="ok",
        case=[f"{MACHINE} {n}" for n in range(len(frame))],
    )  # fmt: skip
    frame.attrs["study"] = study
    return frame
