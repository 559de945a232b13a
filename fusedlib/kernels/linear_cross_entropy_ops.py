"""The loss of `fusedlib.kernels.linear_cross_entropy` as torch operators, with their gradients.

| operator                                  | kept for backward                              |
|-------------------------------------------|------------------------------------------------|
| `fusedlib::linear_cross_entropy`          | the gradients themselves, as forward left them |
| `fusedlib::linear_cross_entropy_by_token` | hidden, weight, bias, target                   |

Backward writes over the gradients that were kept where nobody else can see them: the graph is not
retained, and no saved-tensor hooks were set in the forward. A second derivative raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedlib.kernels.host.first_order import refuses_transforms
from fusedlib.kernels.host.internals import (
    assert_async,
    dispatch_mode_count,
    retains_graph,
    saved_tensor_hooks,
)
from fusedlib.kernels.host.operator import operator
from fusedlib.kernels.linear_cross_entropy import fill_scaled, losses_and_gradients, plan


def _check_targets(target: Tensor, valid: Tensor, vocabulary: int) -> None:
    """As torch's own loss: an error of the device, without waiting for it."""
    assert_async(
        (((target >= 0) & (target < vocabulary)) | ~valid).all(),
        f"a target is neither in [0, {vocabulary}) nor ignore_index",
    )


@operator("linear_cross_entropy")
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    token_weights: Tensor | None, mean: bool, ignore_index: int, label_smoothing: float,
    z_loss: float, memory: int, wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum of the losses, or their mean, the gradients that go with it, and their factor.

    Returns:
        loss, fp32; a scalar, d_hidden, d_W and d_b, whose product with it is the gradient. What is
        not in `wants` (of hidden, weight, bias) is empty.
    """
    valid = target != ignore_index
    _check_targets(target, valid, weight.shape[0])
    total = factor = scale = torch.ones((), dtype=torch.float32, device=hidden.device)
    if mean:
        total = valid if token_weights is None else token_weights.masked_fill(~valid, 0)
        total = total.sum(dtype=torch.float32)
        scale = total.reciprocal()
        if hidden.dtype == torch.float16:
            # Over no tokens 1/0 stays where ignored rows do not see it.
            no_tokens = total == 0
            scale, factor = scale.masked_fill(~no_tokens, 1), scale.masked_fill(no_tokens, 1)
    losses, *gradients = losses_and_gradients(
        hidden, weight, bias, target, token_weights, scale, ignore_index, label_smoothing, z_loss,
        memory, tuple(wants),
    )  # fmt: skip
    d_hidden, d_weight, d_bias = (hidden.new_empty(0) if d is None else d for d in gradients)
    return losses.sum() / total, factor.clone(), d_hidden, d_weight, d_bias


@operator("linear_cross_entropy_by_token")
def linear_cross_entropy_by_token(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int,
    label_smoothing: float, z_loss: float, memory: int,
) -> Tensor:  # fmt: skip
    """Losses (tokens,), fp32; `memory` is `plan`'s, as of the operator above."""
    _check_targets(target, target != ignore_index, weight.shape[0])
    one = torch.ones((), dtype=torch.float32, device=hidden.device)
    no_gradients = False, False, False
    return losses_and_gradients(
        hidden, weight, bias, target, None, one, ignore_index, label_smoothing, z_loss, memory,
        no_gradients,
    )[0]  # fmt: skip


@operator("scaled", last=True)
def scaled(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The source, contiguous, times a scalar of fp32, rounded to `dtype`. It has no gradient."""
    return fill_scaled(source, source.new_empty(source.shape, dtype=dtype), factor)


@torch.library.register_fake(linear_cross_entropy)
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    token_weights: Tensor | None, mean: bool, ignore_index: int, label_smoothing: float,
    z_loss: float, memory: int, wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sums = torch.float32
    if wants[1] and weight.dtype == torch.bfloat16:  # else nobody asks how many tokens there are
        sums = plan(hidden.shape[0], weight, memory=memory).sums
    shapes = (hidden.shape, hidden.dtype), (weight.shape, sums), (weight.shape[:1], torch.float32)
    d_hidden, d_weight, d_bias = (
        hidden.new_empty(shape, dtype=dtype) if want else hidden.new_empty(0)
        for (shape, dtype), want in zip(shapes, wants, strict=True)
    )
    one = hidden.new_empty((), dtype=torch.float32)
    return one, torch.empty_like(one), d_hidden, d_weight, d_bias


@torch.library.register_fake(linear_cross_entropy_by_token)
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int,
    label_smoothing: float, z_loss: float, memory: int,
) -> Tensor:  # fmt: skip
    return hidden.new_empty(hidden.shape[0], dtype=torch.float32)


@torch.library.register_fake(scaled)
def _(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return source.new_empty(source.shape, dtype=dtype)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.dtype = inputs[0].dtype
    ctx.owns_gradients = saved_tensor_hooks(False) is None
    ctx.save_for_backward(*output[1:])


@refuses_transforms
def _gradients(ctx: Any, upstream: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
    """The gradients of hidden, weight and bias."""
    if any(other is not None for other in others):
        raise RuntimeError(
            "the fused linear_cross_entropy has no second derivative; differentiate float64"
        )
    if upstream is None:
        return (None,) * 11
    factor, *unscaled = ctx.saved_tensors
    factor = factor * upstream
    gradients = [
        _scaled_gradient(ctx, d, factor) if want else None
        for d, want in zip(unscaled, ctx.needs_input_grad[:3], strict=True)
    ]
    return *gradients, *(None,) * 8


def _scaled_gradient(ctx: Any, unscaled: Tensor, factor: Tensor) -> Tensor:
    """factor · kept in the inputs' dtype, over what was kept if it may be."""
    watched = type(unscaled) is not Tensor or dispatch_mode_count()
    watched = watched or torch.is_grad_enabled()  # somebody may differentiate the result again
    if watched or not ctx.owns_gradients or unscaled.dtype != ctx.dtype or retains_graph():
        return scaled(unscaled, factor, ctx.dtype)
    unscaled = unscaled.detach()
    return fill_scaled(unscaled, unscaled, factor)


def _set_up_by_token(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


@refuses_transforms
def _gradients_by_token(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    hidden, weight, bias, target = ctx.saved_tensors
    wants = list(ctx.needs_input_grad[:3])
    _, factor, *gradients = linear_cross_entropy(
        hidden, weight, bias, target, upstream.contiguous(), False, *ctx.settings, wants
    )
    dtype = hidden.dtype  # the factor is 1: d_W and d_b may have to be rounded yet
    finished = [
        (d if d.dtype == dtype else scaled(d, factor, dtype)) if want else None
        for d, want in zip(gradients, wants, strict=True)
    ]
    return *finished, *(None,) * 5


torch.library.register_autograd(linear_cross_entropy, _gradients, setup_context=_set_up)
torch.library.register_autograd(
    linear_cross_entropy_by_token, _gradients_by_token, setup_context=_set_up_by_token
)
