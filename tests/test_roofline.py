"""Ceilings measured on the device."""

import pytest

from study import roofline


@pytest.mark.parametrize("case", roofline.cases(
    "cpu", ["bfloat16", "float32"], gemm_size=64, copy_mib=1, repetitions=3
), ids=str)  # fmt: skip
def test_rates_follow_from_the_median(case):
    actual = roofline.measure(case)
    seconds = actual["median_ms"] / 1e3
    if case["ceiling"] == "copy":
        assert actual["bytes_per_s"] == pytest.approx(2 * 2**20 / seconds)
    else:
        assert actual["flops_per_s"] == pytest.approx(2 * 64**3 / seconds)
