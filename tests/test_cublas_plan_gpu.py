"""Plans on cuBLAS's products on a GPU: values and peaks of memory; more in `test_swiglu_gpu.py`."""

import pytest
import torch
from torch.autograd import grad

import plan_checks
import swiglu_checks as checks
from fusedlib.ops.mlp import plan_cache, products, route
from fusedlib.ops.mlp.function import SAVES, swiglu_mlp

pytestmark = pytest.mark.gpu

# Both directions on cuBLAS, ragged tokens; the forward one fused kernel (two rounds of its tiles).
SHAPES = [(65, 64, 80), (130, 208, 272), (517, 384, 1072), (1024, 256, 4096)]


@pytest.fixture(autouse=True)
def _only_plans_made_here(monkeypatch):
    plan_checks.without_small_tiles(monkeypatch)
    if route.max_unfused_tokens(torch.device("cuda", 0), 272, route.BACKWARD_N) < 130:
        plan_checks.put_apart(monkeypatch)  # a card that is no Hopper


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_mlp_and_gradients_vs_float64(shape, dtype, save):
    assert checks.misses_mlp("cuda", dtype, shape, save) == []
    [plan] = plan_cache._PLANS.values()
    assert plan.path in ("apart", "dh apart")


@pytest.mark.parametrize(
    "check", (*plan_checks.HOLDS, checks.check_frozen_subsets), ids=plan_checks.name_of
)
def test_holds(monkeypatch, check):
    plan_checks.run_at(monkeypatch, check, "cuda", "bfloat16", (72, 64, 80))
    assert "apart" in {plan.path for plan in plan_cache._PLANS.values()}


@pytest.mark.parametrize("order", ["chosen", "d_w_down first"])
def test_the_peak_is_that_of_the_chosen_order(monkeypatch, order):
    """d_w_down last, where the tokens are few for the width."""
    tokens, hidden, inner = 512, 2048, 4096
    if order != "chosen":
        monkeypatch.setattr(products, "is_d_w_down_last", lambda *_, **_named: False)
    leaves, dy = checks.small("cuda", "bfloat16", (tokens, hidden, inner))

    def step():
        y = swiglu_mlp(*leaves)
        return [y, *grad(y, leaves, dy)]

    peak = checks.peak_over(step)
    f, d, w = (2 * n for n in (tokens * inner, tokens * hidden, hidden * inner))
    first = d + 2 * f + w + max(f, d + 2 * w)
    last = d + f + d + 2 * w + max(2 * f, w)
    assert last < first
    assert abs(peak - (last if order == "chosen" else first)) <= 2**21
