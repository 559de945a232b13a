"""The kernels and plans for few tokens in Triton's interpreter, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_in_the_interpreter():
    """Runs `interpreted/few_tokens.py`; what fails there is shown here."""
    pytest.importorskip("triton")
    folders = [str(TESTS.parent), str(TESTS), str(TESTS / "interpreted"), *sys.path]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly",
         "--durations=5", str(TESTS / "interpreted" / "few_tokens.py")],
        capture_output=True, text=True, env=environment, timeout=280, check=False,
        cwd=TESTS.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    [passed] = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 25 and "skipped" not in done.stdout
