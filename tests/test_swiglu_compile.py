"""The SwiGLU kernels compiled ahead of time, every configuration for its architecture."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton")
from fusedlib.kernels import swiglu_configs

pytestmark = pytest.mark.timeout(600)  # some 90 seconds of one core, wherever nothing is cached
TESTS = Path(__file__).parent
ARCHITECTURES = sorted(swiglu_configs.SHARED_MEMORY)
MATRIX_INSTRUCTION = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTC.?MMA"}


@pytest.fixture(scope="module")
def compiled() -> dict[int, list[dict]]:
    """Every kernel's figures by architecture, two architectures at a time."""
    import triton.backends.nvidia as nvidia

    if not (Path(nvidia.__file__).parent / "bin" / "cuobjdump").exists():
        pytest.skip("this triton wheel has no cuobjdump")
    with ThreadPoolExecutor(2) as pool:
        rows = pool.map(compiled_for, ARCHITECTURES)
        return dict(zip(ARCHITECTURES, rows, strict=True))


def compiled_for(architecture: int) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, str(TESTS / "swiglu_ahead.py"), str(architecture)],
        capture_output=True, text=True, env=environment, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def faults(row: dict) -> list[str]:
    """What a kernel must not do on its architecture."""
    found = [f"{row['name']}: {k} is {row[k]}" for k in ("STACK", "STL", "LDL") if row.get(k)]
    if row["shared"] > swiglu_configs.SHARED_MEMORY[row["arch"]]:
        found.append(f"{row['name']}: {row['shared']} bytes of shared memory")
    on_tensor_cores = "ieee" not in row["name"] and "pointwise" not in row["name"]
    if on_tensor_cores != bool(row.get(MATRIX_INSTRUCTION[row["arch"]])):
        found.append(f"{row['name']}: {MATRIX_INSTRUCTION[row['arch']]} is not as expected")
    return found


def test_tables_have_every_kind_and_architecture():
    wanted = {(kind, a) for kind in ("half", "tf32", "ieee") for a in ARCHITECTURES}
    assert set(swiglu_configs.FORWARD) == set(swiglu_configs.BACKWARD) == wanted
    assert min(ARCHITECTURES, key=swiglu_configs.SHARED_MEMORY.get) == swiglu_configs.SMALLEST


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_kernels_fit_and_spill_nothing(compiled, architecture):
    rows = compiled[architecture]
    # Hopper has three widths for few tokens.
    known = 35 if architecture == 90 else 26
    assert len(rows) == len({row["name"] for row in rows}) == known
    assert [fault for row in rows for fault in faults(row)] == []


@pytest.mark.slow
def test_on_hopper_aligned_products_load_by_tma(compiled):
    rows = {row["name"]: row for row in compiled[90]}
    for name in (
        "fwd half",
        "fwd tf32",
        "bwd half",
        "bwd tf32",
        "bwd half in place",
        "fwd tf32 few tokens 32 wide",
    ):
        assert rows[name].get("UTMALDG"), name
    for name in ("fwd half unaligned", "fwd half few tokens 32 wide"):
        assert not rows[name].get("UTMALDG"), name


def test_faults_are_found():
    right = {"name": "fwd half", "arch": 90, "STACK": 0, "shared": 200_000, "HGMMA": 8}
    assert faults(right) == []
    for change in ({"STACK": 8}, {"STL": 1}, {"shared": 232_449}, {"HGMMA": 0}, {"arch": 89}):
        assert faults(right | change)
    assert faults({**right, "name": "fwd ieee"})
