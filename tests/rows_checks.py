"""What must hold of `rms_norm` and `rope` wherever they run: PyTorch, the interpreter, a GPU.

Each check takes the device. `tests/test_rows.py` runs them on the CPU, `tests/interpreted/rows.py`
over interpreted kernels, `tests/test_rows_gpu.py` on a GPU.
"""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from fusedlib import RMSNorm, reference, rms_norm, rope
from fusedlib.bench import check
from fusedlib.launch.device import has_kernels
from fusedlib.ops import recomputed
from fusedlib.ops.recomputed import recompute_in_backward
from gradient_checks import LAYOUTS, close, same
from swiglu_checks import worse

Named = dict[str, Tensor]
ROOT = 2.0**-24


def drawn(device: str, dtype: torch.dtype, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)


def results(function: Callable[..., Named], leaves: Named, upstream: Named) -> Named:
    """The function's outputs by name, and the gradient of every leaf."""
    leaves = {n: t.detach().requires_grad_() for n, t in leaves.items()}
    found = function(**leaves)
    gradients = grad([found[n] for n in upstream], list(leaves.values()), list(upstream.values()))
    named = dict(zip((f"d_{n}" for n in leaves), gradients, strict=True))
    return {n: t.detach() for n, t in found.items()} | named


def misses(
    function: Callable[..., Named], plain: Callable[..., Named], leaves: Named, upstream: Named,
) -> list[str]:  # fmt: skip
    """What the one tolerance rule rejects of the function's outputs and gradients.

    A draw of small tensors may be lucky for plain PyTorch: its error is the worst of four, a
    per cent apart.
    """
    dtype = next(iter(leaves.values())).dtype

    def errors(compute: Callable[..., Named], scale: float) -> dict[str, check.Errors]:
        scaled = {n: (t * scale).to(t.dtype) for n, t in leaves.items()}
        wide = [{n: t.double() for n, t in each.items()} for each in (scaled, upstream)]
        return check.errors(results(compute, scaled, upstream), results(plain, *wide))

    usual = worse(*(errors(plain, scale) for scale in (1.0, 1.01, 1.02, 1.03)))
    return check.misses(errors(function, 1.0), usual, dtype)


# --- RMSNorm -------------------------------------------------------------------------------------


def norm_case(
    device: str, dtype: str, rows: int, width: int, residual: bool, scale: float = 1.0,
    weighted: bool = True,
) -> tuple[Named, Named]:  # fmt: skip
    """Leaves and what flows back to the outputs."""
    kind, names = getattr(torch, dtype), ["x", "residual"] if residual else ["x"]
    leaves = {n: drawn(device, kind, rows, width, seed=i, scale=scale) for i, n in enumerate(names)}
    if weighted:
        leaves["weight"] = drawn(device, kind, width, seed=2) * 0.5 + 1
    outputs = ["y", "s"] if residual else ["y"]
    # A norm's gradient is as much smaller as its input is larger: both parts of d_x should count.
    sizes = {"y": 1.0, "s": 1 / scale}
    return leaves, {
        n: drawn(device, kind, rows, width, seed=3 + i, scale=sizes[n])
        for i, n in enumerate(outputs)
    }


def ours(cast: str, compute: Callable[..., Tensor] = rms_norm, eps: float = 1e-6):
    def function(x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None) -> Named:
        found = compute(x, weight, eps, residual=residual, cast=cast)
        return {"y": found} if residual is None else dict(zip("ys", found, strict=True))

    return function


def plain_norm(cast: str, eps: float = 1e-6):
    def function(x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None) -> Named:
        s = x if residual is None else residual + x
        y = reference.rms_norm(s, weight, eps, cast=cast)
        return {"y": y} if residual is None else {"y": y, "s": s}

    return function


def misses_norm(
    device: str, dtype: str, rows: int, width: int, residual: bool = True, cast: str = "hf",
    scale: float = 1.0, compute: Callable[..., Tensor] = rms_norm, weighted: bool = True,
) -> list[str]:  # fmt: skip
    leaves, upstream = norm_case(device, dtype, rows, width, residual, scale, weighted)
    return misses(ours(cast, compute), plain_norm(cast), leaves, upstream)


def check_bounds_of_the_docstring(device: str) -> None:
    """Element by element, where PyTorch's own error is no measure: rows of very different sizes."""
    rows, width = 24, 200
    for dtype, cast, spread in (
        ("float32", "litgpt", 0),
        ("float32", "hf", 12),
        ("bfloat16", "hf", 12),
        ("bfloat16", "litgpt", 0),
    ):
        leaves, upstream = norm_case(device, dtype, rows, width, True)
        sizes = torch.logspace(-spread, spread, rows, device=device)[:, None]
        leaves |= {n: (leaves[n] * sizes).to(leaves[n].dtype) for n in ("x", "residual")}
        upstream["s"] = (upstream["s"] / sizes).to(upstream["s"].dtype)
        found = results(ours(cast), leaves, upstream)
        s, dy, ds = (t.double() for t in (found["s"], upstream["y"], upstream["s"]))
        weight = leaves["weight"].double()
        v = torch.finfo(found["y"].dtype).eps / 2
        rstd = (s.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        n, d = s * rstd, dy * weight
        y, d_s = n * weight, rstd * (d - n * (d * n).mean(-1, keepdim=True)) + ds
        casts = 2 if cast == "hf" else 1
        tiny = torch.finfo(found["y"].dtype).tiny
        off = (found["y"].double() - y).abs()
        assert (off <= (42 * ROOT + casts * v * (1 + v)) * y.abs() + tiny).all()
        off = (found["d_x"].double() - d_s).norm(dim=-1, keepdim=True)
        allowed = 128 * ROOT * rstd * d.norm(dim=-1, keepdim=True)
        assert (off <= allowed + v * d_s.norm(dim=-1, keepdim=True) + tiny).all()
        assert torch.equal(found["d_x"], found["d_residual"])
        off = (found["d_weight"].double() - (dy * n).sum(0)).abs()
        assert (off <= (rows + 64) * ROOT * (dy * n).abs().sum(0) + v * (dy * n).sum(0).abs()).all()


def check_without_a_weight(device: str) -> None:
    """Rows of one tile, of several, and wider than the backward holds in registers."""
    for dtype, residual in product(("float32", "bfloat16", "float16"), (True, False)):
        for rows, width in ((21, 48), (5, 1030), (3, 8200)):
            cast = "hf" if residual else "litgpt"
            found = misses_norm(device, dtype, rows, width, residual, cast, weighted=False)
            assert found == [], (dtype, residual, rows, width, found)
    module = RMSNorm(48, elementwise_affine=False, device=device)
    x = drawn(device, torch.float32, 4, 48, seed=1)
    assert torch.equal(module(x), rms_norm(x, None)) and not module.state_dict()
    module.reset_parameters()
    assert str(module) == "RMSNorm(48, eps=1e-06, cast='hf', elementwise_affine=False)"


def check_hf_bit_for_bit(device: str) -> None:
    """y differs from HF's formula nowhere but where two fp32 sums round apart, and s nowhere."""
    for dtype, cast in product(("bfloat16", "float16"), ("hf", "litgpt")):
        leaves, _ = norm_case(device, dtype, 64, 512, True)
        found, wanted = (f(**leaves) for f in (ours(cast), plain_norm(cast)))
        assert torch.equal(found["s"], wanted["s"])
        assert (found["y"] != wanted["y"]).float().mean() < 2e-3, (dtype, cast)
        other = plain_norm("litgpt" if cast == "hf" else "hf")(**leaves)
        assert (other["y"] != wanted["y"]).float().mean() > 2e-2  # the casts can be told apart


def check_norm_weight_of_another_dtype(device: str) -> None:
    for cast, dtype in (("hf", torch.float32), ("litgpt", torch.bfloat16)):
        leaves, _ = norm_case(device, "bfloat16", 21, 80, False)
        x, weight = leaves["x"].requires_grad_(), leaves["weight"].float().requires_grad_()
        y, plain = rms_norm(x, weight, cast=cast), reference.rms_norm(x, weight, cast=cast)
        assert y.dtype == plain.dtype == dtype
        dy = torch.ones_like(y)
        found, wanted = grad(y, (x, weight), dy), grad(plain, (x, weight), dy)
        assert [t.dtype for t in found] == [torch.bfloat16, torch.float32]
        for a, b in zip((y, *found), (plain, *wanted), strict=True):
            assert (a.double() - b.double()).norm() <= 2e-2 * b.double().norm()


def check_norm_zeros_infinities_and_empty(device: str) -> None:
    """Where HF's formula gives zeros, infinities or NaN, so do we."""
    x = torch.zeros(6, 40, device=device)
    x[1, 3], x[2, 3], x[3], x[4] = float("inf"), float("nan"), 1e-30, 3e25
    weight = torch.ones(40, device=device)
    for eps in (1e-6, 0.0):
        y, plain = (f(x, weight, eps) for f in (rms_norm, reference.rms_norm))
        torch.testing.assert_close(y, plain, equal_nan=True)
    for shape in ((0, 40), (3, 0, 40)):
        x = torch.zeros(shape, device=device, requires_grad=True)
        weight.requires_grad_()
        y, s = rms_norm(x, weight, residual=x.detach())
        d_x, d_weight = grad(y.sum() + s.sum(), (x, weight))
        assert y.shape == s.shape == d_x.shape == shape and not d_weight.any()


def check_norm_output_computed_again(device: str) -> None:
    """Gradients are those of an output that is kept, bit by bit; two products, and nobody else."""
    leaves, _ = norm_case(device, "float32", 30, 48, True)
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

    wanted, kernels = step(False), has_kernels(own["x"].device)
    for settings, count in (({}, 2), ({"hooked": True}, 0), ({"doubled": True}, 0)):
        with again as calls:
            found = step(True, **settings)
        assert calls.call_count == count * kernels  # who watches what is kept sees no other call
        of = step(False, doubled=True) if "doubled" in settings else wanted
        for one, other in zip(found, of, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    y, _ = rms_norm(own["x"], own["weight"], residual=own["residual"])
    loss = recompute_in_backward(y, linear(y, own["w"])).sum()
    with torch.no_grad():
        own["weight"].mul_(2)
    if kernels:
        with pytest.raises(RuntimeError, match="computed again for backward.*modified in place"):
            grad(loss, own["w"])


def check_norm_strides_and_leading_dimensions(device: str) -> None:
    leaves, upstream = norm_case(device, "float32", 30, 48, True)
    wanted = results(ours("hf"), leaves, upstream)

    def deep(t: Tensor) -> Tensor:
        return t.reshape(2, 3, 5, 48).transpose(0, 1).contiguous().transpose(0, 1)

    for how, lay in (LAYOUTS | {"deep": deep}).items():
        own = {n: t if n == "weight" else lay(t) for n, t in leaves.items()}
        found = results(ours("hf"), own, {n: lay(t) for n, t in upstream.items()})
        for name, tensor in wanted.items():
            assert close([found[name].reshape(tensor.shape)], [tensor]), (how, name)
    x, weight = leaves["x"].requires_grad_(), leaves["weight"]
    [d_x] = grad(rms_norm(x, weight).sum(), x)  # dy of stride 0
    assert close([d_x], grad(rms_norm(x, weight), x, torch.ones_like(x)))
    assert rms_norm(x[0], weight).shape == (48,)


def check_norm_frozen_subsets(device: str) -> None:
    leaves, upstream = norm_case(device, "float32", 21, 48, True)
    wanted = results(ours("hf"), leaves, upstream)
    for chosen in product((False, True), repeat=3):
        own = {n: t.detach().requires_grad_(c) for (n, t), c in zip(leaves.items(), chosen)}  # noqa: B905
        outputs = ours("hf")(**own)
        if any(chosen[:2]):
            torch.autograd.backward(list(outputs.values()), list(upstream.values()))
        elif chosen[2]:
            outputs["y"].backward(upstream["y"])
        else:
            assert not outputs["y"].requires_grad
        for name, leaf in own.items():
            assert (leaf.grad is not None) == leaf.requires_grad
            if leaf.requires_grad:
                assert close([leaf.grad], [wanted[f"d_{name}"]]), (name, chosen)


def check_norm_one_output_alone(device: str) -> None:
    """A gradient of y or of s alone; a second backward; checkpointing; a second derivative."""
    leaves, upstream = norm_case(device, "float32", 21, 48, True)
    own = [leaves[n].requires_grad_() for n in ("x", "residual", "weight")]
    y, s = rms_norm(own[0], own[2], residual=own[1])
    assert same(grad(s, own[:2], upstream["s"], retain_graph=True), [upstream["s"]] * 2)
    first = grad(y, own, upstream["y"], retain_graph=True)
    assert same(grad(y, own, upstream["y"], retain_graph=True), first)
    added = grad((y, s), own, (upstream["y"], upstream["s"]))
    assert close(added[:1], [first[0] + upstream["s"]]) and same(added[2:], first[2:])

    def step(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, residual=residual)[0]

    again = checkpoint(step, *own, use_reentrant=False)
    assert same(grad(again, own, upstream["y"]), first)


def check_norm_autocast(device: str) -> None:
    """As HF under autocast: the stream and the weight keep fp32, whatever a product hands over."""
    leaves, _ = norm_case(device, "float32", 21, 48, True)
    x, residual, weight = leaves["x"].bfloat16(), leaves["residual"], leaves["weight"]
    with torch.autocast(device, dtype=torch.bfloat16):
        y, s = rms_norm(x, weight, residual=residual)
        plain = reference.rms_norm(residual + x, weight)
    assert y.dtype == s.dtype == plain.dtype == torch.float32 and same([s], [residual + x])
    assert close([y], [plain])


# --- rotary embedding ----------------------------------------------------------------------------


def tables(
    device: str, dtype: torch.dtype, batch: int, tokens: int, rotary: int
) -> tuple[Tensor, Tensor]:
    """cos and sin (batch, tokens, rotary) of all different angles: no half is the other's copy."""
    angles = torch.arange(batch * tokens * rotary, device=device).reshape(batch, tokens, rotary)
    return (angles * 0.37).cos().to(dtype), (angles * 0.37).sin().to(dtype)


def heads(
    device: str, dtype: str, shape: tuple[int, int, int, int, int], transposed: bool = True
) -> tuple[Named, Named]:
    """q and k of (batch, heads, key_heads, tokens, head_dim), as a projection leaves them."""
    batch, many, few, tokens, width = shape

    def one(count: int, seed: int) -> Tensor:
        x = drawn(device, getattr(torch, dtype), batch, tokens, count, width, seed=seed)
        return x.transpose(1, 2) if transposed else x.transpose(1, 2).contiguous()

    return {"q": one(many, 0), "k": one(few, 1)}, {"q_out": one(many, 2), "k_out": one(few, 3)}


def turning(cos: Tensor, sin: Tensor, compute: Callable[..., tuple[Tensor, Tensor]], **more):
    def function(q: Tensor, k: Tensor) -> Named:
        wide = q.dtype == torch.float64
        tables = [t.double() if wide else t for t in (cos, sin)]
        return dict(zip(("q_out", "k_out"), compute(q, k, *tables, **more), strict=True))

    return function


def both_plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return reference.rope(q, cos, sin), reference.rope(k, cos, sin)


def misses_rope(
    device: str, dtype: str, shape: tuple[int, int, int, int, int], rotary: int | None = None,
    transposed: bool = True, batches: int = 1,
    compute: Callable[..., tuple[Tensor, Tensor]] = rope,
) -> list[str]:  # fmt: skip
    leaves, upstream = heads(device, dtype, shape, transposed)
    cos, sin = tables(device, leaves["q"].dtype, batches, shape[3], rotary or shape[4])
    return misses(turning(cos, sin, compute), turning(cos, sin, both_plain), leaves, upstream)


SMALL = 2, 6, 2, 19, 10


def through_wider_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `rope`: zeros that fill a head are seen, and so is what their gradient does."""
    head_dim = q.shape[-1]
    width = head_dim + 6
    turned = rope(q, k, cos, sin, width=width)
    first, last = (x[..., :head_dim] + x[..., head_dim:].sum(-1, keepdim=True) for x in turned)
    assert all(x.shape[-1] == width for x in turned)
    return first, last


def check_rope_width(device: str) -> None:
    for dtype, rotary in product(("float32", "bfloat16"), (6, 10)):
        for transposed in (True, False):
            compute = through_wider_heads
            assert misses_rope(device, dtype, SMALL, rotary, transposed, compute=compute) == []


def small_rope(device: str, rotary: int = 10) -> tuple[Named, Named, Tensor, Tensor]:
    leaves, upstream = heads(device, "float32", SMALL)
    return leaves, upstream, *tables(device, torch.float32, 1, SMALL[3], rotary)


def check_rope_bound_of_the_docstring(device: str) -> None:
    for dtype in ("float32", "bfloat16"):
        leaves, _ = heads(device, dtype, SMALL)
        cos, sin = tables(device, leaves["q"].dtype, 2, SMALL[3], SMALL[4])
        for x, y in zip(leaves.values(), rope(**leaves, cos=cos, sin=sin), strict=True):
            wide = [t.double() for t in (x, cos, sin)]
            true = reference.rope(*wide)
            # Both products as magnitudes: |a c| + |b e|, and so on.
            a, b = wide[0].abs().chunk(2, -1)
            parts = wide[0].abs() * wide[1].abs()[:, None]
            parts = parts + torch.cat([b, a], -1) * wide[2].abs()[:, None]
            v = torch.finfo(x.dtype).eps / 2
            assert ((y.double() - true).abs() <= 3 * ROOT * parts + v * true.abs() * 1.01).all()


def check_rope_backward_turns_back(device: str) -> None:
    """A rotation proper: its gradient is its inverse, and lengths are kept."""
    leaves, _, cos, sin = small_rope(device)
    half = cos[..., :5].double().acos()
    cos, sin = (torch.cat([t, t], -1).float() for t in (half.cos(), half.sin()))
    q = leaves["q"].requires_grad_()
    turned, _ = rope(q, leaves["k"], cos, sin)
    torch.testing.assert_close(grad(turned, q, turned)[0], q.detach())
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))


def check_rope_positions(device: str) -> None:
    leaves, upstream, _, _ = small_rope(device)
    cos, sin = (t[0] for t in tables(device, torch.float32, 1, 50, 8))
    for shape, dtype in product(((19,), (1, 19), (2, 19)), (torch.int32, torch.int64)):
        generator = torch.Generator(device).manual_seed(4)
        at = torch.randint(50, shape, generator=generator, device=device)
        rows = at.reshape(-1, 19)
        wanted = results(turning(cos[rows], sin[rows], rope), leaves, upstream)
        by = turning(cos, sin, rope, positions=at.to(dtype))
        found = results(by, leaves, upstream)
        assert same(found.values(), wanted.values()), (shape, dtype)


def check_rope_strides_and_empty(device: str) -> None:
    leaves, upstream, cos, sin = small_rope(device, 6)
    wanted = results(turning(cos, sin, rope), leaves, upstream)
    batch, many, few, tokens, width = SMALL
    packed = torch.cat([t.transpose(1, 2).flatten(2) for t in leaves.values()], dim=-1)
    views = packed.split([many * width, few * width], dim=-1)
    packed_views = {
        n: t.view(batch, tokens, -1, width).transpose(1, 2)
        for n, t in zip(leaves, views, strict=True)
    }
    ways = {
        "heads first": {n: t.contiguous() for n, t in leaves.items()},
        "packed": packed_views,
        "every other": {n: t.repeat_interleave(2, -1)[..., ::2] for n, t in leaves.items()},
    }
    for how, own in ways.items():
        found = results(turning(cos, sin, rope), own, upstream)
        assert same([t.contiguous() for t in found.values()],
                    [t.contiguous() for t in wanted.values()]), how  # fmt: skip
    across = cos.mT.contiguous().mT, sin.expand(2, -1, -1)
    found = results(turning(across[0].expand(2, -1, -1), across[1], rope), leaves, upstream)
    assert same(found.values(), wanted.values())
    for empty in ((0, 6, 2, 19, 10), (2, 6, 2, 0, 10)):
        own, _ = heads(device, "float32", empty)
        cos, sin = tables(device, torch.float32, 1, empty[3], 6)
        q = own["q"].requires_grad_()
        turned, _ = rope(q, own["k"], cos, sin)
        assert turned.shape == q.shape == grad(turned.sum(), q)[0].shape


def check_rope_order_of_the_docstring(device: str) -> None:
    """Results lie as q does, in a projection of q, k and v together too: attention's own order."""
    packed = torch.randn(2, 19, 10, 10, device=device)
    q, k = packed[:, :, :6].transpose(1, 2), packed[:, :, 6:8].transpose(1, 2)
    for turned in rope(q, k, *tables(device, torch.float32, 1, 19, 10)):
        assert turned.transpose(1, 2).is_contiguous()


def check_rope_frozen_and_repeated(device: str) -> None:
    """Frozen q or k, one output alone, backward twice, checkpointing, inputs left as they were."""
    leaves, upstream, cos, sin = small_rope(device)
    wanted = results(turning(cos, sin, rope), leaves, upstream)
    for chosen in product((False, True), repeat=2):
        own = [t.detach().clone().requires_grad_(c) for t, c in zip(leaves.values(), chosen)]  # noqa: B905
        turned = rope(*own, cos, sin)
        kept = [t.clone() for t in own]
        assert same(turned, [wanted["q_out"], wanted["k_out"]]) and same(own, kept)
        for leaf, out, dy, true in zip(own, turned, upstream.values(), ("d_q", "d_k"), strict=True):
            assert out.requires_grad == leaf.requires_grad
            if leaf.requires_grad:
                for _ in range(2):
                    assert same(grad(out, leaf, dy, retain_graph=True), [wanted[true]])
    own = [t.detach().requires_grad_() for t in leaves.values()]
    turned = checkpoint(rope, *own, cos, sin, use_reentrant=False)
    assert same(grad(turned, own, tuple(upstream.values())), [wanted["d_q"], wanted["d_k"]])


def check_functional_transforms(device: str) -> None:
    """torch.func and forward mode, where a second derivative works too: plain PyTorch runs."""
    leaves, upstream, cos, sin = small_rope(device)
    q, k = leaves.values()

    def turned(q: Tensor) -> Tensor:
        return (rope(q, k, cos, sin)[0] * upstream["q_out"]).sum()

    wanted = results(turning(cos, sin, rope), leaves, upstream)["d_q"]
    assert close([torch.func.grad(turned)(q)], [wanted])
    of, dy = norm_case(device, "float32", 9, 48, False)

    def normed(x: Tensor) -> Tensor:
        return (rms_norm(x, of["weight"]) * dy["y"]).sum()

    x = of["x"].detach().requires_grad_()
    [own] = grad(normed(x), x)
    assert close([torch.func.grad(normed)(of["x"])], [own])
    _, pushed = torch.func.jvp(normed, (of["x"],), (dy["y"],))
    torch.testing.assert_close(pushed, (own * dy["y"]).sum(), rtol=1e-3, atol=1e-3)


ALL = [value for name, value in list(globals().items()) if name.startswith("check_")]
EVERYWHERE = [check for check in ALL if not check.__name__.endswith("_of_the_docstring")]


def check_positions_outside_the_table(device: str) -> None:
    """NaN for that token's turned elements, of kernels alone: PyTorch raises."""
    leaves, _, _, _ = small_rope(device)
    cos, sin = (t[0] for t in tables(device, torch.float32, 1, 50, 8))
    at = torch.arange(19, device=device)
    at[[3, 5, 7]] = torch.tensor([50, -1, 2**40], device=device)
    expected = torch.zeros(19, 10, dtype=torch.bool, device=device)
    expected[[3, 5, 7], :8] = True
    for turned in rope(**leaves, cos=cos, sin=sin, positions=at):
        assert torch.equal(turned.isnan(), expected.expand_as(turned))


def check_compiled(device: str, dtype: str = "float32") -> None:
    """Norm, residual and rotation in one graph, right by the same rule."""
    torch._dynamo.reset()
    compiled = torch.compile(rms_norm, fullgraph=True)
    assert misses_norm(device, dtype, 21, 80, compute=compiled) == []
    assert misses_norm(device, dtype, 21, 80, residual=False, compute=compiled) == []
    assert misses_rope(device, dtype, SMALL, 6, compute=torch.compile(rope, fullgraph=True)) == []
    dynamic = torch.compile(rms_norm, fullgraph=True, dynamic=True)
    for rows in (21, 34):
        assert misses_norm(device, dtype, rows, 80, compute=dynamic) == []
