"""What holds of `linear_cross_entropy` and `linear_log_probs` alone, beside the laws of
`tests/laws`: memory, ties, tokens that do not count, TRL's recipe.
"""

import gc
import math
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
from torch.autograd import grad
from torch.nn.functional import cross_entropy, linear, one_hot

import fusedlib
import limits
from fusedlib import (
    linear_cross_entropy,
    linear_cross_entropy_and_accuracy,
    linear_log_probs,
    reference,
    tuning,
)
from fusedlib.ops.loss import function
from gradient_checks import Named, same
from interpreter import INTERPRETED
from study.allocator import passed

# Rows that are not of this vocabulary may hold anything.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SHAPE = TOKENS, WIDTH, VOCABULARY = 13, 8, 201
ALL = {"bias": True, "label_smoothing": 0.1, "z_loss": 1e-2, "class_weights": True, "softcap": 2.0}
ALL_LOG_PROBS = {"bias": True, "temperature": 0.7, "softcap": 2.0}
BOTH = "log_probs", "entropy"


@pytest.fixture(autouse=True)
def several_blocks_and_slices():
    """In the interpreter 64 classes are a slice of the vocabulary, and each has several blocks."""
    numbers = {"loss_logits_bytes": 4096, "loss_block_bytes": 1024, "loss_scaled_block": 32}
    with tuning.override(**numbers if INTERPRETED else {}):
        yield


def drawn(
    device: str, dtype: str, shape: tuple[int, int, int] = SHAPE, spread: float = 1.0,
    bias: bool = False, token_weights: bool = False, class_weights: bool = False, **settings,
):  # fmt: skip
    """Leaves by name, target (an ignored one in seven), and the settings; logits are O(spread)."""
    tokens, width, vocabulary = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device) * scale
        return values.to(getattr(torch, dtype)).requires_grad_()

    leaves = {"hidden": normal(tokens, width),
              "weight": normal(vocabulary, width, scale=spread * width**-0.5)}  # fmt: skip
    leaves |= {"bias": normal(vocabulary)} if bias else {}
    target = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
    target[::7] = -100
    target[-1] = vocabulary - 1
    if token_weights:
        settings["token_weights"] = torch.rand(tokens, generator=generator, device=device)
    if class_weights:
        settings["class_weights"] = torch.rand(vocabulary, generator=generator, device=device)
        settings["class_weights"][1::3] = 0
    return leaves, target, settings


def wide(leaves: Named) -> Named:
    return {n: t.detach().double().requires_grad_() for n, t in leaves.items()}


def step(leaves: Named, target: Tensor, compute: Callable = linear_cross_entropy, **settings):
    """The loss, and the gradients of its sum."""
    loss = compute(**leaves, target=target, **settings)
    return [loss.detach(), *grad(loss.sum(), list(leaves.values()))]


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_tokens_are_left_out_of_the_products(device, reduction):
    """Their NaN reaches nobody, and all others have what they have alone, bit for bit."""
    leaves, target, _ = drawn(device, "float32")
    counted = target != -100
    with torch.no_grad():
        leaves["hidden"][~counted] = torch.nan
    alone = leaves | {"hidden": leaves["hidden"].detach()[counted].requires_grad_()}
    with tuning.override(loss_skip_from=0):
        loss, d_hidden, d_weight = step(leaves, target, reduction=reduction)
        wanted = step(alone, target[counted], reduction=reduction)
    assert not d_hidden[~counted].any() and not (reduction == "none" and loss[~counted].any())
    loss = loss[counted] if reduction == "none" else loss
    assert same([loss, d_hidden[counted], d_weight], wanted)


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


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize(
    ("magnitude", "softcap"),
    [(1e-3, 0.0), (1.0, 1.0), (30.0, 0.0), (30.0, 30.0), (1e4, 0.0), (1e4, 1.0)],
)
def test_a_row_keeps_its_bound(device, magnitude, softcap, reduction):
    """What the kernels' docstring promises of a token, in fp32: of a hidden state of a single 1
    the weight are the logits, and its gradient is theirs.
    """
    unit, smoothing, z_loss = 2**-24, 0.1, 1e-2
    for vocabulary, seed in product((1, 128256) if device == "cuda" else (VOCABULARY,), range(4)):
        generator = torch.Generator(device).manual_seed(seed)
        logits = torch.randn(vocabulary, 1, generator=generator, device=device) * magnitude
        target = torch.randint(vocabulary, (1,), generator=generator, device=device)
        found = linear_cross_entropy(
            torch.ones(1, 1, device=device), logits.requires_grad_(), target, reduction=reduction,
            label_smoothing=smoothing, z_loss=z_loss, softcap=softcap or None,
        ).sum()  # fmt: skip
        [d_logits] = grad(found, logits)
        true = before = logits.detach()[:, 0].double()
        slope = torch.ones_like(true)
        if softcap:
            true = softcap * torch.tanh(before / softcap)
            slope = 1 / torch.cosh(before / softcap).square()
        lse, p = true.logsumexp(-1), true.softmax(-1)
        largest = torch.maximum(true.abs().amax(), lse.abs())
        share = (1 - smoothing) * one_hot(target[0], vocabulary) + smoothing / vocabulary
        steps, squared = 8 + math.log2(vocabulary), 1 + 2 * z_loss * largest
        capped = 20 * largest if softcap else 0.0
        off = found - (lse - (share * true).sum() + z_loss * lse.square())
        assert off.abs() <= (steps * (1 + largest) + capped) * squared * unit
        times = 1 + 2 * z_loss * lse
        of_p = (2 * (steps + largest) + capped) * p * times.abs() * unit
        of_slope = (8 + 6 * before.abs() / softcap) * unit if softcap else 0.0
        rounding = (4 * unit + of_slope) * (p * times.abs() + share)
        off = (d_logits[:, 0].double() - (p * times - share) * slope).abs()
        assert (off <= (of_p + rounding) * slope + torch.finfo(torch.float32).tiny).all()


@pytest.mark.gpu
def test_tf32_is_torch_s():
    leaves, target, _ = drawn("cuda", "float32", (512, 384, 4096))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = step(leaves, target)
        plain = step(leaves, target, reference.linear_cross_entropy)
    finally:
        torch.set_float32_matmul_precision(before)
    true = step(wide(leaves), target, reference.linear_cross_entropy)
    off = [[(a - b).norm() / b.norm() for a, b in zip(each, true, strict=True)]
           for each in (found, plain)]  # fmt: skip
    assert all(ours <= 1.5 * theirs + 1e-6 for ours, theirs in zip(*off, strict=True))


@pytest.mark.plain
def test_fp16_gradients_of_a_mean_do_not_vanish(device):
    """1/Σw comes last: 2⁻²⁰ of a softmax is below fp16's smallest number, times 2¹⁶ it is not."""
    leaves, target, _ = drawn(device, "float16", (8, 4, 4000), spread=0.1)
    scale = 2.0**12
    loss = linear_cross_entropy(**leaves, target=target) * scale
    actual = grad(loss, leaves["weight"])[0].double() / scale
    true = step(wide(leaves), target, reference.linear_cross_entropy)[2]
    rare = torch.ones(4000, dtype=torch.bool, device=device)
    rare[target[target >= 0]] = False
    assert (actual - true)[rare].norm() <= 2e-2 * true[rare].norm()


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


def test_both_passes_compute_the_same_logits(device):
    """A logit of 40 that another product rounded another way would have a gradient of 0.1, not of
    0 where its p is 1.
    """
    shape = (2048, 512, 151936) if device == "cuda" else (TOKENS, 64, VOCABULARY)
    logits_bytes = 2**27 if device == "cuda" else 4096
    leaves, _, _ = drawn(device, "bfloat16", shape)
    tokens = torch.arange(shape[0], device=device) * 73 % shape[2]
    w = leaves["weight"].detach()[tokens].float()
    hidden = (w * 40 / w.square().sum(-1, keepdim=True)).bfloat16().requires_grad_()
    with tuning.override(loss_logits_bytes=logits_bytes):
        log_probs = linear_log_probs(hidden, leaves["weight"], tokens).log_probs
        gradients = grad(log_probs.sum(), [hidden, leaves["weight"]])
    assert log_probs.abs().max() < 1e-6 and all(d.abs().max() < 1e-3 for d in gradients)


@pytest.mark.plain
def test_a_banned_token_adds_nothing(device):
    """A bias of -inf: p log p is 0, and so are its derivatives."""
    leaves, tokens, _ = drawn(device, "float32", bias=True)
    leaves = {n: t.detach() for n, t in leaves.items()}
    leaves["bias"][3] = -torch.inf
    tokens = tokens.where(tokens != 3, 5)
    fewer = {n: t if n == "hidden" else torch.cat([t[:3], t[4:]]) for n, t in leaves.items()}
    ups = torch.randn(2, TOKENS, device=device)
    both = []
    for own, labels in ((leaves, tokens), (fewer, tokens - (tokens > 3).long())):
        own = {n: t.requires_grad_() for n, t in own.items()}
        results = linear_log_probs(**own, tokens=labels)[:2]
        both.append([*results, *grad(results, [*own.values()], [*ups])])
    actual, wanted = both
    torch.testing.assert_close(actual[:3], wanted[:3], rtol=1e-5, atol=1e-5)
    assert not actual[3][3].any() and not actual[4][3].any()


# --- accuracy ------------------------------------------------------------------------------------


@pytest.mark.plain
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_token_accuracy(device, dtype):
    """As argmax of the logits has it: the first of the largest. Whole numbers have many of these,
    and products without rounding.
    """
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
    share = hits.sum() / valid.sum()
    for settings, wanted in (({"reduction": "none"}, hits), ({}, share), ({"softcap": 50.0}, share),
                             ({"reduction": "sum"}, share)):  # fmt: skip
        _, found = linear_cross_entropy_and_accuracy(**leaves, target=target, **settings)
        assert torch.equal(found, wanted) and not found.requires_grad
    found = linear_log_probs(**leaves, tokens=target, is_largest=True).is_largest
    assert torch.equal(found, hits.bool())
    ignored = torch.full_like(target, -100)
    assert linear_cross_entropy_and_accuracy(**leaves, target=ignored)[1].isnan()


@pytest.mark.plain
def test_nan_is_no_hit(device):
    leaves, target, _ = drawn(device, "float32")
    target = target.where(target != 0, 1)
    with torch.no_grad():
        leaves["weight"][VOCABULARY - 2] = float("nan")  # of every token, behind all targets
        target[-1] = VOCABULARY - 3
    for own in (leaves, {name: leaf * float("nan") for name, leaf in leaves.items()}):
        for reduction in ("mean", "none"):
            _, hits = linear_cross_entropy_and_accuracy(**own, target=target, reduction=reduction)
            assert not hits.any()


# --- tokens that do not count, and targets that are none ------------------------------------------


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
            torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
            assert not any(t.any() for t in actual[1:])
    zeros = torch.zeros_like(target, dtype=torch.float32)
    assert not any(t.any() for t in step(leaves, target, token_weights=zeros, reduction="sum"))
    loss, d_hidden, d_weight = step(leaves, target, token_weights=zeros)
    assert loss.isnan() and d_weight.isnan().all()
    assert d_hidden[target != -100].isnan().all() and not d_hidden[target == -100].any()


@pytest.mark.plain
@pytest.mark.parametrize("more", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize(
    ("name", "weigh"),
    [*product(("mean", "sum", "none"), ("by ones", "by constants", "by leaves")),
     ("log_probs", "by ones")],
)  # fmt: skip
def test_an_ignored_row_gives_nothing_whatever_comes_from_above(device, name, weigh, more):
    """A batch of prompts alone has a loss divided by 0 tokens; torch's gradients of it are 0."""
    call: Callable[..., object] = partial(linear_cross_entropy, reduction=name)
    of, more = "target", dict(more)
    if name == "log_probs":
        call, of, more = linear_log_probs, "tokens", ALL_LOG_PROBS if more else {}
        call = partial(call, logsumexp=True)
    leaves, some, settings = drawn(device, "float32", **more)
    for target, up in product((some, torch.full_like(some, -100)), (torch.inf, torch.nan)):
        ignored, own = target == -100, dict(leaves)
        if weigh != "by ones":
            weights = torch.rand(TOKENS, device=device).masked_fill(ignored, up)
            settings["token_weights"] = weights.requires_grad_(weigh == "by leaves")
            own |= {"token_weights": weights} if weigh == "by leaves" else {}
        outputs = call(**leaves, **{of: target}, **settings)
        outputs = outputs[:3] if isinstance(outputs, tuple) else (outputs,)
        assert all(not y.ndim or not y[ignored].any() for y in outputs)
        ups = [torch.full_like(y, up) for y in outputs]
        gradients = dict(zip(own, grad(outputs, list(own.values()), ups), strict=True))
        for leaf in {"hidden", "token_weights"} & own.keys():
            assert not gradients[leaf][ignored].any(), leaf
            assert not gradients[leaf][~ignored].isfinite().any(), leaf
        for leaf in {"weight", "bias"} & own.keys():
            actual = gradients[leaf]
            assert not (actual.any() if ignored.all() else actual.isfinite().any()), leaf


HIDDEN, WEIGHT, TARGET = torch.zeros(3, 4), torch.zeros(9, 4), torch.zeros(3, dtype=torch.int64)
CALLS = {
    "mean": linear_cross_entropy,
    "by token": partial(linear_cross_entropy, reduction="none"),
    "log_probs": linear_log_probs,
}


@pytest.mark.plain
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_target_out_of_range_raises(device, call):
    if device == "cuda":
        pytest.skip("an error of the device: in a process of its own below")
    words = r"neither in \[0, 9\) nor ignore_index" if INTERPRETED else "Target .* out of bounds"
    for wrong in (9, -1):
        with pytest.raises((IndexError, RuntimeError), match=words):
            call(HIDDEN, WEIGHT, torch.full_like(TARGET, wrong))


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


def test_an_ignored_class_by_numpy():
    target = torch.tensor([3, 5, 5])
    for call in CALLS.values():
        actual, wanted = (call(HIDDEN, WEIGHT, target, ignore_index=i) for i in (np.int64(5), 5))
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("faulty", "words"),
    [
        ({"hidden": HIDDEN[:, :0], "weight": WEIGHT[:, :0]}, "hidden"),
        ({"hidden": torch.tensor(1.0)}, "hidden"),
        ({"weight": torch.zeros(0, 4)}, "weight"),
        ({"class_weights": torch.ones(9).requires_grad_()}, "class_weights must not require"),
        ({"softcup": 3.0}, "softcup"),
    ],
)
def test_operands_that_do_not_fit_are_refused(faulty, words):
    operands = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET} | faulty
    for call in (linear_cross_entropy, linear_cross_entropy_and_accuracy):
        with pytest.raises((TypeError, ValueError), match=words):
            call(**operands)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_are_refused_where_the_graph_is_not_kept(device, name):
    leaves, target, _ = drawn(device, "float32", (3, 8, 20))
    for leaf in leaves.values():
        found = CALLS[name](*leaves.values(), target)
        found = found[0] if isinstance(found, tuple) else found
        [first] = grad(found.sum(), leaf, create_graph=True, retain_graph=False)
        with pytest.raises(RuntimeError, match="no second derivative"):
            first.square().sum().backward()


# --- memory --------------------------------------------------------------------------------------


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


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [(300, 200, 1003), (900, 64, 1024)], ids=str)
@pytest.mark.parametrize("rows", [40, 140, 2000])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_pass_takes_the_planned_memory(device, monkeypatch, shape, rows, reduction):
    """Beside the gradients, with budgets of so many rows of logits: every allocation of a pass
    whose kernels start nothing. In fp32: a CPU's products of halves allocate, too.
    """
    from fusedlib.launch import Launch

    monkeypatch.setattr(Launch, "__call__", lambda *_: None)
    tokens, width, vocabulary = shape
    leaves, target, _ = drawn(device, "float32", shape)
    call = partial(linear_cross_entropy, target=target, reduction=reduction, memory=rows * 4096)
    up = torch.ones(tokens if reduction == "none" else ())
    peak = passed(lambda: call(**leaves), up).figures()["peak_mib"]
    gradients = 4 * width * (tokens + vocabulary)
    over = peak * 2**20 - gradients
    plan = function.slices if reduction == "none" else function.plan
    planned = plan(tokens, leaves["weight"], memory=rows * 4096).memory
    assert planned <= rows * 4096 and planned <= over <= planned + 64 * tokens


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
@pytest.mark.parametrize(
    ("tokens", "width", "dtype"),
    [(2048, 2048, "bfloat16"), (8192, 2048, "bfloat16"), (8192, 4096, "bfloat16"),
     (2048, 2048, "float16")],
)  # fmt: skip
def test_memory_of_the_loss_is_the_planned_one(tokens, width, dtype, memory):
    """Over the gradients; and the losses, targets' checks and the like, of 4 MiB at most. Where
    ignored tokens are left out, one in seven here, also a copy of the hidden states that count.
    """
    leaves, target, _ = drawn("cuda", dtype, (tokens, width, 128256))
    words = {"least": function.LEAST, "balanced": function.BALANCED}
    plan = function.plan(tokens, leaves["weight"], memory=words.get(memory, memory))
    for skip_from in (math.inf, 0):
        with tuning.override(loss_skip_from=skip_from):
            over, kept = over_the_gradients(
                leaves,
                lambda: linear_cross_entropy(**leaves, target=target, memory=memory).backward(),
            )
        copied = 0 if skip_from else leaves["hidden"].nbytes
        assert over <= plan.memory + copied + 2**22 and kept <= 2**20
        assert over >= plan.memory or not skip_from


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2048, 4096])
def test_memory_of_log_probs_is_the_planned_one(width):
    """Over the gradients; and outputs, statistics, targets' checks and the like, of 4 MiB."""
    leaves, tokens, _ = drawn("cuda", "bfloat16", (8192, width, 151936))

    def run() -> None:
        scores = linear_log_probs(**leaves, tokens=tokens)
        (scores.log_probs + scores.entropy).sum().backward()

    with tuning.override(loss_skip_from=math.inf):
        over, _ = over_the_gradients(leaves, run)
    planned = function.slices(8192, leaves["weight"]).memory
    assert over <= planned + 2**22 and over <= 2**30


# --- TRL's GRPO ----------------------------------------------------------------------------------


def recipe() -> str:
    """The program in the docstring."""
    text = linear_log_probs.__doc__.partition("from now on:\n")[2].partition("The products")[0]
    return textwrap.dedent(text).strip()


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
    log_probs, entropy, *none = apply(*leaves.values(), tokens, 0.7, 512, 2.0, 1.5, BOTH)
    wanted = linear_log_probs(
        **{n: t.float() for n, t in leaves.items()}, tokens=tokens, temperature=0.7, softcap=2.0,
        logit_scale=1.5,
    )  # fmt: skip
    assert same([log_probs, entropy], wanted[:2]) and none == [None] * 3
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
