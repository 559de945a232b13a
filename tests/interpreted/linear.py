"""`fusedlib.linear` in Triton's interpreter: `tests/test_linear.py` runs this file in a process of
its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import copy
import io
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.autograd import grad
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import fusedlib
import linear_checks as checks
import loss_cases
from broken_kernels import without_scales
from called import note_launches
from fusedlib import linear, reference
from fusedlib.bench import check
from fusedlib.ops import recomputed
from fusedlib.ops.linear import route as linear_route
from fusedlib.ops.linear.function import linear_by_each
from fusedlib.ops.recomputed import recompute_in_backward
from gradient_checks import check_what_forward_read
from split_checks import cut_for_the_interpreter

# Rows that are not of this vocabulary may hold anything.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MULTIPLY = "_split_product_kernel"
SPLIT = "_split_kernel"


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Products of any size are split; names of the kernels that ran."""
    checks.split_everything(monkeypatch)
    cut_for_the_interpreter(monkeypatch)
    return note_launches(monkeypatch)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_and_gradients_vs_float64(started, bias):
    assert checks.misses_linear("cpu", checks.LONG, bias=bias) == []
    assert started.count(MULTIPLY) == 3


@pytest.mark.parametrize(
    "family",
    ["rows that differ by 2^30", "terms that differ by 2^30", "positive", "learned tokens"],
)
def test_linear_and_gradients_vs_the_contract(family):
    assert checks.contract_misses_of("cpu", (140, 300, 134), family) == []


@pytest.mark.parametrize("check", [*checks.ALL, *checks.WHERE_SPLIT], ids=checks.name_of)
def test_holds(check):
    check("cpu")


def joined(bias, frozen=()):
    """x, three layers' weights and biases; and the names of those that want gradients."""
    leaves, _ = checks.operands("cpu", (136, 140, 264), bias=bias)
    pieces = zip(("q", "k", "v"), leaves["weight"].detach().split([128, 72, 64]), strict=True)
    named = {"x": leaves["x"].detach()} | {f"w_{n}": w.clone() for n, w in pieces}
    if bias:
        pieces = zip(("q", "k", "v"), leaves["bias"].detach().split([128, 72, 64]), strict=True)
        named |= {f"b_{n}": b.clone() for n, b in pieces}
    return {n: t.requires_grad_(n not in frozen) for n, t in named.items()}


def by_layers(named, compute):
    return compute(
        named["x"], [named[f"w_{n}"] for n in "qkv"], [named.get(f"b_{n}") for n in "qkv"]
    )


@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_x_are_one_product(started, bias):
    """Of the bits of the joined weight, which is not kept."""
    named = joined(bias)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        results = by_layers(named, linear_by_each)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for n, t in named.items() if n[0] != "b"}
    upstream = [torch.randn_like(y) for y in results]
    found = grad(results, list(named.values()), upstream)
    assert started.count(MULTIPLY) == 3
    biases = [named[f"b_{n}"] for n in "qkv"] if bias else None
    weight = torch.cat([named[f"w_{n}"] for n in "qkv"])
    y = linear(named["x"], weight, torch.cat(biases) if bias else None)
    assert torch.equal(torch.cat(results, dim=-1), y)
    wanted = grad(y, list(named.values()), torch.cat(upstream, dim=-1))
    assert checks.same(found, wanted)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_of_what_forward_read(bias):
    check_what_forward_read(linear, *checks.operands("cpu", checks.SMALL, bias=bias))
    named = joined(bias)

    def together(**own):
        return torch.cat(by_layers(own, linear_by_each), dim=1)

    check_what_forward_read(together, named, torch.randn(136, 264))


def test_second_derivatives_are_of_what_forward_read():
    """In the graph of the weight, whose values they do not have any more."""
    leaves, dy = checks.operands("cpu", checks.SMALL)

    def penalty(exchanged):
        own = {n: t.detach().requires_grad_() for n, t in leaves.items()}
        y = linear(**own)
        if exchanged:
            for operand in own.values():
                operand.data = torch.zeros_like(operand)
        d_x, d_weight = grad(y, (own["x"], own["weight"]), dy, create_graph=True)
        return [d_x, d_weight, *grad(d_x.sin().sum() + d_weight.cos().sum(), own["weight"])]

    assert checks.same(penalty(True), penalty(False))


def test_layers_of_one_x_may_be_written_to():
    named = joined(True)
    own = list(named.values())
    results, changed = (by_layers(named, linear_by_each) for _ in range(2))
    changed[2].mul_(2)
    assert checks.same(changed, [results[0], results[1], 2 * results[2]])
    upstream = [torch.randn_like(y) for y in results]
    wanted = grad(results, own, [*upstream[:2], 2 * upstream[2]])
    assert checks.same(grad(changed, own, upstream), wanted)


@pytest.mark.parametrize("frozen", [("x",), ("w_q",), ("w_q", "w_k", "w_v"), ("x", "w_k", "b_v")])
def test_layers_of_one_x_give_what_is_wanted(frozen):
    named = joined(True, frozen)
    own = [t for t in named.values() if t.requires_grad]
    wide = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in named.items()}
    true_own = [t for t in wide.values() if t.requires_grad]

    def plainly(x, weights, biases):
        return tuple(map(partial(functional.linear, x), weights, biases))

    results, true = by_layers(named, linear_by_each), by_layers(wide, plainly)
    upstream = [torch.randn_like(y) for y in results]
    found = grad(results, own, upstream, create_graph=True)
    wanted = grad(true, true_own, [u.double() for u in upstream], create_graph=True)
    torch.testing.assert_close([t.double() for t in found], list(wanted), rtol=1e-4, atol=1e-4)
    assert found[0].requires_grad == wanted[0].requires_grad
    if "x" not in frozen and found[0].requires_grad:  # d_x has derivatives by the weights
        again = grad(found[0].square().sum(), own[1:2], allow_unused=True)[0]
        truth = grad(wanted[0].square().sum(), true_own[1:2], allow_unused=True)[0]
        assert (again is None) == (truth is None)
        if again is not None:
            torch.testing.assert_close(again.double(), truth, rtol=1e-3, atol=1e-3)


def test_another_precision_is_torch_s(started):
    checks.check_precision(started, "cpu")


def test_every_operand_is_split_once_an_axis_and_only_as_wanted(started):
    leaves, dy = checks.operands("cpu", checks.SMALL)
    product = [SPLIT, SPLIT, MULTIPLY]
    for wants in ((True, True), (True, False), (False, True)):
        own = [leaves[n].detach().requires_grad_(w) for n, w in zip(("x", "weight"), wants)]  # noqa: B905
        started.clear()
        y = linear(*own)
        assert started == product
        started.clear()
        y.backward(dy)
        assert started == product * sum(wants)


def test_a_product_that_does_not_pay_is_torch_s(started, monkeypatch):
    """y and d_x have too few results here, d_W has enough."""
    gates = linear_route
    shape = (20, 136, 140)
    monkeypatch.setattr(gates, "MIN_SPLIT_RESULTS", 136 * 140)
    assert checks.misses_linear("cpu", shape) == []
    assert started.count(MULTIPLY) == 1
    monkeypatch.setattr(gates, "MIN_SPLIT_RESULTS", 1 << 20)
    started.clear()
    leaves, dy = checks.operands("cpu", shape)
    torch_s = checks.step(leaves, dy, torch.nn.functional.linear)
    assert checks.same(checks.step(leaves, dy), torch_s) and not started


def test_ieee_please(started, monkeypatch):
    """FUSEDLIB_SPLIT=0."""
    gates = linear_route
    monkeypatch.setattr(gates, "SPLITTING_ALLOWED", False)
    leaves, dy = checks.operands("cpu", checks.SMALL)
    torch_s = checks.step(leaves, dy, torch.nn.functional.linear)
    assert checks.same(checks.step(leaves, dy), torch_s) and not started


def test_a_tensor_left_over_from_a_transform(started):
    leaves, _ = checks.operands("cpu", checks.SMALL)
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(leaves["x"].detach())
    assert torch.equal(linear(kept[0], leaves["weight"]), linear(leaves["x"], leaves["weight"]))
    assert started.count(MULTIPLY) == 2


def test_a_norm_s_output_is_computed_again_for_it(monkeypatch):
    """What the layer keeps is the norm's output, which need not be kept."""
    leaves, dy = checks.operands("cpu", checks.SMALL)
    own, calls, again = list(leaves.values()), [], recomputed._again
    monkeypatch.setattr(recomputed, "_again", lambda *given: calls.append(1) or again(*given))
    scale = torch.rand(checks.SMALL[1])

    def step(forgets: bool) -> list[torch.Tensor]:
        y = fusedlib.rms_norm(own[0], scale)
        z = linear(y, *own[1:])
        return [z.detach(), *grad(recompute_in_backward(y, z) if forgets else z, own, dy)]

    assert checks.same(step(True), step(False)) and len(calls) == 1


# --- the loss ------------------------------------------------------------------------------------


PADDED, WHOLE = 201, 224  # rows of logits


@pytest.mark.parametrize(
    ("settings", "vocabulary", "chunked"),
    [("plain", WHOLE, False), ("bias", PADDED, False),
     ("all, mean", PADDED, True), ("all, by token", WHOLE, False)],
)  # fmt: skip
def test_the_loss_by_the_same_product(started, monkeypatch, settings, vocabulary, chunked):
    from fusedlib.ops.loss import kernels

    loss_cases.cut_in_four(monkeypatch, kernels)
    tokens, width = 140, 136
    if chunked:
        monkeypatch.setattr(kernels, "LOGITS_BYTES", 60 * kernels.row_stride(vocabulary, 4) * 4)
        monkeypatch.setattr(kernels, "ROWS", 20)
    shape = tokens, width, vocabulary
    assert loss_cases.misses("cpu", "float32", shape, **loss_cases.SETTINGS[settings]) == []
    chunks = 3 if chunked else 1
    again = chunks if "token" in settings else 0
    assert started.count(MULTIPLY) == 3 * chunks + again


def test_the_loss_at_another_precision_is_torch_s(started):
    leaves, target, _ = loss_cases.drawn("cpu", "float32")
    with checks.matmul_settings("high", False):
        loss_cases.step(leaves, target)
    assert MULTIPLY not in started


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


def test_flops_are_those_of_torch_s_operators():
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


def test_flops_where_the_counter_was_there_first():
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


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_keeps_the_number_of_tokens_open(monkeypatch, name, strict):
    """Within any bounds: no code asks how many there are."""
    monkeypatch.undo()  # whether products are large enough to be split is asked again

    class Module(torch.nn.Module):
        def forward(self, x, w):
            return EXPORTED[name](x, w)

    x, w = torch.randn(1, 10, 512), torch.randn(520, 512)
    for most in (64, 600, 5_000_000):
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


@pytest.mark.parametrize("save", ["gate_up", "input"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_optimizer_that_steps_in_backward(save, reduction):
    """No backward reads a weight after its step, of which torch sees no change of version."""

    def loss(*operands):
        return fusedlib.linear_cross_entropy(*operands, reduction=reduction).mean()

    ours = OURS | {"mlp": partial(fusedlib.swiglu_mlp, save=save), "loss": loss}
    true = trained(TORCH, torch.float64)
    found, usual = (check.errors(trained(f, torch.float32), true) for f in (ours, TORCH))
    assert check.misses(found, usual, torch.float32) == []


# --- whole models --------------------------------------------------------------------------------


def patched_model(name="Llama", width=64, **switches):
    from llama_models import make

    plain = make(name, num_hidden_layers=1, hidden_size=width)
    patched = copy.deepcopy(plain)
    return plain, patched, fusedlib.apply_to(patched, **switches)


def test_a_model_s_projections_and_loss(started):
    from llama_models import misses_of, tokens

    plain, patched, report = patched_model("Qwen2", 256)  # long sums: see linear_checks.LONG
    assert len(report.replaced["linear"]) == 5
    assert misses_of(plain, patched, *tokens()) == []
    assert started.count(MULTIPLY) == 3 * 3  # q, k and v as one, o, and the loss
    started.clear()
    patched.eval()(tokens()[0])
    assert started.count(MULTIPLY) == 3


def test_tensors_that_leave_a_model_carry_nothing():
    """Where norms run by a kernel: their output was computed again by what hung on it."""
    from llama_models import tokens

    _, patched, _ = patched_model()
    given = []
    patched.model.norm.register_forward_pre_hook(lambda _, x: given.append(weakref.ref(x[0])))
    ids, _ = tokens()
    hidden = patched(ids, output_hidden_states=True).hidden_states[-1]
    assert hidden.grad_fn.name() == "RMSNormFunctionBackward" and not vars(hidden)
    file = io.BytesIO()
    torch.save(hidden, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), hidden)
    hidden.sum().backward()
    assert given[0]() is None


def test_a_model_s_projections_one_by_one(started):
    from llama_models import tokens

    ids, labels = tokens()
    off = {"mlp": False, "attention": False, "loss": False}
    plain, patched, report = patched_model(**off)
    assert len(report.replaced["linear"]) == 8
    loss, wanted = (m(ids, labels=labels).loss for m in (patched, plain))
    loss.backward()
    wanted.backward()
    assert started.count(MULTIPLY) == 3 * 8
    for ours, theirs in zip(patched.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    _, patched, _ = patched_model(linear=False, loss=False)
    started.clear()
    patched(ids, labels=labels).loss.backward()
    assert MULTIPLY not in started


def test_a_graph_of_a_whole_model():
    """One, and the model's own numbers."""
    from llama_models import tokens

    _, patched, _ = patched_model()
    torch._dynamo.reset()
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    ids, labels = tokens()
    weights = list(patched.parameters())
    found, wanted = (
        grad(m(ids, labels=labels).loss, weights) for m in (compiled, patched)
    )  # fmt: skip
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w)


# --- teeth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", checks.BROKEN)
def test_a_broken_layer_is_rejected(monkeypatch, tmp_path, fault):
    checks.broken(monkeypatch, tmp_path, fault)
    assert checks.misses_linear("cpu", checks.SMALL) != []


def test_broken_parts_are_rejected(monkeypatch):
    without_scales(monkeypatch)
    assert checks.misses_linear("cpu", checks.SMALL) != []
    assert checks.contract_misses_of("cpu", checks.SMALL, "normal") != []


def test_a_loss_whose_chunks_are_not_added_is_rejected(monkeypatch):
    from fusedlib.ops.loss import kernels

    shape = 140, 136, 201
    monkeypatch.setattr(kernels, "LOGITS_BYTES", 60 * kernels.row_stride(201, 4) * 4)
    monkeypatch.setattr(kernels, "ROWS", 20)
    add = kernels._add_product
    monkeypatch.setattr(kernels, "_add_product", lambda total, *rest: add(None, *rest))
    assert loss_cases.misses("cpu", "float32", shape) != []


def test_gradients_by_torch_where_backward_is_differentiated(started):
    leaves, dy = checks.operands("cpu", checks.SMALL)
    y = linear(**leaves)
    started.clear()
    d_x, _ = grad(y, (leaves["x"], leaves["weight"]), dy, create_graph=True)
    assert not started and d_x.requires_grad
