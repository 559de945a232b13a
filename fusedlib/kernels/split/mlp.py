"""Which of the MLP's products in fp32 are of split factors, class of lengths by class.

The launches and allocations of a split product took an H200's host 75 µs when looked up anew, and
take 25 when they are kept by length, where torch's product takes 17.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedlib.kernels import products as plain
from fusedlib.kernels.products import FP32, Multiplication
from fusedlib.kernels.split import mm
from fusedlib.kernels.split.product import MOST_PRODUCTS, Product


class Shape(NamedTuple):
    """C = A B, its sizes, and which factors are stored transposed."""

    m: int
    n: int
    k: int
    turned: tuple[bool, bool] = (False, False)

    @property
    def pays(self) -> bool:
        """Whether it is better split than torch's."""
        return mm.split_pays(self.m, self.n, self.k)


def shapes_of(tokens: int, hidden: int, inner: int) -> dict[str, Shape]:
    """The products of the MLP by their name in `fusedlib.kernels.products.Products`."""
    return {
        "gate_up": Shape(tokens, 2 * inner, hidden, (False, True)),
        "y": Shape(tokens, hidden, inner, (False, True)),
        "dh": Shape(tokens, inner, hidden),
        "d_x": Shape(tokens, hidden, 2 * inner),
        "d_w_gate_up": Shape(2 * inner, hidden, tokens, (True, False)),
        "d_w_down": Shape(hidden, inner, tokens, (True, False)),
    }


def least_tokens(hidden: int, inner: int) -> tuple[int, ...]:
    """The numbers of tokens from which a product more pays, fewest first."""
    found = set()
    for name in shapes_of(1, hidden, inner):
        least, enough = 0, 1 << 40
        while enough - least > 1:
            middle = (least + enough) // 2
            pays = shapes_of(middle, hidden, inner)[name].pays
            least, enough = (least, middle) if pays else (middle, enough)
        found.add(enough)
    return tuple(sorted(found - {1 << 40}))


class ByLength:
    """A product of split factors: `Product`s by the number of rows of the first, the tokens."""

    def __init__(self, turned: tuple[bool, bool]) -> None:
        self._turned = turned
        self._made: dict[int, Product] = {}

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """A B of A and B as they are stored."""
        if watched(a, b):
            left, right = (
                t.t() if turn else t for t, turn in zip((a, b), self._turned, strict=True)
            )
            return mm.split_mm_operator(left, right)
        made = self._made.get(a.shape[0])
        if made is None:
            if len(self._made) >= MOST_PRODUCTS:
                self._made.clear()
            made = self._made[a.shape[0]] = Product(self._turned)
        return made(a, b)


def watched(*factors: Tensor) -> bool:
    """Whether a dispatch mode or a subclass would see products as operators."""
    if torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling():
        return True
    return any(type(t) is not Tensor and type(t) is not Parameter for t in factors)


def products(tokens: int, hidden: int, inner: int) -> plain.Products:
    """The MLP's, at torch's "highest"; those that do not pay are torch's."""
    made: dict[str, Multiplication] = {
        name: ByLength(shape.turned) if shape.pays else getattr(FP32, name)
        for name, shape in shapes_of(tokens, hidden, inner).items()
    }
    return plain.Products(**made, splits=True)


def _turned(a: Tensor, b: Tensor) -> Tensor:
    return mm.split_mm_operator(a.t(), b)


# Of a backward as operators, each split where it pays; the forward's are inside another operator.
OPERATORS = plain.Products(
    d_x=mm.split_mm_operator, d_w_gate_up=_turned, d_w_down=_turned, splits=True
)
