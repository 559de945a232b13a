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

`route` beside this decides which kernels run, and a `plan.Plan` starts them: in plain eager mode by
`SwiGLUFunction`; where something watches operators (torch.compile, a dispatch mode, a tensor
subclass) by the registered ones, for which the host needs 25 µs more. Of 65 to 1,024 tokens, where
their number is fixed, torch.compile gets plain PyTorch.

What is kept for backward, when the weights and x all want gradients:

| save      | kept                 | recomputed in backward                       |
|-----------|----------------------|----------------------------------------------|
| "gate_up" | x, weights, gate|up  | h, in the epilogue of dy Wd                  |
| "input"   | x, weights           | gate|up and h by the forward kernel          |

`SwiGLUFunction` writes d(gate|up) over gate|up where nobody else can see it: the graph is not
retained (running backward again then raises, as everywhere in torch), and no saved-tensor hooks
were set in the forward, whose tensors would be the user's. A second derivative raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from fusedlib.compat import keeps_by_hooks, retains_graph, saved_tensor_hooks, unwrap_dead_wrappers
from fusedlib.launch import current_device
from fusedlib.op import BROUGHT_BACK, call_prepared, declare, first_order, save_operands
from fusedlib.ops.arguments import (
    FEW_TOKENS,
    HALF_DTYPES,
    autocast_enabled,
    cast_for_autocast,
    contiguous_and_aligned,
    is_distributed,
    left_to_compiler,
    present,
    require_alike,
    require_tensors,
    shape_of,
)
from fusedlib.ops.matmul.function import fp32_precision
from fusedlib.ops.mlp import route
from fusedlib.ops.mlp.activation import ACTIVATIONS, gelu_name
from fusedlib.ops.mlp.route import Gradients, WantedGradients

if TYPE_CHECKING:
    from fusedlib.ops.mlp.plan import Plan

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
        (..., hidden), in x's dtype, or autocast's. `fusedlib.ops.mlp.kernels` says by how much an
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
    operands = x, *_split_weights(w_gate_up), w_down[0] if w_down else None
    result: Tensor = call_prepared(_prepare, operands, activation, save, len(w_down) > 0)
    return result


def path_of(x: Tensor, w_gate_up: GateUp, w_down: Tensor | None = None) -> str:
    """The name of the route that a call on these operands takes: see `route`."""
    w_gate, w_up = _split_weights(w_gate_up)
    if not route.runs_kernels(x, w_gate, w_up):
        return route.PLAIN_PYTORCH
    return route.choose_route(route.problem_of(x, w_gate, w_up, w_down is not None)).path


def _split_weights(w_gate_up: Any) -> tuple[Any, Any]:
    """w_gate and w_up, or a packed weight and None; what is neither as it is, for `check_mlp`."""
    if isinstance(w_gate_up, (tuple, list)) and len(w_gate_up) == 2 and w_gate_up[1] is not None:
        return w_gate_up[0], w_gate_up[1]
    return w_gate_up, None


def _prepare(
    eager: bool, x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Any, activation: str,
    save: str, down: bool,
) -> Callable[..., Tensor]:  # fmt: skip
    """Check the operands, and choose what computes them."""
    if save not in SAVES:
        raise ValueError(f"save must be one of {', '.join(SAVES)}, got {save!r}")
    check_mlp(x, w_gate, w_up, *([w_down] if down else []))
    tensors, device = present(x, w_gate, w_up, w_down), x.device.type
    if not autocast_enabled(device) or any(t.dtype == torch.float64 for t in tensors):
        return _choose(eager, x.dtype, activation, save, x, w_gate, w_up, w_down)
    dtype = torch.get_autocast_dtype(device)
    return partial(_run_cast, _choose(eager, dtype, activation, save, x, w_gate, w_up, w_down))


def _choose(
    eager: bool, dtype: torch.dtype, activation: str, save: str, x: Tensor, w_gate: Tensor,
    w_up: Tensor | None, w_down: Tensor | None,
) -> Callable[..., Tensor]:  # fmt: skip
    """What computes operands like these, of that dtype."""
    tensors = present(x, w_gate, w_up, w_down)
    wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if route.runs_kernels(x, w_gate, w_up, dtype):
        if eager:
            problem = route.problem_of(x, w_gate, w_up, w_down is not None, activation, dtype)
            plan = _plans().plan_for(problem)
            if wants_gradient and w_down is not None:
                _plans().build_for_training(plan, save)
            return partial(_run_plan, plan, wants_gradient, save == "gate_up")
        may_compile = save == "gate_up" and dtype in HALF_DTYPES
        tokens = route.count_tokens(x, x.shape[-1])
        compiled = may_compile and left_to_compiler(tokens, fewest=FEW_TOKENS + 1)
        if not compiled and not is_distributed(*tensors):
            # gate|up is stored where a gradient may be asked for.
            return partial(_run_operator, activation, save == "gate_up" and wants_gradient)
    again = save == "input" and wants_gradient
    return partial(_run_again_in_backward if again else _plain_pytorch, activation)


def _run_cast(run: Callable[..., Tensor], *operands: Tensor | None) -> Tensor:
    return run(*cast_for_autocast(*operands))


@cache
def _plans() -> Any:
    """Imported late, for Triton need not be there; once, for an import statement costs µs."""
    from fusedlib.ops.mlp import plan

    return plan


def _run_plan(plan: Plan, wants_gradient: bool, save: bool, *operands: Tensor | None) -> Tensor:
    x, w_gate, w_up, w_down = unwrap_dead_wrappers(operands)
    if plan.problem.dtype == torch.float32:
        plan = _plans().plan_at_current_precision(plan, x)
    if wants_gradient:
        return apply_swiglu(x, w_gate, w_up, w_down, save, plan)
    return run_forward(x, w_gate, w_up, w_down, False, plan)[0]


def _run_operator(
    activation: str, save: bool, x: Tensor, w_gate: Tensor, w_up: Tensor | None,
    w_down: Tensor | None,
) -> Tensor:  # fmt: skip
    matrix = x.reshape(-1, x.shape[-1])
    result, _ = SWIGLU_MLP.operator(matrix, w_gate, w_up, w_down, activation, save)
    return result.reshape(*x.shape[:-1], result.shape[-1])


def _run_again_in_backward(activation: str, *operands: Any) -> Tensor:
    """Keep the operands alone and compute again later, where hooks on saved tensors may run."""
    if not torch.compiler.is_compiling() and not keeps_by_hooks():
        return _plain_pytorch(activation, *operands)
    # Views, whose memory stays what it is when an operand's is exchanged.
    views = [t if t is None or hasattr(t, BROUGHT_BACK) else t.view_as(t) for t in operands]
    y: Tensor = checkpoint(
        _plain_pytorch, activation, *views, use_reentrant=False, preserve_rng_state=False
    )
    return y


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


# --- plain eager mode ----------------------------------------------------------------------------

SavedTensors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def tensors_to_save(
    wants: WantedGradients, save: bool, x: Tensor,
    w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None, gate_up: Tensor | None,
) -> SavedTensors:  # fmt: skip
    """x, weights and gate|up where a wanted gradient needs them, otherwise None."""
    wants_x, wants_w_gate, wants_w_up, wants_w_down = wants
    wants_weights = wants_w_gate or wants_w_up
    gradient = wants_x or wants_weights
    return (
        x if wants_weights or not save else None,
        w_gate if wants_x or not save else None,
        w_up if wants_x or not save else None,
        w_down if gradient else None,
        gate_up if save and (gradient or wants_w_down) else None,
    )


def gradients(
    plan: Plan, wants: WantedGradients, saved: list[Tensor | None], upstream: Tensor,
    in_place: bool,
) -> Gradients:  # fmt: skip
    """d_x, d_w_gate_up and d_w_down, each if wanted; of a pair d_w_gate_up has the wanted rows.

    Args:
        plan: what computes them.
        wants: which of the four.
        saved: what `tensors_to_save` gave. gate|up is taken out of the list, so that nobody holds
            its memory any longer.
        upstream: dy (..., hidden), or dh (..., inner) where there is no w_down.
        in_place: gate|up may be overwritten; one computed again always may.
    """
    wants_x, wants_w_gate, wants_w_up, wants_w_down = wants
    gate_up = saved.pop()
    x, w_gate, w_up, w_down = saved
    gradient = wants_x or wants_w_gate or wants_w_up
    h = d_gate_up = None
    if gate_up is None:
        assert x is not None and w_gate is not None
        h, gate_up = plan.activate(x, w_gate, w_up, gradient)
        h, in_place = (h if wants_w_down else None), True
    recompute_h = wants_w_down and h is None
    if gradient or recompute_h:
        assert gate_up is not None
        dy = upstream if gradient else None
        d_gate_up, recomputed_h = plan.differentiate(
            dy, w_down, gate_up, recompute_h=recompute_h, in_place=in_place
        )
        h = recomputed_h if recompute_h else h
        recomputed_h = None
    buffers = [h, d_gate_up]
    del gate_up, h, d_gate_up
    return plan.products.gradients(wants, plan.pair, buffers, upstream, x, w_gate, w_up)


def separate_gate_up(
    d_w_gate_up: Tensor | None, wants: WantedGradients, pair: bool
) -> tuple[Tensor | None, Tensor | None]:
    """d_w_gate and d_w_up: rows of one matrix, or the one that is wanted; packed is d_w_gate."""
    if d_w_gate_up is None:
        return None, None
    if pair and wants[1] and wants[2]:
        inner = d_w_gate_up.shape[0] // 2
        return d_w_gate_up[:inner], d_w_gate_up[inner:]
    return d_w_gate_up if wants[1] else None, d_w_gate_up if wants[2] else None


def save_with_gate_up(
    ctx: Any, operands: Sequence[Tensor | None], *others: Tensor | None
) -> None:  # fmt: skip
    """Keep operands and other tensors, of which the last is gate|up, that nobody else holds.

    An attribute is out of every hook's sight, so that backward may write over it.
    """
    *others_saved, gate_up = others
    ctx.private_gate_up = gate_up if saved_tensor_hooks(False) is None else None
    ctx.gate_up_is_private = ctx.private_gate_up is not None
    save_operands(ctx, operands, *others_saved, None if ctx.gate_up_is_private else gate_up)


def saved_with_gate_up(ctx: Any) -> tuple[tuple[Any, ...], bool]:
    """What was kept, and whether backward may write over the last.

    Raises:
        RuntimeError: they are freed already.
    """
    *others, gate_up = ctx.saved_tensors
    in_place = False
    if ctx.gate_up_is_private:
        gate_up, in_place = ctx.private_gate_up, not retains_graph()
        if gate_up is None:
            raise RuntimeError("backward ran a second time; the first wants retain_graph=True")
        if in_place:
            ctx.private_gate_up = None
    return (*others, gate_up), in_place


class SwiGLUFunction(torch.autograd.Function):
    """y (..., hidden) or, where w_down is None, h (..., inner), launched without the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None,
        save: bool, plan: Plan,
    ) -> Tensor:  # fmt: skip
        """Compute y or h, and save what the wanted gradients need."""
        ctx.plan = plan
        y, gate_up = run_forward(x, w_gate, w_up, w_down, save, plan)
        ctx.wants = wants = ctx.needs_input_grad[:4]
        *operands, kept = tensors_to_save(wants, save, x, w_gate, w_up, w_down, gate_up)
        save_with_gate_up(ctx, operands, kept)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, w_gate, w_up and w_down; none for the rest."""
        (x, w_gate, w_up, w_down, gate_up), in_place = saved_with_gate_up(ctx)
        plan = ctx.plan
        if upstream.dtype == torch.float32:
            plan = _plans().plan_at_current_precision(plan, upstream)
        # dy may have any strides, and so may what DeepSpeed brought back.
        dy, *others = contiguous_and_aligned(upstream, x, w_gate, w_up, w_down, gate_up)
        saved = [*others]
        del gate_up, others
        assert dy is not None
        d_x, d_w_gate_up, d_w_down = gradients(plan, ctx.wants, saved, dy, in_place)
        d_weights = separate_gate_up(d_w_gate_up, ctx.wants, plan.pair)
        return d_x, *d_weights, d_w_down, None, None


# Without `Function.apply`'s own look at torch.func, whose transforms are sent elsewhere before.
apply_swiglu: Callable[..., Tensor] = super(torch.autograd.Function, SwiGLUFunction).apply


def run_forward(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None, save: bool, plan: Plan
) -> tuple[Tensor, Tensor | None]:
    """y (..., hidden), or h where w_down is None, and gate|up (tokens, 2·inner) if saved.

    The operands may have any strides and addresses, on any device.
    """
    if plan.accepts(x, w_gate, w_up, w_down):
        return plan.forward(x, w_gate, w_up, w_down, save)
    operands: tuple[Any, ...] = contiguous_and_aligned(x, w_gate, w_up, w_down)
    with current_device(x):
        return plan.forward(operands[0], operands[1], operands[2], operands[3], save)


# --- the registered operators: they never write over what they are given -------------------------

Shape = tuple[int, ...]


def swiglu_fwd(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None, activation: str,
    save: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y (tokens, hidden), and gate|up (tokens, 2·inner) if saved.

    w_gate and w_up are (inner, hidden); without w_up w_gate is packed, (2·inner, hidden). Without
    w_down h (tokens, inner) takes the place of y.
    """
    problem = route.problem_of(x, w_gate, w_up, w_down is not None, activation)
    plan = _plans().plan_for(problem)
    return run_forward(x, w_gate, w_up, w_down, save, plan)


def swiglu_bwd(
    upstream: Tensor, x: Tensor | None, w_gate: Tensor | None, w_up: Tensor | None,
    w_down: Tensor | None, gate_up: Tensor | None, wants: Sequence[bool],
    sizes: Sequence[int], pair: bool, activation: str,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """d_x, d_w_gate_up and d_w_down, each if wanted.

    Args:
        upstream: dy (tokens, hidden), or dh (tokens, inner) of an MLP without w_down.
        x: what `tensors_to_save` gave of the operands, as the next four.
        w_gate: likewise.
        w_up: likewise.
        w_down: likewise.
        gate_up: likewise.
        wants: d_x, d_w_gate, d_w_up, d_w_down.
        sizes: hidden and inner.
        pair: gate and up have a weight each, whose gradients are rows of d_w_gate_up.
        activation: of gate.
    """
    (hidden, inner), down = sizes, w_down is not None or wants[3]
    problem = route.MLPProblem(
        upstream.device, upstream.dtype, fp32_precision(upstream), upstream.shape[0], hidden, inner,
        down, pair, activation,
    )  # fmt: skip
    plan = _plans().plan_for(problem)
    dy, *saved = contiguous_and_aligned(upstream, x, w_gate, w_up, w_down, gate_up)
    assert dy is not None
    with current_device(upstream):
        wanted = wants[0], wants[1], wants[2], wants[3]
        return gradients(plan, wanted, saved, dy, False)


def _shapes(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None, activation: str,
    save: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    tokens, wide = x.shape[0], route.weight_sizes(w_gate, w_up)[0]
    output = x.new_empty(tokens, wide // 2 if w_down is None else w_down.shape[0])
    return output, x.new_empty(tokens, wide) if save else None


def _fake_gradients(
    upstream: Tensor, x: Any, w_gate: Any, w_up: Any, w_down: Any, gate_up: Any,
    wants: Sequence[bool], sizes: Sequence[int], pair: bool, activation: str,
) -> Gradients:  # fmt: skip
    (hidden, inner), both = sizes, not pair or (wants[1] and wants[2])
    new = upstream.new_empty
    return (
        new(upstream.shape[0], hidden) if wants[0] else None,
        new((1 + both) * inner, hidden) if wants[1] or wants[2] else None,
        new(hidden, inner) if wants[3] else None,
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the wanted gradients need, and nothing else."""
    x, w_gate, w_up, w_down, activation, save = inputs
    wide, hidden = route.weight_sizes(w_gate, w_up)
    ctx.wants, ctx.pair = ctx.needs_input_grad[:4], w_up is not None
    ctx.settings = ctx.wants, (hidden, wide // 2), ctx.pair, activation
    ctx.set_materialize_grads(False)  # gate|up has no gradient: zeros would cost its size
    *operands, gate_up = tensors_to_save(ctx.wants, save, x, w_gate, w_up, w_down, output[1])
    save_operands(ctx, operands, gate_up)


def _gradients(
    backward: Any, ctx: Any, upstream: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    if upstream is None:
        return (None,) * 6
    d_x, d_w_gate_up, d_w_down = backward(upstream, *ctx.saved_tensors, *ctx.settings)
    wants_x, *_, wants_w_down = ctx.wants
    d_weights = separate_gate_up(d_w_gate_up, ctx.wants, ctx.pair)
    return d_x if wants_x else None, *d_weights, d_w_down if wants_w_down else None, None, None


def _flops(
    x: Shape, w_gate: Shape, w_up: Shape | None, w_down: Shape | None, *_: Any, **__: Any
) -> int:
    return 2 * x[0] * sum(prod(w) for w in (w_gate, w_up, w_down) if w is not None)


def _backward_flops(
    upstream: Shape, x: Shape | None, w_gate: Shape | None, w_up: Shape | None,
    w_down: Shape | None, gate_up: Shape | None, wants: Sequence[bool], sizes: Sequence[int],
    pair: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """With gate|up where they are computed again."""
    wants_x, wants_w_gate, wants_w_up, wants_w_down = wants
    of_gate_up = wants_w_gate + wants_w_up if pair else 2 * wants_w_gate
    dh = w_down is not None and any(wants[:3])
    products = dh + 2 * (gate_up is None) + 2 * wants_x + of_gate_up + wants_w_down
    return 2 * upstream[0] * prod(sizes) * products


SWIGLU_MLP = declare(
    "swiglu_mlp", swiglu_fwd, _shapes, setup_context=_setup_context, gradients=_gradients,
    backward=(swiglu_bwd, _fake_gradients), flops=_flops, backward_flops=_backward_flops,
)  # fmt: skip
