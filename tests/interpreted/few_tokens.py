"""The SwiGLU MLP at few tokens in Triton's interpreter: `tests/test_few_tokens.py` runs this file
in a process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import os
from itertools import combinations

import bf16
import broken_kernels
import pytest
import swiglu_checks as checks
import torch
from torch.autograd import grad

from fusedlib import functional
from fusedlib.functional import swiglu_mlp
from fusedlib.kernels import few_tokens_plan, launch, plans

assert os.environ["TRITON_INTERPRET"] == "1"
bf16.apply()

SHAPE = (37, 48, 80)  # two of the interpreter's 32-tiles each way, the last ones ragged
SAVES = ("gate_up", "input")


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Names of the kernels that were started by a plan; plans made anew."""
    monkeypatch.setattr(functional, "_PLANS", {})
    names = []
    original = launch.Launch.__call__

    def noted(self, *matrices):
        names.append(self.kernel.__name__)
        return original(self, *matrices)

    monkeypatch.setattr(launch.Launch, "__call__", noted)
    return names


def small(shape=SHAPE, dtype="float16"):
    return checks.small("cpu", dtype, shape)


FORWARD = ["_swiglu_fwd_kernel", "_few_down_kernel"]
BACKWARD = ["_swiglu_bwd_kernel", "_few_gradients_kernel"]


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [SHAPE, (64, 16, 144), (1, 160, 16)])
def test_swiglu_mlp_and_gradients_vs_float64(started, shape, dtype, save):
    assert checks.misses_mlp("cpu", dtype, shape, save) == []
    again = ["_swiglu_fwd_kernel"] if save == "input" else []
    assert started == [*FORWARD, *again, *BACKWARD]


@pytest.mark.parametrize(
    "check",
    [
        checks.check_leading_dimensions,
        checks.check_any_strides,
        checks.check_backward_twice,
        checks.check_activation_checkpointing,
        checks.check_no_grad_and_inference,
    ],
    ids=lambda f: f.__name__[6:],
)
def test_holds(monkeypatch, started, check):
    monkeypatch.setattr(checks, "HIDDEN", SHAPE[1])
    monkeypatch.setattr(checks, "INNER", SHAPE[2])
    made = small()
    monkeypatch.setattr(checks, "small", lambda device: made)
    check("cpu")
    assert "_few_down_kernel" in started


@pytest.mark.parametrize("save", SAVES)
def test_frozen_subsets_get_what_they_want_and_cost_nothing_else(started, save):
    leaves, dy = small()
    everything = grad(swiglu_mlp(*leaves), leaves, dy)
    for chosen in (c for n in (1, 2) for c in combinations(range(3), n)):
        own = [t.detach().requires_grad_(i in chosen) for i, t in enumerate(leaves)]
        y = swiglu_mlp(*own, save=save)
        started.clear()
        y.backward(dy)
        for i, leaf in enumerate(own):
            assert (leaf.grad is not None) == (i in chosen)
            if i in chosen:
                assert checks.close([leaf.grad], [everything[i]]), (chosen, i)
        # d_Wd of an h computed again needs neither dy Wd nor another pass over gate|up.
        alone = chosen == (2,) and save == "input"
        assert started == FORWARD[:1] * (save == "input") + BACKWARD[alone:]


def test_a_second_call_looks_nothing_up(monkeypatch):
    leaves, dy = small()
    wanted = swiglu_mlp(*leaves)
    monkeypatch.setattr(functional, "_check", None)
    again = swiglu_mlp(*leaves)
    assert checks.same([again, *grad(again, leaves, dy)], [wanted, *grad(wanted, leaves, dy)])
    with torch.no_grad():
        assert checks.same([swiglu_mlp(*leaves)], [wanted])
    for other in (
        [leaves[0][:36], *leaves[1:]],
        [leaves[0].bfloat16(), *leaves[1:]],
        [*leaves[:2], leaves[2].detach().mT.contiguous().mT],
    ):
        with pytest.raises(TypeError, match="NoneType"):
            swiglu_mlp(*other)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="NoneType"):
        swiglu_mlp(*leaves)


def test_a_tensor_left_over_from_torch_func():
    """Its wrapper is dead: it has no address of its own."""
    leaves, _ = small()
    wanted = swiglu_mlp(*leaves)
    left = []
    torch.func.grad(lambda t: (left.append(t * 1), t.sum())[1])(leaves[0].detach())
    assert checks.same([swiglu_mlp(left[0], *leaves[1:])], [wanted])
    with torch.no_grad():
        assert checks.same([swiglu_mlp(left[0], *leaves[1:])], [wanted])


def test_other_sizes_and_dtypes_have_no_plan():
    for shape, dtype in (
        ((65, 48, 80), "float16"),
        ((37, 40, 80), "float16"),
        ((37, 48, 72), "float16"),
        (SHAPE, "float32"),
    ):
        leaves, _ = small(shape, dtype)
        assert plans.plan_of(*leaves) is None
    leaves, _ = small()
    assert plans.plan_of(*leaves) is not None
    buffer = torch.empty(SHAPE[0] * SHAPE[1] + 1, dtype=torch.float16)
    moved = buffer[1:].view(SHAPE[:2])
    assert plans.plan_of(moved, *leaves[1:]) is None


def test_weights_changed_between_the_passes():
    leaves, dy = small()
    wanted = grad(swiglu_mlp(*leaves), leaves, dy)
    y = swiglu_mlp(*leaves)
    leaves[1].data = leaves[1].detach().mT.contiguous().mT  # torch does not notice
    assert checks.close(grad(y, leaves, dy), wanted)
    y = swiglu_mlp(*leaves)
    with torch.no_grad():
        leaves[2].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@pytest.mark.parametrize("retained", [False, True])
def test_gate_up_is_written_over_only_where_nobody_sees_it(monkeypatch, retained):
    asked = []
    original = few_tokens_plan.Plan.gradients

    def noted(self, wants, saved, dy, in_place):
        asked.append(in_place)
        return original(self, wants, saved, dy, in_place)

    monkeypatch.setattr(few_tokens_plan.Plan, "gradients", noted)
    leaves, dy = small()
    y = swiglu_mlp(*leaves)
    first = grad(y, leaves, dy, retain_graph=retained)
    assert asked == [not retained]
    if retained:
        assert checks.same(grad(y, leaves, dy), first)
    with pytest.raises(RuntimeError, match="second time"):
        grad(y, leaves, dy)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = swiglu_mlp(*leaves)
    before = [t.detach().clone() for t in kept]
    assert checks.same(grad(y, leaves, dy), first)
    assert asked[-1] is False and checks.same(kept, before) and len(kept) == 4


@pytest.mark.parametrize("fault", broken_kernels.BROKEN_FEW)
def test_a_broken_product_of_few_tokens_is_rejected(monkeypatch, tmp_path, fault):
    broken_kernels.forget(monkeypatch)
    assert checks.misses_mlp("cpu", "float16", SHAPE) == []
    started = broken_kernels.put_few(monkeypatch, tmp_path, fault, off=0.5)
    assert checks.misses_mlp("cpu", "float16", SHAPE) != []
    assert broken_kernels.names(started) == set(broken_kernels.FEW_NAMES)


@pytest.mark.parametrize("fault", broken_kernels.BROKEN)
def test_a_broken_fused_kernel_is_rejected(monkeypatch, tmp_path, fault):
    broken_kernels.forget(monkeypatch)
    assert checks.misses_mlp("cpu", "float16", SHAPE) == []
    started = broken_kernels.put(monkeypatch, tmp_path, fault, off=0.5)
    assert checks.misses_mlp("cpu", "float16", SHAPE) != []
    assert broken_kernels.names(started) == set(broken_kernels.NAMES)
    assert functional._PLANS
