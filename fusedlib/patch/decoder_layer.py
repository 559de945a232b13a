"""A decoder layer in half precision as two autograd functions, one on each side of attention.

    AttentionInput    n = norm(x)       q, k = rotated(n Wqᵀ), rotated(n Wkᵀ)     v = n Wvᵀ
    LayerOutput       s = x + a Woᵀ     n = norm(s)                              y = s + MLP(n)

With few tokens the host decides how long a step takes, and each module, view and autograd node in
Python costs it more than a launch. So operands are checked once for all calls with the same shapes,
dtypes and devices. The stream x passes through `AttentionInput` unchanged: its two gradients are
then added inside the norm's backward. Backward computes the norms' outputs again; they are not
kept. Which layers are computed so is decided by `fusedlib.patch.layers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear

from fusedlib import compat
from fusedlib.launch import prepared
from fusedlib.op import first_order, is_plain_eager, save_operands
from fusedlib.ops.arguments import autocast_enabled, contiguous_and_aligned
from fusedlib.ops.mlp.function import gradients as mlp_gradients
from fusedlib.ops.mlp.function import (
    run_forward,
    save_with_gate_up,
    saved_with_gate_up,
    separate_gate_up,
)
from fusedlib.ops.mlp.plan import Plan, build_for_training, plan_for
from fusedlib.ops.mlp.route import problem_of, runs_fused_kernels
from fusedlib.ops.norm.function import rms_norm_bwd, rms_norm_fwd
from fusedlib.ops.qkv import function as qkv
from fusedlib.ops.rope.function import normed_rope_bwd, normed_rope_fwd, rope_bwd, rope_fwd

METADATA = attrgetter("shape", "dtype", "device")
PARAMETERS = frozenset((Parameter,))


class LayerPlan(NamedTuple):
    """What depends on the shapes, dtypes and devices of a call's operands alone.

    Attributes:
        shape: (batch, tokens, hidden).
        heads: sizes and strides of q, k and v (batch, heads, tokens, head_dim).
        eps: of both norms, and of those of q and k.
        mlp: the plan of the MLP.
    """

    shape: torch.Size
    heads: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    eps: list[float]
    mlp: Plan


def plan_for_call(
    x: Tensor, tables: tuple[Tensor, Tensor], weights: list[Any], biases: tuple[Any, ...],
    eps: list[float], head_dim: int, activation: str,
) -> LayerPlan | None:  # fmt: skip
    """The plan for a call on such operands; None where it goes module by module.

    Args:
        x: (batch, tokens, hidden).
        tables: cos and sin, (1 or batch, tokens, head_dim).
        weights: of q, k, v, o, gate, up, down, of both norms, and of those of q and k, if any.
        biases: of q, k and v, each or None.
        eps: of both norms, and of those of q and k.
        head_dim: width of a head.
        activation: of the MLP, one of ACTIVATIONS.
    """
    present = [b for b in biases if b is not None]
    parameters = *weights, *present
    if not is_plain_eager(x, *tables) or not PARAMETERS.issuperset(map(type, parameters)):
        return None
    if compat.is_transformed() or compat.is_transform_wrapper(x) or autocast_enabled(x.device.type):
        return None
    if torch.is_grad_enabled() and (tables[0].requires_grad or tables[1].requires_grad):
        return None
    operands = x, *tables, *parameters
    key = *map(METADATA, operands), len(present), *eps, head_dim, activation
    plan: LayerPlan | None = prepared(
        (_make_plan, *key), _make_plan, operands, len(present), eps, head_dim, activation
    )
    return plan


def _make_plan(
    operands: tuple[Tensor, ...], bias_count: int, eps: list[float], head_dim: int, activation: str
) -> LayerPlan | None:
    """A new plan, where the operands go together and are such as the kernels take."""
    x, cos, sin, w_q, w_k, _, _, w_gate, w_up, *_ = operands
    if x.ndim != 3 or not x.numel() or bias_count not in (0, 3) or eps[2:3] != eps[3:]:
        return None
    alike = len({(t.dtype, t.device) for t in operands}) == 1
    if not alike or not runs_fused_kernels(x.device, x.dtype):
        return None
    batch, tokens, hidden = x.shape
    width, key_width, inner = w_q.shape[0], w_k.shape[0], w_gate.shape[0]
    shapes = [
        (width, hidden), (key_width, hidden), (key_width, hidden), (hidden, width),
        (inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,),
        *[(head_dim,)] * len(eps[2:]), *[(width,), (key_width,), (key_width,)][:bias_count],
    ]  # fmt: skip
    fits = [tuple(t.shape) for t in operands[3:]] == shapes and cos.shape == sin.shape
    fits = fits and cos.shape in ((1, tokens, head_dim), (batch, tokens, head_dim))
    if not fits or head_dim % 8 or width % head_dim or key_width % head_dim:
        return None
    heads = [
        ((batch, n // head_dim, tokens, head_dim), (tokens * n, head_dim, n, 1))
        for n in (width, key_width, key_width)
    ]
    mlp = plan_for(problem_of(x, w_gate, w_up, True, activation))
    return LayerPlan(x.shape, heads, eps, mlp)


class AttentionInput(torch.autograd.Function):
    """q, k and v (batch, heads, tokens, head_dim), and x itself, for who adds to the stream."""

    @staticmethod
    def forward(ctx: Any, plan: LayerPlan, x: Tensor, *operands: Any) -> Any:
        """Compute q and k, rotated, and v, and give x as well.

        Args:
            ctx: of autograd.
            plan: of the layer.
            x: the stream, (batch, tokens, hidden).
            operands: the norm's weight, weights and biases of q, k and v, weights of the norms of q
                and k, cos and sin; biases and those norms may be None.
        """
        w_norm, w_q, w_k, w_v, b_q, b_k, b_v, n_q, n_k, cos, sin = operands
        normed, _, rstd = rms_norm_fwd(_matrix(x), w_norm, None, plan.eps[0], True)
        results = qkv.Projections.forward(normed, w_q, w_k, w_v, b_q, b_k, b_v)
        q, k, v = (y.as_strided(*of) for y, of in zip(results, plan.heads, strict=True))
        of_heads = () if n_q is None else (n_q, n_k)
        if n_q is None:
            rotated = rope_fwd(q, k, cos, sin, None, None)
        else:
            rotated = normed_rope_fwd(q, k, n_q, n_k, cos, sin, plan.eps[2])
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        before_norms = () if n_q is None else (q, k)
        save_operands(ctx, (x, w_norm, w_q, w_k, w_v, cos, sin, *of_heads), rstd, *before_norms)
        return *rotated, v, x

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dq: Any, dk: Any, dv: Any, ds: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The gradients of x, weights and biases, each if it is wanted."""
        x, w_norm, w_q, w_k, w_v, cos, sin, *others = ctx.saved_tensors
        plan: LayerPlan = ctx.plan
        wants = ctx.needs_input_grad
        if dq is None and dk is None and dv is None:
            return None, ds, *(None,) * 11
        dq, dk, dv = (
            x.new_zeros(size) if d is None else d
            for d, (size, _) in zip((dq, dk, dv), plan.heads, strict=True)
        )
        d_q_norm = d_k_norm = None
        if len(others) > 1:
            n_q, n_k, rstd, q, k = others
            dq, dk, d_q_norm, d_k_norm = normed_rope_bwd(
                dq, dk, q, k, n_q, n_k, cos, sin, plan.eps[2]
            )
        else:
            [rstd] = others
            dq, dk = rope_bwd(dq, dk, cos, sin, None, cos.shape[-1])
        rows = rstd.shape[0]
        upstream = [d.transpose(1, 2).reshape(rows, -1) for d in (dq, dk, dv)]
        normed = None
        if any(wants[3:6]):
            normed, _, _ = rms_norm_fwd(_matrix(x), w_norm, None, plan.eps[0], True)
        wants_normed = wants[1] or wants[2]
        d_normed, *d_weights = qkv.gradients(
            normed, (w_q, w_k, w_v), upstream, wants_normed, wants[3:6]
        )
        d_biases = [d.sum(0) if want else None for d, want in zip(upstream, wants[6:9])]  # noqa: B905
        d_x, d_norm = ds, None
        if d_normed is not None:
            d_x, d_norm = rms_norm_bwd(d_normed, ds, x, w_norm, rstd, wants[1], wants[2])
        return None, d_x, d_norm, *d_weights, *d_biases, d_q_norm, d_k_norm, None, None


class LayerOutput(torch.autograd.Function):
    """The stream behind the layer (batch, tokens, hidden)."""

    @staticmethod
    def forward(
        ctx: Any, plan: LayerPlan, attended: Tensor, stream: Tensor, w_o: Tensor, w_norm: Tensor,
        w_gate: Tensor, w_up: Tensor, w_down: Tensor, training: bool,
    ) -> Tensor:  # fmt: skip
        """The stream behind the layer, of attention's result and the stream before it.

        `attended` is (batch, tokens, heads · head_dim), `stream` (batch, tokens, hidden)."""
        training = training and any(ctx.needs_input_grad)
        if training:
            build_for_training(plan.mlp, "gate_up")
        product = linear(_matrix(attended), w_o)
        s: Any
        normed, s, rstd = rms_norm_fwd(product, w_norm, _matrix(stream), plan.eps[1], True)
        y, gate_up = run_forward(normed, w_gate, w_up, w_down, training, plan.mlp)
        ctx.plan = plan
        operands = attended, w_o, w_norm, w_gate, w_up, w_down
        save_with_gate_up(ctx, operands, s, rstd, gate_up)
        # In place: autograd lets nobody write to a view that a Function returns.
        return y.add_(s).resize_(plan.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Any) -> tuple[Tensor | None, ...]:
        """The gradients of attention's result, the stream and the weights, each if it is wanted."""
        saved, in_place = saved_with_gate_up(ctx)
        attended, w_o, w_norm, w_gate, w_up, w_down, s, rstd, gate_up = saved
        plan: LayerPlan = ctx.plan
        _, wants_attended, wants_stream, wants_o, wants_norm, *wants_mlp, _ = ctx.needs_input_grad
        wants_s = wants_attended or wants_stream or wants_o
        normed = None
        if wants_mlp[0] or wants_mlp[1]:
            normed, _, _ = rms_norm_fwd(s, w_norm, None, plan.eps[1], True)
        operands = normed, w_gate, w_up, w_down, gate_up
        dy, *operands_of_mlp = contiguous_and_aligned(_matrix(dy), *operands)
        del saved, operands, gate_up, normed  # so that nobody else holds gate|up
        wants = wants_s or wants_norm, *wants_mlp
        d_normed, d_w_gate_up, d_down = mlp_gradients(
            plan.mlp, wants, operands_of_mlp, dy, in_place
        )
        d_gate_up = separate_gate_up(d_w_gate_up, wants, True)
        d_s: Any = dy
        d_norm: Tensor | None = None
        if d_normed is not None:
            d_s, d_norm = rms_norm_bwd(d_normed, dy, s, w_norm, rstd, wants_s, wants_norm)
        d_attended = torch.mm(d_s, w_o).view(attended.shape) if wants_attended else None
        d_o = torch.mm(d_s.t(), _matrix(attended)) if wants_o else None
        d_stream = d_s.view(plan.shape) if wants_stream else None
        return None, d_attended, d_stream, d_o, d_norm, *d_gate_up, d_down, None


# Without `Function.apply`'s own look at torch.func, whose transforms go module by module.
apply_attention_input: Any = super(torch.autograd.Function, AttentionInput).apply
apply_layer_output: Any = super(torch.autograd.Function, LayerOutput).apply


def _matrix(x: Tensor) -> Tensor:
    """(rows, width) of (..., width)."""
    return x.reshape(-1, x.shape[-1])
