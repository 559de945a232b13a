"""Which rows of study 07 a table, figure or sentence takes, and what was counted beside them.

Every function takes the frame of `results.load("07_attention")` and measures nothing.
"""

import pandas as pd

from fusedlib.bench.attention import held
from fusedlib.bench.attention.cases import EXPERIMENT, problem_of
from fusedlib.bench.attention.problem import DIRECTIONS, AttentionProblem
from fusedlib.bench.attention.ways import WAYS
from fusedlib.study import style
from fusedlib.study.display import percent
from fusedlib.study.kernels.rows import ceilings, format_of
from fusedlib.study.selection import leading, per_machine, place, rows_of

PLAIN, FLASH, INDUCTOR = "plain", "flash", "inductor"
MIB = 2**20
MPS = "mps"  # where the published figures come from
WIDTH = 64  # of the figures and of what compares backends; the course's third
_SIZES = ("context_length", "head_dim", "batch_size")
FORMATS = ("bf16", "fp32", "fp16")
_COLUMNS = (
    "machine", "profile", "device_type", "device_name", "own", "status", "reason", "experiment",
    "grid", "provider", "context_length", "head_dim", "batch_size", "dtype", "device",
    "y_error", "kept_mib", "operands_mib", "after_forward_mib", "forward_peak_mib", "peak_mib",
    "backward_node", "first_call_s", "forward_median_ms", "forward_median_low_ms",
    "forward_median_high_ms", "backward_median_ms", "backward_median_low_ms",
    "backward_median_high_ms", "median_ms", "median_low_ms", "median_high_ms", "mean_ms", "std_ms",
    "samples_ms", "speedup", "speedup_low", "speedup_high", "repetitions", "calls",
)  # fmt: skip

style.register(PLAIN, INDUCTOR, "math", first=1)
style.register("efficient", "cudnn", "flex", first=4)
style.register(FLASH)


def rows(frame: pd.DataFrame, grid: str | None = None, status: str | None = "ok") -> pd.DataFrame:
    """Rows of the leading machine, in one grid or in all, with what is counted beside them.

    New columns: `format`, `who` its place among the ways, `counted_kept_mib` and, for plain
    attention, `counted_peak_mib`; sorted by format, width, context and way.
    """
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *_COLUMNS])))
    found = leading(_here(rows_of(frame, EXPERIMENT, None)))
    if grid is not None:
        found = found[found["grid"] == grid]
    if status is not None:
        found = found[found["status"] == status]
    found = found.astype(dict.fromkeys(_SIZES, int))
    problems = [problem_of(row) for _, row in found.iterrows()]
    found["format"] = [format_of(row) for _, row in found.iterrows()]
    found["who"] = [list(WAYS).index(name) for name in found["provider"]]
    found["rank"] = [FORMATS.index(name) for name in found["format"]]
    found["counted_kept_mib"] = [
        _kept_mib(name, p) for name, p in zip(found["provider"], problems, strict=True)
    ]
    found["counted_peak_mib"] = [
        held.plain_peak(p, device) / MIB if name == PLAIN else float("nan")
        for name, p, device in zip(found["provider"], problems, found["device"], strict=True)
    ]
    found = found.drop_duplicates(["grid", "provider", *_SIZES, "dtype"], keep="last")
    return found.sort_values(["rank", "head_dim", "context_length", "who"], kind="stable")


def _here(found: pd.DataFrame) -> pd.DataFrame:
    """Without the rows that say that a machine has no MPS."""
    return found[(found["device"] != MPS) | (found["device_type"] == MPS)]


def _kept_mib(name: str, problem: AttentionProblem) -> float:
    counted = held.kept(name, problem)
    return float("nan") if counted is None else sum(counted.values()) / MIB


def at_width(frame: pd.DataFrame, status: str | None = "ok") -> pd.DataFrame:
    """Rows of the two grids whose contexts grow, at `WIDTH` or the width nearest to it."""
    found = rows(frame, None, status)
    found = found[found["grid"].isin(["course", "long"])]
    if found.empty:
        return found
    widths = sorted(set(found["head_dim"]), key=lambda width: abs(width - WIDTH))
    found = found[found["head_dim"] == widths[0]]
    found = found.drop_duplicates(["provider", "context_length", "format"])  # in both grids
    return found.sort_values(["rank", "context_length", "who"], kind="stable")


def longest(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of the course's grid at that width, all ways, each format at its longest context.

    The longest at which plain attention ran, where it did anywhere: it is what is compared with.
    """
    found = at_width(frame)
    found = found[found["grid"] == "course"]
    plain = found["context_length"].where(found["provider"] == PLAIN, 0)
    last = plain.groupby(found["format"]).transform("max")
    whole = found.groupby("format")["context_length"].transform("max")
    return found[found["context_length"] == last.where(last > 0, whole)]


def by_format(found: pd.DataFrame) -> list[pd.DataFrame]:
    """The rows of each format, in their order."""
    return [part for _, part in found.groupby("format", sort=False)]


def fused_first(part: pd.DataFrame) -> pd.DataFrame:
    """Rows of the ways that keep no T × T matrix, the fastest first."""
    fused = part["provider"].isin([name for name, way in WAYS.items() if way.fused])
    return part[fused].sort_values("median_ms")


def at(row: pd.Series) -> str:
    """A row's whole shape, for sentences."""
    return (
        f"context {row['context_length']:,}, width {row['head_dim']}, batch {row['batch_size']} in "
        f"{row['format']}"
    )


def shape(row: pd.Series) -> str:
    """context·width."""
    return f"{row['context_length']:,}·{row['head_dim']}"


def roof(frame: pd.DataFrame, kind: str) -> tuple[float, float] | None:
    """FLOP/s of a plain product in a format, and bytes/s of a copy, on the leading machine."""
    found = rows(frame, None, None)
    roofs = ceilings(frame)
    if found.empty or roofs.empty:
        return None
    roofs = roofs[(roofs["machine"] == found["machine"].iloc[0]) & (roofs["format"] == kind)]
    if roofs.empty:
        return None
    return float(roofs["flops_per_s"].iloc[0]), float(roofs["bytes_per_s"].iloc[0])


def work(row: pd.Series, direction: str | None = None) -> tuple[int, int]:
    """FLOPs and least bytes of a row's way in one direction, or in both."""
    problem, fused = problem_of(row), WAYS[row["provider"]].fused
    chosen = DIRECTIONS if direction is None else (direction,)
    flops = sum(problem.flops(d, fused=fused) for d in chosen)
    return flops, sum(problem.traffic(d, fused=fused) for d in chosen)


def counted(name: str) -> bool:
    """Whether a way's traffic was counted: plain attention's is, and that of those that fuse all.

    What MATH and Inductor read and write is their own choice.
    """
    return name == PLAIN or WAYS[name].fused


def where(frame: pd.DataFrame) -> str:
    """Where the rows that are shown were measured."""
    found = rows(frame, None, None)
    return place(found.iloc[0]) if len(found) else "no machine yet"


def card_mib(frame: pd.DataFrame, machines: pd.DataFrame) -> float | None:
    """Memory of the leading machine's card in MiB, of its host where it has none; None unknown."""
    found = rows(frame, None, None)
    if found.empty or machines.empty:
        return None
    known = machines[machines["machine"] == found["machine"].iloc[0]]
    if known.empty:
        return None
    last = known.iloc[-1]
    gib = last["device_memory_gib"] if last["device_type"] == "cuda" else last["memory_gib"]
    return None if pd.isna(gib) else float(gib) * 1024


def shown_at(frame: pd.DataFrame) -> str:
    """Context and width of what stands at the longest context of a format, for captions."""
    told = dict.fromkeys(shape(row) for _, row in longest(frame).iterrows())
    return " and ".join(told) or "not measured yet"


def spread(frame: pd.DataFrame, grid: str | None = None) -> str | None:
    """How wide the intervals of both directions together are, for a table that leaves them out."""
    found = at_width(frame) if grid is None else rows(frame, grid)
    found = found[found["median_low_ms"].notna()]
    if found.empty:
        return None
    wide = (found["median_high_ms"] - found["median_low_ms"]) / found["median_ms"]
    worst = found.loc[wide.idxmax()]
    return (
        f"95 % intervals of the sum of both directions are {percent(wide.median())} of the median "
        f"wide in the middle case, {percent(wide.max())} in the worst, {worst['provider']} in "
        f"{worst['format']} at {shape(worst)}."
    )


def not_run(frame: pd.DataFrame, grid: str | None = None) -> str | None:
    """Which ways have no times and why, a clause a reason; None where all have."""
    found = rows(frame, grid, None)
    if found.empty:
        return "No rows yet: `make study ONLY=07_attention` measures them."
    lacking = found[found["status"] != "ok"]
    told: dict[tuple[str, str], dict[str, list[str]]] = {}
    for _, row in lacking.iterrows():
        reason = "rejected by the check" if row["status"] == "wrong" else brief(row["reason"])
        who = told.setdefault((str(row["status"]), reason), {})
        at = who.setdefault(f"{row['provider']} in {row['format']}", [])
        at += [shape(row)] if row["status"] != "unavailable" else []
    parts = [
        f"{', '.join(_placed(name, at) for name, at in who.items())}: {status}, {reason}"
        for (status, reason), who in told.items()
    ]
    return f"{'; '.join(parts)}." if parts else None


def _placed(name: str, at: list[str]) -> str:
    return f"{name} at {', '.join(at)}" if at else name


def brief(reason: object) -> str:
    """A reason's first sentences, without what torch says of its allocator's settings."""
    text = " ".join(str(reason).split())
    for end in (" GPU 0 has", " This is likely due", " If reserved", " Got Query"):
        text = text.partition(end)[0]
    return text.rstrip(".")


def lacking_mps(frame: pd.DataFrame) -> str | None:
    """Which machines say that they have not the published device type; None where none does."""
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *_COLUMNS])))
    found = rows_of(frame, EXPERIMENT, "unavailable")
    found = found[(found["device"] == MPS) & (found["device_type"] != MPS)]
    if found.empty:
        return None
    reason = found["reason"].iloc[0]
    names = dict.fromkeys(place(row.drop("device")) for _, row in found.iterrows())
    return f"Device type MPS, as published, is unavailable on {', '.join(names)}: {reason}."


def everywhere(frame: pd.DataFrame) -> pd.DataFrame:
    """All machines' rows, each machine's of one profile, for what stands beside the published."""
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *_COLUMNS])))
    found = per_machine(rows_of(frame, EXPERIMENT))
    return found.astype(dict.fromkeys(_SIZES, int))
