"""Triton's interpreter, which is chosen when Triton is imported.

    TRITON_INTERPRET=1 python -m pytest tests/test_norm.py

runs a file's tests of kernels, those that ask for `device`, on a CPU (`tests/conftest.py`); `make
test` does so with the files of operations. What lies in `tests/interpreted` mends the interpreter,
and has a process of its own.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import limits

TESTS = Path(__file__).parent
INTERPRETED = False
if "TRITON_INTERPRET" in os.environ and find_spec("triton") is not None:
    from triton import knobs

    INTERPRETED = knobs.runtime.interpret
# Of torch.compile. Inductor compiles C++ around each interpreted kernel, for 10 s a graph.
BACKEND = "aot_eager" if INTERPRETED else "inductor"
# Plugins that take a second to import and are used by no file there.
UNUSED = ("cacheprovider", "randomly", "hypothesispytest", "anyio", "xdist", "xdist.looponfail")


def passed_in_the_interpreter(name: str) -> int:
    """How many tests of a file below `tests` passed, in a process that it may mend; fails with what
    failed there.

    A skipped test fails too: nothing there depends on the machine. torch gets one thread, since two
    wait for one another where others use the cores.
    """
    pytest.importorskip("triton")
    folders = (TESTS.parent, TESTS, TESTS / "interpreted", TESTS.parent / "notebooks", *sys.path)
    path = os.pathsep.join(map(str, folders))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *(f"-pno:{plugin}" for plugin in UNUSED),
         f"--timeout={limits.INTERPRETED_TEST_S}", str(TESTS / name)],
        capture_output=True, text=True, timeout=limits.PROCESS_S, check=False, cwd=TESTS.parent,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path,
                          "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
    [passed] = re.findall(r"(\d+) passed", done.stdout)
    return int(passed)
