"""The fused kernels as torch operators: `torch.ops.fusedlib.swiglu` and `.swiglu_mlp`.

Registered through `torch.library`, with shapes for meta and fake tensors and an autograd formula,
so that torch.compile, dispatch modes and tensor subclasses see ordinary operators. All operands are
matrices of one dtype and device; `fusedlib.functional` brings them into that form. What is kept for
backward is in `fusedlib.kernels.host.autograd`; the operators never write over what they are given,
so running backward twice on a retained graph gives the same answer twice. A second derivative
raises.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedlib.kernels import split
from fusedlib.kernels.host.autograd import gradients, run_forward, tensors_to_save
from fusedlib.kernels.host.launch import current_device
from fusedlib.kernels.host.operator import operator
from fusedlib.kernels.host.plan import contiguous_and_aligned
from fusedlib.kernels.host.plan_cache import plan_for
from fusedlib.kernels.host.products import TORCH_PRODUCTS, Products, WantedGradients
from fusedlib.kernels.host.route import may_split
from fusedlib.kernels.operands import KERNEL_DTYPES


def _check(name: str, matrix: Tensor, shape: tuple[int | str, int | str], like: Tensor) -> None:
    """A matrix of that shape (a word stands for any size), of like's dtype and device."""
    expected = f"({shape[0]}, {shape[1]})"
    fits = matrix.ndim == 2 and all(
        isinstance(want, str) or want == size
        for want, size in zip(shape, matrix.shape, strict=True)
    )
    if not fits or (str(shape[0]).startswith("2·") and matrix.shape[0] % 2):
        raise ValueError(f"{name} must be {expected}, got {tuple(matrix.shape)}")
    if matrix.dtype != like.dtype or matrix.dtype not in KERNEL_DTYPES:
        known = ", ".join(map(str, KERNEL_DTYPES))
        raise ValueError(f"{name} must be {like.dtype}, one of {known}; got {matrix.dtype}")
    if matrix.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {matrix.device}")


def _forward(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None, save: bool
) -> tuple[Tensor, Tensor]:
    _check("x", x, ("tokens", "hidden"), x)
    if w_up is None:
        _check("w_gate_up", w_gate, ("2·inner", x.shape[1]), x)
    else:
        _check("w_gate", w_gate, ("inner", x.shape[1]), x)
        _check("w_up", w_up, (w_gate.shape[0], x.shape[1]), x)
    if w_down is not None:
        _check("w_down", w_down, (x.shape[1], _wide(w_gate, w_up) // 2), x)
    plan = plan_for(x, w_gate, w_up, w_down)
    output, gate_up = run_forward(x, w_gate, w_up, w_down, save, plan)
    return output, x.new_empty(0, 0) if gate_up is None else gate_up


def _wide(w_gate: Tensor, w_up: Tensor | None) -> int:
    """2·inner."""
    return w_gate.shape[0] if w_up is None else 2 * w_gate.shape[0]


@operator("swiglu")
def swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor | None, save: bool) -> tuple[Tensor, Tensor]:
    """h (tokens, inner), and gate|up (tokens, 2·inner) or, not saved, an empty tensor.

    w_gate and w_up are (inner, hidden); without w_up w_gate is packed, (2·inner, hidden).

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    return _forward(x, w_gate, w_up, None, save)


@operator("swiglu_mlp")
def swiglu_mlp(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, save: bool
) -> tuple[Tensor, Tensor]:
    """y (tokens, hidden), and gate|up (tokens, 2·inner) or, not saved, an empty tensor.

    w_gate and w_up are those of `swiglu`.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    return _forward(x, w_gate, w_up, w_down, save)


@operator("swiglu_backward", last=True)
def swiglu_backward(
    upstream: Tensor | None, w_down: Tensor | None, gate_up: Tensor, recompute_h: bool
) -> tuple[Tensor, Tensor]:
    """d(gate|up) (tokens, 2·inner) and h (tokens, inner), new; empty where not wanted.

    It has no gradient of its own.

    Args:
        upstream: with `w_down` dy (tokens, hidden), without it dh (tokens, inner); None when only
            h is wanted.
        w_down: (hidden, inner), or None.
        gate_up: (tokens, 2·inner), what the forward saved.
        recompute_h: also recompute h.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    _check("gate_up", gate_up, ("tokens", "2·inner"), gate_up)
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    hidden = inner if w_down is None else w_down.shape[0]
    if w_down is not None:
        _check("w_down", w_down, (hidden, inner), gate_up)
    if upstream is not None:
        _check("dh" if w_down is None else "dy", upstream, (tokens, hidden), gate_up)
    # Operands of a forward that had these sizes.
    x, w_gate_up = (
        gate_up.new_empty(()).expand(s) for s in ((tokens, hidden), (2 * inner, hidden))
    )
    plan = plan_for(x, w_gate_up, None, w_down)
    operands: tuple[Any, ...] = contiguous_and_aligned(upstream, w_down, gate_up)
    with current_device(gate_up):
        results = plan.differentiate(*operands, recompute_h=recompute_h, in_place=False)
    d_gate_up, h = (gate_up.new_empty(0, 0) if r is None else r for r in results)
    return d_gate_up, h


@torch.library.register_fake(swiglu)
def _(x: Tensor, w_gate: Tensor, w_up: Tensor | None, save: bool) -> tuple[Tensor, Tensor]:
    wide = _wide(w_gate, w_up)
    return x.new_empty(x.shape[0], wide // 2), _fake_gate_up(x, wide, save)


@torch.library.register_fake(swiglu_mlp)
def _(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, save: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], w_down.shape[0]), _fake_gate_up(x, _wide(w_gate, w_up), save)


@torch.library.register_fake(swiglu_backward)
def _(
    upstream: Tensor | None, w_down: Tensor | None, gate_up: Tensor, recompute_h: bool
) -> tuple[Tensor, Tensor]:
    tokens, wide = gate_up.shape
    gradient = (0, 0) if upstream is None else (tokens, wide)
    h = (tokens, wide // 2) if recompute_h else (0, 0)
    return gate_up.new_empty(gradient), gate_up.new_empty(h)


def _fake_gate_up(x: Tensor, wide: int, save: bool) -> Tensor:
    return x.new_empty(x.shape[0], wide) if save else x.new_empty(0, 0)


class _Registered(NamedTuple):
    """The steps of a backward pass as registered operators."""

    products: Products
    pair: bool

    def activate(
        self, x: Tensor, w_gate: Tensor, w_up: Tensor | None, save: bool
    ) -> tuple[Tensor, Tensor]:
        return swiglu(x, w_gate, w_up, save)

    def differentiate(
        self, upstream: Tensor | None, w_down: Tensor | None, gate_up: Tensor, *,
        recompute_h: bool, in_place: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return swiglu_backward(upstream, w_down, gate_up, recompute_h)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the wanted gradients need, and nothing else; inputs end in w_down or without it."""
    x, w_gate, w_up, *w_down, save = inputs
    ctx.pair = w_up is not None
    ctx.set_materialize_grads(False)  # gate|up has no gradient: zeros would cost its size
    down = w_down[0] if w_down else None
    ctx.save_for_backward(*tensors_to_save(_wants(ctx), save, x, w_gate, w_up, down, output[1]))


def _wants(ctx: Any) -> WantedGradients:
    wants_x, wants_w_gate, wants_w_up, *wants_w_down = ctx.needs_input_grad[:-1]
    return wants_x, wants_w_gate, wants_w_up, any(wants_w_down)


def _gradients(ctx: Any, upstream: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    given = len(ctx.needs_input_grad)
    if upstream is None:
        return (None,) * given
    steps = _Registered(split.SPLIT_PRODUCTS if may_split(upstream) else TORCH_PRODUCTS, ctx.pair)
    # Saved tensors are read once: activation checkpointing allows no more.
    results = gradients(steps, _wants(ctx), list(ctx.saved_tensors), upstream, False)
    return *results[: given - 1], None


torch.library.register_autograd(swiglu, _gradients, setup_context=_set_up)
torch.library.register_autograd(swiglu_mlp, _gradients, setup_context=_set_up)
