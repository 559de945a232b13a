"""The SwiGLU and GeGLU MLPs: fused on NVIDIA GPUs from compute capability 8.0 on, else PyTorch.

The fused path takes bf16 and fp16, and fp32 where products are large. In fp32 they are not fused
with what follows, which is one kernel of ours: at torch's "highest" they run on the tensor cores
from two fp16 parts a factor, where an element of a product A B over k terms errs by at most

    (18 + k/4096) 2⁻²² Σ|a||b| + 2⁻³⁹ (max|a| Σ|b| + max|b| Σ|a|)

(`fusedlib.ops.matmul.kernels`; IEEE fp32's own bound is k/4 2⁻²² Σ|a||b|; FUSEDLIB_SPLIT=0 in the
environment asks for IEEE arithmetic). At "high" they are torch's, in TF32. Other sizes, dtypes and
devices run the same lines in plain PyTorch, whose own autograd then decides what is kept for
backward, but for `save="input"`: torch's checkpoint, where a gradient is wanted and hooks on saved
tensors may run. So do transforms of `torch.func`, which allow none, and forward-mode derivatives.

`fusedlib.ops.mlp.route` decides which code runs, and `plan_cache` beside it keeps its plans.
In plain eager mode `fusedlib.ops.mlp.autograd` runs the plan. Where something watches
operators (torch.compile, a dispatch mode, a tensor subclass) the registered ones of
`fusedlib.ops.mlp.operator` do the same; a forward through them costs the host 25 µs more. Of 65 to
1,024 tokens, where their number is fixed, torch.compile gets plain PyTorch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from fusedlib.compat import autocasts_anywhere, keeps_by_hooks, unwrap_if_dead
from fusedlib.op import BROUGHT_BACK, is_plain_eager
from fusedlib.ops.arguments import (
    FEW_TOKENS,
    HALF_DTYPES,
    autocast_enabled,
    cast_for_autocast,
    is_distributed,
    left_to_compiler,
    present,
    require_alike,
    require_tensors,
    shape_of,
)
from fusedlib.ops.matmul import function as linear_route
from fusedlib.ops.mlp import plan_cache, route
from fusedlib.ops.mlp.activation import ACTIVATIONS, gelu_name

SAVES = ("gate_up", "input")
GateUp = Tensor | tuple[Tensor, Tensor] | list[Tensor]


def swiglu(x: Tensor, w_gate_up: GateUp, *, save: str = "gate_up") -> Tensor:
    """silu(x Wgᵀ) ⊙ (x Wuᵀ), Shazeer 2020.

    Args:
        x: (..., hidden).
        w_gate_up: (2·intermediate, hidden), the gate rows above the up rows; or a pair
            (w_gate, w_up), each (intermediate, hidden), of which each receives its own gradient.
            Nothing is packed for a pair.
        save: "gate_up" keeps gate and up for backward, "input" keeps x alone and computes them
            again.

    Returns:
        (..., intermediate), in x's dtype, or autocast's.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: shapes, dtypes or devices that do not go together, more or fewer weights than
            a pair, or an unknown `save`.
    """
    return gated_mlp("silu", save, x, w_gate_up)


def swiglu_mlp(x: Tensor, w_gate_up: GateUp, w_down: Tensor, *, save: str = "gate_up") -> Tensor:
    """(silu(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ.

    Args:
        x: (..., hidden).
        w_gate_up: (2·intermediate, hidden), the gate rows above the up rows; or a pair
            (w_gate, w_up), each (intermediate, hidden), of which each receives its own gradient.
            Nothing is packed for a pair.
        w_down: (hidden, intermediate).
        save: "gate_up" keeps gate and up for backward, 2·intermediate numbers a token; "input"
            keeps x alone and computes them again. Either way h is computed again, never kept.

    Returns:
        (..., hidden), in x's dtype, or autocast's. `fusedlib.ops.mlp.tiles` says by how much an
        element of it, and of each gradient, can err in the kernels.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: shapes, dtypes or devices that do not go together, more or fewer weights than
            a pair, or an unknown `save`.
    """
    return gated_mlp("silu", save, x, w_gate_up, w_down)


def geglu_mlp(
    x: Tensor, w_gate_up: GateUp, w_down: Tensor, *, approximate: str = "tanh",
    save: str = "gate_up",
) -> Tensor:  # fmt: skip
    """(gelu(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ: `swiglu_mlp` with another activation, as Gemma's MLPs.

    Args:
        x: (..., hidden).
        w_gate_up: as of `swiglu_mlp`.
        w_down: (hidden, intermediate).
        approximate: "tanh", or "none" for the exact gelu, as of `torch.nn.functional.gelu`.
        save: as of `swiglu_mlp`.

    Returns:
        (..., hidden), in x's dtype, or autocast's.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: an unknown `approximate`, and what `swiglu_mlp` refuses.
    """
    return gated_mlp(gelu_name(approximate), save, x, w_gate_up, w_down)


def gated_mlp(activation: str, save: str, x: Tensor, w_gate_up: GateUp, *w_down: Tensor) -> Tensor:
    """`swiglu_mlp`, or `swiglu` where no w_down is given, with one of ACTIVATIONS."""
    w_gate, w_up = _split_weights(w_gate_up)
    down = w_down[0] if w_down else None
    if down is not None or not w_down:
        try:
            if save == "gate_up" and _is_small(x, w_gate, w_up, down):
                return _plain_pytorch(activation, x, w_gate, w_up, down)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            pass  # `check_mlp` says what is wrong
        plan = _cached_plan(activation, save, x, w_gate, w_up, down)
        if plan is not None:
            return _run_plan(save, plan, x, w_gate, w_up, down)
    if save not in SAVES:
        raise ValueError(f"save must be one of {', '.join(SAVES)}, got {save!r}")
    check_mlp(x, w_gate, w_up, *w_down)
    return _run(activation, save, *cast_for_autocast(x, w_gate, w_up, down))


def path_of(x: Tensor, w_gate_up: GateUp, w_down: Tensor | None = None) -> str:
    """The name of the route that a call on these operands takes: see `kernels.host.route`."""
    w_gate, w_up = _split_weights(w_gate_up)
    if not route.runs_kernels(x, w_gate, w_up):
        return route.PLAIN_PYTORCH
    return route.choose_route(route.problem_of(x, w_gate, w_up, w_down is not None)).path


def _split_weights(w_gate_up: Any) -> tuple[Any, Any]:
    """w_gate and w_up, or a packed weight and None; what is neither as it is, for `_check`."""
    if isinstance(w_gate_up, (tuple, list)) and len(w_gate_up) == 2 and w_gate_up[1] is not None:
        return w_gate_up[0], w_gate_up[1]
    return w_gate_up, None


def _is_small(x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None) -> bool:
    """True if operands are so small, in fp32 or float64, that plain PyTorch runs.

    It looks only at what PyTorch would let pass, for such a call takes no longer than the host.
    """
    dtype = x.dtype
    if dtype not in _WIDE_DTYPES or dtype in route.FUSED_KERNEL_DTYPES:
        return False
    rows, hidden = w_gate.shape
    device = x.device
    if w_up is None:
        inner, matched = rows // 2, not rows % 2
    else:
        inner, matched = rows, w_up.shape == w_gate.shape and w_up.device == device
    if w_down is not None:
        matched = matched and w_down.shape == (hidden, inner) and w_down.device == device
    return (
        matched
        and w_gate.device == device
        and x.numel() * rows < linear_route.MIN_SPLIT_WORK
        and not autocasts_anywhere()
        and not torch.compiler.is_compiling()
    )


_WIDE_DTYPES = frozenset((torch.float32, torch.float64))


def _cached_plan(
    activation: str, save: str, x: Tensor, w_gate: Tensor, w_up: Tensor | None,
    w_down: Tensor | None,
) -> Any:  # fmt: skip
    """The plan of such operands, where nothing has to be looked at anew."""
    up, down = w_gate if w_up is None else w_up, w_gate if w_down is None else w_down
    if not is_plain_eager(x, w_gate, up, down) or save not in SAVES:
        return None
    plan = plan_cache.lookup_plan(x, w_gate, w_up, w_down, activation)
    return None if plan is None or autocast_enabled(x.device.type) else plan


def _run(
    activation: str, save: str, x: Tensor, w_gate: Tensor, w_up: Tensor | None,
    w_down: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute the MLP of valid operands: by kernels, an operator or plain PyTorch."""
    operands: Any = x, w_gate, w_up, w_down
    if route.runs_kernels(x, w_gate, w_up):
        if is_plain_eager(*present(*operands)):
            # Left over from torch.func.
            living: Any = [t if t is None else unwrap_if_dead(t) for t in operands]
            x, w_gate, w_up, w_down = living
            plan = plan_cache.plan_for(x, w_gate, w_up, w_down, activation)
            return _run_plan(save, plan, x, w_gate, w_up, w_down)
        may_compile = save == "gate_up" and x.dtype in HALF_DTYPES
        tokens = route.count_tokens(x, x.shape[-1])
        compiled = may_compile and left_to_compiler(tokens, fewest=FEW_TOKENS + 1)
        if not compiled and not is_distributed(*operands):
            return _run_operator(activation, save, *operands)
    wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in present(*operands))
    may_hook = torch.compiler.is_compiling() or keeps_by_hooks()
    if save == "input" and wants_gradient and may_hook:  # keep operands alone, compute again later
        # Views, whose memory stays what it is when an operand's is exchanged.
        operands = [t if t is None or hasattr(t, BROUGHT_BACK) else t.view_as(t) for t in operands]
        return checkpoint(_plain_pytorch, activation, *operands, use_reentrant=False)
    return _plain_pytorch(activation, *operands)


def _run_operator(
    activation: str, save: str, x: Tensor, w_gate: Tensor, w_up: Tensor | None,
    w_down: Tensor | None,
) -> Tensor:  # fmt: skip
    from fusedlib.ops.mlp import operator

    # gate|up is stored where a gradient may be asked for.
    wants_gradient = any(t.requires_grad for t in present(x, w_gate, w_up, w_down))
    saves = save == "gate_up" and wants_gradient and torch.is_grad_enabled()
    matrix = x.reshape(-1, x.shape[-1])
    result, _ = operator.SWIGLU_MLP.operator(matrix, w_gate, w_up, w_down, activation, saves)
    return result.reshape(*x.shape[:-1], result.shape[-1])


@cache
def _eager_kernels() -> tuple[Any, ...]:
    """Imported late, for Triton need not be there; once, for an import statement costs µs."""
    from fusedlib.ops.mlp.autograd import apply_swiglu, run_forward

    return apply_swiglu, run_forward


def _run_plan(
    save: str, plan: Any, x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None
) -> Tensor:
    apply, compute = _eager_kernels()
    wants_gradient = x.requires_grad or w_gate.requires_grad
    wants_gradient = wants_gradient or (w_down is not None and w_down.requires_grad)
    wants_gradient = wants_gradient or (w_up is not None and w_up.requires_grad)
    if wants_gradient and torch.is_grad_enabled():
        return apply(x, w_gate, w_up, w_down, save == "gate_up", plan)
    return compute(x, w_gate, w_up, w_down, False, plan)[0]


def _plain_pytorch(
    activation: str, x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None
) -> Tensor:
    if w_up is None:
        gate, up = linear(x, w_gate).chunk(2, dim=-1)
    else:
        gate, up = linear(x, w_gate), linear(x, w_up)
    h = ACTIVATIONS[activation].compute(gate) * up
    return h if w_down is None else linear(h, w_down)


def check_mlp(x: Tensor, w_gate: Any, w_up: Any, *w_down: Tensor) -> None:
    """Raise where the operands of a gated MLP, with or without w_down, do not go together.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: shapes, dtypes or devices that do not go together, or no pair of weights.
    """
    if isinstance(w_gate, tuple | list):  # no pair, or None in it
        if len(w_gate) != 2:
            if not all(isinstance(weight, Tensor) for weight in w_gate):
                require_tensors(w_gate_up=w_gate)
            raise ValueError(
                "w_gate_up must be one tensor or a pair (w_gate, w_up), "
                f"got a {type(w_gate).__name__} of {len(w_gate)}"
            )
        require_tensors(w_gate=w_gate[0], w_up=w_gate[1])
    first = "w_gate_up" if w_up is None else "w_gate"
    named = {"x": x, first: w_gate} | ({} if w_up is None else {"w_up": w_up})
    named |= dict(zip(["w_down"], w_down, strict=False))
    require_tensors(**named)
    if x.ndim == 0:
        raise ValueError("x must be (..., hidden), got a scalar")
    if w_up is None and (w_gate.ndim != 2 or w_gate.shape[0] % 2):
        raise ValueError(
            "w_gate_up must be (2·intermediate, hidden), gate rows above up rows; "
            f"got {shape_of(w_gate)}"
        )
    if w_gate.ndim != 2:
        raise ValueError(f"w_gate must be (intermediate, hidden); got {shape_of(w_gate)}")
    rows, hidden = w_gate.shape
    if x.shape[-1] != hidden:
        raise ValueError(
            f"x must be (..., {hidden}) for {first} {shape_of(w_gate)}, got {shape_of(x)}"
        )
    if w_up is not None and w_up.shape != w_gate.shape:
        raise ValueError(f"w_up must be {shape_of(w_gate)}, as w_gate is, got {shape_of(w_up)}")
    expected = hidden, rows // 2 if w_up is None else rows
    for down in w_down:
        if down.shape != expected:
            raise ValueError(f"w_down must be {expected}, got {shape_of(down)}")
    require_alike(**named)
