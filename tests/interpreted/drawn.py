"""Drawn calls over interpreted kernels: `tests/test_swiglu_hypothesis.py` runs this file in a
process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import os

import bf16
import swiglu_drawn as drawn

assert os.environ["TRITON_INTERPRET"] == "1"
bf16.apply()


EXAMPLES = int(os.environ["DRAWN_EXAMPLES"])


def test_drawn_calls_vs_float64():
    drawn.check_many("cpu", drawn.SMALL, EXAMPLES)
