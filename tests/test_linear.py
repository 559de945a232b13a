"""`fusedlib.linear` and `fusedlib.Linear`: in plain PyTorch, in Triton's interpreter, where all
products are split, and on a GPU. What looks at all operators stands here too: counters of FLOPs,
exports, optimizers that step in backward, whole models in fp32.
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
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, grad, gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.utils.prune import l1_unstructured
from torch.utils.flop_counter import FlopCounterMode

import fusedlib
import gradient_checks
import llama_models
import loss_cases
from broken_kernels import without_scales
from called import Called, note_launches
from fusedlib import Linear, linear, reference
from fusedlib.bench import check
from fusedlib.bench.settings import matmul_settings
from fusedlib.ops import recomputed
from fusedlib.ops.fused_class import fuse
from fusedlib.ops.linear import operator as operators
from fusedlib.ops.linear import route
from fusedlib.ops.linear.function import linear_by_each
from fusedlib.ops.linear.split.product import SplitProduct
from fusedlib.ops.loss import kernels as loss_kernels
from fusedlib.ops.recomputed import recompute_in_backward
from fusedlib.patch.apply import FusedLinear
from gradient_checks import close, drawn, misses, same
from interpreter import BACKEND, INTERPRETED, passed_in_the_interpreter
from rewritten import rewritten
from split_families import FAMILIES, cut_for_the_interpreter
from split_families import misses as contract_misses

Shape = tuple[int, int, int]  # tokens, inputs, outputs
SMALL: Shape = (36, 40, 24)
# Several 128-tiles, ragged; sums so long that the parts' own error is not the largest.
LONG: Shape = (264, 256, 272)
# On a GPU all three products are split; ragged; d_x, of few results, is torch's.
EVEN, RAGGED, SOME = (2048, 2048, 2048), (2050, 1030, 2070), (384, 2560, 5120)
USUAL = {"cpu": SMALL, "cuda": RAGGED}
FEW_FAMILIES = [
    "rows that differ by 2^30",
    "terms that differ by 2^30",
    "positive",
    "learned tokens",
]
MULTIPLY, SPLIT = "_split_product_kernel", "_split_kernel"
# Rows that are not of this vocabulary may hold anything.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("part", ["0/2", "1/2"])
def test_in_the_interpreter(part):
    assert passed_in_the_interpreter("test_linear.py", part) > 30


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Products of any size are split; names of the kernels that ran."""
    if INTERPRETED:
        for name in ("MIN_SPLIT_SIZE", "MIN_SPLIT_RESULTS", "MIN_SPLIT_WORK"):
            monkeypatch.setattr(route, name, 1)
        cut_for_the_interpreter(monkeypatch)
    return note_launches(monkeypatch)


@pytest.fixture
def products(monkeypatch):
    """Sizes of the factors that are split from now on, product by product; a plan's are none."""
    sizes, original = [], SplitProduct.__call__

    def noted(self, a, b, below=None):
        if isinstance(a, Tensor):
            sizes.append((a.shape, b.shape))
        return original(self, a, b, below)

    monkeypatch.setattr(SplitProduct, "__call__", noted)
    return sizes


def operands(
    device: str, shape: Shape | None = None, dtype: str = "float32", bias: bool = True
) -> tuple[dict[str, Tensor], Tensor]:
    """Leaves by name, and dy."""
    tokens, inputs, outputs = shape or USUAL[device]
    kind = getattr(torch, dtype)
    leaves = {
        "x": drawn(device, kind, tokens, inputs, seed=0),
        "weight": drawn(device, kind, outputs, inputs, seed=1, scale=inputs**-0.5),
    }
    if bias:
        leaves["bias"] = drawn(device, kind, outputs, seed=2)
    leaves = {n: t.requires_grad_() for n, t in leaves.items()}
    return leaves, drawn(device, kind, tokens, outputs, seed=3)


def named(compute: Callable[..., Tensor]):
    return lambda **leaves: {"y": compute(**leaves)}


def misses_linear(
    device: str, shape: Shape, dtype: str = "float32", bias: bool = True,
    compute: Callable[..., Tensor] = linear,
) -> list[str]:  # fmt: skip
    """What the one tolerance rule rejects of y and the gradients."""
    leaves, dy = operands(device, shape, dtype, bias)
    return misses(named(compute), named(functional.linear), leaves, {"y": dy})


def step(leaves, dy: Tensor, compute: Callable[..., Tensor] = linear) -> list[Tensor]:
    return gradient_checks.results_of(compute, leaves, dy)


def contract_misses_of(
    device: str, shape: Shape, family: str, compute: Callable[..., Tensor] = linear
) -> list[str]:
    """Where an element of y, d_x or d_W errs by more than the docstring allows."""
    tokens, inputs, outputs = shape
    generator = torch.Generator().manual_seed(5)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    x, weight_t = FAMILIES[family](normal(tokens, inputs), normal(inputs, outputs))
    dy, _ = FAMILIES[family](normal(tokens, outputs), normal(outputs, inputs))
    x, weight, dy = (t.to(device).contiguous() for t in (x, weight_t.t(), dy))
    leaves = {"x": x.requires_grad_(), "weight": weight.requires_grad_()}
    y, d_x, d_weight = step(leaves, dy, compute)
    x, weight = x.detach(), weight.detach()
    pairs = {"y": (y, x, weight.t()), "d_x": (d_x, dy, weight), "d_W": (d_weight, dy.t(), x)}
    return [f"{name}: {miss}" for name, of in pairs.items() for miss in contract_misses(*of)]


# --- everywhere ----------------------------------------------------------------------------------


@pytest.mark.plain
def test_leading_dimensions(device):
    shape = USUAL[device]
    leaves, dy = operands(device)
    wanted, tokens = step(leaves, dy), shape[0]
    for leading in ((2, tokens // 2), (1, 2, tokens // 2), (tokens // 2, 1, 2)):
        deep = leaves | {"x": leaves["x"].detach().reshape(*leading, -1).requires_grad_()}
        y, d_x, *others = step(deep, dy.reshape(*leading, -1))
        assert y.shape == (*leading, shape[2]) and d_x.shape == (*leading, shape[1])
        actual = [y.reshape(wanted[0].shape), d_x.reshape(wanted[1].shape), *others]
        assert same(actual, wanted), leading
    one = linear(leaves["x"][0], leaves["weight"], leaves["bias"])
    assert one.shape == shape[2:] and close([one], [wanted[0][0]])


@pytest.mark.plain
def test_empty(device):
    shape = USUAL[device]
    leaves, _ = operands(device)
    for leading in ((0,), (3, 0), (0, 3)):
        x = torch.zeros(*leading, shape[1], device=device, requires_grad=True)
        y = linear(x, leaves["weight"], leaves["bias"])
        d_x, d_weight, d_bias = grad(y.sum(), (x, leaves["weight"], leaves["bias"]))
        assert y.shape == (*leading, shape[2]) and d_x.shape == x.shape
        assert not d_weight.any() and not d_bias.any()
    nothing = linear(torch.ones(3, 0, device=device), torch.ones(5, 0, device=device))
    assert nothing.shape == (3, 5) and not nothing.any()


@pytest.mark.plain
def test_strides(device):
    gradient_checks.check_layouts(linear, *operands(device))


@pytest.mark.plain
def test_frozen_subsets(device):
    """Gradients where they are wanted alone, and what is kept for them."""
    leaves, dy = operands(device)
    kept = []

    def noted(**own):
        kept.clear()
        with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            return linear(**own)

    for chosen in gradient_checks.subsets(noted, leaves, dy):
        factors = {"x": leaves["weight"], "weight": leaves["x"]}
        needed = sum(factors[name].numel() for name in chosen & factors.keys())
        assert sum(t.numel() for t in kept if t is not None) == needed, chosen


@pytest.mark.plain
def test_backward_twice(device):
    leaves, dy = operands(device)
    gradient_checks.check_repeated(linear, leaves, dy)
    gradient_checks.check_checkpointed(linear, leaves, dy)
    x = leaves["x"].detach().clone()
    y = linear(x, leaves["weight"])
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad(y, leaves["weight"], dy)


@pytest.mark.plain
def test_changed_in_place(device):
    shape = USUAL[device]
    for bias in (True, False):
        leaves, dy = operands(device, shape, bias=bias)
        leaves["x"] = leaves["x"].detach()[None].requires_grad_()
        gradient_checks.check_written_to(linear, leaves, dy[None])


@pytest.mark.plain
def test_second_derivatives(device):
    """As of torch's linear: a penalty on the gradient."""

    def penalty(compute, dtype):
        leaves, dy = operands(device)
        own = {n: t.detach().to(dtype).requires_grad_() for n, t in leaves.items()}
        dy = dy.to(dtype).requires_grad_()
        d_x, d_weight = grad(compute(**own).sin(), (own["x"], own["weight"]), dy, create_graph=True)
        wanted = *own.values(), dy
        return grad(d_x.square().sum() + d_weight.square().mean(), wanted)

    actual, true = penalty(linear, torch.float32), penalty(functional.linear, torch.float64)
    for f, t in zip(actual, true, strict=True):
        assert (f.double() - t).norm() <= 1e-5 * t.norm()


@pytest.mark.plain
def test_autocast(device):
    leaves, dy = operands(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        actual, wanted = (
            step(leaves, dy.bfloat16(), compute) for compute in (linear, functional.linear)
        )
        mixed = linear(leaves["x"].bfloat16(), leaves["weight"], leaves["bias"])
    assert actual[0].dtype == mixed.dtype == torch.bfloat16 and same(actual, wanted)


@pytest.mark.plain
def test_no_grad(device):
    gradient_checks.check_no_grad(linear, operands(device)[0])


@pytest.mark.plain
def test_functional_transforms(device):
    gradient_checks.check_transforms(linear, *operands(device))


@pytest.mark.plain
def test_transforms_of_backward(device):
    """Those that the forward did not see: batched gradients, and forward mode over a gradient."""
    leaves, dy = operands(device)
    own, both = list(leaves.values()), torch.stack([dy, 2 * dy])
    y, actual = linear(**leaves), {}
    for by, each in (("ours", y), ("torch", functional.linear(**leaves))):
        batched = grad(each, own, both, retain_graph=True, is_grads_batched=True)
        with forward_ad.dual_level():
            pushed = grad(each, own, forward_ad.make_dual(dy, -dy), retain_graph=True)
            actual[by] = [*batched, *(forward_ad.unpack_dual(d).tangent for d in pushed)]
    assert close(actual["ours"], actual["torch"])


@pytest.mark.plain
def test_subclasses(device):
    """They see torch's linear: they may have rules for that alone."""

    class Noting(Tensor):
        seen: list[str] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.seen.append(getattr(function, "__name__", ""))
            return super().__torch_function__(function, types, args, kwargs or {})

    leaves, _ = operands(device)
    y = linear(leaves["x"].detach().as_subclass(Noting), leaves["weight"], leaves["bias"])
    assert "linear" in Noting.seen and close([y.as_subclass(Tensor)], [linear(**leaves)])


@pytest.mark.plain
def test_other_dtypes(device):
    """Bit by bit torch's."""
    shape = USUAL[device]
    for dtype in ("bfloat16", "float16", "float64"):
        leaves, dy = operands(device, shape, dtype)
        assert same(step(leaves, dy), step(leaves, dy, functional.linear))


@pytest.mark.plain
def test_module(device):
    shape = USUAL[device]
    leaves, dy = operands(device)
    for bias in (True, False):
        plain = nn.Linear(shape[1], shape[2], bias, device=device)
        made = Linear(shape[1], shape[2], bias, device=device)
        made.load_state_dict(plain.state_dict())
        assert list(made.state_dict()) == list(plain.state_dict()) and str(made) == str(plain)
        shared = Linear.from_torch(plain.eval())
        assert shared.weight is plain.weight and shared.bias is plain.bias and not shared.training
        wanted = functional.linear(leaves["x"], plain.weight, plain.bias)
        for module in (made, shared):
            y = module(input=leaves["x"])
            assert close([y], [wanted])
            y.backward(dy)
        assert close([made.weight.grad], [plain.weight.grad])


# --- where products are split --------------------------------------------------------------------


def test_compiled(device):
    """In one graph for all lengths, right by the same rule; at another precision traced anew."""
    shape = USUAL[device]
    torch._dynamo.reset()
    graphs = []

    def backend(module, example_inputs):
        graphs.append([str(node.target) for node in module.graph.nodes])
        return module.forward

    counted = torch.compile(linear, fullgraph=True, dynamic=True, backend=backend)
    tokens, *sizes = shape
    for each in (tokens, tokens + 2, 2 * tokens):
        assert misses_linear(device, (each, *sizes), compute=counted) == []
    assert len(graphs) == 1 and "fusedlib.linear.default" in graphs[0]
    with matmul_settings("high", False):
        counted(**operands(device)[0])
    assert len(graphs) == 2 and "fusedlib.linear.default" not in graphs[1]
    torch._dynamo.reset()
    compiled = torch.compile(linear, fullgraph=True, backend=BACKEND)
    assert misses_linear(device, shape, compute=compiled) == []
    assert misses_linear(device, shape, bias=False, compute=compiled) == []


def test_operator(device):
    shape = USUAL[device]
    leaves, _ = operands(device)
    torch.library.opcheck(operators.linear_operator, tuple(leaves.values()))
    deep = leaves["x"].detach().reshape(2, shape[0] // 2, -1)
    torch.library.opcheck(operators.linear_operator, (deep, leaves["weight"], None))


def test_watched(device):
    """A dispatch mode sees operators, in the backward too, and the same numbers."""
    leaves, dy = operands(device)
    wanted = step(leaves, dy)
    with Called() as called:
        actual = step(leaves, dy)
    assert same(actual, wanted)
    assert called.names.count("linear_forward") == 1 and called.names.count("split_mm") == 2


def test_another_precision_is_torch_s(device, started, products):
    """At TF32 torch's runs, also when it is set between forward and backward."""
    shape = SMALL if INTERPRETED else EVEN
    leaves, dy = operands(device, shape)
    y = linear(**leaves)
    with matmul_settings("high", False):
        started.clear()
        products.clear()
        grad(y, list(leaves.values()), dy)
        assert same(step(leaves, dy), step(leaves, dy, functional.linear))
    assert not started and not products


def test_fake(device):
    leaves, dy = operands(device)
    with FakeTensorMode() as mode:
        own = {n: mode.from_tensor(t) for n, t in leaves.items()}
        y, *gradients = step(own, mode.from_tensor(dy))
    assert y.shape == dy.shape
    assert [g.shape for g in gradients] == [t.shape for t in leaves.values()]


@pytest.mark.interpreter
@pytest.mark.parametrize("bias", [True, False])
def test_linear_and_gradients_vs_float64(device, started, bias):
    assert misses_linear(device, LONG, bias=bias) == []
    assert started.count(MULTIPLY) == 3


@pytest.mark.parametrize("family", FEW_FAMILIES if INTERPRETED else FAMILIES)
def test_linear_and_gradients_vs_the_contract(device, family):
    shape = RAGGED if device == "cuda" else (140, 300, 134)
    assert contract_misses_of(device, shape, family) == []


def joined(bias, frozen=(), tokens=136, inputs=140):
    """x, three layers' weights and biases; and the names of those that want gradients."""
    leaves, _ = operands("cpu", (tokens, inputs, 264), bias=bias)
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


@pytest.mark.interpreter
@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_x_are_one_product(device, started, bias):
    """Of the bits of the joined weight, which is not kept."""
    named = joined(bias)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        results = by_layers(named, linear_by_each)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for n, t in named.items() if n[0] != "b"}
    upstream = [torch.randn_like(y) for y in results]
    actual = grad(results, list(named.values()), upstream)
    assert started.count(MULTIPLY) == 3
    biases = [named[f"b_{n}"] for n in "qkv"] if bias else None
    weight = torch.cat([named[f"w_{n}"] for n in "qkv"])
    y = linear(named["x"], weight, torch.cat(biases) if bias else None)
    assert torch.equal(torch.cat(results, dim=-1), y)
    wanted = grad(y, list(named.values()), torch.cat(upstream, dim=-1))
    assert same(actual, wanted)


@pytest.mark.interpreter
def test_gradients_are_of_what_forward_read(device):
    for bias in (True, False):
        gradient_checks.check_what_forward_read(linear, *operands(device, bias=bias))

    def together(**own):
        return torch.cat(by_layers(own, linear_by_each), dim=1)

    named = joined(True, tokens=20, inputs=24)
    gradient_checks.check_what_forward_read(together, named, torch.randn(20, 264))


@pytest.mark.interpreter
def test_second_derivatives_are_of_what_forward_read(device):
    """In the graph of the weight, whose values they do not have any more."""
    leaves, dy = operands(device)

    def penalty(exchanged):
        own = {n: t.detach().requires_grad_() for n, t in leaves.items()}
        y = linear(**own)
        if exchanged:
            for operand in own.values():
                operand.data = torch.zeros_like(operand)
        d_x, d_weight = grad(y, (own["x"], own["weight"]), dy, create_graph=True)
        return [d_x, d_weight, *grad(d_x.sin().sum() + d_weight.cos().sum(), own["weight"])]

    assert same(penalty(True), penalty(False))


@pytest.mark.interpreter
def test_layers_of_one_x_may_be_written_to(device):
    named = joined(True)
    own = list(named.values())
    results, changed = (by_layers(named, linear_by_each) for _ in range(2))
    changed[2].mul_(2)
    assert same(changed, [results[0], results[1], 2 * results[2]])
    upstream = [torch.randn_like(y) for y in results]
    wanted = grad(results, own, [*upstream[:2], 2 * upstream[2]])
    assert same(grad(changed, own, upstream), wanted)


@pytest.mark.interpreter
@pytest.mark.parametrize("frozen", [("x",), ("w_q",), ("w_q", "w_k", "w_v"), ("x", "w_k", "b_v")])
def test_layers_of_one_x_give_what_is_wanted(device, frozen):
    named = joined(True, frozen)
    own = [t for t in named.values() if t.requires_grad]
    wide = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in named.items()}
    true_own = [t for t in wide.values() if t.requires_grad]

    def plainly(x, weights, biases):
        return tuple(map(partial(functional.linear, x), weights, biases))

    results, true = by_layers(named, linear_by_each), by_layers(wide, plainly)
    upstream = [torch.randn_like(y) for y in results]
    actual = grad(results, own, upstream, create_graph=True)
    wanted = grad(true, true_own, [u.double() for u in upstream], create_graph=True)
    torch.testing.assert_close([t.double() for t in actual], list(wanted), rtol=1e-4, atol=1e-4)
    assert actual[0].requires_grad == wanted[0].requires_grad
    if "x" not in frozen and actual[0].requires_grad:  # d_x has derivatives by the weights
        again = grad(actual[0].square().sum(), own[1:2], allow_unused=True)[0]
        truth = grad(wanted[0].square().sum(), true_own[1:2], allow_unused=True)[0]
        assert (again is None) == (truth is None)
        if again is not None:
            torch.testing.assert_close(again.double(), truth, rtol=1e-3, atol=1e-3)


@pytest.mark.interpreter
def test_every_operand_is_split_once_an_axis_and_only_as_wanted(device, started):
    leaves, dy = operands(device)
    product = [SPLIT, SPLIT, MULTIPLY]
    for wants in ((True, True), (True, False), (False, True)):
        own = [leaves[n].detach().requires_grad_(w) for n, w in zip(("x", "weight"), wants)]  # noqa: B905
        started.clear()
        y = linear(*own)
        assert started == product
        started.clear()
        y.backward(dy)
        assert started == product * sum(wants)


@pytest.mark.interpreter
def test_a_product_that_does_not_pay_is_torch_s(device, started, monkeypatch):
    """y and d_x have too few results here, d_W has enough."""
    shape = (20, 136, 140)
    monkeypatch.setattr(route, "MIN_SPLIT_RESULTS", 136 * 140)
    assert misses_linear(device, shape) == []
    assert started.count(MULTIPLY) == 1
    monkeypatch.setattr(route, "MIN_SPLIT_RESULTS", 1 << 20)
    started.clear()
    leaves, dy = operands(device, shape)
    torch_s = step(leaves, dy, functional.linear)
    assert same(step(leaves, dy), torch_s) and not started


@pytest.mark.interpreter
def test_ieee_please(device, started, monkeypatch):
    """FUSEDLIB_SPLIT=0."""
    monkeypatch.setattr(route, "SPLITTING_ALLOWED", False)
    leaves, dy = operands(device)
    torch_s = step(leaves, dy, functional.linear)
    assert same(step(leaves, dy), torch_s) and not started


@pytest.mark.interpreter
def test_a_tensor_left_over_from_a_transform(device, started):
    leaves, _ = operands(device)
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(leaves["x"].detach())
    assert torch.equal(linear(kept[0], leaves["weight"]), linear(leaves["x"], leaves["weight"]))
    assert started.count(MULTIPLY) == 2


@pytest.mark.interpreter
def test_a_norm_s_output_is_computed_again_for_it(device, monkeypatch):
    """What the layer keeps is the norm's output, which need not be kept."""
    leaves, dy = operands(device)
    own, calls, again = list(leaves.values()), [], recomputed._again
    monkeypatch.setattr(recomputed, "_again", lambda *given: calls.append(1) or again(*given))
    scale = torch.rand(SMALL[1])

    def step(forgets: bool) -> list[Tensor]:
        y = fusedlib.rms_norm(own[0], scale)
        z = linear(y, *own[1:])
        return [z.detach(), *grad(recompute_in_backward(y, z) if forgets else z, own, dy)]

    assert same(step(True), step(False)) and len(calls) == 1


# --- the loss ------------------------------------------------------------------------------------


PADDED, WHOLE = 201, 224  # rows of logits


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("settings", "vocabulary", "chunked"),
    [("plain", WHOLE, False), ("all, mean", PADDED, True), ("all, by token", WHOLE, False)],
)  # fmt: skip
def test_the_loss_by_the_same_product(device, started, monkeypatch, settings, vocabulary, chunked):
    loss_cases.cut_in_four(monkeypatch, loss_kernels)
    tokens, width = 140, 136
    if chunked:
        row_bytes = loss_kernels.row_stride(vocabulary, 4) * 4
        monkeypatch.setattr(loss_kernels, "LOGITS_BYTES", 60 * row_bytes)
        monkeypatch.setattr(loss_kernels, "ROWS", 20)
    shape = tokens, width, vocabulary
    assert loss_cases.misses(device, "float32", shape, **loss_cases.SETTINGS[settings]) == []
    chunks = 3 if chunked else 1
    again = chunks if "token" in settings else 0
    assert started.count(MULTIPLY) == 3 * chunks + again


@pytest.mark.interpreter
def test_the_loss_at_another_precision_is_torch_s(device, started):
    leaves, target, _ = loss_cases.drawn(device, "float32")
    with matmul_settings("high", False):
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
def test_an_export_keeps_the_number_of_tokens_open(device, monkeypatch, name):
    """Within any bounds: no code asks how many there are."""
    monkeypatch.undo()  # whether products are large enough to be split is asked again

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


def patched_model(name="Llama", width=64, **switches):
    plain = llama_models.make(name, num_hidden_layers=1, hidden_size=width)
    patched = copy.deepcopy(plain)
    return plain, patched, fusedlib.apply_to(patched, **switches)


@pytest.mark.interpreter
def test_a_model_s_projections_and_loss(device, started):
    plain, patched, report = patched_model("Qwen2", 256)  # long sums: see linear_LONG
    assert len(report.replaced["linear"]) == 5
    assert llama_models.misses_of(plain, patched, *llama_models.tokens()) == []
    assert started.count(MULTIPLY) == 3 * 3  # q, k and v as one, o, and the loss
    started.clear()
    patched.eval()(llama_models.tokens()[0])
    assert started.count(MULTIPLY) == 3


@pytest.mark.interpreter
def test_tensors_that_leave_a_model_carry_nothing(device):
    """Where norms run by a kernel: their output was computed again by what hung on it."""
    _, patched, _ = patched_model()
    given = []
    patched.model.norm.register_forward_pre_hook(lambda _, x: given.append(weakref.ref(x[0])))
    ids, _ = llama_models.tokens()
    hidden = patched(ids, output_hidden_states=True).hidden_states[-1]
    assert hidden.grad_fn.name() == "RMSNormFunctionBackward" and not vars(hidden)
    file = io.BytesIO()
    torch.save(hidden, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), hidden)
    hidden.sum().backward()
    assert given[0]() is None


@pytest.mark.interpreter
def test_a_model_s_projections_one_by_one(device, started):
    ids, labels = llama_models.tokens()
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


@pytest.mark.interpreter
def test_a_graph_of_a_whole_model(device):
    """One, and the model's own numbers."""
    _, patched, _ = patched_model()
    torch._dynamo.reset()
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    ids, labels = llama_models.tokens()
    weights = list(patched.parameters())
    actual, wanted = (
        grad(m(ids, labels=labels).loss, weights) for m in (compiled, patched)
    )  # fmt: skip
    for f, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(f, w)


@pytest.mark.interpreter
def test_broken_parts_are_rejected(device, monkeypatch):
    without_scales(monkeypatch)
    assert misses_linear(device, SMALL) != []
    assert contract_misses_of(device, SMALL, "normal") != []


@pytest.mark.interpreter
def test_a_loss_whose_chunks_are_not_added_is_rejected(device, monkeypatch):
    shape = 140, 136, 201
    monkeypatch.setattr(loss_kernels, "LOGITS_BYTES", 60 * loss_kernels.row_stride(201, 4) * 4)
    monkeypatch.setattr(loss_kernels, "ROWS", 20)
    add = loss_kernels._add_product
    monkeypatch.setattr(loss_kernels, "_add_product", lambda total, *rest: add(None, *rest))
    assert loss_cases.misses(device, "float32", shape) != []


@pytest.mark.interpreter
def test_gradients_by_torch_where_backward_is_differentiated(device, started):
    leaves, dy = operands(device)
    y = linear(**leaves)
    started.clear()
    d_x, _ = grad(y, (leaves["x"], leaves["weight"]), dy, create_graph=True)
    assert not started and d_x.requires_grad


# --- teeth ---------------------------------------------------------------------------------------

# What stands in `fusedlib.ops.linear.operator`, what the fault has there.
BROKEN = {
    "bias left out": ("y += bias", "pass"),
    "d_b of the first tokens": ("rows.sum(0)", "rows[1:].sum(0)"),
    "d_W of other tokens": ("product(rows.t(),", "product(rows.roll(1, 0).t(),"),
    "d_x a thousandth off": ("product(rows, weight)", "product(rows * 1.001, weight)"),
    "y a thousandth off": ("split_mm(rows, weight.t())", "split_mm(rows * 1.001, weight.t())"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_layer_is_rejected(device, monkeypatch, tmp_path, fault):
    broken = rewritten(monkeypatch, tmp_path, operators, *BROKEN[fault])
    monkeypatch.setattr(operators, "LinearFunction", broken.LinearFunction)
    assert misses_linear(device, USUAL[device]) != []


# --- in plain PyTorch ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_plain_pytorch_vs_float64(dtype):
    assert misses_linear("cpu", LONG, dtype) == []


def test_derivatives_of_both_orders_in_float64():
    shapes = (2, 3, 5), (4, 5), (4,)
    operands = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert gradcheck(linear, operands) and gradgradcheck(linear, operands)


def test_a_module_is_drawn_as_torch_s():
    for bias in (True, False):
        torch.manual_seed(3)
        plain = nn.Linear(7, 5, bias, dtype=torch.float64)
        torch.manual_seed(3)
        made = Linear(7, 5, bias, dtype=torch.float64)
        assert all(map(torch.equal, made.parameters(), plain.parameters()))
    assert isinstance(made, nn.Linear) and Linear(7, 5, device="meta").weight.is_meta
    assert torch.equal(copy.deepcopy(made).weight, made.weight)


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
        (lambda: linear(X[:, :7], W), r"x must be \(..., 8\) for weight \(5, 8\), got \(3, 7\)"),
        (lambda: linear(X, W[0]), r"weight must be \(out_features, in_features\), got \(8,\)"),
        (lambda: linear(X, W, B[:4]), r"bias must be \(5,\) for weight \(5, 8\), got \(4,\)"),
        (lambda: linear(X, W, B[:, None]), r"bias must be \(5,\).*got \(5, 1\)"),
        (lambda: linear(X, W.half()), "weight is torch.float16, x is torch.float32.*autocast"),
        (lambda: linear(X, W, B.double()), "bias is torch.float64, x is torch.float32"),
        (lambda: linear(X, W.to("meta")), "weight is on meta, x on cpu"),
        (lambda: linear(X, W, B.to("meta")), "bias is on meta, x on cpu"),
        (lambda: Linear(0, 3), "in_features must be a whole number of at least 1, got 0"),
        (lambda: Linear.from_torch(nn.Linear(0, 3)), "in_features must be .* at least 1, got 0"),
        (lambda: Linear(True, 3), "in_features must be a whole number of at least 1, got True"),
        (lambda: Linear(3, 2.5), "out_features must be a whole number of at least 1, got 2.5"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_what_is_no_tensor_is_refused(name):
    operands = {"x": X, "weight": W, "bias": B} | {name: [1.0]}
    with pytest.raises(TypeError, match=rf"{name} must be a torch.Tensor, got the list \[1.0\]"):
        linear(**operands)


def test_traced_by_torch_fx():
    layer, x = Linear(8, 5), torch.randn(3, 8)
    assert torch.equal(torch.fx.symbolic_trace(layer)(x), layer(x))


def test_what_has_no_strides_is_torch_s():
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    wanted = functional.linear(x, weight)
    nested = torch.nested.nested_tensor([x, x[:2]])
    torch.testing.assert_close(linear(nested, weight).unbind()[0], wanted)
    for operands in ((x.to_sparse(), weight), (x, weight.to_sparse()), (x.to_sparse_csr(), weight)):
        torch.testing.assert_close(linear(*operands), wanted)


# --- on a GPU alone ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "count"), [(EVEN, 3), (RAGGED, 3), (SOME, 2)], ids=str)
def test_errors_vs_cublas(products, shape, count):
    """Twice, the second time with kept launches."""
    leaves, dy = operands("cuda", shape)
    wide = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}
    true = step(wide, dy.double(), functional.linear)
    usual = step(leaves, dy, functional.linear)
    for _ in range(2):
        products.clear()
        actual = step(leaves, dy)
        assert len(products) == count
        own, its = (
            [((f - t).norm() / t.norm()).item() for f, t in zip(each, true, strict=True)][:3]
            for each in (actual, usual)
        )
        assert all(o <= max(0.7 * i, 3e-7) or o == i for o, i in zip(own, its, strict=True)), (
            own, its,
        )  # fmt: skip
    assert misses_linear("cuda", shape) == []


@pytest.mark.gpu
def test_small_ones_and_other_dtypes_are_torch_s(products):
    for dtype, shape in (("float32", (256, 512, 512)), ("bfloat16", EVEN)):
        leaves, dy = operands("cuda", shape, dtype)
        actual = step(leaves, dy)
        assert same(actual, step(leaves, dy, functional.linear))
    assert not products


@pytest.mark.gpu
def test_as_much_is_kept_as_by_torch():
    leaves, _ = operands("cuda", EVEN)

    def kept(compute) -> int:
        before = torch.cuda.memory_allocated()
        y = compute(**leaves)
        return torch.cuda.memory_allocated() - before - y.numel() * 4

    for compute in (linear, functional.linear):  # whose first call keeps a workspace
        kept(compute)
    assert kept(linear) == kept(functional.linear) == 0


@pytest.mark.gpu
def test_a_cuda_graph_replays_what_a_call_gives_bit_by_bit():
    leaves, dy = operands("cuda", RAGGED)
    leaves["weight"].data[7] *= 2.0**20
    gradient_checks.check_cuda_graph(lambda: step(leaves, dy), lambda: leaves["x"].mul_(-0.5))


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [10000, 10016], ids=["padded", "whole"])
@pytest.mark.parametrize("settings", ["plain", "all, mean", "all, by token"])
def test_the_loss_vs_float64(products, settings, vocabulary):
    shape = 1024, 1024, vocabulary
    assert loss_cases.misses("cuda", "float32", shape, **loss_cases.SETTINGS[settings]) == []
    assert len(products) >= 3


@pytest.mark.gpu
def test_the_loss_in_chunks_vs_float64(monkeypatch, products):
    from fusedlib.ops.loss import kernels

    monkeypatch.setattr(kernels, "LOGITS_BYTES", 1024 * 10016 * 4)
    assert loss_cases.misses("cuda", "float32", (3000, 1024, 10016)) == []
    assert len(products) == 8  # of three chunks; the last d_hidden, 952 by 1024, is too small


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
def test_a_whole_fp32_model_vs_the_plain_one(products):
    plain, patched, ids = fp32_pair()
    assert llama_models.misses_of(plain, patched, ids, ids) == []
    # Of two layers q, o and the MLP, and of the loss; k and v are too small to be split.
    assert len(products) == 2 * (3 + 3 + 6) + 3


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


@pytest.mark.gpu
def test_two_layers_of_one_shape_on_two_streams():
    layers = [fusedlib.Linear(2048, 2048, device="cuda") for _ in range(2)]
    x = torch.randn(2048, 2048, device="cuda")
    wanted = [layer(x) for layer in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    actual = []
    for layer, stream in zip(layers, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            actual.append(layer(x))
    torch.cuda.synchronize()
    assert same(actual, wanted)
    assert isinstance(layers[0], nn.Linear)
