"""The published figures that stand beside ours: data of the repository, never typed into prose.

Tables are `report/published/*.csv`, tidy, a row a figure or pair of figures, units in the column
names, each row naming its source; `sources.toml` beside them says what the sources are. `beside`
sets one beside what was measured, with a reason for what was not.
"""

from collections.abc import Mapping

import pandas as pd

from press import origin
from press.columns import ordered_values
from press.formats import formatted
from study import paths

MACHINE = "published"
"""The machine of published rows: a claim over them says that it speaks of published tables."""
WARMUP = "warmup"
"""The rows of `end_to_end` that differ in warm-up only."""
OF_TOPIC = {
    "anatomy": ("swiglu_times", "swiglu_ratios", "swiglu_memory"),
    "memory": ("swiglu_memory", "swiglu_ratios"),
    "llama": ("llama",),
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


def load(table: str, *, texts: bool = False) -> pd.DataFrame:
    """One published table as a tidy frame; what a source does not state is missing. With `texts`
    its figures are texts, with every digit that stands in the source."""
    known = sorted([WARMUP, *(path.stem for path in paths.PUBLISHED.glob("*.csv"))])
    if table not in known:
        raise ValueError(f"unknown published table {table!r}; known: {', '.join(known)}")
    path = paths.PUBLISHED / f"{'end_to_end' if table == WARMUP else table}.csv"
    frame = pd.read_csv(path, dtype=_TYPES)
    if texts:
        figures = frame.select_dtypes("float").columns
        frame = frame.assign(**pd.read_csv(path, dtype=str)[figures])
    if table == WARMUP:
        eager_fp32 = frame["precision"].eq("float32") & frame["compile"].eq(False)
        frame = frame[eager_fp32.fillna(False) | frame["source"].eq("004")].reset_index(drop=True)
    return frame


def stated(table: str) -> pd.DataFrame:
    """A published table whose figures are texts."""
    return load(table, texts=True)


def published(topic: str) -> pd.DataFrame:
    """The published tables that stand beside a topic's rows, a row a figure; `file` is the name of
    its table."""
    return pd.concat([load(name).assign(file=name) for name in OF_TOPIC[topic]], ignore_index=True)


def beside(
    published: pd.DataFrame, ours: pd.DataFrame, on: list[str], heads: str, figure: str,
    spec: str = "3", why: Mapping[str, str] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """A published table with what was measured, and for what was not the reason.

    Args:
        published: a row a figure, the columns `on` and `heads`, and `figure` as it was printed.
        ours: the same of several in `machine`; `figure` a number, the median of several, or a text.
        on: columns of which each combination is a line.
        heads: a column whose values are groups of columns.
        spec: of our figures; see `press.formats`.
        why: reasons by a condition, as `query` takes it, on the lines of `published`.

    Raises:
        ValueError: a figure is missing and has no reason, or a reason is for nothing.
    """
    keys = [*on, heads]
    figures = published.set_index(keys)[figure]
    if figures.index.has_duplicates:
        raise ValueError(f"several published figures have one place: tell them apart in {keys}")
    columns: dict[tuple[str, str], pd.Series] = {}
    groups = ours.dropna(subset=[figure]).groupby(["machine", *keys], observed=True)[figure]
    measured = groups.median() if ours[figure].dtype.kind in "iuf" else groups.first()
    cards = ordered_values("machine", ours["machine"])
    texts = {
        card: measured.xs(card).map(lambda one: formatted(one, spec)).reindex(figures.index)
        for card in cards if card in measured.index.get_level_values(0)
    }  # fmt: skip
    lines = figures.index.droplevel(heads).drop_duplicates()
    for head in published[heads].drop_duplicates():
        for name, values in {"published": figures, **texts}.items():
            own = values[values.index.get_level_values(heads) == head].droplevel(heads)
            columns[str(head), name] = own.reindex(lines)
    missing = figures.index[pd.DataFrame(texts, figures.index).isna().all(axis=1)]
    reasons = pd.Series("", lines, dtype=object)
    left = published.set_index(keys, drop=False).loc[missing]
    for condition, reason in (why or {}).items():
        explained = left.query(condition)
        if explained.empty:
            raise ValueError(f"nothing is missing where {condition!r}: {reason}")
        reasons[lines.isin(explained.index.droplevel(heads))] = reason
        left = left.drop(explained.index)
    if len(left):
        place = ", ".join(map(str, left.index[0]))
        raise ValueError(f"ours is missing, without a reason, at {place}; add one to `why`")
    table = pd.DataFrame(columns)
    if reasons.any():
        table["", "why ours is missing"] = reasons
    there = pd.MultiIndex.from_frame(ours[keys]).isin(figures.index)
    table.index.names, table.attrs = on, {"of": origin.stated(ours[there])}
    return table
