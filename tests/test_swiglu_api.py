"""The functional SwiGLU on the CPU, in plain PyTorch: the same checks as over the kernels."""

import subprocess
import sys

import pytest
import torch

import broken_calls
import fusedlib
import measure.swiglu  # noqa: F401  (registers the rivals)
import swiglu_checks as checks
from fusedlib.bench import rivals
from fusedlib.bench.attempt import Unavailable
from fusedlib.launch import device
from fusedlib.ops.linear import route as linear_route
from fusedlib.ops.mlp import function as functional
from fusedlib.ops.mlp import route
from fusedlib.ops.mlp.function import swiglu, swiglu_mlp
from measure.mlp_problem import SwiGLUProblem, draw
from measure.recording import paths

SHAPE = (70, 83, 101)


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("save", functional.SAVES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_swiglu_mlp_and_gradients_vs_float64(dtype, save, pair):
    assert checks.misses_mlp("cpu", dtype, SHAPE, save, pair=pair) == []
    assert checks.misses_half("cpu", dtype, SHAPE, save, pair) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", broken_calls.FAULTS)
def test_a_fault_is_rejected(fault, dtype):
    broken_calls.check_rejected("cpu", dtype, SHAPE, fault)


@pytest.mark.parametrize("check", checks.ALL, ids=lambda f: f.__name__[6:])
def test_holds(check):
    check("cpu")


def test_compiled_in_one_graph():
    checks.check_compiled("cpu")


def test_float64_and_second_derivatives_where_pytorch_runs():
    for shapes in (((3, 4), (10, 4), (4, 5)), ((3, 4), (5, 4), (5, 4), (4, 5))):
        leaves = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
        assert torch.autograd.gradcheck(checks.mlp, leaves)
        assert torch.autograd.gradgradcheck(checks.mlp, leaves)


@pytest.mark.parametrize("pair", checks.PAIRS)
def test_input_mode_keeps_the_operands_alone(pair):
    leaves, _ = checks.small("cpu", pair=pair)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        checks.mlp(*leaves, save="input")
    assert sum(t.numel() for t in kept) <= sum(t.numel() for t in leaves)


@pytest.mark.parametrize("pair", checks.PAIRS)
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
        assert device._find_kernels.__wrapped__(cuda) is wanted
    assert not device._find_kernels.__wrapped__(torch.device("mps"))
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm
    assert not device._find_kernels.__wrapped__(cuda)


def test_fp32_products_follow_torch_s_switches():
    pytest.importorskip("triton")
    from fusedlib.ops.linear.route import fp32_precision

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


def test_importing_the_package_imports_no_torch():
    code = """
import sys, fusedlib
assert not {"torch", "triton"} & set(sys.modules)
import fusedlib.ops.mlp.function, fusedlib.ops.mlp.module
assert "triton" not in sys.modules or "torch" in sys.modules
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
    pytest.importorskip("triton")
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
