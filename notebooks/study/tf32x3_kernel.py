"""A product of fp32 matrices by one plain Triton kernel, whose `tl.dot` splits its own operands:
`input_precision="tf32x3"`, three products of TF32 parts for one. What Triton gives who asks for it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.bench.attempt import Unavailable

TILE, BLOCK_K, GROUP = 128, 32, 8
NUM_WARPS, NUM_STAGES = 8, 3


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, c_ptr, m, n, k, a_row, a_column, b_row, b_column,
    TILE: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
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
        acc = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), acc, input_precision="tf32x3")
        a_ptrs += BLOCK_K * a_column
        b_ptrs += BLOCK_K * b_row
    tl.store(c_ptr + rows[:, None] * n + columns[None, :], acc)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] times b [k, n], fp32 with any strides, in fp32 [m, n]."""
    (m, k), n = a.shape, b.shape[1]
    if m % TILE or n % TILE or k % BLOCK_K:
        raise Unavailable(
            f"takes m and n that are multiples of {TILE} and k of {BLOCK_K}, not {m}, {n} and {k}"
        )
    c = torch.empty(m, n, dtype=torch.float32, device=a.device)
    _product_kernel[(m // TILE * (n // TILE),)](
        a, b, c, m, n, k, *a.stride(), *b.stride(),
        TILE=TILE, BLOCK_K=BLOCK_K, GROUP=GROUP, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return c


class Linear(torch.autograd.Function):
    """x [tokens, in] and weight [out, in] to x weightᵀ, all three products by `product`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x weightᵀ."""
        ctx.save_for_backward(x, weight)
        return product(x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of a weight that is not frozen."""
        (x, weight), (dy,) = ctx.saved_tensors, gradients
        d_weight = product(dy.mT, x) if ctx.needs_input_grad[1] else None
        return product(dy, weight), d_weight
