"""Once: rows of studies 03 and 07 of 2026-11-21 and 22 in the form of today's cases.

Only names and places change: every sample, error and version stays as it was measured. Each row
says in `carried_from` which fingerprint it had; git keeps the rows as they were (9040b9f).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusedlib import paths
from fusedlib.bench import swiglu
from fusedlib.bench.attention import course
from fusedlib.bench.results import case_id, recording_of

Row = dict[str, Any]
CEILING = ("experiment", "device", "repetitions", "ceiling", "size", "dtype", "precision")
TIMES = (
    "median_ms", "median_low_ms", "median_high_ms", "mean_ms", "std_ms", "p10_ms", "p90_ms", "n",
    "samples_ms", "warmup", "flush_l2", "calls",
)  # fmt: skip
# bf16: nothing that it runs changed from 80826fd on. fp32: split products changed until 4ed7de0.
HALVES, SINGLES = ("aade0c11bdfb", "50c6adf58acd"), ("1d19a49c517f",)
TUNED = ("8192·4096·14336", "4096·4096·11008", "16384·2048·8192", "4096·8192·28672")
LARGE = ("1024·4096·4096", "4096·4096·4096")
KERNELS = (
    "experiment", "group", "provider", "tokens", "hidden_size", "intermediate_size", "dtype",
    "direction", "weight_gradients", "precision", "launch", "device", "repetitions",
)  # fmt: skip
ATTENTION = (
    "experiment", "grid", "provider", "context_length", "head_dim", "batch_size", "dtype",
    "direction", "repetitions", "device",
)  # fmt: skip


def carried(row: Row, fields: tuple[str, ...], code: Any) -> Row:
    """A row with today's case id and fingerprint."""
    case = {name: row[name] for name in fields if name in row}
    own = {"case": case_id(row["study"], case), "code": code.of(case)}
    kept = {k: v for k, v in row.items() if "speedup" not in k and k != "baseline"}
    return {**kept, **own, "recording": recording_of(row), "carried_from": row["code"]}


def kernels(row: Row) -> Iterator[Row]:
    """Study 03: shapes get the name of their group, plain products are a rival."""
    if row.get("recording"):
        yield from first_lease(row)
        return
    half = row["dtype"] != "float32"
    if row["code"] not in (HALVES if half else SINGLES):
        return
    if row["experiment"] == "ceiling":
        yield carried(row, CEILING, swiglu.study_code())
        return
    if row["launch"] == "python" and row.get("calls", 1) > 1:
        return  # bursts did not begin on an idle device then
    sizes = [row[n] for n in ("tokens", "hidden_size", "intermediate_size")]
    shape = "·".join(map(str, sizes))
    square = "sweep" if sizes[0] == 64 and row["weight_gradients"] else "grid"
    large = shape in LARGE or row["precision"] == "high"
    group = "tuned" if shape in TUNED else "large fp32" if not half and large else square
    if row["launch"] == "graph" and group == "grid":
        return  # no case of today's
    name = "products" if row["experiment"] == "products" else row["provider"]
    if name == "quack" and sizes[0] >= 1024:
        name = "quack-searched"
    if name == "inductor-max":
        group = "searched"
    row = {**row, "experiment": "swiglu", "provider": name, "group": group}
    if name == "fused":
        small = not half and (sizes[0] < 256 or 2 * sizes[0] * sizes[1] * sizes[2] < 2**33)
        row["path"] = swiglu.PLAIN_PATH if small else "kernels"
    yield carried(row, KERNELS, swiglu.study_code())


def first_lease(row: Row) -> Iterator[Row]:
    """Rows of 2026-11-23a, whose fingerprints Python 3.12 spelled otherwise; QuACK searched then.

    The code was that of 7b93928, which the lease did not know.
    """
    row = row | {"commit": "7b93928"}
    if row["experiment"] == "ceiling":
        yield carried(row, CEILING, swiglu.study_code())
    elif row["status"] == "ok" and (row["calls"] == 1 or row["launch"] != "python"):
        name = {"quack": "quack-searched"}.get(row["provider"], row["provider"])
        yield carried(row | {"provider": name}, KERNELS, swiglu.study_code())


def attention(row: Row) -> Iterator[Row]:
    """Study 07: one row of three directions becomes three rows."""
    if row["commit"] != "12872c5" or row.get("device") == "mps":
        return
    if row["experiment"] == "ceiling":
        yield carried(row, CEILING, course.study_code())
        return
    prefixes = {"forward": "forward_", "backward": "backward_", "forward+backward": ""}
    own = {f"{p}{t}" for t in TIMES for p in prefixes.values()}
    for direction, prefix in prefixes.items():
        one = {k: v for k, v in row.items() if k not in own} | {"direction": direction}
        if row["status"] == "ok":
            one |= {t: row[prefix + t] for t in TIMES}
            one["session"] = f"{row['session']} {direction}"
        yield carried(one, ATTENTION, course.study_code())


def main() -> None:
    """Write the carried rows into report/results/nvidia-h200, in place of the old ones."""
    import subprocess

    for study, change in (("03_kernels", kernels), ("07_attention", attention)):
        path = Path("report/results/nvidia-h200") / f"{study}.jsonl"
        shown = subprocess.run(
            ["git", "show", f"9040b9f:{path}"], capture_output=True, text=True, check=True,
            cwd=paths.ROOT,
        )  # fmt: skip
        rows = [new for line in shown.stdout.splitlines() for new in change(json.loads(line))]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (paths.ROOT / path).write_text(text, encoding="utf-8")
        print(study, len(rows), "rows")


if __name__ == "__main__":
    main()
