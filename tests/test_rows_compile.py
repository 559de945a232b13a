"""The kernels of `rms_norm` and `rope` compiled ahead of time for every architecture."""

import ahead
import pytest

pytest.importorskip("triton")
from fusedlib.kernels.swiglu_configs import SHARED_MEMORY

# The usual width, and the one of each kernel that needs most registers; `rows_ahead.py` knows more.
NAMES = ("fwd half 4096", "fwd fp32 32768", "bwd half 4096", "bwd fp32 8192", "bwd fp32 32768",
         "rope half 64 of 64", "rope back at positions half 32 of 96")  # fmt: skip
# Two programs of a multiprocessor's 65,536 registers; some for every instruction in flight.
MOST_REGISTERS = {"bwd half 4096": 128, "fwd half 4096": 64, "rope half 64 of 64": 64}


@pytest.mark.slow
def test_compiled_kernels_fit_spill_nothing_and_load_by_16_bytes():
    archs = sorted(SHARED_MEMORY)
    found = ahead.compiled_by_architecture("rows_ahead.py", *NAMES)
    rows = [row for of_one in found.values() for row in of_one]
    assert {(r["name"], r["arch"]) for r in rows} == {(n, a) for n in NAMES for a in archs}
    assert [fault for row in rows for fault in ahead.misfits(row)] == []
    for row in rows:
        assert not row["narrow"] and row["REG"] <= MOST_REGISTERS.get(row["name"], 255), row
