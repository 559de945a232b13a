"""The plain matrix products of an MLP, and the order in which backward computes them.

After dh and its epilogue a pass holds d(gate|up), 2·F, and h, F (F = tokens·inner, D =
tokens·hidden, W = hidden·inner elements). With d_w_down first, h is gone when d_x and d_w_gate_up
come, D + 2·W, but d_w_down, W, is there; with d_w_down last, d(gate|up) is gone when it comes:

    first    2 F + W + max(F, D + 2 W)          last    F + D + 2 W + max(2 F, W)

So few tokens for their width want it last: at 4096·8192·28672 in bf16 1856 and 1632 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusedlib.launch import PlannedLaunch, contiguous_layout, without_memory
from fusedlib.ops.matmul.function import (
    SplitProduct,
    multiply,
    splits,
    sum_of_products,
)
from fusedlib.ops.mlp.route import Gradients, MLPProblem, WantedGradients

EITHER_SAVE = "gate_up", "input"
SAVES_GATE_UP, SAVES_INPUT = EITHER_SAVE[:1], EITHER_SAVE[1:]

Multiplication = Callable[[Tensor, Tensor], Tensor]
# Of a matrix with w_gate and w_up, or with a packed weight and None.
GateUpMultiplication = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def as_matrix(tensor: Tensor) -> Tensor:
    """(tokens, width) of (..., width), contiguous."""
    if tensor.ndim == 2:
        return tensor
    return tensor.view(tensor.shape[:-1].numel(), tensor.shape[-1])


def transposed_mm(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b."""
    return torch.mm(a.t(), b)


def gate_up(x: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
    """gate|up (tokens, 2·inner); a pair is two products, each written to its columns."""
    if w_up is None:
        return linear(x, w_gate)
    both = x.new_empty((x.shape[0], 2 * w_gate.shape[0]))
    for weight, columns in zip((w_gate, w_up), both.chunk(2, dim=1), strict=True):
        torch.mm(x, weight.t(), out=columns)
    return both


def gate_up_by_two_products(x: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
    """gate|up (tokens, 2·inner) in fp32, by two products for a packed weight too.

    Over packed weights cuBLAS's TF32 took 3 % longer than Liger's two products and kernel at
    4096·4096 (H200, torch 2.11), and its IEEE product erred 1.3 times more at 256·4096.
    """
    # Halves that do not begin at 16 bytes would be slower than what is gained.
    if w_up is None and w_gate.shape[0] % 8 == 0:
        w_gate, w_up = w_gate.chunk(2)
    return gate_up(x, w_gate, w_up)


def d_x(d_gate_up: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
    """d_x = d_gate|up Wgu; for a pair d_gate Wg is rounded, and d_up Wu added to it.

    On an H100 that took 1.5 to 4 % longer than the one product; packing the weights takes more.
    """
    if w_up is None:
        return torch.mm(d_gate_up, w_gate)
    d_gate, d_up = d_gate_up.chunk(2, dim=1)
    return sum_of_products([(d_gate, w_gate), (d_up, w_up)])


@dataclass(eq=False)
class Products:
    """An implementation of the six plain matrix products.

    Each multiplies two matrices as they are stored: rows are tokens, or outputs for a weight. With
    `splits` some split their factors, and hold parts as large as both meanwhile.
    """

    gate_up: GateUpMultiplication = gate_up
    y: Multiplication = linear
    dh: Multiplication = torch.mm
    d_x: GateUpMultiplication = d_x
    d_w_gate_up: Multiplication = transposed_mm
    d_w_down: Multiplication = transposed_mm
    splits: bool = False

    def launches(self, problem: MLPProblem) -> Iterator[PlannedLaunch]:
        """The launches of ours that these products of a problem can need: none of torch's."""
        return iter(())

    def output(self, h: Tensor, w_down: Tensor, like: Tensor) -> Tensor:
        """y = h Wdᵀ, of like's shape."""
        y = self.y(h, w_down)
        # In place: autograd lets nobody write to a view that a Function returns.
        return y if like.ndim == 2 else y.resize_(like.shape)

    def gradients(
        self, wants: WantedGradients, pair: bool, buffers: list[Tensor | None], upstream: Tensor,
        x: Tensor | None, w_gate: Tensor | None, w_up: Tensor | None,
    ) -> Gradients:  # fmt: skip
        """The wanted ones of d_x, d_w_gate_up and d_w_down, in the order of less memory.

        d_w_gate_up has the rows of both weights of a pair, or of the one whose gradient is wanted.
        `buffers` holds h and d(gate|up); each leaves the list and is released after its products.
        """
        d_gate_up, h = buffers.pop(), buffers.pop()
        d_x = d_w_gate_up = d_w_down = None
        rows = as_matrix(upstream)
        tokens, hidden = rows.shape
        if h is not None and not is_d_w_down_last(
            tokens, hidden, h.shape[1], wants, splits=self.splits
        ):
            d_w_down = self.d_w_down(rows, h)
            h = None  # before the next products allocate
        if wants[0]:
            assert d_gate_up is not None and w_gate is not None
            d_x = self.d_x(d_gate_up, w_gate, w_up)
            if upstream.ndim != 2:
                d_x = d_x.view(*upstream.shape[:-1], w_gate.shape[1])
        if wants[1] or wants[2]:
            assert d_gate_up is not None and x is not None
            inner = d_gate_up.shape[1] // 2
            if pair and not (wants[1] and wants[2]):
                d_gate_up = d_gate_up[:, :inner] if wants[1] else d_gate_up[:, inner:]
            d_w_gate_up = self.d_w_gate_up(d_gate_up, as_matrix(x))
        d_gate_up = None
        if h is not None:
            d_w_down = self.d_w_down(rows, h)
        return d_x, d_w_gate_up, d_w_down


TORCH_PRODUCTS = Products()
TORCH_FP32_PRODUCTS = Products(gate_up=gate_up_by_two_products)


def is_d_w_down_last(
    tokens: int, hidden: int, inner: int, wants: WantedGradients, *, splits: bool = False
) -> bool:  # fmt: skip
    """True if backward holds less memory with d_w_down computed last.

    One of a pair's gradients counts as both, which never changes the order. A product that `splits`
    its factors holds parts as large as both meanwhile.
    """
    f, d, w = tokens * inner, tokens * hidden, hidden * inner
    wants_gate_up = wants[1] or wants[2]
    results = wants[0] * d + wants_gate_up * 2 * w
    down, others = f + w, 2 * f + results
    if splits:
        down += f + d
        for_d_x = wants[0] * (2 * f + 2 * w + d)
        for_d_weights = wants_gate_up * (2 * f + d + results)
        others = 2 * f + max(for_d_x, for_d_weights)
    return max(f + others, results + down) < max(2 * f + down, w + others)


# --- products of split factors, in fp32 at torch's "highest" -------------------------------------


def _split_y(h: Tensor, w_down: Tensor) -> Tensor:
    return multiply(h, w_down, (False, True))


def _split_d_weight(upstream: Tensor, rows: Tensor) -> Tensor:
    return multiply(upstream, rows, (True, False))


# A pair is split as one matrix, so that its product has the bits of a packed weight's.


def _split_gate_up(x: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
    if not splits(x, w_gate, (False, True), w_up):
        return TORCH_FP32_PRODUCTS.gate_up(x, w_gate, w_up)
    return multiply(x, w_gate, (False, True), lower_half=w_up)


def _split_d_x(d_gate_up: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
    if not splits(d_gate_up, w_gate):
        return TORCH_FP32_PRODUCTS.d_x(d_gate_up, w_gate, w_up)
    return multiply(d_gate_up, w_gate, lower_half=w_up)


class SplitProducts(Products):
    """Products of an MLP in fp32 at "highest"."""

    def launches(self, problem: MLPProblem) -> Iterator[PlannedLaunch]:
        """The launches of the six products of an MLP, as if all of them were split."""
        tokens, hidden, inner = problem.sizes
        sizes = (tokens, hidden), (tokens, inner), (tokens, 2 * inner), (2 * inner, hidden)
        layouts = [contiguous_layout(size, problem.dtype) for size in (*sizes, (hidden, inner))]
        x, h, gate_up, w_gate_up, w_down = without_memory(*layouts)
        for rows, upstream, weight in ((x, gate_up, w_gate_up), (h, x, w_down)):
            forms = {"y": (rows, weight, (False, True)), "d_x": (upstream, weight, (False, False)),
                     "d_w": (upstream, rows, (True, False))}  # fmt: skip
            for name, (a, b, turned) in forms.items():
                product = SplitProduct(problem.device, a, b, turned, False)
                for launch, matrices in product.launches(a, b):
                    kernel = launch.kernel.fn.__name__.strip("_").removesuffix("_kernel")
                    words = f"{kernel.replace('_', ' ')} of {name}"
                    yield PlannedLaunch(words, EITHER_SAVE, launch, matrices)


SPLIT_PRODUCTS = SplitProducts(
    _split_gate_up, _split_y, multiply, _split_d_x, _split_d_weight, _split_d_weight, splits=True
)
