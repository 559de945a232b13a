"""What holds of `rms_norm` alone, beside the laws of `tests/laws`; and of products that compute a
norm's output again.
"""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear

from fusedlib import reference, rms_norm
from fusedlib.launch import has_kernels
from fusedlib.ops import recomputed
from fusedlib.ops.recomputed import recompute_in_backward
from gradient_checks import close, drawn, same


def operands(device: str, dtype: torch.dtype, rows: int, width: int) -> list[Tensor]:
    """x, a weight and a residual."""
    x, residual = (drawn(device, dtype, rows, width, seed=seed) for seed in range(2))
    return [x, drawn(device, dtype, width, seed=2) * 0.5 + 1, residual]


def test_hf_bit_for_bit(device):
    """y differs from HF's formula nowhere but where two fp32 sums round apart, and s nowhere."""
    for dtype, cast, other in (
        (torch.bfloat16, "hf", "litgpt"), (torch.float16, "litgpt", "hf"),
    ):  # fmt: skip
        x, weight, residual = operands(device, dtype, 64, 512)
        y, s = rms_norm(x, weight, residual=residual, cast=cast)
        wanted = reference.rms_norm(x + residual, weight, cast=cast)
        assert torch.equal(s, x + residual)
        assert (y != wanted).float().mean() < 2e-3, (dtype, cast)
        otherwise = reference.rms_norm(x + residual, weight, cast=other)
        assert (otherwise != wanted).float().mean() > 2e-2  # the casts can be told apart


@pytest.mark.plain
def test_rows_of_zeros_and_squares_that_overflow(device):
    """Give zeros, infinities and NaN where HF's formula does."""
    x = torch.zeros(6, 40, device=device)
    x[1, 3], x[2, 3], x[3], x[4] = float("inf"), float("nan"), 1e-30, 3e25
    for eps in (1e-6, 0.0):
        y, wanted = (f(x, torch.ones_like(x[0]), eps) for f in (rms_norm, reference.rms_norm))
        torch.testing.assert_close(y, wanted, equal_nan=True)


@pytest.mark.plain
def test_a_stream_of_another_dtype_under_autocast(device):
    """As HF under autocast: the stream and the weight keep fp32, whatever a product hands over."""
    x, weight, residual = operands(device, torch.float32, 21, 48)
    x = x.bfloat16()
    with torch.autocast(device, dtype=torch.bfloat16):
        y, s = rms_norm(x, weight, residual=residual)
        wanted = reference.rms_norm(residual + x, weight)
    assert y.dtype == s.dtype == wanted.dtype == torch.float32 and same([s], [residual + x])
    assert close([y], [wanted])


# --- a product that computes the norm again ------------------------------------------------------


@pytest.mark.plain
def test_output_computed_again(device):
    """Gradients are those of an output that is kept, bit by bit; two products, and nobody else."""
    x, weight, residual = operands(device, torch.float32, 30, 48)
    w = drawn(device, torch.float32, 20, 48, seed=9)
    own = [t.requires_grad_() for t in (x.view(2, 15, 48), weight, residual.view(2, 15, 48), w)]
    again = mock.patch.object(recomputed, "_again", wraps=recomputed._again)

    def step(forgets: bool, hooked: bool = False, doubled: bool = False) -> list[Tensor]:
        y, s = rms_norm(own[0], weight, residual=own[2])
        if doubled:  # as a hook might
            y.mul_(2)
        product = (lambda y, z: recompute_in_backward(y, z)) if forgets else (lambda y, z: z)
        with saved_tensors_hooks(lambda t: t, lambda t: t) if hooked else nullcontext():
            z = product(y, Product.apply(y, w)) + product(y, Product.apply(y, w[:1])) + s.sum()
        return [z.detach(), *grad(z.square().sum(), own)]

    wanted, has = step(False), has_kernels(x.device)
    for settings, count in (({}, 2), ({"hooked": True}, 0), ({"doubled": True}, 0)):
        with again as calls:
            actual = step(True, **settings)
        assert calls.call_count == count * has  # who watches what is kept sees no other call
        assert same(actual, step(False, doubled=True) if "doubled" in settings else wanted)
    y, _ = rms_norm(own[0], weight, residual=own[2])
    loss = recompute_in_backward(y, Product.apply(y, w)).sum()
    with torch.no_grad():
        weight.mul_(2)
    if has:
        with pytest.raises(RuntimeError, match="computed again for backward.*modified in place"):
            grad(loss, w)


class Product(torch.autograd.Function):
    """x wᵀ, of which a node keeps both."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return linear(x, w)

    @staticmethod
    def backward(ctx, upstream):
        x, w = ctx.saved_tensors
        return upstream @ w, upstream.flatten(0, -2).T @ x.flatten(0, -2)


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
