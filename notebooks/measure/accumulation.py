"""Sums and dot products in a given format, one operation after another, against the exact ones.

The error of a computed sum s' of terms x_i that were meant to be X_i has two exact parts:
s' - sum X_i = (sum x_i - sum X_i) + (s' - sum x_i), *representation* and *accumulation*.
Error bounds: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., 2002, chapter 4;
for random terms Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J.
Sci. Comput. 41(5), 2019.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fusedlib.bench.arguments import require_known
from fusedlib.bench.attempt import Wrong
from measure import formats
from measure.racing.cases import Case

Figures = dict[str, Any]

CONSTANT = Fraction(1, 100)
DISTRIBUTIONS = ("constant", "uniform", "normal")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BLOCK = 4096


# --- the four published sums ----------------------------------------------------------------------


@dataclass(frozen=True)
class FourSum:
    """Formats of the running sum and of the term, and whether the term is upcast by hand first."""

    total: str
    term: str
    upcast: bool = False


FOUR_SUMS: dict[str, FourSum] = {
    "fp32": FourSum("fp32", "fp32"),
    "fp16": FourSum("fp16", "fp16"),
    "fp16 into fp32": FourSum("fp32", "fp16"),
    "fp16 upcast, then added": FourSum("fp32", "fp16", upcast=True),
}


def four_sum(name: str, n_terms: int, device: str = "cpu") -> torch.Tensor:
    """Add 0.01 `n_terms` times with torch, one after another, as the published script did."""
    spec = FOUR_SUMS[name]
    total = torch.tensor(0.0, dtype=DTYPES[spec.total], device=device)
    term = torch.tensor(float(CONSTANT), dtype=DTYPES[spec.term], device=device)
    for _ in range(n_terms):
        total += term.to(DTYPES[spec.total]) if spec.upcast else term
    return total


def split_error(value: float, term: Fraction, n_terms: int) -> tuple[Fraction, Fraction]:
    """Exact parts of value - n/100: representation n(term - 1/100), accumulation value - n*term."""
    return n_terms * (term - CONSTANT), Fraction(value) - n_terms * term


def measure_four_sum(case: Case) -> Figures:
    """One published sum; absolute errors, signed, and exact before they are stored."""
    name, n_terms = case["provider"], case["n_terms"]
    total = four_sum(name, n_terms, case["device"])
    term = formats.nearest(CONSTANT, FOUR_SUMS[name].term)
    representation, accumulation = split_error(total.item(), term, n_terms)
    error = representation + accumulation
    return {
        "value": total.item(),
        "displayed": f"{total.item():.4f}",
        "exact": float(n_terms * CONSTANT),
        "term": float(term),
        "error": float(error),
        "representation_error": float(representation),
        "accumulation_error": float(accumulation),
        "relative_error": float(abs(error) / (n_terms * CONSTANT)),
    }


# --- sums of many terms ---------------------------------------------------------------------------


@lru_cache(maxsize=1)
def draw(distribution: str, n_terms: int, seeds: int) -> np.ndarray:
    """Draw fp32 terms [n_terms, seeds], read-only; a seed gives the same stream for any n."""
    terms = np.empty((n_terms, seeds), np.float32)
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        if distribution == "uniform":
            terms[:, seed] = generator.random(n_terms, np.float32)
        elif distribution == "normal":
            terms[:, seed] = generator.standard_normal(n_terms, np.float32)
        else:
            require_known("distribution", distribution, DISTRIBUTIONS[1:])
    terms.flags.writeable = False
    return terms


def rounded_terms(distribution: str, n_terms: int, seeds: int, dtype: str) -> np.ndarray:
    """The terms [n_terms, seeds] after rounding to the format, held in fp32."""
    if distribution == "constant":  # rounded once from 1/100, not twice by way of fp32
        return np.full((n_terms, 1), float(formats.nearest(CONSTANT, dtype)), np.float32)
    return formats.round_to(draw(distribution, n_terms, seeds), dtype)


def running(total: np.ndarray, terms: np.ndarray, dtype: str) -> np.ndarray:
    """Every running sum [n, columns] of fp32-held terms added to `total` one after another, each
    addition rounded to `dtype`.
    """
    if native := formats.get(dtype).native:
        block = np.concatenate([total[None], terms]).astype(native)
        with np.errstate(over="ignore"):
            return np.add.accumulate(block, axis=0, dtype=native)[1:].astype(np.float32)
    sums = np.empty_like(terms)
    round_in_place = formats.rounder(dtype)
    for term, grown in zip(terms, sums, strict=True):
        np.add(total, term, grown)
        round_in_place(grown)
        total = grown
    return sums


def sequential(terms: np.ndarray, dtype: str) -> np.ndarray:
    """Sum fp32-held terms [n, columns] one after another, each addition rounded to `dtype`."""
    total = np.zeros(terms.shape[1], np.float32)
    edges = terms.min(axis=0), terms.max(axis=0)
    for start in range(0, len(terms), BLOCK):
        # Rounding is monotone: when neither the smallest nor the largest term moves the sum, none
        # can.
        if all(np.array_equal(formats.round_to(total + e, dtype), total) for e in edges):
            break
        total = running(total, terms[start : start + BLOCK], dtype)[-1]
    return total


def pairwise(terms: np.ndarray, dtype: str) -> np.ndarray:
    """Sum fp32-held terms [n, columns]: neighbours, then neighbours of those, each sum rounded."""
    level = terms
    while len(level) > 1:
        if len(level) % 2:
            level = np.concatenate([level, np.zeros_like(level[:1])])
        level = formats.round_to(level[0::2] + level[1::2], dtype)
    return level[0]


def kahan(terms: np.ndarray, dtype: str) -> np.ndarray:
    """Kahan's compensated sum of fp32-held terms [n, columns], each of its four operations rounded
    to `dtype`.
    """
    total, correction = np.zeros((2, terms.shape[1]), np.float32)
    round_in_place = formats.rounder(dtype)
    for row in terms:
        addend = row - correction
        round_in_place(addend)
        grown = total + addend
        round_in_place(grown)
        correction = grown - total
        round_in_place(correction)
        correction -= addend
        round_in_place(correction)
        total = grown
    return total


SUMS = {"sequential": sequential, "pairwise": pairwise, "kahan": kahan}


def exact_sums(summands: np.ndarray) -> np.ndarray:
    """Sums of float64 values [n, columns], each rounded once."""
    return np.array([math.fsum(column) for column in summands.T])


def error_figures(value: np.ndarray, exact: np.ndarray, magnitude: np.ndarray) -> Figures:
    """Errors [samples] relative to the sum of magnitudes: their median and range."""
    sizes = np.abs(np.asarray(value, np.float64) - exact) / magnitude
    return {
        "value": float(value[0]),
        "exact": float(exact[0]),
        "relative_error": float(np.median(sizes)),
        "relative_error_low": float(sizes.min()),
        "relative_error_high": float(sizes.max()),
    }


def measure_growth(case: Case) -> Figures:
    """One sum over its seeds against the exact sum of the same rounded terms.

    Raises:
        Wrong: the sum leaves the format's range.
    """
    dtype = case["dtype"]
    terms = rounded_terms(case["distribution"], case["n_terms"], case["seeds"], dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        value = SUMS[case["method"]](terms, dtype)
    if not np.isfinite(value).all():
        raise Wrong(f"overflow: the sum leaves the range of {dtype}")
    exact, magnitude = np.empty(len(value)), np.empty(len(value))
    for seed, column in enumerate(terms.T):  # one column at a time: float64 takes twice the memory
        wide = column.astype(np.float64)
        exact[seed], magnitude[seed] = math.fsum(wide), np.abs(wide).sum()
    return error_figures(value, exact, magnitude)


def measure_stagnation(case: Case) -> Figures:
    """Add one term until the sum no longer changes; the stop by formula stands beside it."""
    dtype, meant = case["dtype"], Fraction(case["term_text"])
    term = formats.nearest(meant, dtype)
    block = np.full((BLOCK, 1), float(term), np.float32)
    total, additions, moved = np.zeros(1, np.float32), 0, BLOCK
    while moved:
        sums = running(total, block, dtype)
        moved = int((np.diff(sums[:, 0], prepend=total) > 0).sum())
        total, additions = sums[-1], additions + moved
    return {
        "value": float(total[0]),
        "predicted_value": formats.stagnation_value(term, dtype),
        "term": float(term),
        "additions": additions,
        "exact": float(additions * meant),
    }


# --- dot products ---------------------------------------------------------------------------------


def operands(distribution: str, k: int, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Two fp32 arrays [k, seeds] of independent draws; a seed's first draws do not depend on k."""
    both = draw(distribution, 2 * k, seeds)
    return both[0::2], both[1::2]


def dot(left: np.ndarray, right: np.ndarray, accumulator: str) -> np.ndarray:
    """Sum the products of fp32-held [k, columns] one after another, products and sums rounded to
    `accumulator`; no fused multiply-add.
    """
    with np.errstate(over="ignore"):
        products = formats.round_to(left * right, accumulator)
    return sequential(products, accumulator)


def measure_dot(case: Case) -> Figures:
    """One dot product over its seeds: `relative_error` is what the arithmetic lost,
    `representation_error` what rounding the inputs had lost before, both of sum |x_i y_i|.
    """
    raw = operands(case["distribution"], case["k"], case["seeds"])
    left, right = (formats.round_to(values, case["dtype"]) for values in raw)
    value = dot(left, right, case["accumulator"])
    products = left.astype(np.float64) * right.astype(np.float64)  # at most 48 bits: exact
    exact, magnitude = exact_sums(products), np.abs(products).sum(axis=0)
    meant = exact_sums(raw[0].astype(np.float64) * raw[1].astype(np.float64))
    return error_figures(value, exact, magnitude) | {
        "representation_error": float(np.median(np.abs(exact - meant) / magnitude)),
        "total_error": float(np.median(np.abs(value - meant) / magnitude)),
    }
