"""`linear_log_probs` in Triton's interpreter: `tests/test_log_probs.py` runs this file in a process
of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

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
    """Rows are four blocks, chunks of forward four tokens, slices of backward some classes."""
    loss_checks.cut_in_four(monkeypatch, module)
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
            (*given, statistics, *upstream, wants, *settings),
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
    compute, leaves, up = checks.drawn_bound("cpu")
    checks.results_of(compute, leaves, up)
    assert {size for _, size, _ in seen} == {64, 9} and len({where for *_, where in seen}) == 1


def test_both_passes_compute_logits_in_the_same_blocks(monkeypatch):
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
    blocks = {block[:5]: block[5] for block in seen}
    assert len(blocks) == len(seen) == 4
    seen.clear()
    y.sum().backward()
    again = {block[:5]: block[5] for block in seen if block[:5] in blocks}
    assert again.keys() == blocks.keys()
    assert all(torch.equal(block, blocks[at]) for at, block in again.items())


def test_the_launcher_refuses_what_does_not_fit():
    given = {
        "logits": torch.zeros(4, 32)[:, :5], "target": torch.zeros(4, dtype=torch.int64),
        "upstream": torch.zeros(4), "entropy_upstream": None, "class_weights": None,
        "statistics": torch.zeros(4, 4), "first": 0, "vocabulary": 5,
        "settings": kernels.Settings(),
    }  # fmt: skip
    kernels.by_token_rows(**given)
    for changed, words in (
        ({"logits": torch.zeros(4, 5)}, r"of stride \(32, 1\) .* got \(5, 1\)"),
        ({"upstream": torch.zeros(3)}, r"upstream must be \(4,\), .* got \(3,\)"),
        ({"entropy_upstream": torch.zeros(4).double()}, "entropy_upstream .* torch.float64"),
        ({"class_weights": torch.zeros(4)}, r"class_weights must be \(5,\)"),
        ({"statistics": torch.zeros(4)}, r"statistics must be \(4, 4\)"),
    ):
        with pytest.raises(ValueError, match=words):
            kernels.by_token_rows(**(given | changed))


# What stands in the kernels' file, what the fault has there.
BROKEN = {
    "a maximum's fall left out": ("decay * (below - step * total)", "decay * below"),
    "lanes' falls left out": ("(below + drop * total)", "below"),
    "the entropy without the sum": ("log_total - below / total", "log_total"),
    "the entropy's gradient without the entropy": ("-3.0e38) + entropy)", "-3.0e38))"),
    "the entropy's gradient with another sign": ("d -= tl.load(entropy", "d += tl.load(entropy"),
    "no temperature in the gradient": ("0.0, d * by_temperature)", "0.0, d)"),
    "no temperature in the logits": ("return x * by_temperature", "return x"),
    "a softcap without derivative": (
        "d *= _softcap_derivative(x, softcap)\n    d = tl", "d *= 1.0\n    d = tl",
    ),
    "ignored tokens have gradients": ("label == ignore_index, 0.0, d", "label == -5, 0.0, d"),
    "another slice's tokens": ("p, first + lanes, label", "p, lanes, label"),
    "the last slice's d_hidden alone": ("_add_product(d_hidden, log", "_add_product(None, log"),
    "d_W in the first slice's place": ("out=d_weight[part]", "out=d_weight[: w.shape[0]]"),
    "a slice with the first one's bias": (
        "weight[part], None if bias is None else bias[part]",
        "weight[part], None if bias is None else bias[: len(weight[part])]",
    ),
    "the first chunk's statistics alone": ("given[part] for", "given[: h.shape[0]] for"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_rejected(monkeypatch, tmp_path, fault):
    broken = rewritten(monkeypatch, tmp_path, kernels, *BROKEN[fault])
    cut(monkeypatch, broken)
    for name in ("losses_and_gradients", "gradients_by_token"):
        monkeypatch.setattr(ops, name, getattr(broken, name))
    assert checks.misses("cpu", "float32", **checks.ALL) != []
