"""The SwiGLU MLP as functions: fused on NVIDIA GPUs from compute capability 8.0 on, else PyTorch.

The fused path takes bf16 and fp16, and fp32 where products are large. In fp32 they are not fused
with what follows, which is one kernel of ours: at torch's "highest" they run on the tensor cores
from two fp16 parts a factor, at least as accurate as IEEE fp32 but for the rare inputs that
`kernels/NOTES.md`, step 15, tells of; at "high" they are torch's, in TF32. Other sizes, dtypes and
devices run the same lines in plain PyTorch, whose own autograd then decides what is kept for
backward. So do transforms of `torch.func` and forward-mode derivatives.

In plain eager mode the kernels are launched by `fusedlib.kernels.swiglu_autograd`; where something
watches operators (torch.compile, a dispatch mode, a tensor subclass) by the registered ones of
`fusedlib.kernels.ops`, which do the same; a forward through them costs the host 25 µs more.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, unwrap_if_dead
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

from fusedlib.arguments import require_tensors

SAVES = ("gate_up", "input")
# fp32 is for the kernels from the sizes below on, where splitting pays. TF32 products stay torch's:
# our blocks cut the low bits of their factors off, an error of 1.6e-3 where cuBLAS has 5.1e-4
# (H200, torch 2.11, triton 3.6).
LEAST_TOKENS = 256
LEAST_WORK = 2**33
FUSED_DTYPES = (torch.bfloat16, torch.float16)
LEAST_CAPABILITY = (8, 0)

# Triton's interpreter runs the kernels on the CPU: for tests. Triton itself reads this once too.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_TAKEN = (*FUSED_DTYPES, torch.float32) if INTERPRETED else FUSED_DTYPES


def swiglu(x: Tensor, w_gate_up: Tensor, *, save: str = "gate_up") -> Tensor:
    """silu(x Wgᵀ) ⊙ (x Wuᵀ), Shazeer 2020.

    Args:
        x: (..., hidden).
        w_gate_up: (2·intermediate, hidden), the gate rows above the up rows.
        save: "gate_up" keeps gate and up for backward, "input" keeps x alone and computes them
            again.

    Returns:
        (..., intermediate), in x's dtype, or autocast's.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: shapes, dtypes or devices that do not go together, or an unknown `save`.
    """
    _check(save, x, w_gate_up)
    x, w_gate_up = _autocast(x, w_gate_up)
    if not runs_kernels(x, w_gate_up):
        return _again(save, _plain_swiglu, x, w_gate_up)
    if _plain_eager(x, w_gate_up):
        return _direct(save, x, w_gate_up, None)
    from fusedlib.kernels import ops

    matrix = x.reshape(-1, x.shape[-1])
    h, _ = ops.swiglu(matrix, w_gate_up, _keeps(save, x, w_gate_up))
    return h.reshape(*x.shape[:-1], h.shape[-1])


def swiglu_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor, *, save: str = "gate_up") -> Tensor:
    """(silu(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ.

    Args:
        x: (..., hidden).
        w_gate_up: (2·intermediate, hidden), the gate rows above the up rows.
        w_down: (hidden, intermediate).
        save: "gate_up" keeps gate and up for backward, 2·intermediate numbers a token; "input"
            keeps x alone and computes them again. Either way h is computed again, never kept.

    Returns:
        (..., hidden), in x's dtype, or autocast's. `fusedlib.kernels.swiglu` says by how much an
        element of it, and of each gradient, can err in the kernels.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: shapes, dtypes or devices that do not go together, or an unknown `save`.
    """
    if (y := _planned(save, x, w_gate_up, w_down)) is not None:
        return y
    _check(save, x, w_gate_up, w_down)
    x, w_gate_up, w_down = _autocast(x, w_gate_up, w_down)
    if not runs_kernels(x, w_gate_up):
        return _again(save, _plain_swiglu_mlp, x, w_gate_up, w_down)
    if _plain_eager(x, w_gate_up, w_down):
        return _direct(save, x, w_gate_up, w_down)
    from fusedlib.kernels import ops

    matrix = x.reshape(-1, x.shape[-1])
    y, _ = ops.swiglu_mlp(matrix, w_gate_up, w_down, _keeps(save, x, w_gate_up, w_down))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def fused(x: Tensor) -> bool:
    """Whether the kernels run for this dtype, device and kind of differentiation."""
    return x.dtype in _TAKEN and _has_kernels(x.device) and not _transformed()


def runs_kernels(x: Tensor, w_gate_up: Tensor) -> bool:
    """Whether a call on these operands runs our kernels; otherwise it runs plain PyTorch."""
    return fused(x) or _large_fp32(x, w_gate_up)


def _large_fp32(x: Tensor, w_gate_up: Tensor) -> bool:
    """Whether fp32 takes the kernels: split products are faster than IEEE's from this size on."""
    if x.dtype != torch.float32 or not x.is_cuda or not _has_kernels(x.device):
        return False
    wide, hidden = w_gate_up.shape
    tokens = x.numel() // max(hidden, 1)
    enough = tokens >= LEAST_TOKENS and min(hidden, wide // 2) >= LEAST_TOKENS
    return enough and tokens * hidden * wide >= LEAST_WORK and not _transformed()


def _transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is under way.

    Both need every step as an ordinary operation; the kernels would drop tangents silently.
    """
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


_PLAIN = frozenset((Tensor, Parameter))


def _plain_eager(*operands: Tensor) -> bool:
    """Whether nothing stands between this call and its tensors that would see an operator."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._get_tracing_state() is None
        and _PLAIN.issuperset(map(type, operands))
    )


# The plans of calls that came by `_direct`, by everything that led them there. At few tokens the
# checks on the way cost as much as a launch.
_PLANS: dict[Hashable, Any] = {}


def _planned(save: str, x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor | None:
    """What such operands gave before, computed for these; None where they have no plan."""
    if not _plain_eager(x, w_gate_up, w_down) or not _PLANS:
        return None
    # Small fp32, where looking costs 7 % of PyTorch's own forward of 64·512.
    wide = w_gate_up.shape[0] if w_gate_up.ndim else 0
    if x.dtype not in _TAKEN and x.numel() * wide < LEAST_WORK:
        return None
    plan = _PLANS.get(_key(save, x, w_gate_up, w_down))
    if plan is None or _transformed() or _autocasts(x.device.type):
        return None
    if any(map(is_functorch_wrapped_tensor, (x, w_gate_up, w_down))):
        return None
    if not plan.fits(x, w_gate_up, w_down):
        return None
    return _launched(save, x, w_gate_up, w_down, plan)


def _key(save: str, x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Hashable:
    shapes = x.shape, w_gate_up.shape, w_down.shape
    dtypes = x.dtype, w_gate_up.dtype, w_down.dtype
    return save, shapes, dtypes, x.device, w_gate_up.device, w_down.device


def _direct(save: str, x: Tensor, w_gate_up: Tensor, w_down: Tensor | None) -> Tensor:
    """The kernels without the dispatcher."""
    x, w_gate_up = unwrap_if_dead(x), unwrap_if_dead(w_gate_up)  # left over from torch.func
    plan = None
    if w_down is not None:
        w_down = unwrap_if_dead(w_down)
        plans = _eager_kernels()[2]
        plan = plans.plan_of(x, w_gate_up, w_down)
        if plan is not None:
            if len(_PLANS) >= plans.MOST_PLANS:
                _PLANS.clear()
            plan = _PLANS.setdefault(_key(save, x, w_gate_up, w_down), plan)
    return _launched(save, x, w_gate_up, w_down, plan)


@cache
def _eager_kernels() -> tuple[Any, ...]:
    """Imported late, for Triton need not be there; once, for an import statement costs µs."""
    from fusedlib.kernels import plans
    from fusedlib.kernels.swiglu_autograd import apply, compute

    return apply, compute, plans


def _launched(save: str, x: Tensor, w_gate_up: Tensor, w_down: Tensor | None, plan: Any) -> Tensor:
    apply, compute, _ = _eager_kernels()
    wanted = x.requires_grad or w_gate_up.requires_grad
    wanted = wanted or (w_down is not None and w_down.requires_grad)
    if wanted and torch.is_grad_enabled():
        return apply(x, w_gate_up, w_down, save == "gate_up", plan)
    return compute(x, w_gate_up, w_down, False, plan)[0]


@torch.compiler.assume_constant_result
def _has_kernels(device: torch.device) -> bool:
    return _look_for_kernels(device)


@cache
def _look_for_kernels(device: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cpu":
        return INTERPRETED
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def _keeps(save: str, *operands: Tensor) -> bool:
    """Whether gate|up is stored at all: not when no gradient will be asked for."""
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    return wanted and save == "gate_up"


def _autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands in autocast's dtype where it is on, as `torch.nn.functional.linear` has them.

    float64 stays as it is.
    """
    device = operands[0].device.type
    if not _autocasts(device) or any(t.dtype == torch.float64 for t in operands):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) for t in operands)


def _autocasts(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)


def _plain_swiglu(x: Tensor, w_gate_up: Tensor) -> Tensor:
    gate, up = linear(x, w_gate_up).chunk(2, dim=-1)
    return silu(gate) * up


def _plain_swiglu_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    return linear(_plain_swiglu(x, w_gate_up), w_down)


def _again(save: str, function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """Call the function; with save="input" keep its operands alone, and call it again later."""
    if save == "input" and torch.is_grad_enabled():
        return checkpoint(function, *operands, use_reentrant=False)
    return function(*operands)


def _check(save: str, x: Tensor, w_gate_up: Tensor, *w_down: Tensor) -> None:
    """Raise where the operands do not go together; the words cost only then."""
    try:
        wide, hidden = w_gate_up.shape if w_gate_up.ndim == 2 else (-1, -1)
        dtype, device = x.dtype, x.device
        fits = (
            save in SAVES
            and x.ndim > 0
            and x.shape[-1] == hidden
            and wide % 2 == 0
            and w_gate_up.dtype == dtype
            and w_gate_up.device == device
            and dtype.is_floating_point
            and dtype.itemsize > 1
        )
        for down in w_down:
            fits = fits and down.shape == (hidden, wide // 2)
            fits = fits and down.dtype == dtype and down.device == device
    except AttributeError:  # no tensor
        fits = False
    if not fits:
        _check_shapes(save, x, w_gate_up, *w_down)


def _check_shapes(save: str, x: Tensor, w_gate_up: Tensor, *w_down: Tensor) -> None:
    names = "x", "w_gate_up", "w_down"
    named = dict(zip(names, (x, w_gate_up, *w_down), strict=False))
    require_tensors(**named)
    if save not in SAVES:
        raise ValueError(f"save must be one of {', '.join(SAVES)}, got {save!r}")
    if x.ndim == 0:
        raise ValueError("x must be (..., hidden), got a scalar")
    hidden = x.shape[-1]
    if w_gate_up.ndim != 2 or w_gate_up.shape[1] != hidden or w_gate_up.shape[0] % 2:
        raise ValueError(
            f"w_gate_up must be (2·intermediate, {hidden}) for x {_shape(x)}, gate rows above "
            f"up rows; got {_shape(w_gate_up)}"
        )
    wanted = hidden, w_gate_up.shape[0] // 2
    for down in w_down:
        if down.shape != wanted:
            raise ValueError(f"w_down must be {wanted}, got {_shape(down)}")
    cast = _autocasts(x.device.type)
    for name, operand in named.items():
        if operand.device != x.device:
            raise ValueError(f"{name} is on {operand.device}, x on {x.device}")
        if not operand.is_floating_point() or (operand.dtype.itemsize == 1 and not cast):
            raise ValueError(f"{name} must be fp16, bf16, fp32 or float64, got {operand.dtype}")
        if operand.dtype != x.dtype and not cast:
            raise ValueError(
                f"{name} is {operand.dtype}, x is {x.dtype}: they must have one floating-point "
                "dtype, or run under autocast"
            )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
