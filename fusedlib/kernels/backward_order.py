"""The plain products of a backward pass, d_w_down before the others or after them.

After dh and its epilogue a pass holds d(gate|up), 2·F, and h, F (F = tokens·inner, D =
tokens·hidden, W = hidden·inner elements). Before, h is gone when d_x and d_w_gate_up come, D + 2·W,
but d_w_down, W, is there; after, the other way round, and d(gate|up) is gone when d_w_down comes:

    before    2 F + W + max(F, D + 2 W)          after    F + D + 2 W + max(2 F, W)

So few tokens for their width want it last: at 4096·8192·28672 in bf16 1856 and 1632 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedlib.kernels.swiglu_calls import _splits, product
from fusedlib.kernels.swiglu_configs import precision_of

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Wants = tuple[bool, bool, bool]


Multiplication = Callable[[Tensor, Tensor], Tensor]


class Multiply(NamedTuple):
    """The three products: of d(gate|up) and Wgu, of d(gate|up)ᵀ and x, of dyᵀ and h.

    Each takes its factors as they are stored, none turned.
    """

    d_x: Multiplication
    d_w_gate_up: Multiplication
    d_w_down: Multiplication


def _turned(a: Tensor, b: Tensor) -> Tensor:
    return product(a.t(), b)


PLAIN = Multiply(product, _turned, _turned)


def products(
    wants: Wants, held: list[Tensor | None], upstream: Tensor, x: Tensor | None,
    w_gate_up: Tensor | None, multiply: Multiply = PLAIN,
) -> Gradients:  # fmt: skip
    """The wanted ones of d_x, d_w_gate_up and d_w_down, in the order that holds less.

    `held` is h and d(gate|up), taken out of the list and released when their products are done.
    """
    d_gate_up, h = held.pop(), held.pop()
    d_x = d_w_gate_up = d_w_down = None
    tokens, hidden = upstream.shape
    splits = _splits(upstream) and precision_of(upstream) == "ieee"
    if h is not None and not down_last(tokens, hidden, h.shape[1], wants, splits=splits):
        d_w_down = multiply.d_w_down(upstream, h)
        h = None  # before the next products allocate
    if wants[0]:
        assert d_gate_up is not None and w_gate_up is not None
        d_x = multiply.d_x(d_gate_up, w_gate_up)
    if wants[1]:
        assert d_gate_up is not None and x is not None
        d_w_gate_up = multiply.d_w_gate_up(d_gate_up, x)
    d_gate_up = None
    if h is not None:
        d_w_down = multiply.d_w_down(upstream, h)
    return d_x, d_w_gate_up, d_w_down


def down_last(
    tokens: int, hidden: int, inner: int, wants: Wants, *, splits: bool = False
) -> bool:  # fmt: skip
    """Whether less is held with d_w_down last; `wants` are d_x, d_w_gate_up, d_w_down.

    If a product `splits` its factors, parts as large as both are held meanwhile. Of symbolic sizes
    those decide that torch.compile has seen: a graph compiled again for another order would cost
    more than the order saves.
    """
    tokens, hidden, inner = map(_seen, (tokens, hidden, inner))
    f, d, w = tokens * inner, tokens * hidden, hidden * inner
    results = wants[0] * d + wants[1] * 2 * w
    down, others = f + w, 2 * f + results
    if splits:
        down += f + d
        others = 2 * f + max(wants[0] * (2 * f + 2 * w + d), wants[1] * (2 * f + d + results))
    return max(f + others, results + down) < max(2 * f + down, w + others)


def _seen(size: Any) -> int:
    """The number itself, or the one that a symbol stood for where it was traced."""
    found = size.node.hint if isinstance(size, torch.SymInt) else size
    return 1 << 20 if found is None else int(found)
