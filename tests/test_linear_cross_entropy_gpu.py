"""`linear_cross_entropy` on a GPU: real vocabularies, chunks, memory, CUDA graphs, no waiting."""

import gc
import subprocess
import sys
from functools import partial

import pytest
import torch

import linear_cross_entropy_checks as checks
from fusedlib import linear_cross_entropy
from gradient_checks import captured, close, same

pytest.importorskip("triton")
import limits
from fusedlib.ops.loss import kernels

pytestmark = pytest.mark.gpu
DTYPES = ("bfloat16", "float16", "float32")
# Tokens, hidden, vocabulary: rows of one block and of several, ragged, aligned, of one column.
SHAPES = [(517, 384, 1003), (300, 264, 50257), (130, 512, 128256), (33, 77, 16385), (1030, 16, 16),
          (1, 1, 1)]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradients_vs_float64(shape, dtype):
    assert checks.misses("cuda", dtype, shape) == []
    assert checks.misses("cuda", dtype, shape, **checks.ALL) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", checks.SETTINGS)
def test_settings_vs_float64(dtype, settings):
    assert checks.misses("cuda", dtype, (133, 64, 40003), **checks.SETTINGS[settings]) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", ["plain", "all, mean", "all, by token"])
def test_in_chunks_vs_float64(dtype, settings):
    weight = torch.empty(50257, 128, dtype=getattr(torch, dtype), device="meta")
    assert kernels.plan(517, weight, memory=2**25).rows == 128
    chunked = partial(linear_cross_entropy, memory=2**25)
    found = checks.misses(
        "cuda", dtype, (517, 128, 50257), compute=chunked, **checks.SETTINGS[settings]
    )
    assert found == []


def test_sums_over_many_chunks_are_fp32():
    """74 chunks of seven tokens each: added up in bf16, d_W would err tens of times more."""
    shape = 517, 8, 1003
    leaves, target, _ = checks.drawn("cuda", "bfloat16", shape)
    wanted = checks.step(leaves, target)
    chunked = partial(linear_cross_entropy, memory=4 * 8 * 1003)
    found = checks.step(leaves, target, chunked)
    off = (found[2].double() - wanted[2].double()).norm() / wanted[2].double().norm()
    assert off < torch.finfo(torch.bfloat16).eps / 2
    assert checks.misses("cuda", "bfloat16", shape, compute=chunked) == []


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda f: f.__name__[6:])
def test_holds(check):
    check("cuda")


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("vocabulary", [1, 50257, 128256])
@pytest.mark.parametrize("softcap", [0.0, 1.0, 30.0])
def test_a_row_keeps_its_bound(vocabulary, magnitude, softcap):
    checks.check_bound("cuda", magnitude, vocabulary, softcap)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_in_one_graph(dtype):
    checks.check_compiled("cuda", dtype)


def test_tf32_is_torch_s():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert checks.misses("cuda", "float32", (512, 384, 4096)) == []
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_waits_for_the_device_and_a_graph_replays(dtype, reduction):
    leaves, target, settings = checks.drawn(
        "cuda", dtype, (300, 64, 5003), token_weights=True, reduction=reduction
    )
    own = list(leaves.values())
    up = torch.full((300,) if reduction == "none" else (), 3.0, device="cuda")

    def step():
        loss = linear_cross_entropy(**leaves, target=target, **settings, memory=2**21)
        return [loss.detach(), *torch.autograd.grad(loss, own, up)]

    wanted = [t.clone() for t in step()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(step()) == 3
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, written = captured(step)
    graph.replay()
    assert close(written, wanted)
    with torch.no_grad():
        leaves["hidden"].mul_(-0.5)
        target[:100] = -100
        up.mul_(0.5)
    graph.replay()
    assert close(written, step())


def test_results_repeat_bit_by_bit():
    leaves, target, settings = checks.drawn("cuda", "bfloat16", (517, 128, 20000), **checks.ALL)
    chunked = partial(linear_cross_entropy, memory=2**24)
    first = checks.step(leaves, target, chunked, **settings)
    for _ in range(5):
        assert same(checks.step(leaves, target, chunked, **settings), first)


@pytest.mark.parametrize("memory", ["least", "balanced", 2**31])
@pytest.mark.parametrize(("tokens", "width"), [(2048, 2048), (8192, 2048), (8192, 4096)])
def test_memory_is_the_planned_one(tokens, width, memory):
    """Over the gradients; and the losses, targets' checks and the like, of 4 MiB at most."""
    vocabulary = 128256
    leaves, target, _ = checks.drawn("cuda", "bfloat16", (tokens, width, vocabulary))
    gradients = sum(t.numel() * t.itemsize for t in leaves.values())
    linear_cross_entropy(**leaves, target=target, memory=memory).backward()  # cuBLAS's workspace
    for t in leaves.values():
        t.grad = None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(**leaves, target=target, memory=memory).backward()
    over = torch.cuda.max_memory_allocated() - before - gradients
    words = {"least": kernels.LEAST, "balanced": kernels.BALANCED}
    plan = kernels.plan(tokens, leaves["weight"], memory=words.get(memory, memory))
    print(f"{tokens}·{width} {memory}: {over / 2**20:.0f} MiB over the gradients, {plan}")
    assert plan.memory <= over <= plan.memory + 2**22
    assert torch.cuda.memory_allocated() - before <= gradients + 2**20


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


def measured(run) -> float:
    """ms, median of ten, after a warm-up."""
    times = []
    for i in range(13):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(end)] if i > 2 else []
    return sorted(times)[len(times) // 2]


@pytest.mark.parametrize("width", [2048, 4096])
def test_time_beside_the_three_products(width):
    """A look, not a race: `-s` prints it. The floor of issue 19 is 1.30 of the products."""
    leaves, target, _ = checks.drawn("cuda", "bfloat16", (8192, width, 128256))
    hidden, weight = (t.detach() for t in leaves.values())
    logits = torch.empty(8192, 128256, device="cuda", dtype=torch.bfloat16)
    rows = 2048
    buffer, one = logits[:rows], torch.ones((), device="cuda")
    losses = torch.empty(rows, device="cuda")

    def products():
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)

    def step():
        linear_cross_entropy(**leaves, target=target).backward()
        for t in leaves.values():
            t.grad = None

    def rows_alone():
        kernels.cross_entropy_rows(
            buffer, target[:rows], None, None, one, losses, None, kernels.Settings(), gradient=True
        )

    plain, ours = measured(products), measured(step)
    torch.mm(hidden, weight.t(), out=logits)
    total = torch.mm(buffer.t(), hidden[:rows], out_dtype=torch.float32)
    kernel = measured(rows_alone)
    summed = measured(lambda: kernels._add_product(total, buffer.t(), hidden[:rows], total.dtype))
    alone = measured(lambda: torch.mm(buffer.t(), hidden[:rows]))
    finish = measured(lambda: kernels.fill_scaled(total, torch.empty_like(weight), one))
    print(f"\n{width}: products {plain:.2f} ms, ours {ours:.2f} ({ours / plain:.3f}); a chunk's "
          f"rows {kernel:.3f}, d_W {alone:.3f}, added in fp32 {summed:.3f}; rounding {finish:.3f}"
    )  # fmt: skip
    assert ours < 2 * plain
