"""Formats, rounding and sums, each against exact fractions or a plain loop."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedlib.bench.attempt import Wrong
from study import precision, sums

PUBLISHED = {
    "fp32": "10.0001",
    "fp16": "9.9531",
    "fp16 into fp32": "10.0021",
    "fp16 upcast, then added": "10.0021",
}
ALL = list(sums.FORMATS)


def exact_rounding(value: float, precision: int) -> Fraction:
    """Nearest number of `precision` bits, ties to even, written independently of the library."""
    x = Fraction(value)
    if x == 0:
        return x
    scale = Fraction(1)
    while abs(x) * scale >= 2**precision:
        scale /= 2
    while abs(x) * scale < 2 ** (precision - 1):
        scale *= 2
    below = math.floor(x * scale)
    rest = x * scale - below
    up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1)
    return Fraction(below + up) / scale


def loop_sum(terms: np.ndarray, dtype: str) -> float:
    """One addition after another, each rounded exactly; fp32-held terms of the format."""
    total = Fraction(0)
    for term in terms:
        total = sums.nearest(total + Fraction(float(term)), dtype)
    return float(total)


def test_rounding_keeps_nan_and_overflows_to_infinity():
    largest = np.array([np.finfo(np.float32).max, np.nan], np.float32)
    for dtype in ("tf32", "bf16", "fp16"):
        rounded = sums.round_to(largest, dtype)
        assert np.isinf(rounded[0])
        assert np.isnan(rounded[1])


@settings(max_examples=300, deadline=None)
@given(st.floats(2.0**-60, 2.0**60, width=32), st.booleans(), st.sampled_from(["tf32", "bf16"]))
def test_emulated_rounding_vs_exact_fractions(value: float, negative: bool, dtype: str):
    x = -value if negative else value
    got = sums.round_to(np.array([x], np.float32), dtype)[0]
    assert Fraction(float(got)) == exact_rounding(x, sums.FORMATS[dtype].precision)


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-30, 2.0**30), st.sampled_from(ALL))
def test_nearest_vs_exact_fractions(value: float, dtype: str):
    if dtype == "fp16":
        value = max(value, 2.0**-14)
    assert sums.nearest(value, dtype) == exact_rounding(value, sums.FORMATS[dtype].precision)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("distribution", ["uniform", "normal"])
def test_sequential_sum_vs_exact_loop(dtype: str, distribution: str, monkeypatch):
    monkeypatch.setattr(sums, "BLOCK", 400)  # which stagnation ends early, in bf16
    terms = sums.rounded_terms(distribution, 1500, 2, dtype)
    got = sums.sequential(terms, dtype)
    assert [float(v) for v in got] == [loop_sum(column, dtype) for column in terms.T]


@pytest.mark.parametrize("dtype", ALL)
def test_pairwise_beats_sequential(dtype: str):
    terms = sums.rounded_terms("uniform", 3000, 3, dtype)
    errors = {
        name: sums.relative_errors(method(terms, dtype), terms).max()
        for name, method in sums.SUMS.items()
    }
    u = sums.FORMATS[dtype].unit_roundoff
    assert errors["pairwise"] < errors["sequential"] and errors["sequential"] > 2.5 * u


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_sum_is_reproduced_to_every_digit(name: str):
    total = precision.four_sum(name, 1000)
    assert f"{total.item():.4f}" == PUBLISHED[name]
    assert PUBLISHED[name] in str(total)


@pytest.mark.parametrize("case", precision.four_sums(["cpu"]), ids=lambda c: c["provider"])
def test_representation_and_accumulation_make_up_the_error(case: dict):
    name = case["provider"]
    value = Fraction(precision.four_sum(name, 1000).item())
    term = sums.nearest(Fraction(1, 100), precision.FOUR_SUMS[name][1])
    figures = precision.measure_four_sum(case)
    assert figures["error"] == float(value - 10)
    assert figures["representation_error"] == float(1000 * (term - Fraction(1, 100)))
    assert figures["accumulation_error"] == float(value - 1000 * term)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("text", ["0.01", "1"])
def test_a_sum_stops_where_the_formula_says(dtype: str, text: str):
    figures = precision.measure_stagnation({"dtype": dtype, "term_text": text})
    term = float(sums.nearest(Fraction(text), dtype))
    terms = np.full(int(2 * figures["value"] / term), term)
    assert figures["value"] == figures["predicted_value"] == loop_sum(terms, dtype)


def test_a_sum_beyond_fp16_is_an_overflow_not_an_error_figure():
    case = {"dtype": "fp16", "distribution": "uniform", "n_terms": 150_000, "seeds": 1}
    with pytest.raises(Wrong, match="overflow"):
        precision.measure_growth(case | {"method": "pairwise"})
