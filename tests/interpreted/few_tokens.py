"""The SwiGLU MLP at few tokens in Triton's interpreter: `tests/test_few_tokens.py` runs this file
in a process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import pytest
import torch
from torch.autograd import grad

import broken_kernels
import plan_checks
import swiglu_checks as checks
from fusedlib.ops.mlp import plan_cache
from fusedlib.ops.mlp.function import path_of, swiglu_mlp

SHAPE = (37, 48, 80)  # two of the interpreter's 32-tiles each way, the last ones ragged
SAVES = ("gate_up", "input")


@pytest.fixture(autouse=True)
def started(monkeypatch):
    return plan_checks.note_launches(monkeypatch)


def small(shape=SHAPE, dtype="float16", pair=False):
    return checks.small("cpu", dtype, shape, pair)


FORWARD = ["_swiglu_fwd_kernel", "_few_down_kernel"]
BACKWARD = ["_swiglu_bwd_kernel", "_few_gradients_kernel"]


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [SHAPE, (64, 16, 144), (1, 160, 16)])
def test_swiglu_mlp_and_gradients_vs_float64(started, shape, dtype, save, pair):
    assert checks.misses_mlp("cpu", dtype, shape, save, pair=pair) == []
    again = ["_swiglu_fwd_kernel"] if save == "input" else []
    assert started == [*FORWARD, *again, *BACKWARD]


@pytest.mark.parametrize("save", SAVES)
def test_without_a_down_projection_no_product_is_for_few_tokens(started, save):
    assert checks.misses_half("cpu", "float16", SHAPE, save) == []
    assert set(started) == {FORWARD[0], BACKWARD[0]}
    assert {plan.path for plan in plan_cache._PLANS.values()} == {"fused by tiles"}


@pytest.mark.parametrize("check", plan_checks.HOLDS, ids=plan_checks.name_of)
def test_holds(monkeypatch, started, check):
    plan_checks.run_at(monkeypatch, check, "cpu", "float16", SHAPE)
    assert "_few_down_kernel" in started


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("save", SAVES)
def test_frozen_subsets_get_what_they_want_and_cost_nothing_else(started, save, pair):
    plan_checks.check_frozen_subsets(started, *small(pair=pair), save, FORWARD[:1], BACKWARD)


@pytest.mark.parametrize("pair", checks.PAIRS)
def test_a_second_call_looks_nothing_up(monkeypatch, pair):
    plan_checks.check_second_call(monkeypatch, *small(pair=pair))


@pytest.mark.parametrize("of", ["gate", "up"])
def test_neither_half_of_d_x_sees_the_other_one_s_weight(of):
    """Where inner ends within a block: zeros there by an inf would be nan, and are not seen."""
    leaves, dy = small(pair=True)
    x, w_gate, w_up, _ = (t.detach() for t in leaves)
    (w_gate if of == "gate" else w_up)[[0, -1], [0, 1]] = float("inf")
    d_gate_up = torch.randn(SHAPE[0], 2 * SHAPE[2]).half()
    packed, wants = torch.cat([w_gate, w_up]), (True, False, False, False)
    true = d_gate_up.float() @ packed.float()
    for weights in ((w_gate, w_up), (packed, None)):
        products, pair = (
            plan_cache.plan_for(dy, *weights, leaves[3]).products,
            weights[1] is not None,
        )
        d_x = products.gradients(wants, pair, [None, d_gate_up], dy, x, *weights)[0]
        assert torch.equal(d_x.isposinf(), true.isposinf())
        assert torch.equal(d_x.isneginf(), true.isneginf()) and not d_x.isnan().any()


def test_a_tensor_left_over_from_torch_func():
    """Its wrapper is dead: it has no address of its own."""
    leaves, _ = small()
    wanted = swiglu_mlp(*leaves)
    left = []
    torch.func.grad(lambda t: (left.append(t * 1), t.sum())[1])(leaves[0].detach())
    assert checks.same([swiglu_mlp(left[0], *leaves[1:])], [wanted])
    with torch.no_grad():
        assert checks.same([swiglu_mlp(left[0], *leaves[1:])], [wanted])


def test_other_sizes_and_dtypes_go_another_way():
    for shape, dtype in (
        ((37, 40, 80), "float16"),
        ((37, 48, 72), "float16"),
        (SHAPE, "float32"),
    ):
        leaves, _ = small(shape, dtype)
        assert path_of(*leaves) == "fused by tiles"
    leaves, _ = small()
    assert path_of(*leaves) == "few tokens"


def test_operands_that_lie_otherwise_are_copied(started):
    """Not contiguous, or beginning between 16 bytes; the plan is the same."""
    leaves, dy = small()
    wanted = [swiglu_mlp(*leaves), *grad(swiglu_mlp(*leaves), leaves, dy)]
    apart = torch.empty(SHAPE[0] * SHAPE[1] + 1, dtype=torch.float16)[1:].view(SHAPE[:2])
    moved = apart.copy_(leaves[0].detach()).requires_grad_()
    turned = [t.detach().mT.contiguous().mT.requires_grad_() for t in leaves]
    for own in ([moved, *leaves[1:]], turned):
        y = swiglu_mlp(*own)
        assert checks.same([y, *grad(y, own, dy.mT.contiguous().mT)], wanted)
    assert set(started) == {*FORWARD, *BACKWARD} and len(plan_cache._PLANS) == 1


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
def test_gate_up_is_written_over_only_where_nobody_sees_it(retained):
    for pair in checks.PAIRS:
        plan_checks.check_gate_up_written_over(*small(pair=pair), retained)


@pytest.mark.parametrize("fault", broken_kernels.BROKEN_FEW)
def test_a_broken_product_of_few_tokens_is_rejected(monkeypatch, tmp_path, fault):
    broken_kernels.forget(monkeypatch)
    assert all(checks.misses_mlp("cpu", "float16", SHAPE, pair=p) == [] for p in checks.PAIRS)
    started = broken_kernels.put_few(monkeypatch, tmp_path, fault, off=0.5)
    assert all(checks.misses_mlp("cpu", "float16", SHAPE, pair=p) for p in checks.PAIRS)
    assert broken_kernels.names(started) == set(broken_kernels.FEW_NAMES)
