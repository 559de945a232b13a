"""`fusedlib.linear` on a GPU: errors beside cuBLAS's, memory, CUDA graphs, whole models."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.nn import functional

import fusedlib
import linear_checks as checks
import loss_cases
from fusedlib import linear
from gradient_checks import captured
from split_families import FAMILIES

pytestmark = pytest.mark.gpu

# All three products are split; ragged; d_x, of few results, is torch's.
EVEN, RAGGED, SOME = (2048, 2048, 2048), (2050, 1030, 2070), (384, 2560, 5120)


@pytest.fixture
def products(monkeypatch):
    """Those that are split."""
    return checks.note_products(monkeypatch)


@pytest.mark.parametrize(("shape", "count"), [(EVEN, 3), (RAGGED, 3), (SOME, 2)], ids=str)
def test_errors_vs_cublas(products, shape, count):
    """Twice, the second time with kept launches."""
    leaves, dy = checks.operands("cuda", shape)
    wide = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}
    true = checks.step(wide, dy.double(), functional.linear)
    usual = checks.step(leaves, dy, functional.linear)
    for _ in range(2):
        products.clear()
        found = checks.step(leaves, dy)
        assert len(products) == count
        own, its = (
            [((f - t).norm() / t.norm()).item() for f, t in zip(each, true, strict=True)][:3]
            for each in (found, usual)
        )
        assert all(o <= max(0.7 * i, 3e-7) or o == i for o, i in zip(own, its, strict=True)), (
            own, its,
        )  # fmt: skip
    assert checks.misses_linear("cuda", shape) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_and_gradients_vs_the_contract(family):
    assert checks.contract_misses_of("cuda", RAGGED, family) == []


@pytest.mark.parametrize("check", [*checks.ALL, *checks.WHERE_SPLIT], ids=checks.name_of)
def test_holds(check):
    check("cuda", RAGGED)


def test_another_precision_is_torch_s(products):
    checks.check_precision(products, "cuda", EVEN)


def test_small_ones_and_other_dtypes_are_torch_s(products):
    for dtype, shape in (("float32", (256, 512, 512)), ("bfloat16", EVEN)):
        leaves, dy = checks.operands("cuda", shape, dtype)
        found = checks.step(leaves, dy)
        assert checks.same(found, checks.step(leaves, dy, functional.linear))
    assert not products


def test_as_much_is_kept_as_by_torch():
    leaves, _ = checks.operands("cuda", EVEN)

    def kept(compute) -> int:
        before = torch.cuda.memory_allocated()
        y = compute(**leaves)
        return torch.cuda.memory_allocated() - before - y.numel() * 4

    for compute in (linear, functional.linear):  # whose first call keeps a workspace
        kept(compute)
    assert kept(linear) == kept(functional.linear) == 0


def test_a_cuda_graph_replays_what_a_call_gives_bit_by_bit():
    leaves, dy = checks.operands("cuda", RAGGED)
    graph, written = captured(lambda: checks.step(leaves, dy))
    graph.replay()
    assert checks.same(written, checks.step(leaves, dy))
    with torch.no_grad():
        leaves["x"].mul_(-0.5)
        leaves["weight"][7] *= 2.0**20
    graph.replay()
    assert checks.same([t.clone() for t in written], checks.step(leaves, dy))


@pytest.mark.parametrize("fault", checks.BROKEN)
def test_a_broken_layer_is_rejected(monkeypatch, tmp_path, fault):
    checks.broken(monkeypatch, tmp_path, fault)
    assert checks.misses_linear("cuda", RAGGED) != []


@pytest.mark.parametrize("vocabulary", [10000, 10016], ids=["padded", "whole"])
@pytest.mark.parametrize("settings", ["plain", "all, mean", "all, by token"])
def test_the_loss_vs_float64(products, settings, vocabulary):
    shape = 1024, 1024, vocabulary
    assert loss_cases.misses("cuda", "float32", shape, **loss_cases.SETTINGS[settings]) == []
    assert len(products) >= 3


def test_the_loss_in_chunks_vs_float64(monkeypatch, products):
    from fusedlib.ops.loss import kernels

    monkeypatch.setattr(kernels, "LOGITS_BYTES", 1024 * 10016 * 4)
    assert loss_cases.misses("cuda", "float32", (3000, 1024, 10016)) == []
    assert len(products) == 8  # of three chunks; the last d_hidden, 952 by 1024, is too small


def fp32_pair():
    from llama_models import make

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 8192}
    with torch.device("cuda"):
        plain = make("Llama", **sizes, max_position_embeddings=1024)
    patched = copy.deepcopy(plain)
    report = fusedlib.apply_to(patched)
    assert len(report.replaced["linear"]) == 9
    ids = torch.randint(1, 8192, (8, 512), device="cuda")
    return plain, patched, ids


def test_a_whole_fp32_model_vs_the_plain_one(products):
    pytest.importorskip("transformers")
    from llama_models import misses_of

    plain, patched, ids = fp32_pair()
    assert misses_of(plain, patched, ids, ids) == []
    # Of two layers q, o and the MLP, and of the loss; k and v are too small to be split.
    assert len(products) == 2 * (3 + 3 + 6) + 3


def test_a_whole_fp32_step_captured_in_a_cuda_graph():
    pytest.importorskip("transformers")
    _, patched, ids = fp32_pair()
    weights = list(patched.parameters())

    def step():
        loss = patched(ids, labels=ids).loss
        return [loss.detach(), *grad(loss, weights)]

    graph, written = captured(step)
    graph.replay()
    assert checks.same(written, step())


def test_two_layers_of_one_shape_on_two_streams():
    layers = [fusedlib.Linear(2048, 2048, device="cuda") for _ in range(2)]
    x = torch.randn(2048, 2048, device="cuda")
    wanted = [layer(x) for layer in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    found = []
    for layer, stream in zip(layers, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(layer(x))
    torch.cuda.synchronize()
    assert checks.same(found, wanted)
    assert isinstance(layers[0], nn.Linear)
