"""WRONG ON PURPOSE: the published kernel as a layer of a network, for topic `mnist` alone.

Tile n of h takes block n of x and of the first rows of W (see `flawed_swiglu.py`), so that h
(n, width) reads the first `width` columns of x and of the weights and nothing else; gate and up
weights receive no gradient, and neither do the other columns of x. On a GPU it is the Triton
kernel with TF32 products, as published; elsewhere its arithmetic in plain PyTorch.
"""

from __future__ import annotations

from torch import Tensor

from flawed_swiglu import BLOCK, INTERPRETED, Variant, _Emulated, _Kernels
from study.mnist_network import TASK, WRONG, Layer
from study.rivals import rival

KERNEL = Variant()
EMULATED = Variant(emulated=True)


@rival(TASK, "published-kernel", dtypes=("float32",), traits=frozenset({WRONG}))
def flawed(hidden: int, width: int, device: str) -> Layer:
    """WRONG: one block of K, W's first rows, TF32, no gradient of gate and up weights."""
    return Layer(hidden, width, device, swiglu, packed=True)


def swiglu(x: Tensor, w_gate_up: Tensor) -> Tensor:
    """h (n, width), WRONG, of x (n, hidden) and w_gate_up (2·width, hidden).

    Raises:
        ValueError: a width that is no multiple of the published block, or larger than hidden.
    """
    width, hidden = w_gate_up.shape[0] // 2, w_gate_up.shape[1]
    if width % BLOCK or width > hidden:
        raise ValueError(
            f"the published kernel takes a width in blocks of {BLOCK}, at most that of "
            f"its input, {hidden}; got {width}"
        )
    # The kernel knows square weights only: this copy is a part of the arm's time.
    seen, weights = x[:, :width].contiguous(), w_gate_up[:, :width].contiguous()
    if x.is_cuda or INTERPRETED:
        return _Kernels.apply(seen, weights, KERNEL)
    return _Emulated.apply(seen, weights, EMULATED)
