"""`rms_norm` and `rope` on a GPU: every width's cut, CUDA graphs, determinism, sizes past 2³¹."""

import pytest
import torch
from torch.autograd import grad

import broken_rows
import rows_checks as checks
from fusedlib import rms_norm, rope
from fusedlib.ops.norm import kernels as norm_kernels
from fusedlib.ops.rope import kernels as rope_kernels
from swiglu_checks import captured

pytestmark = pytest.mark.gpu

# Several rows a program, one, in registers to the last, read twice; ragged, and more tiles than
# programs (two of each of 132 multiprocessors).
SHAPES = [(1, 1), (5000, 64), (1111, 80), (3001, 128), (1500, 2048), (700, 3072), (1025, 4096),
          (601, 5120), (550, 8192), (531, 8200), (300, 16384), (280, 32768)]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_and_gradients_vs_float64(shape, dtype):
    assert checks.misses_norm("cuda", dtype, *shape) == []
    assert checks.misses_norm("cuda", dtype, *shape, residual=False, cast="litgpt") == []


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_rms_norm_at_other_scales_vs_float64(scale):
    for dtype in ("float32", "bfloat16"):
        assert checks.misses_norm("cuda", dtype, 300, 2048, scale=scale) == []


# Llama-1B, Llama-8B, Qwen2-0.5B, SmolLM, open_llama_3b, heads of 256, of 66 and 10.
HEADS = [(2, 32, 8, 517, 64), (1, 32, 8, 300, 128), (2, 14, 2, 129, 64), (3, 9, 3, 100, 64),
         (1, 32, 32, 77, 100), (1, 8, 4, 65, 256), (2, 5, 5, 33, 66), checks.SMALL]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_rope_and_gradients_vs_float64(shape, dtype):
    for transposed, part in ((True, 1), (False, 2)):
        rotary = shape[4] // part // 2 * 2
        assert checks.misses_rope("cuda", dtype, shape, rotary, transposed, shape[0]) == []


@pytest.mark.parametrize("check", checks.ALL, ids=lambda f: f.__name__[6:])
def test_holds(check):
    check("cuda")


def test_compiled_in_one_graph():
    checks.check_compiled("cuda", "bfloat16")


@pytest.mark.parametrize("fault", broken_rows.BROKEN_NORM)
def test_a_broken_rms_norm_is_rejected(monkeypatch, tmp_path, fault):
    broken_rows.put(monkeypatch, tmp_path, norm_kernels, broken_rows.BROKEN_NORM[fault])
    shape = (1111, 8300) if "wide" in fault else (11111, 300)  # more tiles than programs
    assert checks.misses_norm("cuda", "float32", *shape)


@pytest.mark.parametrize("fault", broken_rows.BROKEN_ROPE)
def test_a_broken_rope_is_rejected(monkeypatch, tmp_path, fault):
    broken_rows.put(monkeypatch, tmp_path, rope_kernels, broken_rows.BROKEN_ROPE[fault])
    case = "cuda", "float32", (2, 6, 2, 300, 20), 12
    wider = checks.misses_rope(*case, batches=2, compute=checks.through_wider_heads)
    assert wider and ("zeros" in fault or checks.misses_rope(*case, batches=2))


def test_a_position_outside_the_table_gives_nan_there_alone():
    checks.check_positions_outside_the_table("cuda")


@pytest.mark.parametrize("width", [2048, 16384])
def test_a_cuda_graph_replays_what_a_call_gives_bit_by_bit(width):
    leaves, upstream = checks.norm_case("cuda", "bfloat16", 4096, width, True)
    own = [leaves[n].requires_grad_() for n in ("x", "residual", "weight")]
    heads, turned_back = checks.heads("cuda", "bfloat16", (2, 32, 8, 2048, 64))
    turning = [t.requires_grad_() for t in heads.values()]
    cos, sin = (t[0] for t in checks.tables("cuda", torch.bfloat16, 1, 4096, 64))
    at = torch.arange(2048, device="cuda")

    def step():
        outputs = rms_norm(own[0], own[2], residual=own[1])
        turned = rope(*turning, cos, sin, positions=at)
        return (
            *outputs, *grad(outputs, own, tuple(upstream.values())),
            *turned, *grad(turned, turning, tuple(turned_back.values())),
        )  # fmt: skip

    wanted = [t.detach().clone() for t in step()]
    for _ in range(5):
        assert checks.same(step(), wanted)
    graph, written = captured(step)
    graph.replay()
    assert checks.same(written, wanted)
    with torch.no_grad():
        own[0].mul_(-0.5)
        at.add_(7)
    graph.replay()
    assert checks.same([t.clone() for t in written], step())


def test_addresses_off_16_bytes():
    leaves, _ = checks.norm_case("cuda", "bfloat16", 70, 256, True)
    x, residual, weight = (leaves[n] for n in ("x", "residual", "weight"))
    wanted = rms_norm(x, weight, residual=residual)
    for off in (1, 4):
        buffer = torch.empty(x.numel() + off, device="cuda", dtype=x.dtype)
        moved = buffer[off:].view_as(x).copy_(x)
        assert checks.close(rms_norm(moved, weight, residual=residual), wanted)


def test_more_than_2_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free memory")
    rows, width = 2**19 + 3, 4096
    x = torch.ones(rows, width, device="cuda", dtype=torch.bfloat16)
    x[-1], x[-2, 0] = 3, 100
    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    y, s = rms_norm(x.requires_grad_(), weight, residual=x.detach())
    assert torch.equal(y[-2:], rms_norm(x[-2:], weight, residual=x[-2:].detach())[0])
    d_x, d_weight = grad(y, (x, weight), torch.ones_like(y))
    wanted = y.detach()[-2:].double().sum(0) + rows - 2
    torch.testing.assert_close(d_weight.double(), wanted, rtol=4e-3, atol=0)
    assert d_x[0].abs().max() < 1e-2 and d_x[-2].float().norm() > 1e-2
    del x, y, s, d_x
    q = torch.ones(1, 2**17 + 1, 128, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    cos, sin = checks.tables("cuda", torch.bfloat16, 1, q.shape[2], 128)
    turned, _ = rope(q, q[:, :1], cos, sin)
    wanted, _ = rope(q[:, -1:, -9:], q[:, :1, -9:], cos[:, -9:], sin[:, -9:])
    assert torch.equal(turned[:, -1:, -9:], wanted)
