"""The split kernels compiled ahead of time, every configuration for its architecture."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from fusedlib.kernels import split_configs, swiglu_configs

pytestmark = pytest.mark.timeout(600)
TESTS = Path(__file__).parent
ARCHITECTURES = sorted(split_configs.FAST)
MATRIX_INSTRUCTION = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTC.?MMA"}


def compiled_for(architecture: int) -> list[dict]:
    import triton.backends.nvidia as nvidia

    if not (Path(nvidia.__file__).parent / "bin" / "cuobjdump").exists():
        pytest.skip("this triton wheel has no cuobjdump")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, str(TESTS / "split_ahead.py"), str(architecture)],
        capture_output=True, text=True, env=environment, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def faults(row: dict) -> list[str]:
    """What a kernel must not do on its architecture."""
    found = [f"{row['name']}: {k} is {row[k]}" for k in ("STACK", "STL", "LDL") if row.get(k)]
    if row["shared"] > swiglu_configs.SHARED_MEMORY[row["arch"]]:
        found.append(f"{row['name']}: {row['shared']} bytes of shared memory")
    if row["name"].startswith(("fast", "gluon")) != bool(row.get(MATRIX_INSTRUCTION[row["arch"]])):
        found.append(f"{row['name']}: {MATRIX_INSTRUCTION[row['arch']]} is not as expected")
    if row["name"].startswith("gluon") and not row.get("UTMALDG"):
        found.append(f"{row['name']}: no TMA")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_kernels_fit_and_spill_nothing(architecture):
    rows = compiled_for(architecture)
    assert len(rows) == len({row["name"] for row in rows}) == (11 if architecture == 90 else 7)
    assert [fault for row in rows for fault in faults(row)] == []


def test_every_architecture_has_a_configuration():
    assert set(split_configs.FAST) == set(swiglu_configs.SHARED_MEMORY)


def test_faults_are_found():
    right = {
        "name": "gluon 00",
        "arch": 90,
        "STACK": 0,
        "shared": 200_000,
        "HGMMA": 8,
        "UTMALDG": 1,
    }
    assert faults(right) == []
    for change in ({"STACK": 8}, {"STL": 1}, {"shared": 232_449}, {"HGMMA": 0}, {"UTMALDG": 0}):
        assert faults(right | change)
    assert faults({**right, "name": "exact"})
