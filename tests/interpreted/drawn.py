"""Drawn calls over interpreted kernels: `tests/test_swiglu_hypothesis.py` runs this file in a
process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import os

import pytest

import broken_kernels
import swiglu_drawn as drawn

EXAMPLES = int(os.environ["DRAWN_EXAMPLES"])
USUAL = drawn.Case(
    shape=(37, 40, 35), dtype="float32", save="gate_up", wanted=(True,) * 4, pair=False,
    layouts=("wide rows", "contiguous", "transposed", "contiguous"), offset=3, lead="1 first",
    scales=(0,) * 4, spread=0, odd=None, seed=0,
)  # fmt: skip


def test_drawn_calls_vs_float64():
    drawn.check_many("cpu", drawn.SMALL, EXAMPLES)


@pytest.mark.parametrize("fault", [*broken_kernels.BROKEN][::3])  # all in test_swiglu.py
def test_a_broken_kernel_is_rejected(monkeypatch, tmp_path, fault):
    assert drawn.misses(USUAL, "cpu") == []
    started = broken_kernels.put(monkeypatch, tmp_path, fault, off=1e-3)
    assert drawn.misses(USUAL, "cpu") != []
    assert broken_kernels.names(started) == set(broken_kernels.NAMES)
