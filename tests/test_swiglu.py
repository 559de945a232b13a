"""`swiglu_mlp`, `swiglu`, `geglu_mlp`: in plain PyTorch, in Triton's interpreter and on a GPU."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import grad
from triton.runtime.errors import PTXASError

import broken_calls
import broken_kernels
import fusedlib
import gradient_checks
import measure.swiglu  # noqa: F401  (registers the rivals)
import plan_checks
import swiglu_checks as checks
from called import Called
from fusedlib import SwiGLUMLP, reference
from fusedlib.bench import check, rivals
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.operation import exact_results
from fusedlib.launch import device as devices
from fusedlib.launch import launch
from fusedlib.ops.linear import route as linear_route
from fusedlib.ops.linear.route import fp32_precision
from fusedlib.ops.mlp import activation_kernels, plan_cache, route
from fusedlib.ops.mlp import configs as swiglu_configs
from fusedlib.ops.mlp import function as functional
from fusedlib.ops.mlp import operator as mlp_operators
from fusedlib.ops.mlp import tiles as kernels
from fusedlib.ops.mlp.activation import ACTIVATIONS
from fusedlib.ops.mlp.function import SAVES, gated_mlp, geglu_mlp, swiglu, swiglu_mlp
from fusedlib.ops.mlp.route import runs_fused_kernels
from gradient_checks import check_what_forward_read, refuses_transforms_of_backward
from interpreter import BACKEND, INTERPRETED, passed_in_the_interpreter
from measure.mlp_problem import SwiGLUProblem, draw
from measure.recording import paths
from rewritten import rewritten

DTYPES = ("float32", "float16", "bfloat16")
SHAPE = (70, 83, 101)  # tokens, hidden, inner: not square, ragged in 32-blocks, several each way
# On a GPU aligned and not, few tokens and many, in several tiles each way, tokens always ragged.
SHAPES = {
    "aligned": (517, 384, 1072),
    "wide": (300, 1040, 2720),
    "unaligned hidden": (517, 379, 1072),
    "unaligned": (261, 517, 1003),
    "few tokens": (37, 512, 1056),
    "few tokens, unaligned": (37, 501, 1003),
    "one token": (1, 256, 512),
    "one of each": (1, 1, 1),
    "narrow": (1030, 16, 16),
}
PAIRS = pytest.mark.parametrize("pair", checks.PAIRS, ids=["packed", "pair"])
# Every dtype with either way of saving, and each of these with packed weights and a pair.
CALLS = pytest.mark.parametrize(
    ("dtype", "save", "pair"),
    [("float32", "gate_up", False), ("float32", "input", True), ("float16", "gate_up", True),
     ("float16", "input", False), ("bfloat16", "gate_up", False), ("bfloat16", "input", True)],
)  # fmt: skip


@pytest.mark.parametrize("part", ["0/2", "1/2"])
def test_in_the_interpreter(part):
    assert passed_in_the_interpreter("test_swiglu.py", part) > 50


# --- against float64 -----------------------------------------------------------------------------


@pytest.mark.plain
@CALLS
def test_swiglu_mlp_and_gradients_vs_float64(device, dtype, save, pair):
    small = SHAPE if save == "gate_up" else checks.SHAPE
    for shape in SHAPES.values() if device == "cuda" else (small,):
        assert checks.misses_mlp(device, dtype, shape, save, pair=pair) == []
    assert runs_fused_kernels(torch.zeros(1, dtype=getattr(torch, dtype))) == INTERPRETED


@pytest.mark.plain
@CALLS
def test_swiglu_and_gradients_vs_float64(device, dtype, save, pair):
    """On a GPU not fp32: it is torch's own product there, which over packed weights errs by other
    cuBLAS choices than over two (worst element 1.6e-5 against 0.65e-5 at 517·384·1072, H200).
    """
    if device == "cuda" and dtype == "float32":
        pytest.skip("torch's own product")
    for shape in SHAPES.values() if device == "cuda" else (checks.SHAPE,):
        assert checks.misses_half(device, dtype, shape, save, pair) == []


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("dtype", "approximate", "apart"),
    [("float32", "tanh", False), ("float16", "none", True), ("bfloat16", "tanh", True),
     ("bfloat16", "none", False)],
)  # fmt: skip
def test_geglu_mlp_and_gradients_vs_float64(device, monkeypatch, dtype, approximate, apart):
    plan_checks.put_apart(monkeypatch, apart, apart)
    shape = SHAPE if apart else checks.SHAPE
    for save, pair in (("gate_up", True), ("input", False)):
        assert checks.misses_geglu(device, dtype, shape, save, pair, approximate) == []
    paths = {plan.path for plan in plan_cache._PLANS.values()}
    assert paths == {"apart" if apart else "fused by tiles"}


@pytest.mark.gpu
@pytest.mark.parametrize(("save", "approximate"), [("gate_up", "tanh"), ("input", "none")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_geglu_mlp_on_a_gpu_vs_float64(monkeypatch, shape, dtype, save, approximate):
    pair = save == "gate_up"
    assert checks.misses_geglu("cuda", dtype, SHAPES[shape], save, pair, approximate) == []
    plan_checks.only_tiles(monkeypatch)
    assert checks.misses_geglu("cuda", dtype, SHAPES[shape], save, pair, approximate) == []


@pytest.mark.interpreter
def test_geglu_s_plan_is_another_than_swiglu_s_and_its_operator_is_compiled(device):
    (x, *weights), _ = checks.small(device)
    calls = swiglu_mlp, geglu_mlp, partial(geglu_mlp, approximate="none")
    actual = [call(x, *weights) for call in calls * 2]
    assert checks.same(actual[:3], actual[3:])
    assert not any(torch.equal(actual[i], actual[i - 1]) for i in range(3))
    compiled = torch.compile(geglu_mlp, fullgraph=True, backend=BACKEND)
    assert checks.misses_geglu(device, "float32", checks.SHAPE, compute=compiled) == []


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_large_gates_are_activated_as_pytorch_activates_them(device, name):
    gate = torch.tensor([-1e20, -3e4, -20.0, -8.0, 8.0, 20.0, 3e4, 1e20])
    x = torch.stack([gate, torch.ones(8)], dim=1).requires_grad_()
    of_gate, of_up = torch.eye(2).split(1)
    y = gated_mlp(name, "gate_up", x, (of_gate, of_up), torch.ones(2, 1))[:, 0]
    wide = gate.double().requires_grad_()
    true = ACTIVATIONS[name].compute(wide)
    assert torch.allclose(y.double(), true, rtol=1e-5, atol=1e-10)
    [d_x], [d_gate] = grad(y.sum(), x), grad(true.sum(), wide)
    assert torch.allclose(d_x[:, 0].double(), d_gate, rtol=1e-5, atol=1e-9)


@pytest.mark.interpreter
@pytest.mark.parametrize("right, wrong", [
    ("0.07135481627260025", "0.0713"), ("0.21406", "0.0713"), ("1.0 + tl.erf", "1.001 + tl.erf"),
    ("gate * (0.398", "gate * (0.41"),
    ("activated * (1 - s) * inner", "(1 - s) * inner"),
])  # fmt: skip
def test_a_broken_activation_is_rejected(device, monkeypatch, tmp_path, right, wrong):
    broken = rewritten(monkeypatch, tmp_path, activation_kernels, right, wrong)
    for name in ("activate", "slope"):
        monkeypatch.setattr(kernels, name, getattr(broken, name))
    approximate = "none" if right in ("gate * (0.398", "1.0 + tl.erf") else "tanh"
    assert checks.misses_geglu(device, "float32", checks.SHAPE, approximate=approximate) != []


@pytest.mark.interpreter
@pytest.mark.parametrize(("save", "pair"), [("gate_up", True), ("input", False)])
def test_products_apart_from_their_epilogues_vs_float64(device, monkeypatch, save, pair):
    plan_checks.put_apart(monkeypatch)
    for misses in (checks.misses_mlp, checks.misses_half):
        assert misses(device, "float16", SHAPE, save, pair=pair) == []
    assert {plan.path for plan in plan_cache._PLANS.values()} == {"apart"}


@pytest.mark.interpreter
@pytest.mark.parametrize(("apart", "pair"), [(False, True), (True, False)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_stay_within_the_bound_of_the_docstring(device, monkeypatch, dtype, apart, pair):
    plan_checks.put_apart(monkeypatch, apart, apart)
    assert checks.beyond_bound(device, dtype, pair=pair) == []


@pytest.mark.gpu
@PAIRS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES.values(), (1024, 2048, 5632)])
def test_errors_stay_within_the_bound_on_a_gpu(shape, dtype, pair):
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{name}_reduced_precision_reduction" for name in ("bf16", "fp16")]
    usual = {name: getattr(matmul, name) for name in names}
    try:
        for name in names:
            setattr(matmul, name, False)
        assert checks.beyond_bound("cuda", dtype, shape, pair) == []
    finally:
        for name, value in usual.items():
            setattr(matmul, name, value)


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 31, 130), (130, 65, 3), (5, 200, 32)])
def test_swiglu_mlp_at_other_shapes_vs_float64(device, shape):
    for pair in checks.PAIRS:
        assert checks.misses_mlp(device, "float32", shape, pair=pair) == []


@pytest.mark.interpreter
@PAIRS
@pytest.mark.parametrize(
    ("dtype", "descriptors"), [("float32", False), ("float16", True), ("bfloat16", True)]
)
def test_persistent_programs_vs_float64(device, monkeypatch, dtype, descriptors, pair):
    config = replace(swiglu_configs.INTERPRETER, persistent=True, descriptors=descriptors)
    monkeypatch.setattr(swiglu_configs, "INTERPRETER", config)
    monkeypatch.setattr(plan_cache, "_PLANS", {})
    made = []
    original = launch.Launch.operands
    monkeypatch.setattr(
        launch.Launch, "operands", lambda *a: made.append(original(*a)[:2]) or original(*a)
    )
    # TMA wants rows of whole 16 bytes.
    assert checks.misses_mlp(device, dtype, (40, 72, 80), pair=pair) == []
    assert len(made) == 2
    assert all((not torch.is_tensor(factor)) == descriptors for pair in made for factor in pair)


@pytest.mark.interpreter
@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_where_hopper_s_kernel_does_not_compile_another_runs_and_a_warning_says_so(
    device, monkeypatch, failing
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
            assert checks.misses_mlp(device, "float16", (tokens, 48, 80), pair=pair) == []
    assert len(warned) == 1 and kernels.hopper is None
    assert {plan.path for plan in plan_cache._PLANS.values()} == {"fused by tiles"}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [name for name, (tokens, *_) in SHAPES.items() if tokens > 64])
@CALLS
def test_fused_where_hopper_s_products_are_cublas_s_vs_float64(
    monkeypatch, shape, dtype, save, pair
):
    """The kernels that other cards run at these sizes, in half precision."""
    if dtype == "float32":
        pytest.skip("split or torch's own products")
    plan_checks.only_tiles(monkeypatch)
    assert checks.misses_mlp("cuda", dtype, SHAPES[shape], save, pair=pair) == []


@pytest.fixture
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@PAIRS
@pytest.mark.parametrize("shape", ["aligned", "wide", "few tokens"])
def test_swiglu_mlp_in_tf32_vs_float64(tf32, shape, pair):
    assert checks.misses_mlp("cuda", "float32", SHAPES[shape], pair=pair) == []


@pytest.mark.gpu
@PAIRS
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("shape", [(1024, 2048, 5632), (1003, 2052, 4100)], ids=str)
def test_large_swiglu_mlp_in_tf32_vs_float64(tf32, shape, save, pair):
    """Torch's products and our kernel between them; the last is ragged."""
    assert checks.misses_mlp("cuda", "float32", shape, save, pair=pair) == []
    leaves, _ = checks.small("cuda", "float32", shape, pair)
    assert "SwiGLUFunction" in type(checks.mlp(*leaves).grad_fn).__name__


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_mlp_in_tf32_errs_by_tf32_s_roundoff(tf32, shape):
    """At unaligned shapes cuBLAS may leave TF32, so that it is no measure there: four roundoffs."""
    inputs = draw(SwiGLUProblem(*SHAPES[shape], "float32"), "cuda")
    work = rivals.get("swiglu", "fused").build(inputs)
    errors = check.errors(
        check.results_of(work, inputs.dy), exact_results(inputs, reference.swiglu_mlp)
    )
    assert all(error.norm < 4 * 2**-10 for error in errors.values()), errors


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 4096, 4096), (512, 2048, 8192)], ids=str)
def test_fp32_that_is_not_split_errs_as_plain_pytorch(shape):
    inputs = draw(SwiGLUProblem(*shape, "float32"), "cuda")
    true = exact_results(inputs, reference.swiglu_mlp)
    works = [rivals.get("swiglu", name).build(inputs) for name in ("fused", "eager")]
    ours, eager = (
        check.errors(check.results_of(work, inputs.dy), true)["y"] for work in works
    )  # fmt: skip
    assert ours.norm <= 1.02 * eager.norm


@pytest.mark.gpu
@PAIRS
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_mlp_at_a_model_s_shape_vs_float64(dtype, pair):
    assert checks.misses_mlp("cuda", dtype, (1024, 2048, 5632), pair=pair) == []


# --- what holds everywhere -----------------------------------------------------------------------


@pytest.mark.plain
@pytest.mark.parametrize("holds", checks.ALL, ids=lambda f: f.__name__[6:])
def test_holds(device, holds):
    holds(device)


@pytest.mark.plain
def test_compiled_in_one_graph(device):
    """On the CPU without Inductor, whose C++ takes a minute."""
    on_gpu = device == "cuda"
    for dtype in DTYPES if on_gpu else DTYPES[:1]:
        checks.check_compiled(device, dtype, "inductor" if on_gpu else "aot_eager")


def test_float64_and_second_derivatives_where_pytorch_runs():
    for shapes in (((3, 4), (10, 4), (4, 5)), ((3, 4), (5, 4), (5, 4), (4, 5))):
        leaves = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
        assert torch.autograd.gradcheck(checks.mlp, leaves)
        assert torch.autograd.gradgradcheck(checks.mlp, leaves)


@PAIRS
def test_input_mode_keeps_the_operands_alone(pair):
    leaves, _ = checks.small("cpu", pair=pair)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        checks.mlp(*leaves, save="input")
    assert sum(t.numel() for t in kept) <= sum(t.numel() for t in leaves)


@PAIRS
def test_meta_and_fake_tensors_have_shapes(pair):
    leaves, _ = checks.small("cpu", "bfloat16", pair=pair)
    meta = [t.detach().to("meta") for t in leaves]
    assert checks.mlp(*meta).shape == meta[0].shape
    with torch.autocast("cpu"):
        assert checks.half(*meta[:-1]).shape == (checks.TOKENS, checks.INNER)
    with torch._subclasses.FakeTensorMode():
        fake = [torch.empty(t.shape, dtype=t.dtype) for t in leaves]
        y = checks.mlp(*fake)
    assert (y.shape, y.dtype) == (meta[0].shape, torch.bfloat16)


# --- what it costs, in launches and memory -------------------------------------------------------


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("save", "pair", "wanted"),
    [*((save, False, n) for save in SAVES for n in range(8)),
     *(("input" if n % 2 else "gate_up", True, n) for n in range(16))],
)  # fmt: skip
def test_frozen_operands_cost_nothing(device, pair, wanted, save):
    leaves, dy = checks.small(device, pair=pair)
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


@pytest.mark.interpreter
def test_a_half_frozen_swiglu_keeps_only_what_it_needs(device):
    (x, w_gate_up, _), _ = checks.small(device)
    h = swiglu(x.detach(), w_gate_up)
    with Called() as called:
        h.sum().backward()
    assert called.names.count("mm") == 1


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("dtype", "save"),
    [("float32", "gate_up"), ("float32", "input"), ("float16", "input"), ("bfloat16", "gate_up")],
)
def test_direct_and_registered_calls_give_the_same(device, dtype, save):
    # Which gradients are wanted goes the same way in every dtype.
    packed, paired = (range(1, 8), range(1, 16, 2)) if dtype == "float32" else ((7,), (15,))
    for wanted, pair in (*product(packed, [False]), *product(paired, [True])):
        leaves, dy = checks.small(device, dtype, pair=pair)
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


@pytest.mark.interpreter
@pytest.mark.parametrize("retained", [False, True])
@PAIRS
def test_gate_up_is_written_over_only_where_nobody_sees_it(device, pair, retained):
    plan_checks.check_gate_up_written_over(*checks.small(device, pair=pair), retained)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("pair", "save", "dtype"), [(False, "gate_up", "float16"), (True, "input", "float32")]
)
def test_gradients_are_of_what_forward_read(device, pair, save, dtype):
    leaves, dy = checks.small_by_name(device, pair, dtype=dtype)
    check_what_forward_read(partial(checks.mlp_by_name, save=save), leaves, dy)


@pytest.mark.interpreter
@PAIRS
def test_in_place_also_when_one_gradient_alone_is_wanted(device, pair):
    leaves, dy = checks.small(device, pair=pair)
    wanted = grad(checks.mlp(*leaves), leaves, dy)
    for i in range(len(leaves)):
        y = checks.mlp(*(t.detach().requires_grad_(i == j) for j, t in enumerate(leaves)))
        y.backward(dy)
        with pytest.raises(RuntimeError, match="second time"):
            y.backward(dy)
        y = checks.mlp(*leaves)
        # One product of both gives what one of each gives, up to the order of its sums.
        assert checks.close(grad(y, leaves[i], dy), [wanted[i]])


@pytest.mark.interpreter
@PAIRS
def test_a_second_derivative_raises(device, pair):
    leaves, dy = checks.small(device, pair=pair)
    first = grad(checks.mlp(*leaves), leaves, dy, create_graph=True)
    for gradient in first:
        with pytest.raises(RuntimeError, match="no second derivative"):
            (gradient.sum() + leaves[0].sum()).backward(retain_graph=True)
    with Called():  # calls go by the registered operators
        y = checks.mlp(*leaves)
        first = grad(y, leaves, dy, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            first[0].sum().backward()


@pytest.mark.interpreter
def test_transforms_that_begin_at_backward_are_refused(device):
    leaves, _ = checks.small(device)
    refuses_transforms_of_backward(swiglu_mlp(*leaves), leaves[0])


@pytest.mark.interpreter
def test_opcheck(device):
    (x, w_gate_up, w_down), dy = checks.small(device, shape=(33, 20, 36))
    w_gate, w_up = (t.detach().clone().requires_grad_() for t in w_gate_up.chunk(2))
    for save, *weights in (
        (True, w_gate_up, None, w_down),
        (False, w_gate, w_up, w_down),
        (True, w_gate, w_up.detach(), None),
    ):
        torch.library.opcheck(mlp_operators.swiglu_mlp, (x, *weights, "gelu", save))
    saved, kept = [t.detach() for t in (x, w_gate, w_up, w_down)], torch.randn(33, 72)
    for gate_up, wanted in ((kept, 1), (None, 8), (kept, 6), (None, 15)):
        wants = [bool(wanted >> i & 1) for i in range(4)]  # one, both of gate and up, all
        arguments = wants, (20, 36), True, "gelu"
        torch.library.opcheck(mlp_operators.swiglu_mlp_backward, (dy, *saved, gate_up, *arguments))
    packed = x.detach(), w_gate_up.detach(), None, None, kept
    arguments = (True, True, False, False), (20, 36), False, "silu"
    torch.library.opcheck(
        mlp_operators.swiglu_mlp_backward, (torch.randn(33, 36), *packed, *arguments)
    )


@pytest.mark.interpreter
def test_fake_tensors_have_the_shapes_of_real_ones(device):
    leaves, _ = checks.small(device, "float16")
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in leaves]
        y, gate_up = mlp_operators.swiglu_mlp(*fake[:2], None, fake[2], "silu", True)
    assert y.shape == (checks.TOKENS, checks.HIDDEN)
    assert gate_up.shape == (checks.TOKENS, 2 * checks.INNER)
    assert y.dtype == gate_up.dtype == torch.float16


# --- what is refused, and where no kernel runs ---------------------------------------------------


def test_errors_name_what_was_given():
    x, w_gate_up, w_down = torch.zeros(3, 5), torch.zeros(8, 5), torch.zeros(5, 4)
    w_gate = w_gate_up[:4]
    eighths = tuple(t.to(torch.float8_e4m3fn) for t in (x, w_gate_up, w_down))
    for arguments, save, words in [
        ((x, w_gate_up, w_down), "gate", "save must be one of gate_up, input, got 'gate'"),
        ((torch.tensor(1.0), w_gate_up, w_down), "input", "got a scalar"),
        ((x, w_gate_up[:7], w_down), "input", r"\(2·intermediate, hidden\).* got \(7, 5\)"),
        ((x[:, :4], w_gate_up, w_down), "input", r"x must be \(..., 5\) .* got \(3, 4\)"),
        ((x, w_gate_up[0], w_down), "input", r"got \(5,\)"),
        ((x, w_gate_up, w_down.mT), "input", r"w_down must be \(5, 4\), got \(4, 5\)"),
        ((x, w_gate_up.half(), w_down), "input", "w_gate_up is torch.float16, x is torch.float32"),
        ((x, w_gate_up, w_down.half()), "input", "they must have one floating-point dtype"),
        ((x.int(), w_gate_up.int(), w_down.int()), "input", "x must be fp16, .* got torch.int32"),
        (eighths, "input", "x must be fp16, bf16, fp32 or float64, got torch.float8_e4m3fn"),
        ((x, w_gate_up, w_down.to("meta")), "input", "w_down is on meta, x on cpu"),
        ((x, (w_gate_up,), w_down), "input", r"a pair \(w_gate, w_up\), got a tuple of 1"),
        ((x, [w_gate] * 3, w_down), "input", r"one tensor or a pair .*, got a list of 3"),
        ((x, (w_gate[0], w_gate), w_down), "input", r"w_gate must be \(intermediate, .* \(5,\)"),
        ((x, (w_gate, w_gate[:3]), w_down), "input", r"w_up must be \(4, 5\), .* got \(3, 5\)"),
        ((x, (w_gate, w_gate_up), w_down), "input", r"w_up must be \(4, 5\), .* got \(8, 5\)"),
        ((x, [w_gate_up] * 2, w_down), "input", r"w_down must be \(5, 8\), got \(5, 4\)"),
        (
            (x[:, :4], [w_gate] * 2, w_down),
            "input",
            r"\(..., 5\) for w_gate \(4, 5\), got \(3, 4\)",
        ),
        (
            (x, (w_gate, w_gate.half()), w_down),
            "input",
            "w_up is torch.float16, x is torch.float32",
        ),
        ((x, (w_gate, w_gate.to("meta")), w_down), "input", "w_up is on meta, x on cpu"),
    ]:
        with pytest.raises(ValueError, match=words):
            swiglu_mlp(*arguments, save=save)
    with pytest.raises(ValueError, match="got 'all'"):
        swiglu(x, w_gate_up, save="all")
    for pair, name in (((w_gate, None), "w_up"), ((None, w_gate), "w_gate"), ((w_gate, 1), "w_up")):
        for call in (lambda p: swiglu(x, p), lambda p: swiglu_mlp(x, p, w_down)):
            with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got"):
                call(pair)


def test_kernels_are_for_gpus_that_have_them(monkeypatch):
    x = torch.zeros(1, dtype=torch.bfloat16)
    assert not route.runs_fused_kernels(x)
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, wanted in (((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert devices._find_kernels.__wrapped__(cuda) is wanted
    assert not devices._find_kernels.__wrapped__(torch.device("mps"))
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm
    assert not devices._find_kernels.__wrapped__(cuda)


def test_fp32_products_follow_torch_s_switches():
    wide, half = torch.zeros(1), torch.zeros(1, dtype=torch.float16)
    before = torch.get_float32_matmul_precision()
    matmul = torch.backends.cuda.matmul
    own = matmul.fp32_precision
    try:
        for setting, wanted in (("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")):
            torch.set_float32_matmul_precision(setting)
            assert (fp32_precision(wide), fp32_precision(half)) == (wanted, "ieee")
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = "tf32"
        assert fp32_precision(wide) == "tf32"
    finally:
        matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision(before)
        matmul.fp32_precision = own


def test_importing_the_package_imports_no_torch_and_its_functions_no_compiler():
    code = """
import sys, fusedlib
assert not {"torch", "triton"} & set(sys.modules)
import fusedlib.ops.mlp.function, fusedlib.ops.mlp.module
assert "torch._dynamo" not in sys.modules, "1.5 s that only who compiles need wait for"
assert callable(fusedlib.swiglu) and callable(fusedlib.swiglu_mlp)
assert fusedlib.SwiGLUMLP.__module__ == "fusedlib.ops.mlp.module"
assert {"swiglu", "swiglu_mlp", "SwiGLUMLP"} <= set(dir(fusedlib))
"""
    subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, check=True)
    with pytest.raises(AttributeError, match="no attribute 'geglu'"):
        _ = fusedlib.geglu


def test_the_fused_rival_wants_a_gpu():
    inputs = draw(SwiGLUProblem(4, 4, 4, "float32"), "cpu")
    with pytest.raises(Unavailable, match="needs a CUDA GPU|triton is not installed"):
        rivals.get("swiglu", "fused").check_available("cpu", "float32")
    work = rivals.get("swiglu", "fused").build(inputs)
    assert list(work.leaves) == ["x", "w_gate_up", "w_down"]
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in work.leaves.values())
    assert work.path == "plain PyTorch"
    assert work.forward().shape == (4, 4)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_small_call_is_plain_pytorch_at_a_glance(monkeypatch, pair, dtype):
    """The slow look at it is for all others: of what does not fit, large, under autocast."""
    x, w_down = torch.randn(3, 16, dtype=dtype), torch.randn(16, 32, dtype=dtype)
    w_gate, w_up = torch.randn(2, 32, 16, dtype=dtype)
    weights = (w_gate, w_up) if pair else torch.cat([w_gate, w_up])
    wanted = functional._plain_pytorch("silu", x, *functional._split_weights(weights), w_down)
    monkeypatch.setattr(functional, "check_mlp", None)
    assert torch.equal(swiglu_mlp(x, weights, w_down), wanted)
    others = [(x[:, :-1], weights, w_down), (x.bfloat16(), weights, w_down),
              (x, weights, w_down[:-1]), (x, weights, w_down[0]), (x, None, w_down),
              (x, weights, w_down.to("meta")), (x, weights, w_down.bfloat16()),
              ([], weights, w_down), (x, weights, None), (x[0, 0], weights, w_down)]  # fmt: skip
    if pair:
        others += [(x, (w_gate, w_up[:1]), w_down), (x, (w_gate, w_up.bfloat16()), w_down),
                   (x, (w_gate, w_up.to("meta")), w_down), (x, w_gate, w_down)]  # fmt: skip
    for call in others:
        with pytest.raises(TypeError, match="NoneType"):
            swiglu_mlp(*call)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="NoneType"):
        swiglu_mlp(x, weights, w_down)
    with pytest.raises(TypeError, match="NoneType"):
        swiglu_mlp(x, weights, w_down, save="input")
    monkeypatch.setattr(linear_route, "MIN_SPLIT_WORK", 3 * 16 * (32 if pair else 64))
    with pytest.raises(TypeError, match="NoneType"):
        swiglu_mlp(x, weights, w_down)


# --- teeth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", broken_calls.FAULTS)
def test_a_fault_is_rejected(fault, dtype):
    broken_calls.check_rejected("cpu", dtype, SHAPE, fault)


@pytest.mark.interpreter
@pytest.mark.parametrize("fault", broken_kernels.BROKEN)
def test_a_broken_kernel_is_rejected(device, monkeypatch, tmp_path, fault):
    started = broken_kernels.put(monkeypatch, tmp_path, fault, off=1e-3)
    assert checks.misses_mlp(device, "float32", checks.SHAPE, pair=True) != []
    assert checks.beyond_bound(device, "float32") != []
    assert broken_kernels.names(started) == set(broken_kernels.NAMES)


# --- on a GPU alone ------------------------------------------------------------------------------


# Few tokens, cuBLAS's products and fixed roles on Hopper; unaligned.
GRAPHS = [(64, 1024, 2048), (517, 384, 1072), (1000, 512, 1040), (1000, 512, 4400),
          (1024, 256, 4096), (37, 501, 1003)]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("save", "pair"), [("gate_up", False), ("input", True)])
@pytest.mark.parametrize("shape", GRAPHS, ids=str)
def test_results_repeat_bit_by_bit_and_a_cuda_graph_replays_them(shape, save, pair):
    leaves, dy = checks.small("cuda", "bfloat16", shape, pair)

    def step():
        y = checks.mlp(*leaves, save=save)
        return [y.detach(), *grad(y, leaves, dy)]

    first = step()
    assert all(checks.same(step(), first) for _ in range(5))
    graph, written = gradient_checks.captured(step)
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(leaves[0]))
    graph.replay()
    assert checks.close([t.clone() for t in written], step())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 72])  # by a plan for few tokens, and by cuBLAS's
def test_addresses_off_16_bytes_go_another_way(tokens):
    (x, w_gate_up, w_down), _ = checks.small("cuda", "bfloat16", (tokens, 64, 64))
    wanted = swiglu_mlp(x, w_gate_up, w_down)
    for off in (1, 2, 4, 8):  # elements: two bytes each
        buffer = torch.empty(x.numel() + off, device="cuda", dtype=x.dtype)
        moved = buffer[off:].view_as(x).copy_(x.detach())
        assert checks.close([swiglu_mlp(moved, w_gate_up, w_down)], [wanted]), off


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_device_may_be_another():
    leaves, dy = checks.small("cuda:1")
    assert torch.cuda.current_device() == 0
    y = swiglu_mlp(*leaves)
    other = [t.detach().to("cuda:0").requires_grad_() for t in leaves]
    y_other = swiglu_mlp(*other)
    assert checks.close([y.cpu()], [y_other.cpu()])
    gradients = grad(y, leaves, dy), grad(y_other, other, dy.to("cuda:0"))
    assert checks.close(*[[t.cpu() for t in g] for g in gradients])


@pytest.mark.gpu
def test_memory_kept_for_backward():
    """gate|up with save="gate_up", nothing with "input"."""
    leaves, _ = checks.small("cuda", "bfloat16", (2048, 1024, 4096))
    swiglu_mlp(*leaves)  # cuBLAS takes its workspace
    for save, kept in (("gate_up", 2048 * 2 * 4096 * 2), ("input", 0)):
        before = torch.cuda.memory_allocated()
        y = swiglu_mlp(*leaves, save=save)
        grown = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
        assert 0 <= grown - kept <= 2**21, save  # the allocator's own granularity
        del y


@pytest.mark.gpu
@PAIRS
@pytest.mark.parametrize("save", SAVES)
def test_peak_memory_of_forward_and_backward(save, pair):
    """d(gate|up) lies where gate|up lay: at the end it and all gradients but that of w_gate_up,
    which comes last, and y.
    """
    tokens, hidden, inner = 2048, 1024, 4096
    leaves, dy = checks.small("cuda", "bfloat16", (tokens, hidden, inner), pair)

    def step():
        y = checks.mlp(*leaves, save=save)
        return [y, *grad(y, leaves, dy)]

    peak, (_, *gradients) = checks.peak_over(step), step()
    numbers = 2 * tokens * inner + tokens * hidden + sum(t.numel() for t in gradients)
    with_h = 2 * tokens * inner + tokens * hidden + tokens * inner + hidden * inner
    assert peak <= 2 * max(numbers, with_h) + 2**21
    y = checks.mlp(*leaves, save=save)
    retained = [grad(y, leaves, dy, retain_graph=True) for _ in range(2)]
    assert all(checks.same(actual, gradients) for actual in (*retained, grad(y, leaves, dy)))
    with pytest.raises(RuntimeError, match="second time"):
        grad(y, leaves, dy)


@pytest.mark.gpu
def test_a_kept_launch_serves_its_own_sizes_only():
    """Sizes of 1, multiples of 16 or not, other strides and addresses, each after the others."""
    plan_cache._PLANS.clear()
    shapes = [(64, 64, 64), (1, 64, 64), (64, 1, 64), (17, 64, 48), (64, 64, 65), (17, 63, 48)]
    for _ in range(2):
        for shape, pair in product(shapes, checks.PAIRS):
            assert checks.misses_mlp("cuda", "bfloat16", shape, pair=pair) == [], shape
            assert checks.misses_mlp("cuda", "float16", shape, "input", pair=pair) == [], shape
    kept = len(plan_cache._PLANS)
    (x, w_gate_up, w_down), _ = checks.small("cuda", "bfloat16", shapes[0])
    wanted = swiglu_mlp(x, w_gate_up, w_down)
    for off in range(1, 9):
        buffer = torch.empty(x.numel() + off, device="cuda", dtype=x.dtype)
        moved = buffer[off:].view_as(x).copy_(x.detach())
        assert checks.close([swiglu_mlp(moved, w_gate_up, w_down)], [wanted]), off
        wide = torch.empty(x.shape[0], x.shape[1] + off, device="cuda", dtype=x.dtype)
        rows = wide[:, : x.shape[1]].copy_(x.detach())
        assert checks.close([swiglu_mlp(rows, w_gate_up, w_down)], [wanted]), off
    assert len(plan_cache._PLANS) == kept


@pytest.mark.gpu
def test_module_trains_under_autocast_as_the_plain_one():
    torch.manual_seed(0)
    ours = SwiGLUMLP(256, 688, device="cuda")
    x = torch.randn(512, 256, device="cuda")
    optimizer = torch.optim.Adam(ours.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(ours(x).float(), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
