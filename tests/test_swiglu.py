"""What is particular to the gated MLPs: activations of large gates, what frozen weights cost, the
precision of fp32, and on a GPU memory, addresses and Hopper's kernels. The rest is in `tests/laws`.
"""

import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn import functional
from triton.runtime.errors import PTXASError

import gradient_checks
from called import Called, note_launches
from fusedlib import geglu_mlp, reference, swiglu_mlp, tuning
from fusedlib.ops.mlp import products, route
from fusedlib.ops.mlp.function import SAVES, path_of
from fusedlib.ops.mlp.kernels import fwd_launch
from gradient_checks import close, same
from interpreter import INTERPRETED
from study import paths
from study.settings import matmul_settings
from swiglu_checks import PAIRS, mlp, peak_over, small

PAIR = pytest.mark.parametrize("pair", PAIRS, ids=["packed", "pair"])
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def misses(leaves: tuple[Tensor, ...], dy: Tensor, save: str = "gate_up") -> list[str]:
    """What the one tolerance rule rejects of y and the gradients."""
    named = dict(zip(("x", *(f"w{i}" for i in range(len(leaves) - 1))), leaves, strict=True))

    def plain(x: Tensor, **weights: Tensor) -> dict[str, Tensor]:
        *gate_up, down = weights.values()
        gate_up = gate_up if len(gate_up) == 2 else gate_up[0].chunk(2)
        return {"y": reference.swiglu_mlp(x, *gate_up, down)}

    def ours(**leaves: Tensor) -> dict[str, Tensor]:
        return {"y": mlp(*leaves.values(), save=save)}

    return gradient_checks.misses(ours, plain, named, {"y": dy})


def step(leaves: tuple[Tensor, ...], dy: Tensor, save: str = "gate_up") -> list[Tensor]:
    y = mlp(*leaves, save=save)
    return [y.detach(), *grad(y, leaves, dy)]


# --- everywhere ----------------------------------------------------------------------------------

CALLS = {
    "silu": (swiglu_mlp, functional.silu),
    "gelu by tanh": (geglu_mlp, partial(functional.gelu, approximate="tanh")),
    "gelu": (partial(geglu_mlp, approximate="none"), functional.gelu),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CALLS)
def test_large_gates_are_activated_as_pytorch_activates_them(device, name):
    call, activation = CALLS[name]
    gate = torch.tensor([-1e20, -3e4, -20.0, -8.0, 8.0, 20.0, 3e4, 1e20], device=device)
    x = torch.stack([gate, torch.ones_like(gate)], dim=1).requires_grad_()
    y = call(x, torch.eye(2, device=device).split(1), torch.ones(2, 1, device=device))[:, 0]
    wide = gate.double().requires_grad_()
    true = activation(wide)
    assert torch.allclose(y.double(), true, rtol=1e-5, atol=1e-10)
    [d_x], [d_gate] = grad(y.sum(), x), grad(true.sum(), wide)
    assert torch.allclose(d_x[:, 0].double(), d_gate, rtol=1e-5, atol=1e-9)


@pytest.mark.interpreter
@PAIR
@pytest.mark.parametrize("save", SAVES)
def test_frozen_operands_cost_no_product(device, save, pair):
    """As by who trains an adapter: of x and each weight that is wanted one, and no other."""
    leaves, dy = small(device, "float32", (37, 41, 35), pair)
    for wanted in range(1, 2 ** len(leaves)):
        wants = [bool(wanted >> i & 1) for i in range(len(leaves))]
        own = [t.detach().requires_grad_(want) for t, want in zip(leaves, wants, strict=True)]
        y = mlp(*own, save=save)
        with Called() as called:
            y.backward(dy)
        of_x, *of_gate_up, of_down = wants
        needed = of_x * (2 if pair else 1) + any(of_gate_up) + of_down
        assert called.names.count("mm") + called.names.count("addmm_") == needed, wants


@pytest.mark.interpreter
def test_where_hopper_s_kernel_does_not_compile_another_runs_and_a_warning_says_so(
    device, monkeypatch
):
    def fails(*_: object) -> None:
        raise PTXASError("no such instruction")

    roles = SimpleNamespace(forward_launch=fwd_launch, backward_launch=lambda *_: fails)
    monkeypatch.setattr(route, "_import_hopper", lambda: roles)
    monkeypatch.setattr(route, "_NOT_COMPILED", [])
    monkeypatch.setattr(
        route, "_runs_warp_specialized", lambda _: route.hopper_kernels() is not None
    )
    said = pytest.warns(RuntimeWarning, match="slower kernel runs.*no such instruction")
    with tuning.override(mlp_unfused_tokens=route.FEW_TOKENS), said as told:
        for tokens in (70, 66):
            assert misses(*small(device, "float16", (tokens, 48, 80))) == []
    assert len(told) == 1 and route.hopper_kernels() is None


SPLIT = {"split_least_size": 1, "split_least_results": 1, "split_least_work": 1, "split_span": 128,
         "mlp_fuses_fp32": False}  # fmt: skip


def test_another_precision_goes_another_way(device, monkeypatch):
    """Between calls, and between forward and backward, where what is kept is the same."""
    started = note_launches(monkeypatch)
    shape = (24, 32, 48) if INTERPRETED else (1032, 1024, 4096)
    with tuning.override(**SPLIT if INTERPRETED else {}):
        leaves, dy = small(device, "float32", shape)
        wanted, y = step(leaves, dy), mlp(*leaves)
        assert "_split_kernel" in started
        started.clear()
        with matmul_settings("high", False):
            coarse = [[y.detach(), *grad(y, leaves, dy)], step(leaves, dy)]
        assert "_split_kernel" not in started
        for found in coarse:
            off = [(f - w).norm() / w.norm() for f, w in zip(found, wanted, strict=True)]
            assert all(each < 2**-8 for each in off) and not same(found, wanted)
        assert same(step(leaves, dy), wanted)


def test_what_does_not_fit_is_refused():
    """Where the laws have no operand that is as wrong."""
    x, w_gate, w_down = torch.zeros(3, 5), torch.zeros(4, 5), torch.zeros(5, 4)
    packed = torch.cat([w_gate, w_gate])
    eighths = [t.to(torch.float8_e4m3fn) for t in (x, packed, w_down)]
    for kind, operands, words in (
        (ValueError, (torch.tensor(1.0), packed, w_down), "x .* got a scalar"),
        (ValueError, (x, packed[:7], w_down), r"\(2·intermediate, hidden\).* got \(7, 5\)"),
        (ValueError, eighths, "x must be fp16, bf16, fp32 or float64"),
        (ValueError, (x, (packed,), w_down), r"a pair \(w_gate, w_up\), got a tuple of 1"),
        (ValueError, (x, [w_gate] * 3, w_down), "one tensor or a pair .*, got a list of 3"),
        (TypeError, (x, (w_gate, None), w_down), "w_up must be a torch.Tensor"),
    ):
        with pytest.raises(kind, match=words):
            swiglu_mlp(*operands)


def test_importing_the_functions_imports_no_compiler():
    code = """
import sys, fusedlib
assert callable(fusedlib.swiglu_mlp) and fusedlib.SwiGLUMLP and fusedlib.linear
assert fusedlib.rms_norm and fusedlib.rope and fusedlib.linear_cross_entropy
assert "triton" not in sys.modules, "0.3 s that only who runs a kernel need wait for"
assert "torch._dynamo" not in sys.modules, "1.5 s that only who compiles need wait for"
"""
    subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, check=True)


# --- on a GPU alone ------------------------------------------------------------------------------


@pytest.mark.gpu
@PAIR
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    "shape", [(517, 384, 1072), (37, 512, 1056), (1024, 2048, 5632), (1003, 2052, 4100)], ids=str
)
def test_in_tf32_vs_float64(shape, save, pair):
    with matmul_settings("high", True):
        assert misses(*small("cuda", "float32", shape, pair), save) == []


@pytest.mark.gpu
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("shape", [(2048, 2048, 2048), (1024, 1040, 4112), (128, 4096, 4096)])
def test_fp32_vs_ieee_fp32(save, shape):
    """Split products err by 0.7 of cuBLAS's in norm, at most, and what is not split as cuBLAS's."""
    leaves, dy = small("cuda", "float32", shape, pair=True)
    wide = [t.detach().double().requires_grad_() for t in leaves]

    def plainly(leaves: list[Tensor] | tuple[Tensor, ...], dy: Tensor) -> list[Tensor]:
        y = reference.swiglu_mlp(*leaves)
        return [y.detach(), *grad(y, leaves, dy)]

    true = plainly(wide, dy.double())
    ours, usual = (
        [((f - t).norm() / t.norm()).item() for f, t in zip(found, true, strict=True)]
        for found in (step(leaves, dy, save), plainly(leaves, dy))
    )
    split = path_of(leaves[0], leaves[1:3], leaves[3]) == "split fp32"
    assert split == (shape[0] > 128)
    if split:
        assert all(o < 0.7 * u for o, u in zip(ours, usual, strict=True)), (ours, usual)
    assert ours[0] <= 1.02 * usual[0]


@pytest.mark.gpu
def test_near_the_end_of_the_range_it_is_finite_where_torch_s_is():
    """Whatever is true below 1e38, in outputs and gradients: no partial sum of ours ends sooner."""
    leaves, dy = small("cuda", "float32", (1536, 1024, 2816), pair=True)
    x = (1e18 * leaves[0].detach()).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, *leaves[1:])]
    true = reference.swiglu_mlp(*wide)
    of = [true, *grad(true, wide[0], dy.double())]

    def lost(y: Tensor) -> list[int]:
        """How many are not finite though the true ones are below 1e38."""
        results = y, *grad(y, x, dy)
        pairs = zip(results, of, strict=True)
        return [int((~r.isfinite() & (t.abs() < 1e38)).sum()) for r, t in pairs]

    ours, torchs = lost(mlp(x, *leaves[1:])), lost(reference.swiglu_mlp(x, *leaves[1:]))
    assert all(o <= t for o, t in zip(ours, torchs, strict=True)), (ours, torchs)


@pytest.mark.gpu
@PAIR
@pytest.mark.parametrize("save", SAVES)
def test_peak_memory_of_forward_and_backward(save, pair):
    """d(gate|up) lies where gate|up lay: at the end it and all gradients but that of w_gate_up,
    which comes last, and y.
    """
    tokens, hidden, inner = 2048, 1024, 4096
    leaves, dy = small("cuda", "bfloat16", (tokens, hidden, inner), pair)
    peak, (_, *gradients) = peak_over(lambda: step(leaves, dy, save)), step(leaves, dy, save)
    numbers = 2 * tokens * inner + tokens * hidden + sum(t.numel() for t in gradients)
    with_h = 2 * tokens * inner + tokens * hidden + tokens * inner + hidden * inner
    assert peak <= 2 * max(numbers, with_h) + 2**21


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["chosen", "d_w_down first"])
def test_the_peak_is_that_of_the_chosen_order(monkeypatch, order):
    """d_w_down last, where the tokens are few for the width."""
    tokens, hidden, inner = 512, 2048, 4096
    if order != "chosen":
        monkeypatch.setattr(products, "is_d_w_down_last", lambda *_, **_named: False)
    with tuning.override(mlp_unfused_tokens=1 << 40):
        peak = peak_over(partial(step, *small("cuda", "bfloat16", (tokens, hidden, inner))))
    f, d, w = (2 * n for n in (tokens * inner, tokens * hidden, hidden * inner))
    first = d + 2 * f + w + max(f, d + 2 * w)
    last = d + f + d + 2 * w + max(2 * f, w)
    assert last < first
    assert abs(peak - (last if order == "chosen" else first)) <= 2**21


@pytest.mark.gpu
@PAIR
def test_the_peak_of_split_products(pair):
    """y, d_x, d_w_down and d_w_gate_up, d(gate|up), and the parts of d(gate|up) and x."""
    peak = peak_over(partial(step, *small("cuda", "float32", (1024, 1024, 4096), pair)))
    f, d, w = (4 * n for n in (1024 * 4096, 1024 * 1024, 1024 * 4096))
    assert abs(peak - (2 * d + w + 2 * w + 2 * f + (2 * f + d))) <= 2**21


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 72])  # by a plan for few tokens, and by cuBLAS's
def test_addresses_off_16_bytes_go_another_way(tokens):
    (x, *weights), _ = small("cuda", "bfloat16", (tokens, 64, 64))
    wanted = mlp(x, *weights)
    for off in range(1, 9):  # elements: two bytes each
        moved = torch.empty(x.numel() + off, device="cuda", dtype=x.dtype)[off:].view_as(x)
        wide = torch.empty(tokens, x.shape[1] + off, device="cuda", dtype=x.dtype)[:, : x.shape[1]]
        for place in (moved, wide):
            assert close([mlp(place.copy_(x.detach()), *weights)], [wanted]), off


@pytest.mark.gpu
def test_who_asks_triton_is_told_of_every_launch():
    """As profilers do."""
    import triton

    leaves, dy = small("cuda", "bfloat16", (64, 64, 64))
    wanted, told = step(leaves, dy), []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(note := lambda metadata: told.append(metadata.get()["name"]))
    try:
        assert same(step(leaves, dy), wanted)
    finally:
        hook.remove(note)
    assert len(told) == 3 and "_swiglu_fwd_kernel" in told
    assert same(step(leaves, dy), wanted) and len(told) == 3


@pytest.mark.gpu
@ON_HOPPER
def test_results_repeat_where_memory_is_the_bound():
    """Some thirty tiles a program, whose gate and up come later than the product: on the way from
    one part to the next nothing may be overtaken.
    """
    leaves, dy = small("cuda", "bfloat16", (16384, 2048, 8192))
    assert path_of(*leaves) == "fused by roles"
    first = step(leaves, dy)
    for save in ("gate_up", "input") * 10:
        assert same(step(leaves, dy, save), first)
    x, w_gate_up, w_down = (t.detach() for t in leaves)
    gate, up = (x @ w_gate_up.mT).float().chunk(2, dim=1)
    assert close([first[0]], [(functional.silu(gate) * up).bfloat16() @ w_down.mT])
