"""What is said of kernels compiled without a GPU, and what is wrong there."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import limits

TESTS = Path(__file__).parent
MATRIX_INSTRUCTION = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTC.?MMA"}


def compiled_ahead(script: str, *arguments: object) -> list[dict]:
    """The JSON lines of a process without Triton's interpreter."""
    nvidia = pytest.importorskip("triton.backends.nvidia")
    for tool in ("cuobjdump", "nvdisasm"):
        if not (Path(nvidia.__file__).parent / "bin" / tool).exists():
            pytest.skip(f"this triton wheel has no {tool}")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, str(TESTS / script), *map(str, arguments)],
        capture_output=True, text=True, env=environment, timeout=limits.PROCESS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def kernels_ahead(
    family: str, *names: str, archs: Iterable[int] = (), part: str = "0/1"
) -> dict[int, list[dict]]:
    """Rows of `kernels_ahead.py` by architecture, by default of all of them: from one process.

    Of several parts, as "0/2", each has its share of a family's kernels.
    """
    pytest.importorskip("triton")
    from fusedlib.launch import SHARED_MEMORY

    found: dict[int, list[dict]] = {arch: [] for arch in archs or sorted(SHARED_MEMORY)}
    wanted = ",".join(map(str, found))
    for row in compiled_ahead("kernels_ahead.py", family, part, wanted, *names):
        found[row["arch"]].append(row)
    return found


def misfits(row: dict) -> list[str]:
    """What no kernel may do: use the stack, spill, or ask for more shared memory than there is."""
    from fusedlib.launch import SHARED_MEMORY

    found = [f"{row['name']}: {k} is {row[k]}" for k in ("STACK", "STL", "LDL") if row.get(k)]
    if row["shared"] > SHARED_MEMORY[row["arch"]]:
        found.append(f"{row['name']}: {row['shared']} bytes of shared memory")
    return found


def faults(row: dict, on_tensor_cores: bool) -> list[str]:
    """`misfits`, and the card's matrix instruction where it must not be, or not where it must."""
    found, instruction = misfits(row), MATRIX_INSTRUCTION[row["arch"]]
    if on_tensor_cores != bool(row.get(instruction)):
        found.append(f"{row['name']}: {instruction} is not as expected")
    return found
