"""Products of matrices by one plain Triton kernel: a rival, and a probe of how sums are kept.

`split_product` has what Triton gives who asks `tl.dot` for `input_precision="tf32x3"`: it splits
its fp32 operands itself, three products of TF32 parts for one; `searched_product` has its tile
searched among some. `accumulate_fwd` shows where a sum
over K is kept, over blocks of K:

    in the tensor core    acc = mma(A_b, B_b, acc)         the unit's own accumulator over all of K
    promoted              acc = acc + mma(A_b, B_b, 0)     an ordinary fp32 addition a block
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import Config

from fusedlib.bench.attempt import Unavailable


def _tile(rows: int, columns: int, k: int, warps: int, stages: int, group: int = 8) -> Config:
    numbers = {"ROWS": rows, "COLUMNS": columns, "BLOCK_K": k, "GROUP": group}
    return Config(numbers, num_warps=warps, num_stages=stages)


SPLIT = _tile(128, 128, 32, 8, 3)
SEARCHED = [
    SPLIT, _tile(128, 128, 32, 8, 4), _tile(128, 128, 32, 4, 3), _tile(128, 128, 64, 8, 2),
    _tile(128, 64, 32, 4, 4), _tile(64, 128, 32, 4, 4), _tile(128, 64, 32, 8, 3),
    _tile(128, 256, 32, 8, 3),
]  # fmt: skip
# The smallest tile that one warp group's MMA takes on sm_90; three stages spill 24 bytes on sm_89.
PROBE = _tile(64, 64, 64, 4, 2, group=1)


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, c_ptr, m, n, k, a_row, a_column, b_row, b_column, one,
    PROMOTE: tl.constexpr, PRECISION: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    # Tiles of a group share columns of b in the L2.
    down, across = m // ROWS, n // COLUMNS
    first = tl.program_id(0) // (GROUP * across) * GROUP
    size = tl.minimum(down - first, GROUP)
    inside = tl.program_id(0) % (GROUP * across)
    rows = (first + inside % size).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (inside // size).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * a_row + inner[None, :] * a_column  # [ROWS, BLOCK_K]
    b_ptrs = b_ptr + inner[:, None] * b_row + columns[None, :] * b_column  # [BLOCK_K, COLUMNS]
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
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


def _fitting(tiles: list[Config], sizes: dict[str, Any], **_: Any) -> list[Config]:
    """Those of the tiles of which the product is made whole; raises `Unavailable` if none is."""
    m, n, k = (sizes[name] for name in ("m", "n", "k"))
    fit = [
        tile for tile in tiles
        if not (m % tile.kwargs["ROWS"] or n % tile.kwargs["COLUMNS"] or k % tile.kwargs["BLOCK_K"])
    ]  # fmt: skip
    if not fit:
        least = tiles[0].kwargs
        raise Unavailable(
            f"takes m that are multiples of {least['ROWS']}, n of {least['COLUMNS']} and k of "
            f"{least['BLOCK_K']}, not {m}, {n} and {k}"
        )
    return fit


_searched_kernel = triton.autotune(
    SEARCHED, key=["m", "n", "k", "a_row", "a_column", "b_row", "b_column"],
    prune_configs_by={"early_config_prune": _fitting},
)(_product_kernel)  # fmt: skip


def _product(a: Tensor, b: Tensor, tile: Config | None, *, promote: bool, precision: str) -> Tensor:
    """a [m, k] times b [k, n] with any strides, in fp32 [m, n], by a tile, or by a search."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=torch.float32, device=a.device)
    given = a, b, c, m, n, k, *a.stride(), *b.stride(), 1.0, promote, precision

    def programs(numbers: dict[str, int]) -> tuple[int]:
        return (m // numbers["ROWS"] * (n // numbers["COLUMNS"]),)

    if tile is None:
        _searched_kernel[programs](*given)
        return c
    numbers = tile.kwargs | {"BLOCK_K": min(tile.kwargs["BLOCK_K"], k)}
    _fitting([Config(numbers)], {"m": m, "n": n, "k": k})
    _product_kernel[programs](
        *given, **numbers, num_warps=tile.num_warps, num_stages=tile.num_stages
    )
    return c


def accumulate_fwd(a: Tensor, b: Tensor, *, promote: bool, precision: str = "tf32") -> Tensor:
    """A product of fp16, bf16 or fp32 matrices with the sum over K kept in the tensor core, or with
    `promote` in an fp32 accumulator outside; of fp32 ones by "tf32", or "ieee" with no tensor core.
    """
    return _product(a, b, PROBE, promote=promote, precision=precision)


def split_product(a: Tensor, b: Tensor) -> Tensor:
    """A product of fp32 matrices by tf32x3."""
    return _product(a, b, SPLIT, promote=False, precision="tf32x3")


def searched_product(a: Tensor, b: Tensor) -> Tensor:
    """The same by the fastest of some tiles, which the first product of each shape looks for."""
    return _product(a, b, None, promote=False, precision="tf32x3")


class Linear(torch.autograd.Function):
    """x [tokens, in] and weight [out, in] to x weightᵀ, all three products by the one given."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, product: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """x weightᵀ."""
        ctx.save_for_backward(x, weight)
        ctx.product = product
        return product(x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of x and of the weight."""
        (x, weight), (dy,) = ctx.saved_tensors, gradients
        return ctx.product(dy, weight), ctx.product(dy.mT, x), None
