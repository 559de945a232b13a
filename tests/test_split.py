"""The split products in Triton's interpreter, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_in_the_interpreter():
    """Runs `split_interpreted.py`; what fails there is shown here."""
    pytest.importorskip("triton")
    folders = [str(TESTS.parent), str(TESTS), *sys.path]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly",
         "--durations=5", str(TESTS / "split_interpreted.py")],
        capture_output=True, text=True, env=environment, timeout=280, check=False,
        cwd=TESTS.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    [passed] = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 40 and "skipped" not in done.stdout
