"""Study 01 from its rows: what warm-up does to a mean, and how much of it is enough.

Every function takes the frame of `results.load("01_warmup")` and measures nothing.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fusedlib.bench.warmup import MEASURED_STEPS
from fusedlib.study import published
from fusedlib.study.display import MISSING, number
from fusedlib.study.selection import leading, per_machine, place, rows_of

WARMUPS = (0, 1, 2, 5)
# The running median is taken over so many steps; odd, so that it is one of them.
WINDOW = 5
NEAR = 0.01
_STEP_COLUMNS = ("machine", "model", "direction", "samples_ms")
DIRECTIONS = ("forward", "backward", "forward+backward", "step")
SIZE_ORDER = ("nano", "micro", "mini", "small", "medium", "large", "xl", "2.7b")
STAGES = {
    "import_torch_ms": "import torch",
    "device_ms": "device context",
    "build_ms": "build the model",
    "gemm_ms": "first matrix product",
    "corner_ms": "first run of each kernel",
    "first_ms": "first whole step",
    "settled_ms": "a settled step",
}
CALLS = {
    "launch": "launching kernels, with their loading",
    "memory": "allocating device memory",
    "load": "loading modules, asking for kernels",
    "copy": "copies and fills",
    "wait": "waiting for the device",
    "other_calls": "other CUDA calls",
}


def settled(samples: Sequence[float]) -> float:
    """The settled step time: the median of the last `MEASURED_STEPS` steps, in their unit."""
    return float(np.median(samples[-MEASURED_STEPS:]))


def after_warmup(samples: Sequence[float], warmup: int) -> np.ndarray:
    """The steps that a benchmark with so many warm-up steps measures.

    Raises:
        ValueError: fewer than `warmup` + `MEASURED_STEPS` steps were recorded.
    """
    if len(samples) < warmup + MEASURED_STEPS:
        raise ValueError(
            f"{len(samples)} recorded steps do not hold {warmup} of warm-up and "
            f"{MEASURED_STEPS} measured ones"
        )
    return np.asarray(samples[warmup : warmup + MEASURED_STEPS], dtype=float)


def steps_until_settled(samples: Sequence[float]) -> int | None:
    """How many steps to drop until every running median lies within `NEAR` of the settled time.

    The running median of step k is that of steps k to k + `WINDOW` - 1, all of them before the
    settled ones. None when it never stays.
    """
    before = samples[:-MEASURED_STEPS]
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(before, float), WINDOW)
    away = np.abs(np.median(windows, axis=1) / settled(samples) - 1) > NEAR
    far = np.flatnonzero(away)
    if len(far) == 0:
        return 0
    return None if far[-1] == len(away) - 1 else int(far[-1]) + 1


def warmup_needed(samples: Sequence[float], statistic: str = "mean") -> int | None:
    """Fewest warm-up steps after which the `MEASURED_STEPS`-step mean (or median) is within `NEAR`.

    It has to stay there for every larger warm-up that was recorded; None when it never does.
    """
    reduce = np.mean if statistic == "mean" else np.median
    truth = settled(samples)
    needed = None
    # A window that overlaps the settled steps would agree with them by itself.
    for warmup in range(len(samples) - 2 * MEASURED_STEPS, -1, -1):
        if abs(reduce(after_warmup(samples, warmup)) / truth - 1) > NEAR:
            break
        needed = warmup
    return needed


def steps(frame: pd.DataFrame, isolation: str, direction: str | None = None) -> pd.DataFrame:
    """Rows of recorded steps, of fresh or shared processes, sizes in their order."""
    rows = per_machine(rows_of(frame, "steps"))
    if rows.empty:
        return rows.reindex(columns=list(dict.fromkeys([*rows.columns, *_STEP_COLUMNS])))
    rows = rows[rows["isolation"] == isolation]
    if direction is not None:
        rows = rows[rows["direction"] == direction]
    rank = rows["model"].map({name: i for i, name in enumerate(SIZE_ORDER)})
    return rows.assign(rank=rank).sort_values(["rank", "direction", "process"])


def _mean_std(values: np.ndarray) -> str:
    spread = float(values.std(ddof=1))
    return f"{number(float(values.mean()), 4)} ± {number(spread, 2)}"


def _published(direction: str) -> dict[tuple[str, str], dict[int, str]]:
    rows = published.load("warmup")
    rows = rows[(rows["direction"] == direction) & rows["warmup_steps"].notna()]
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows.itertuples():
        stated = f" ({row.device})" if row.device != "not stated" else ""
        where = f"published, seed {row.source}{stated}"
        text = f"{number(row.mean_ms, 4)} ± {number(row.std_ms, 2)}"
        cells.setdefault((row.model, where), {})[int(row.warmup_steps)] = text
    return cells


def table(frame: pd.DataFrame, direction: str) -> pd.DataFrame:
    """Mean ± standard deviation in ms of `MEASURED_STEPS` steps by size, origin and warm-up.

    Measured cells pool the steps of all fresh processes; a size that did not run says why.
    """
    cells = _published(direction)
    for (model, _), rows in steps(frame, "fresh", direction).groupby(
        ["model", "machine"], sort=False
    ):
        where = place(rows.iloc[0])
        for warmup in WARMUPS:
            pooled = np.concatenate([after_warmup(s, warmup) for s in rows["samples_ms"]])
            cells.setdefault((model, where), {})[warmup] = _mean_std(pooled)
    for row in _without_time(frame, direction):
        cells.setdefault((row["model"], place(row)), {w: str(row["status"]) for w in WARMUPS})
    order = sorted(cells, key=lambda k: SIZE_ORDER.index(k[0]))
    index = pd.MultiIndex.from_tuples(order, names=["size", "measured on"])
    columns = [f"{w} warm-up" for w in WARMUPS]
    body = [[cells[k].get(w, MISSING) for w in WARMUPS] for k in order]
    return pd.DataFrame(body, index=index, columns=columns)


def _without_time(frame: pd.DataFrame, direction: str) -> list[pd.Series]:
    rows = per_machine(rows_of(frame, "steps", None))
    if rows.empty:
        return []
    rows = rows[(rows["direction"] == direction) & (rows["status"] != "ok")]
    return [row for _, row in rows.iterrows()]


def first_steps(frame: pd.DataFrame, direction: str) -> pd.DataFrame:
    """By machine, isolation and size: first step, settled step and their difference in ms.

    Columns `first_ms`, `settled_ms`, `extra_ms` and its `extra_low_ms`, `extra_high_ms` over the
    processes, `position` of the size in its process.
    """
    found = []
    for isolation in ("fresh", "shared"):
        rows = steps(frame, isolation, direction)
        for (machine, model), group in rows.groupby(["machine", "model"], sort=False):
            first = np.array([s[0] for s in group["samples_ms"]])
            usual = np.array([settled(s) for s in group["samples_ms"]])
            extra = first - usual
            found.append(
                {
                    "machine": machine, "place": place(group.iloc[0]), "isolation": isolation,
                    "model": model, "position": int(group["position"].iloc[0]),
                    "processes": len(group),
                    "first_ms": float(np.median(first)), "settled_ms": float(np.median(usual)),
                    "extra_ms": float(np.median(extra)),
                    "extra_low_ms": float(extra.min()), "extra_high_ms": float(extra.max()),
                }
            )  # fmt: skip
    return pd.DataFrame(found)


def isolation_table(frame: pd.DataFrame, direction: str = "forward+backward") -> pd.DataFrame:
    """What the first step costs beyond a settled one, in fresh processes and in a shared one."""
    rows = first_steps(frame, direction)
    if rows.empty:
        return pd.DataFrame(columns=["settled ms", "fresh: extra ms", "shared: extra ms"])
    body, index = [], []
    for (where, model), group in rows.groupby(["place", "model"], sort=False):
        by = group.set_index("isolation")
        index.append((where, model))
        body.append(
            {
                "settled ms": number(by["settled_ms"].iloc[0], 4),
                **{f"{i}: extra ms": _extra(by, i) for i in ("fresh", "shared")},
                "place in the shared process": str(by["position"].get("shared", MISSING)),
            }
        )
    names = pd.MultiIndex.from_tuples(index, names=["machine", "size"])
    return pd.DataFrame(body, index=names)


def _extra(by: pd.DataFrame, isolation: str) -> str:
    if isolation not in by.index:
        return MISSING
    row = by.loc[isolation]
    text = number(row["extra_ms"], 3)
    if row["processes"] == 1:
        return text
    return f"{text} ({number(row['extra_low_ms'], 3)} to {number(row['extra_high_ms'], 3)})"


def stages(frame: pd.DataFrame) -> pd.DataFrame:
    """Stages by machine and size: one row each, times in ms as medians of its processes."""
    rows = by_size(per_machine(rows_of(frame, "stages")))
    if rows.empty:
        return rows
    times = [n for n in rows.columns if n.endswith("_ms") and rows[n].dtype.kind == "f"]
    groups = rows.groupby(["machine", "model"], sort=False)
    first = groups.first().drop(columns=times)
    return first.join(groups[times].median()).reset_index()


def stages_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Stages of a first step by machine and size, in ms of wall time."""
    columns = {
        (place(row), row["model"]): [number(row[name], 3) for name in STAGES]
        for _, row in stages(frame).iterrows()
    }
    return _columns(columns, pd.Index(list(STAGES.values()), name="stage"))


def calls_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Host time in CUDA calls in the first and a settled step, in ms with the number of calls."""
    rows = by_size(per_machine(rows_of(frame, "calls")))
    columns = {}
    for _, row in rows.iterrows():
        for when, title in (("first", "first step"), ("settled", "settled step")):
            columns[(f"{row['model']}", title)] = [
                f"{number(row[f'{g}_{when}_ms'], 3)} ({row[f'{g}_{when}_count']:,.0f})"
                for g in CALLS
            ] + [number(row[f"kernels_{when}_ms"], 3), number(row[f"step_{when}_ms"], 3)]
    names = [*CALLS.values(), "kernels on the device", "the whole step"]
    return _columns(columns, pd.Index(names, name="host time in"))


def _columns(columns: dict[tuple[str, str], list[str]], index: pd.Index) -> pd.DataFrame:
    """The columns beside their index; one of dashes where there are none, for a note to explain."""
    return pd.DataFrame(columns if columns else {"not measured": MISSING}, index=index)


def calls_note(frame: pd.DataFrame) -> str | None:
    """Why the table of calls is empty, or whose it is."""
    rows = per_machine(rows_of(frame, "calls"))
    if len(rows):
        return f"Measured on {', '.join(dict.fromkeys(place(r) for _, r in rows.iterrows()))}."
    skipped = rows_of(frame, "calls", "unavailable")
    return f"No rows: {skipped['reason'].iloc[0]}." if len(skipped) else "No rows yet."


def by_size(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows by machine, sizes in their order."""
    if rows.empty:
        return rows
    rank = rows["model"].map({name: i for i, name in enumerate(SIZE_ORDER)})
    return rows.assign(rank=rank).sort_values(["machine", "rank"])


def settling(frame: pd.DataFrame) -> pd.DataFrame:
    """By machine, size and direction the steps to drop: the worst of the fresh processes.

    Columns `until_settled`, `mean_needs`, `median_needs`; -1 stands for "not within the run".
    """
    found = []
    for (machine, model, direction), rows in steps(frame, "fresh").groupby(
        ["machine", "model", "direction"], sort=False
    ):
        samples = list(rows["samples_ms"])
        found.append(
            {
                "machine": machine, "place": place(rows.iloc[0]), "model": model,
                "direction": direction, "steps": len(samples[0]),
                "until_settled": _worst([steps_until_settled(s) for s in samples]),
                "mean_needs": _worst([warmup_needed(s, "mean") for s in samples]),
                "median_needs": _worst([warmup_needed(s, "median") for s in samples]),
            }
        )  # fmt: skip
    return pd.DataFrame(found)


def _worst(counts: list[int | None]) -> int:
    known = [c for c in counts if c is not None]
    return max(known) if len(known) == len(counts) else -1


def settling_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps to drop by size and direction, as text."""
    rows = settling(frame)
    if rows.empty:
        return pd.DataFrame(columns=list(DIRECTIONS))
    columns = {}
    for direction in DIRECTIONS:
        part = rows[rows["direction"] == direction].set_index(["place", "model"])
        for figure, title in (
            ("until_settled", "settled"), ("mean_needs", "mean"), ("median_needs", "median"),
        ):  # fmt: skip
            columns[(direction, title)] = part[figure].map(_count)
    table = pd.DataFrame(columns)
    table = table.reindex(dict.fromkeys(zip(rows["place"], rows["model"], strict=True)))
    table.index.names = ["machine", "size"]
    return table


def _count(steps_to_drop: int) -> str:
    return "never" if steps_to_drop < 0 else str(steps_to_drop)


def leading_steps(frame: pd.DataFrame, direction: str | None = None) -> pd.DataFrame:
    """Rows of fresh steps of the machine that the headline speaks of."""
    return leading(steps(frame, "fresh", direction))
