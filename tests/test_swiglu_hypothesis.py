"""Drawn calls of the SwiGLU MLP against float64: over interpreted kernels, and on a GPU."""

from collections import Counter
from types import SimpleNamespace

import pytest
import swiglu_drawn as drawn
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from interpreter import passed_in_the_interpreter

PARTS, EXAMPLES = 10, 50  # 500 cases; ten tests, so that pytest-xdist can share their compiling


@pytest.mark.timeout(600)
@pytest.mark.parametrize("examples", [12, pytest.param(500, marks=pytest.mark.long)])
def test_in_the_interpreter(examples):
    """What fails there is shown here."""
    drawn_file, count = "interpreted/drawn.py", str(examples)
    assert passed_in_the_interpreter(drawn_file, 580, DRAWN_EXAMPLES=count) >= 10


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
def test_on_the_gpu(part):
    drawn.check_many("cuda", drawn.ON_GPU, EXAMPLES, part)
