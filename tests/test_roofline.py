"""Ceilings measured on the device, and the least time under them."""

import pytest

from fusedlib.bench import roofline


def test_least_time_is_that_of_the_slower_side_by_hand():
    # 100 FLOPs at 10 a second are 10 s; 30 bytes at 10 a second 3 s.
    assert roofline.least_ms(100, 30, 10, 10) == 10e3
    assert roofline.least_ms(10, 30, 10, 10) == 3e3


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
