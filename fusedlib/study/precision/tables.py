"""Tables of study 02, precision and accumulation: pure functions from rows to frames of strings.

Every function takes the frame of `results.load("02_precision")` and gives an empty frame with its
columns when the experiment has no usable rows.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fusedlib.study import published
from fusedlib.study.display import number
from fusedlib.study.selection import leading, placed
from fusedlib.study.selection import per_machine as fullest

DATA = {"constant": "0.01 each time", "uniform": "uniform", "normal": "normal"}
FORMAT_ORDER = ("fp32", "tf32", "fp16", "bf16")
METHOD_ORDER = ("sequential", "pairwise", "kahan")
# The published table names its cases by dtype; these are our names for the same sums.
PUBLISHED_CASES = {
    "float32 into float32": "fp32",
    "float16 into float16": "fp16",
    "float16 into float32": "fp16 into fp32",
    "float16 upcast, then into float32": "fp16 upcast, then added",
}
_COMPARED = ("four_sums", "growth", "stagnation", "dots", "torch_sum")
_IDENTITY = (
    "experiment", "provider", "dtype", "distribution", "n_terms", "k", "seeds", "device",
    "term_text", "accumulator", "precision", "reduced_reduction", "m", "n",
)  # fmt: skip
# Columns that the functions below read; a frame that lacks some gets them, empty.
_COLUMNS = (
    "machine", "profile", "device_type", "device_name", "own", "status", "reason", "measured_at",
    *_IDENTITY, "method", "value", "displayed", "exact", "error", "representation_error",
    "accumulation_error", "relative_error", "total_error", "error_in_roundoffs",
    "best_possible_error", "changed_fraction", "kind", "output_dtype", "predicted_value",
    "additions", "toward_zero_share",
)  # fmt: skip


def rows_of(frame: pd.DataFrame, experiment: str, status: str | None = "ok") -> pd.DataFrame:
    """All rows of one experiment with this status, or with any when it is None."""
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *_COLUMNS])))
    if frame.empty:
        return frame
    keep = frame["experiment"] == experiment
    rows = frame[keep].sort_values("measured_at", kind="stable")
    # A changed number of seeds makes a new case; the older row must not stand beside it.
    same = [
        name for name in ("machine", "profile", *_IDENTITY) if name in frame and name != "seeds"
    ]
    rows = rows.drop_duplicates(same, keep="last").sort_index()
    return rows if status is None else rows[rows["status"] == status]


def source(frame: pd.DataFrame, experiment: str, device: str | None = None) -> pd.DataFrame:
    """The usable rows of the leading machine."""
    rows = rows_of(frame, experiment)
    return leading(rows if device is None else rows[rows["device"] == device])


def per_machine(frame: pd.DataFrame, experiment: str, status: str | None = "ok") -> pd.DataFrame:
    """The rows of every machine with this status, each from one profile: the fullest it has."""
    return fullest(rows_of(frame, experiment, status))


def described(rows: pd.DataFrame) -> str:
    """Machine and profile of rows that come from one machine, for a caption."""
    if rows.empty:
        return "no machine yet"
    first = rows.iloc[0]
    own = ", this machine" if first["own"] else ""
    return f"{first['device_name']}{own}; profile {first['profile']}"


def published_sums() -> dict[str, float]:
    """The published values by our name of the sum."""
    table = published.load("accumulation")
    return {PUBLISHED_CASES[row.case]: float(row.value) for row in table.itertuples()}


def four_sums_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Published beside measured sums: a row a sum, a column a place, four decimals as published."""
    rows = placed(per_machine(frame, "four_sums"))
    values = published_sums()
    table = pd.DataFrame({"Sum": list(values), "Published": [f"{v:.4f}" for v in values.values()]})
    for where, group in rows.groupby("place", sort=False):
        shown = dict(zip(group["provider"], group["displayed"], strict=True))
        table[str(where)] = [shown.get(name) for name in values]
    return table


def split_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The error of each published sum, and its two exact parts."""
    rows = source(frame, "four_sums", "cpu")
    lines = [
        {
            "Sum": row["provider"],
            "Value": f"{row['value']:.9g}",
            "Error": signed(row["error"]),
            "Representation": signed(row["representation_error"]),
            "Accumulation": signed(row["accumulation_error"]),
            "Representation's share": f"{representation_share(row):.1%}",
        }
        for _, row in rows.iterrows()
    ]
    columns = [
        "Sum", "Value", "Error", "Representation", "Accumulation", "Representation's share",
    ]  # fmt: skip
    return pd.DataFrame(lines, columns=columns)


def representation_share(row: pd.Series) -> float:
    """|representation| / (|representation| + |accumulation|) of one sum's error, from 0 to 1."""
    representation, accumulation = (
        abs(float(row[name])) for name in ("representation_error", "accumulation_error")
    )
    return representation / ((representation + accumulation) or 1.0)


def signed(value: float) -> str:
    """A signed number at three digits."""
    text = number(float(value))
    return text if value <= 0 else f"+{text}"


def _present(names: Sequence[str], values: pd.Series) -> list[str]:
    there = set(values)
    return [name for name in names if name in there]


def growth_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Median relative error at the largest number of terms that every method reached."""
    rows = source(frame, "growth")
    if rows.empty:
        return pd.DataFrame({"Format": pd.Series(dtype=str)})
    n_terms = common_terms(rows)
    at = rows[rows["n_terms"] == n_terms]
    cells = at.set_index(["distribution", "method", "dtype"])["relative_error"]
    lines = {}
    for distribution in _present(("constant", "uniform", "normal"), at["distribution"]):
        for method in _present(METHOD_ORDER, at["method"]):
            lines[(DATA[distribution], method)] = [
                _number(cells, (distribution, method, dtype))
                for dtype in _present(FORMAT_ORDER, at["dtype"])
            ]
    index = pd.Index(_present(FORMAT_ORDER, at["dtype"]), name="Format")
    return pd.DataFrame(lines, index=index)


def common_terms(rows: pd.DataFrame) -> int:
    """The largest number of terms at which all methods of a growth experiment have rows."""
    return int(rows.groupby("method")["n_terms"].max().min())


def _number(cells: pd.Series, key: tuple[str, ...]) -> str | None:
    return number(float(cells.loc[key]), 2) if key in cells.index else None


def stagnation_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Where a sum of equal terms stops, measured and by formula."""
    rows = source(frame, "stagnation")
    columns = ["Format", "Term", "Stops at", "By formula", "After additions", "Exact sum then"]
    lines = [
        (
            row["dtype"],
            row["term_text"],
            f"{row['value']:,.0f}",
            f"{row['predicted_value']:,.0f}",
            f"{row['additions']:,.0f}",
            f"{row['exact']:,.2f}",
        )
        for dtype in FORMAT_ORDER
        for _, row in rows[rows["dtype"] == dtype].iterrows()
    ] if not rows.empty else []  # fmt: skip
    return pd.DataFrame(lines, columns=columns)


def dots_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Errors of dot products at the largest K: arithmetic, representation, both together."""
    rows = source(frame, "dots")
    if rows.empty:
        return pd.DataFrame({"Inputs into accumulator": pd.Series(dtype=str)})
    at = rows[rows["k"] == rows["k"].max()]
    providers = list(dict.fromkeys(at["provider"]))
    names = {
        "accumulation": "relative_error",
        "representation": "representation_error",
        "total": "total_error",
    }
    cells = at.set_index(["distribution", "provider"])
    table = {
        (distribution, title): [
            _number(cells[figure], (distribution, provider)) for provider in providers
        ]
        for distribution in _present(("uniform", "normal"), at["distribution"])
        for title, figure in names.items()
    }
    return pd.DataFrame(table, index=pd.Index(providers, name="Inputs into accumulator"))


def torch_sum_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Largest error over the seeds in unit roundoffs of the terms' format, at the most terms."""
    rows = placed(per_machine(frame, "torch_sum"))
    columns = ["fp32", "fp16", "bf16"]
    if rows.empty:
        return pd.DataFrame(columns=["Where", "Sum", *columns])
    at = rows[rows["n_terms"] == rows["n_terms"].max()]
    cells = at.set_index(["place", "provider", "dtype"])["error_in_roundoffs"]
    keys = list(dict.fromkeys(zip(at["place"], at["provider"], strict=True)))
    lines = [[_number(cells, (*key, dtype)) for dtype in columns] for key in keys]
    index = pd.MultiIndex.from_tuples(keys, names=["Where", "Sum"])
    return pd.DataFrame(lines, index=index, columns=columns)


def torch_matmul_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Error of matrix products at each setting, and how much of the result the setting changed."""
    rows = per_machine(frame, "torch_matmul", status=None)
    columns = ["Where", "Setting", "dtype", "M×N×K", "Error", "Least possible", "Changed"]
    lines = []
    for _, row in placed(rows).iterrows():
        measured = row["status"] == "ok"
        lines.append(
            (
                row["place"],
                row["provider"],
                row["dtype"],
                f"{row['m']:.0f}×{row['n']:.0f}×{row['k']:.0f}",
                number(row["relative_error"], 2) if measured else row["status"],
                number(row["best_possible_error"], 2) if measured else None,
                f"{row['changed_fraction']:.0%}" if measured else None,
            )
        )
    table = pd.DataFrame(lines, columns=columns)
    return table.set_index(["Where", "Setting"]).sort_index(level=0, sort_remaining=False)


def autocast_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What autocast does to each operation: a row an operation, a column a place."""
    rows = placed(per_machine(frame, "autocast"))
    table: dict[str, list[str | None]] = {}
    operations = list(dict.fromkeys(rows["provider"])) if not rows.empty else []
    for where, group in rows.groupby("place", sort=False):
        kinds = {str(name): _kinds(part) for name, part in group.groupby("provider")}
        table[str(where)] = [kinds.get(operation) for operation in operations]
    return pd.DataFrame(table, index=pd.Index(operations, name="Operation"))


def _kinds(rows: pd.DataFrame) -> str:
    """One kind when all autocast dtypes agree, else each with its dtype."""
    if rows["kind"].nunique() == 1:
        return str(rows["kind"].iloc[0])
    return "; ".join(f"{row['dtype']}: {row['kind']}" for _, row in rows.iterrows())


def autocast_model_table(frame: pd.DataFrame) -> pd.DataFrame:
    """dtypes inside a small network under autocast: a row a part, a column place and dtype."""
    rows = placed(per_machine(frame, "autocast_model"))
    table: dict[tuple[str, str], list[str | None]] = {}
    parts = list(dict.fromkeys(rows["provider"])) if not rows.empty else []
    for (where, dtype), group in rows.groupby(["place", "dtype"], sort=False):
        found = dict(zip(group["provider"], group["output_dtype"], strict=True))
        table[(str(where), f"autocast {dtype}")] = [found.get(part) for part in parts]
    return pd.DataFrame(table, index=pd.Index(parts, name="Part"))


def tensor_core_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Error at the largest K, growth with K, and bias of each way to accumulate."""
    rows = pd.concat([source(frame, "tensor_core", "cuda"), _models(frame)])
    columns = ["Sum over K kept", "Operands", "Data", "K", "Error", "Grows as", "Toward zero"]
    lines = []
    for key, group in rows.groupby(["distribution", "dtype", "provider"], sort=False):
        last = group.loc[group["k"].idxmax()]
        lines.append(
            (
                key[2], key[1], key[0], f"{last['k']:,.0f}", number(last["relative_error"], 2),
                exponent_text(group, "k"), f"{last['toward_zero_share']:.0%}",
            )
        )  # fmt: skip
    table = pd.DataFrame(lines, columns=columns)
    return table.sort_values(
        ["Data", "Operands"], ascending=False, kind="stable", ignore_index=True
    )


def _models(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of the computed models, from whichever machine computed them."""
    return source(frame, "tensor_core", "cpu")


def exponent(rows: pd.DataFrame, x: str, y: str = "relative_error") -> float | None:
    """Slope of log y against log x, least squares over the upper half of x; None for < 3 points."""
    points = rows[(rows[y] > 0) & rows[x].notna()].sort_values(x)
    points = (
        points[points[x] >= np.sqrt(points[x].min() * points[x].max())] if len(points) else points
    )
    if len(points) < 3:
        return None
    return float(np.polyfit(np.log(points[x].astype(float)), np.log(points[y].astype(float)), 1)[0])


def superscript(value: float) -> str:
    """A number at two decimals in superscript digits: table cells are plain text."""
    return f"{value:.2f}".translate(str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹"))


def exponent_text(rows: pd.DataFrame, x: str) -> str | None:
    """The growth exponent as `K⁰·⁹⁸`, or None when there are too few points."""
    slope = exponent(rows, x)
    return None if slope is None else f"{x.upper() if x == 'k' else 'n'}" + superscript(slope)


def unavailable(frame: pd.DataFrame, experiment: str) -> list[str]:
    """Sentences on what could not be measured on this machine, and why."""
    rows = rows_of(frame, experiment, status=None)
    if rows.empty:
        return []
    missing = rows[rows["own"].astype(bool) & (rows["status"] != "ok")]
    tried = int(rows["own"].sum())
    return [
        f"{len(group)} of {tried} cases are {status} on this machine: {reason}."
        for (status, reason), group in missing.groupby(["status", "reason"])
    ]


def agreement_table(frame: pd.DataFrame) -> pd.DataFrame:
    """How many CPU cases give the same bits on each machine as on the source."""
    columns = [
        "Experiment",
        "Machine",
        "Compared with",
        "Same cases",
        "Same bits",
        "Largest change",
    ]
    lines = []
    for experiment in _COMPARED:
        base = source(frame, experiment, "cpu")
        rows = rows_of(frame, experiment)
        if base.empty:
            continue
        others = rows[(rows["device"] == "cpu") & (rows["machine"] != base["machine"].iloc[0])]
        for machine, group in others.groupby("machine"):
            both = base.merge(group, on=list(_IDENTITY), suffixes=("", "_other"))
            if both.empty:
                continue
            difference = (both["value"] - both["value_other"]).abs()
            change = (difference / both["value"].abs()).where(difference > 0, 0.0)
            lines.append(
                (
                    experiment, str(machine), str(base["machine"].iloc[0]), len(both),
                    int((change == 0).sum()), number(float(change.max()), 2),
                )
            )  # fmt: skip
    return pd.DataFrame(lines, columns=columns)
