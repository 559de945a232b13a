"""`rms_norm` and `rope` in Triton's interpreter: `tests/test_rows.py` runs this file in a process
of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import pytest
import torch
from torch.autograd import grad

import broken_rows
import rows_checks as checks
from called import Called, note_launches
from fusedlib import rms_norm, rope
from fusedlib.launch.config import Config
from fusedlib.launch.device import has_kernels
from fusedlib.launch.launch import Launch
from fusedlib.ops.linear.split import parts
from fusedlib.ops.linear.split import product as split_product
from fusedlib.ops.loss import kernels as loss_kernels
from fusedlib.ops.mlp import tiles as swiglu
from fusedlib.ops.mlp.few_tokens import kernels as few_tokens
from fusedlib.ops.norm import kernels as norm_kernels
from fusedlib.ops.rope import kernels as rope_kernels
from gradient_checks import (
    check_what_forward_read,
    refuses_second_derivatives,
    refuses_transforms_of_backward,
)

DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Small tiles and blocks, and the names of the kernels that ran."""
    monkeypatch.setattr(norm_kernels, "TILE", 128)
    monkeypatch.setattr(norm_kernels, "WIDEST", 128)
    monkeypatch.setattr(rope_kernels, "PAIRS", 256)
    return note_launches(monkeypatch)


@pytest.mark.parametrize("cast", ["hf", "litgpt"])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_and_gradients_vs_float64(started, dtype, residual, cast):
    assert checks.misses_norm("cpu", dtype, 37, 43, residual, cast) == []
    assert started == ["_rms_norm_fwd_kernel", "_rms_norm_bwd_kernel", "_sum_parts_kernel"]


@pytest.mark.parametrize("shape", [(1, 1), (41, 3), (20, 128), (29, 200), (7, 515)], ids=str)
def test_rms_norm_at_other_shapes_vs_float64(shape):
    """Several rows a program; rows wider than a program holds."""
    assert checks.misses_norm("cpu", "bfloat16", *shape) == []


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_rms_norm_at_other_scales_vs_float64(scale):
    assert checks.misses_norm("cpu", "float32", 21, 80, scale=scale) == []


@pytest.mark.parametrize("shape", [(2, 6, 2, 19, 10), (1, 3, 3, 33, 66), (1, 8, 4, 5, 32)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rope_and_gradients_vs_float64(started, dtype, shape):
    assert checks.misses_rope("cpu", dtype, shape) == []
    assert started == ["_rope_kernel"] * 2


@pytest.mark.parametrize("transposed", [True, False])
def test_rope_of_a_part_of_each_head_vs_float64(transposed):
    for rotary, batches in ((6, 1), (2, 2)):
        assert (
            checks.misses_rope("cpu", "bfloat16", checks.SMALL, rotary, transposed, batches) == []
        )


@pytest.mark.parametrize("check", checks.ALL, ids=lambda f: f.__name__[6:])
def test_holds(check):
    check("cpu")


def test_compiled_in_one_graph():
    checks.check_compiled("cpu")


@pytest.mark.parametrize("fault", broken_rows.BROKEN_NORM)
def test_a_broken_rms_norm_is_rejected(monkeypatch, tmp_path, fault):
    broken_rows.put(monkeypatch, tmp_path, norm_kernels, broken_rows.BROKEN_NORM[fault])
    width = 200 if "wide" in fault else 43
    assert checks.misses_norm("cpu", "float32", 37, width)


@pytest.mark.parametrize("fault", broken_rows.BROKEN_ROPE)
def test_a_broken_rope_is_rejected(monkeypatch, tmp_path, fault):
    broken_rows.put(monkeypatch, tmp_path, rope_kernels, broken_rows.BROKEN_ROPE[fault])
    case = "cpu", "float32", checks.SMALL, 6
    wider = checks.misses_rope(*case, batches=2, compute=checks.through_wider_heads)
    assert wider and ("zeros" in fault or checks.misses_rope(*case, batches=2))


def test_a_position_outside_the_table_gives_nan_there_alone():
    checks.check_positions_outside_the_table("cpu")


# --- sizes past those of 32 bits, of 16 bits -----------------------------------------------------

MANY = 9_000_000  # more blocks of 128 than a grid has programs along y and z


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def norms(*shape):
    x, weight, rstd = meta(*shape), meta(shape[-1]), meta(shape[0])
    norm_kernels.rms_norm_fwd(x, weight, x, 1e-6, True)
    norm_kernels.rms_norm_bwd(x, x, x, weight, rstd, True, True)


def rotations(batch, heads, tokens, head_dim):
    cos = meta(1, tokens, head_dim)
    rope_kernels.rope_fwd(*[meta(batch, heads, tokens, head_dim)] * 2, cos, cos, None, None)


def losses(rows, vocabulary):
    logits = meta(rows, loss_kernels.row_stride(vocabulary, 4))[:, :vocabulary]
    target, one = meta(rows, dtype=torch.int64), meta()
    operands = logits, target, None, None, one, meta(rows), None
    loss_kernels.cross_entropy_rows(*operands, loss_kernels.Settings(), gradient=True)
    loss_kernels.fill_scaled(logits, logits, one)


def mlps(tokens, hidden, inner):
    device = torch.device("cpu")
    for product in (False, True):
        variant = swiglu.Variant(product, True, True, False)
        swiglu.bwd_launch(device, tokens, hidden, inner, variant)
    few_tokens.down_launch(device, tokens, hidden, inner)
    few_tokens.gradients_launch((True, True, True), device, tokens, hidden, inner)


def split_factors(rows, columns):
    for by_columns in (False, True):
        source = meta(rows, columns)
        parts.FactorSplitter(source.device, source, by_columns)(source)


def split_products(m, n, k):
    split_product._launch(torch.device("meta"), (m, n, k, 1024), (False, False))


@pytest.mark.parametrize(
    ("launcher", "sizes"),
    [
        *[(norms, s) for s in ((MANY, 8), (3, MANY))],
        *[(rotations, s) for s in ((MANY, 2, 3, 8), (2, MANY, 3, 8), (2, 3, MANY, 8))],
        *[(rotations, (70_000, 8, 1, 16))],
        *[(losses, s) for s in ((MANY, 5), (3, MANY))],
        *[(mlps, s) for s in ((MANY, 64, 64), (300, MANY, 64), (300, 64, MANY), (3, 64, MANY))],
        *[(split_factors, s) for s in ((MANY, 300), (300, MANY))],
        *[(split_products, s) for s in ((MANY, 300, 256), (300, MANY, 256), (300, 300, 4096))],
    ],
)
def test_no_grid_is_larger_than_cuda_starts(monkeypatch, launcher, sizes):
    grids, make = [], Launch.__init__

    def noted(self, kernel, config, programs, *others):
        grids.append(programs)
        make(self, kernel, config, programs, *others)

    monkeypatch.setattr(Launch, "__init__", noted)
    monkeypatch.setattr(Launch, "__call__", lambda self, *matrices: None)
    launcher(*sizes)
    assert grids
    for programs in grids:
        assert programs[0] < 2**31 and max(programs[1:]) < 2**16, programs


def test_a_grid_that_is_larger_is_refused():
    for programs in ((2**31, 1, 1), (1, 2**16, 1), (1, 1, 2**16)):
        with pytest.raises(ValueError, match=r"a grid of \(.*\) programs is more than CUDA's"):
            Launch(rope_kernels._rope_kernel, Config(num_warps=4), programs, (), (), {})
    Launch(rope_kernels._rope_kernel, Config(num_warps=4), (2**31 - 1, 2**16 - 1, 1), (), (), {})


def test_rope_of_heads_far_apart():
    """More than 2³¹ elements, of which no more than a few are ever touched."""
    leaves, _ = checks.heads("cpu", "float16", (1, 4, 4, 3, 8))
    memory = torch.empty(3 * 2**30 + 24, dtype=torch.float16)
    far = memory.as_strided((1, 4, 3, 8), (1, 2**30, 8, 1))
    q, k = far.copy_(leaves["q"]), leaves["k"]
    cos, sin = checks.tables("cpu", torch.float16, 1, 3, 8)
    assert checks.same(rope(q, k, cos, sin), rope(**leaves, cos=cos, sin=sin))


# --- what it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", range(8))
def test_frozen_operands_cost_nothing(started, wanted):
    leaves, upstream = checks.norm_case("cpu", "float32", 21, 48, True)
    chosen = [bool(wanted >> i & 1) for i in range(3)]
    x, residual, weight = (
        leaves[n].requires_grad_(c)
        for n, c in zip(("x", "residual", "weight"), chosen, strict=True)
    )
    y, _ = rms_norm(x, weight, residual=residual)
    if wanted:
        y.backward(upstream["y"])
    names = ["_rms_norm_fwd_kernel"] + ["_rms_norm_bwd_kernel"] * bool(wanted)
    assert started == names + ["_sum_parts_kernel"] * chosen[2]


def test_what_is_kept_for_backward():
    """The stream that is there anyway, the weight, a number a row; of rope the tables alone."""
    leaves, _ = checks.norm_case("cpu", "float32", 21, 48, True)
    x, residual, weight = (leaves[n].requires_grad_() for n in ("x", "residual", "weight"))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, s = rms_norm(x, weight, residual=residual)
        rms_norm(x, weight)
    assert [tuple(t.shape) for t in kept] == [(21, 48), (48,), (21,)] * 2
    assert kept[0].data_ptr() == s.data_ptr() and kept[3].data_ptr() == x.data_ptr()
    leaves, _, cos, sin = checks.small_rope("cpu")
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rope(*(t.requires_grad_() for t in leaves.values()), cos, sin)
    assert [t.data_ptr() for t in kept] == [cos.data_ptr(), sin.data_ptr()]


@pytest.mark.parametrize("residual", [True, False])
def test_gradients_of_rms_norm_are_of_what_forward_read(residual):
    leaves, upstream = checks.norm_case("cpu", "float32", 21, 48, residual)
    check_what_forward_read(lambda **own: checks.ours("hf")(**own)["y"], leaves, upstream["y"])


def test_gradients_of_rope_are_of_what_forward_read():
    leaves, upstream, cos, sin = checks.small_rope("cpu")
    tables, at = (cos[0], sin[0]), torch.arange(19).flip(0)
    for others in ((cos, sin), (*tables, at)):

        def turned(q, k, others=others):
            q, k = rope(q, k, *others[:2], positions=others[2] if others[2:] else None)
            return torch.cat([q, k], dim=1)

        check_what_forward_read(turned, leaves, torch.cat([*upstream.values()], dim=1), others)


def test_watched_calls_go_by_the_registered_operators():
    leaves, upstream = checks.norm_case("cpu", "float32", 21, 48, True)
    own = [leaves[n].requires_grad_() for n in ("x", "residual", "weight")]
    direct = rms_norm(own[0], own[2], residual=own[1])
    with Called() as called:
        watched = rms_norm(own[0], own[2], residual=own[1])
        found = grad(watched, own, tuple(upstream.values()))
    assert called.names[0] == "rms_norm_forward" and called.names.count("rms_norm_backward") == 1
    assert checks.same(found, grad(direct, own, tuple(upstream.values())))
    heads, _, cos, sin = checks.small_rope("cpu")
    with Called() as called:
        turned = rope(*(t.requires_grad_() for t in heads.values()), cos, sin)
        turned[1].sum().backward()
    assert called.names.count("rope_forward") == called.names.count("rope_backward") == 1


def test_a_second_derivative_raises():
    leaves, _ = checks.norm_case("cpu", "float32", 3, 8, True)
    for names in (("x", "weight"), ("x", "weight", "residual")):
        own = {n: leaves[n] for n in names}
        refuses_second_derivatives(lambda **o: checks.ours("hf")(**o)["y"].exp(), own)
    heads, _, cos, sin = checks.small_rope("cpu")
    q = heads["q"].requires_grad_()
    turned = rope(q, heads["k"], cos, sin)[0]
    dq = torch.ones_like(turned).requires_grad_()
    [d_q] = grad(turned, q, dq, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad(d_q.sum(), dq, retain_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (d_q * q).sum().backward()


def test_transforms_that_begin_at_backward_are_refused():
    x, (heads, _, cos, sin) = torch.randn(3, 8, requires_grad=True), checks.small_rope("cpu")
    q = heads["q"].requires_grad_()
    refuses_transforms_of_backward(rms_norm(x, torch.ones(8)), x)
    refuses_transforms_of_backward(rope(q, heads["k"], cos, sin)[0], q)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_opcheck_rms_norm(residual, weighted):
    leaves, upstream = checks.norm_case("cpu", "float32", 21, 48, residual, weighted=weighted)
    x, added, weight = (leaves.get(n) for n in ("x", "residual", "weight"))
    operands = [t if t is None else t.requires_grad_() for t in (x, weight, added)]
    torch.library.opcheck(norm_kernels.rms_norm_operator, (*operands, 1e-6, True))
    of_weight = None if weight is None else weight.detach()
    saved = upstream["y"], upstream.get("s"), x.detach(), of_weight, torch.rand(21)
    torch.library.opcheck(norm_kernels._backward, (*saved, True, residual and weighted))


def test_opcheck_rope():
    leaves, upstream, cos, sin = checks.small_rope("cpu", 6)
    operands = [t.requires_grad_() for t in leaves.values()]
    torch.library.opcheck(rope_kernels.rope_operator, (*operands, cos, sin, None, None))
    at = torch.arange(19)
    wide = leaves["q"].shape[-1] + 2
    torch.library.opcheck(rope_kernels.rope_operator, (*operands, cos[0], sin[0], at, wide))
    dq, dk = upstream.values()
    for given in ((dq, dk), (None, dk), (dq, None)):
        torch.library.opcheck(rope_kernels._backward, (*given, cos, sin, None, dq.shape[-1]))


def test_float64_runs_plain_pytorch(started):
    x = torch.randn(3, 8, dtype=torch.float64)
    assert rms_norm(x, x[0]).dtype == torch.float64 and started == []
    assert has_kernels(x.device)
