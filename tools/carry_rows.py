"""Once: rows of studies 03, 06 and 07 of 2026-11-21 and 22 in the form of today's cases.

Only names and places change: every sample, error and version stays as it was measured. Each row
says in `carried_from` which fingerprint it had; git keeps the rows as they were (92584fa).
"""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

from fusedlib import paths
from fusedlib.bench import anatomy, swiglu
from fusedlib.bench.attention import course
from fusedlib.bench.end_to_end import course as end_to_end
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
    if row.get("recording") == "2026-11-23a":
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


def whole_models(row: Row) -> Iterator[Row]:
    """Study 06's MLPs in turns; fp32 from 4ed7de0 alone, since split products changed until then.

    Each step began on an idle device then; today's is the second of two back to back, which takes
    both sides of a ratio a millisecond or two less.
    """
    fp32 = row.get("precision") == "fp32"
    if row["experiment"] != "mlp" or (fp32 and row["commit"][:7] != "4ed7de0"):
        return
    case = {
        "experiment": "mlp", "model": row["model"], "context_length": row["context_length"],
        "precision": row["precision"], "attention": row["attention"], "inference": False,
        "device": row["device"], "batch_size": row["batch_size"], "seconds": 0.6,
        "repetitions": 6, "provider": row["mlp"],
    }  # fmt: skip
    gone = ("mlp", "together", "warmup", "least", "few", "most")
    kept = {k: v for k, v in row.items() if k not in gone}
    kept |= {"median_ms": row.get("step_median_ms"), "samples_ms": row.get("step_samples_ms")}
    together = ("code", "model", "context_length", "precision")
    kept["session"] = " ".join(str(row[k]) for k in together)
    kept["path"] = "kernels" if row["mlp"] == "fused" else None
    yield carried({**kept, **case}, tuple(case), end_to_end.study_code())


def respelled(row: Row, code: Any) -> Row:
    """A row of 2026-11-23b, measured by today's code before a fingerprint was the same in every
    version of Python."""
    return {**row, "code": code.of(row), "carried_from": row["code"]}


def anatomy_code() -> Any:
    """Study 05's, with the rivals that its notebook's helper registers."""
    import site

    site.addsitedir(str(paths.NOTEBOOKS))
    import flawed_swiglu  # noqa: F401

    return anatomy.study_code()


def main() -> None:
    """Write today's and the carried rows into report/results/nvidia-h200, in place of the old."""
    studies = {
        "03_kernels": (kernels, swiglu.study_code()),
        "05_anatomy": (None, anatomy_code()),
        "06_end_to_end": (None, end_to_end.study_code()),
        "07_attention": (attention, course.study_code()),
    }
    for study, (change, code) in studies.items():
        path = f"report/results/nvidia-h200/{study}.jsonl"
        shown = subprocess.run(
            ["git", "show", f"92584fa:{path}"], capture_output=True, text=True, check=True,
            cwd=paths.ROOT,
        )  # fmt: skip
        rows: list[Row] = []
        for row in map(json.loads, shown.stdout.splitlines()):
            if row.get("recording") == "2026-11-23b":
                rows.append(respelled(row, code))
            elif change is not None:
                rows += change(row)
            else:
                rows.append(row)  # an entry of carried.toml says whether it counts
                rows += whole_models(row) if study == "06_end_to_end" else []
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (paths.ROOT / path).write_text(text, encoding="utf-8")
        print(study, len(rows), "rows")


if __name__ == "__main__":
    main()
