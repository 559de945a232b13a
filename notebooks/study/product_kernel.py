"""Products of matrices by one plain Triton kernel: a rival, and a probe of how sums are kept.

`split_product` has what Triton gives who asks `tl.dot` for `input_precision="tf32x3"`: it splits
its fp32 operands itself, three products of TF32 parts for one. `accumulate_fwd` shows where a sum
over K is kept, over blocks of K:

    in the tensor core    acc = mma(A_b, B_b, acc)         the unit's own accumulator over all of K
    promoted              acc = acc + mma(A_b, B_b, 0)     an ordinary fp32 addition a block
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.bench.attempt import Unavailable

SPLIT: dict[str, Any] = {"TILE": 128, "BLOCK_K": 32, "GROUP": 8, "num_warps": 8, "num_stages": 3}
# The smallest tile that one warp group's MMA takes on sm_90; three stages spill 24 bytes on sm_89.
PROBE: dict[str, Any] = {"TILE": 64, "BLOCK_K": 64, "GROUP": 1, "num_warps": 4, "num_stages": 2}


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, c_ptr, m, n, k, a_row, a_column, b_row, b_column, one,
    TILE: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
    PROMOTE: tl.constexpr, PRECISION: tl.constexpr,  # noqa: N803
):  # fmt: skip
    # Tiles of a group share columns of b in the L2.
    down, across = m // TILE, n // TILE
    first = tl.program_id(0) // (GROUP * across) * GROUP
    size = tl.minimum(down - first, GROUP)
    inside = tl.program_id(0) % (GROUP * across)
    rows = (first + inside % size).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = (inside // size).to(tl.int64) * TILE + tl.arange(0, TILE)
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * a_row + inner[None, :] * a_column  # [TILE, BLOCK_K]
    b_ptrs = b_ptr + inner[:, None] * b_row + columns[None, :] * b_column  # [BLOCK_K, TILE]
    acc = tl.zeros((TILE, TILE), dtype=tl.float32)
    for _ in range(0, k, BLOCK_K):
        a, b = tl.load(a_ptrs), tl.load(b_ptrs)
        if PROMOTE:
            # The compiler folds acc + dot(a, b) into dot(a, b, acc), but not a fused multiply-add
            # whose factor it cannot know to be 1; multiplying by 1 is exact, so this is an
            # addition.
            acc = tl.fma(tl.dot(a, b, input_precision=PRECISION), one, acc)
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K * a_column
        b_ptrs += BLOCK_K * b_row
    tl.store(c_ptr + rows[:, None] * n + columns[None, :], acc)


def _product(a: Tensor, b: Tensor, *, promote: bool, precision: str, **how: Any) -> Tensor:
    """a [m, k] times b [k, n] with any strides, in fp32 [m, n]."""
    (m, k), n, tile = a.shape, b.shape[1], how["TILE"]
    how["BLOCK_K"] = min(how["BLOCK_K"], k)
    if m % tile or n % tile or k % how["BLOCK_K"]:
        raise Unavailable(
            f"takes m and n that are multiples of {tile} and k of {how['BLOCK_K']}, "
            f"not {m}, {n} and {k}"
        )
    c = torch.empty(m, n, dtype=torch.float32, device=a.device)
    _product_kernel[(m // tile * (n // tile),)](
        a, b, c, m, n, k, *a.stride(), *b.stride(), 1.0, PROMOTE=promote, PRECISION=precision, **how
    )
    return c


def accumulate_fwd(a: Tensor, b: Tensor, *, promote: bool, precision: str = "tf32") -> Tensor:
    """A product of fp16, bf16 or fp32 matrices with the sum over K kept in the tensor core, or with
    `promote` in an fp32 accumulator outside; of fp32 ones by "tf32", or "ieee" with no tensor core.
    """
    return _product(a, b, promote=promote, precision=precision, **PROBE)


def split_product(a: Tensor, b: Tensor) -> Tensor:
    """A product of fp32 matrices by tf32x3."""
    return _product(a, b, promote=False, precision="tf32x3", **SPLIT)


class Linear(torch.autograd.Function):
    """x [tokens, in] and weight [out, in] to x weightᵀ, all three products by `split_product`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x weightᵀ."""
        ctx.save_for_backward(x, weight)
        return split_product(x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and of the weight."""
        (x, weight), (dy,) = ctx.saved_tensors, gradients
        return split_product(dy, weight), split_product(dy.mT, x)
