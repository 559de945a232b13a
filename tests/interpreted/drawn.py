"""Drawn calls over interpreted kernels: `tests/test_swiglu_hypothesis.py` runs this file in a
process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import os

import bf16
import swiglu_drawn as drawn
from hypothesis import HealthCheck, given, settings

assert os.environ["TRITON_INTERPRET"] == "1"
bf16.apply()


@given(case=drawn.cases(drawn.SMALL))
@settings(
    max_examples=int(os.environ["DRAWN_EXAMPLES"]), derandomize=True, database=None, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
def test_drawn_calls_vs_float64(case):
    assert drawn.misses(case, "cpu") == []
