"""`linear_cross_entropy` and `linear_log_probs`: in plain PyTorch, in Triton's interpreter and on a
GPU.
"""

import gc
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

import fusedlib
import gradient_checks
import limits
from fusedlib import (
    LinearCrossEntropyLoss,
    LinearLogProbs,
    linear_cross_entropy,
    linear_cross_entropy_and_accuracy,
    linear_log_probs,
    reference,
)
from gradient_checks import close, results_of, same
from interpreter import BACKEND, INTERPRETED, passed_in_the_interpreter
from loss_cases import (
    ALL,
    LOG_PROBS,
    LOSS,
    SETTINGS,
    SHAPE,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Operation,
    cut_in_four,
    drawn,
    misses,
    step,
    wide,
)
from rewritten import rewritten

kernels = pytest.importorskip("fusedlib.ops.loss.kernels")
from fusedlib.ops.loss import operator as ops  # noqa: E402 (needs Triton)

# Rows that are not of this vocabulary may hold anything.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# Bytes with which TOKENS have chunks of five; what fp32 sums of d_W take is 4·VOCABULARY·WIDTH.
CHUNKS_OF_FIVE = {"float32": 5 * 224 * 4, "bfloat16": 6432, "float16": 6432}
ALL_LOG_PROBS = {"bias": True, "temperature": 0.7, "softcap": 2.0}
BOTH = LOG_PROBS.outputs
# What is asked for by name, and how it is set where nothing else is said.
OPERATIONS = {
    "mean": (LOSS, {"bias": True, "token_weights": True}),
    "by token": (LOSS, {"bias": True, "reduction": "none"}),
    "log_probs": (LOG_PROBS, {"bias": True}),
}


@pytest.mark.parametrize("part", ["0/2", "1/2"])
def test_in_the_interpreter(part):
    assert passed_in_the_interpreter("test_loss.py", part) > 50


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    if INTERPRETED:
        cut_in_four(monkeypatch, kernels)


CUT = kernels.block_and_warps


def cut_into_slices(monkeypatch, module, slice_bytes: int = 4096) -> None:
    """Several slices of the vocabulary, each of several blocks, in the interpreter."""
    if INTERPRETED:
        monkeypatch.setattr(module, "LOGITS_BYTES", slice_bytes)
        monkeypatch.setattr(module, "SCALED_BLOCK", 32)
        monkeypatch.setattr(module, "block_and_warps", CUT)


@pytest.fixture
def slices(few_blocks, monkeypatch):
    cut_into_slices(monkeypatch, kernels)


@pytest.fixture(params=OPERATIONS)
def name(request, few_blocks, monkeypatch):
    if request.param == "log_probs":
        cut_into_slices(monkeypatch, kernels, 8192)  # two
    return request.param


def bound(operation: Operation, target: Tensor, **settings) -> Callable[..., Tensor]:
    """A function of leaves by name with one result."""

    def function(**leaves: Tensor) -> Tensor:
        outputs = operation.compute(**leaves, **{operation.target: target}, **settings)
        return outputs if isinstance(outputs, Tensor) else torch.stack(outputs)

    return function


def case(name: str, device: str, dtype: str = "float32", **settings):
    """Such a function, its leaves, and what flows back to its result."""
    operation, usual = OPERATIONS[name]
    leaves, target, settings = drawn(device, dtype, **usual | settings)
    function = bound(operation, target, **settings)
    y = function(**leaves)
    return function, leaves, torch.randn_like(y)


# --- against float64 -----------------------------------------------------------------------------

HALVES = {"bfloat16": ("plain", "all, mean", "all, by token"),
          "float16": ("only smoothing", "all, sum", "all, by token")}  # fmt: skip


@pytest.mark.plain
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [*(("float32", settings) for settings in SETTINGS),
     *((dtype, settings) for dtype, chosen in HALVES.items() for settings in chosen)],
)  # fmt: skip
def test_loss_and_gradients_vs_float64(device, dtype, settings):
    shape = (133, 64, 40003) if device == "cuda" else SHAPE
    assert misses(device, dtype, shape, **SETTINGS[settings]) == []


@pytest.mark.plain
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [("float32", {}), ("float32", {"ignore_index": 7}), ("float32", {"temperature": 0.7}),
     *((dtype, ALL_LOG_PROBS) for dtype in ("float32", "bfloat16", "float16"))],
    ids=["plain", "a token ignored", "cooler", "all", "all-bfloat16", "all-float16"],
)  # fmt: skip
@pytest.mark.parametrize("of", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", *BOTH])
def test_log_probs_and_gradients_vs_float64(slices, device, monkeypatch, dtype, settings, of):
    """Of both outputs, and where something flows back to one alone."""
    shape = SHAPE
    if device == "cuda":
        shape = 517, 128, 50257
        monkeypatch.setattr(kernels, "LOGITS_BYTES", 2**25)
        weight = torch.empty(50257, 128, dtype=getattr(torch, dtype), device="meta")
        assert kernels.slices(517, weight).rows < 50257
    assert misses(device, dtype, shape, operation=LOG_PROBS, of=of, **settings) == []


# Tokens, hidden, vocabulary: rows of one block and of several, ragged, aligned, of one column.
SHAPES = [(517, 384, 1003), (300, 264, 50257), (130, 512, 151936), (33, 77, 16385), (1030, 16, 16),
          (1, 1, 1)]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_shapes_vs_float64(shape, dtype):
    assert misses("cuda", dtype, shape) == [] == misses("cuda", dtype, shape, **ALL)
    for settings in ({}, ALL_LOG_PROBS):
        assert misses("cuda", dtype, shape, operation=LOG_PROBS, **settings) == []


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [("float32", "all, mean"), ("bfloat16", "all, mean"), ("float16", "all, by token")],
)
def test_in_chunks_vs_float64(device, dtype, settings):
    shape, memory = SHAPE, CHUNKS_OF_FIVE[dtype]
    if device == "cuda":
        shape, memory = (517, 128, 50257), 2**25
        weight = torch.empty(50257, 128, dtype=getattr(torch, dtype), device="meta")
        assert kernels.plan(517, weight, memory=memory).rows == 128
    chunked = partial(linear_cross_entropy, memory=memory)
    assert misses(device, dtype, shape, compute=chunked, **SETTINGS[settings]) == []


def test_sums_over_many_chunks_are_fp32(device):
    """30 chunks of two tokens each, or 74 of seven: added up in bf16, d_W would err tens of times
    more.
    """
    shape = _, width, vocabulary = (517, 8, 1003) if device == "cuda" else (60, 4, 40)
    leaves, target, _ = drawn(device, "bfloat16", shape)
    wanted = step(leaves, target, reduction="sum")
    chunked = partial(linear_cross_entropy, memory=4 * width * vocabulary)
    actual = step(leaves, target, chunked, reduction="sum")
    off = (actual[2].double() - wanted[2].double()).norm() / wanted[2].double().norm()
    assert off < torch.finfo(torch.bfloat16).eps / 2
    assert misses(device, "bfloat16", shape, compute=chunked) == []


@pytest.mark.plain
def test_one_class_and_few(device):
    for dtype, vocabulary in (("float32", 1), ("bfloat16", 64), ("float16", 65)):
        assert misses(device, dtype, (TOKENS, WIDTH, vocabulary), **ALL) == []
    leaves, target, _ = drawn(device, "float32", (TOKENS, WIDTH, 1))
    assert not any(t.any() for t in step(leaves, target))
    actual = results_of(bound(LOG_PROBS, target), leaves, torch.ones(2, TOKENS, device=device))
    assert not any(t.any() for t in actual)


@pytest.mark.plain
def test_huge_logits(slices, device):
    """±10⁴, where a softmax that subtracts no maximum, or a rounded one, is far off."""
    for dtype in ("float32", "float16"):
        for settings in ({}, {**ALL, "z_loss": 1e-4}):  # 1e-2 takes fp16 past its largest number
            assert misses(device, dtype, spread=3e3, **settings) == []
        for of in (BOTH, BOTH[:1]):  # of entropies alone 10⁻¹⁸, which float64 rounds to 0 as well
            assert misses(device, dtype, spread=3e3, operation=LOG_PROBS, bias=True, of=of) == []
    leaves, target, _ = drawn(device, "float32")
    for extreme in (float("inf"), float("nan")):
        with torch.no_grad():
            leaves["weight"][5, 0] = extreme
        assert linear_cross_entropy(**leaves, target=target).isnan()


@pytest.mark.parametrize(
    ("magnitude", "softcap"),
    [(1e-3, 0.0), (1.0, 1.0), (30.0, 0.0), (30.0, 30.0), (1e4, 0.0), (1e4, 1.0)],
)
def test_a_row_keeps_its_bound(device, magnitude, softcap):
    """What the kernel's docstring promises of a row, in fp32."""
    for vocabulary in (1, 128256) if device == "cuda" else (VOCABULARY,):
        rows, smoothing, z_loss, unit = 8, 0.1, 1e-2, 2**-24
        stride = kernels.row_stride(vocabulary, 4)
        logits = (torch.randn(rows, stride, device=device) * magnitude)[:, :vocabulary]
        target = torch.randint(vocabulary, (rows,), device=device)
        losses, one = torch.empty(rows, device=device), torch.ones((), device=device)
        true = before = logits.double()
        slope = torch.ones_like(true)
        if softcap:
            true = softcap * torch.tanh(before / softcap)
            slope = 1 / torch.cosh(before / softcap).square()
        lse = true.logsumexp(-1)
        largest = torch.maximum(true.abs().amax(-1), lse.abs())
        one_hot = torch.nn.functional.one_hot(target, vocabulary)
        share = (1 - smoothing) * one_hot + smoothing / vocabulary
        true_losses = lse - (share * true).sum(-1) + z_loss * lse.square()
        p = true.softmax(-1)
        kernels.cross_entropy_rows(
            logits, target, None, None, one, losses, None,
            kernels.Settings(-100, smoothing, z_loss, softcap), gradient=True,
        )  # fmt: skip
        steps = 8 + torch.tensor(vocabulary).log2()
        squared = 1 + 2 * z_loss * largest
        capped = 20 * largest if softcap else torch.zeros_like(largest)
        bound = (steps * (1 + largest) + capped) * squared * unit
        assert ((losses - true_losses).abs() <= bound).all()
        times = (1 + 2 * z_loss * lse)[:, None]
        of_p = (2 * (steps + largest) + capped)[:, None] * p * times.abs() * unit
        off = (logits.double() - (p * times - share) * slope).abs()
        of_slope = (8 + 6 * before.abs() / softcap) * unit if softcap else 0.0
        rounding = (4 * unit + of_slope) * (p * times.abs() + share)
        assert (off <= (of_p + rounding) * slope + torch.finfo(torch.float32).tiny).all()


def test_compiled_in_one_graph(name, device):
    """With any shapes, and a mean with shapes of its own."""
    operation, _ = OPERATIONS[name]
    settings = ALL_LOG_PROBS if name == "log_probs" else SETTINGS[f"all, {name}"]
    for dynamic, sizes in ((None, (TOKENS,)), (True, (TOKENS, 9)))[name != "mean" :]:
        torch._dynamo.reset()
        compiled = torch.compile(
            operation.compute, fullgraph=True, dynamic=dynamic, backend=BACKEND
        )
        if name == "mean":
            compiled = partial(compiled, memory=CHUNKS_OF_FIVE["bfloat16"])
        for tokens in sizes:
            shape = tokens, WIDTH, VOCABULARY
            actual = misses(
                device, "bfloat16", shape, compute=compiled, operation=operation, **settings
            )
            assert actual == []
    if name == "log_probs":
        alone = partial(
            misses, device, "bfloat16", compute=compiled, operation=operation, **settings
        )
        assert alone(of=BOTH[:1]) == [] and alone(of=BOTH[1:]) == []


@pytest.mark.gpu
def test_tf32_is_torch_s():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert misses("cuda", "float32", (512, 384, 4096)) == []
    finally:
        torch.set_float32_matmul_precision(before)


# --- autograd, of both ---------------------------------------------------------------------------


@pytest.mark.plain
def test_what_any_function_keeps(name, device):
    """Strides, frozen operands, repeated and checkpointed backward, results written to, hooks."""
    compute, leaves, up = case(name, device)
    gradient_checks.check_layouts(compute, leaves, up)
    gradient_checks.check_subsets(compute, leaves, up)
    gradient_checks.check_checkpointed(compute, leaves, up)
    gradient_checks.check_written_to(compute, leaves, up)
    gradient_checks.check_no_grad(compute, leaves)
    for dtype in ("float32", "bfloat16"):
        compute, leaves, up = case(name, device, dtype)
        gradient_checks.check_repeated(compute, leaves, up)
    with torch.autograd.graph.save_on_cpu():
        actual = results_of(compute, leaves, up)
    assert same(actual, results_of(compute, leaves, up))


@pytest.mark.plain
def test_functional_transforms(name, device):
    gradient_checks.check_transforms(*case(name, device), by_row=False)


@pytest.mark.plain
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast(name, device, dtype):
    compute, leaves, up = case(name, device)
    with torch.autocast(device, dtype=dtype):
        y = compute(**leaves)
    actual = grad(y, list(leaves.values()), up)
    half = {n: t.detach().to(dtype).requires_grad_() for n, t in leaves.items()}
    assert y.dtype == torch.float32 and all(t.dtype == torch.float32 for t in actual)
    wanted, *gradients = results_of(compute, half, up.to(compute(**half)))
    assert same([y, *(t.to(dtype) for t in actual)], [wanted.float(), *gradients])


@pytest.mark.interpreter
def test_gradients_are_of_what_forward_read(name, device):
    operation, usual = OPERATIONS[name]
    more = ALL_LOG_PROBS if name == "log_probs" else ALL
    leaves, target, settings = drawn(device, "float32", **usual | more)
    others = target, *(settings[n] for n in settings.keys() & {"class_weights"})
    compute = bound(operation, target, **settings)
    up = torch.rand_like(compute(**leaves))
    gradient_checks.check_what_forward_read(compute, leaves, up, others)


@pytest.mark.interpreter
def test_a_second_derivative_and_later_transforms_are_refused(name, device):
    compute, leaves, _ = case(name, device, shape=(3, 8, 20), bias=name == "mean")
    gradient_checks.refuses_second_derivatives(compute, leaves)
    gradient_checks.refuses_transforms_of_backward(compute(**leaves), leaves["hidden"])
    for leaf in leaves.values():  # where the graph is not kept
        [first] = grad(compute(**leaves).sum(), leaf, create_graph=True, retain_graph=False)
        with pytest.raises(RuntimeError, match="no second derivative"):
            first.square().sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_derivatives_of_both_orders_of_the_loss_in_float64(reduction):
    leaves, target, settings = drawn("cpu", "float64", (5, 3, 7), **ALL | {"reduction": reduction})
    check_both_orders(LOSS, leaves, target, settings)


def test_derivatives_of_both_orders_of_log_probs_in_float64():
    check_both_orders(LOG_PROBS, *drawn("cpu", "float64", (5, 3, 7), **ALL_LOG_PROBS))


def check_both_orders(operation: Operation, leaves, target, settings) -> None:
    function = bound(operation, target, **settings)

    def positional(*operands):
        return function(**dict(zip(leaves, operands, strict=True)))

    own = tuple(leaves.values())
    assert positional(*own).dtype == torch.float64
    assert gradcheck(positional, own) and gradgradcheck(positional, own)


@pytest.mark.interpreter
def test_a_target_out_of_range_raises(name, device):
    operation, _ = OPERATIONS[name]
    leaves, target, _ = drawn(device, "float32")
    for wrong in (VOCABULARY, -1):
        labels = target.index_fill(0, torch.tensor([3]), wrong)
        settings = {"reduction": "none"} if name == "by token" else {}
        with pytest.raises(RuntimeError, match=r"neither in \[0, 201\) nor ignore_index"):
            bound(operation, labels, **settings)(**leaves)


@pytest.mark.interpreter
def test_what_is_frozen_costs_no_product(name, device, monkeypatch):
    monkeypatch.setattr(kernels, "LOGITS_BYTES", 2**29)
    products, torch_mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: products.append(1) or torch_mm(*a, **k))
    again = name != "mean"  # logits are computed again for backward
    for wants in ((False, False), (True, False), (False, True), (True, True)):
        compute, leaves, _ = case(name, device, bias=False)
        own = {n: t.detach().requires_grad_(w) for (n, t), w in zip(leaves.items(), wants)}  # noqa: B905
        products.clear()
        y = compute(**own).sum()
        if any(wants):
            y.backward()
        assert len(products) == 1 + sum(wants) + (again and any(wants))


# --- the loss alone ------------------------------------------------------------------------------


@pytest.mark.plain
def test_leading_dimensions(device):
    leaves, target, _ = drawn(device, "float32", bias=True)
    hidden = leaves["hidden"]
    deep = {**leaves, "hidden": hidden[:12].reshape(2, 2, 3, WIDTH)}
    losses = linear_cross_entropy(**deep, target=target[:12].reshape(2, 2, 3), reduction="none")
    flat = linear_cross_entropy(**leaves, target=target, reduction="none")
    assert losses.shape == (2, 2, 3) and close([losses.flatten()], [flat[:12]])
    one = linear_cross_entropy(hidden[12], leaves["weight"], target[12], bias=leaves["bias"])
    assert one.shape == () and close([one], [flat[12]])
    assert close([flat[target >= 0].mean()], [linear_cross_entropy(**leaves, target=target)])


@pytest.mark.plain
def test_targets_and_weights_of_any_stride(device):
    leaves, target, settings = drawn(device, "float32", token_weights=True)
    weights = torch.stack([settings["token_weights"]] * 2, dim=-1)[:, 0]
    apart = torch.stack([target, target], dim=-1)[:, 1]
    assert close(step(leaves, apart, token_weights=weights), step(leaves, target, **settings))


@pytest.mark.plain
def test_gradients_accumulate(device):
    leaves, target, _ = drawn(device, "float32", bias=True)
    loss, own = linear_cross_entropy(**leaves, target=target), list(leaves.values())
    up = torch.tensor(3.0, device=device)
    first = [t.clone() for t in grad(loss, own, up, retain_graph=True)]
    loss.backward(up)
    assert close([t.grad for t in own], first)
    assert not any(t.grad.requires_grad for t in own)
    linear_cross_entropy(**leaves, target=target).backward()
    assert close([t.grad for t in own], [t * (4 / 3) for t in first])


@pytest.mark.plain
def test_gradient_of_token_weights(device):
    leaves, target, settings = drawn(device, "float32", token_weights=True, z_loss=1e-2)
    leaves["token_weights"] = settings.pop("token_weights").requires_grad_()
    for reduction in ("mean", "sum", "none"):
        settings["reduction"] = reduction
        actual = step(leaves, target, **settings)
        true = step(wide(leaves), target, reference.linear_cross_entropy, **settings)
        assert all((f - t).norm() <= 1e-5 * t.norm() for f, t in zip(actual, true, strict=True))


@pytest.mark.plain
def test_nothing_to_learn(device):
    """All ignored, no tokens, weights of zero: losses and gradients as torch's."""

    def torch_s(hidden, weight, target, **settings):
        return cross_entropy(linear(hidden, weight).float(), target, **settings)

    leaves, target, _ = drawn(device, "float16")
    ignored = torch.full_like(target, -100)
    empty = {**leaves, "hidden": leaves["hidden"].detach()[:0].requires_grad_()}
    for own, labels in ((leaves, ignored), (empty, target[:0])):
        for settings in ({}, {"reduction": "sum"}, {"label_smoothing": 0.1},
                         {"reduction": "none"}):  # fmt: skip
            actual, wanted = step(own, labels, **settings), step(own, labels, torch_s, **settings)
            for f, w in zip(actual, wanted, strict=True):
                torch.testing.assert_close(f, w, rtol=0, atol=0, equal_nan=True)
            assert not any(t.any() for t in actual[1:])
    zeros = torch.zeros_like(target, dtype=torch.float32)
    summed = step(leaves, target, token_weights=zeros, reduction="sum")
    assert not any(t.any() for t in summed)
    loss, d_hidden, d_weight = step(leaves, target, token_weights=zeros)
    assert loss.isnan() and d_weight.isnan().all()
    assert d_hidden[target != -100].isnan().all() and not d_hidden[target == -100].any()


@pytest.mark.plain
@pytest.mark.parametrize("more", [{}, {**ALL, "token_weights": False}], ids=["plain", "all"])
@pytest.mark.parametrize(
    ("name", "weigh"),
    [*product(("mean", "sum", "none"), ("by ones", "by constants", "by leaves")),
     ("log_probs", "by ones")],
)  # fmt: skip
def test_an_ignored_row_gives_nothing_whatever_comes_from_above(device, name, weigh, more):
    """A batch of prompts alone has a loss divided by 0 tokens; torch's gradients of it are 0."""
    operation, more = LOSS, more | {"reduction": name}
    if name == "log_probs":
        operation, more = LOG_PROBS, ALL_LOG_PROBS if len(more) > 1 else {}
    leaves, some, settings = drawn(device, "float32", **more)
    for target, up in product((some, torch.full_like(some, -100)), (torch.inf, torch.nan)):
        ignored, own = target == -100, dict(leaves)
        if weigh != "by ones":
            weights = torch.rand(TOKENS, device=device).masked_fill(ignored, up)
            settings["token_weights"] = weights.requires_grad_(weigh == "by leaves")
            own |= {"token_weights": weights} if weigh == "by leaves" else {}
        outputs = operation.compute(**leaves, **{operation.target: target}, **settings)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert all(not y.ndim or not y[ignored].any() for y in outputs)
        ups = [torch.full_like(y, up) for y in outputs]
        gradients = dict(zip(own, grad(outputs, list(own.values()), ups), strict=True))
        for leaf in {"hidden", "token_weights"} & own.keys():
            assert not gradients[leaf][ignored].any(), leaf
            assert not gradients[leaf][~ignored].isfinite().any(), leaf
        for leaf in {"weight", "bias"} & own.keys():
            actual = gradients[leaf]
            assert not (actual.any() if ignored.all() else actual.isfinite().any()), leaf


def check_token_accuracy(device: str, dtype: str) -> None:
    leaves, target, _ = drawn(device, dtype)
    with torch.no_grad():
        for leaf in leaves.values():
            leaf.copy_((leaf * 2).round().clamp(-2, 2))
        leaves["weight"][VOCABULARY // 2 :] = leaves["weight"][: (VOCABULARY + 1) // 2].clone()
    best = linear(leaves["hidden"], leaves["weight"]).argmax(-1)
    target[1::2] = best[1::2]
    target[2] = best[2] + VOCABULARY // 2  # as large, and not the first
    valid = target != -100
    hits = ((best == target) & valid).float()
    assert hits[1] == 1 and hits[2] == 0 and 0 < hits.sum() < valid.sum()
    plain = linear_cross_entropy(**leaves, target=target)
    share = hits.sum() / valid.sum()
    for reduction, wanted in (("none", hits), ("mean", share), ("sum", share)):
        loss, accuracy = linear_cross_entropy_and_accuracy(
            **leaves, target=target, reduction=reduction
        )
        assert torch.equal(accuracy, wanted) and not accuracy.requires_grad
        if reduction == "mean":
            gradients = grad(loss, list(leaves.values()))
            assert close([loss, *gradients], [plain, *grad(plain, list(leaves.values()))])
    capped = linear_cross_entropy_and_accuracy(**leaves, target=target, softcap=50.0)
    assert torch.equal(capped[1], share)
    ignored = torch.full_like(target, -100)
    assert linear_cross_entropy_and_accuracy(**leaves, target=ignored)[1].isnan()


def check_accuracy_of_nan_is_no_hit(device: str) -> None:
    leaves, target, _ = drawn(device, "float32")
    target = target.where(target != 0, 1)
    with torch.no_grad():
        leaves["weight"][VOCABULARY - 2] = float("nan")  # of every token, behind all targets
        target[-1] = VOCABULARY - 3
    for own in (leaves, {name: leaf * float("nan") for name, leaf in leaves.items()}):
        for reduction in ("mean", "none"):
            _, hits = linear_cross_entropy_and_accuracy(**own, target=target, reduction=reduction)
            assert not hits.any()


@pytest.mark.plain
def test_token_accuracy(device):
    """As argmax of the logits has it: the first of the largest. Whole numbers have many of these,
    and products without rounding."""
    for dtype in ("float32", "bfloat16"):
        check_token_accuracy(device, dtype)
    check_accuracy_of_nan_is_no_hit(device)


@pytest.mark.interpreter
def test_the_loss_in_slices_of_several_blocks(slices, device):
    for name in ("all, by token", "by class, smoothed, z-loss"):
        assert misses(device, "float32", **SETTINGS[name] | {"reduction": "none"}) == []
    check_token_accuracy(device, "float32")
    check_accuracy_of_nan_is_no_hit(device)


@pytest.mark.plain
def test_gradients_of_a_mean_do_not_depend_on_the_weights_size(device):
    """In fp16 they neither vanish nor overflow: a mean's weights count by their shares."""
    leaves, target, settings = drawn(device, "float16", class_weights=True, token_weights=True)
    for name in ("class_weights", "token_weights"):
        true = step(wide(leaves), target, reference.linear_cross_entropy, **{name: settings[name]})
        for size in (1e-8, 1.0, 1e5):
            actual = step(leaves, target, **{name: settings[name] * size})
            for one, other in zip(actual, true, strict=True):
                assert (one - other).norm() <= 2e-2 * other.norm(), (name, size)


@pytest.mark.plain
def test_class_weights_are_torch_s(device):
    leaves, target, settings = drawn(device, "float32", class_weights=True)
    by_class = settings["class_weights"]
    logits = linear(leaves["hidden"], leaves["weight"])
    for reduction, smoothing in (("mean", 0.0), ("mean", 0.3), ("sum", 0.3), ("none", 0.3)):
        shared = {"target": target, "reduction": reduction, "label_smoothing": smoothing}
        actual = linear_cross_entropy(**leaves, class_weights=by_class.double(), **shared)
        torch.testing.assert_close(actual, cross_entropy(logits, weight=by_class, **shared))


@pytest.mark.interpreter
def test_the_gradient_is_what_forward_left(device):
    """No copy: memory is bounded by the formula."""
    leaves, target, _ = drawn(device, "bfloat16")
    loss = linear_cross_entropy(**leaves, target=target)
    kept = [t.data_ptr() for t in loss.grad_fn.saved_tensors[1:3]]
    loss.backward()
    assert [t.grad.data_ptr() for t in leaves.values()] == kept


@pytest.mark.interpreter
def test_logits_are_one_chunk_s(device, monkeypatch):
    seen, launch = set(), kernels.cross_entropy_rows

    def noted(logits, *operands, **options):
        seen.add((*logits.shape, logits.data_ptr()))
        launch(logits, *operands, **options)

    monkeypatch.setattr(kernels, "cross_entropy_rows", noted)
    leaves, target, _ = drawn(device, "float32")
    step(leaves, target, memory=CHUNKS_OF_FIVE["float32"])
    assert {rows for rows, _, _ in seen} == {5, 3} and len({where for _, _, where in seen}) == 1


@pytest.mark.interpreter
def test_fp16_gradients_of_a_mean_do_not_vanish(device):
    """1/Σw comes last: 2⁻²⁰ of a softmax is below fp16's smallest number, times 2¹⁶ it is not."""
    leaves, target, _ = drawn(device, "float16", (8, 4, 4000), spread=0.1)
    scale = 2.0**12
    loss = linear_cross_entropy(**leaves, target=target) * scale
    actual = grad(loss, leaves["weight"])[0].double() / scale
    true = step(wide(leaves), target, reference.linear_cross_entropy)[2]
    rare = torch.ones(4000, dtype=torch.bool).index_fill_(0, target[target >= 0], False)
    assert (actual - true)[rare].norm() <= 2e-2 * true[rare].norm()


@pytest.mark.interpreter
@pytest.mark.parametrize(("reduction", "least"), [("mean", 6432), ("none", 1872)])
def test_too_little_memory_is_an_error_of_the_call(device, reduction, least):
    """Of losses by token too, whose gradients take it in backward."""
    leaves, target, _ = drawn(device, "bfloat16")
    words = rf"at least {least} bytes for .*13 tokens.* got {least - 1}: give"
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(**leaves, target=target, reduction=reduction, memory=least - 1)
    step(leaves, target, reduction=reduction, memory=least)
    frozen = {name: leaf.detach() for name, leaf in leaves.items()}
    linear_cross_entropy(**frozen, target=target, memory=512)


# --- log-probabilities alone ---------------------------------------------------------------------


@pytest.mark.plain
def test_shapes_and_nothing_wanted(slices, device):
    leaves, tokens, settings = drawn(device, "bfloat16", **ALL_LOG_PROBS)
    flat = linear_log_probs(**leaves, tokens=tokens, **settings)
    deep = {**leaves, "hidden": leaves["hidden"][:12].reshape(2, 3, 2, -1)}
    actual = linear_log_probs(**deep, tokens=tokens[:12].reshape(2, 3, 2), **settings)
    assert all(t.shape == (2, 3, 2) and t.dtype == torch.float32 for t in actual)
    assert close([t.flatten() for t in actual], [t[:12] for t in flat])
    log_probs, none = linear_log_probs(**leaves, tokens=tokens, **settings, entropy=False)
    assert none is None and same([log_probs], flat[:1])
    empty = {**leaves, "hidden": leaves["hidden"].detach()[:0].requires_grad_()}
    actual = linear_log_probs(**empty, tokens=tokens[:0], **settings)
    gradients = grad([t.sum() for t in actual], list(empty.values()))
    assert all(t.shape == (0,) for t in actual) and not any(t.any() for t in gradients)


@pytest.mark.plain
def test_ignored_tokens_are_zero_and_others_minus_the_loss(slices, device):
    compute, leaves, up = case("log_probs", device, **ALL_LOG_PROBS)
    y, d_hidden, *_ = results_of(compute, leaves, up)
    assert not y[:, ::7][:, :-1].any() and not torch.signbit(y[:, 0]).any() and y[:, 1].all()
    assert not d_hidden[0].any() and d_hidden[1].any()
    leaves, tokens, settings = drawn(device, "float32", bias=True, softcap=2.0)
    log_probs, _ = linear_log_probs(**leaves, tokens=tokens, **settings)
    losses = linear_cross_entropy(**leaves, target=tokens, **settings, reduction="none")
    assert close([log_probs], [-losses])


@pytest.mark.plain
def test_a_banned_token_adds_nothing(slices, device):
    """A bias of -inf: p log p is 0, and so are its derivatives."""
    leaves, tokens, _ = drawn(device, "float32", bias=True)
    banned = {n: t.detach().clone() for n, t in leaves.items()}
    banned["bias"][3] = -torch.inf
    fewer = {n: t if n == "hidden" else torch.cat([t[:3], t[4:]]) for n, t in banned.items()}
    tokens = tokens.where(tokens != 3, 5)
    up = torch.randn(2, TOKENS, device=device)
    actual, wanted = (
        results_of(bound(LOG_PROBS, labels), {n: t.requires_grad_() for n, t in own.items()}, up)
        for own, labels in ((banned, tokens), (fewer, tokens - (tokens > 3).long()))
    )
    torch.testing.assert_close(actual[:2], wanted[:2], rtol=1e-5, atol=1e-5)
    assert not actual[2][3].any() and not actual[3][3].any()


@pytest.mark.interpreter
def test_no_logits_but_a_slice_s(slices, device, monkeypatch):
    seen, launch = set(), kernels.by_token_rows

    def noted(logits, *others):
        seen.add((*logits.shape, logits.data_ptr()))
        launch(logits, *others)

    monkeypatch.setattr(kernels, "by_token_rows", noted)
    compute, leaves, _ = case("log_probs", device, bias=False)
    seen.clear()
    y = compute(**leaves)
    for _ in range(2):
        assert {size for _, size, _ in seen} == {64, 9}
        assert len({where for *_, where in seen}) == 1
        seen.clear()
        y.sum().backward(retain_graph=True)


def test_both_passes_compute_the_same_logits(slices, device, monkeypatch):
    """Another product might round one another way."""
    shape = SHAPE
    if device == "cuda":
        shape = 2048, 512, 151936
        monkeypatch.setattr(kernels, "LOGITS_BYTES", 2**27)
    actual, launch = [], kernels.by_token_rows

    def noted(logits, *others):
        actual.append(logits.clone())
        launch(logits, *others)

    monkeypatch.setattr(kernels, "by_token_rows", noted)
    leaves, tokens, _ = drawn(device, "bfloat16", shape)
    y = bound(LOG_PROBS, tokens)(**leaves)
    count = len(actual)
    assert count > 1
    y.sum().backward()
    assert len(actual) == 2 * count and same(actual[:count], actual[count:])


# --- operators, launchers, plans -----------------------------------------------------------------


@pytest.mark.interpreter
def test_operators_are_registered_as_torch_wants_them(device):
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    for dtype in ("float32", "float16"):
        leaves, target, _ = drawn(device, dtype, bias=True)
        settings = -100, 0.1, 1e-2, 3.0, kernels.LEAST, True, 1.0, True
        operands = *leaves.values(), target, torch.rand(VOCABULARY)
        wants = None, torch.tensor(7.0), [True, True, True]
        torch.library.opcheck(
            ops.linear_cross_entropy, (*operands, *wants, *settings), test_utils=tests
        )
        by_token = ops.linear_cross_entropy_by_token
        torch.library.opcheck(by_token, (*operands, *settings), test_utils=tests)
    settings = -100, 0.0, 0.0, 3.0, kernels.BALANCED, False, 0.7, True
    operands = (*leaves.values(), target, None)
    losses, _, entropies, statistics = by_token(*operands, *settings)
    given = (*(t.detach() for t in leaves.values()), target, None)
    for wants in ([True, True, True], [False, True, False]):
        torch.library.opcheck(
            ops.linear_cross_entropy_by_token_backward,
            (*given, statistics, losses.detach(), wants, entropies.detach(), *settings),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.interpreter
def test_launchers_refuse_what_does_not_fit(device):
    logits, zeros = torch.zeros(4, kernels.row_stride(5, 4)), torch.zeros(4)
    target = torch.zeros(4, dtype=torch.int64)
    shared = {
        "logits": logits[:, :5], "target": target, "class_weights": None,
        "settings": kernels.Settings(),
    }  # fmt: skip
    of_rows = shared | {"token_weights": None, "scale": torch.ones(()), "losses": zeros,
                        "hits": None, "gradient": False}  # fmt: skip
    of_slices = shared | {
        "statistics": torch.zeros(kernels.STATISTICS, 4), "first": 0, "vocabulary": 5,
        "upstream": zeros, "entropy_upstream": None,
    }  # fmt: skip
    for launcher, given, wrong in (
        (kernels.cross_entropy_rows, of_rows, (
            ({"logits": torch.zeros(4, 5)}, r"of stride \(32, 1\) .* got \(5, 1\)"),
            ({"logits": logits.double()[:, :5]}, "torch.float64"),
            ({"target": target[:3]}, r"target must be \(4,\), torch.int64, contiguous; got \(3,\)"),
            ({"target": target.int()}, "torch.int32"),
            ({"token_weights": zeros.double()}, "token_weights .* torch.float64"),
            ({"losses": torch.zeros(8)[::2]}, r"stride \(2,\)"),
            ({"class_weights": zeros}, r"class_weights must be \(5,\)"),
            ({"hits": target}, "hits .* torch.int64"),
        )),
        (kernels.by_token_rows, of_slices, (
            ({"logits": torch.zeros(4, 5)}, r"of stride \(32, 1\) .* got \(5, 1\)"),
            ({"upstream": torch.zeros(3)}, r"upstream must be \(4,\), .* got \(3,\)"),
            ({"entropy_upstream": zeros.double()}, "entropy_upstream .* torch.float64"),
            ({"class_weights": zeros}, r"class_weights must be \(5,\)"),
            ({"statistics": zeros}, r"statistics must be \(7, 4\)"),
        )),
    ):  # fmt: skip
        launcher(**given)
        for changed, words in wrong:
            with pytest.raises(ValueError, match=words):
                launcher(**(given | changed))


def test_chunks_fit_their_budget():
    for tokens in (0, 1, 127, 2048, 2049, 8192, 100_000):
        for vocabulary in (1, 33, 32000, 50257, 128256, 10**6):
            for itemsize in (2, 4):
                stride = kernels.row_stride(vocabulary, itemsize)
                rows = kernels.chunk_rows(tokens, vocabulary, itemsize, 2**29)
                assert vocabulary <= stride and stride * itemsize % kernels.ROW_BYTES == 0
                assert rows * stride * itemsize <= max(2**29, stride * itemsize)
                assert rows == tokens or rows % 128 == 0


def test_plans_of_a_large_vocabulary():
    """8192 tokens; bytes in MiB, of which 250.5 are 1024 tokens' logits in half precision."""
    least, balanced = kernels.LEAST, kernels.BALANCED
    half, single = torch.bfloat16, torch.float32
    wanted = [
        # width, dtype, memory, rows, sums, MiB
        (1024, half, least, 2048, single, 751.5), (1024, half, balanced, 2048, single, 751.5),
        (2048, half, least, 2048, single, 1002), (2048, half, balanced, 4096, single, 1503),
        (2048, half, 2004 * 2**20, 8192, half, 2004),
        (2048, half, 2004 * 2**20 - 1, 4096, single, 1503),
        (2048, half, 1002 * 2**20, 2048, single, 1002),
        (4096, half, least, 8192, half, 2004), (4096, half, balanced, 8192, half, 2004),
        (2048, torch.float16, balanced, 4096, single, 1503),
        (4096, torch.float16, balanced, 8192, single, 3006),
        (4096, torch.float16, least, 4096, single, 2004),
        (2048, single, balanced, 1024, single, 501),
        (2048, single, 4008 * 2**20, 8192, single, 4008),
    ]  # fmt: skip
    for width, dtype, memory, rows, sums, mebibytes in wanted:
        weight = torch.empty(128256, width, dtype=dtype, device="meta")
        actual = kernels.plan(8192, weight, memory=memory)
        assert actual == (rows, sums, mebibytes * 2**20), (width, dtype, memory, actual)
    assert kernels.plan(8192, weight.bfloat16(), False) == (2048, half, 501 * 2**20)
    odd = torch.empty(50257, 4096, dtype=half, device="meta")  # its rows of logits are padded
    assert kernels.plan(8192, odd, memory=kernels.LEAST).rows == 8192


def test_slices_of_a_large_vocabulary():
    """8192 tokens; logits of 475 pieces of 64 classes, and 2 bytes an element of d_hidden more."""
    for width, dtype, memory, classes, sums, mebibytes in (
        (4096, torch.bfloat16, kernels.BALANCED, 30400, torch.float32, 475 + 64),
        (2048, torch.bfloat16, kernels.LEAST, 30400, torch.float32, 475 + 32),
        (4096, torch.bfloat16, 2374 * 2**20, 151936, torch.bfloat16, 2374),
        (4096, torch.float16, 128 * 2**20, 4032, torch.float32, 128),
        (4096, torch.float32, kernels.BALANCED, 15200, torch.float32, 475),
    ):
        weight = torch.empty(151936, width, dtype=dtype, device="meta")
        actual = kernels.slices(8192, weight, memory)
        assert actual == (classes, sums, mebibytes * 2**20), (width, dtype, memory, actual)
    assert kernels.slices(0, weight).rows == 151936
    with pytest.raises(ValueError, match=r"at least 1048576 bytes for the losses of 8192 tokens"):
        kernels.slices(8192, weight, 2**20 - 1)


class Allocated(TorchDispatchMode):
    """The most bytes that tensors made under it take at once, but for an operand's own cast."""

    def __init__(self):
        super().__init__()
        self.live, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.live = {one: n for one, n in self.live.items() if not one.expired()}
        if function in (torch.ops.aten.new_empty.default, torch.ops.aten.new_zeros.default):
            storage = made.untyped_storage()
            self.live[StorageWeakRef(storage)] = storage.nbytes()
        self.most = max(self.most, sum(self.live.values()))
        return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(300, 200, 1003), (900, 64, 1024)], ids=str)
@pytest.mark.parametrize("rows", [0, 40, 140, 2000])
def test_a_plan_s_memory_is_what_is_allocated(monkeypatch, dtype, shape, rows):
    """Of a call and of d_W's rounding after it, with budgets of so many rows of logits."""
    monkeypatch.setattr(kernels, "cross_entropy_rows", lambda *_, **__: None)
    leaves, target, _ = drawn("cpu", dtype, shape)
    hidden, weight = (leaf.detach() for leaf in leaves.values())
    memory = 4 * weight.numel() + rows * kernels.row_stride(shape[2], hidden.itemsize) * 4
    plan = kernels.plan(shape[0], weight, memory=memory)
    assert plan.memory <= memory
    results = sum(t.numel() * t.itemsize for t in (hidden, weight))
    with Allocated() as allocated:
        settings = (True, True, False), kernels.Settings(memory=memory)
        operands = hidden, weight, None, target, None, None, torch.ones(())
        kept = kernels.losses_and_gradients(*operands, *settings)
        if kept[3].dtype != weight.dtype:
            weight.new_empty(weight.shape)
    losses = 4 * shape[0]
    assert allocated.most == plan.memory + results + losses


# --- modules, and what is refused ----------------------------------------------------------------


def test_the_loss_s_module_is_the_function():
    leaves, target, settings = drawn("cpu", "float32", bias=True, token_weights=True)
    module = LinearCrossEntropyLoss(label_smoothing=0.1, z_loss=1e-3, reduction="sum")
    assert list(module.parameters()) == []
    actual = module(*list(leaves.values())[:2], target, leaves["bias"], settings["token_weights"])
    wanted = linear_cross_entropy(
        **leaves, target=target, **settings, label_smoothing=0.1, z_loss=1e-3, reduction="sum"
    )
    assert torch.equal(actual, wanted)
    assert "label_smoothing=0.1" in str(module) and "memory='balanced'" in str(module)
    module.reduction, module.z_loss = "mean", 0.0
    actual = module(leaves["hidden"], leaves["weight"], target)
    plain = {name: leaves[name] for name in ("hidden", "weight")}
    wanted = linear_cross_entropy(**plain, target=target, label_smoothing=0.1)
    assert torch.equal(actual, wanted) and "z_loss=0.0, softcap=None" in str(module)
    by_class = torch.rand(VOCABULARY)
    weighted = LinearCrossEntropyLoss(class_weights=by_class, softcap=3.0)
    wanted = linear_cross_entropy(**plain, target=target, class_weights=by_class, softcap=3.0)
    assert torch.equal(weighted(leaves["hidden"], leaves["weight"], target), wanted)
    assert list(weighted.state_dict()) == ["class_weights"]
    module.memory = "most"
    with pytest.raises(ValueError, match="got 'most'"):
        module(leaves["hidden"], leaves["weight"], target)
    with pytest.raises(ValueError, match="got 'avg'"):
        LinearCrossEntropyLoss(reduction="avg")


def test_log_probs_module_is_the_function():
    leaves, tokens, settings = drawn("cpu", "float32", **ALL_LOG_PROBS)
    module = LinearLogProbs(**settings, ignore_index=7)
    tokens = tokens.clamp_min(0)
    actual = module(leaves["hidden"], leaves["weight"], tokens, leaves["bias"])
    settings |= {"tokens": tokens, "ignore_index": 7}
    assert same(actual, linear_log_probs(**leaves, **settings))
    assert "temperature=0.7, softcap=2.0, entropy=True" in str(module)
    module.entropy = False
    assert module(leaves["hidden"], leaves["weight"], tokens)[1] is None
    assert not list(module.parameters())
    with pytest.raises(ValueError, match="got -1"):
        LinearLogProbs(temperature=-1)


HIDDEN, WEIGHT, TARGET = torch.zeros(3, 4), torch.zeros(9, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize("operation", [LOSS, LOG_PROBS], ids=["loss", "log_probs"])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden": HIDDEN[:, :0], "weight": WEIGHT[:, :0]}, r"at least 1, got \(3, 0\)"),
        ({"hidden": HIDDEN.to_sparse()}, "hidden must be a dense tensor .*, got .*sparse_coo"),
        ({"hidden": torch.nested.nested_tensor([HIDDEN])}, "hidden must be .*, got a nested one"),
        ({"hidden": HIDDEN.int(), "weight": WEIGHT.int()}, "hidden must be of a floating-point"),
        ({"weight": torch.zeros(9, 5)}, r"\(vocabulary, 4\) for hidden \(3, 4\); got \(9, 5\)"),
        ({"weight": torch.zeros(0, 4)}, r"got \(0, 4\)"),
        ({"weight": WEIGHT.bfloat16()}, "weight is torch.bfloat16, hidden is torch.float32"),
        ({"weight": WEIGHT.to("meta")}, "weight is on meta, hidden on cpu"),
        ({"target": TARGET[:2]}, r"(target|tokens) must be \(3,\), got \(2,\)"),
        ({"target": TARGET.float()}, "(target|tokens) must be torch.int64.*torch.float32"),
        ({"bias": torch.zeros(8)}, r"bias must be \(9,\), got \(8,\)"),
        ({"bias": torch.zeros(9).half()}, "bias is torch.float16, hidden is torch.float32"),
        ({"ignore_index": True}, "ignore_index must be a whole number, got True"),
        ({"ignore_index": 1.5}, "ignore_index must be a whole number, got 1.5"),
        ({"ignore_index": np.bool_(True)}, "ignore_index must be a whole number, got np.True_"),
        ({"ignore_index": 2**70}, f"ignore_index must be an int64, got {2**70}"),
        ({"ignore_index": -(2**63) - 1}, "ignore_index must be an int64, got -9223372036854775809"),
        ({"softcap": 0.0}, "softcap must be None, or finite and above 0, got 0.0"),
        ({"softcap": "a"}, "softcap must be a number, got 'a'"),
    ],
)
def test_what_neither_takes_is_refused_by_name_and_value(operation, changed, words):
    operands = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET} | changed
    operands[operation.target] = operands.pop("target")
    with pytest.raises(ValueError, match=words):
        operation.compute(**operands)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden": torch.tensor(1.0)}, "got a scalar"),
        ({"label_smoothing": "a"}, "label_smoothing must be a number, got 'a'"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, got 1.5"),
        ({"label_smoothing": float("nan")}, "got nan"),
        ({"z_loss": None}, "z_loss must be a number, got None"),
        ({"z_loss": -1.0}, "z_loss must be finite and not negative, got -1.0"),
        ({"token_weights": torch.zeros(4)}, r"token_weights must be \(3,\), got \(4,\)"),
        ({"token_weights": TARGET}, "token_weights must be of a floating-point dtype"),
        ({"class_weights": torch.zeros(3)}, r"class_weights must be \(9,\), got \(3,\)"),
        ({"class_weights": torch.ones(9).requires_grad_()}, "class_weights must not require a gr"),
        ({"memory": "most"}, "memory must be 'least', 'balanced' or a whole .*, got 'most'"),
        ({"memory": 0}, "number of bytes of at least 1, got 0"),
        ({"memory": True}, "got True"),
        ({"memory": 1.5e9}, "got 1500000000.0"),
        ({"memory": None}, "got None"),
        ({"reduction": "avg"}, "reduction must be one of mean, sum, none, got 'avg'"),
    ],
)
def test_what_the_loss_does_not_take_is_refused(changed, words):
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(**{"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET} | changed)


def test_other_faulty_calls_are_refused():
    for wrong in (0, float("nan")):
        with pytest.raises(
            ValueError, match=f"temperature must be finite and above 0, got {wrong}"
        ):
            linear_log_probs(HIDDEN, WEIGHT, TARGET, temperature=wrong)
    with pytest.raises(ValueError, match="temperature must be a number, got 'hot'"):
        linear_log_probs(HIDDEN, WEIGHT, TARGET, temperature="hot")
    with pytest.raises(TypeError, match="tokens must be a torch.Tensor, got the list"):
        linear_log_probs(HIDDEN, WEIGHT, [1, 2, 3])
    with pytest.raises(TypeError, match="softcup"):
        linear_cross_entropy_and_accuracy(HIDDEN, WEIGHT, TARGET, softcup=3.0)
    with pytest.raises(ValueError, match="got 'avg'"):
        linear_cross_entropy_and_accuracy(HIDDEN, WEIGHT, TARGET, reduction="avg")
    for operation in (LOSS, LOG_PROBS):
        for wrong in (9, -1):
            with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
                operation.compute(HIDDEN, WEIGHT, torch.full_like(TARGET, wrong))


def test_an_ignored_class_by_numpy_and_meta_tensors():
    target = torch.tensor([3, 5, 5])
    for reduction in ("mean", "none"):
        actual, wanted = (
            linear_cross_entropy(HIDDEN, WEIGHT, target, ignore_index=index, reduction=reduction)
            for index in (np.int64(5), 5)
        )
        assert torch.equal(actual, wanted)
    meta = [t.to("meta") for t in (HIDDEN, WEIGHT, TARGET)]
    assert linear_cross_entropy(*meta, reduction="none").shape == (3,)


# --- teeth ---------------------------------------------------------------------------------------


def test_wrong_functions_are_rejected():
    def over_all(**operands):
        return linear_cross_entropy(**operands) * (operands["target"] >= 0).float().mean()

    def in_bits(**operands):
        log_probs, entropy = linear_log_probs(**operands)
        return log_probs, entropy * 1.4427

    assert misses("cpu", "float32", compute=over_all) != []
    assert misses("cpu", "float32", compute=in_bits, operation=LOG_PROBS) != []


# What stands in the kernels' file, what the fault has there: of losses,
BROKEN = {
    "the last class left out": ("vocabulary, x, float(", "vocabulary - 1, x, float("),
    "lanes' maxima ignored": ("total * tl.exp(largest - m)", "total"),
    "the wrong class": ("columns == label,", "columns == label + 1,"),
    "a block not written": ("tl.store(logits + columns, d", "tl.store(logits + lanes, d"),
    "smoothing not in the gradient": (" at_label + share, share)", " 1.0, 0.0)"),
    "smoothing not in the loss": ("label_smoothing * (average * m", "0 * (average * m"),
    "half of z-loss's gradient": ("of_p + 2 * squared", "of_p + 1 * squared"),
    "z-loss not in the loss": ("+ squared * lse * lse", ""),
    "z-loss not by class": ("z_loss * by_label", "z_loss * 1.0"),
    "the label not by class": (
        "(1 - label_smoothing) * by_label\n    sq",
        "(1 - label_smoothing) * 1.0\n    sq",
    ),
    "smoothing not by class in the loss": (" x *= by", " x *= 1.0"),
    "smoothing not by class in the gradient": ("share = share * by", "share = share"),
    "all classes' weights left out": ("average = weighed /", "average = 1.0 * vocabulary /"),
    "a softcap without derivative": (
        "d *= _softcap_derivative(x, softcap)\n                tl",
        "d *= 1.0\n                tl",
    ),
    "a softcap without sign": ("tl.where(u < 0, -large, large)", "large"),
    "weights not in the gradient": ("factor *= weight", "factor *= 1.0"),
    "weights not in the loss": ("loss *= weight", "loss *= 1.0"),
    "ignored rows keep their logits": ("lanes, zeros, mask=", "lanes, zeros, mask=row < 0 and "),
    "scale left out": ("factor = tl.load(scale)", "factor = 1.0"),
    "upstream left out": (".to(tl.float32) * times", ".to(tl.float32)"),
    "the last chunk's d_W alone": ("addmm(total, a,", "mm(a,"),
    "d_hidden of the first chunk": ("out=d_hidden[part]", "out=d_hidden[: h.shape[0]]"),
    "the last chunk's d_b alone": ("d_bias += ", "d_bias[:] = "),
    "a chunk with another's targets": ("target[part], weights", "target[: h.shape[0]], weights"),
}
# of log-probabilities,
BROKEN_LOG_PROBS = {
    "the last class left out": ("inside = columns < classes", "inside = columns < classes - 1"),
    "a maximum's fall left out": ("(below + drop * total) + here", "below + here"),
    "groups' falls left out": ("tl.sum((below + drop * total)", "tl.sum(below"),
    "groups' maxima ignored": ("total = tl.sum(total * tl.exp(drop))", "total = tl.sum(total)"),
    "the last slice's sum alone": ("(goes_on, tl.load(statistics + tokens), 0", "(goes_on, 0.0, 0"),
    "the maximum so far forgotten": (
        "none + tl.load(statistics, mask=later, other=-3.0e38)", "none - 3.0e38",
    ),
    "tokens of the last slice alone": ("tl.where(is_here, correct, known)", "correct"),
    "the entropy without the sum": ("log_total - below / total", "log_total"),
    "the entropy's gradient without the entropy": ("-3.0e38) + entropy)", "-3.0e38))"),
    "the entropy's gradient with another sign": ("d -= tl.load(entropy", "d += tl.load(entropy"),
    "no temperature in the gradient": ("0.0, d * by_temperature)", "0.0, d)"),
    "no temperature in the logits": ("CAPPED) * by_temperature, float", "CAPPED), float"),
    "a softcap without derivative": (
        "d *= _softcap_derivative(x, softcap)\n    d = tl", "d *= 1.0\n    d = tl",
    ),
    "ignored tokens have gradients": ("label == ignore_index, 0.0, d", "label == -5, 0.0, d"),
    "another slice's tokens": ("p, first + lanes, label", "p, lanes, label"),
    "the last slice's d_hidden alone": ("_add_product(d_hidden, log", "_add_product(None, log"),
    "d_W in the first slice's place": ("out=d_weight[part]", "out=d_weight[: w.shape[0]]"),
    "a slice with the first one's bias": ("else bias[part]", "else bias[: len(weight[part])]"),
}  # fmt: skip
# and of losses by token, with what log-probabilities have not.
BROKEN_BY_TOKEN = {
    "the last slice's smoothing alone": (
        "(goes_on, tl.load(statistics + 4 * tokens)", "(goes_on, 0.0",
    ),
    "the last slice's class weights alone": (
        "(goes_on, tl.load(statistics + 6 * tokens)", "(goes_on, 0.0",
    ),
    "smoothing not by class": ("share *= by", "share *= 1.0"),
    "another slice's class weights": ("class_weights + first + columns", "class_weights + columns"),
    "the label not by class": ("mask=correct == correct, other=0.0", "mask=first < 0, other=1.0"),
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_of_losses_is_rejected(device, monkeypatch, tmp_path, fault):
    broken = rewritten(monkeypatch, tmp_path, kernels, *BROKEN[fault])
    cut_in_four(monkeypatch, broken)
    for name in ("losses_and_gradients", "fill_scaled"):
        monkeypatch.setattr(ops, name, getattr(broken, name))
    chunked = partial(linear_cross_entropy, memory=CHUNKS_OF_FIVE["float32"])
    assert misses(device, "float32", compute=chunked, **ALL) != []


@pytest.mark.interpreter
@pytest.mark.parametrize("fault", BROKEN_LOG_PROBS | BROKEN_BY_TOKEN)
def test_a_broken_kernel_of_slices_is_rejected(slices, device, monkeypatch, tmp_path, fault):
    wrong = (BROKEN_LOG_PROBS | BROKEN_BY_TOKEN)[fault]
    broken = rewritten(monkeypatch, tmp_path, kernels, *wrong)
    cut_into_slices(monkeypatch, broken)
    monkeypatch.setattr(ops, "slices_by_token", broken.slices_by_token)
    monkeypatch.setattr(
        ops, "linear_cross_entropy_by_token_backward",
        lambda *a: broken.slices_by_token(*a[:9], broken.Settings(*a[9:])),
    )  # fmt: skip
    of_loss, of_log_probs = SETTINGS["all, by token"], {"operation": LOG_PROBS, **ALL_LOG_PROBS}
    settings = of_loss if fault in BROKEN_BY_TOKEN else of_log_probs
    assert misses(device, "float32", **settings) != []


# --- on a GPU alone ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mean", "float32"), ("mean", "float16"), ("by token", "bfloat16"), ("log_probs", "bfloat16")],
)
def test_nothing_waits_for_the_device_and_a_graph_replays(monkeypatch, name, dtype):
    monkeypatch.setattr(kernels, "LOGITS_BYTES", 2**20)
    operation, settings = OPERATIONS[name]
    leaves, target, settings = drawn("cuda", dtype, (300, 64, 5003), **settings)
    if operation is LOSS:
        settings["memory"] = 2**21
    compute, own = bound(operation, target, **settings), list(leaves.values())
    up = torch.full_like(compute(**leaves), 3.0)

    def run():
        y = compute(**leaves)
        return [y.detach(), *grad(y, own, up)]

    wanted = [t.clone() for t in run()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            assert len(run()) == 1 + len(own)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(run(), wanted)
    graph, written = gradient_checks.captured(run)
    graph.replay()
    assert close(written, wanted)
    with torch.no_grad():
        leaves["hidden"].mul_(-0.5)
        target[:100] = -100
        up.mul_(0.5)
    graph.replay()
    assert close(written, run())


def over_the_gradients(leaves, run: Callable[[], object]) -> tuple[int, int]:
    """Bytes that a step takes at most over what was there and its gradients, and keeps."""
    gradients = sum(t.numel() * t.itemsize for t in leaves.values())
    run()  # cuBLAS's workspace
    for t in leaves.values():
        t.grad = None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    most, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    return most - before - gradients, kept - before - gradients


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["least", "balanced", 2**31])
@pytest.mark.parametrize(("tokens", "width"), [(2048, 2048), (8192, 2048), (8192, 4096)])
def test_memory_of_the_loss_is_the_planned_one(tokens, width, memory):
    """Over the gradients; and the losses, targets' checks and the like, of 4 MiB at most."""
    leaves, target, _ = drawn("cuda", "bfloat16", (tokens, width, 128256))
    over, kept = over_the_gradients(
        leaves, lambda: linear_cross_entropy(**leaves, target=target, memory=memory).backward()
    )
    words = {"least": kernels.LEAST, "balanced": kernels.BALANCED}
    plan = kernels.plan(tokens, leaves["weight"], memory=words.get(memory, memory))
    assert plan.memory <= over <= plan.memory + 2**22 and kept <= 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2048, 4096])
def test_memory_of_log_probs_is_the_planned_one(width):
    """Over the gradients; and outputs, statistics, targets' checks and the like, of 4 MiB."""
    leaves, tokens, _ = drawn("cuda", "bfloat16", (8192, width, 151936))
    compute = bound(LOG_PROBS, tokens)
    over, _ = over_the_gradients(leaves, lambda: compute(**leaves).sum().backward())
    planned = kernels.slices(8192, leaves["weight"]).memory
    assert over <= planned + 2**22 and over <= 2**30


@pytest.mark.gpu
def test_a_target_out_of_range_is_an_error_of_the_device():
    code = """if True:
        import torch, fusedlib
        hidden, weight = (torch.zeros(n, 8, device="cuda", requires_grad=True) for n in (4, 9))
        target = torch.tensor([0, 1, {wrong}, 3], device="cuda")
        fusedlib.linear_cross_entropy(hidden, weight, target, reduction="{reduction}")
        torch.cuda.synchronize()
        print("went on")
    """
    for wrong, reduction, error in ((9, "mean", True), (-1, "none", True), (-100, "mean", False)):
        done = subprocess.run(
            [sys.executable, "-c", code.format(wrong=wrong, reduction=reduction)],
            capture_output=True, text=True, check=False, timeout=limits.PROCESS_S,
        )  # fmt: skip
        assert ("went on" not in done.stdout) == error, done.stderr[-2000:]
        assert ("assert" in done.stderr) == error


# --- TRL's GRPO ----------------------------------------------------------------------------------


def recipe() -> str:
    """The program in the docstring."""
    text = linear_log_probs.__doc__.partition("from now on:\n")[2].partition("The products")[0]
    return textwrap.dedent(text).strip()


def test_the_recipe_is_a_program():
    compile(recipe(), "recipe", "exec")
    assert len(recipe().splitlines()) < 15


def test_the_recipe_takes_a_head_of_another_dtype_than_hidden(monkeypatch):
    """As TRL's own function, whose products are in hidden's dtype: `cast_lm_head_to_fp32`."""
    theirs = types.ModuleType("trl.trainer.utils")
    theirs._ChunkedLogProbFunction = None
    packages = {name: types.ModuleType(name) for name in ("trl", "trl.trainer")}
    for name, module in packages.items() | {"trl.trainer.utils": theirs}.items():
        monkeypatch.setitem(sys.modules, name, module)
    exec(recipe(), {"fusedlib": fusedlib})
    leaves, tokens, _ = drawn("cpu", "bfloat16", bias=True)
    leaves["hidden"] = leaves["hidden"].detach().float().requires_grad_()
    apply = theirs._ChunkedLogProbFunction.apply
    log_probs, entropy, *none = apply(*leaves.values(), tokens, 0.7, 512, 2.0, 1.0, BOTH)
    wanted = linear_log_probs(
        **{n: t.float() for n, t in leaves.items()}, tokens=tokens, temperature=0.7, softcap=2.0
    )
    assert same([log_probs, entropy], wanted) and none == [None] * 3
    gradients = grad(log_probs.sum(), list(leaves.values()))
    assert [t.dtype for t in gradients] == [t.dtype for t in leaves.values()]


def test_the_recipe_in_trl_s_grpo(tmp_path, monkeypatch):
    """Log-probabilities, entropies and gradients of a tiny policy are those of TRL's own."""
    trl = pytest.importorskip(
        "trl", reason="trl is not installed; 1.16 has what the recipe changes"
    )
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "_ChunkedLogProbFunction"):
        pytest.skip(f"trl {trl.__version__} asks another function for log-probabilities")
    from llama_models import make

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", utils._ChunkedLogProbFunction)
    model = make("Llama")
    utils.add_fused_lm_head(model, temperature=0.7, outputs=BOTH)
    ids = torch.randint(model.config.vocab_size, (2, 12), generator=torch.manual_seed(0))
    labels = ids.clone()
    labels[:, :4] = -100
    wanted = []
    for fused in (False, True):
        calls = []
        if fused:
            exec(recipe(), {"fusedlib": fusedlib})
            own = utils._ChunkedLogProbFunction.apply
            monkeypatch.setattr(
                utils._ChunkedLogProbFunction, "apply",
                staticmethod(lambda *a, own=own, calls=calls: calls.append(1) or own(*a)),
            )  # fmt: skip
        output = model(input_ids=ids, labels=labels, fused_lm_head=True)
        model.zero_grad()
        (output.log_probs.sum() + output.entropy.square().sum()).backward()
        actual = [output.log_probs, output.entropy, *(p.grad.clone() for p in model.parameters())]
        assert len(calls) == fused
        wanted = wanted or actual
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
