"""`rms_norm` and `RMSNorm`: in plain PyTorch, in Triton's interpreter and on a GPU."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear

import gradient_checks
from called import Called, note_launches
from fusedlib import RMSNorm, reference, rms_norm
from fusedlib.launch.device import has_kernels
from fusedlib.ops import recomputed
from fusedlib.ops.norm import kernels
from fusedlib.ops.recomputed import recompute_in_backward
from gradient_checks import Named, close, drawn, misses, named_results, same
from interpreter import BACKEND, INTERPRETED, passed_in_the_interpreter
from rewritten import use_broken_kernels

ROOT = 2.0**-24
FORWARD, BACKWARD, SUM = "_rms_norm_fwd_kernel", "_rms_norm_bwd_kernel", "_sum_parts_kernel"


def test_in_the_interpreter():
    assert passed_in_the_interpreter("test_norm.py") > 40


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(kernels, "TILE", 128)
        monkeypatch.setattr(kernels, "WIDEST", 128)


def case(
    device: str, dtype: str = "float32", rows: int = 21, width: int = 48, residual: bool = True,
    scale: float = 1.0, weighted: bool = True,
) -> tuple[Named, Named]:  # fmt: skip
    """Leaves and what flows back to the outputs."""
    kind, names = getattr(torch, dtype), ["x", "residual"] if residual else ["x"]
    leaves = {n: drawn(device, kind, rows, width, seed=i, scale=scale) for i, n in enumerate(names)}
    if weighted:
        leaves["weight"] = drawn(device, kind, width, seed=2) * 0.5 + 1
    # A norm's gradient is as much smaller as its input is larger: both parts of d_x should count.
    sizes = {"y": 1.0, "s": 1 / scale} if residual else {"y": 1.0}
    return leaves, {
        n: drawn(device, kind, rows, width, seed=3 + i, scale=size)
        for i, (n, size) in enumerate(sizes.items())
    }


def ours(cast: str = "hf", compute: Callable[..., Tensor] = rms_norm):
    def function(x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None) -> Named:
        actual = compute(x, weight, 1e-6, residual=residual, cast=cast)
        return {"y": actual} if residual is None else dict(zip("ys", actual, strict=True))

    return function


def plain(cast: str = "hf"):
    def function(x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None) -> Named:
        s = x if residual is None else residual + x
        y = reference.rms_norm(s, weight, 1e-6, cast=cast)
        return {"y": y} if residual is None else {"y": y, "s": s}

    return function


def rejected(
    device: str, dtype: str, rows: int, width: int, residual: bool = True, cast: str = "hf",
    scale: float = 1.0, compute: Callable[..., Tensor] = rms_norm, weighted: bool = True,
) -> list[str]:  # fmt: skip
    """What the one tolerance rule rejects of the outputs and of every gradient."""
    leaves, upstream = case(device, dtype, rows, width, residual, scale, weighted)
    return misses(ours(cast, compute), plain(cast), leaves, upstream)


def joined(**leaves: Tensor) -> Tensor:
    """Both outputs side by side, for checks of functions with one."""
    return torch.cat([*ours()(**leaves).values()], dim=-1)


def joined_case(device: str) -> tuple[Named, Tensor]:
    leaves, upstream = case(device)
    leaves = {n: t.requires_grad_() for n, t in leaves.items()}
    return leaves, torch.cat([*upstream.values()], dim=-1)


# --- against float64 -----------------------------------------------------------------------------

# Rows and width: several rows a program, one, in registers to the last, read twice; ragged, and on
# a GPU more tiles than programs (two of each of 132 multiprocessors).
SHAPES = (
    [(37, 43), (1, 1), (20, 128), (29, 200)]
    if INTERPRETED
    else [(1, 1), (5000, 64), (1111, 80), (3001, 128), (1500, 2048), (700, 3072), (1025, 4096),
          (601, 5120), (550, 8192), (531, 8200), (300, 16384), (280, 32768)]
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_output_and_gradients_vs_float64(device, monkeypatch, shape, dtype):
    started = note_launches(monkeypatch)
    assert rejected(device, dtype, *shape) == []
    assert started == [FORWARD, BACKWARD, SUM] or not INTERPRETED
    assert rejected(device, dtype, *shape, residual=False, cast="litgpt") == []


def test_plain_pytorch_vs_float64():
    for dtype in ("float32", "bfloat16", "float16"):
        assert rejected("cpu", dtype, 37, 83) == []


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_at_other_scales_vs_float64(device, scale):
    for dtype in ("float32", "bfloat16"):
        assert (
            rejected(device, dtype, *((21, 80) if INTERPRETED else (300, 2048)), scale=scale) == []
        )


@pytest.mark.plain
def test_without_a_weight(device):
    for rows, width in ((21, 48), (3, 300 if INTERPRETED else 8200)):
        for dtype, residual, cast in (("float32", True, "hf"), ("bfloat16", False, "litgpt")):
            assert rejected(device, dtype, rows, width, residual, cast, weighted=False) == []
    module = RMSNorm(48, elementwise_affine=False, device=device)
    x = drawn(device, torch.float32, 4, 48, seed=1)
    assert torch.equal(module(x), rms_norm(x, None)) and not module.state_dict()
    module.reset_parameters()
    assert str(module) == "RMSNorm(48, eps=1e-06, cast='hf', elementwise_affine=False)"


def test_bounds_of_the_docstring(device):
    """Element by element, where PyTorch's own error is no measure: rows of very different sizes."""
    rows, width = 24, 200
    for dtype, cast, spread in (
        ("float32", "litgpt", 0),
        ("float32", "hf", 12),
        ("bfloat16", "hf", 12),
        ("bfloat16", "litgpt", 0),
    ):
        leaves, upstream = case(device, dtype, rows, width)
        sizes = torch.logspace(-spread, spread, rows, device=device)[:, None]
        leaves |= {n: (leaves[n] * sizes).to(leaves[n].dtype) for n in ("x", "residual")}
        upstream["s"] = (upstream["s"] / sizes).to(upstream["s"].dtype)
        actual = named_results(ours(cast), leaves, upstream)
        s, dy, ds = (t.double() for t in (actual["s"], upstream["y"], upstream["s"]))
        weight = leaves["weight"].double()
        v = torch.finfo(actual["y"].dtype).eps / 2
        rstd = (s.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        n, d = s * rstd, dy * weight
        y, d_s = n * weight, rstd * (d - n * (d * n).mean(-1, keepdim=True)) + ds
        casts = 2 if cast == "hf" else 1
        tiny = torch.finfo(actual["y"].dtype).tiny
        off = (actual["y"].double() - y).abs()
        assert (off <= (42 * ROOT + casts * v * (1 + v)) * y.abs() + tiny).all()
        off = (actual["d_x"].double() - d_s).norm(dim=-1, keepdim=True)
        allowed = 128 * ROOT * rstd * d.norm(dim=-1, keepdim=True)
        assert (off <= allowed + v * d_s.norm(dim=-1, keepdim=True) + tiny).all()
        assert torch.equal(actual["d_x"], actual["d_residual"])
        off = (actual["d_weight"].double() - (dy * n).sum(0)).abs()
        assert (off <= (rows + 64) * ROOT * (dy * n).abs().sum(0) + v * (dy * n).sum(0).abs()).all()


def test_hf_bit_for_bit(device):
    """y differs from HF's formula nowhere but where two fp32 sums round apart, and s nowhere."""
    for dtype, cast in (("bfloat16", "hf"), ("float16", "litgpt")):
        leaves, _ = case(device, dtype, 64, 512)
        actual, wanted = (f(**leaves) for f in (ours(cast), plain(cast)))
        assert torch.equal(actual["s"], wanted["s"])
        assert (actual["y"] != wanted["y"]).float().mean() < 2e-3, (dtype, cast)
        other = plain("litgpt" if cast == "hf" else "hf")(**leaves)
        assert (other["y"] != wanted["y"]).float().mean() > 2e-2  # the casts can be told apart


@pytest.mark.plain
def test_weight_of_another_dtype(device):
    for cast, dtype in (("hf", torch.float32), ("litgpt", torch.bfloat16)):
        leaves, _ = case(device, "bfloat16", 21, 80, residual=False)
        x, weight = leaves["x"].requires_grad_(), leaves["weight"].float().requires_grad_()
        y, expected = rms_norm(x, weight, cast=cast), reference.rms_norm(x, weight, cast=cast)
        assert y.dtype == expected.dtype == dtype
        dy = torch.ones_like(y)
        actual, wanted = grad(y, (x, weight), dy), grad(expected, (x, weight), dy)
        assert [t.dtype for t in actual] == [torch.bfloat16, torch.float32]
        for a, b in zip((y, *actual), (expected, *wanted), strict=True):
            assert (a.double() - b.double()).norm() <= 2e-2 * b.double().norm()


@pytest.mark.plain
def test_zeros_infinities_and_empty(device):
    """Where HF's formula gives zeros, infinities or NaN, so do we."""
    x = torch.zeros(6, 40, device=device)
    x[1, 3], x[2, 3], x[3], x[4] = float("inf"), float("nan"), 1e-30, 3e25
    weight = torch.ones(40, device=device)
    for eps in (1e-6, 0.0):
        y, wanted = (f(x, weight, eps) for f in (rms_norm, reference.rms_norm))
        torch.testing.assert_close(y, wanted, equal_nan=True)
    for shape in ((0, 40), (3, 0, 40)):
        x = torch.zeros(shape, device=device, requires_grad=True)
        weight.requires_grad_()
        y, s = rms_norm(x, weight, residual=x.detach())
        d_x, d_weight = grad(y.sum() + s.sum(), (x, weight))
        assert y.shape == s.shape == d_x.shape == shape and not d_weight.any()


def test_compiled_in_one_graph(device):
    torch._dynamo.reset()
    dtype = "float32" if INTERPRETED else "bfloat16"
    compiled = torch.compile(rms_norm, fullgraph=True, backend=BACKEND)
    assert rejected(device, dtype, 21, 80, residual=False, compute=compiled) == []
    dynamic = torch.compile(rms_norm, fullgraph=True, dynamic=True, backend=BACKEND)
    for rows in (21, 34):
        assert rejected(device, dtype, rows, 80, compute=dynamic) == []


# What stands in the kernels' file, and what shall.
BROKEN = {
    "mean over the block instead of the row": (
        "axis=1) * (1.0 / WIDTH) + eps", "axis=1) * (1.0 / BLOCK) + eps"),
    "mean of squares off by a thousandth": ("(1.0 / WIDTH) + eps", "(1.0 / WIDTH) * 1.001 + eps"),
    "last row of a tile left out": ("(row < rows) & (j < WIDTH)", "(row < rows - 1) & (j < WIDTH)"),
    "last column left out": ("stream = tl.load(x + row * x_row + j, mask=inside",
                             "stream = tl.load(x + row * x_row + j, mask=inside & (j < WIDTH - 1)"),
    "residual left out of the stream": ("stream.to(tl.float32) + added.to(tl.float32)",
                                        "stream.to(tl.float32)"),
    "mean term left out of d_s": ("(d - n * mean[:, None]) * scale", "d * scale"),
    "residual's gradient left out": ("gradient += _wide(ds, row * ds_row + j, inside)", "pass"),
    "weight left out of d_s": ("gradient = (d - n", "gradient = (upstream - n"),
    "first rows alone in d_weight": ("total += upstream * n", "total = upstream * n"),
    "wide rows: first rows alone in d_weight": ("(j < WIDTH) & (first > start)", "(j < 0)"),
    "wide rows: mean of the first block": (
        "mean += tl.sum(d * n, axis=1)", "mean += tl.sum(d * n, axis=1) * (left == 0)"),
    "last partial row left out": ("(i < parts)", "(i < parts - 1)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_rejected(device, monkeypatch, tmp_path, fault):
    use_broken_kernels(monkeypatch, tmp_path, kernels, BROKEN[fault])
    wide, narrow = ((37, 200), (37, 43)) if INTERPRETED else ((1111, 8300), (11111, 300))
    assert rejected(device, "float32", *(wide if "wide" in fault else narrow))


# --- autograd ------------------------------------------------------------------------------------


@pytest.mark.plain
def test_any_strides_and_leading_dimensions(device):
    leaves, upstream = joined_case(device)
    gradient_checks.check_layouts(joined, leaves, upstream)
    y, s = rms_norm(leaves["x"], leaves["weight"], residual=leaves["residual"])

    def deep(t: Tensor) -> Tensor:
        return t.detach().reshape(3, 7, 48).transpose(0, 1).contiguous().transpose(0, 1)

    actual = rms_norm(deep(leaves["x"]), leaves["weight"], residual=deep(leaves["residual"]))
    assert same([t.reshape(21, 48) for t in actual], [y, s])
    assert rms_norm(leaves["x"][0], leaves["weight"]).shape == (48,)


@pytest.mark.plain
def test_frozen_subsets_get_what_they_want_and_cost_no_more(device, monkeypatch):
    leaves, upstream = joined_case(device)
    started = note_launches(monkeypatch)
    of_all = [FORWARD, BACKWARD, SUM]
    subsets = gradient_checks.subsets(joined, leaves, upstream)
    for chosen in subsets:
        names = [FORWARD] + [BACKWARD] * bool(chosen) + [SUM] * ("weight" in chosen)
        if INTERPRETED:
            assert started in (names, of_all + names)
        started.clear()


@pytest.mark.plain
def test_one_output_alone_and_backward_twice(device):
    leaves, upstream = case(device)
    own = [leaves[n].requires_grad_() for n in ("x", "residual", "weight")]
    y, s = rms_norm(own[0], own[2], residual=own[1])
    assert same(grad(s, own[:2], upstream["s"], retain_graph=True), [upstream["s"]] * 2)
    of_y = grad(y, own, upstream["y"], retain_graph=True)
    added = grad((y, s), own, (upstream["y"], upstream["s"]))
    assert close(added[:1], [of_y[0] + upstream["s"]]) and same(added[2:], of_y[2:])
    gradient_checks.check_repeated(joined, *joined_case(device))
    gradient_checks.check_checkpointed(joined, *joined_case(device))


@pytest.mark.plain
def test_under_autocast(device):
    """As HF under autocast: the stream and the weight keep fp32, whatever a product hands over."""
    leaves, _ = case(device)
    x, residual, weight = leaves["x"].bfloat16(), leaves["residual"], leaves["weight"]
    with torch.autocast(device, dtype=torch.bfloat16):
        y, s = rms_norm(x, weight, residual=residual)
        wanted = reference.rms_norm(residual + x, weight)
    assert y.dtype == s.dtype == wanted.dtype == torch.float32 and same([s], [residual + x])
    assert close([y], [wanted])


@pytest.mark.plain
def test_functional_transforms(device):
    """Plain PyTorch runs."""
    gradient_checks.check_transforms(joined, *joined_case(device), by_row=False)


@pytest.mark.interpreter
def test_gradients_are_of_what_forward_read(device):
    gradient_checks.check_what_forward_read(joined, *joined_case(device))
    leaves, upstream = case(device, residual=False)
    gradient_checks.check_what_forward_read(joined, leaves, upstream["y"])


@pytest.mark.interpreter
def test_what_is_kept_for_backward(device):
    """The stream that is there anyway, the weight, a number a row."""
    leaves, _ = joined_case(device)
    x, residual, weight = (leaves[n] for n in ("x", "residual", "weight"))
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, s = rms_norm(x, weight, residual=residual)
        rms_norm(x, weight)
    assert [tuple(t.shape) for t in kept] == [(21, 48), (48,), (21,)] * 2
    assert kept[0].data_ptr() == s.data_ptr() and kept[3].data_ptr() == x.data_ptr()


@pytest.mark.interpreter
def test_watched_calls_go_by_the_registered_operators(device):
    leaves, upstream = joined_case(device)
    wanted = gradient_checks.results_of(joined, leaves, upstream)
    with Called() as called:
        actual = gradient_checks.results_of(joined, leaves, upstream)
    assert called.names.count("rms_norm_forward") == called.names.count("rms_norm_backward") == 1
    assert same(actual, wanted)


@pytest.mark.interpreter
def test_a_second_derivative_raises(device):
    leaves, _ = case(device, rows=3, width=8)
    for names in (("x", "weight"), ("x", "weight", "residual")):
        own = {n: leaves[n] for n in names}
        gradient_checks.refuses_second_derivatives(lambda **o: ours()(**o)["y"].exp(), own)
    x = leaves["x"].requires_grad_()
    gradient_checks.refuses_transforms_of_backward(rms_norm(x, leaves["weight"]), x)


def test_derivatives_of_both_orders_in_float64():
    operands = [
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,), (3, 5))
    ]
    for cast in ("hf", "litgpt"):

        def both(x, weight, residual, cast=cast):
            return rms_norm(x, weight, residual=residual, cast=cast)

        assert gradcheck(both, operands) and gradgradcheck(both, operands)


@pytest.mark.interpreter
def test_opcheck(device):
    for has in (True, False):
        leaves, upstream = case(device, residual=has, weighted=has)
        x, added, weight = (leaves.get(n) for n in ("x", "residual", "weight"))
        operands = [t if t is None else t.requires_grad_() for t in (x, weight, added)]
        torch.library.opcheck(kernels.rms_norm_operator, (*operands, 1e-6, True))
        of_weight = None if weight is None else weight.detach()
        saved = upstream["y"], upstream.get("s"), x.detach(), of_weight, torch.rand(21)
        torch.library.opcheck(kernels._backward, (*saved, True, has))


@pytest.mark.interpreter
def test_float64_runs_plain_pytorch(device, monkeypatch):
    started = note_launches(monkeypatch)
    x = torch.randn(3, 8, dtype=torch.float64, device=device)
    assert rms_norm(x, x[0]).dtype == torch.float64 and started == []


# --- a product that computes the norm again ------------------------------------------------------


@pytest.mark.plain
def test_output_computed_again(device):
    """Gradients are those of an output that is kept, bit by bit; two products, and nobody else."""
    leaves, _ = case(device, rows=30)
    leaves["w"] = drawn(device, torch.float32, 20, 48, seed=9)
    own = {n: t.view(2, 15, 48) if t.shape[0] == 30 else t for n, t in leaves.items()}
    own = {n: t.requires_grad_() for n, t in own.items()}
    again = mock.patch.object(recomputed, "_again", wraps=recomputed._again)

    def step(forgets: bool, hooked: bool = False, doubled: bool = False) -> list[Tensor]:
        y, s = rms_norm(own["x"], own["weight"], residual=own["residual"])
        if doubled:  # as a hook might
            y.mul_(2)
        product = (lambda y, z: recompute_in_backward(y, z)) if forgets else (lambda y, z: z)
        with saved_tensors_hooks(lambda t: t, lambda t: t) if hooked else nullcontext():
            z = product(y, linear(y, own["w"])) + product(y, linear(y, own["w"][:1])) + s.sum()
        return [z.detach(), *grad(z.square().sum(), list(own.values()))]

    wanted, has = step(False), has_kernels(own["x"].device)
    for settings, count in (({}, 2), ({"hooked": True}, 0), ({"doubled": True}, 0)):
        with again as calls:
            actual = step(True, **settings)
        assert calls.call_count == count * has  # who watches what is kept sees no other call
        of = step(False, doubled=True) if "doubled" in settings else wanted
        for one, other in zip(actual, of, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    y, _ = rms_norm(own["x"], own["weight"], residual=own["residual"])
    loss = recompute_in_backward(y, linear(y, own["w"])).sum()
    with torch.no_grad():
        own["weight"].mul_(2)
    if has:
        with pytest.raises(RuntimeError, match="computed again for backward.*modified in place"):
            grad(loss, own["w"])


class Scaled(torch.autograd.Function):
    """x w, of which a node keeps both, as the MLP's does."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, upstream):
        x, w = ctx.saved_tensors
        return upstream * w, upstream * x


@pytest.mark.parametrize("multiply", [Scaled.apply, torch.mul])
def test_a_node_computes_again_what_it_would_have_kept(monkeypatch, multiply):
    w, x = torch.randn(7, requires_grad=True), torch.randn(7, requires_grad=True)
    y, calls = x + 0, []
    again = lambda: calls.append(1) or y.detach()  # noqa: E731
    monkeypatch.setattr(recomputed, "computed_again", lambda y: again)
    recompute_in_backward(y, multiply(y, w)).sum().backward()
    assert torch.equal(w.grad, x) and torch.equal(x.grad, w) and calls == [1]


def test_what_is_compiled_behind_an_uncompiled_norm_keeps_its_graph_whole(monkeypatch):
    """A compiler saves its own; asking a tensor for its grad_fn would break the graph."""
    x = torch.randn(3, 4, requires_grad=True)
    monkeypatch.setattr(recomputed, "computed_again", lambda x: x.detach)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: recompute_in_backward(x, x * 2), backend="eager", fullgraph=True
    )
    compiled(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


# --- the module and what is refused --------------------------------------------------------------


def test_module_is_the_function_and_has_hf_s_checkpoint():
    module = RMSNorm(48, 1e-5, dtype=torch.bfloat16)
    assert list(module.state_dict()) == ["weight"] and (module.weight == 1).all()
    leaves, _ = case("cpu", "bfloat16")
    module.load_state_dict({"weight": leaves["weight"]})
    x, residual = leaves["x"], leaves["residual"]
    assert same(module(x, residual), rms_norm(x, leaves["weight"], 1e-5, residual=residual))
    assert torch.equal(module(x), rms_norm(x, leaves["weight"], 1e-5))
    assert str(module) == "RMSNorm(48, eps=1e-05, cast='hf')"
    other = RMSNorm(48, 1e-5, cast="litgpt", dtype=torch.bfloat16)
    other.load_state_dict(module.state_dict())
    assert not torch.equal(other(x), module(x))
    module.reset_parameters()
    assert (module.weight == 1).all()


X, W = torch.zeros(3, 8), torch.zeros(8)
NESTED = torch.nested.nested_tensor([X, X[:2]])
norm_of_x = partial(rms_norm, X)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: norm_of_x(W[:7]), r"weight must be \(8,\).*got \(7,\)"),
        (lambda: rms_norm(X[0, 0], W), r"x must be \(..., width\).*got \(\)"),
        (lambda: rms_norm(X[:, :0], W[:0]), r"got \(3, 0\)"),
        (lambda: norm_of_x(W, residual=X[:2]), r"residual must be \(3, 8\).*got \(2, 8\)"),
        (lambda: norm_of_x(W, residual=X.half()), "residual is torch.float16, x is torch.float32"),
        (lambda: norm_of_x(W.to("meta")), "weight is on meta, x on cpu"),
        (lambda: rms_norm(X.int(), W), "x must be fp16, bf16, fp32 or float64, got torch.int32"),
        (lambda: norm_of_x(W, cast="gpt"), "cast must be one of hf, litgpt, got 'gpt'"),
        (lambda: rms_norm(NESTED, W), "x must be a dense tensor with strides, got a nested one"),
        (lambda: norm_of_x(W.to_sparse()), "weight must be a dense tensor .*, got .*sparse_coo"),
        (lambda: norm_of_x(W, residual=NESTED), "residual must be a dense .*, got a nested one"),
        (lambda: norm_of_x(W, "1"), "eps must be a number, got '1'"),
        (lambda: RMSNorm(True), "hidden_size must be a whole number of at least 1, got True"),
        (lambda: RMSNorm(0), "hidden_size must be a whole number of at least 1, got 0"),
        (lambda: RMSNorm(8, eps="a"), "eps must be a number, got 'a'"),
        (lambda: RMSNorm(8, cast="no"), "cast must be one of hf, litgpt, got 'no'"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# --- on a GPU alone ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2048, 16384])
def test_a_cuda_graph_replays_what_a_call_gives_bit_by_bit(width):
    leaves, upstream = case("cuda", "bfloat16", 4096, width)
    own = [leaves[n].requires_grad_() for n in ("x", "residual", "weight")]

    def step():
        outputs = rms_norm(own[0], own[2], residual=own[1])
        return *outputs, *grad(outputs, own, tuple(upstream.values()))

    gradient_checks.check_cuda_graph(step, lambda: own[0].mul_(-0.5))


@pytest.mark.gpu
def test_addresses_off_16_bytes():
    leaves, _ = case("cuda", "bfloat16", 70, 256)
    x, residual, weight = (leaves[n] for n in ("x", "residual", "weight"))
    wanted = rms_norm(x, weight, residual=residual)
    for off in (1, 4):
        buffer = torch.empty(x.numel() + off, device="cuda", dtype=x.dtype)
        moved = buffer[off:].view_as(x).copy_(x)
        assert close(rms_norm(moved, weight, residual=residual), wanted)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free memory")
    rows, width = 2**19 + 3, 4096
    x = torch.ones(rows, width, device="cuda", dtype=torch.bfloat16)
    x[-1], x[-2, 0] = 3, 100
    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    y, _ = rms_norm(x.requires_grad_(), weight, residual=x.detach())
    assert torch.equal(y[-2:], rms_norm(x[-2:], weight, residual=x[-2:].detach())[0])
    d_x, d_weight = grad(y, (x, weight), torch.ones_like(y))
    wanted = y.detach()[-2:].double().sum(0) + rows - 2
    torch.testing.assert_close(d_weight.double(), wanted, rtol=4e-3, atol=0)
    assert d_x[0].abs().max() < 1e-2 and d_x[-2].float().norm() > 1e-2
