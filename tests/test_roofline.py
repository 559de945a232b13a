"""Ceilings measured on the device, and the least time under them."""

import pytest

from fusedlib.bench import roofline


def test_least_time_is_that_of_the_slower_side_by_hand():
    # 100 FLOPs at 10 a second are 10 s; 30 bytes at 10 a second 3 s.
    assert roofline.least_ms(100, 30, 10, 10) == 10e3
    assert roofline.least_ms(10, 30, 10, 10) == 3e3


def test_cases_are_a_copy_and_a_product_a_format():
    actual = roofline.cases(
        "cpu", ["bfloat16", "float32", "float32 high"], gemm_size=8, copy_mib=1, repetitions=2
    )
    assert [c["ceiling"] for c in actual] == ["copy", "gemm", "gemm", "gemm"]
    assert [c.get("precision") for c in actual[1:]] == [None, "highest", "high"]


@pytest.mark.parametrize("case", roofline.cases(
    "cpu", ["bfloat16", "float32", "float32 high"], gemm_size=64, copy_mib=1, repetitions=3
), ids=str)  # fmt: skip
def test_rates_follow_from_the_median(case):
    actual = roofline.measure(case)
    seconds = actual["median_ms"] / 1e3
    if case["ceiling"] == "copy":
        assert actual["bytes_per_s"] == pytest.approx(2 * 2**20 / seconds)
    else:
        assert actual["flops_per_s"] == pytest.approx(2 * 64**3 / seconds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"formats": ["int4"]}, "unknown format 'int4'"),
        ({"gemm_size": 0}, "gemm_size must be at least 1, got 0"),
        ({"repetitions": 0}, "repetitions must be at least 1, got 0"),
    ],
)
def test_impossible_ceilings_are_told(change, message):
    options = {"formats": ["float32"], "gemm_size": 8, "copy_mib": 1, "repetitions": 1} | change
    with pytest.raises(ValueError, match=message):
        roofline.cases("cpu", **options)
