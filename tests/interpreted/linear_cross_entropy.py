"""`linear_cross_entropy` in Triton's interpreter: `tests/test_linear_cross_entropy.py` runs this
file in a process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

from functools import partial
from itertools import product

import pytest
import torch

import linear_cross_entropy_checks as checks
from fusedlib import linear_cross_entropy
from fusedlib.ops.loss import kernels
from fusedlib.ops.loss import operator as ops
from gradient_checks import (
    check_what_forward_read,
    refuses_second_derivatives,
    refuses_transforms_of_backward,
)
from rewritten import rewritten

# Rows that are not of this vocabulary may hold anything.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    checks.cut_in_four(monkeypatch, kernels)


def in_chunks(dtype):
    """The loss, of five tokens at a time."""
    return partial(linear_cross_entropy, memory=checks.CHUNKS_OF_FIVE[dtype])


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [*((settings, "float32") for settings in checks.SETTINGS),
     *product(("plain", "only smoothing", "all, mean", "all, sum", "all, by token"), DTYPES[1:])],
)  # fmt: skip
def test_loss_and_gradients_vs_float64(dtype, settings):
    assert checks.misses("cpu", dtype, **checks.SETTINGS[settings]) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", ["all, mean", "all, by token"])
def test_in_chunks_vs_float64(dtype, settings):
    found = checks.misses("cpu", dtype, compute=in_chunks(dtype), **checks.SETTINGS[settings])
    assert found == []


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda f: f.__name__[6:])
def test_holds(check):
    check("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_in_one_graph(dtype):
    checks.check_compiled("cpu", dtype, checks.CHUNKS_OF_FIVE[dtype])


def test_operators_are_registered_as_torch_wants_them():
    for dtype in ("float32", "float16"):
        leaves, target, _ = checks.drawn("cpu", dtype, bias=True)
        settings = -100, 0.1, 1e-2, 3.0, kernels.LEAST, True, 1.0, True
        operands = *leaves.values(), target, torch.rand(checks.VOCABULARY)
        total = torch.tensor(7.0)
        torch.library.opcheck(
            ops.linear_cross_entropy, (*operands, None, total, [True, True, True], *settings),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )  # fmt: skip
        torch.library.opcheck(
            ops.linear_cross_entropy_by_token, (*operands, *settings),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )  # fmt: skip


def test_what_is_frozen_costs_no_product(monkeypatch):
    products = []
    torch_mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: products.append(1) or torch_mm(*a, **k))
    for reduction in ("mean", "none"):
        for wants, count in (((False, False), 1), ((True, False), 2), ((False, True), 2),
                             ((True, True), 3)):  # fmt: skip
            leaves, target, settings = checks.drawn("cpu", "float32", reduction=reduction)
            own = {n: t.detach().requires_grad_(w) for (n, t), w in zip(leaves.items(), wants)}  # noqa: B905
            products.clear()
            loss = linear_cross_entropy(**own, target=target, **settings).sum()
            if any(wants):
                loss.backward()
            again = reduction == "none" and any(wants)
            assert len(products) == count + again


def test_the_gradient_is_what_forward_left():
    """No copy: memory is bounded by the formula."""
    leaves, target, _ = checks.drawn("cpu", "bfloat16")
    loss = linear_cross_entropy(**leaves, target=target)
    kept = [t.data_ptr() for t in loss.grad_fn.saved_tensors[1:3]]
    loss.backward()
    assert [t.grad.data_ptr() for t in leaves.values()] == kept


def test_logits_are_one_chunk_s(monkeypatch):
    seen = set()
    launch = kernels.cross_entropy_rows

    def noted(logits, *operands, **options):
        seen.add((*logits.shape, logits.data_ptr()))
        launch(logits, *operands, **options)

    monkeypatch.setattr(kernels, "cross_entropy_rows", noted)
    leaves, target, _ = checks.drawn("cpu", "float32")
    checks.step(leaves, target, in_chunks("float32"))
    assert {rows for rows, _, _ in seen} == {5, 3} and len({where for _, _, where in seen}) == 1


def test_sums_over_many_chunks_are_fp32():
    """30 chunks of two tokens each: added up in bf16, d_W would err tens of times more."""
    shape = 60, 4, 40
    leaves, target, _ = checks.drawn("cpu", "bfloat16", shape)
    wanted = checks.step(leaves, target, reduction="sum")
    chunked = partial(linear_cross_entropy, memory=4 * 4 * 40)
    found = checks.step(leaves, target, chunked, reduction="sum")
    off = (found[2].double() - wanted[2].double()).norm() / wanted[2].double().norm()
    assert off < torch.finfo(torch.bfloat16).eps / 2
    assert checks.misses("cpu", "bfloat16", shape, compute=chunked) == []


def test_fp16_gradients_of_a_mean_do_not_vanish():
    """1/Σw comes last: 2⁻²⁰ of a softmax is below fp16's smallest number, times 2¹⁶ it is not."""
    leaves, target, _ = checks.drawn("cpu", "float16", (8, 4, 4000), spread=0.1)
    scale = 2.0**12
    loss = linear_cross_entropy(**leaves, target=target) * scale
    found = torch.autograd.grad(loss, leaves["weight"])[0].double() / scale
    true = checks.results(
        checks.reference.linear_cross_entropy, checks.wide(leaves), target, {}, None
    )["d_weight"]
    rare = torch.ones(4000, dtype=torch.bool).index_fill_(0, target[target >= 0], False)
    assert (found - true)[rare].norm() <= 2e-2 * true[rare].norm()


@pytest.mark.parametrize(("reduction", "least"), [("mean", 6432), ("none", 1872)])
def test_too_little_memory_is_an_error_of_the_call(reduction, least):
    """Of losses by token too, whose gradients take it in backward."""
    leaves, target, _ = checks.drawn("cpu", "bfloat16")
    words = rf"at least {least} bytes for .*13 tokens.* got {least - 1}: give"
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(**leaves, target=target, reduction=reduction, memory=least - 1)
    checks.step(leaves, target, reduction=reduction, memory=least)
    frozen = {name: leaf.detach() for name, leaf in leaves.items()}
    linear_cross_entropy(**frozen, target=target, memory=512)


def test_a_target_out_of_range_raises():
    leaves, target, _ = checks.drawn("cpu", "float32")
    for wrong in (checks.VOCABULARY, -1):
        labels = target.index_fill(0, torch.tensor([3]), wrong)
        for reduction in ("mean", "none"):
            with pytest.raises(RuntimeError, match=r"neither in \[0, 201\) nor ignore_index"):
                linear_cross_entropy(**leaves, target=labels, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_are_of_what_forward_read(reduction):
    settings = checks.ALL | {"reduction": reduction}
    leaves, target, settings = checks.drawn("cpu", "float32", **settings)
    up = torch.rand(target.shape if reduction == "none" else ())
    others = target, settings["class_weights"]
    check_what_forward_read(checks.bound(target, **settings), leaves, up, others)


@pytest.mark.parametrize("retained", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_raises(reduction, retained):
    leaves, target, settings = checks.drawn("cpu", "float32", reduction=reduction, bias=True)
    if retained:
        refuses_second_derivatives(checks.bound(target, **settings), leaves)
    for name in ("hidden", "weight"):
        leaves, target, settings = checks.drawn("cpu", "float32", reduction=reduction)
        loss = linear_cross_entropy(**leaves, target=target, **settings).sum()
        [first] = torch.autograd.grad(
            loss, leaves[name], create_graph=True, retain_graph=retained
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="no second derivative"):
            first.square().sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_transforms_that_begin_at_backward_are_refused(reduction):
    leaves, target, settings = checks.drawn("cpu", "float32", reduction=reduction)
    loss = linear_cross_entropy(**leaves, target=target, **settings)
    refuses_transforms_of_backward(loss, leaves["hidden"])


def test_the_launcher_refuses_what_does_not_fit():
    logits = torch.zeros(4, kernels.row_stride(5, 4))
    target, one, losses = torch.zeros(4, dtype=torch.int64), torch.ones(()), torch.zeros(4)

    def call(logits=logits[:, :5], target=target, weights=None, by=None, losses=losses, hits=None):
        kernels.cross_entropy_rows(
            logits, target, weights, by, one, losses, hits, kernels.Settings(), gradient=False
        )

    call()
    for changed, words in (
        ({"logits": torch.zeros(4, 5)}, r"of stride \(32, 1\) .* got \(5, 1\)"),
        ({"logits": logits.double()[:, :5]}, "torch.float64"),
        ({"target": target[:3]}, r"target must be \(4,\), torch.int64, contiguous; got \(3,\)"),
        ({"target": target.int()}, "torch.int32"),
        ({"weights": losses.double()}, "token_weights .* torch.float64"),
        ({"losses": torch.zeros(8)[::2]}, r"stride \(2,\)"),
        ({"by": losses}, r"class_weights must be \(5,\)"),
        ({"hits": target}, "hits .* torch.int64"),
    ):
        with pytest.raises(ValueError, match=words):
            call(**changed)


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("softcap", [0.0, 1.0, 30.0])
def test_a_row_keeps_its_bound(magnitude, softcap):
    checks.check_bound("cpu", magnitude, softcap=softcap)


# What stands in the kernels' file, what the fault has there.
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
    "upstream left out": ("(x * times)", "x"),
    "the last chunk's d_W alone": ("addmm(total, a,", "mm(a,"),
    "d_hidden of the first chunk": ("out=d_hidden[part]", "out=d_hidden[: h.shape[0]]"),
    "the last chunk's d_b alone": ("d_bias += ", "d_bias[:] = "),
    "a chunk with another's targets": ("target[part], weights", "target[: h.shape[0]], weights"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_rejected(monkeypatch, tmp_path, fault):
    broken = rewritten(monkeypatch, tmp_path, kernels, *BROKEN[fault])
    checks.cut_in_four(monkeypatch, broken)
    for name in ("losses_and_gradients", "fill_scaled"):
        monkeypatch.setattr(ops, name, getattr(broken, name))
    assert checks.misses("cpu", "float32", compute=in_chunks("float32"), **checks.ALL) != []
