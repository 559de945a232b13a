"""Study 03's rows made comparable: pairs of one session, shares of the products, the roof.

Every function takes the frame of `results.load("03_kernels")` and measures nothing.
"""

import pandas as pd

from fusedlib.bench.roofline import COPY, GEMM, least_ms
from fusedlib.bench.statistics import Interval, paired_ratio
from fusedlib.study.selection import leading, per_machine, place, rows_of

SUBJECT, REFERENCE, PRODUCTS = "fused", "liger", "torch.mm"
PROVIDERS = ("eager", "inductor", "inductor-max", "liger", "quack", "fused", "torch.mm")
DIRECTIONS = {
    "forward": "forward",
    "backward": "backward",
    "frozen": "backward, x only",
    "forward+backward": "forward+backward",
}
LAUNCHES = {"python": "from Python", "graph": "CUDA graph"}
SHAPE = ["tokens", "hidden_size", "intermediate_size"]
FIELDS = [
    "machine", "place", "format", *SHAPE, "shape", "way", "launch", "provider", "status", "reason",
    "median_ms", "samples_ms", "session", "flops", "compulsory_bytes", "roof_ms", "bound",
    "y_error",
]  # fmt: skip


def ceilings(frame: pd.DataFrame) -> pd.DataFrame:
    """By machine and format: `flops_per_s` of a plain product and `bytes_per_s` of a copy."""
    rows = per_machine(rows_of(frame, "ceiling"))
    if rows.empty:
        return pd.DataFrame(columns=["machine", "place", "format", "flops_per_s", "bytes_per_s"])
    copies = rows[rows["ceiling"] == COPY].set_index("machine")["bytes_per_s"]
    gemms = rows[rows["ceiling"] == GEMM]
    return pd.DataFrame(
        {
            "machine": gemms["machine"], "place": [place(r) for _, r in gemms.iterrows()],
            "format": [format_of(r) for _, r in gemms.iterrows()],
            "flops_per_s": gemms["flops_per_s"], "bytes_per_s": gemms["machine"].map(copies),
            "size": gemms["size"],
        }
    ).reset_index(drop=True)  # fmt: skip


def format_of(row: pd.Series) -> str:
    """bf16, fp16, fp32, or TF32: the dtype with the precision of its products."""
    if row["dtype"] == "float32":
        return "TF32" if row.get("precision") == "high" else "fp32"
    return {"bfloat16": "bf16", "float16": "fp16"}.get(str(row["dtype"]), str(row["dtype"]))


def compared(frame: pd.DataFrame, status: str | None = "ok") -> pd.DataFrame:
    """Rows of the rivals and of the plain products, with what they are compared by.

    Columns `FIELDS`: `format` as `format_of`, `way` the direction ("frozen": backward with frozen
    weights), `roof_ms` the least time under the machine's measured ceilings, `bound` which of
    them, "bandwidth" or "compute".
    """
    parts = [rows_of(frame, name, status) for name in ("swiglu", "products")]
    rows = per_machine(pd.concat(parts)) if any(len(p) for p in parts) else parts[0]
    if rows.empty:
        return pd.DataFrame(columns=FIELDS)
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *FIELDS])))
    rows = rows.assign(
        place=[place(r) for _, r in rows.iterrows()],
        format=[format_of(r) for _, r in rows.iterrows()],
        shape=["·".join(str(int(r[n])) for n in SHAPE) for _, r in rows.iterrows()],
        way=[r["direction"] if r["weight_gradients"] else "frozen" for _, r in rows.iterrows()],
    )
    return _under_roof(rows, ceilings(frame)).sort_values([*SHAPE, "format"], kind="stable")


def rejected(frame: pd.DataFrame) -> list[str]:
    """What the check against float64 rejected on the leading machine, a clause a problem.

    Such a case has a row and no time; a table of times alone would not show it.
    """
    rows = leading(compared(frame, None))
    wrong = rows[rows["status"] == "wrong"].drop_duplicates(["provider", "format", "shape"])
    return [f"{r.provider} in {r.format} at {r.shape} ({r.reason})" for r in wrong.itertuples()]


def _under_roof(rows: pd.DataFrame, roofs: pd.DataFrame) -> pd.DataFrame:
    known = {(r.machine, r.format): r for r in roofs.itertuples()}
    least, bound = [], []
    for row in rows.itertuples():
        roof = known.get((row.machine, row.format))
        if roof is None or pd.isna(row.flops):
            least.append(float("nan"))
            bound.append("")
            continue
        work = (row.flops, row.compulsory_bytes)
        least.append(least_ms(*work, roof.flops_per_s, roof.bytes_per_s))
        compute = row.flops / roof.flops_per_s > row.compulsory_bytes / roof.bytes_per_s
        bound.append("compute" if compute else "bandwidth")
    return rows.assign(roof_ms=least, bound=bound)


def versus(rows: pd.DataFrame, other: str) -> pd.DataFrame:
    """How many times longer `other` took than each row, from the pairs of their session.

    Takes the frame of `compared`. Columns `ratio`, `low`, `high`: above 1 the row is faster. Rows
    without a partner in their session are left out.
    """
    partners = {r["session"]: r for _, r in rows[rows["provider"] == other].iterrows()}
    found = []
    for _, row in rows.iterrows():
        partner = partners.get(row["session"])
        if partner is None or row["provider"] == other:
            continue
        pair = paired_ratio(partner["samples_ms"], row["samples_ms"])
        found.append({**row, "ratio": pair.value, "low": pair.low, "high": pair.high})
    return pd.DataFrame(found, columns=[*rows.columns, "ratio", "low", "high"])


def interval(row: pd.Series) -> Interval:
    """The ratio of a row of `versus`."""
    return Interval(row["ratio"], row["low"], row["high"])


def sweep(rows: pd.DataFrame) -> pd.DataFrame:
    """The published sweep: square layers at the fewest tokens of their machine."""
    chosen = rows[rows["hidden_size"] == rows["intermediate_size"]]
    if chosen.empty:
        return chosen
    return chosen[chosen["tokens"] == chosen.groupby("machine")["tokens"].transform("min")]


def grid(rows: pd.DataFrame) -> pd.DataFrame:
    """The published grid: square layers whose width has more than one number of tokens."""
    chosen = rows[rows["hidden_size"] == rows["intermediate_size"]]
    if chosen.empty:
        return chosen
    counts = chosen.groupby(["machine", "hidden_size"])["tokens"].transform("nunique")
    return chosen[counts > 1]


def shapes(rows: pd.DataFrame) -> pd.DataFrame:
    """Layers as language models have them: hidden and intermediate differ."""
    return rows[rows["hidden_size"] != rows["intermediate_size"]]
