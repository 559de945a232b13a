"""More than 2³¹ elements in one operand, by every path, against float64 at sampled places.

Of y and d_x some rows are compared, of the weights' gradients some columns of inner: each needs a
thin slice of the truth only. One tolerance rule, `fusedlib.bench.check`.
"""

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

from fusedlib import reference
from fusedlib.bench import check
from fusedlib.functional import SAVES, swiglu_mlp
from fusedlib.kernels import swiglu as kernels

pytestmark = pytest.mark.gpu

MANY, SAMPLES = 2**31, 64
# tokens, hidden, inner: small where nothing has to be large, so that the sums are short.
LARGE = {
    "gate|up": (70_016, 64, 16_384),
    "gate|up, unaligned": (70_017, 61, 16_391),
    "x": (2_097_216, 1040, 32),
    "x, unaligned": (2_097_217, 1031, 31),
    "weights": (130, 2080, 524_304),
    "weights, unaligned": (130, 2081, 524_307),
}
SPLIT = {"gate|up": (70_016, 256, 16_384), "x": (2_097_216, 1040, 256)}


def at_rows(x: Tensor, w_gate_up: Tensor, w_down: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """y and d_x of the given rows."""
    x, inner = x.detach().requires_grad_(), w_down.shape[1]
    y = reference.swiglu_mlp(x, w_gate_up[:inner], w_gate_up[inner:], w_down)
    return {"y": y.detach(), "d_x": grad(y, x, dy)[0]}


def at_columns(x: Tensor, rows: Tensor, w_down: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Gradients of the given rows of w_gate_up (gate, then up) and columns of w_down."""
    w_gate, w_up = (t.detach().requires_grad_() for t in rows.chunk(2))
    h = reference.swiglu(x, w_gate, w_up)
    d_w_gate, d_w_up = grad(h, (w_gate, w_up), dy @ w_down)
    return {"d_w_gate": d_w_gate, "d_w_up": d_w_up, "d_w_down": dy.mT @ h.detach()}


def spots(count: int) -> Tensor:
    """The first, the last, and some between."""
    ends = torch.arange(SAMPLES // 4)
    between = torch.randint(count, (SAMPLES // 2,))
    return torch.cat([ends, between, count - 1 - ends]).clamp(0, count - 1).cuda()


def sampled_misses(shape: tuple[int, int, int], dtype: torch.dtype, save: str) -> list[str]:
    tokens, hidden, inner = shape
    torch.manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, device="cuda", dtype=dtype).mul_(scale)

    x, dy = normal(tokens, hidden), normal(tokens, hidden)
    w_gate_up = normal(2 * inner, hidden, scale=hidden**-0.5)
    w_down = normal(hidden, inner, scale=inner**-0.5)
    assert max(x.numel(), w_gate_up.numel(), tokens * 2 * inner) > MANY
    leaves = [t.requires_grad_() for t in (x, w_gate_up, w_down)]
    y = swiglu_mlp(*leaves, save=save)
    d_x, d_w_gate_up, d_w_down = grad(y, leaves, dy)
    rows, columns = spots(tokens), spots(inner)
    both = torch.cat([columns, inner + columns])
    found = {"y": y.detach()[rows], "d_x": d_x[rows], "d_w_down": d_w_down[:, columns]}
    found["d_w_gate"], found["d_w_up"] = d_w_gate_up[both].chunk(2)
    del y, d_x, d_w_gate_up, d_w_down
    x, w_gate_up, w_down = (t.detach() for t in leaves)

    def plain(as_computed) -> dict[str, Tensor]:
        of_rows = x[rows], w_gate_up, w_down, dy[rows]
        of_columns = x, w_gate_up[both], w_down[:, columns], dy
        thin = at_rows(*map(as_computed, of_rows))
        return thin | at_columns(*map(as_computed, of_columns))

    true, eager = plain(torch.Tensor.double), plain(lambda t: t)
    return check.misses(check.errors(found, true), check.errors(eager, true), dtype)


@pytest.fixture(autouse=True)
def _room():
    free, _ = torch.cuda.mem_get_info()
    if free < 100 * 2**30:
        pytest.skip(f"needs 100 GiB of free memory, {free / 2**30:.0f} are")
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("what", LARGE)
def test_half_precision_vs_float64(what, save):
    assert sampled_misses(LARGE[what], torch.bfloat16, save) == []


@pytest.mark.parametrize("what", ["gate|up", "x", "weights"])
def test_kernels_of_tl_by_tma_vs_float64(monkeypatch, what):
    """As on a Hopper GPU whose Triton lacks Gluon."""
    monkeypatch.setattr(kernels, "hopper", None)
    assert sampled_misses(LARGE[what], torch.bfloat16, "gate_up") == []


@pytest.mark.parametrize("what", SPLIT)
def test_split_products_vs_float64(what):
    assert sampled_misses(SPLIT[what], torch.float32, "gate_up") == []
