"""Causal attention alone: with the T × T matrix in memory and without it, the backend that torch
takes by itself, ways to call it in a model, and the ceilings.

`grid` says which contexts these are: a course's, those its script ran, longer ones until plain
attention does not fit, or short ones, where `launch` is "python" or "graph".
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import pandas as pd

from fusedlib.bench import machine
from fusedlib.bench.arguments import require_known
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.turns import LAUNCHES
from study import calls, causal, rivals, roofline
from study.cases import Case, Row, device_of, grid
from study.causal import SHAPE, TASK, AttentionProblem
from study.race import each, timed
from study.rivals import Task
from study.run import sized
from study.settings import DIRECTIONS, DTYPES, MIB

QUICK: dict[str, Any] = {
    "device": "auto",  # cuda, mps, cpu, or auto for the best there is
    "contexts": [256, 512],  # tokens a sequence
    "widths": [64, 16],  # of the one head; the first with all implementations
    "dtypes": ["float32"],  # of all tensors
    "ways": ["all"],  # implementations, or all that need not compile
    "also": [],  # who else at the first width, as inductor; flex in fp32 at the first context
    "published_contexts": [16, 32],  # of the published script's grid, fp32
    "published_widths": [256, 1024],
    "long_contexts": [],  # beyond the course's, until plain attention does not fit
    "short_contexts": [],  # from Python and in a CUDA graph, of each dtype
    "default_widths": [],  # of heads at which torch is asked which backend it takes by itself
    "call_contexts": [],  # at which ways to call it are compared, Q and K rotated, last dtype
    "call_widths": [64, 100],  # of heads there
    "batch_size": 8,  # sequences
    "repetitions": 3,  # rounds that are measured
    "gemm_size": 256,  # rows and columns of the product that is the ceiling
    "copy_mib": 32,  # of the copy that is the ceiling
}
FULL: dict[str, Any] = QUICK | {
    "contexts": [16384, 4096, 1024, 8192, 256], "widths": [64, 128, 16, 32],
    "dtypes": ["float32", "bfloat16"], "also": ["inductor", "flex"],
    "published_contexts": [16, 32, 64, 128], "published_widths": [256, 1024, 4096, 8192, 16384],
    "long_contexts": [32768, 65536], "short_contexts": [16, 64, 256, 1024],
    "default_widths": [64, 100, 128, 256], "call_contexts": [1024, 4096, 16384],
    "repetitions": 7, "gemm_size": 8192, "copy_mib": 2048,
}  # fmt: skip
PROFILES = {"quick": QUICK, "full": FULL}
MASKS = ("flag", "tensor")
PROBE, ASKED = 128, 512  # tokens at which is asked who can run, and which backend torch takes


def cases(profile: str = "quick", **sizes: Any) -> list[dict[str, Any]]:
    """What is measured: ceilings, races of each grid, and which backend torch takes."""
    s = sized(PROFILES, profile, sizes)
    require_known("dtypes", s.dtypes, DTYPES)
    shared: dict[str, Any] = {"device": device_of(s.device), "repetitions": s.repetitions}
    ceilings = roofline.cases(
        formats=s.dtypes, gemm_size=s.gemm_size, copy_mib=s.copy_mib, **shared
    )
    asked = grid(
        {"experiment": "default", "device": shared["device"], "batch_size": s.batch_size},
        dtype=s.dtypes, head_dim=s.default_widths, context_length=[ASKED], mask=MASKS,
        direction=["forward"], provider=["sdpa"],
    )  # fmt: skip
    shared |= {"experiment": "race", "batch_size": s.batch_size}
    called = calls.cases(
        shared, context_length=s.call_contexts, head_dim=s.call_widths, dtype=s.dtypes[-1:],
        launch=[*LAUNCHES],
    )  # fmt: skip
    few = [n for n in rivals.chosen(TASK, s.ways) if n == "plain" or causal.is_fused(n)]
    script = [name for name in ("plain", "inductor") if name == "plain" or name in s.also]
    first, others = s.widths[:1], s.widths[1:]
    slow = {"provider": "flex", "dtype": "float32"}  # its products are IEEE's
    course = [
        c for c in races(shared, "course", s.contexts, first, s.dtypes, [*s.ways, *s.also])
        if not slow.items() <= c.items() or c["context_length"] == s.contexts[0]
    ]  # fmt: skip
    return [
        *ceilings, *course,
        *races(shared, "long", s.long_contexts, first, s.dtypes, few),
        *races(shared, "published", s.published_contexts, s.published_widths, ["float32"], script),
        *races(shared, "course", s.contexts, others, s.dtypes[:1], few),
        *races(shared, "course", s.contexts[:1], others, s.dtypes[1:], few),
        *races(shared, "short", s.short_contexts, first, s.dtypes, [*few, "sdpa"]),
        *asked, *called,
    ]  # fmt: skip


def races(
    shared: Case, name: str, contexts: Iterable[int], widths: Iterable[int],
    dtypes: Iterable[str], names: Sequence[str],
) -> list[dict[str, Any]]:  # fmt: skip
    """A case a shape, direction, way to launch and rival; a backward pass alone is in no graph."""
    listed = grid(
        {**shared, "grid": name}, dtype=dtypes, head_dim=widths, context_length=contexts,
        direction=DIRECTIONS, launch=LAUNCHES if name == "short" else [{}],
        provider=rivals.chosen(TASK, names),
    )  # fmt: skip
    return [c for c in listed if c.get("launch") != "graph" or c["direction"] != "backward"]


def measure(race: list[Case]) -> list[Row]:
    """A row a case: errors, what is held, and times in turns; or a ceiling's rate, or a backend."""
    if race[0]["experiment"] == "ceiling":
        return each(race, roofline.measure)
    if race[0]["experiment"] == "default":
        return each(race, causal.chosen)
    setup = calls.Setup if race[0]["experiment"] == "call" else causal.Setup
    with causal.all_afterwards():
        return timed(
            race, setup, same=(*SHAPE, "device"), available=available,
            settings=lambda case: roofline.precision_of("highest"), warmup=1,
            rounds=int(race[0]["repetitions"]),
        )  # fmt: skip


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here, asked at a small context."""
    if case.get("launch") == "graph" and not case["device"].startswith("cuda"):
        raise Unavailable("CUDA graphs need a CUDA GPU")
    if case["experiment"] in ("race", "call"):
        task = calls.TASK if case["experiment"] == "call" else TASK
        names = ("provider", "head_dim", "dtype", "device")
        if reason := _refusal(task, *(case[name] for name in names)):
            raise Unavailable(reason)


@cache
def _refusal(task: Task[..., Any], name: str, head_dim: int, dtype: str, device: str) -> str | None:
    if device not in ("cpu", machine.device_type()):
        return f"this machine has no {device.upper()} device"
    one = rivals.get(task, name)
    try:
        one.check_available(device, dtype)
        one.build(causal.draw(AttentionProblem(PROBE, head_dim, 1, dtype), device))
    except Unavailable as error:
        return str(error)
    except Exception:
        return None  # its own case tells what is wrong
    return None


NUMBERS = [*SHAPE[:3], "kept_mib", "peak_mib", "flops_per_s", "bytes_per_s"]


def derive(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what is saved and the peak in B × T × T matrices, plain attention's peak also by
    hand, and, of implementations whose work can be counted, the least time that FLOPs and bytes
    take at the ceilings of the same set, and the larger of the two over the time, `bound_share`.
    """
    used = ["experiment", "ceiling", "direction", "device", "dtype", "set", "backend", "median_ms",
            *NUMBERS]  # fmt: skip
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *used])))
    rows = rows.assign(**rows[NUMBERS].apply(pd.to_numeric, errors="coerce"))
    ran = rows["ceiling"].isna() & rows["context_length"].notna() & rows["experiment"].ne("call")
    by_default = (rows["provider"] == "sdpa") & rows["backend"].isin(rivals.names(TASK))
    ways = rows.assign(way=rows["provider"].mask(by_default, rows["backend"]))
    names = ["way", "direction", "device", *SHAPE]
    counts = [_counts(*line) for line in ways.loc[ran, names].itertuples(index=False, name=None)]
    counted = ["fused", "square", "peak", "flops", "bytes"]
    by_hand = pd.DataFrame(counts, rows.index[ran], counted).reindex(rows.index)
    at = rows[["machine", "set", "dtype"]].astype(str)
    copies = rows["bytes_per_s"].groupby([at["machine"], at["set"]]).transform("max")
    rates = rows["flops_per_s"].groupby([at[name] for name in at]).transform("max")
    products, traffic = 1e3 * by_hand["flops"] / rates, 1e3 * by_hand["bytes"] / copies
    squares = by_hand["square"] / MIB
    return rows.assign(
        fused=by_hand["fused"],
        kept_squares=rows["kept_mib"] / squares, peak_squares=rows["peak_mib"] / squares,
        peak_counted=by_hand["peak"] / by_hand["square"],
        products_ms=products, traffic_ms=traffic,
        bound_share=products.combine(traffic, max) / rows["median_ms"].astype(float),
    )  # fmt: skip


@cache
def _counts(name: str, direction: str, device: str, *shape: Any) -> Mapping[str, Any]:
    """What is counted of a row, in bytes and FLOPs; nothing where torch chooses."""
    one, fused = AttentionProblem.of(dict(zip(SHAPE, shape, strict=True))), causal.is_fused(name)
    counted: dict[str, Any] = {"square": one.square, "fused": fused}
    if fused or name == "plain":
        counted["flops"] = causal.flops(one, direction, fused=fused)
        counted["bytes"] = causal.traffic(one, direction, fused=fused)
    if name == "plain":
        counted["peak"] = causal.plain_peak(one, device)
    return counted
