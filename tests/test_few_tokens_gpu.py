"""Plans for few tokens on a GPU: every width of tile, and hooks; more in `test_swiglu_gpu.py`."""

import pytest
from torch.autograd import grad

import plan_checks
import swiglu_checks as checks
from fusedlib.ops.mlp import plan_cache, route
from fusedlib.ops.mlp.function import SAVES, swiglu_mlp

pytestmark = pytest.mark.gpu

# Tiles of 16, 32 and 64 columns in each of the kernels, spans of 1, 2 and 4, tokens ragged.
SHAPES = [(64, 512, 512), (37, 512, 1056), (1, 256, 512), (33, 16, 16), (50, 8192, 96),
          (64, 48, 8208), (61, 4096, 4112), (64, 8192, 8192)]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch):
    monkeypatch.setattr(plan_cache, "_PLANS", {})


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_mlp_and_gradients_vs_float64(shape, dtype, save, pair):
    assert checks.misses_mlp("cuda", dtype, shape, save, pair=pair) == []
    [plan] = plan_cache._PLANS.values()
    assert plan.path == "few tokens" and plan.problem.sizes[1:] == shape[1:]


SMALL_TILES = [(65, 512, 512), (128, 1024, 2064), (130, 272, 528), (256, 512, 2048),
               (300, 256, 4096), (1000, 64, 2048), (250, 2048, 8192),
               (100, 4096, 14336)]  # fmt: skip


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SMALL_TILES, ids=str)
def test_small_tiles_and_gradients_vs_float64(shape, dtype, save, pair):
    assert checks.misses_mlp("cuda", dtype, shape, save, pair=pair) == []
    [plan] = plan_cache._PLANS.values()
    if route.architecture(plan.problem.device) == 90:
        assert plan.path in ("fused by tiles", "dh apart")


@pytest.mark.parametrize(
    "check", (*plan_checks.HOLDS, checks.check_frozen_subsets), ids=plan_checks.name_of
)
def test_small_tiles_hold(monkeypatch, check):
    plan_checks.run_at(monkeypatch, check, "cuda", "bfloat16", (100, 64, 80))
    assert plan_cache._PLANS


@pytest.mark.parametrize(
    "check", (*plan_checks.HOLDS, checks.check_frozen_subsets), ids=plan_checks.name_of
)
def test_holds(monkeypatch, check):
    plan_checks.run_at(monkeypatch, check, "cuda", "bfloat16", (37, 64, 80))
    assert plan_cache._PLANS


def test_who_asks_triton_is_told_of_every_launch():
    import triton

    leaves, dy = checks.small("cuda", "bfloat16", (64, 64, 64))
    wanted = grad(swiglu_mlp(*leaves), leaves, dy)
    told = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(note := lambda metadata: told.append(metadata.get()["name"]))
    try:
        assert checks.same(grad(swiglu_mlp(*leaves), leaves, dy), wanted)
    finally:
        hook.remove(note)
    assert told == [
        "_swiglu_fwd_kernel",
        "_few_down_kernel",
        "_swiglu_bwd_kernel",
        "_few_gradients_kernel",
    ]
    assert checks.same(grad(swiglu_mlp(*leaves), leaves, dy), wanted) and len(told) == 4
