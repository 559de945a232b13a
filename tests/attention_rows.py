"""Rows as a card would give them: times of a roofline model, memory of the formulas, one OOM."""

from card_rows import head

from fusedlib.bench import roofline
from fusedlib.bench.attention import cases, held
from fusedlib.bench.attention.ways import WAYS

FLOPS = {"float32": 50e12, "bfloat16": 700e12}
BANDWIDTH = 4e12
LAUNCH_MS = 0.05
CARD_MIB = 140 * 1024
MIB = 2**20
HALF_ONLY = ("flash", "cudnn")
BACKENDS = ("plain", "math", "flash", "efficient", "cudnn")
DIRECTIONS = ("forward", "backward")


def measured(case):
    """A case's row: time the larger of FLOPs and bytes at the card's rates, and a launch."""
    row = head(cases.STUDY) | case
    problem, name = cases.problem_of(case), case["provider"]
    fused = WAYS[name].fused
    if name in HALF_ONLY and problem.dtype == "float32":
        return row | {"status": "unavailable", "reason": "Expected dtype: {Half, BFloat16}."}
    if not fused and held.plain_peak(problem, "cuda") > CARD_MIB * MIB:
        asked = problem.square * problem.itemsize / 2**30
        reason = f"CUDA out of memory. Tried to allocate {asked:.2f} GiB. GPU 0 has a capacity"
        return row | {"status": "oom", "reason": reason}
    ms = {}
    for direction in DIRECTIONS:
        flops = problem.flops(direction, fused=fused) / FLOPS[problem.dtype]
        ms[direction] = LAUNCH_MS + 1e3 * max(
            flops, problem.traffic(direction, fused=fused) / BANDWIDTH
        )
    if name == "inductor":
        ms = {direction: value / 2 for direction, value in ms.items()}
    return row | timed(ms) | memory(name, problem)


def timed(ms):
    """Medians with an interval of 2 %; the speed-up over plain is put in by `rows`."""
    found = {}
    for prefix, value in (("forward_", ms["forward"]), ("backward_", ms["backward"]),
                          ("", sum(ms.values()))):  # fmt: skip
        found |= {
            f"{prefix}median_ms": value, f"{prefix}median_low_ms": 0.98 * value,
            f"{prefix}median_high_ms": 1.02 * value, f"{prefix}samples_ms": [value] * 3,
        }  # fmt: skip
    return found | {"y_error": 1e-3, "calls": 1}


def memory(name, problem):
    """Memory as counted; Inductor keeps P alone, fused kernels peak at five B × T × E tensors."""
    linear = problem.linear * problem.itemsize / MIB
    counted = held.kept(name, problem) or {"P": problem.square * problem.itemsize}
    kept = sum(counted.values()) / MIB
    peak = 5 * linear if WAYS[name].fused else held.plain_peak(problem, "cuda") / MIB
    return {
        "kept_mib": kept, "operands_mib": 4 * linear,
        "after_forward_mib": kept if WAYS[name].fused else kept + linear,
        "forward_peak_mib": peak, "peak_mib": peak,
    }  # fmt: skip


def with_speedups(rows):
    """Each row's speed-up over plain at its shape, interval 5 % either way."""
    shape = ("grid", "context_length", "head_dim", "dtype")
    plain = {tuple(r[k] for k in shape): r["median_ms"] for r in rows if r["provider"] == "plain"
             and "median_ms" in r}  # fmt: skip
    for row in rows:
        base = plain.get(tuple(row[k] for k in shape))
        if base is not None and "median_ms" in row:
            ratio = base / row["median_ms"]
            row |= {"speedup": ratio, "speedup_low": 0.95 * ratio, "speedup_high": 1.05 * ratio}
    return rows


def ceilings():
    """The card's two rates as the rows of study 07 hold them."""
    found = roofline.cases(
        "cuda", ["float32", "bfloat16"], gemm_size=8192, copy_mib=2048, repetitions=3
    )
    for case in found:
        rate = {"flops_per_s": FLOPS.get(case["dtype"])}
        if case["ceiling"] == roofline.COPY:
            rate = {"bytes_per_s": BANDWIDTH}
        yield head(cases.STUDY) | case | rate


def full():
    """Rows as the full profile would leave them on a card of 140 GiB."""
    shared = {"batch_size": 8, "repetitions": 3, "device": "cuda"}
    contexts, both = [256, 1024, 4096, 8192, 16384], ["float32", "bfloat16"]
    asked = cases.grid(
        "course", contexts, [64, 16], both, BACKENDS, compiled=["inductor float32 64"], **shared
    )
    asked += cases.grid("long", [32768, 65536], [64], both, BACKENDS, **shared)
    asked += cases.published([16, 32], [256, 1024], True, **shared)
    return [*with_speedups([measured(case) for case in asked]), *ceilings()]
