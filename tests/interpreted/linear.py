"""`fusedlib.linear` in Triton's interpreter: `tests/test_linear.py` runs this file in a process of
its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import copy
import sys

import linear_checks as checks
import linear_cross_entropy_checks as loss_checks
import pytest
import torch
from broken_kernels import without_scales
from called import note_launches
from torch.autograd import grad

import fusedlib
from fusedlib import linear
from fusedlib.kernels import split
from fusedlib.kernels.split import product as products
from fusedlib.kernels.swiglu_configs import Config
from fusedlib.recomputed import compute_again, forget

torch.set_num_threads(1)  # two wait for one another where others use the cores

# Rows that are not of this vocabulary may hold anything.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MULTIPLY = "_split_product_kernel"
ROWS, COLUMNS = "_split_rows_kernel", "_split_columns_kernel"


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Products of any size are split; names of the kernels that ran."""
    checks.split_everything(monkeypatch)
    monkeypatch.setattr(products, "INTERPRETER", Config(128, 128, 64, 4, 1, group_m=2))
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


def test_another_precision_is_torch_s(started):
    checks.check_precision(started, "cpu")


def test_every_operand_is_split_once_an_axis_and_only_as_wanted(started):
    leaves, dy = checks.operands("cpu", checks.SMALL)
    look = "_look_at_columns_kernel"
    y_s, d_x_s = [ROWS, ROWS, MULTIPLY], [ROWS, look, COLUMNS, MULTIPLY]
    d_w_s = [look, COLUMNS, look, COLUMNS, MULTIPLY]
    for wants in ((True, True), (True, False), (False, True)):
        own = [leaves[n].detach().requires_grad_(w) for n, w in zip(("x", "weight"), wants)]  # noqa: B905
        started.clear()
        y = linear(*own)
        assert started == y_s
        started.clear()
        y.backward(dy)
        assert started == d_x_s * wants[0] + d_w_s * wants[1]


def test_a_product_that_does_not_pay_is_torch_s(started, monkeypatch):
    """y and d_x have too few results here, d_W has enough."""
    gates = sys.modules[split.split_pays.__module__]
    shape = (20, 136, 140)
    monkeypatch.setattr(gates, "LEAST_RESULTS", 136 * 140)
    assert checks.misses_linear("cpu", shape) == []
    assert started.count(MULTIPLY) == 1
    monkeypatch.setattr(gates, "LEAST_RESULTS", 1 << 20)
    started.clear()
    leaves, dy = checks.operands("cpu", shape)
    torch_s = checks.step(leaves, dy, torch.nn.functional.linear)
    assert checks.same(checks.step(leaves, dy), torch_s) and not started


def test_ieee_please(started, monkeypatch):
    """FUSEDLIB_SPLIT=0."""
    gates = sys.modules[split.split_pays.__module__]
    monkeypatch.setattr(gates, "SPLITS", False)
    leaves, dy = checks.operands("cpu", checks.SMALL)
    torch_s = checks.step(leaves, dy, torch.nn.functional.linear)
    assert checks.same(checks.step(leaves, dy), torch_s) and not started


def test_a_tensor_left_over_from_a_transform(started):
    leaves, _ = checks.operands("cpu", checks.SMALL)
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(leaves["x"].detach())
    assert torch.equal(linear(kept[0], leaves["weight"]), linear(leaves["x"], leaves["weight"]))
    assert started.count(MULTIPLY) == 2


def test_a_norm_s_output_is_computed_again_for_it():
    """`fusedlib.recomputed`: what the layer keeps is the norm's output, which need not be kept."""
    leaves, dy = checks.operands("cpu", checks.SMALL)
    own, calls = list(leaves.values()), []
    scale = torch.rand(checks.SMALL[1])

    def step(noted: bool) -> list[torch.Tensor]:
        y = fusedlib.rms_norm(own[0], scale)
        if noted:
            again = fusedlib.rms_norm
            compute_again(y, lambda: calls.append(1) or again(own[0].detach(), scale))
        z = forget(y, linear(y, *own[1:]))
        return [z.detach(), *grad(z, own, dy)]

    assert checks.same(step(True), step(False)) and len(calls) == 1


# --- the loss ------------------------------------------------------------------------------------


PADDED, WHOLE = 201, 224  # rows of logits


@pytest.mark.parametrize(
    ("settings", "vocabulary", "chunked"),
    [("plain", WHOLE, False), ("bias", PADDED, False),
     ("all, mean", PADDED, True), ("all, by token", WHOLE, False)],
)  # fmt: skip
def test_the_loss_by_the_same_product(started, monkeypatch, settings, vocabulary, chunked):
    from fusedlib.kernels import linear_cross_entropy as kernels

    tokens, width = 140, 136
    if chunked:
        monkeypatch.setattr(kernels, "LOGITS_BYTES", 60 * kernels.row_stride(vocabulary, 4) * 4)
        monkeypatch.setattr(kernels, "ROWS", 20)
    shape = tokens, width, vocabulary
    assert loss_checks.misses("cpu", "float32", shape, **loss_checks.SETTINGS[settings]) == []
    chunks = 3 if chunked else 1
    again = chunks if "token" in settings else 0
    assert started.count(MULTIPLY) == 3 * chunks + again


def test_the_loss_at_another_precision_is_torch_s(started):
    leaves, target, _ = loss_checks.drawn("cpu", "float32")
    with checks.matmul_settings("high", False):
        loss_checks.step(leaves, target)
    assert MULTIPLY not in started


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
    from fusedlib.kernels import linear_cross_entropy as kernels

    shape = 140, 136, 201
    monkeypatch.setattr(kernels, "LOGITS_BYTES", 60 * kernels.row_stride(201, 4) * 4)
    monkeypatch.setattr(kernels, "ROWS", 20)
    add = kernels._add_product
    monkeypatch.setattr(kernels, "_add_product", lambda total, *rest: add(None, *rest))
    assert loss_checks.misses("cpu", "float32", shape) != []


def test_gradients_by_torch_where_backward_is_differentiated(started):
    leaves, dy = checks.operands("cpu", checks.SMALL)
    y = linear(**leaves)
    started.clear()
    d_x, _ = grad(y, (leaves["x"], leaves["weight"]), dy, create_graph=True)
    assert not started and d_x.requires_grad
