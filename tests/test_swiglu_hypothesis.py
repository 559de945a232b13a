"""Drawn calls of the SwiGLU MLP against float64: over interpreted kernels, and on a GPU."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import swiglu_drawn as drawn
from fusedlib.ops.mlp import route
from interpreter import passed_in_the_interpreter

PARTS, EXAMPLES = 10, 50  # 500 cases; ten tests, so that pytest-xdist can share their compiling


@pytest.mark.parametrize("examples", [12, pytest.param(500, marks=pytest.mark.long)])
def test_in_the_interpreter(examples):
    """What fails there is shown here."""
    drawn_file, count = "interpreted/drawn.py", str(examples)
    assert passed_in_the_interpreter(drawn_file, DRAWN_EXAMPLES=count) > 3


def test_drawn_shapes_reach_every_path_of_an_h200(monkeypatch):
    pytest.importorskip("triton")
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(route, "architecture", lambda _: 90)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
    monkeypatch.setattr(route, "max_unfused_tokens", route.max_unfused_tokens.__wrapped__)
    monkeypatch.setattr(route, "_runs_warp_specialized", lambda _: True)
    card = torch.device("cuda", 0)
    found = Counter()

    @seed(0)
    @settings(
        max_examples=PARTS * EXAMPLES, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(shape=drawn.ON_GPU)
    def each(shape):
        found[route.choose_route(route.MLPProblem(card, torch.bfloat16, "ieee", *shape)).path] += 1

    each()
    paths = "few tokens", "apart", "dh apart", "fused by roles", "fused by tiles"
    assert all(found[path] >= 20 for path in paths), found


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_on_the_gpu(part):
    drawn.check_many("cuda", drawn.ON_GPU, EXAMPLES, part)
