"""Sums in fp32, TF32, fp16 and bf16, one rounded operation after another.

A format has p bits of significand and the unit roundoff u = 2^-p: rounding to nearest changes a
normal number x by at most u|x|. TF32 and bf16 values live in fp32 arrays, and each operation is
rounded by integer arithmetic on the bits. That equals one correctly rounded operation, for
24 >= 2p + 2 (Figueroa, "When is double rounding innocuous?", 1995). fp16 is numpy's own.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

CONSTANT = Fraction(1, 100)
BLOCK = 4096  # terms that are added before a look whether the sum still moves


@dataclass(frozen=True)
class Format:
    """A binary format of `precision` significand bits and smallest normal number 2^min_exponent;
    `native` is numpy's type of it, None where it is emulated."""

    precision: int
    min_exponent: int
    native: type[np.floating] | None = None

    @property
    def unit_roundoff(self) -> float:
        """u = 2^-p, the largest relative error of rounding to nearest."""
        return 2.0**-self.precision


FORMATS: dict[str, Format] = {
    "fp32": Format(24, -126, np.float32),
    "tf32": Format(11, -126),
    "fp16": Format(11, -14, np.float16),
    "bf16": Format(8, -126),
}


# --- rounding ------------------------------------------------------------------------------------


def nearest(value: Fraction | float, name: str) -> Fraction:
    """Round one number exactly to the nearest of a format, ties to even, without an upper limit:
    the definition that the fast roundings are tested against."""
    fmt, exact = FORMATS[name], Fraction(value)
    if exact == 0:
        return exact
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    spacing = Fraction(2) ** (max(exponent, fmt.min_exponent) - fmt.precision + 1)
    return round(exact / spacing) * spacing  # Python rounds a Fraction's tie to even


def round_to(values: np.ndarray, name: str) -> np.ndarray:
    """An fp32 array rounded to a format, to nearest, ties to even; what overflows is infinite."""
    fmt = FORMATS[name]
    if fmt.native:
        with np.errstate(over="ignore"):
            return values.astype(fmt.native).astype(np.float32)
    dropped = 24 - fmt.precision
    shift, one, below_half, mask = (
        np.uint32(n) for n in (dropped, 1, (1 << dropped - 1) - 1, 0xFFFFFFFF ^ (1 << dropped) - 1)
    )
    # Adding just under half a unit, plus one where the last kept bit is odd, carries exactly when
    # the nearest neighbour, or on a tie the even one, lies above.
    bits = values.view(np.uint32)
    rounded = (bits + (bits >> shift & one) + below_half & mask).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)


def stagnation_value(term: Fraction | float, name: str) -> float:
    """Where a running sum of one positive term stops growing: S = 2^(p + ceil(log2 term)).

    At S the spacing of the format is at least twice the term, so the sum rounds back to S; just
    below S the term is more than half a spacing and at most a whole one, so every addition moves by
    one spacing and S is hit exactly.
    """
    fraction, exponent = math.frexp(term)
    return 2.0 ** (FORMATS[name].precision + exponent - (fraction == 0.5))


# --- sums ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def draw(distribution: str, n_terms: int, seeds: int) -> np.ndarray:
    """Draw fp32 terms [n_terms, seeds], read-only; a seed gives the same stream for any n."""
    terms = np.empty((n_terms, seeds), np.float32)
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        uniform = distribution == "uniform"
        drawn = generator.random if uniform else generator.standard_normal
        terms[:, seed] = drawn(n_terms, np.float32)
    terms.flags.writeable = False
    return terms


def rounded_terms(distribution: str, n_terms: int, seeds: int, dtype: str) -> np.ndarray:
    """The terms [n_terms, seeds] after rounding to the format, held in fp32."""
    return round_to(draw(distribution, n_terms, seeds), dtype)


def running(total: np.ndarray, terms: np.ndarray, dtype: str) -> np.ndarray:
    """Every running sum [n, columns] of fp32-held terms added to `total` one after another, each
    addition rounded to `dtype`."""
    if native := FORMATS[dtype].native:
        block = np.concatenate([total[None], terms]).astype(native)
        with np.errstate(over="ignore"):
            return np.add.accumulate(block, axis=0, dtype=native)[1:].astype(np.float32)
    sums = np.empty_like(terms)
    for at, term in enumerate(terms):
        sums[at] = total = round_to(total + term, dtype)
    return sums


def sequential(terms: np.ndarray, dtype: str) -> np.ndarray:
    """Sum fp32-held terms [n, columns] one after another, each addition rounded to `dtype`."""
    total = np.zeros(terms.shape[1], np.float32)
    edges = terms.min(axis=0), terms.max(axis=0)
    for start in range(0, len(terms), BLOCK):
        # Rounding is monotone: when neither the smallest nor the largest term moves the sum, none
        # can.
        if all(np.array_equal(round_to(total + e, dtype), total) for e in edges):
            break
        total = running(total, terms[start : start + BLOCK], dtype)[-1]
    return total


def pairwise(terms: np.ndarray, dtype: str) -> np.ndarray:
    """Sum fp32-held terms [n, columns]: neighbours, then neighbours of those, each sum rounded."""
    level = terms
    while len(level) > 1:
        if len(level) % 2:
            level = np.concatenate([level, np.zeros_like(level[:1])])
        level = round_to(level[0::2] + level[1::2], dtype)
    return level[0]


SUMS = {"sequential": sequential, "pairwise": pairwise}


def relative_errors(value: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """Errors [columns] of sums of terms [n, columns], relative to the sums of magnitudes."""
    columns = (column.astype(np.float64) for column in terms.T)
    return np.array(
        [
            abs(float(v) - math.fsum(c)) / np.abs(c).sum()
            for v, c in zip(value, columns, strict=True)
        ]
    )
