"""What is particular to `fusedlib.linear` and `fusedlib.Linear`, and what looks at all operators:
counters of FLOPs, exports, optimizers that step in backward, whole models in fp32. The rest is in
`tests/laws`.
"""

import copy
import io
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional
from torch.nn.utils.prune import l1_unstructured
from torch.utils.flop_counter import FlopCounterMode

import fusedlib
import gradient_checks
import limits
import llama_models
from called import note_launches
from fusedlib import Linear, linear, reference, tuning
from fusedlib.bench import check
from fusedlib.launch import Config
from fusedlib.ops.fused_class import fuse
from fusedlib.patch.apply import FusedLinear
from gradient_checks import close, drawn, same
from interpreter import INTERPRETED

USUAL = (36, 40, 24) if INTERPRETED else (2050, 1030, 2070)  # tokens, inputs, outputs
SPLIT = {
    "split_least_size": 1, "split_least_results": 1, "split_least_work": 1, "split_span": 128,
    "split_interpreter_config": Config(128, 128, 64, 4, 1, group_m=2),
}  # fmt: skip


@pytest.fixture
def split():
    """Products of any size are, in the interpreter."""
    with tuning.override(**SPLIT if INTERPRETED else {}):
        yield


def operands(
    device: str, shape: tuple[int, int, int] = USUAL, dtype: str = "float32"
) -> tuple[dict[str, Tensor], Tensor]:
    """Leaves by name, and dy."""
    tokens, inputs, outputs = shape
    kind = getattr(torch, dtype)
    leaves = {
        "x": drawn(device, kind, tokens, inputs, seed=0),
        "weight": drawn(device, kind, outputs, inputs, seed=1, scale=inputs**-0.5),
        "bias": drawn(device, kind, outputs, seed=2),
    }
    leaves = {n: t.requires_grad_() for n, t in leaves.items()}
    return leaves, drawn(device, kind, tokens, outputs, seed=3)


def step(leaves, dy: Tensor, compute: Callable[..., Tensor] = linear) -> list[Tensor]:
    return gradient_checks.results_of(compute, leaves, dy)


# --- where products are split --------------------------------------------------------------------


@pytest.mark.plain
def test_second_derivatives_of_what_forward_read(device, split):
    """As of torch's linear: a penalty on the gradient, whatever memory operands get meanwhile."""

    def penalty(compute, dtype, exchanged=False):
        leaves, dy = operands(device)
        own = {n: t.detach().to(dtype).requires_grad_() for n, t in leaves.items()}
        y, dy = compute(**own), dy.to(dtype).requires_grad_()
        for operand in own.values() if exchanged else ():
            operand.data = torch.zeros_like(operand)
        d_x, d_weight = grad(y, (own["x"], own["weight"]), dy, create_graph=True)
        return grad(d_x.square().sum() + d_weight.square().mean(), (*own.values(), dy),
                    allow_unused=True, materialize_grads=True)  # fmt: skip

    found, true = penalty(linear, torch.float32), penalty(functional.linear, torch.float64)
    for f, t in zip(found, true, strict=True):
        assert (f.double() - t).norm() <= 1e-5 * t.norm()
    if INTERPRETED or device == "cuda":
        assert same(penalty(linear, torch.float32, exchanged=True), found)


def tf32_by_backend(on: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"


def tf32_by_precision(on: bool) -> None:
    torch.set_float32_matmul_precision("high" if on else "highest")


@pytest.mark.parametrize("switch", [tf32_by_backend, tf32_by_precision])
def test_another_precision_is_torch_s(device, split, monkeypatch, switch):
    """Whichever switch says so, also between forward and backward, and where it was compiled."""
    started = note_launches(monkeypatch)
    leaves, dy = operands(device)
    before = torch.backends.cuda.matmul.fp32_precision
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    y, _ = linear(**leaves), compiled(**leaves)
    assert started
    started.clear()
    try:
        switch(True)
        grad(y, list(leaves.values()), dy)
        assert same(step(leaves, dy), step(leaves, dy, functional.linear))
        assert same([compiled(**leaves)], [functional.linear(**leaves)])
    finally:
        switch(False)
        torch.backends.cuda.matmul.fp32_precision = before
    assert not started


ASKED_FOR_IEEE = """
import torch, fusedlib.tuning
x, weight = torch.randn(130, 300), torch.randn(140, 300)
with fusedlib.tuning.override(split_least_size=1, split_least_results=1, split_least_work=1):
    print(torch.equal(fusedlib.linear(x, weight), torch.nn.functional.linear(x, weight)))
"""


@pytest.mark.parametrize(("value", "is_torch_s"), [("0", True), ("1", False)])
def test_ieee_arithmetic_may_be_asked_for(value, is_torch_s):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", ASKED_FOR_IEEE], check=True, capture_output=True, text=True,
        env=os.environ | {"FUSEDLIB_SPLIT": value, "TRITON_INTERPRET": "1"},
        timeout=limits.PROCESS_S,
    )  # fmt: skip
    assert done.stdout.strip() == str(is_torch_s)


@pytest.mark.interpreter
def test_frozen_operands_cost_no_product(device, split, monkeypatch):
    started = note_launches(monkeypatch)
    leaves, dy = operands(device)
    for wants in ((True, True), (True, False), (False, True)):
        pairs = zip(("x", "weight"), wants, strict=True)
        y = linear(*(leaves[n].detach().requires_grad_(want) for n, want in pairs))
        started.clear()
        y.backward(dy)
        assert started.count("_split_product_kernel") == sum(wants)


# --- what looks at operators ---------------------------------------------------------------------


def plain_mlp(x, w_gate_up, w_down):
    gate, up = functional.linear(x, w_gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, w_down)


def counted(compute, *sizes: tuple[int, ...]) -> int:
    """FLOPs of a forward and of its gradients."""
    leaves = [torch.randn(size, requires_grad=True) for size in sizes]
    with FlopCounterMode(display=False) as counter:
        compute(*leaves).sum().backward()
    return counter.get_total_flops()


@pytest.mark.interpreter
def test_flops_are_those_of_torch_s_operators(device):
    target = torch.zeros(2, 18, dtype=torch.int64)
    loss = partial(fusedlib.linear_cross_entropy, target=target)
    x, w, packed, down = (2, 18, 40), (24, 40), (48, 40), (40, 24)
    product = counted(functional.linear, x, w) // 3
    assert counted(linear, x, w) == 3 * product
    assert counted(loss, x, w) == 3 * product
    assert counted(partial(loss, reduction="none"), x, w) == 4 * product  # logits again
    mlp = counted(plain_mlp, x, packed, down)
    assert counted(fusedlib.swiglu_mlp, x, packed, down) == mlp == 9 * product
    by_pair = counted(lambda x, *w: fusedlib.swiglu_mlp(x, w[:2], w[2]), x, w, w, down)
    assert by_pair == mlp
    again = counted(partial(fusedlib.swiglu_mlp, save="input"), x, packed, down)
    assert again == mlp + 2 * product  # gate|up again
    assert counted(fusedlib.swiglu, x, packed) == 6 * product


@pytest.mark.interpreter
def test_flops_where_the_counter_was_there_first(device):
    """In a process of its own: operators are registered by the first call."""
    code = """
import torch
from torch.utils.flop_counter import FlopCounterMode
from fusedlib import swiglu
with FlopCounterMode(display=False) as counter:
    swiglu(torch.ones(2, 3), torch.ones(8, 3))
assert counter.get_total_flops() == 2 * 2 * 3 * 8
"""
    subprocess.run([sys.executable, "-c", code], check=True)


EXPORTED = {
    "linear": lambda x, w: linear(x, w),
    "loss": lambda x, w: fusedlib.linear_cross_entropy(x, w, x[..., 0].long() * 0),
    "log_probs": lambda x, w: fusedlib.linear_log_probs(x, w, x[..., 0].long() * 0)[0],
    "rms_norm": lambda x, w: fusedlib.rms_norm(x, w[0]),
    "rope": lambda x, w: fusedlib.rope(*2 * [x[None]], x.cos(), x.sin(), width=520)[0],
}


@pytest.mark.interpreter
@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_keeps_the_number_of_tokens_open(device, name):
    """Within any bounds: no code asks how many there are."""

    class Module(nn.Module):
        def forward(self, x, w):
            return EXPORTED[name](x, w)

    x, w = torch.randn(1, 10, 512), torch.randn(520, 512)
    for most, strict in ((64, True), (5_000_000, False)):
        open_ = {"x": {1: torch.export.Dim("tokens", min=2, max=most)}, "w": None}
        program = torch.export.export(Module(), (x, w), dynamic_shapes=open_, strict=strict)
        x = torch.randn(1, 33, 512)
        torch.testing.assert_close(program.module()(x, w), EXPORTED[name](x, w))


def trained(functions: dict[str, Callable], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights after steps that a fused optimizer takes in backward, as soon as a gradient is there.

    Each weight serves two layers.
    """
    torch.manual_seed(0)
    shapes = {"scale": (40,), "qk": (80, 40), "bias": (80,), "up": (48, 40), "down": (40, 24),
              "vocabulary": (60, 40)}  # fmt: skip
    weights = {n: 0.2 * torch.randn(s, dtype=torch.float64) for n, s in shapes.items()}
    weights = {n: t.to(dtype).requires_grad_() for n, t in weights.items()}
    angles = torch.arange(18 * 20, dtype=torch.float64).reshape(1, 18, 20)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def step(weight, optimizer):
        optimizer.step()
        optimizer.zero_grad()

    for weight in weights.values():
        optimizer = torch.optim.SGD([weight], lr=0.3, fused=True)
        weight.register_post_accumulate_grad_hook(partial(step, optimizer=optimizer))
    norm, project, rotate, mlp, loss = functions.values()
    for _ in range(3):
        stream = torch.randn(2, 18, 40, dtype=torch.float64).to(dtype)
        target = torch.randint(60, (2, 18))
        for _ in range(2):
            y = norm(stream, weights["scale"])
            heads = project(y, weights["qk"], weights["bias"]).unflatten(-1, (2, 2, 20))
            q, k = (t.transpose(1, 2) for t in heads.unbind(2))
            q, k = rotate(q, k, cos, sin)
            stream = stream + (q * k).transpose(1, 2).flatten(2)
            stream = stream + mlp(norm(stream, weights["scale"]), weights["up"], weights["down"])
        last = norm(stream, weights["scale"]).flatten(0, 1)
        loss(last, weights["vocabulary"], target.flatten()).backward()
    return {n: t.detach() for n, t in weights.items()}


OURS = {"norm": fusedlib.rms_norm, "project": linear, "rotate": fusedlib.rope,
        "mlp": fusedlib.swiglu_mlp, "loss": fusedlib.linear_cross_entropy}  # fmt: skip
TORCH = {
    "norm": reference.rms_norm,
    "project": functional.linear,
    "rotate": lambda q, k, *tables: [reference.rope(t, *tables) for t in (q, k)],
    "mlp": plain_mlp,
    "loss": reference.linear_cross_entropy,
}


@pytest.mark.interpreter
@pytest.mark.parametrize(("save", "reduction"), [("gate_up", "mean"), ("input", "none")])
def test_an_optimizer_that_steps_in_backward(device, save, reduction):
    """No backward reads a weight after its step, of which torch sees no change of version."""

    def loss(*operands):
        return fusedlib.linear_cross_entropy(*operands, reduction=reduction).mean()

    ours = OURS | {"mlp": partial(fusedlib.swiglu_mlp, save=save), "loss": loss}
    true = trained(TORCH, torch.float64)
    actual, usual = (check.errors(trained(f, torch.float32), true) for f in (ours, TORCH))
    assert check.misses(actual, usual, torch.float32) == []


# --- whole models --------------------------------------------------------------------------------


def patched_model(name="Llama", width=64):
    plain = llama_models.make(name, num_hidden_layers=1, hidden_size=width)
    patched = copy.deepcopy(plain)
    fusedlib.apply_to(patched)
    return plain, patched


@pytest.mark.interpreter
def test_a_model_s_projections_and_loss(device, split, monkeypatch):
    """Also as one graph, whose numbers are the model's own."""
    started = note_launches(monkeypatch)
    plain, patched = patched_model("Qwen2", 256)  # sums in which the parts' error is not the most
    ids, labels = llama_models.tokens()
    assert llama_models.misses_of(plain, patched, ids, labels) == []
    assert started.count("_split_product_kernel") == 3 * 3  # q, k and v as one, o, and the loss
    torch._dynamo.reset()
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    weights = list(patched.parameters())
    found, wanted = (grad(m(ids, labels=labels).loss, weights) for m in (compiled, patched))
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w)


@pytest.mark.interpreter
def test_tensors_that_leave_a_model_carry_nothing(device):
    """Where norms run by a kernel: their output was computed again by what hung on it."""
    _, patched = patched_model()
    given = []
    patched.model.norm.register_forward_pre_hook(lambda _, x: given.append(weakref.ref(x[0])))
    ids, _ = llama_models.tokens()
    hidden = patched(ids, output_hidden_states=True).hidden_states[-1]
    assert hidden.grad_fn is not None and not vars(hidden)
    file = io.BytesIO()
    torch.save(hidden, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), hidden)
    hidden.sum().backward()
    assert given[0]() is None


# --- the module, and in plain PyTorch ------------------------------------------------------------


@pytest.mark.plain
@pytest.mark.parametrize("bias", [True, False])
def test_module(device, bias):
    """Drawn, named, shown and stored as torch's; by the same parameters the same results."""
    plain, made = (
        (torch.manual_seed(3), kind(USUAL[1], USUAL[2], bias, device=device))[1]
        for kind in (nn.Linear, Linear)
    )
    assert same(made.state_dict().values(), plain.state_dict().values())
    assert list(made.state_dict()) == list(plain.state_dict()) and str(made) == str(plain)
    assert isinstance(made, nn.Linear) and Linear(7, 5, device="meta").weight.is_meta
    assert torch.equal(copy.deepcopy(made).weight, made.weight)
    shared = Linear.from_torch(plain.eval())
    assert shared.weight is plain.weight and shared.bias is plain.bias and not shared.training
    x = drawn(device, torch.float32, 36, USUAL[1], seed=0)
    wanted = functional.linear(x, plain.weight, plain.bias)
    assert all(close([module(input=x)], [wanted]) for module in (made, shared))


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Named(nn.Linear):
    """Nothing of its own."""


def test_from_torch_takes_what_computes_the_same():
    for kind in (nn.Linear, Named, Linear):
        plain = kind(3, 4)
        plain.weight.requires_grad_(False)
        assert Linear.from_torch(plain).weight is plain.weight
    hooked, own, fused, pruned = (nn.Linear(3, 4) for _ in range(4))
    hooked.register_forward_hook(lambda module, given, y: 2 * y)
    own.forward = own.forward
    fuse(fused, FusedLinear)
    l1_unstructured(pruned, "bias", 1)
    for wrong, words in (
        (hooked, "has hooks or a forward of its own"),
        (own, "has hooks or a forward of its own"),
        (fused, "apply_to has changed this one"),
        (pruned, "the bias is a Tensor, not a torch.nn.Parameter"),
        (nn.Conv1d(1, 1, 1), "takes a torch.nn.Linear with its own forward, got torch.nn.*Conv1d"),
        (Doubling(3, 4), "got test_linear.Doubling"),
        (torch.ones(3), "got torch.Tensor"),
        (nn.LazyLinear(3), "the weight is a UninitializedParameter"),
    ):
        with pytest.raises(TypeError, match=words):
            Linear.from_torch(wrong)


X, W, B = torch.zeros(3, 8), torch.zeros(5, 8), torch.zeros(5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: linear(X[0, 0], W), r"x must be \(..., in_features\), got a scalar"),
        (lambda: linear(X, W.half()), "weight is torch.float16, x is torch.float32.*autocast"),
        (lambda: Linear(0, 3), "in_features must be a whole number of at least 1, got 0"),
        (lambda: Linear.from_torch(nn.Linear(0, 3)), "in_features must be .* at least 1, got 0"),
        (lambda: Linear(True, 3), "in_features must be a whole number of at least 1, got True"),
        (lambda: Linear(3, 2.5), "out_features must be a whole number of at least 1, got 2.5"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


class Noting(Tensor):
    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(getattr(function, "__name__", ""))
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.filterwarnings("ignore:.*CSR")
def test_subclasses_and_what_has_no_strides_see_torch_s_linear():
    """They may have rules for that alone."""
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    wanted = functional.linear(x, weight)
    y = linear(x.as_subclass(Noting), weight)
    assert "linear" in Noting.seen and torch.equal(y.as_subclass(Tensor), wanted)
    nested = torch.nested.nested_tensor([x, x[:2]])
    torch.testing.assert_close(linear(nested, weight).unbind()[0], wanted)
    for given in ((x.to_sparse(), weight), (x, weight.to_sparse()), (x.to_sparse_csr(), weight)):
        torch.testing.assert_close(linear(*given), wanted)
    layer = Linear(8, 5)
    assert torch.equal(torch.fx.symbolic_trace(layer)(x), layer(x))


# --- on a GPU alone ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 2048, 2048), USUAL, (384, 2560, 5120)], ids=str)
def test_errors_vs_cublas(shape):
    """In norm 0.7 of its own, of what is split; d_x of the last, of few results, is torch's."""
    leaves, dy = operands("cuda", shape)
    wide = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}
    true = step(wide, dy.double(), functional.linear)
    for found, usual, exact in zip(
        step(leaves, dy)[:3], step(leaves, dy, functional.linear)[:3], true[:3], strict=True
    ):
        ours, its = (((f - exact).norm() / exact.norm()).item() for f in (found, usual))
        assert ours <= max(0.7 * its, 3e-7) or ours == its, (ours, its)


def fp32_pair():
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 8192}
    with torch.device("cuda"):
        plain = llama_models.make("Llama", **sizes, max_position_embeddings=1024)
    patched = copy.deepcopy(plain)
    report = fusedlib.apply_to(patched)
    assert len(report.replaced["linear"]) == 9
    ids = torch.randint(1, 8192, (8, 512), device="cuda")
    return plain, patched, ids


@pytest.mark.gpu
def test_a_whole_fp32_model_vs_the_plain_one():
    plain, patched, ids = fp32_pair()
    assert llama_models.misses_of(plain, patched, ids, ids) == []


@pytest.mark.gpu
def test_a_whole_fp32_step_captured_in_a_cuda_graph():
    _, patched, ids = fp32_pair()
    weights = list(patched.parameters())

    def step():
        loss = patched(ids, labels=ids).loss
        return [loss.detach(), *grad(loss, weights)]

    graph, written = gradient_checks.captured(step)
    graph.replay()
    assert same(written, step())
