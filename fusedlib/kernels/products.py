"""The plain products of the MLP by torch, and the order of a backward's: d_w_down first or last.

After dh and its epilogue a pass holds d(gate|up), 2·F, and h, F (F = tokens·inner, D =
tokens·hidden, W = hidden·inner elements). Before, h is gone when d_x and d_w_gate_up come, D + 2·W,
but d_w_down, W, is there; after, the other way round, and d(gate|up) is gone when d_w_down comes:

    before    2 F + W + max(F, D + 2 W)          after    F + D + 2 W + max(2 F, W)

So few tokens for their width want it last: at 4096·8192·28672 in bf16 1856 and 1632 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Wants = tuple[bool, bool, bool]
Multiplication = Callable[[Tensor, Tensor], Tensor]


def matrix(tensor: Tensor) -> Tensor:
    """(tokens, width) of (..., width), contiguous."""
    if tensor.ndim == 2:
        return tensor
    return tensor.view(tensor.shape[:-1].numel(), tensor.shape[-1])


def turned(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b."""
    return torch.mm(a.t(), b)


def halves(x: Tensor, w_gate_up: Tensor) -> Tensor:
    """gate|up (tokens, 2·inner) in fp32, as two products.

    Over packed weights cuBLAS's TF32 took 3 % longer than Liger's two products and kernel at
    4096·4096 (H200, torch 2.11), and its IEEE product erred 1.3 times more at 256·4096.
    """
    tokens, wide = x.shape[0], w_gate_up.shape[0]
    if wide % 8:  # halves that do not begin at 16 bytes would be slower than what is gained
        return linear(x, w_gate_up)
    both = x.new_empty((tokens, wide))
    for rows, columns in zip(w_gate_up.chunk(2), both.chunk(2, dim=1), strict=True):
        torch.mm(x, rows.t(), out=columns)
    return both


@dataclass
class Products:
    """All six, each of two matrices as they are stored: tokens come first, then outputs.

    `splits`: some split their factors, so that parts as large as both are held meanwhile.
    """

    gate_up: Multiplication = linear
    y: Multiplication = linear
    dh: Multiplication = torch.mm
    d_x: Multiplication = torch.mm
    d_w_gate_up: Multiplication = turned
    d_w_down: Multiplication = turned
    splits: bool = False

    def output(self, h: Tensor, w_down: Tensor, like: Tensor) -> Tensor:
        """y = h Wdᵀ, of like's shape."""
        y = self.y(h, w_down)
        # In place: autograd lets nobody write to a view that a Function returns.
        return y if like.ndim == 2 else y.resize_(like.shape)

    def gradients(
        self, wants: Wants, held: list[Tensor | None], upstream: Tensor, x: Tensor | None,
        w_gate_up: Tensor | None,
    ) -> Gradients:  # fmt: skip
        """Those of d_x, d_w_gate_up and d_w_down that are wanted, in the order that holds less.

        `held` is h and d(gate|up), taken out of the list and released when their products are done.
        """
        d_gate_up, h = held.pop(), held.pop()
        d_x = d_w_gate_up = d_w_down = None
        rows = matrix(upstream)
        tokens, hidden = rows.shape
        if h is not None and not down_last(tokens, hidden, h.shape[1], wants, splits=self.splits):
            d_w_down = self.d_w_down(rows, h)
            h = None  # before the next products allocate
        if wants[0]:
            assert d_gate_up is not None and w_gate_up is not None
            d_x = self.d_x(d_gate_up, w_gate_up)
            if upstream.ndim != 2:
                d_x = d_x.view(*upstream.shape[:-1], w_gate_up.shape[1])
        if wants[1]:
            assert d_gate_up is not None and x is not None
            d_w_gate_up = self.d_w_gate_up(d_gate_up, matrix(x))
        d_gate_up = None
        if h is not None:
            d_w_down = self.d_w_down(rows, h)
        return d_x, d_w_gate_up, d_w_down


TORCH = Products()
FP32 = Products(gate_up=halves)


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
