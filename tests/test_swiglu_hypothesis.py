"""Drawn calls of the SwiGLU MLP against float64: over interpreted kernels, and on a GPU."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import swiglu_drawn as drawn
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

TESTS = Path(__file__).parent
PARTS, EXAMPLES = 10, 50  # 500 cases; ten tests, so that pytest-xdist can share their compiling


@pytest.mark.timeout(600)
@pytest.mark.parametrize("examples", [12, pytest.param(500, marks=pytest.mark.long)])
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


def path_of(shape: tuple[int, int, int], calls, hopper) -> str:
    """Which kernels such a bf16 call gets on an H200."""
    tokens, hidden, inner = shape
    aligned = not hidden % 16 and not inner % 16
    if tokens <= calls.FEW_TOKENS:
        return "plan" if aligned and tokens else "pointers"
    like = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device="cuda", shape=(tokens,))
    apart = [calls._apart(like, tokens, inner, n) for n in (calls.FORWARD_N, calls.BACKWARD_N)]
    taken = aligned and hopper.takes(like, inner)
    return ", ".join("apart" if a else "fixed roles" if taken else "pointers" for a in apart)


def test_drawn_shapes_reach_every_path_of_an_h200(monkeypatch):
    pytest.importorskip("triton")
    from fusedlib.kernels import hopper, swiglu_calls

    monkeypatch.setattr(hopper, "_is_hopper", lambda _: True)
    monkeypatch.setattr(swiglu_calls, "architecture", lambda _: 90)
    for module in (hopper, swiglu_calls):
        monkeypatch.setattr(module, "multiprocessors", lambda _: 132)
    found = Counter()

    @seed(0)
    @settings(
        max_examples=PARTS * EXAMPLES, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(shape=drawn.ON_GPU)
    def each(shape):
        found[path_of(shape, swiglu_calls, hopper)] += 1

    each()
    halves = "apart, apart", "fixed roles, apart", "fixed roles, fixed roles"
    assert all(found[path] >= 20 for path in ("plan", "pointers", *halves)), found


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_on_the_gpu(monkeypatch, part):
    from fusedlib.kernels import swiglu_calls

    monkeypatch.setattr(swiglu_calls, "LEAST_HIDDEN", 0)  # drawn sums are short, all paths wanted
    drawn.check_many("cuda", drawn.ON_GPU, EXAMPLES, part)
