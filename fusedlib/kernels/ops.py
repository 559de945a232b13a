"""The fused kernels as torch operators: `torch.ops.fusedlib.swiglu` and `.swiglu_mlp`.

Registered through `torch.library`, with shapes for meta and fake tensors and an autograd formula,
so that torch.compile, activation checkpointing and FSDP see ordinary operators. All operands are
matrices of one dtype and device; `fusedlib.functional` brings them into that form.

What is kept for backward, when the weights and x all want gradients:

| save      | kept                    | recomputed in backward                               |
|-----------|-------------------------|------------------------------------------------------|
| True      | x, weights, gate|up     | h, in the epilogue of dy Wd                          |
| False     | x, weights              | gate|up by the forward kernel, then h as above       |

d(gate|up) goes to a new tensor: gate|up is never written over, so running backward twice on a
retained graph gives the same answer twice. A second derivative raises.
"""

from typing import Any

import torch
from torch import Tensor

from fusedlib.kernels.swiglu import swiglu_bwd, swiglu_fwd


@torch.library.custom_op("fusedlib::swiglu", mutates_args=())
def swiglu(x: Tensor, w_gate_up: Tensor, save: bool) -> tuple[Tensor, Tensor]:
    """h (tokens, inner), and gate|up (tokens, 2·inner) or, not saved, an empty tensor."""
    h, gate_up = swiglu_fwd(x, w_gate_up, save=save)
    return h, x.new_empty(0, 0) if gate_up is None else gate_up


@torch.library.custom_op("fusedlib::swiglu_mlp", mutates_args=())
def swiglu_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor, save: bool) -> tuple[Tensor, Tensor]:
    """y (tokens, hidden), and gate|up (tokens, 2·inner) or, not saved, an empty tensor."""
    h, gate_up = swiglu_fwd(x, w_gate_up, save=save)
    return h @ w_down.mT, x.new_empty(0, 0) if gate_up is None else gate_up


@torch.library.custom_op("fusedlib::swiglu_backward", mutates_args=())
def swiglu_backward(
    upstream: Tensor | None, w_down: Tensor | None, gate_up: Tensor, output: bool
) -> tuple[Tensor, Tensor]:
    """d(gate|up) (tokens, 2·inner) and h (tokens, inner); empty where not wanted.

    As `fusedlib.kernels.swiglu.swiglu_bwd`. It has no gradient of its own.
    """
    results = swiglu_bwd(upstream, w_down, gate_up, output=output)
    d_gate_up, h = (gate_up.new_empty(0, 0) if r is None else r for r in results)
    return d_gate_up, h


@swiglu.register_fake
def _(x: Tensor, w_gate_up: Tensor, save: bool) -> tuple[Tensor, Tensor]:
    wide = w_gate_up.shape[0]
    return x.new_empty(x.shape[0], wide // 2), _fake_gate_up(x, wide, save)


@swiglu_mlp.register_fake
def _(x: Tensor, w_gate_up: Tensor, w_down: Tensor, save: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], w_down.shape[0]), _fake_gate_up(x, w_gate_up.shape[0], save)


@swiglu_backward.register_fake
def _(
    upstream: Tensor | None, w_down: Tensor | None, gate_up: Tensor, output: bool
) -> tuple[Tensor, Tensor]:
    tokens, wide = gate_up.shape
    gradient = (0, 0) if upstream is None else (tokens, wide)
    h = (tokens, wide // 2) if output else (0, 0)
    return gate_up.new_empty(gradient), gate_up.new_empty(h)


def _fake_gate_up(x: Tensor, wide: int, save: bool) -> Tensor:
    return x.new_empty(x.shape[0], wide) if save else x.new_empty(0, 0)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the wanted gradients need, and nothing else; inputs end in w_down or without it."""
    x, w_gate_up, *w_down, save = inputs
    wants_x, wants_w_gate_up, *wants_w_down = ctx.needs_input_grad[:-1]
    gradient = wants_x or wants_w_gate_up
    ctx.save = save
    ctx.set_materialize_grads(False)  # gate|up has no gradient: zeros would cost its size
    ctx.save_for_backward(
        x if wants_w_gate_up or not save else None,
        w_gate_up if wants_x or not save else None,
        w_down[0] if w_down and gradient else None,
        output[1] if save and (gradient or any(wants_w_down)) else None,
    )


def _activation_gradients(
    ctx: Any, saved: tuple[Any, ...], upstream: Tensor, output: bool
) -> tuple[Tensor, Tensor]:
    """d(gate|up) and h; empty where no gradient needs it."""
    x, w_gate_up, w_down, gate_up = saved
    gradient = any(ctx.needs_input_grad[:2])
    if not ctx.save and not gradient:
        h, empty = swiglu(x, w_gate_up, False)
        return empty, h
    if not ctx.save:
        _, gate_up = swiglu(x, w_gate_up, True)
    return swiglu_backward(upstream if gradient else None, w_down, gate_up, output)


def _product_gradients(ctx: Any, saved: tuple[Any, ...], d_gate_up: Tensor) -> list[Tensor | None]:
    """d_x and d_w_gate_up, each if wanted."""
    x, w_gate_up, *_ = saved
    wants_x, wants_w_gate_up = ctx.needs_input_grad[:2]
    d_x = d_gate_up @ w_gate_up if wants_x else None
    return [d_x, d_gate_up.mT @ x if wants_w_gate_up else None]


def _swiglu_gradients(ctx: Any, dh: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dh is None:
        return None, None, None
    saved = ctx.saved_tensors  # read once: activation checkpointing allows no more
    d_gate_up, _ = _activation_gradients(ctx, saved, dh, False)
    return *_product_gradients(ctx, saved, d_gate_up), None


def _swiglu_mlp_gradients(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return None, None, None, None
    saved = ctx.saved_tensors
    wants_w_down = ctx.needs_input_grad[2]
    d_gate_up, h = _activation_gradients(ctx, saved, dy, wants_w_down)
    d_w_down = dy.mT @ h if wants_w_down else None
    del h  # before the next products allocate
    return *_product_gradients(ctx, saved, d_gate_up), d_w_down, None


swiglu.register_autograd(_swiglu_gradients, setup_context=_set_up)
swiglu_mlp.register_autograd(_swiglu_mlp_gradients, setup_context=_set_up)
