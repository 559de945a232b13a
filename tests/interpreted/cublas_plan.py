"""Plans with torch's products and the pointwise kernel in Triton's interpreter:
`tests/test_cublas_plan.py` runs this file in a process of its own.
"""

import pytest
from torch.autograd import grad

import broken_kernels
import plan_checks
import swiglu_checks as checks
from fusedlib.launch import launch
from fusedlib.ops.mlp import plan_cache
from fusedlib.ops.mlp.function import SAVES, swiglu_mlp

SHAPE = (65, 48, 32)  # tokens, hidden, inner: one token more than the kernels for few take
POINTWISE = "_swiglu_bwd_kernel"


@pytest.fixture(autouse=True)
def started(monkeypatch):
    plan_checks.put_apart(monkeypatch)
    return plan_checks.note_launches(monkeypatch)


FUSED = {"nothing": "apart", "forward": "dh apart", "both": "fused by tiles"}


def fuse(monkeypatch, fused):
    plan_checks.put_apart(monkeypatch, fused == "nothing", fused != "both")


def small(shape=SHAPE, dtype="float16"):
    return checks.small("cpu", dtype, shape)


def test_one_plan_serves_every_length_of_its_class(started, monkeypatch):
    """A new length launches the same kernels, and gives what it gives by a plan of its own."""
    for tokens in (65, 96, 130, 72):
        leaves, dy = small((tokens, *SHAPE[1:]))
        found = [swiglu_mlp(*leaves), *grad(swiglu_mlp(*leaves), leaves, dy)]
        [plan] = plan_cache._PLANS.values()
        with monkeypatch.context() as anew:
            anew.setattr(plan_cache, "_PLANS", {})
            wanted = [swiglu_mlp(*leaves), *grad(swiglu_mlp(*leaves), leaves, dy)]
        assert checks.same(found, wanted)
    kept = {key[-1] for key in launch.LAUNCHES if key[0] is plan}
    assert kept == {65, 96, 130, 72}
    swiglu_mlp(*small((64, *SHAPE[1:]))[0])
    assert len(plan_cache._PLANS) == 2


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fused", FUSED)
def test_swiglu_mlp_and_gradients_vs_float64(started, monkeypatch, fused, dtype, save):
    fuse(monkeypatch, fused)
    assert checks.misses_mlp("cpu", dtype, SHAPE, save) == []
    [plan] = plan_cache._PLANS.values()
    assert plan.path == FUSED[fused]
    assert set(started) == {POINTWISE, *["_swiglu_fwd_kernel"] * (fused != "nothing")}


@pytest.mark.parametrize("check", plan_checks.HOLDS, ids=plan_checks.name_of)
def test_holds(monkeypatch, check):
    plan_checks.run_at(monkeypatch, check, "cpu", "float16", (72, *SHAPE[1:]))
    assert "apart" in {plan.path for plan in plan_cache._PLANS.values()}


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("save", SAVES)
def test_leading_dimensions_are_a_plan_s_too(monkeypatch, save, fused):
    fuse(monkeypatch, fused)
    (x, *weights), dy = small((72, *SHAPE[1:]))
    y = swiglu_mlp(x, *weights, save=save)
    wanted = [y, *grad(y, (x, *weights), dy)]
    deep = x.detach().view(2, 3, 12, -1).requires_grad_()
    y = swiglu_mlp(deep, *weights, save=save)
    found = [y, *grad(y, (deep, *weights), dy.view_as(y))]
    assert y.shape == found[1].shape == deep.shape and len(plan_cache._PLANS) == 1
    assert checks.same([t.view_as(w) for t, w in zip(found, wanted, strict=True)], wanted)


@pytest.mark.parametrize("save", SAVES)
def test_frozen_subsets_get_what_they_want_and_cost_no_more(started, save):
    plan_checks.check_frozen_subsets(started, *small(), save, [POINTWISE], [POINTWISE])


def test_a_second_call_looks_nothing_up(monkeypatch):
    plan_checks.check_second_call(monkeypatch, *small())


def test_rows_that_are_not_even_go_the_same_way(started):
    assert checks.misses_mlp("cpu", "float16", (65, 41, 33)) == []
    [plan] = plan_cache._PLANS.values()
    assert plan.path == "apart" and set(started) == {POINTWISE}


@pytest.mark.parametrize("retained", [False, True])
def test_gate_up_is_written_over_only_where_nobody_sees_it(retained):
    plan_checks.check_gate_up_written_over(*small(), retained)


@pytest.mark.parametrize("fault", ["wrong derivative", "up left out of the recomputed h"])
def test_a_broken_pointwise_kernel_is_rejected(monkeypatch, tmp_path, fault):
    broken_kernels.forget(monkeypatch)
    assert checks.misses_mlp("cpu", "float16", SHAPE) == []
    started = broken_kernels.put(monkeypatch, tmp_path, fault, off=0.5)
    assert checks.misses_mlp("cpu", "float16", SHAPE) != []
    assert POINTWISE in broken_kernels.names(started) and plan_cache._PLANS
