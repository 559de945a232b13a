"""Which code runs a call of the MLP: `select_plan` decides that, and nothing else does.

A call can be followed in five files, in this order:

    functional.py          checks the operands, asks `select_plan`, and calls what it is given
    kernels/route.py       decides, and keeps a plan for each class of calls
    kernels/autograd.py    what is kept for backward, and the one backward pass
    kernels/plan.py        the plan: starts the kernels of both passes
    kernels/products.py    the plain products; `few_tokens` and `split` have their own

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
tiles up to `max_unfused_tokens`. *Tiles* are the kernels of `swiglu`, *roles* those of `hopper`
with a role for each warp; *apart* is a plain product and a pointwise kernel. fp32 comes here from
MIN_FP32_WORK on. Operands that are not contiguous, or do not begin at 16 bytes, are copied for the
call.

A packed weight goes through all files as `w_gate`, gate rows above up rows, with None for `w_up`;
of a pair each is its own operand, and a way is the same for both.

A plan belongs to a class of lengths, all that go one way with the same products. Importing this
module imports no Triton.
"""

from __future__ import annotations

import importlib.util
import os
from bisect import bisect_left
from collections.abc import Hashable
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from fusedlib.kernels.host.problem import TILED, UNFUSED, WARP_SPECIALIZED, MLPProblem, Route
from fusedlib.kernels.swiglu_configs import (
    ALIGNMENT,
    FEW_TOKENS,
    architecture,
    fp32_precision,
    one_wave_lengths,
)

if TYPE_CHECKING:
    from fusedlib.kernels.host.plan import Plan

PLAIN_PYTORCH = "plain PyTorch"
# fp32 is for the kernels from the sizes below on, where splitting pays. TF32 products stay torch's:
# our blocks cut the low bits of their factors off, an error of 1.6e-3 where cuBLAS has 5.1e-4
# (H200, torch 2.11, triton 3.6).
MIN_FP32_TOKENS = 256
UNBOUNDED_TOKENS = 1 << 20
MIN_FP32_WORK = 2**33
HALF_DTYPES = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)
# Tiles of the fused kernels on Hopper.
BLOCK_M, FORWARD_N, BACKWARD_N = 128, 128, 256
MAX_CACHED_PLANS = 1024  # kept

# Triton's interpreter runs the kernels on the CPU: for tests. Triton itself reads this once too.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FUSED_KERNEL_DTYPES = (*HALF_DTYPES, torch.float32) if INTERPRETED else HALF_DTYPES

_PLANS: dict[Hashable, Plan] = {}


def select_plan(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None = None
) -> Plan | None:
    """The plan for operands that go together, in autocast's dtype; None is plain PyTorch.

    Args:
        x: (..., hidden).
        w_gate: (inner, hidden), or packed (2·inner, hidden).
        w_up: (inner, hidden); None where w_gate is packed.
        w_down: (hidden, inner), or None for h alone.
    """
    return plan_for(x, w_gate, w_up, w_down) if runs_kernels(x, w_gate, w_up) else None


def lookup_plan(x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor) -> Plan | None:
    """What `select_plan` gave operands like these before.

    Nothing is checked, for it was then: at few tokens the checks cost as much as a launch.
    """
    if w_gate.ndim != 2:
        return None
    wide, hidden = w_gate.shape
    if w_up is not None:
        wide *= 2
    # Small fp32, where looking costs 7 % of PyTorch's own forward of 64·512.
    if x.dtype not in FUSED_KERNEL_DTYPES and x.numel() * wide < MIN_FP32_WORK:
        return None
    if not hidden or not x.ndim or x.shape[-1] != hidden:
        return None
    plan = _PLANS.get(_plan_key(x, w_gate, w_up, w_down, wide, hidden))
    if plan is None or is_transformed():
        return None
    # A wrapper that is left over from a transform has no address.
    if is_functorch_wrapped_tensor(x) or is_functorch_wrapped_tensor(w_gate):
        return None
    if is_functorch_wrapped_tensor(w_down):
        return None
    return None if w_up is not None and is_functorch_wrapped_tensor(w_up) else plan


def plan_for(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None = None
) -> Plan:  # fmt: skip
    """The plan for operands that the kernels run for."""
    key = _plan_key(x, w_gate, w_up, w_down, *_weight_sizes(w_gate, w_up))
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= MAX_CACHED_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = _make_plan(problem_of(x, w_gate, w_up, w_down is not None))
    return plan


def problem_of(x: Tensor, w_gate: Tensor, w_up: Tensor | None, down: bool = True) -> MLPProblem:
    """What a plan for such operands depends on."""
    wide, hidden = _weight_sizes(w_gate, w_up)
    tokens, pair = _count_tokens(x, hidden), w_up is not None
    return MLPProblem(x.device, x.dtype, fp32_precision(x), tokens, hidden, wide // 2, down, pair)


def _weight_sizes(w_gate: Tensor, w_up: Tensor | None) -> tuple[int, int]:
    """2·inner and hidden."""
    rows, hidden = w_gate.shape
    return (rows if w_up is None else 2 * rows), hidden


def plan_at_current_precision(plan: Plan, like: Tensor) -> Plan:
    """The plan, or its like where torch's fp32 precision was changed since it was made."""
    precision, problem = fp32_precision(like), plan.problem
    if precision == problem.precision:
        return plan
    return _make_plan(problem._replace(precision=precision))


def _make_plan(problem: MLPProblem) -> Plan:
    """Imported late, for Triton need not be there."""
    from fusedlib.kernels import few_tokens, split
    from fusedlib.kernels.host import products
    from fusedlib.kernels.host.plan import Plan

    chosen = choose_route(problem)
    if chosen.few:
        return Plan(problem, chosen, few_tokens.Products(problem))
    if chosen.split:
        return Plan(problem, chosen, split.SPLIT_PRODUCTS)
    return Plan(
        problem,
        chosen,
        products.TORCH_FP32_PRODUCTS if problem.dtype == torch.float32 else products.TORCH_PRODUCTS,
    )


def choose_route(problem: MLPProblem) -> Route:
    """The row of the table."""
    device, dtype, precision, tokens, hidden, inner, down, _ = problem
    if _is_fp32_on_gpu(dtype, device) or 0 in problem.sizes:
        is_highest = _is_fp32_on_gpu(dtype, device) and precision == "ieee"
        splits = is_highest and _any_product_splits(tokens, hidden, inner)
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
    """The most tokens whose tiles, of `swiglu_configs.ONE_WAVE_CONFIGS`, run in one wave."""
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
    if device.type != "cuda" or architecture(device) != 90:
        return FEW_TOKENS
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    columns = -(-inner // block_n)
    return max(processors // max(columns, 1) * BLOCK_M, FEW_TOKENS)


def _runs_warp_specialized(device: torch.device) -> bool:
    """Whether the kernels in Gluon, which is experimental, run there."""
    from fusedlib.kernels import swiglu

    return device.type == "cuda" and architecture(device) == 90 and swiglu.hopper is not None


# --- classes of lengths --------------------------------------------------------------------------


def _plan_key(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None, wide: int, hidden: int
) -> Hashable:
    dtype, device = x.dtype, x.device
    tokens: Hashable
    if dtype in HALF_DTYPES:
        tokens = bisect_left(length_class_ends(device, hidden, wide // 2), _count_tokens(x, hidden))
    else:
        tokens = _fp32_length_class(x, hidden, wide // 2)
    up_key = None if w_up is None else (w_up.shape, w_up.dtype, w_up.device)
    if w_down is None:
        return tokens, wide, hidden, dtype, device, up_key
    dtypes, devices = (w_gate.dtype, w_down.dtype), (w_gate.device, w_down.device)
    return tokens, wide, hidden, w_down.shape, dtype, device, dtypes, devices, up_key


def _count_tokens(x: Tensor, hidden: int) -> int:
    return x.numel() // hidden if hidden else x.shape[:-1].numel()


def _fp32_length_class(x: Tensor, hidden: int, inner: int) -> Hashable:
    precision, tokens = fp32_precision(x), _count_tokens(x, hidden)
    if _is_fp32_on_gpu(x.dtype, x.device):
        return precision, _any_product_splits(tokens, hidden, inner)
    return precision, bisect_left(length_class_ends(x.device, hidden, inner), tokens)


@cache
def length_class_ends(device: torch.device, hidden: int, inner: int) -> tuple[int, ...]:
    """Of each class of lengths in half precision but the last; the first has none."""
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


@lru_cache(MAX_CACHED_PLANS)
def _any_product_splits(tokens: int, hidden: int, inner: int) -> bool:
    """Whether a product of such an MLP is of split factors: the classes in fp32."""
    from fusedlib.kernels import split

    return split.any_is_faster_split(tokens, 2 * inner, hidden)


def _is_fp32_on_gpu(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products are plain ones, no epilogue fused: of fp32, but in the interpreter."""
    return dtype == torch.float32 and device.type == "cuda"


def may_split(like: Tensor) -> bool:
    """Whether products of such tensors may be of split factors."""
    return _is_fp32_on_gpu(like.dtype, like.device) and fp32_precision(like) == "ieee"


# --- whether kernels run at all ------------------------------------------------------------------


def runs_kernels(x: Tensor, w_gate: Tensor, w_up: Tensor | None = None) -> bool:
    """Whether a call on these operands runs our kernels; otherwise it runs plain PyTorch."""
    return runs_fused_kernels(x) or _is_large_fp32(x, w_gate, w_up)


def runs_fused_kernels(x: Tensor) -> bool:
    """Whether the fused kernels run for this dtype, device and kind of differentiation."""
    return x.dtype in FUSED_KERNEL_DTYPES and has_kernels(x.device) and not is_transformed()


def _is_large_fp32(x: Tensor, w_gate: Tensor, w_up: Tensor | None) -> bool:
    """Whether fp32 takes the kernels: split products are faster than IEEE's from this size on."""
    if x.dtype != torch.float32 or not x.is_cuda or not has_kernels(x.device):
        return False
    wide, hidden = _weight_sizes(w_gate, w_up)
    tokens = tokens_to_route_by(x.numel() // max(hidden, 1), MIN_FP32_TOKENS)
    enough = tokens >= MIN_FP32_TOKENS and min(hidden, wide // 2) >= MIN_FP32_TOKENS
    return enough and tokens * hidden * wide >= MIN_FP32_WORK and not is_transformed()


def tokens_to_route_by(tokens: int, least: int) -> int:
    """The number of tokens to decide by: under torch.compile and torch.export an open one may be
    any that its bounds allow, so that it counts as many, unless all of them are fewer than `least`.
    """
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import has_static_value, statically_known_true

        if not has_static_value(tokens):
            return 0 if statically_known_true(tokens < least) else UNBOUNDED_TOKENS
    return tokens


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is under way.

    Both need every step as an ordinary operation; the kernels would drop tangents silently.
    """
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


@torch.compiler.assume_constant_result
def has_kernels(device: torch.device) -> bool:
    """Whether Triton and the GPU are there."""
    return _find_kernels(device)


@cache
def _find_kernels(device: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cpu":
        return INTERPRETED
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
