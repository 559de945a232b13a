"""The SwiGLU MLP in fp32 on tensor cores, forward and backward, every product from split factors.

    gate|up = x Wguᵀ    h = silu(gate) ⊙ up    y = h Wdᵀ
    dh = dy Wd          d_Wd = dyᵀ h           d_x = d_gate|up Wgu    d_Wgu = d_gate|upᵀ x

Of tokens t, hidden d and inner f the products take 6tdf multiply-adds' worth of FLOPs forward and
12tdf backward, thrice on the tensor cores. A split moves 8 bytes an element: of both weights once
forward and once backward, of x, h, dy and d_gate|up where their product stands. dy, d_gate|up are
split once for both of their products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedlib.kernels.split import Split, split
from fusedlib.kernels.split_product import split_pays, split_product
from fusedlib.kernels.swiglu_calls import unchecked_bwd
from fusedlib.kernels.swiglu_configs import precision_of


def split_mlp_fwd(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> tuple[Tensor, Tensor]:
    """y (tokens, hidden) and gate|up (tokens, 2·inner), fp32.

    Args:
        x: (tokens, hidden) fp32, any strides.
        w_gate_up: (2·inner, hidden), likewise.
        w_down: (hidden, inner), likewise.

    Raises:
        ValueError: dtypes or sizes that do not fit.
    """
    h, gate_up = split_swiglu_fwd(x, w_gate_up)
    return split_product(split(h), split(w_down), transpose_b=True), gate_up


def split_swiglu_fwd(x: Tensor, w_gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """h (tokens, inner) and gate|up (tokens, 2·inner), fp32, of operands as `split_mlp_fwd` has."""
    gate_up = split_product(split(x), split(w_gate_up), transpose_b=True)
    _, h = unchecked_bwd(None, None, gate_up, True, False)
    assert h is not None
    return h, gate_up


def split_mlp_bwd(
    dy: Tensor, x: Tensor | None, w_gate_up: Tensor | None, w_down: Tensor | None, gate_up: Tensor,
    wants: tuple[bool, bool, bool] = (True, True, True), *, in_place: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """d_x, d_w_gate_up and d_w_down, fp32, each if wanted.

    Args:
        dy: (tokens, hidden) fp32, any strides.
        x: wanted for d_w_gate_up.
        w_gate_up: wanted for d_x.
        w_down: wanted for either.
        gate_up: (tokens, 2·inner), contiguous, from the forward.
        wants: which of the three gradients.
        in_place: gate_up may be overwritten.

    Raises:
        ValueError: dtypes or sizes that do not fit, or an operand that a wanted gradient lacks.
    """
    wants_x, wants_w_gate_up, wants_w_down = wants
    lacking = (wants_w_gate_up and x is None, wants_x and w_gate_up is None,
               (wants_x or wants_w_gate_up) and w_down is None)  # fmt: skip
    if any(lacking):
        raise ValueError(f"gradients {wants} want x, w_gate_up, w_down; lacking: {lacking}")
    upstream = split(dy)
    dh = split_product(upstream, split(w_down)) if wants_x or wants_w_gate_up else None  # type: ignore[arg-type]
    d_gate_up, h = unchecked_bwd(dh, None, gate_up, wants_w_down, in_place)
    del dh  # before the next products allocate
    d_w_down = None
    if h is not None:
        d_w_down = split_product(upstream, split(h), transpose_a=True)
    del h, upstream
    if d_gate_up is None:
        return None, None, d_w_down
    return *_gradients_of_inputs(split(d_gate_up), x, w_gate_up, wants), d_w_down


def split_bwd_pays(dy: Tensor, gate_up: Tensor) -> bool:
    """Whether all products of a backward pass are better split, so that they can share splits."""
    tokens, hidden, inner = *dy.shape, gate_up.shape[1] // 2
    wanted = dy.dtype == torch.float32 and dy.is_cuda and precision_of(dy) == "ieee"
    return wanted and split_pays(tokens, inner, hidden) and split_pays(hidden, inner, tokens)


def _gradients_of_inputs(
    upstream: Split, x: Tensor | None, w_gate_up: Tensor | None, wants: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    d_x = d_w_gate_up = None
    if wants[0] and w_gate_up is not None:
        d_x = split_product(upstream, split(w_gate_up))
    if wants[1] and x is not None:
        d_w_gate_up = split_product(upstream, split(x), transpose_a=True)
    return d_x, d_w_gate_up
