"""Number formats and rounding to them: fp32, TF32, fp16, bf16.

A format is known by its precision p, the bits of its significand with the implicit one. Its unit
roundoff is u = 2^-p: rounding to nearest changes a normal number x by at most u|x|.

TF32 and bf16 are *emulated*: values live in fp32 arrays and are rounded to the nearest number with
p bits, ties to even, by integer arithmetic on the bits. Adding or multiplying two such numbers in
fp32 and rounding the result gives the same as one correctly rounded operation, because 24 >= 2p + 2
(Figueroa, "When is double rounding innocuous?", 1995). That holds for p = 11 and p = 8. fp16 uses
numpy's own conversion, subnormal numbers and overflow included.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fusedlib.bench.arguments import require_known


@dataclass(frozen=True)
class Format:
    """A binary format of `precision` significand bits and smallest normal number 2^min_exponent;
    `native` is numpy's type of it, None where it is emulated.
    """

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


def get(name: str) -> Format:
    """The format called `name`; ValueError with the known ones when there is none."""
    require_known("number format", name, FORMATS)
    return FORMATS[name]


def nearest(value: Fraction | float, name: str) -> Fraction:
    """Round one number exactly to the nearest of a format, ties to even, without an upper limit.

    Slow and exact: the definition that the fast roundings are tested against, and how constants
    such as 0.01 are rounded once instead of twice.
    """
    fmt, exact = get(name), Fraction(value)
    if exact == 0:
        return exact
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    spacing = Fraction(2) ** (max(exponent, fmt.min_exponent) - fmt.precision + 1)
    return round(exact / spacing) * spacing  # Python rounds a Fraction's tie to even


def rounder(name: str) -> Callable[[np.ndarray], None]:
    """A function that rounds finite fp32 arrays in place."""
    fmt = get(name)
    if fmt.native is np.float32:
        return lambda values: None
    if fmt.native is np.float16:

        def round_fp16(values: np.ndarray) -> None:
            values[...] = values.astype(np.float16)

        return round_fp16
    dropped = 24 - fmt.precision
    # Called once a term: arrays without a dimension, not numbers, take a third off its time.
    shift, one, below_half, mask = (
        np.array(constant, np.uint32)
        for constant in (dropped, 1, (1 << (dropped - 1)) - 1, 0xFFFFFFFF ^ ((1 << dropped) - 1))
    )

    def round_bits(values: np.ndarray) -> None:
        # Adding just under half a unit, plus one where the last kept bit is odd, carries exactly
        # when the nearest neighbour, or on a tie the even one, lies above.
        bits = values.view(np.uint32)
        bits += (bits >> shift & one) + below_half
        bits &= mask

    return round_bits


def round_to(values: np.ndarray, name: str) -> np.ndarray:
    """An fp32 array rounded to a format, to nearest, ties to even; what overflows is infinite.

    Raises:
        ValueError: another dtype, since rounding twice is not rounding once.
    """
    if values.dtype != np.float32:
        raise ValueError(
            f"round_to takes float32, got {values.dtype}: round the constants with formats.nearest"
        )
    rounded = values.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        rounder(name)(rounded)
    return np.where(np.isfinite(values), rounded, values)


def truncate_to_fp32(values: np.ndarray) -> np.ndarray:
    """Chop float64 values of fp32's normal range to its 24 bits, toward zero; float64 again."""
    bits = values.view(np.uint64) & np.uint64(0xFFFFFFFFFFFFFFFF ^ ((1 << 29) - 1))
    return bits.view(np.float64)


def stagnation_value(term: Fraction | float, name: str) -> float:
    """Where a running sum of one positive term stops growing: S = 2^(p + ceil(log2 term)).

    At S the spacing of the format is at least twice the term, so the sum rounds back to S; just
    below S the term is more than half a spacing and at most a whole one, so every addition moves by
    one spacing and S is hit exactly.
    """
    fraction, exponent = math.frexp(term)
    return 2.0 ** (get(name).precision + exponent - (fraction == 0.5))
