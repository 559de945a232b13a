"""NVIDIA's compute-sanitizer over one small run of each kernel, `sanitized.py`: no access outside a
tensor, no hazard in shared memory, no barrier misused.
"""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
import limits
import sanitized
from fusedlib.ops.matmul import hopper as split_hopper
from fusedlib.ops.mlp import hopper

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
TESTS = Path(__file__).parent
# What each tool prints when it has found nothing.
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards",
    "synccheck": "ERROR SUMMARY: 0 errors",
}
# Kernels whose warps have roles. Triton tells each warp its role through shared memory: one side
# writes and passes `barrier.sync 1`, the other passes it too, elsewhere in the code, and reads.
# racecheck (2025.3.1) does not take the two for one barrier and reports the words read.
ROLES = {
    "hopper": [hopper._hopper_swiglu_kernel],
    "split": [split_hopper._hopper_split_product_kernel],
    "split-pair": [split_hopper._hopper_split_product_kernel],
}
# cuBLAS's own kernels, in which racecheck finds hazards where they split K over a cluster.
CUBLAS = re.compile(r"access at nvjet_\w+\+0x")
SITE = re.compile(r"access at \S*\+0x[0-9a-f]+ in (\S+\.py):(\d+)")


def sanitizer() -> str:
    """The command's path; a toolkit's folder need not be on PATH."""
    toolkits = Path("/usr/local").glob("cuda*/bin/compute-sanitizer")
    for path in (shutil.which("compute-sanitizer"), *toolkits):
        if path:
            return str(path)
    pytest.skip("compute-sanitizer is neither on PATH nor in /usr/local/cuda*/bin")


def races(said: str, name: str) -> list[str]:
    """Those reported of our kernels, but for the telling of roles: both sites outside all roles."""
    kernels = [(k.fn, *inspect.getsourcelines(k.fn)) for k in ROLES.get(name, ())]

    def told(where: str, line: str) -> bool:
        return any(
            where == Path(inspect.getsourcefile(fn) or "").name
            and first <= int(line) < first + len(lines)
            for fn, lines, first in kernels
        )

    def telling(race: str) -> bool:
        sites = SITE.findall(race)
        return len(sites) >= 2 and all(told(*site) for site in sites)

    found = said.split("Race reported between")[1:]
    assert found, said[-6000:]
    return [
        race[:1000] for race in found if not telling(race) and len(CUBLAS.findall(race)) < 2
    ]  # fmt: skip


@pytest.mark.parametrize("tool", CLEAN)
@pytest.mark.parametrize("name", sanitized.NAMES)
def test_nothing_is_found(name, tool):
    # A cached block would hide an access past the end of a tensor in it.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), *sys.path])
    done = subprocess.run(
        [sanitizer(), "--tool", tool, "--show-backtrace", "no",
         sys.executable, str(TESTS / "sanitized.py"), name],
        capture_output=True, text=True, env=environment, timeout=limits.PROCESS_S, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert f"{name}: ran" in said, said[-6000:]
    if tool == "racecheck" and CLEAN[tool] not in said:
        assert races(said, name) == []
    else:
        assert CLEAN[tool] in said, said[-6000:]
