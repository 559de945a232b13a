"""The autotuner's candidates compiled ahead of time, each for its architecture."""

import pytest
from ahead import compiled_ahead, misfits

pytest.importorskip("triton")
from fusedlib.kernels.swiglu_configs import SHARED_MEMORY


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", sorted(SHARED_MEMORY))
def test_candidates_fit_and_spill_nothing(architecture):
    rows = compiled_ahead("autotune_ahead.py", architecture, timeout=500)
    assert len(rows) > 20 and {row["arch"] for row in rows} == {architecture}
    assert [fault for row in rows for fault in misfits(row)] == []
