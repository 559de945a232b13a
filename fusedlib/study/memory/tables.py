"""Study 04 from its rows: what is kept, what a step holds, and what both tend to.

Every function takes the frame of `results.load("04_memory")` and measures nothing. Counted figures
come from `fusedlib.bench.ledger` at the shape of the row.
"""

from typing import Any

import pandas as pd

from fusedlib.bench import ledger, memory
from fusedlib.bench.problems import SwiGLUProblem
from fusedlib.study import published
from fusedlib.study.display import MISSING, number
from fusedlib.study.memory import published_fit
from fusedlib.study.selection import leading, per_machine, place, rows_of

SHAPE = ["tokens", "hidden_size", "intermediate_size", "dtype"]
ORDER = list(ledger.LEDGERS)
# Shapes at which one of the three units outweighs the others.
MANY_TOKENS = SwiGLUProblem(2**24, 4096, 14336)
FEW_TOKENS = SwiGLUProblem(1, 2**14, 2**14)


def shape_of(row: Any) -> str:
    """tokens·hidden·intermediate of a row."""
    return "·".join(str(int(row[name])) for name in SHAPE[:3])


def steps(frame: pd.DataFrame, status: str | None = "ok") -> pd.DataFrame:
    """Rows of single steps with what is counted for them beside: `counted_...` columns in MiB.

    `kept_mib` is what the saved-tensor hooks saw in the row "saved" of the same case.
    """
    rows = per_machine(rows_of(frame, "step", status))
    if rows.empty:
        return rows.reindex(columns=list(dict.fromkeys([*rows.columns, "machine", *SHAPE])))
    hooks = rows_of(frame, "saved")
    keys = ["machine", "profile", "provider", *SHAPE]
    if hooks.empty:
        rows = rows.assign(kept_mib=float("nan"))
    else:
        seen = hooks[[*keys, "saved_mib"]].rename(columns={"saved_mib": "kept_mib"})
        rows = rows.merge(seen, on=keys, how="left")
    rows = with_paths(rows)
    counted = [count(row) for _, row in rows.iterrows()]
    rows = rows.join(pd.DataFrame(counted, index=rows.index))
    rank = rows["provider"].map({name: at for at, name in enumerate(ORDER)})
    return rows.assign(rank=rank).sort_values([*SHAPE, "machine", "rank"])


def with_paths(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, `path` "split" where fused in fp32 kept less than PyTorch's own lines keep.

    A row tells "plain" by the dtype; whether the products were split shows in what was kept.
    """
    if "path" not in rows:
        return rows
    keys = ["machine", *SHAPE, *(k for k in ("layers", "held") if k in rows)]
    split = []
    for _, group in rows[rows["path"] == "plain"].groupby(keys, dropna=False):
        own = group[(group["provider"] == "fused") & (group["status"] == "ok")]
        for _, row in own.iterrows():
            layers = int(row["layers"]) if row["experiment"] == "stack" else 1
            problem = memory.problem_of(row)
            kept = row["saved_mib"] - (layers - 1) * ledger.D.mib(problem)
            if kept < 0.75 * layers * ledger.PLAIN.kept().mib(problem):
                split += list(group.index)
    return rows.assign(path=rows["path"].mask(rows.index.isin(split), "split"))


def count(row: Any) -> dict[str, float]:
    """Counted MiB of a row's case: kept, peak over base and its parts, and all at the peak."""
    problem, book = memory.problem_of(row), ledger.of(row["provider"], row.get("path"))
    held = book.peak(problem)[1]
    peak = ledger.total(held)
    return {
        "counted_kept_mib": book.kept().mib(problem),
        "counted_peak_mib": peak.mib(problem),
        "counted_total_mib": (peak + ledger.BASE).mib(problem),
        **{f"counted_{name}_mib": size.mib(problem) for name, size in held.items()},
    }


def total_mib(rows: pd.DataFrame) -> pd.Series:
    """Measured peak with weights, x and dy, and the workspaces that libraries keep for good."""
    return rows["operands_mib"] + rows["dy_mib"] + rows["idle_mib"] + rows["peak_mib"]


def counted_table() -> pd.DataFrame:
    """What each way keeps and holds, in units of F, D and W."""
    body = {}
    for name, book in ledger.LEDGERS.items():
        few, many = (book.peak(p)[1] for p in (FEW_TOKENS, MANY_TOKENS))
        body[name] = {
            "kept for backward": ", ".join(book.saved) or "nothing but x",
            "size": str(book.kept()),
            "peak, many tokens": str(ledger.total(many)),
            "of it temporary": str(many["temporaries"]),
            "peak, few tokens": str(ledger.total(few)),
        }
    table = pd.DataFrame.from_dict(body, orient="index")
    table.index.name = "who"
    return table


def main_shapes(frame: pd.DataFrame, status: str | None = "ok") -> pd.DataFrame:
    """Steps at the shapes that most rivals were asked for, in half precision."""
    every = steps(frame, None)
    if every.empty:
        return every
    half = every[every["dtype"] != "float32"]
    asked = half.groupby(SHAPE)["provider"].transform("nunique")
    chosen = half[asked == asked.max()]
    return chosen if status is None else chosen[chosen["status"] == status]


def shape_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Kept and peak at the main shapes, counted and measured, and the peak's measured parts."""
    body, index = [], []
    for _, row in main_shapes(frame, None).iterrows():
        index.append((shape_of(row), place(row), row["provider"]))
        cells = {
            ("kept, MiB", "counted"): _mib(row["counted_kept_mib"]),
            ("kept, MiB", "hooks"): _mib(row.get("kept_mib")),
            ("peak over base, MiB", "counted"): _mib(row["counted_peak_mib"]),
            ("peak over base, MiB", "measured"): _measured(row),
        }
        for name in ledger.CATEGORIES:
            title = ("of the measured peak, MiB", "y" if name == "output" else name)
            cells[title] = _mib(row.get(f"peak_{name}_mib"))
        body.append(cells)
    if not body:
        return pd.DataFrame(columns=["not measured"])
    names = pd.MultiIndex.from_tuples(index, names=["shape", "measured on", "who"])
    table = pd.DataFrame(body, index=names)
    table.columns = pd.MultiIndex.from_tuples(table.columns)
    return table


def _mib(value: Any) -> str:
    return MISSING if value is None or pd.isna(value) else number(float(value), 4)


def _measured(row: Any) -> str:
    return _mib(row.get("peak_mib")) if row["status"] == "ok" else str(row["status"])


def not_run(frame: pd.DataFrame) -> str | None:
    """Who could not run on which machine, and why, a clause a machine and reason."""
    rows = per_machine(frame[frame["status"] != "ok"]) if len(frame) else frame
    if rows.empty:
        return None
    # A library's message goes on with figures of that very moment; its first clause is the reason.
    first = rows["reason"].astype(str).str.split(r"\. |\n", regex=True).str[0]
    groups = rows.groupby(["machine", "status", first], sort=False)
    said = [
        f"{place(g.iloc[0])}: {', '.join(dict.fromkeys(g['provider']))} {status}, {reason}"
        for (_, status, reason), g in groups
    ]
    return "; ".join(said) + "."


def squares(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps of square fp32 problems, `total_mib` measured and `counted_total_mib` beside it."""
    rows = steps(frame)
    if rows.empty:
        return rows
    rows = rows[(rows["dtype"] == "float32") & (rows["hidden_size"] == rows["intermediate_size"])]
    return rows.assign(total_mib=total_mib(rows))


def published_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Published peaks beside what counting and measuring with all gradients give, in MiB."""
    told, read = _published_peaks(), published_fit.readings()
    rows = squares(frame)
    index = sorted({*told, *_sizes(rows)})
    table = {}
    for tokens, width in index:
        problem = memory.square(tokens, width)
        cells: dict[tuple[str, str], str] = {}
        for name in ("liger", "fused"):
            peak, title = told.get((tokens, width), {}).get(name), name.capitalize()
            cells[("published, MB", title)] = _mib(peak)
            cells[("read as counts", title)] = _mib(read[name].peak_mib(tokens, width))
            whole = ledger.total(ledger.of(name).peak(problem)[1]) + ledger.BASE
            cells[("all gradients, counted", title)] = _mib(whole.mib(problem))
        table[(tokens, width)] = cells | _measured_pair(rows, tokens, width)
    shown = pd.DataFrame.from_dict(table, orient="index")
    shown.columns = pd.MultiIndex.from_tuples(shown.columns)
    groups = list(dict.fromkeys(top for top, _ in shown.columns))
    shown = shown[[c for top in groups for c in shown.columns if c[0] == top]]
    shown.index = pd.MultiIndex.from_tuples(shown.index, names=["tokens", "width"])
    return shown


def _published_peaks() -> dict[tuple[int, int], dict[str, float]]:
    rows = published.load("swiglu_memory").dropna(subset=["batch_size", "peak_mb"])
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows.itertuples():
        size = int(row.batch_size), int(row.d_model)
        found.setdefault(size, {})[row.implementation] = float(row.peak_mb)
    return found


def _sizes(rows: pd.DataFrame) -> set[tuple[int, int]]:
    if rows.empty:
        return set()
    return {(int(t), int(w)) for t, w in zip(rows["tokens"], rows["hidden_size"], strict=True)}


def _measured_pair(rows: pd.DataFrame, tokens: int, width: int) -> dict[tuple[str, str], str]:
    """Measured Liger, or eager where there is none, and fused, on the leading machine."""
    first = leading(rows)
    here = (
        first[(first["tokens"] == tokens) & (first["hidden_size"] == width)] if len(first) else rows
    )
    by = {} if here.empty else dict(zip(here["provider"], here["total_mib"], strict=True))
    names = {"eager": "eager", "liger": "Liger", "fused": "fused"}
    return {("all gradients, measured", t): _mib(by.get(n)) for n, t in names.items()}


def growing(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps of the widths that were measured at most numbers of tokens, in half precision."""
    rows = steps(frame)
    rows = rows[rows["dtype"] != "float32"] if len(rows) else rows
    if rows.empty:
        return rows
    widths = ["hidden_size", "intermediate_size"]
    counts = rows.groupby(widths)["tokens"].transform("nunique")
    return rows[counts == counts.max()].sort_values(["machine", "tokens", "rank"])


def stack_rows(frame: pd.DataFrame, status: str | None = "ok") -> pd.DataFrame:
    """Rows of stacks with `counted_total_mib`, all that is held at the peak by the ledger."""
    rows = per_machine(rows_of(frame, "stack", status))
    if rows.empty:
        return rows
    rows = with_paths(rows)
    counted = [memory.counted_mib(_plain(row)) for _, row in rows.iterrows()]
    rank = rows["provider"].map({name: at for at, name in enumerate(ORDER)})
    rows = rows.assign(counted_total_mib=counted, rank=rank, layers=rows["layers"].astype(int))
    return rows.sort_values(["machine", "dtype", "held", "layers", "rank"])


def _plain(row: pd.Series) -> dict[str, Any]:
    path = row.get("path")
    return {**row.to_dict(), "path": path if isinstance(path, str) else None}


def stack_table(frame: pd.DataFrame, dtype: str, held: bool) -> pd.DataFrame:
    """Peak of stacks by layers in MiB: measured (counted), and what was published in fp32."""
    rows = leading(stack_rows(frame, None))
    if len(rows):
        rows = rows[(rows["dtype"] == dtype) & (rows["held"] == held)]
    table: dict[int, dict[tuple[str, str], str]] = {}
    for _, row in rows.iterrows():
        measured = row.get("total_peak_mib")
        shown = _mib(measured) if row["status"] == "ok" else str(row["status"])
        cells = table.setdefault(int(row["layers"]), {})
        cells[("measured (counted), MiB", row["provider"])] = (
            f"{shown} ({_mib(row['counted_total_mib'])})"
        )
    if dtype == "float32" and held:
        for told in (
            published.load("swiglu_memory").query("table == @published_fit.STACK").itertuples()
        ):
            cells = table.setdefault(int(told.num_layers), {})
            cells[("published, MB", told.implementation)] = _mib(float(told.peak_mb))
    if not table:
        return pd.DataFrame(columns=["not measured"])
    shown_table = pd.DataFrame.from_dict(table, orient="index").sort_index()
    shown_table.columns = pd.MultiIndex.from_tuples(shown_table.columns)
    return shown_table.rename_axis("layers")
