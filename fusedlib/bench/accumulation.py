"""Sums of n terms: how far a running sum in a given format lies from the exact one.

experiment   question
four_sums    0.01 added a thousand times, four ways, as published; each error split in two
growth       error against the number of terms, by format, method and distribution
stagnation   where a sum of equal terms stops growing

The error of a computed sum s' of terms x_i that were meant to be X_i has two exact parts:
s' - sum X_i = (sum x_i - sum X_i) + (s' - sum x_i), *representation* and *accumulation*.
Error bounds: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., 2002, chapter 4;
for random terms Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J.
Sci. Comput. 41(5), 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch

from fusedlib.bench import formats

Case = dict[str, str | int | float | bool | None]
Figures = dict[str, object]

DISTRIBUTIONS = ("constant", "uniform", "normal")
METHODS = ("sequential", "pairwise", "kahan")
CONSTANT = Fraction(1, 100)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class FourSum:
    """One of the published sums: the running sum's format, the term's, and whether it is upcast by
    hand first.
    """

    total: str
    term: str
    upcast: bool = False


FOUR_SUMS: dict[str, FourSum] = {
    "fp32": FourSum("fp32", "fp32"),
    "fp16": FourSum("fp16", "fp16"),
    "fp16 into fp32": FourSum("fp32", "fp16"),
    "fp16 upcast, then added": FourSum("fp32", "fp16", upcast=True),
}


def devices() -> list[str]:
    """The torch devices to measure on here: the CPU, and a CUDA GPU when there is one."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def grid(largest: int) -> list[int]:
    """1 and 3 times each power of ten from 10 up to `largest`."""
    if largest < 10:
        raise ValueError(f"the largest number of terms must be at least 10, got {largest}")
    numbers = (m * 10**e for e in range(1, len(str(largest)) + 1) for m in (1, 3))
    return [n for n in numbers if n <= largest]


# --- the four sums --------------------------------------------------------------------------------


def four_sum_cases(n_terms: int = 1000) -> list[Case]:
    """One case a published sum and device."""
    return [
        {
            "experiment": "four_sums",
            "provider": name,
            "dtype": spec.total,
            "direction": "forward",
            "distribution": "constant",
            "n_terms": n_terms,
            "device": device,
        }
        for device in devices()
        for name, spec in FOUR_SUMS.items()
    ]


def four_sum(name: str, n_terms: int, device: str = "cpu") -> torch.Tensor:
    """Add 0.01 `n_terms` times with torch, one after another, as the published script did."""
    spec = FOUR_SUMS[name]
    total = torch.tensor(0.0, dtype=DTYPES[spec.total], device=device)
    term = torch.tensor(float(CONSTANT), dtype=DTYPES[spec.term], device=device)
    for _ in range(n_terms):
        total += term.to(DTYPES[spec.total]) if spec.upcast else term
    return total


def split_error(value: float, term: Fraction, n_terms: int) -> tuple[Fraction, Fraction]:
    """Split value - n/100 exactly into n(term - 1/100), representation, and value - n*term,
    accumulation.
    """
    return n_terms * (term - CONSTANT), Fraction(value) - n_terms * term


def measure_four_sum(case: Case) -> Figures:
    """Measure one published sum; errors in absolute terms, signed, and exact before they are
    stored.
    """
    name, n_terms = str(case["provider"]), int(case["n_terms"] or 0)
    total = four_sum(name, n_terms, str(case["device"]))
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
        "signed_relative_error": float(error / (n_terms * CONSTANT)),
        "relative_error": float(abs(error) / (n_terms * CONSTANT)),
    }


# --- error against the number of terms ------------------------------------------------------------


@lru_cache(maxsize=1)
def draw(distribution: str, n_terms: int, seeds: int) -> np.ndarray:
    """Draw fp32 terms [n_terms, seeds], read-only; a seed gives the same stream for any n."""
    if distribution == "constant":
        return np.full((n_terms, 1), float(CONSTANT), np.float32)
    terms = np.empty((n_terms, seeds), np.float32)
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        if distribution == "uniform":
            terms[:, seed] = generator.random(n_terms, np.float32)
        elif distribution == "normal":
            terms[:, seed] = generator.standard_normal(n_terms, np.float32)
        else:
            known = ", ".join(DISTRIBUTIONS)
            raise ValueError(f"unknown distribution {distribution!r}: choose one of {known}")
    terms.flags.writeable = False
    return terms


def rounded_terms(distribution: str, n_terms: int, seeds: int, dtype: str) -> np.ndarray:
    """The terms [n_terms, seeds] after rounding to the format, held in fp32."""
    if distribution == "constant":  # rounded once from 1/100, not twice by way of fp32
        return np.full((n_terms, 1), float(formats.nearest(CONSTANT, dtype)), np.float32)
    return formats.round_to(draw(distribution, n_terms, seeds), dtype)


def sequential(terms: np.ndarray, dtype: str) -> np.ndarray:
    """Sum fp32-held terms [n, columns] one after another, the running sum rounded to `dtype` each
    time.
    """
    if dtype in ("fp32", "fp16"):
        native = np.float32 if dtype == "fp32" else np.float16
        total = np.zeros(terms.shape[1], native)
        for start in range(0, len(terms), 1 << 16):
            block = np.concatenate([total[None], terms[start : start + (1 << 16)].astype(native)])
            with np.errstate(over="ignore"):
                total = np.add.accumulate(block, axis=0, dtype=native)[-1]
        return total.astype(np.float32)
    total = np.zeros(terms.shape[1], np.float32)
    round_in_place, add = formats.rounder(dtype, total.shape), np.add
    low, high = terms.min(axis=0), terms.max(axis=0)
    for start in range(0, len(terms), 4096):
        # Rounding is monotone: when neither the smallest nor the largest term moves the sum, none
        # can.
        if all(
            np.array_equal(formats.round_to(total + edge, dtype), total) for edge in (low, high)
        ):
            break
        for row in terms[start : start + 4096]:
            add(total, row, total)
            round_in_place(total)
    return total


def pairwise(terms: np.ndarray, dtype: str) -> np.ndarray:
    """Sum fp32-held terms [n, columns] by adding neighbours, then neighbours of those, each sum
    rounded.
    """
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
    total, correction, grown, addend = (np.zeros(terms.shape[1], np.float32) for _ in range(4))
    round_in_place = formats.rounder(dtype, total.shape)
    for row in terms:
        np.subtract(row, correction, out=addend)
        round_in_place(addend)
        np.add(total, addend, out=grown)
        round_in_place(grown)
        np.subtract(grown, total, out=correction)
        round_in_place(correction)
        np.subtract(correction, addend, out=correction)
        round_in_place(correction)
        total[...] = grown
    return total


SUMS = {"sequential": sequential, "pairwise": pairwise, "kahan": kahan}


def growth_cases(
    dtypes: list[str], distributions: list[str], max_terms: int, kahan_terms: int, seeds: int
) -> list[Case]:
    """Cases of the growth experiment; Kahan's sum, which is dear, goes to `kahan_terms` only."""
    for dtype in dtypes:
        formats.get(dtype)
    return [
        {
            "experiment": "growth",
            "provider": f"{method} {dtype}",
            "method": method,
            "dtype": dtype,
            "direction": "forward",
            "distribution": distribution,
            "n_terms": n_terms,
            "seed": 0,
            "seeds": 1 if distribution == "constant" else seeds,
            "device": "cpu",
        }
        for n_terms in grid(max_terms)
        for distribution in distributions
        for dtype in dtypes
        for method in METHODS
        if method != "kahan" or n_terms <= kahan_terms
    ]


def error_figures(value: np.ndarray, exact: np.ndarray, magnitude: np.ndarray) -> Figures:
    """Summarise errors [samples] relative to the sum of magnitudes: median, range, signed mean,
    every sample.
    """
    signed = (np.asarray(value, np.float64) - exact) / magnitude
    sizes = np.abs(signed)
    return {
        "value": float(value[0]),
        "exact": float(exact[0]),
        "relative_error": float(np.median(sizes)),
        "relative_error_low": float(sizes.min()),
        "relative_error_high": float(sizes.max()),
        "signed_relative_error": float(signed.mean()),
        "signed_relative_error_samples": [float(s) for s in signed],
    }


def measure_growth(case: Case) -> Figures:
    """Measure one sum over its seeds against the exact sum of the same rounded terms."""
    dtype, distribution = str(case["dtype"]), str(case["distribution"])
    terms = rounded_terms(distribution, int(case["n_terms"] or 0), int(case["seeds"] or 1), dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        value = SUMS[str(case["method"])](terms, dtype)
    if not np.isfinite(value).all():
        return {"status": "wrong", "reason": f"overflow: the sum leaves the range of {dtype}"}
    exact, magnitude = np.empty(len(value)), np.empty(len(value))
    for seed, column in enumerate(terms.T):  # one column at a time: float64 takes twice the memory
        wide = column.astype(np.float64)
        exact[seed], magnitude[seed] = formats.exact_sum(wide), np.abs(wide).sum()
    return error_figures(value, exact, magnitude)


# --- where a sum stops growing --------------------------------------------------------------------


def stagnation_cases(dtypes: list[str]) -> list[Case]:
    """One case a format and term, 0.01 and 1."""
    return [
        {
            "experiment": "stagnation",
            "provider": f"sequential {dtype}",
            "dtype": dtype,
            "direction": "forward",
            "distribution": "constant",
            "term_text": text,
            "device": "cpu",
        }
        for dtype in dtypes
        for text in ("0.01", "1")
    ]


def measure_stagnation(case: Case) -> Figures:
    """Add one term until the sum no longer changes; the stop by formula stands beside it."""
    dtype = str(case["dtype"])
    term = formats.nearest(Fraction(str(case["term_text"])), dtype)
    block = np.full(
        (1 << 12 if formats.get(dtype).emulated else 1 << 20, 1), float(term), np.float32
    )
    total, additions = np.zeros(1, np.float32), 0
    while formats.round_to(total + block[0], dtype)[0] != total[0]:
        grown = sequential(np.concatenate([total[None], block]), dtype)
        if formats.round_to(grown + block[0], dtype)[0] == grown[0]:
            additions += _additions_to(grown, total, block, dtype)
            total = grown
            break
        total, additions = grown, additions + len(block)
    return {
        "value": float(total[0]),
        "predicted_value": formats.stagnation_value(term, dtype),
        "term": float(term),
        "additions": additions,
        "exact": float(additions * Fraction(str(case["term_text"]))),
    }


def _additions_to(goal: np.ndarray, total: np.ndarray, block: np.ndarray, dtype: str) -> int:
    """How many of the block's equal terms take `total` to `goal`, by bisection: the sum never
    falls.
    """
    low, high = 0, len(block)
    while low < high:
        middle = (low + high) // 2
        reached = sequential(np.concatenate([total[None], block[:middle]]), dtype)[0] >= goal[0]
        low, high = (low, middle) if reached else (middle + 1, high)
    return low
