"""The autotuner's candidates compiled ahead of time, each for its architecture."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from fusedlib.kernels.swiglu_configs import SHARED_MEMORY

TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", sorted(SHARED_MEMORY))
def test_candidates_fit_and_spill_nothing(architecture):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, str(TESTS / "autotune_ahead.py"), str(architecture)],
        capture_output=True, text=True, env=environment, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 20
    limit = SHARED_MEMORY[architecture]
    bad = [r for r in rows if r["STACK"] or r.get("STL") or r.get("LDL") or r["shared"] > limit]
    assert bad == []
