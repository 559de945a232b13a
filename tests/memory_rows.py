"""Rows of study 04 as a GPU would give them if counting were right to the byte."""

import card_rows

from fusedlib.bench import ledger, memory

MACHINE = card_rows.head(memory.STUDY)
EVERYBODY = list(ledger.LEDGERS)
STACKED = ["eager", "liger", "fused", "fused (input)"]


def step(case, *, path="kernels", **fields):
    """A row of experiment "step", every moment of the ledger one event."""
    problem, book = memory.problem_of(case), ledger.of(case["provider"], path)
    held = book.peak(problem)[1]
    moments = [sizes for _, sizes in book.at(problem).moments()]
    peak = ledger.total(held).mib(problem)
    return MACHINE | case | {
        "path": path, "saved_mib": book.kept().mib(problem), "peak_mib": peak,
        "events_peak_mib": peak, "complete": True, "idle_mib": 64.0, "forward_events": 1,
        "operands_mib": (ledger.W * 3 + ledger.D).mib(problem), "dy_mib": ledger.D.mib(problem),
        **{f"peak_{name}_mib": size.mib(problem) for name, size in held.items()},
        **{f"live_{n}_mib": [m[n].mib(problem) for m in moments] for n in ledger.CATEGORIES},
    } | fields  # fmt: skip


def saved(case, *, path="kernels", **fields):
    """A row of experiment "saved"."""
    kept = ledger.of(case["provider"], path).kept().mib(memory.problem_of(case))
    return MACHINE | case | {"path": path, "saved_mib": kept} | fields


def stack(case, **fields):
    """A row of experiment "stack"."""
    return MACHINE | case | {"total_peak_mib": memory.counted_mib(case)} | fields


def full():
    """What profile full asks for, in fp32 without kernels."""
    shapes = ["8192·4096·14336", "4096·4096·11008"]
    cases = memory.mlp_cases([memory.shape(s, "bfloat16") for s in shapes], EVERYBODY, "cuda")
    grown = [memory.shape(f"{n}·4096·14336", "bfloat16") for n in (256, 1024, 4096, 16384, 65536)]
    square = [memory.square(64, 2**n) for n in range(9, 16)]
    square += [memory.square(n, d) for n in (256, 1024) for d in (2048, 4096)]
    cases += memory.mlp_cases([*grown, *square], STACKED, "cuda")
    rows = []
    for case in cases:
        made = step if case["experiment"] == "step" else saved
        plain = case["dtype"] == "float32" and case["provider"].startswith("fused")
        rows.append(made(case, path="plain" if plain else "kernels"))
    for text, dtype in (("256·2048·2048", "float32"), ("16384·2048·5632", "bfloat16")):
        problem = memory.shape(text, dtype)
        for case in memory.stack_cases(problem, [4, 16, 64, 256], STACKED, "cuda"):
            row = stack(case)
            if row["total_peak_mib"] > 140 * 1024:
                row |= {"status": "oom", "reason": "out of memory", "total_peak_mib": None}
            rows.append(row)
    return rows
