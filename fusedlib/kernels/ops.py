"""The fused kernels as torch operators: `torch.ops.fusedlib.swiglu` and `.swiglu_mlp`.

Registered through `torch.library`, with shapes for meta and fake tensors and an autograd formula,
so that torch.compile, dispatch modes and tensor subclasses see ordinary operators. All operands are
matrices of one dtype and device; `fusedlib.functional` brings them into that form. What is kept for
backward is in `fusedlib.kernels.swiglu_autograd`; the operators never write over what they are
given, so running backward twice on a retained graph gives the same answer twice. A second
derivative raises.
"""

from typing import Any

import torch
from torch import Tensor

from fusedlib.kernels.swiglu_autograd import Calls, gradients, kept
from fusedlib.kernels.swiglu_calls import product, swiglu_bwd, swiglu_fwd


@torch.library.custom_op("fusedlib::swiglu", mutates_args=())
def swiglu(x: Tensor, w_gate_up: Tensor, save: bool) -> tuple[Tensor, Tensor]:
    """h (tokens, inner), and gate|up (tokens, 2·inner) or, not saved, an empty tensor."""
    h, gate_up = swiglu_fwd(x, w_gate_up, save=save)
    return h, x.new_empty(0, 0) if gate_up is None else gate_up


@torch.library.custom_op("fusedlib::swiglu_mlp", mutates_args=())
def swiglu_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor, save: bool) -> tuple[Tensor, Tensor]:
    """y (tokens, hidden), and gate|up (tokens, 2·inner) or, not saved, an empty tensor."""
    h, gate_up = swiglu_fwd(x, w_gate_up, save=save)
    return product(h, w_down.t()), x.new_empty(0, 0) if gate_up is None else gate_up


@torch.library.custom_op("fusedlib::swiglu_backward", mutates_args=())
def swiglu_backward(
    upstream: Tensor | None, w_down: Tensor | None, gate_up: Tensor, output: bool
) -> tuple[Tensor, Tensor]:
    """d(gate|up) (tokens, 2·inner) and h (tokens, inner); empty where not wanted.

    As `fusedlib.kernels.swiglu_calls.swiglu_bwd`. It has no gradient of its own.
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


def _again(x: Tensor, w_gate_up: Tensor, save: bool) -> tuple[Tensor, Tensor]:
    return swiglu(x, w_gate_up, save)


def _backward(
    upstream: Tensor | None, w_down: Tensor | None, gate_up: Tensor, output: bool, _: bool
) -> tuple[Tensor, Tensor]:
    return swiglu_backward(upstream, w_down, gate_up, output)


_REGISTERED = Calls(_again, _backward)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the wanted gradients need, and nothing else; inputs end in w_down or without it."""
    x, w_gate_up, *w_down, save = inputs
    ctx.set_materialize_grads(False)  # gate|up has no gradient: zeros would cost its size
    down = w_down[0] if w_down else None
    ctx.save_for_backward(*kept(_wants(ctx), save, x, w_gate_up, down, output[1]))


def _wants(ctx: Any) -> tuple[bool, bool, bool]:
    wants_x, wants_w_gate_up, *wants_w_down = ctx.needs_input_grad[:-1]
    return wants_x, wants_w_gate_up, any(wants_w_down)


def _swiglu_gradients(ctx: Any, dh: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dh is None:
        return None, None, None
    # Saved tensors are read once: activation checkpointing allows no more.
    d_x, d_w_gate_up, _ = gradients(_REGISTERED, _wants(ctx), list(ctx.saved_tensors), dh, False)
    return d_x, d_w_gate_up, None


def _swiglu_mlp_gradients(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return None, None, None, None
    return *gradients(_REGISTERED, _wants(ctx), list(ctx.saved_tensors), dy, False), None


swiglu.register_autograd(_swiglu_gradients, setup_context=_set_up)
swiglu_mlp.register_autograd(_swiglu_mlp_gradients, setup_context=_set_up)
