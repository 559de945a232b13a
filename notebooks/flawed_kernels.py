"""WRONG ON PURPOSE: the published kernels' flaw as a `constexpr`, for topic `anatomy` alone.

With `WHOLE_SUM=False` a tile of h takes, as published, one block of K where the sum runs over all
of them, and always W's first rows: the result has nothing to do with SwiGLU. With `WHOLE_SUM=True`
the same tile is summed over all of K. `flawed_swiglu.py` is the only caller.

x [tokens, width], w_gate_up [2·width, width] (gate rows above up rows), h [tokens, width], all
contiguous fp32, fp16 or bf16; width a multiple of BLOCK.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = {"tf32": 4, "ieee": 8}  # the IEEE backward spills with four
# The sum's own block of K: IEEE products hold their factors in registers.
SUM_BLOCK = {"tf32": 32, "ieee": 16}


@triton.jit
def _gate_up(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, tokens, width, one, rows, columns,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE_SUM: tl.constexpr, PRECISION: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """gate and up of one tile [BLOCK, BLOCK], and the weights' block that was used last."""
    inside = (rows < tokens)[:, None]
    if WHOLE_SUM:
        gate = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        up = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for start in range(0, width, BLOCK_K):
            inner = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + rows[:, None] * width + inner[None, :], mask=inside, other=0.0)
            w_ptrs = w_ptr + columns[None, :] * width + inner[:, None]
            w_gate, w_up = tl.load(w_ptrs), tl.load(w_ptrs + width * width)
            if PRECISION == "ieee":
                # Each block summed by itself: one long chain misses the gate at width 4096. Times
                # 1.0, which the compiler cannot see, or it would fold the addition into the dot.
                gate = tl.fma(tl.dot(x, w_gate, input_precision=PRECISION), one, gate)
                up = tl.fma(tl.dot(x, w_up, input_precision=PRECISION), one, up)
            else:
                gate = tl.dot(x, w_gate, gate, input_precision=PRECISION)
                up = tl.dot(x, w_up, up, input_precision=PRECISION)
        return gate, up
    else:
        # WRONG, as published: K is `columns` alone, and the weights' rows are the first ones.
        first = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
        w_ptrs = w_ptr + first[None, :] * width + columns[:, None]
        gate = tl.dot(x, tl.load(w_ptrs), input_precision=PRECISION)
        up = tl.dot(x, tl.load(w_ptrs + width * width), input_precision=PRECISION)
        return gate, up


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, h_ptr, tokens, width, one,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE_SUM: tl.constexpr, PRECISION: tl.constexpr,  # noqa: N803
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate, up = _gate_up(
        x_ptr, w_ptr, tokens, width, one, rows, columns, BLOCK, BLOCK_K, WHOLE_SUM, PRECISION
    )
    h = gate * tl.sigmoid(gate) * up
    h_ptrs = h_ptr + rows[:, None] * width + columns[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=(rows < tokens)[:, None])


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, dh_ptr, out_ptr, tokens, width, one,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE_SUM: tl.constexpr, PRECISION: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """d(gate|up) [tokens, 2·width] of the whole sum, or dx [tokens, width] as published."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < tokens)[:, None]
    gate, up = _gate_up(
        x_ptr, w_ptr, tokens, width, one, rows, columns, BLOCK, BLOCK_K, WHOLE_SUM, PRECISION
    )
    dh = tl.load(dh_ptr + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
    s = tl.sigmoid(gate)
    d_up = dh * gate * s
    d_gate = dh * up * (s + gate * s * (1 - s))
    kind = out_ptr.dtype.element_ty
    if WHOLE_SUM:
        out_ptrs = out_ptr + rows[:, None] * (2 * width) + columns[None, :]
        tl.store(out_ptrs, d_gate.to(kind), mask=inside)
        tl.store(out_ptrs + width, d_up.to(kind), mask=inside)
    else:
        # WRONG, as published: dx of one block of W.
        first = tl.arange(0, BLOCK)
        w_ptrs = w_ptr + first[:, None] * width + columns[None, :]
        dx = tl.dot(d_gate, tl.load(w_ptrs).to(tl.float32), input_precision=PRECISION)
        w_up = tl.load(w_ptrs + width * width).to(tl.float32)
        dx = tl.dot(d_up, w_up, dx, input_precision=PRECISION)
        tl.store(out_ptr + rows[:, None] * width + columns[None, :], dx.to(kind), mask=inside)


def forward(x: Tensor, w_gate_up: Tensor, *, whole_sum: bool, precision: str, block: int) -> Tensor:
    """h (tokens, width); WRONG unless `whole_sum`."""
    h = torch.empty_like(x)
    _forward_kernel[_grid(x, block)](
        x, w_gate_up, h, *x.shape, 1.0, num_warps=NUM_WARPS[precision],
        **_constants(whole_sum=whole_sum, precision=precision, block=block),
    )  # fmt: skip
    return h


def backward(
    x: Tensor, w_gate_up: Tensor, dh: Tensor, *, whole_sum: bool, precision: str, block: int
) -> Tensor:
    """d(gate|up) (tokens, 2·width) of the whole sum, else dx (tokens, width), WRONG."""
    tokens, width = x.shape
    out = x.new_empty(tokens, 2 * width if whole_sum else width)
    _backward_kernel[_grid(x, block)](
        x, w_gate_up, dh.contiguous(), out, tokens, width, 1.0, num_warps=NUM_WARPS[precision],
        **_constants(whole_sum=whole_sum, precision=precision, block=block),
    )  # fmt: skip
    return out


def _grid(x: Tensor, block: int) -> tuple[int, int]:
    tokens, width = x.shape
    return triton.cdiv(tokens, block), triton.cdiv(width, block)


def _constants(*, whole_sum: bool, precision: str, block: int) -> dict[str, object]:
    block_k = min(block, SUM_BLOCK[precision])
    return {
        "BLOCK": block, "BLOCK_K": block_k, "WHOLE_SUM": whole_sum, "PRECISION": precision
    }  # fmt: skip
