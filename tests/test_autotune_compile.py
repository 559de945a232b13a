"""The autotuner's candidates compiled ahead of time, each for its architecture."""

import pytest
from ahead import compiled_ahead, misfits

pytest.importorskip("triton")
from fusedlib.kernels.swiglu_configs import SHARED_MEMORY

# Most with the long tests: candidates differ by architecture in number only.
ARCHITECTURES = [
    pytest.param(arch, marks=pytest.mark.slow if arch == 90 else pytest.mark.long)
    for arch in sorted(SHARED_MEMORY)
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_candidates_fit_and_spill_nothing(architecture):
    rows = compiled_ahead("autotune_ahead.py", architecture, timeout=500)
    assert len(rows) > 20 and {row["arch"] for row in rows} == {architecture}
    assert [fault for row in rows for fault in misfits(row)] == []
