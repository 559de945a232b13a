"""The published steps and ours as one frame, each with FLOPs counted by the same formula."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from fusedlib.models import flops
from fusedlib.models.transformer import config
from fusedlib.study import published
from fusedlib.study.display import MISSING, number, percent
from fusedlib.study.end_to_end import peaks
from fusedlib.study.end_to_end.selected import DIRECTIONS, FORMATS, everywhere, utilisation

MAIN = (
    "End to End Benchmarks (RTX PRO 6000 WK)", "End to End Benchmarks (MBAir)",
    "Mixed Precision (bfloat16)", "Compiled", "Mixed precision (bfloat16) & compiled",
)  # fmt: skip
"""The published tables that do not differ in warm-up alone."""

PRECISIONS = {"float32": "fp32", "bfloat16 autocast": "bf16 autocast", "not stated": "fp32"}
COLUMNS = ("forward, ms", "backward, ms", "forward+backward, ms", "TFLOP/s", "of peak")


@dataclass(frozen=True)
class Published:
    """One published size: times in ms by direction, as (mean, standard deviation)."""

    model: str
    device: str
    precision: str
    context_length: int
    batch_size: int
    times: dict[str, tuple[float, float]]

    @property
    def ratio(self) -> float:
        """Backward over forward."""
        return self.times["backward"][0] / self.times["forward"][0]

    @property
    def flops_per_s(self) -> float:
        """Model FLOPs of forward and backward a second."""
        shape = config(self.model, context_length=self.context_length, attention="plain")
        count = flops.count(shape, self.batch_size, self.context_length)
        return 1e3 * count.model / self.times["forward+backward"][0]

    @property
    def share(self) -> float | None:
        """Of the card's peak by its data sheet."""
        peak = peaks.peak(self.device, FORMATS[self.precision])
        return None if peak is None else self.flops_per_s / peak


def told(device: str, precision: str, mode: str) -> list[Published]:
    """The published sizes of one kind of device, precision and mode, small first."""
    rows = published.load("end_to_end")
    rows = rows[rows["table"].isin(MAIN) & (rows["backend"] == device)]
    rows = rows[rows["precision"].map(PRECISIONS).eq(precision)]
    rows = rows[rows["compile"].eq(mode != "eager").fillna(False)]
    found = []
    for model, part in rows.groupby("model", sort=False):
        times = {r.direction: (r.mean_ms, r.std_ms) for r in part.itertuples()}
        first = part.iloc[0]
        sizes = int(first["context_length"]), int(first["batch_size"])
        found.append(Published(str(model), first["device"], precision, *sizes, times))
    return found


def table(frame: pd.DataFrame, device: str, precision: str, mode: str) -> pd.DataFrame:
    """Published and measured times by size, mean ± standard deviation, with what they achieve."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for one in told(device, precision, mode):
        cells = [_spread(*one.times[d]) for d in DIRECTIONS]
        lines[one.model, f"published: {one.device}"] = _line(cells, one.flops_per_s, one.share)
    for row in everywhere(frame, device, precision, mode).itertuples():
        if row.status == "ok":
            parts = [(f"{p}_mean_ms", f"{p}_std_ms") for p in DIRECTIONS.values()]
            cells = [_spread(getattr(row, mean), getattr(row, std)) for mean, std in parts]
            line = _line(cells, row.flops_per_s, utilisation(row))
        else:
            line = dict.fromkeys(COLUMNS, MISSING) | {COLUMNS[0]: row.status}
        lines[row.model, _where(row, mode)] = line
    order = ["nano", "micro", "mini", "small", "medium", "large", "xl", "2.7b"]
    keys = sorted(lines, key=lambda key: order.index(key[0]))
    index = pd.MultiIndex.from_tuples(keys, names=["size", "on"]) if keys else None
    return pd.DataFrame([lines[k] for k in keys], index=index, columns=list(COLUMNS))


def _where(row: Any, mode: str) -> str:
    context = "" if row.context_length == 256 else f", context {row.context_length:g}"
    blocks = ", block by block" if mode != "eager" and row.mode == "compiled blocks" else ""
    return f"{row.place}{context}{blocks}"


def _spread(mean: float, std: float | None) -> str:
    return number(mean, 4) + ("" if std is None or pd.isna(std) else f" ± {number(std, 2)}")


def _line(cells: list[str], rate: float, share: float | None) -> dict[str, str]:
    last = [number(rate / 1e12, 3), MISSING if share is None else percent(share)]
    return dict(zip(COLUMNS, [*cells, *last], strict=True))
