"""The SwiGLU kernels in Triton's interpreter: `tests/test_swiglu_kernels.py` runs this file in a
process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import grad
from triton.runtime.errors import PTXASError

import broken_kernels
import plan_checks
import swiglu_checks as checks
from called import Called
from fusedlib.launch import launch
from fusedlib.ops.mlp import activation_kernels, plan_cache, route
from fusedlib.ops.mlp import configs as swiglu_configs
from fusedlib.ops.mlp import operator as mlp_operators
from fusedlib.ops.mlp import tiles as kernels
from fusedlib.ops.mlp.activation import ACTIVATIONS
from fusedlib.ops.mlp.function import gated_mlp, geglu_mlp, swiglu, swiglu_mlp
from fusedlib.ops.mlp.plan import Plan
from fusedlib.ops.mlp.route import runs_fused_kernels
from gradient_checks import check_what_forward_read, refuses_transforms_of_backward
from rewritten import rewritten

SHAPE = (70, 83, 101)  # tokens, hidden, inner: not square, ragged in 32-blocks, several each way
DTYPES = ("float32", "float16", "bfloat16")
SAVES = ("gate_up", "input")


@pytest.fixture(autouse=True)
def _kernels_run():
    for dtype in DTYPES:
        assert runs_fused_kernels(torch.zeros(1, dtype=getattr(torch, dtype)))


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_mlp_and_gradients_vs_float64(dtype, save, pair):
    shape = SHAPE if save == "gate_up" else checks.SHAPE
    assert checks.misses_mlp("cpu", dtype, shape, save, pair=pair) == []


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_and_gradients_vs_float64(dtype, save, pair):
    assert checks.misses_half("cpu", dtype, checks.SHAPE, save, pair) == []


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_geglu_mlp_and_gradients_vs_float64(monkeypatch, dtype, approximate, apart):
    plan_checks.put_apart(monkeypatch, apart, apart)
    shape = SHAPE if apart else checks.SHAPE
    for save, pair in (("gate_up", True), ("input", False)):
        assert checks.misses_geglu("cpu", dtype, shape, save, pair, approximate) == []
    paths = {plan.path for plan in plan_cache._PLANS.values()}
    assert paths == {"apart" if apart else "fused by tiles"}


def test_geglu_s_plan_is_another_than_swiglu_s_and_its_operator_is_compiled():
    (x, *weights), _ = checks.small("cpu")
    calls = swiglu_mlp, geglu_mlp, partial(geglu_mlp, approximate="none")
    found = [call(x, *weights) for call in calls * 2]
    assert checks.same(found[:3], found[3:])
    assert not any(torch.equal(found[i], found[i - 1]) for i in range(3))
    compiled = torch.compile(geglu_mlp, fullgraph=True)
    assert checks.misses_geglu("cpu", "float32", checks.SHAPE, compute=compiled) == []


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_large_gates_are_activated_as_pytorch_activates_them(name):
    gate = torch.tensor([-1e20, -3e4, -20.0, -8.0, 8.0, 20.0, 3e4, 1e20])
    x = torch.stack([gate, torch.ones(8)], dim=1).requires_grad_()
    of_gate, of_up = torch.eye(2).split(1)
    y = gated_mlp(name, "gate_up", x, (of_gate, of_up), torch.ones(2, 1))[:, 0]
    wide = gate.double().requires_grad_()
    true = ACTIVATIONS[name].compute(wide)
    assert torch.allclose(y.double(), true, rtol=1e-5, atol=1e-10)
    [d_x], [d_gate] = grad(y.sum(), x), grad(true.sum(), wide)
    assert torch.allclose(d_x[:, 0].double(), d_gate, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("right, wrong", [
    ("0.07135481627260025", "0.0713"), ("0.21406", "0.0713"), ("1.0 + tl.erf", "1.001 + tl.erf"),
    ("gate * (0.398", "gate * (0.41"),
    ("activated * (1 - s) * inner", "(1 - s) * inner"),
])  # fmt: skip
def test_a_broken_activation_is_rejected(monkeypatch, tmp_path, right, wrong):
    broken = rewritten(monkeypatch, tmp_path, activation_kernels, right, wrong)
    for name in ("activate", "slope"):
        monkeypatch.setattr(kernels, name, getattr(broken, name))
    approximate = "none" if right in ("gate * (0.398", "1.0 + tl.erf") else "tanh"
    assert checks.misses_geglu("cpu", "float32", checks.SHAPE, approximate=approximate) != []


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("save", SAVES)
def test_products_apart_from_their_epilogues_vs_float64(monkeypatch, save, pair):
    plan_checks.put_apart(monkeypatch)
    for misses in (checks.misses_mlp, checks.misses_half):
        assert misses("cpu", "float16", SHAPE, save, pair=pair) == []
    assert {plan.path for plan in plan_cache._PLANS.values()} == {"apart"}


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_stay_within_the_bound_of_the_docstring(monkeypatch, dtype, apart, pair):
    plan_checks.put_apart(monkeypatch, apart, apart)
    assert checks.beyond_bound("cpu", dtype, pair=pair) == []


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 31, 130), (130, 65, 3), (5, 200, 32)])
def test_swiglu_mlp_at_other_shapes_vs_float64(shape):
    for pair in checks.PAIRS:
        assert checks.misses_mlp("cpu", "float32", shape, pair=pair) == []


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_persistent_programs_vs_float64(monkeypatch, dtype, descriptors, pair):
    config = replace(swiglu_configs.INTERPRETER, persistent=True, descriptors=descriptors)
    monkeypatch.setattr(swiglu_configs, "INTERPRETER", config)
    monkeypatch.setattr(plan_cache, "_PLANS", {})
    made = []
    original = launch.Launch.operands
    monkeypatch.setattr(
        launch.Launch, "operands", lambda *a: made.append(original(*a)[:2]) or original(*a)
    )
    # TMA wants rows of whole 16 bytes.
    assert checks.misses_mlp("cpu", dtype, (40, 72, 80), pair=pair) == []
    assert len(made) == 2
    assert all((not torch.is_tensor(factor)) == descriptors for pair in made for factor in pair)


@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_where_hopper_s_kernel_does_not_compile_another_runs_and_a_warning_says_so(
    monkeypatch, failing
):
    def fails(*_):
        raise PTXASError("no such instruction")

    both = {"forward": kernels.fwd_launch, "backward": lambda *_: fails} | {
        failing: lambda *_: fails
    }
    roles = SimpleNamespace(**{f"{name}_launch": made for name, made in both.items()})
    monkeypatch.setattr(kernels, "hopper", roles)
    monkeypatch.setattr(route, "_runs_warp_specialized", lambda _: kernels.hopper is not None)
    plan_checks.put_apart(monkeypatch, False, False)
    with pytest.warns(RuntimeWarning, match="slower kernel runs.*no such instruction") as warned:
        for tokens, pair in product((70, 66), checks.PAIRS):
            assert checks.misses_mlp("cpu", "float16", (tokens, 48, 80), pair=pair) == []
    assert len(warned) == 1 and kernels.hopper is None
    assert {plan.path for plan in plan_cache._PLANS.values()} == {"fused by tiles"}


@pytest.mark.parametrize("check", checks.ALL, ids=lambda f: f.__name__[6:])
def test_holds(check):
    check("cpu")


def test_compiled_in_one_graph():
    checks.check_compiled("cpu")


# --- what it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    "pair, wanted", [*((False, n) for n in range(8)), *((True, n) for n in range(16))]
)
def test_frozen_operands_cost_nothing(pair, wanted, save):
    leaves, dy = checks.small("cpu", pair=pair)
    wants = [bool(wanted >> i & 1) for i in range(len(leaves))]
    leaves = [t.detach().requires_grad_(want) for t, want in zip(leaves, wants, strict=True)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = checks.mlp(*leaves, save=save)
    of_x, *of_gate_up, of_down = wants
    gradient, any_wanted = of_x or any(of_gate_up), any(wants)
    x, *w_gate_up, w_down = leaves
    again = save == "input" and any_wanted
    expected = [x] * (any(of_gate_up) or again) + w_gate_up * (of_x or again) + [w_down] * gradient
    # Their very memory, which FSDP frees until the backward.
    *kept, last = kept or [None]
    stored = any_wanted and not again
    kept += [last] * (any_wanted and again)
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in expected]
    if not any_wanted:
        return
    assert not stored or last.shape == (checks.TOKENS, 2 * checks.INNER)
    products = of_x * len(w_gate_up) + any(of_gate_up) + of_down
    with Called() as called:
        y.backward(dy)
    assert called.names.count("mm") + called.names.count("addmm_") == products
    with Called() as called:  # in whose sight the registered operators run
        watched = checks.mlp(*leaves, save=save)
        assert called.names.count("swiglu_mlp_forward") == 1
        watched.backward(dy)
    assert called.names.count("swiglu_mlp_backward") == 1


def test_a_half_frozen_swiglu_keeps_only_what_it_needs():
    (x, w_gate_up, _), _ = checks.small("cpu")
    h = swiglu(x.detach(), w_gate_up)
    with Called() as called:
        h.sum().backward()
    assert called.names.count("mm") == 1


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_direct_and_registered_calls_give_the_same(dtype, save):
    # Which gradients are wanted goes the same way in every dtype.
    packed, paired = (range(1, 8), range(1, 16)) if dtype == "float32" else ((7,), (15,))
    for wanted, pair in (*product(packed, [False]), *product(paired, [True])):
        leaves, dy = checks.small("cpu", dtype, pair=pair)
        leaves = [
            t.detach().requires_grad_(bool(wanted >> i & 1)) for i, t in enumerate(leaves)
        ]  # fmt: skip
        own = [t for t in leaves if t.requires_grad]
        y = checks.mlp(*leaves, save=save)
        assert type(y.grad_fn).__name__ == "SwiGLUFunctionBackward"
        direct = [y, *grad(y, own, dy)]
        with Called():  # calls go by the registered operators
            y = checks.mlp(*leaves, save=save)
            assert type(y.grad_fn).__name__ != "SwiGLUFunctionBackward"
            registered = [y, *grad(y, own, dy)]
        assert checks.same(direct, registered), (wanted, pair)


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("pair", checks.PAIRS)
def test_gate_up_is_written_over_only_where_nobody_sees_it(monkeypatch, pair, retained, hooked):
    asked = []
    original = Plan.differentiate
    monkeypatch.setattr(
        Plan, "differentiate",
        lambda *a, **k: asked.append((k["in_place"], a[3])) or original(*a, **k),
    )  # fmt: skip
    leaves, dy = checks.small("cpu", pair=pair)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks if hooked else nullcontext():
        y = checks.mlp(*leaves)
    before = [t.detach().clone() for t in kept]
    first = grad(y, leaves, dy, retain_graph=retained)
    [(in_place, gate_up)] = asked
    assert in_place == (not retained and not hooked)
    assert checks.same(kept, before) and len(kept) == (len(leaves) + 1) * hooked
    if not retained:
        with pytest.raises(RuntimeError, match="second time"):
            grad(y, leaves, dy)
        return
    assert checks.same(grad(y, leaves, dy), first)
    assert asked[1][0] is not hooked and asked[1][1] is gate_up


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("pair", checks.PAIRS)
def test_gradients_are_of_what_forward_read(pair, save, dtype):
    leaves, dy = checks.small_by_name("cpu", pair, dtype=dtype)
    check_what_forward_read(partial(checks.mlp_by_name, save=save), leaves, dy)


@pytest.mark.parametrize("pair", checks.PAIRS)
def test_in_place_also_when_one_gradient_alone_is_wanted(pair):
    leaves, dy = checks.small("cpu", pair=pair)
    wanted = grad(checks.mlp(*leaves), leaves, dy)
    for i in range(len(leaves)):
        y = checks.mlp(*(t.detach().requires_grad_(i == j) for j, t in enumerate(leaves)))
        y.backward(dy)
        with pytest.raises(RuntimeError, match="second time"):
            y.backward(dy)
        y = checks.mlp(*leaves)
        # One product of both gives what one of each gives, up to the order of its sums.
        assert checks.close(grad(y, leaves[i], dy), [wanted[i]])


@pytest.mark.parametrize("pair", checks.PAIRS)
def test_a_second_derivative_raises(pair):
    leaves, dy = checks.small("cpu", pair=pair)
    first = grad(checks.mlp(*leaves), leaves, dy, create_graph=True)
    for gradient in first:
        with pytest.raises(RuntimeError, match="no second derivative"):
            (gradient.sum() + leaves[0].sum()).backward(retain_graph=True)
    with Called():  # calls go by the registered operators
        y = checks.mlp(*leaves)
        first = grad(y, leaves, dy, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            first[0].sum().backward()


def test_transforms_that_begin_at_backward_are_refused():
    leaves, _ = checks.small("cpu")
    refuses_transforms_of_backward(swiglu_mlp(*leaves), leaves[0])


# --- torch.library -------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [True, False])
def test_opcheck(save):
    (x, w_gate_up, w_down), dy = checks.small("cpu", shape=(33, 20, 36))
    w_gate, w_up = (t.detach().clone().requires_grad_() for t in w_gate_up.chunk(2))
    for weights in ((w_gate_up, None), (w_gate, w_up), (w_gate, w_up.detach())):
        for down in (w_down, None):
            torch.library.opcheck(mlp_operators.swiglu_mlp, (x, *weights, down, "gelu", save))
    saved = [t.detach() for t in (x, w_gate, w_up, w_down)]
    gate_up = torch.randn(33, 72) if save else None
    for wanted in (1, 2, 4, 8, 6, 15):  # one of the four, both of gate and up, all
        wants = [bool(wanted >> i & 1) for i in range(4)]
        arguments = wants, (20, 36), True, "gelu"
        torch.library.opcheck(mlp_operators.swiglu_mlp_backward, (dy, *saved, gate_up, *arguments))
    packed = x.detach(), w_gate_up.detach(), None, None, gate_up
    arguments = (True, True, False, False), (20, 36), False, "silu"
    torch.library.opcheck(
        mlp_operators.swiglu_mlp_backward, (torch.randn(33, 36), *packed, *arguments)
    )


def test_fake_tensors_have_the_shapes_of_real_ones():
    leaves, _ = checks.small("cpu", "float16")
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in leaves]
        y, gate_up = mlp_operators.swiglu_mlp(*fake[:2], None, fake[2], "silu", True)
    assert y.shape == (checks.TOKENS, checks.HIDDEN)
    assert gate_up.shape == (checks.TOKENS, 2 * checks.INNER)
    assert y.dtype == gate_up.dtype == torch.float16


# --- teeth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", broken_kernels.BROKEN)
def test_a_broken_kernel_is_rejected(monkeypatch, tmp_path, fault):
    started = broken_kernels.put(monkeypatch, tmp_path, fault, off=1e-3)
    for pair in checks.PAIRS:
        assert checks.misses_mlp("cpu", "float32", checks.SHAPE, pair=pair) != []
        assert checks.beyond_bound("cpu", "float32", pair=pair) != []
    assert broken_kernels.names(started) == set(broken_kernels.NAMES)
