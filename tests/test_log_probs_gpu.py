"""`linear_log_probs` on a GPU: real vocabularies, blocks, memory, CUDA graphs, no waiting."""

import gc

import pytest
import torch

import linear_cross_entropy_checks as loss_checks
import log_probs_checks as checks
from fusedlib import linear_log_probs
from gradient_checks import captured, close, same

pytest.importorskip("triton")
from fusedlib.ops.loss import kernels

pytestmark = pytest.mark.gpu
DTYPES = ("bfloat16", "float16", "float32")
# Tokens, hidden, vocabulary: rows of one block and of several, ragged, aligned, of one column.
SHAPES = [(517, 384, 1003), (300, 264, 50257), (130, 512, 151936), (1030, 16, 16), (1, 1, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_vs_float64(shape, dtype):
    assert checks.misses("cuda", dtype, shape) == []
    assert checks.misses("cuda", dtype, shape, **checks.ALL) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", checks.SETTINGS)
def test_in_blocks_vs_float64(monkeypatch, dtype, settings):
    monkeypatch.setattr(kernels, "LOGITS_BYTES", 2**25)
    weight = torch.empty(50257, 128, dtype=getattr(torch, dtype), device="meta")
    assert kernels.slices(517, weight).rows < 50257
    for of in (checks.BOTH, checks.BOTH[:1], checks.BOTH[1:]):
        found = checks.misses("cuda", dtype, (517, 128, 50257), of=of, **checks.SETTINGS[settings])
        assert found == []


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda f: f.__name__[6:])
def test_holds(check):
    check("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_in_one_graph(dtype):
    checks.check_compiled("cuda", dtype)


def test_both_passes_round_logits_alike(monkeypatch):
    """A slice, computed again, has the bits of forward's."""
    monkeypatch.setattr(kernels, "LOGITS_BYTES", 2**27)
    leaves, tokens, settings = loss_checks.drawn("cuda", "bfloat16", (2048, 512, 151936))
    slices, launch = [], kernels.by_token_rows

    def noted(logits, *others):
        slices.append(logits.clone())
        launch(logits, *others)

    monkeypatch.setattr(kernels, "by_token_rows", noted)
    log_probs, _ = linear_log_probs(**leaves, tokens=tokens, **settings)
    count = len(slices)
    assert count > 1
    torch.autograd.grad(log_probs.sum(), list(leaves.values()))
    assert len(slices) == 2 * count and same(slices[:count], slices[count:])


def test_nothing_waits_for_the_device_and_a_graph_replays(monkeypatch):
    monkeypatch.setattr(kernels, "LOGITS_BYTES", 2**20)
    leaves, tokens, settings = loss_checks.drawn("cuda", "bfloat16", (300, 64, 5003), **checks.ALL)
    own, up = list(leaves.values()), [torch.full((300,), size, device="cuda") for size in (3, 0.5)]

    def step():
        outputs = linear_log_probs(**leaves, tokens=tokens, **settings)
        return [*(t.detach() for t in outputs), *torch.autograd.grad(outputs, own, up)]

    wanted = [t.clone() for t in step()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(found, wanted)
    graph, written = captured(step)
    graph.replay()
    assert close(written, wanted)
    with torch.no_grad():
        leaves["hidden"].mul_(-0.5)
        tokens[:100] = -100
    graph.replay()
    assert close(written, step())


@pytest.mark.parametrize("width", [2048, 4096])
def test_memory_is_the_planned_one(width):
    """Over the gradients; and outputs, statistics, targets' checks and the like, of 4 MiB."""
    leaves, tokens, _ = loss_checks.drawn("cuda", "bfloat16", (8192, width, 151936))
    gradients = sum(t.numel() * t.itemsize for t in leaves.values())

    def step():
        torch.stack(linear_log_probs(**leaves, tokens=tokens)).sum().backward()

    step()  # cuBLAS's workspace
    for t in leaves.values():
        t.grad = None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    over = torch.cuda.max_memory_allocated() - before - gradients
    planned = kernels.slices(8192, leaves["weight"]).memory
    print(f"8192·{width}: {over / 2**20:.0f} MiB over the gradients, {planned / 2**20:.0f} planned")
    assert over <= planned + 2**22 and over <= 2**30
