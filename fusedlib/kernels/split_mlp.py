"""The gradients of the SwiGLU MLP in fp32 on tensor cores, every product from split factors.

    dh = dy Wd          d_Wd = dyᵀ h           d_x = d_gate|up Wgu    d_Wgu = d_gate|upᵀ x

Of tokens t, hidden d and inner f the products take 12tdf multiply-adds' worth of FLOPs, thrice on
the tensor cores. A split moves 8 bytes an element: of both weights, of x, h, dy and d_gate|up where
their product stands. dy and d_gate|up are split once for both of their products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedlib.kernels.backward_order import split_down_last
from fusedlib.kernels.split import split
from fusedlib.kernels.split_product import split_pays, split_product
from fusedlib.kernels.swiglu_calls import unchecked_bwd
from fusedlib.kernels.swiglu_configs import precision_of

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def split_mlp_bwd(
    dy: Tensor, x: Tensor | None, w_gate_up: Tensor | None, w_down: Tensor | None, gate_up: Tensor,
    wants: tuple[bool, bool, bool] = (True, True, True), *, in_place: bool = False,
) -> Gradients:  # fmt: skip
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
    dh = None
    if wants_x or wants_w_gate_up:
        assert w_down is not None
        upstream, down = split(dy, w_down)
        dh = split_product(upstream, down)
        del down  # before the next products allocate, as below
    else:
        [upstream] = split(dy)
    d_gate_up, h = unchecked_bwd(dh, None, gate_up, wants_w_down, in_place)
    tokens, hidden, inner = *dy.shape, gate_up.shape[1] // 2
    del dh, gate_up
    d_x = d_w_gate_up = d_w_down = None
    if h is not None and not split_down_last(tokens, hidden, inner, wants):
        d_w_down = split_product(upstream, *split(h), transpose_a=True)
        h = None
        del upstream
    if d_gate_up is not None:
        d_x, d_w_gate_up = _gradients_of_inputs(d_gate_up, x, w_gate_up, wants)
        d_gate_up = None
    if h is not None:
        d_w_down = split_product(upstream, *split(h), transpose_a=True)
    return d_x, d_w_gate_up, d_w_down


def split_bwd_pays(dy: Tensor, gate_up: Tensor) -> bool:
    """Whether all products of a backward pass are better split, so that they can share splits."""
    tokens, hidden, inner = *dy.shape, gate_up.shape[1] // 2
    if dy.dtype != torch.float32 or not dy.is_cuda or precision_of(dy) != "ieee":
        return False
    sizes = (tokens, inner, hidden), (hidden, inner, tokens), (tokens, hidden, 2 * inner)
    return all(split_pays(*each) for each in sizes)


def _gradients_of_inputs(
    d_gate_up: Tensor, x: Tensor | None, w_gate_up: Tensor | None, wants: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    d_x, of_gate_up = None, None
    if wants[0] and w_gate_up is not None:
        of_gate_up, weight = split(d_gate_up, w_gate_up)
        d_x = split_product(of_gate_up, weight)
        del weight
    if not wants[1] or x is None:
        return d_x, None
    if of_gate_up is None:
        of_gate_up, of_x = split(d_gate_up, x)
    else:
        [of_x] = split(x)
    return d_x, split_product(of_gate_up, of_x, transpose_a=True)
