"""Which code runs a call of the MLP: its routes.

This module decides, from dtypes, devices and sizes alone, which kernels run and how they are cut;
`plan` starts them.

| `path`         | calls                           | gate, up, h    | d(gate|up), h | products     |
|----------------|---------------------------------|----------------|---------------|--------------|
| plain PyTorch  | any other                       |                |               |              |
| few tokens     | half, at most 64 tokens, even   | tiles          | tiles         | few_tokens   |
| apart          | half, Hopper, few 128² tiles    | apart          | apart         | torch, few   |
| dh apart       | half, Hopper, few 128·256 tiles | roles          | apart         | torch, few   |
| fused by roles | half, Hopper, even, more tokens | roles          | roles         | torch        |
| fused by tiles | half, the rest                  | tiles          | tiles         | torch        |
| split fp32     | fp32 at "highest", if faster    | apart          | apart         | split, torch |
| fp32           | fp32, the rest; empty operands  | apart          | apart         | torch        |

*Half* is bf16 and fp16; *even* sizes, hidden and inner, are multiples of 16. *Few tokens* have a
down projection; without one they go by tiles. *Few tiles* are up to `max_unfused_tokens`. *Tiles*
are the kernels of `kernels`, *roles* those of `hopper` with a role for each warp; *apart* is a
plain product and a pointwise kernel. Products *few* are those of `few_tokens`, up to
`max_one_launch_tokens`. fp32 takes the kernels from MIN_SPLIT_WORK multiplications a weight on.
Operands that are not contiguous, or do not begin at 16 bytes, are copied for the call.
In `fusedlib.batch_invariant` all numbers of tokens take the routes of many.

`w_gate` is a packed weight, its gate rows above its up rows, where `w_up` is None; otherwise gate
and up have a weight each, a pair. Both take the same routes. Importing this module imports no
Triton.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedlib.compat import is_transformed
from fusedlib.invariant import is_batch_invariant
from fusedlib.launch import INTERPRETED, architecture, has_kernels
from fusedlib.ops.arguments import ALIGNMENT, FEW_TOKENS, HALF_DTYPES, KERNEL_DTYPES
from fusedlib.ops.matmul import function as matmul
from fusedlib.ops.matmul.function import fp32_precision

UNFUSED, TILED, WARP_SPECIALIZED = "apart", "tiles", "roles"


# d_x, d_w_gate_up, d_w_down.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
# d_x, d_w_gate, d_w_up, d_w_down; that of a packed weight is d_w_gate.
WantedGradients = tuple[bool, bool, bool, bool]


class MLPProblem(NamedTuple):
    """An MLP on operands of certain sizes and dtype: all that a plan depends on.

    Attributes:
        device: where all operands lie.
        dtype: of all operands.
        precision: how torch multiplies fp32, "ieee" or "tf32".
        tokens: rows of x; the plan serves their whole class of lengths.
        hidden: columns of x.
        inner: columns of h, the intermediate size.
        down: there is a down projection.
        pair: gate and up have a weight each, none packed.
        activation: of gate, one of ACTIVATIONS.
    """

    device: torch.device
    dtype: torch.dtype
    precision: str
    tokens: int
    hidden: int
    inner: int
    down: bool = True
    pair: bool = False
    activation: str = "silu"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, hidden and inner."""
        return self.tokens, self.hidden, self.inner


class Route(NamedTuple):
    """A row of the table in `route`.

    Attributes:
        path: its name.
        forward: how gate, up and h are computed: UNFUSED, TILED or WARP_SPECIALIZED.
        backward: how d(gate|up) is computed, likewise.
        few: the plain matrix products are those of `few_tokens`.
        split: they are those of `split`; otherwise torch's.
    """

    path: str
    forward: str
    backward: str
    few: bool = False
    split: bool = False


def problem_of(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, down: bool = True, activation: str = "silu",
    dtype: torch.dtype | None = None,
) -> MLPProblem:  # fmt: skip
    """The problem that these operands pose, cast to a dtype if it is given."""
    wide, hidden = weight_sizes(w_gate, w_up)
    sizes = count_tokens(x, hidden), hidden, wide // 2
    pair, precision = w_up is not None, fp32_precision(x)
    if dtype not in (None, x.dtype):
        precision = "ieee"  # of other dtypes
    return MLPProblem(x.device, dtype or x.dtype, precision, *sizes, down, pair, activation)


# --- which route ---------------------------------------------------------------------------------

PLAIN_PYTORCH = "plain PyTorch"
# Tiles of the fused kernels on Hopper.
BLOCK_M, FORWARD_N, BACKWARD_N = 128, 128, 256

FUSED_KERNEL_DTYPES = KERNEL_DTYPES if INTERPRETED else HALF_DTYPES
FUSES_FP32 = True  # where the fused kernels take fp32, in the interpreter; False as on a GPU
WARP_SPECIALIZED_KERNELS = True  # False: Hopper goes by tiles, as other cards do
MAX_UNFUSED_TOKENS: int | None = None  # a number for every card, in place of a count of tiles


def weight_sizes(w_gate: Tensor, w_up: Tensor | None) -> tuple[int, int]:
    """2·inner and hidden, of a pair or of a packed weight and None."""
    rows, hidden = w_gate.shape
    return (rows if w_up is None else 2 * rows), hidden


def choose_route(problem: MLPProblem) -> Route:
    """The row of the table that a problem takes."""
    device, dtype, precision, tokens, hidden, inner, down, *_ = problem
    if is_batch_invariant():
        tokens = matmul.UNBOUNDED_TOKENS
    if is_fp32_on_gpu(dtype, device) or 0 in problem.sizes:
        is_highest = is_fp32_on_gpu(dtype, device) and precision == "ieee"
        # Products with w_down are half as large as those with gate and up, and need no look.
        splits = is_highest and matmul.any_is_faster_split(tokens, 2 * inner, hidden)
        return Route("split fp32" if splits else "fp32", UNFUSED, UNFUSED, split=splits)
    even = not (hidden % ALIGNMENT or inner % ALIGNMENT)
    if down and even and tokens <= FEW_TOKENS and dtype in HALF_DTYPES:
        return Route("few tokens", TILED, TILED, few=True)
    many = tokens > FEW_TOKENS
    specialized = even and many and _runs_warp_specialized(device)
    forward, backward = (
        UNFUSED if many and tokens <= max_unfused_tokens(device, inner, columns)
        else WARP_SPECIALIZED if specialized else TILED
        for columns in (FORWARD_N, BACKWARD_N)
    )  # fmt: skip
    few = down and even and many and tokens <= max_one_launch_tokens(device, hidden, inner)
    if forward == UNFUSED:
        return Route("apart", UNFUSED, backward, few=few)
    path = "dh apart" if backward == UNFUSED else f"fused by {forward}"
    return Route(path, forward, backward, few=few)


def max_one_launch_tokens(device: torch.device, hidden: int, inner: int) -> int:
    """The most tokens of which one launch gives d_x and the gradients of all weights.

    One H100, bf16, in a graph with cold weights, µs, here, by torch for a packed weight, and for a
    pair: 128 tokens at 512·2048 13.2, 17.1 and 20.0, at 1024·4096 33.1, 31.5 and 36.8, at 2048·8192
    106, 92 and 101.
    """
    on_hopper = device.type == "cuda" and architecture(device) == 90
    return 128 if on_hopper and hidden * inner <= 1 << 22 else FEW_TOKENS


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
    """True if the warp-specialized kernels run there."""
    is_hopper = device.type == "cuda" and architecture(device) == 90
    return WARP_SPECIALIZED_KERNELS and is_hopper and hopper_kernels() is not None


@cache
def _import_hopper() -> Any:
    try:
        from fusedlib.ops.mlp import hopper
    except (ImportError, AttributeError):  # Gluon is experimental: other releases name it otherwise
        return None
    return hopper


def hopper_kernels() -> Any:
    """The module of the warp-specialized kernels; None where Triton cannot compile them."""
    return None if _NOT_COMPILED else _import_hopper()


_NOT_COMPILED: list[Exception] = []  # why the kernels of `hopper` are not asked for any more


def disable_hopper_kernels(error: Exception) -> None:
    """From now on; what did not compile has written nothing."""
    if not _NOT_COMPILED:
        warnings.warn(
            f"fusedlib's MLP for Hopper does not compile with Triton {version('triton')}; a "
            f"slower kernel runs instead. {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
    _NOT_COMPILED.append(error)


# --- classes of lengths --------------------------------------------------------------------------


def count_tokens(x: Tensor, hidden: int) -> int:
    """Rows of x (..., hidden)."""
    return x.numel() // hidden if hidden else x.shape[:-1].numel()


@cache
def length_class_ends(device: torch.device, hidden: int, inner: int) -> tuple[int, ...]:
    """The most tokens of each class of lengths in half precision; the last class is open."""
    ends = {FEW_TOKENS, max_one_launch_tokens(device, hidden, inner)}
    ends |= {max_unfused_tokens(device, inner, columns) for columns in (FORWARD_N, BACKWARD_N)}
    return 0, *sorted(ends)


def is_fp32_on_gpu(dtype: torch.dtype, device: torch.device) -> bool:
    """True if nothing is fused with products: in fp32, except in the interpreter."""
    return dtype == torch.float32 and (device.type == "cuda" or not FUSES_FP32)


def forget() -> None:
    """Decide anew: after a change of `fusedlib.tuning`."""
    for decided in (max_unfused_tokens, length_class_ends):
        decided.cache_clear()


# --- whether kernels run at all ------------------------------------------------------------------


def runs_kernels(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None = None, dtype: torch.dtype | None = None
) -> bool:
    """True if a call on these operands runs our kernels, cast to a dtype if it is given; otherwise
    it runs plain PyTorch.
    """
    dtype = dtype or x.dtype
    return runs_fused_kernels(x.device, dtype) or _is_large_fp32(x, w_gate, w_up, dtype)


def runs_fused_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the fused kernels run for a dtype and a device, and no transform is active."""
    return dtype in FUSED_KERNEL_DTYPES and has_kernels(device) and not is_transformed()


def _is_large_fp32(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, dtype: torch.dtype
) -> bool:  # fmt: skip
    """True if an fp32 MLP is so large that split products are faster than IEEE's."""
    if dtype != torch.float32 or not x.is_cuda or not has_kernels(x.device):
        return False
    wide, hidden = weight_sizes(w_gate, w_up)
    least, work = matmul.MIN_SPLIT_SIZE, 2 * matmul.MIN_SPLIT_WORK
    tokens = matmul.tokens_to_route_by(x.numel() // max(hidden, 1), least)
    enough = min(tokens, hidden, wide // 2) >= least
    return enough and tokens * hidden * wide >= work and not is_transformed()
