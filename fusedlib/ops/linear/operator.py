"""A linear layer whose three products are of split factors, in fp32 at torch's "highest".

    y = x Wᵀ + b          d_x = dy W          d_W = dyᵀ x          d_b = Σ_tokens dy

| product | sum over | x          | W          | dy         |
|---------|----------|------------|------------|------------|
| y       | inputs   | by rows    | by rows    |            |
| d_x     | outputs  |            | by columns | by rows    |
| d_W     | tokens   | by columns |            | by columns |

An operand is scaled along the sum, so each is split twice, once for each of its axes, and no two
products can share a split. Saved are x and W, as by torch, each where the other wants a gradient;
the parts, as large as both factors, live as long as their product. Splitting again in backward
instead of keeping parts costs one pass over x and one over W, 8 bytes an element: 8192·4096·4096
reads and writes 0.4 GB, 0.1 ms of 4.6 at an H200's 3.8 TB/s. W's parts are kept where the user says
that it stays as it is (`fusedlib.fixed_weights`).

A product that is not faster split (`route.is_faster_split`) is torch's. Where backward itself is
differentiated or batched all are torch's, which have derivatives of every order. Error bound: that
of `fusedlib.ops.linear.split`, and with a bias one more rounding of y.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fusedlib.op import DirectFunction, declare, is_transformed_gradient, keep, outside_autocast
from fusedlib.ops.linear import split
from fusedlib.ops.linear.route import fp32_precision, splits_product


def run_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y (..., outputs) of x (..., inputs), fp32."""
    outputs, inputs = weight.shape
    tokens = x.shape[:-1].numel()
    rows = x.reshape(tokens, inputs)
    if not splits_product(x, tokens, outputs, inputs):
        y = functional.linear(rows, weight, bias)
    else:
        y = split.split_mm(rows, weight.t())
        if bias is not None:
            y += bias
    # In place: autograd lets nobody write to a view that a Function returns.
    return y.resize_(*x.shape[:-1], outputs)


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    x, weight, _ = inputs
    ctx.wants = wants_x, wants_weight, _ = ctx.needs_input_grad[:3]
    keep(ctx, (x if wants_weight else None, weight if wants_x else None), twice=True)


def _gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    """The wanted gradients of x, weight and bias."""
    if dy is None:
        return None, None, None
    x, weight = ctx.saved_tensors
    return _products(dy, x, weight, ctx.wants[2])


def _products(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, wants_bias: bool
) -> tuple[Tensor | None, ...]:
    """d_x, d_W and d_b, each if wanted: x is given for d_W, weight for d_x."""
    plain = torch.is_grad_enabled() or is_transformed_gradient(dy)
    product = torch.mm if plain or fp32_precision(dy) != "ieee" else split.multiply
    rows = dy.reshape(-1, dy.shape[-1])
    if 1 not in rows.stride():
        rows = rows.contiguous()  # once for both products
    d_x = d_weight = None
    if weight is not None:
        d_x = product(rows, weight).view(*dy.shape[:-1], weight.shape[1])
    if x is not None:
        d_weight = product(rows.t(), x.reshape(-1, x.shape[-1]))
    return d_x, d_weight, rows.sum(0) if wants_bias else None


def _flops(x: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * prod(x) * weight[0]


LINEAR = declare(
    "linear", run_linear, _shape, keep=_keep, gradients=_gradients, flops=_flops, twice=True
)


class JoinedLinearFunction(DirectFunction):
    """Layers of one x as one: (..., outputs of all) of x, their weights and then their biases.

    The weights are joined for each product and not kept; all want gradients, or none does.
    """

    @staticmethod
    def forward(x: Tensor, *weights_and_biases: Tensor | None) -> Tensor:
        """All results, side by side."""
        operands: Any = weights_and_biases
        weights, biases = operands[: len(operands) // 2], operands[len(operands) // 2 :]
        return run_linear(x, torch.cat(weights), None if biases[0] is None else torch.cat(biases))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep x where a weight wants a gradient, and the weights where x wants one."""
        x, *operands = inputs
        weights = operands[: len(operands) // 2]
        wants_x, wants_weights, *_ = ctx.needs_input_grad
        ctx.outputs = [weight.shape[0] for weight in weights]
        kept = x if wants_weights else None, *(w if wants_x else None for w in weights)
        keep(ctx, kept, twice=True)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, the weights and the biases."""
        x, *weights = ctx.saved_tensors
        wants_x, *wanted = ctx.needs_input_grad
        count = len(weights)
        joined = torch.cat(weights) if wants_x else None
        gradients = _products(dy, x, joined, any(wanted[count:]))
        by_layer = [[None] * count if g is None else g.split(ctx.outputs) for g in gradients[1:]]
        return gradients[0], *by_layer[0], *by_layer[1]
