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


@dataclass(frozen=True)
class Format:
    """A binary format of `precision` significand bits and smallest normal number 2^min_exponent;
    `native` is numpy's type of it, None where it is emulated.
    """

    name: str
    precision: int
    min_exponent: int
    native: type[np.floating] | None = None

    @property
    def unit_roundoff(self) -> float:
        """u = 2^-p, the largest relative error of rounding to nearest."""
        return 2.0**-self.precision


FORMATS: dict[str, Format] = {
    "fp32": Format("fp32", 24, -126, np.float32),
    "tf32": Format("tf32", 11, -126),
    "fp16": Format("fp16", 11, -14, np.float16),
    "bf16": Format("bf16", 8, -126),
}


def get(name: str) -> Format:
    """The format called `name`; ValueError with the known ones when there is none."""
    if name not in FORMATS:
        known = ", ".join(FORMATS)
        raise ValueError(f"unknown number format {name!r}: choose one of {known}")
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


def rounder(name: str, shape: tuple[int, ...]) -> Callable[[np.ndarray], None]:
    """A function that rounds finite fp32 arrays of `shape` in place; scratch space is made once."""
    fmt = get(name)
    if fmt.native is np.float32:
        return lambda values: None
    if fmt.native is np.float16:
        half = np.empty(shape, np.float16)

        def round_fp16(values: np.ndarray) -> None:
            half[...] = values
            values[...] = half

        return round_fp16
    dropped = 24 - fmt.precision
    # Arrays as operands save time on a few columns, scalars save memory on millions of terms.
    constants = shape if math.prod(shape) <= 4096 else ()
    shift, one, below_half, mask = (
        np.full(constants, constant, np.uint32)
        for constant in (dropped, 1, (1 << (dropped - 1)) - 1, 0xFFFFFFFF ^ ((1 << dropped) - 1))
    )
    carry = np.empty(shape, np.uint32)
    # Called once a term: local names and positional outputs take a third off its time.
    right_shift, bitwise_and, add = np.right_shift, np.bitwise_and, np.add

    def round_bits(values: np.ndarray) -> None:
        # Adding just under half a unit, plus one where the last kept bit is odd, carries exactly
        # when the nearest neighbour, or on a tie the even one, lies above.
        bits = values.view(np.uint32)
        right_shift(bits, shift, carry)
        bitwise_and(carry, one, carry)
        add(carry, below_half, carry)
        add(bits, carry, bits)
        bitwise_and(bits, mask, bits)

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
        rounder(name, values.shape)(rounded)
    return np.where(np.isfinite(values), rounded, values)


def truncate_to_fp32(values: np.ndarray) -> np.ndarray:
    """Chop float64 values of fp32's normal range to its 24 bits, toward zero; float64 again."""
    bits = values.view(np.uint64) & np.uint64(0xFFFFFFFFFFFFFFFF ^ ((1 << 29) - 1))
    return bits.view(np.float64)


def exact_sum(values: np.ndarray) -> np.ndarray:
    """Sum float64 values of shape [n, ...] over the first axis with twice float64's precision.

    A tree of additions whose rounding errors are found exactly (Knuth's TwoSum) and summed apart;
    the error is about log2(n)^2 * 2^-106 of the sum of magnitudes, then one rounding to float64.
    """
    level = np.asarray(values, np.float64)
    residual = np.zeros(level.shape[1:])
    while level.shape[0] > 1:
        if level.shape[0] % 2:
            level = np.concatenate([level, np.zeros_like(level[:1])])
        left, right = level[0::2], level[1::2]
        level = left + right
        virtual = level - left
        residual = residual + ((left - (level - virtual)) + (right - virtual)).sum(axis=0)
    return residual + (level[0] if level.shape[0] else 0.0)


def stagnation_value(term: Fraction | float, name: str) -> float:
    """Where a running sum of one positive term stops growing: S = 2^(p + ceil(log2 term)).

    At S the spacing of the format is at least twice the term, so the sum rounds back to S; just
    below S the term is more than half a spacing and at most a whole one, so every addition moves by
    one spacing and S is hit exactly.
    """
    exact = Fraction(term)
    if exact <= 0:
        raise ValueError(f"a sum stops growing for a positive term, got {float(exact)}")
    exponent = math.frexp(float(exact))[1]
    if Fraction(2) ** (exponent - 1) == exact:
        exponent -= 1
    return 2.0 ** (get(name).precision + exponent)
