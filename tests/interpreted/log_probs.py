"""`linear_log_probs` in Triton's interpreter: `tests/test_log_probs.py` runs this file in a process
of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

from functools import partial
from itertools import product

import pytest
import torch

import linear_cross_entropy_checks as loss_checks
import log_probs_checks as checks
from fusedlib import linear_log_probs
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


def cut(monkeypatch, module) -> None:
    """Several slices of the vocabulary."""
    monkeypatch.setattr(module, "LOGITS_BYTES", 4096)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    cut(monkeypatch, kernels)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [*((settings, "float32") for settings in checks.SETTINGS), *product(("all",), DTYPES[1:])],
)
def test_outputs_and_gradients_vs_float64(settings, dtype):
    assert checks.misses("cpu", dtype, **checks.SETTINGS[settings]) == []


@pytest.mark.parametrize("of", checks.BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_one_output_vs_float64(of, dtype):
    assert checks.misses("cpu", dtype, of=(of,), **checks.ALL) == []


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda f: f.__name__[6:])
def test_holds(check):
    check("cpu")


def test_compiled_in_one_graph():
    checks.check_compiled("cpu", "bfloat16")


def test_gradients_are_of_what_forward_read():
    leaves, tokens, settings = loss_checks.drawn("cpu", "float32", **checks.ALL)
    up = torch.randn(2, loss_checks.TOKENS)
    check_what_forward_read(checks.bound(tokens, **settings), leaves, up, (tokens,))


def test_a_second_derivative_and_later_transforms_are_refused():
    compute, leaves, _ = checks.drawn_bound("cpu", bias=True)
    refuses_second_derivatives(compute, leaves)
    refuses_transforms_of_backward(compute(**leaves), leaves["hidden"])


def test_operators_are_registered_as_torch_wants_them():
    leaves, tokens, _ = loss_checks.drawn("cpu", "bfloat16", bias=True)
    operands = (*leaves.values(), tokens, None)
    settings = -100, 0.0, 0.0, 3.0, kernels.BALANCED, False, 0.7, True
    losses, _, entropies, statistics = ops.linear_cross_entropy_by_token(*operands, *settings)
    given = (*(t.detach() for t in leaves.values()), tokens, None)
    upstream = losses.detach(), entropies.detach()
    for wants in ([True, True, True], [False, True, False]):
        torch.library.opcheck(
            ops.linear_cross_entropy_by_token_backward,
            (*given, statistics, upstream[0], wants, upstream[1], *settings),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_a_token_out_of_range_raises():
    leaves, tokens, _ = loss_checks.drawn("cpu", "float32")
    for wrong in (loss_checks.VOCABULARY, -1):
        with pytest.raises(RuntimeError, match=r"neither in \[0, 201\) nor ignore_index"):
            linear_log_probs(**leaves, tokens=tokens.index_fill(0, torch.tensor([3]), wrong))


def test_four_products_and_no_logits_but_a_slice_s(monkeypatch):
    products, seen, torch_mm, launch = [], set(), torch.mm, kernels.by_token_rows
    monkeypatch.setattr(kernels, "LOGITS_BYTES", 2**29)
    monkeypatch.setattr(torch, "mm", lambda *a, **k: products.append(1) or torch_mm(*a, **k))
    for wants, count in ((False, False), 1), ((True, False), 3), ((False, True), 3), (
        (True, True), 4
    ):  # fmt: skip
        leaves, tokens, _ = loss_checks.drawn("cpu", "float32")
        own = {n: t.detach().requires_grad_(w) for (n, t), w in zip(leaves.items(), wants)}  # noqa: B905
        products.clear()
        y = checks.bound(tokens)(**own).sum()
        if any(wants):
            y.backward()
        assert len(products) == count
    monkeypatch.setattr(kernels, "LOGITS_BYTES", 4096)

    def noted(logits, *others):
        seen.add((*logits.shape, logits.data_ptr()))
        launch(logits, *others)

    monkeypatch.setattr(kernels, "by_token_rows", noted)
    leaves, tokens, _ = loss_checks.drawn("cpu", "float32")
    y = checks.bound(tokens)(**leaves)
    for _ in range(2):
        assert {size for _, size, _ in seen} == {64, 9}
        assert len({where for *_, where in seen}) == 1
        seen.clear()
        y.sum().backward(retain_graph=True)


def test_both_passes_compute_the_same_products(monkeypatch):
    """Another product might round a logit another way."""
    seen, product = [], kernels._product

    def noted(a, b, out, bias=None):
        made = product(a, b, out, bias)
        at = b.data_ptr() if b.stride(0) == 1 else 0
        seen.append((a.data_ptr(), at, *a.shape, b.shape[1], made.clone()))
        return made

    monkeypatch.setattr(kernels, "_product", noted)
    leaves, tokens, _ = loss_checks.drawn("cpu", "bfloat16", bias=True)
    y = checks.bound(tokens)(**leaves)
    products = {each[:5]: each[5] for each in seen}
    assert len(products) == len(seen) == 2
    seen.clear()
    y.sum().backward()
    again = {each[:5]: each[5] for each in seen if each[:5] in products}
    assert again.keys() == products.keys()
    assert all(torch.equal(each, products[at]) for at, each in again.items())


def test_the_launcher_refuses_what_does_not_fit():
    given = {
        "logits": torch.zeros(4, 32)[:, :5], "target": torch.zeros(4, dtype=torch.int64),
        "class_weights": None, "statistics": torch.zeros(kernels.STATISTICS, 4), "first": 0,
        "vocabulary": 5, "settings": kernels.Settings(), "upstream": torch.zeros(4),
        "entropy_upstream": None,
    }  # fmt: skip
    kernels.by_token_rows(**given)
    for changed, words in (
        ({"logits": torch.zeros(4, 5)}, r"of stride \(32, 1\) .* got \(5, 1\)"),
        ({"upstream": torch.zeros(3)}, r"upstream must be \(4,\), .* got \(3,\)"),
        ({"entropy_upstream": torch.zeros(4).double()}, "entropy_upstream .* torch.float64"),
        ({"class_weights": torch.zeros(4)}, r"class_weights must be \(5,\)"),
        ({"statistics": torch.zeros(4)}, r"statistics must be \(7, 4\)"),
    ):
        with pytest.raises(ValueError, match=words):
            kernels.by_token_rows(**(given | changed))


def test_in_slices_of_several_blocks(monkeypatch):
    """As the broken ones below."""
    monkeypatch.setattr(kernels, "SCALED_BLOCK", 32)
    assert checks.misses("cpu", "float32", **checks.ALL) == []
    for name in ("all, by token", "by class, smoothed, z-loss"):
        settings = loss_checks.SETTINGS[name] | {"reduction": "none"}
        assert loss_checks.misses("cpu", "float32", **settings) == []
    loss_checks.check_token_accuracy("cpu")
    loss_checks.check_accuracy_of_nan_is_no_hit("cpu")


# What stands in the kernels' file, what the fault has there.
BROKEN = {
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
# Of losses by token, with what log-probabilities have not.
BROKEN_LOSSES = {
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


def broken_is_rejected(monkeypatch, tmp_path, fault, misses) -> None:
    broken = rewritten(monkeypatch, tmp_path, kernels, *fault)
    cut(monkeypatch, broken)
    monkeypatch.setattr(broken, "SCALED_BLOCK", 32)
    monkeypatch.setattr(ops, "slices_by_token", broken.slices_by_token)
    monkeypatch.setattr(
        ops, "linear_cross_entropy_by_token_backward",
        lambda *a: broken.slices_by_token(*a[:9], broken.Settings(*a[9:])),
    )  # fmt: skip
    assert misses() != []


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_rejected(monkeypatch, tmp_path, fault):
    misses = partial(checks.misses, "cpu", "float32", **checks.ALL)
    broken_is_rejected(monkeypatch, tmp_path, BROKEN[fault], misses)


@pytest.mark.parametrize("fault", BROKEN_LOSSES)
def test_a_broken_kernel_of_losses_by_token_is_rejected(monkeypatch, tmp_path, fault):
    settings = loss_checks.SETTINGS["all, by token"]
    misses = partial(loss_checks.misses, "cpu", "float32", **settings)
    broken_is_rejected(monkeypatch, tmp_path, BROKEN_LOSSES[fault], misses)
