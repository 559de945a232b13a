"""SwiGLUMLP wrapped by DDP and FSDP2, in a process of its own that has a process group."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import limits

TESTS = Path(__file__).parent


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_wrapped_modules_train_as_the_bare_one(device):
    pytest.importorskip("triton")
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path])}
    environment["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    done = subprocess.run(
        [sys.executable, str(TESTS / "interpreted" / "parallel.py"), device],
        capture_output=True, text=True, env=environment, timeout=limits.PROCESS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for words in ("DDP trains", "FSDP2 trains", "DTensors are computed"):
        assert words in done.stdout
