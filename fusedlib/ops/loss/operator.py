"""The loss of `fusedlib.ops.loss.kernels` as torch operators, with their gradients.

| operator                                  | kept for backward                              |
|-------------------------------------------|------------------------------------------------|
| `fusedlib::linear_cross_entropy`          | the gradients themselves, as forward left them |
| `fusedlib::linear_cross_entropy_by_token` | the operands, and statistics of each token     |

Backward writes over the gradients that were kept where nobody else can see them: the graph is not
retained, and no saved-tensor hooks were set in the forward. A second derivative raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedlib.compat import (
    assert_async,
    dispatch_mode_count,
    retains_graph,
    saved_tensor_hooks,
)
from fusedlib.op import declare, keep, operator
from fusedlib.ops.loss.kernels import (
    STATISTICS,
    Settings,
    fill_scaled,
    losses_and_gradients,
    plan,
    slices_by_token,
)

Shape = tuple[int, ...]


def _check_targets(target: Tensor, valid: Tensor, vocabulary: int) -> None:
    """Raise on the device, as torch's own loss does, where a target is no class; nobody waits."""
    assert_async(
        (((target >= 0) & (target < vocabulary)) | ~valid).all(),
        f"a target or token is neither in [0, {vocabulary}) nor ignore_index",
    )


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    class_weights: Tensor | None, token_weights: Tensor | None, total: Tensor | None,
    wants: list[bool], settings: Settings,
) -> tuple[
    Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor
]:  # fmt: skip
    """The sum of the losses, over `total` if there is one, its gradients, and their factor.

    Returns:
        loss, fp32; hits (tokens,), if wanted; a scalar, and d_hidden, d_W and d_b, each if it is in
        `wants` (of hidden, weight, bias), whose product with the scalar is the gradient; and which
        tokens are not ignored. The scalar is 0 where all are.
    """
    valid = target != settings.ignore_index
    _check_targets(target, valid, weight.shape[0])
    factor = scale = valid.any().to(torch.float32)
    if total is not None:
        scale = total.reciprocal()
        if hidden.dtype == torch.float16:  # d_logits of weights that are 1 in the mean, then 1/n
            count = valid.sum(dtype=torch.float32)
            scale, factor = count / total, factor / count.clamp_min(1)
    losses, hits, *gradients = losses_and_gradients(
        hidden, weight, bias, target, token_weights, class_weights, scale, tuple(wants), settings
    )
    loss = losses.sum() if total is None else losses.sum() / total
    d_hidden, d_weight, d_bias = gradients
    return loss, hits, factor, d_hidden, d_weight, d_bias, valid


def _forward_by_token(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    class_weights: Tensor | None, settings: Settings,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Losses and, if wanted, hits and entropies (tokens,), fp32; and the tokens' statistics."""
    _check_targets(target, target != settings.ignore_index, weight.shape[0])
    statistics = hidden.new_zeros(STATISTICS, hidden.shape[0], dtype=torch.float32)
    operands = hidden, weight, bias, target, class_weights, statistics
    slices_by_token(*operands, None, [False] * 3, None, settings)
    hits = statistics[5].clone() if settings.wants_hits else None
    entropies = statistics[2].clone() if settings.wants_entropy else None
    return statistics[4].clone(), hits, entropies, statistics


def _scaled(source: Tensor, factor: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """`fill_scaled` of a new tensor of `dtype`."""
    return fill_scaled(source, source.new_empty(source.shape, dtype=dtype), factor, counts)


def _shapes(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    class_weights: Tensor | None, token_weights: Tensor | None, total: Tensor | None,
    wants: list[bool], settings: Settings,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    sums = torch.float32
    if wants[1] and weight.dtype == torch.bfloat16:  # else nobody asks how many tokens there are
        sums = plan(hidden.shape[0], weight, memory=settings.memory).sums
    shapes = (hidden.shape, hidden.dtype), (weight.shape, sums), (weight.shape[:1], torch.float32)
    gradients = (
        hidden.new_empty(shape, dtype=dtype) if want else None
        for (shape, dtype), want in zip(shapes, wants, strict=True)
    )
    one = hidden.new_empty((), dtype=torch.float32)
    hits = one.new_empty(hidden.shape[0]) if settings.wants_hits else None
    return one, hits, torch.empty_like(one), *gradients, torch.empty_like(target, dtype=torch.bool)


def _shapes_by_token(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    class_weights: Tensor | None, settings: Settings,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    losses = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    wanted = settings.wants_hits, settings.wants_entropy
    hits, entropies = (torch.empty_like(losses) if want else None for want in wanted)
    return losses, hits, entropies, losses.new_empty(STATISTICS, hidden.shape[0])


def _shapes_by_token_backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    class_weights: Tensor | None, statistics: Tensor, upstream: Tensor | None, wants: list[bool],
    entropy_upstream: Tensor | None, settings: Settings,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    shapes = hidden.shape, weight.shape, weight.shape[:1]
    return tuple(hidden.new_empty(s) if w else None for s, w in zip(shapes, wants, strict=True))


def _shape_of_scaled(
    source: Tensor, factor: Tensor, counts: Tensor, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    return source.new_empty(source.shape, dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.dtype = inputs[0].dtype
    ctx.owns_gradients = saved_tensor_hooks(False) is None
    ctx.mark_non_differentiable(output[1])  # by the others a graph leads to all operands
    ctx.save_for_backward(*output[2:])


def _gradients(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """The gradients of hidden, weight and bias."""
    if upstream is None:
        return (None,) * len(ctx.needs_input_grad)
    factor, *unscaled, valid = ctx.saved_tensors
    times, counts = factor * upstream, (valid, factor, factor)  # of d_W and d_b all rows or none
    gradients = [
        _scaled_gradient(ctx, d, times, own) if want else None
        for d, own, want in zip(unscaled, counts, ctx.needs_input_grad[:3], strict=True)
    ]
    return *gradients, *(None,) * (len(ctx.needs_input_grad) - 3)


def _scaled_gradient(ctx: Any, unscaled: Tensor, factor: Tensor, counts: Tensor) -> Tensor:
    """factor · kept in the inputs' dtype, over what was kept if it may be."""
    watched = type(unscaled) is not Tensor or dispatch_mode_count()
    if watched or not ctx.owns_gradients or unscaled.dtype != ctx.dtype or retains_graph():
        return scaled(unscaled, factor, counts, ctx.dtype)
    unscaled = unscaled.detach()
    return fill_scaled(unscaled, unscaled, factor, counts)


def _keep_by_token(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    _, hits, entropies, statistics = output
    ctx.settings = Settings(*inputs[5:])
    unwanted = () if ctx.settings.wants_entropy else (entropies,)
    ctx.mark_non_differentiable(hits, statistics, *unwanted)
    keep(ctx, inputs[:5], statistics)


def _gradients_by_token(
    backward: Any,
    ctx: Any,
    upstream: Tensor | None,
    _: None,
    entropy_upstream: Tensor | None,
    __: None,
) -> tuple[Any, ...]:
    """The gradients of hidden, weight and bias."""
    nothing = (None,) * len(ctx.needs_input_grad)
    if entropy_upstream is not None:
        entropy_upstream = entropy_upstream.contiguous()
        upstream = torch.zeros_like(entropy_upstream) if upstream is None else upstream
    if upstream is None:
        return nothing
    operands, wants = ctx.saved_tensors, list(ctx.needs_input_grad[:3])
    gradients = backward(*operands, upstream.contiguous(), wants, entropy_upstream, *ctx.settings)
    finished = (d if want else None for d, want in zip(gradients, wants, strict=True))
    return *finished, *nothing[3:]


def _product_flops(hidden: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(hidden) * weight[0]


def _flops(
    hidden: Shape, weight: Shape, bias: Shape | None, target: Shape, class_weights: Shape | None,
    token_weights: Shape | None, total: Shape | None, wants: Sequence[bool], *_: Any, **__: Any,
) -> int:  # fmt: skip
    """With the gradients that a forward computes, or with the logits that a backward does again."""
    return _product_flops(hidden, weight) * (1 + wants[0] + wants[1])


scaled = operator("scaled", _scaled, _shape_of_scaled)
LOSS = declare(
    "linear_cross_entropy", _forward, _shapes, keep=_keep, gradients=_gradients, flops=_flops
)
LOSS_BY_TOKEN = declare(
    "linear_cross_entropy_by_token", _forward_by_token, _shapes_by_token, keep=_keep_by_token,
    gradients=_gradients_by_token, backward=(slices_by_token, _shapes_by_token_backward),
    flops=_product_flops, backward_flops=_flops,
)  # fmt: skip
