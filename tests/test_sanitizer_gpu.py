"""NVIDIA's compute-sanitizer over one small run of each kernel, `sanitized.py`: no access outside a
tensor, no hazard in shared memory, no barrier misused.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
import sanitized

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
TESTS = Path(__file__).parent
# What each tool prints when it has found nothing.
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards",
    "synccheck": "ERROR SUMMARY: 0 errors",
}


def sanitizer() -> str:
    """The command's path; a toolkit's folder need not be on PATH."""
    found = [
        shutil.which("compute-sanitizer"),
        *Path("/usr/local").glob("cuda*/bin/compute-sanitizer"),
    ]
    paths = [str(path) for path in found if path]
    if not paths:
        pytest.skip("compute-sanitizer is neither on PATH nor in /usr/local/cuda*/bin")
    return paths[0]


@pytest.mark.parametrize("tool", CLEAN)
@pytest.mark.parametrize("name", sanitized.RUNS)
def test_nothing_is_found(name, tool):
    # A cached block would hide an access past the end of a tensor in it.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), *sys.path])
    done = subprocess.run(
        [sanitizer(), "--tool", tool, sys.executable, str(TESTS / "sanitized.py"), name],
        capture_output=True, text=True, env=environment, timeout=280, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert f"{name}: ran" in said and CLEAN[tool] in said, said[-6000:]
