"""The SwiGLU MLP as functions: fused on NVIDIA GPUs from compute capability 8.0 on, else PyTorch.

The fused path takes bf16 and fp16, and fp32 where products are large. In fp32 they are not fused
with what follows, which is one kernel of ours: at torch's "highest" they run on the tensor cores
from two fp16 parts a factor, where an element of a product A B over k terms errs by at most

    (18 + k/4096) 2⁻²² Σ|a||b| + 2⁻³⁹ (max|a| Σ|b| + max|b| Σ|a|)

(`fusedlib.kernels.split`; IEEE fp32's own bound is k/4 2⁻²² Σ|a||b|; FUSEDLIB_SPLIT=0 in the
environment asks for IEEE arithmetic). At "high" they are torch's, in TF32. Other sizes, dtypes and
devices run the same lines in plain PyTorch, whose own autograd then decides what is kept for
backward. So do transforms of `torch.func` and forward-mode derivatives.

Which code runs is decided by `fusedlib.kernels.route.route`. In plain eager mode its plan is run by
`fusedlib.kernels.autograd`; where something watches operators (torch.compile, a dispatch mode, a
tensor subclass) by the registered ones of `fusedlib.kernels.ops`, which do the same; a forward
through them costs the host 25 µs more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.nn import Parameter
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

from fusedlib.arguments import require_tensors
from fusedlib.kernels import route
from fusedlib.kernels.route import FUSED_DTYPES, fused, runs_kernels

__all__ = ["FUSED_DTYPES", "SAVES", "fused", "path_of", "runs_kernels", "swiglu", "swiglu_mlp"]

SAVES = ("gate_up", "input")


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
    return _run(save, x, w_gate_up, None)


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
    if (plan := _known(save, x, w_gate_up, w_down)) is not None:
        return _launched(save, x, w_gate_up, w_down, plan)
    _check(save, x, w_gate_up, w_down)
    x, w_gate_up, w_down = _autocast(x, w_gate_up, w_down)
    return _run(save, x, w_gate_up, w_down)


def path_of(x: Tensor, w_gate_up: Tensor, w_down: Tensor | None = None) -> str:
    """What runs for a call on these operands, in the words of `fusedlib.kernels.route`'s table."""
    if not runs_kernels(x, w_gate_up):
        return route.PLAIN
    return route.ways(route.kind_of(x, w_gate_up, w_down is not None)).path


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


def _known(save: str, x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Any:
    """The plan of such operands, where nothing has to be looked at anew."""
    if not _plain_eager(x, w_gate_up, w_down) or save not in SAVES:
        return None
    plan = route.known(x, w_gate_up, w_down)
    return None if plan is None or _autocasts(x.device.type) else plan


def _run(save: str, x: Tensor, w_gate_up: Tensor, w_down: Tensor | None) -> Tensor:
    """By the kernels, directly or as operators, or in plain PyTorch."""
    operands = (x, w_gate_up) if w_down is None else (x, w_gate_up, w_down)
    if _plain_eager(*operands):
        own = [unwrap_if_dead(t) for t in operands]  # left over from torch.func
        plan = route.route(*own)
        if plan is not None:
            return _launched(save, own[0], own[1], own[2] if len(own) > 2 else None, plan)
    elif runs_kernels(x, w_gate_up):
        return _operators(save, x, w_gate_up, w_down)
    plain = _plain_swiglu if w_down is None else _plain_swiglu_mlp
    return _again(save, plain, *operands)


def _operators(save: str, x: Tensor, w_gate_up: Tensor, w_down: Tensor | None) -> Tensor:
    from fusedlib.kernels import ops

    matrix = x.reshape(-1, x.shape[-1])
    if w_down is None:
        found, _ = ops.swiglu(matrix, w_gate_up, _keeps(save, x, w_gate_up))
    else:
        keeps = _keeps(save, x, w_gate_up, w_down)
        found, _ = ops.swiglu_mlp(matrix, w_gate_up, w_down, keeps)
    return found.reshape(*x.shape[:-1], found.shape[-1])


@cache
def _eager_kernels() -> tuple[Any, ...]:
    """Imported late, for Triton need not be there; once, for an import statement costs µs."""
    from fusedlib.kernels.autograd import apply, compute

    return apply, compute


def _launched(save: str, x: Tensor, w_gate_up: Tensor, w_down: Tensor | None, plan: Any) -> Tensor:
    apply, compute = _eager_kernels()
    wanted = x.requires_grad or w_gate_up.requires_grad
    wanted = wanted or (w_down is not None and w_down.requires_grad)
    if wanted and torch.is_grad_enabled():
        return apply(x, w_gate_up, w_down, save == "gate_up", plan)
    return compute(x, w_gate_up, w_down, False, plan)[0]


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
    if w_gate_up.ndim != 2 or w_gate_up.shape[0] % 2:
        raise ValueError(
            "w_gate_up must be (2·intermediate, hidden), gate rows above up rows; "
            f"got {_shape(w_gate_up)}"
        )
    hidden = w_gate_up.shape[1]
    if x.shape[-1] != hidden:
        raise ValueError(
            f"x must be (..., {hidden}) for w_gate_up {_shape(w_gate_up)}, got {_shape(x)}"
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
