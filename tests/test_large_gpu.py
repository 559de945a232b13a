"""More than 2³¹ elements in one operand, by every path, against float64 at sampled places.

Of y and d_x some rows are compared, of the weights' gradients some columns of inner: each needs a
thin slice of the truth only. One tolerance rule, `fusedlib.bench.check`.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

from fusedlib import reference, swiglu_mlp, tuning
from fusedlib.bench import check

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
    x = x.detach().requires_grad_()
    y = plain(x, w_gate_up, w_down)
    return {"y": y.detach(), "d_x": grad(y, x, dy)[0]}


def at_columns(x: Tensor, rows: Tensor, w_down: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Gradients of the given rows of w_gate_up (gate, then up) and columns of w_down."""
    w_gate, w_up = (t.detach().requires_grad_() for t in rows.chunk(2))
    h = reference.swiglu(x, w_gate, w_up)
    d_w_gate, d_w_up = grad(h, (w_gate, w_up), dy @ w_down)
    return {"d_w_gate": d_w_gate, "d_w_up": d_w_up, "d_w_down": dy.mT @ h.detach()}


def plain(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    return reference.swiglu_mlp(x, *w_gate_up.chunk(2), w_down)


def spots(count: int) -> Tensor:
    """The first, the last, and some between."""
    ends = torch.arange(SAMPLES // 4)
    between = torch.randint(count, (SAMPLES // 2,))
    return torch.cat([ends, between, count - 1 - ends]).clamp(0, count - 1).cuda()


def drawn(shape: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """x, w_gate_up, w_down, which want gradients, and dy."""
    tokens, hidden, inner = shape
    sizes = (tokens, hidden), (2 * inner, hidden), (hidden, inner), (tokens, hidden)
    assert max(2 * inner * tokens, *(rows * columns for rows, columns in sizes)) > MANY
    scales = 1.0, hidden**-0.5, inner**-0.5, 1.0
    made = [torch.randn(size, device="cuda", dtype=dtype) for size in sizes]
    made = [t.mul_(scale) for t, scale in zip(made, scales, strict=True)]
    return [*(t.requires_grad_() for t in made[:3]), made[3]]


def sampled_misses(shape: tuple[int, int, int], dtype: torch.dtype, save: str) -> list[str]:
    torch.manual_seed(0)
    *leaves, dy = drawn(shape, dtype)
    rows, columns = spots(shape[0]), spots(shape[2])
    both = torch.cat([columns, shape[2] + columns])

    def sampled(compute: Callable[..., Tensor]) -> dict[str, Tensor]:
        y = compute(*leaves)
        d_x, d_w_gate_up, d_w_down = grad(y, leaves, dy)
        found = {"y": y.detach()[rows], "d_x": d_x[rows], "d_w_down": d_w_down[:, columns]}
        found["d_w_gate"], found["d_w_up"] = d_w_gate_up[both].chunk(2)
        return found

    found, usual = sampled(partial(swiglu_mlp, save=save)), sampled(plain)
    x, w_gate_up, w_down = (t.detach() for t in leaves)
    true = at_rows(*(t.double() for t in (x[rows], w_gate_up, w_down, dy[rows])))
    true |= at_columns(*(t.double() for t in (x, w_gate_up[both], w_down[:, columns], dy)))
    return check.misses(check.errors(found, true), check.errors(usual, true), dtype)


@pytest.fixture(autouse=True)
def _room():
    free, _ = torch.cuda.mem_get_info()
    if free < 100 * 2**30:
        pytest.skip(f"needs 100 GiB of free memory, {free / 2**30:.0f} are")
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("save", ["gate_up", "input"])
@pytest.mark.parametrize("what", LARGE)
def test_half_precision_vs_float64(what, save):
    assert sampled_misses(LARGE[what], torch.bfloat16, save) == []


@pytest.mark.parametrize("what", ["gate|up", "x", "weights"])
def test_kernels_of_tl_by_tma_vs_float64(what):
    """As on a Hopper GPU whose Triton lacks Gluon."""
    with tuning.override(mlp_warp_specialized=False):
        assert sampled_misses(LARGE[what], torch.bfloat16, "gate_up") == []


@pytest.mark.parametrize("what", SPLIT)
def test_split_products_vs_float64(what):
    assert sampled_misses(SPLIT[what], torch.float32, "gate_up") == []
