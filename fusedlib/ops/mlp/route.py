"""Which code runs a call of the MLP: its routes.

This module decides, from dtypes, devices and sizes alone; all others ask it. A call goes through
these files, in this order:

    function        checks the operands, asks for a plan, and calls what it is given
    plan_cache      keeps a plan for each class of calls that take one route
    route           decides the route
    autograd        saves tensors for backward, and runs the one backward pass
    plan            starts the kernels of both passes
    products        the plain matrix products; `few_tokens` and `split_products` have their own

| `path`         | calls                           | gate, up, h    | d(gate|up), h | products     |
|----------------|---------------------------------|----------------|---------------|--------------|
| plain PyTorch  | any other                       |                |               |              |
| few tokens     | half, at most 64 tokens, even   | tiles          | tiles         | few_tokens   |
| fused by tiles | half, Hopper, one wave of tiles | tiles          | tiles         | torch, few   |
| apart          | half, Hopper, few 128² tiles    | apart          | apart         | torch        |
| dh apart       | half, Hopper, few 128·256 tiles | tiles or roles | apart         | torch, few   |
| fused by roles | half, Hopper, even, more tokens | roles          | roles         | torch        |
| fused by tiles | half, the rest                  | tiles          | tiles         | torch        |
| split fp32     | fp32 at "highest", if faster    | apart          | apart         | split, torch |
| fp32           | fp32, the rest; empty operands  | apart          | apart         | torch        |

*Half* is bf16 and fp16; *even* sizes, hidden and inner, are multiples of 16. *Few tokens* have a
down projection; without one they go by tiles. *One wave* is up to `max_one_wave_tokens`, *few*
tiles up to `max_unfused_tokens`. *Tiles* are the kernels of `tiles`, *roles* those of `hopper`
with a role for each warp; *apart* is a plain product and a pointwise kernel. fp32 takes
the kernels from MIN_SPLIT_WORK multiplications a weight on. Operands that are not contiguous, or do
not begin at 16 bytes, are copied for the call.

`w_gate` is a packed weight, its gate rows above its up rows, where `w_up` is None; otherwise gate
and up have a weight each, a pair. Both take the same routes. Importing this module imports no
Triton.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from fusedlib.compat import is_transformed
from fusedlib.launch import INTERPRETED, architecture, has_kernels
from fusedlib.ops.arguments import FEW_TOKENS, HALF_DTYPES, KERNEL_DTYPES
from fusedlib.ops.matmul import function as linear_route
from fusedlib.ops.matmul.function import fp32_precision
from fusedlib.ops.mlp.configs import ALIGNMENT, one_wave_lengths
from fusedlib.ops.mlp.problem import TILED, UNFUSED, WARP_SPECIALIZED, MLPProblem, Route

PLAIN_PYTORCH = "plain PyTorch"
# Tiles of the fused kernels on Hopper.
BLOCK_M, FORWARD_N, BACKWARD_N = 128, 128, 256

FUSED_KERNEL_DTYPES = KERNEL_DTYPES if INTERPRETED else HALF_DTYPES
FUSES_FP32 = True  # where the fused kernels take fp32, in the interpreter; False as on a GPU
WARP_SPECIALIZED_KERNELS = True  # False: Hopper goes by tiles, as other cards do
MAX_UNFUSED_TOKENS: int | None = None  # a number for every card, in place of a count of tiles


def problem_of(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, down: bool = True, activation: str = "silu"
) -> MLPProblem:
    """The problem that these operands pose."""
    wide, hidden = weight_sizes(w_gate, w_up)
    sizes = count_tokens(x, hidden), hidden, wide // 2
    pair = w_up is not None
    return MLPProblem(x.device, x.dtype, fp32_precision(x), *sizes, down, pair, activation)


def weight_sizes(w_gate: Tensor, w_up: Tensor | None) -> tuple[int, int]:
    """2·inner and hidden, of a pair or of a packed weight and None."""
    rows, hidden = w_gate.shape
    return (rows if w_up is None else 2 * rows), hidden


def choose_route(problem: MLPProblem) -> Route:
    """The row of the table that a problem takes."""
    device, dtype, precision, tokens, hidden, inner, down, *_ = problem
    if is_fp32_on_gpu(dtype, device) or 0 in problem.sizes:
        is_highest = is_fp32_on_gpu(dtype, device) and precision == "ieee"
        splits = is_highest and any_mlp_product_splits(tokens, hidden, inner)
        return Route("split fp32" if splits else "fp32", UNFUSED, UNFUSED, split=splits)
    even = not (hidden % ALIGNMENT or inner % ALIGNMENT)
    if down and even and tokens <= FEW_TOKENS and dtype in HALF_DTYPES:
        return Route("few tokens", TILED, TILED, few=True)
    many = tokens > FEW_TOKENS
    specialized = even and many and _runs_warp_specialized(device)
    forward, backward = (
        TILED if even and tokens <= max_one_wave_tokens(device, direction, inner)
        else UNFUSED if many and tokens <= max_unfused_tokens(device, inner, columns)
        else WARP_SPECIALIZED if specialized else TILED
        for direction, columns in (("forward", FORWARD_N), ("backward", BACKWARD_N))
    )  # fmt: skip
    few = down and even and many and tokens <= max_one_launch_tokens(device, hidden, inner)
    if forward == UNFUSED:
        return Route("apart", UNFUSED, backward, few=few)
    path = "dh apart" if backward == UNFUSED else f"fused by {forward}"
    return Route(path, forward, backward, few=few)


def max_one_wave_tokens(device: torch.device, direction: str, inner: int) -> int:
    """The most tokens whose tiles, of `configs.ONE_WAVE_CONFIGS`, run in one wave."""
    if device.type != "cuda":
        return 0
    return max(one_wave_lengths(direction, architecture(device), inner), default=0)


def max_one_launch_tokens(device: torch.device, hidden: int, inner: int) -> int:
    """The most tokens of which one launch gives d_x and the gradients of all weights.

    One H100, bf16, in a graph with cold weights, µs, here, by torch for a packed weight, and for a
    pair: 128 tokens at 512·2048 13.2, 17.1 and 20.0, at 1024·4096 33.1, 31.5 and 36.8, at 2048·8192
    106, 92 and 101; 256 at 512·2048 18.5, 18.1 and 21.2, at 1024·4096 67, 39 and 43.
    """
    if device.type != "cuda" or architecture(device) != 90 or hidden * inner > 1 << 22:
        return FEW_TOKENS
    return 128 if hidden * inner > 1 << 20 else 256


@cache
def max_unfused_tokens(device: torch.device, inner: int, block_n: int) -> int:
    """The most tokens in half precision for which a plain product and a pointwise kernel run.

    They are faster on Hopper where the fused kernel's tiles, BLOCK_M tokens by block_n columns of
    h, are no more than its multiprocessors: nothing then hides an epilogue. One H200, bf16, in a
    graph with a cold L2, µs (apart / fused), forward and dh:

    | tokens·width | 128·4096 | 256·2048 | 256·8192 | 512·4096 | 1024·2048 |
    |--------------|----------|----------|----------|----------|-----------|
    | gate, up, h  | 32 / 63  | 17 / 35  | 106 / 126| 53 / 64  | 32 / 37   |
    | d(gate|up)   | 23 / 37  | 14 / 23  | 62 / 68  | 35 / 39  | 25 / 26   |
    """
    if MAX_UNFUSED_TOKENS is not None:
        return MAX_UNFUSED_TOKENS
    if device.type != "cuda" or architecture(device) != 90:
        return FEW_TOKENS
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    columns = -(-inner // block_n)
    return max(processors // max(columns, 1) * BLOCK_M, FEW_TOKENS)


def _runs_warp_specialized(device: torch.device) -> bool:
    """True if the warp-specialized kernels run there; Gluon, their language, is experimental."""
    from fusedlib.ops.mlp import tiles

    is_hopper = device.type == "cuda" and architecture(device) == 90
    return WARP_SPECIALIZED_KERNELS and is_hopper and tiles.hopper is not None


# --- classes of lengths --------------------------------------------------------------------------


def count_tokens(x: Tensor, hidden: int) -> int:
    """Rows of x (..., hidden)."""
    return x.numel() // hidden if hidden else x.shape[:-1].numel()


def length_class(like: Tensor, tokens: int, hidden: int, inner: int) -> Any:
    """What all numbers of tokens that share a plan have in common, and how fp32 is multiplied."""
    if like.dtype in HALF_DTYPES:
        return bisect_left(length_class_ends(like.device, hidden, inner), tokens)
    precision = fp32_precision(like)
    if is_fp32_on_gpu(like.dtype, like.device):
        return precision, any_mlp_product_splits(tokens, hidden, inner)
    return precision, bisect_left(length_class_ends(like.device, hidden, inner), tokens)


@cache
def length_class_ends(device: torch.device, hidden: int, inner: int) -> tuple[int, ...]:
    """The most tokens of each class of lengths in half precision; the last class is open."""
    ends = {
        FEW_TOKENS,
        min(128, most := max_one_launch_tokens(device, hidden, inner)),
        most,
    }
    ends |= {max_unfused_tokens(device, inner, columns) for columns in (FORWARD_N, BACKWARD_N)}
    if device.type == "cuda" and not (hidden % ALIGNMENT or inner % ALIGNMENT):
        for direction in ("forward", "backward"):
            ends |= {*one_wave_lengths(direction, architecture(device), inner)}
    return 0, *sorted(ends)


def is_fp32_on_gpu(dtype: torch.dtype, device: torch.device) -> bool:
    """True if nothing is fused with products: in fp32, except in the interpreter."""
    return dtype == torch.float32 and (device.type == "cuda" or not FUSES_FP32)


# --- which fp32 products are split ---------------------------------------------------------------


@lru_cache(1024)
def any_mlp_product_splits(tokens: int, hidden: int, inner: int) -> bool:
    """True if any product of an MLP is faster split.

    Those with w_down are half as large as those with gate and up, and need no look.
    """
    return linear_route.any_is_faster_split(tokens, 2 * inner, hidden)


def forget() -> None:
    """Decide anew: after a change of `fusedlib.tuning`."""
    for decided in (max_unfused_tokens, length_class_ends, any_mlp_product_splits):
        decided.cache_clear()


# --- whether kernels run at all ------------------------------------------------------------------


def runs_kernels(x: Tensor, w_gate: Tensor, w_up: Tensor | None = None) -> bool:
    """True if a call on these operands runs our kernels; otherwise it runs plain PyTorch."""
    return runs_fused_kernels(x) or _is_large_fp32(x, w_gate, w_up)


def runs_fused_kernels(x: Tensor) -> bool:
    """True if the fused kernels run for x's dtype and device, and no transform is active."""
    return x.dtype in FUSED_KERNEL_DTYPES and has_kernels(x.device) and not is_transformed()


def _is_large_fp32(x: Tensor, w_gate: Tensor, w_up: Tensor | None) -> bool:
    """True if an fp32 MLP is so large that split products are faster than IEEE's."""
    if x.dtype != torch.float32 or not x.is_cuda or not has_kernels(x.device):
        return False
    wide, hidden = weight_sizes(w_gate, w_up)
    least, work = linear_route.MIN_SPLIT_SIZE, 2 * linear_route.MIN_SPLIT_WORK
    tokens = linear_route.tokens_to_route_by(x.numel() // max(hidden, 1), least)
    enough = min(tokens, hidden, wide // 2) >= least
    return enough and tokens * hidden * wide >= work and not is_transformed()
