"""Dot products of length K: inputs in a format, products summed in fp32 or in that same format.

The reference is the exact dot product of the rounded inputs (float64 with compensation), so
`relative_error` is what the arithmetic lost; `representation_error` is what rounding the inputs had
lost before it. Both are relative to sum |x_i y_i|. The product of two numbers with p <= 12 bits is
exact in fp32, so with fp16, bf16 or TF32 inputs and an fp32 accumulator only the additions round.
There is no fused multiply-add here: products are rounded, then added.
"""

from __future__ import annotations

import numpy as np

from fusedlib.bench import accumulation, formats
from fusedlib.bench.accumulation import Case, Figures

ACCUMULATORS = ("fp32", "same")
DISTRIBUTIONS = ("uniform", "normal")


def lengths(largest: int, step: int = 4, smallest: int = 16) -> list[int]:
    """Powers of two from `smallest` up to `largest`, each `step` times the one before."""
    if largest < smallest:
        raise ValueError(f"the largest K must be at least {smallest}, got {largest}")
    found = [smallest]
    while found[-1] * step <= largest:
        found.append(found[-1] * step)
    return found


def dot_cases(dtypes: list[str], max_k: int, seeds: int) -> list[Case]:
    """One case an input format, accumulator, distribution and K; fp32 into fp32 is listed once."""
    for dtype in dtypes:
        formats.get(dtype)
    return [
        {
            "experiment": "dots",
            "provider": f"{dtype} into {'fp32' if accumulator == 'fp32' else dtype}",
            "dtype": dtype,
            "accumulator": "fp32" if accumulator == "fp32" else dtype,
            "direction": "forward",
            "distribution": distribution,
            "k": k,
            "seed": 0,
            "seeds": seeds,
            "device": "cpu",
        }
        for k in lengths(max_k)
        for distribution in DISTRIBUTIONS
        for dtype in dtypes
        for accumulator in ACCUMULATORS
        if not (dtype == "fp32" and accumulator == "same")
    ]


def operands(distribution: str, k: int, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Two fp32 arrays [k, seeds] of independent draws; a seed's first draws do not depend on k."""
    both = accumulation.draw(distribution, 2 * k, seeds)
    return both[0::2], both[1::2]


def dot(left: np.ndarray, right: np.ndarray, accumulator: str) -> np.ndarray:
    """Sum the products of fp32-held [k, columns] one after another, products and sums rounded to
    `accumulator`.
    """
    with np.errstate(over="ignore"):
        products = formats.round_to(left * right, accumulator)
    return accumulation.sequential(products, accumulator)


def measure_dot(case: Case) -> Figures:
    """Measure one dot product over its seeds: arithmetic, representation and total error."""
    k, dtype = int(case["k"] or 0), str(case["dtype"])
    raw = operands(str(case["distribution"]), k, int(case["seeds"] or 1))
    left, right = (formats.round_to(values, dtype) for values in raw)
    value = dot(left, right, str(case["accumulator"]))
    products = left.astype(np.float64) * right.astype(np.float64)  # at most 48 bits: exact
    exact, magnitude = formats.exact_sum(products), np.abs(products).sum(axis=0)
    meant = formats.exact_sum(raw[0].astype(np.float64) * raw[1].astype(np.float64))
    figures = accumulation.error_figures(value, exact, magnitude)
    return figures | {
        "representation_error": float(np.median(np.abs(exact - meant) / magnitude)),
        "total_error": float(np.median(np.abs(value - meant) / magnitude)),
    }
