"""The functional SwiGLU on the CPU, in plain PyTorch: the same checks as over the kernels."""

import subprocess
import sys

import broken_calls
import pytest
import swiglu_checks as checks
import torch

import fusedlib
import fusedlib.bench.swiglu
from fusedlib import functional, paths
from fusedlib.bench import rivals
from fusedlib.bench.problems import SwiGLUProblem, draw
from fusedlib.bench.results import Unavailable
from fusedlib.functional import swiglu, swiglu_mlp
from fusedlib.kernels import route

SHAPE = (70, 83, 101)


@pytest.mark.parametrize("save", functional.SAVES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_swiglu_mlp_and_gradients_vs_float64(dtype, save):
    assert checks.misses_mlp("cpu", dtype, SHAPE, save) == []
    assert checks.misses_half("cpu", dtype, SHAPE, save) == []


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
    leaves = [torch.randn(s, dtype=torch.float64) for s in ((3, 4), (10, 4), (4, 5))]
    leaves = [t.requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(swiglu_mlp, leaves)
    assert torch.autograd.gradgradcheck(swiglu_mlp, leaves)


def test_input_mode_keeps_the_operands_alone():
    leaves, _ = checks.small("cpu")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu_mlp(*leaves, save="input")
    assert sum(t.numel() for t in kept) <= sum(t.numel() for t in leaves)


def test_meta_and_fake_tensors_have_shapes():
    leaves, _ = checks.small("cpu", "bfloat16")
    meta = [t.detach().to("meta") for t in leaves]
    assert swiglu_mlp(*meta).shape == meta[0].shape
    with torch.autocast("cpu"):
        assert swiglu(*meta[:2]).shape == (checks.TOKENS, checks.INNER)
    with torch._subclasses.FakeTensorMode():
        fake = [torch.empty(t.shape, dtype=t.dtype) for t in leaves]
        y = swiglu_mlp(*fake)
    assert (y.shape, y.dtype) == (meta[0].shape, torch.bfloat16)


def test_errors_name_what_was_given():
    x, w_gate_up, w_down = torch.zeros(3, 5), torch.zeros(8, 5), torch.zeros(5, 4)
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
    ]:
        with pytest.raises(ValueError, match=words):
            swiglu_mlp(*arguments, save=save)
    with pytest.raises(ValueError, match="got 'all'"):
        swiglu(x, w_gate_up, save="all")


def test_kernels_are_for_gpus_that_have_them(monkeypatch):
    x = torch.zeros(1, dtype=torch.bfloat16)
    assert not functional.fused(x)
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, wanted in (((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert route._look_for_kernels.__wrapped__(cuda) is wanted
    assert not route._look_for_kernels.__wrapped__(torch.device("mps"))
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm
    assert not route._look_for_kernels.__wrapped__(cuda)


def test_fp32_products_follow_torch_s_switches():
    pytest.importorskip("triton")
    from fusedlib.kernels.swiglu_configs import precision_of

    wide, half = torch.zeros(1), torch.zeros(1, dtype=torch.float16)
    before = torch.get_float32_matmul_precision()
    matmul = torch.backends.cuda.matmul
    own = matmul.fp32_precision
    try:
        for setting, wanted in (("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")):
            torch.set_float32_matmul_precision(setting)
            assert (precision_of(wide), precision_of(half)) == (wanted, "ieee")
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = "tf32"
        assert precision_of(wide) == "tf32"
    finally:
        matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision(before)
        matmul.fp32_precision = own


def test_importing_the_package_imports_no_torch():
    code = """
import sys, fusedlib
assert not {"torch", "triton"} & set(sys.modules)
import fusedlib.functional, fusedlib.modules
assert "triton" not in sys.modules or "torch" in sys.modules
assert callable(fusedlib.swiglu) and callable(fusedlib.swiglu_mlp)
assert fusedlib.SwiGLUMLP.__module__ == "fusedlib.modules"
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
