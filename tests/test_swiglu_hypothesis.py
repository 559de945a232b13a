"""Drawn calls of the SwiGLU MLP against float64: over interpreted kernels, and on a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import swiglu_drawn as drawn

TESTS = Path(__file__).parent
PARTS, EXAMPLES = 10, 50  # 500 cases; ten tests, so that pytest-xdist can share their compiling


@pytest.mark.timeout(600)
@pytest.mark.parametrize("examples", [12, pytest.param(500, marks=pytest.mark.slow)])
def test_in_the_interpreter(examples):
    """Runs `interpreted/drawn.py`; what fails there is shown here."""
    pytest.importorskip("triton")
    folders = [str(TESTS.parent), str(TESTS), str(TESTS / "interpreted"), *sys.path]
    environment = os.environ | {
        "TRITON_INTERPRET": "1", "DRAWN_EXAMPLES": str(examples),
        "PYTHONPATH": os.pathsep.join(folders),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly",
         str(TESTS / "interpreted" / "drawn.py")],
        capture_output=True, text=True, env=environment, timeout=580, check=False,
        cwd=TESTS.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    [passed] = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= 10 and "skipped" not in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_on_the_gpu(part):
    drawn.check_many("cuda", drawn.ON_GPU, EXAMPLES, part)
