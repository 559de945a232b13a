"""Dot products in short formats against exact fractions."""

from fractions import Fraction

import numpy as np
import pytest

from fusedlib.bench import dots, formats


def loop_dot(left: np.ndarray, right: np.ndarray, accumulator: str) -> float:
    """Products and sums rounded exactly to the accumulator's format, one after another."""
    total = Fraction(0)
    for x, y in zip(left, right, strict=True):
        product = formats.nearest(Fraction(float(x)) * Fraction(float(y)), accumulator)
        total = formats.nearest(total + product, accumulator)
    return float(total)


@pytest.mark.parametrize("dtype", list(formats.FORMATS))
@pytest.mark.parametrize("wide", [True, False])
def test_dot_vs_exact_loop(dtype: str, wide: bool):
    accumulator = "fp32" if wide else dtype
    left, right = (formats.round_to(v, dtype) for v in dots.operands("normal", 300, 2))
    got = dots.dot(left, right, accumulator)
    wanted = [loop_dot(a, b, accumulator) for a, b in zip(left.T, right.T, strict=True)]
    assert [float(v) for v in got] == wanted


def test_same_format_accumulator_is_not_the_wide_one():
    left, right = (formats.round_to(v, "bf16") for v in dots.operands("uniform", 300, 1))
    wide, same = (dots.dot(left, right, accumulator)[0] for accumulator in ("fp32", "bf16"))
    assert formats.round_to(np.array([wide]), "bf16")[0] != same


def test_products_of_short_numbers_are_exact_in_fp32():
    for dtype in ("fp16", "bf16", "tf32"):
        left, right = (formats.round_to(v, dtype) for v in dots.operands("normal", 500, 1))
        assert np.array_equal((left * right).astype(float), left.astype(float) * right)


def test_wide_accumulator_wins_and_errors_are_told_apart():
    cases = dots.dot_cases(["bf16"], 1024, 5)
    figures = {
        c["accumulator"]: dots.measure_dot(c)
        for c in cases
        if (c["k"], c["distribution"]) == (1024, "uniform")
    }
    wide, same = figures["fp32"], figures["bf16"]
    assert wide["relative_error"] < 1e-5 < same["relative_error"]
    assert wide["representation_error"] == same["representation_error"] > wide["relative_error"]
    assert wide["total_error"] < same["total_error"]


def test_cases_cover_every_pair_once():
    cases = dots.dot_cases(["fp32", "fp16"], 256, 3)
    keys = [tuple(sorted(c.items())) for c in cases]
    assert len(keys) == len(set(keys))
    assert {c["provider"] for c in cases} == {"fp32 into fp32", "fp16 into fp32", "fp16 into fp16"}
    assert sorted({c["k"] for c in cases}) == [16, 64, 256]
    with pytest.raises(ValueError, match="at least 16"):
        dots.lengths(8)
