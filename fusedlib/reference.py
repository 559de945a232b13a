"""The truth: the library's operations in a few lines of plain PyTorch, in the dtype of the inputs.

Called with float64 tensors this is what everything is compared with.
"""

from torch import Tensor
from torch.nn.functional import silu


def swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """silu(x Wgᵀ) ⊙ (x Wuᵀ), Shazeer 2020: x (..., hidden), weights (intermediate, hidden)."""
    return silu(x @ w_gate.mT) * (x @ w_up.mT)


def swiglu_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """swiglu(x) Wdᵀ: w_down (hidden, intermediate), result (..., hidden)."""
    return swiglu(x, w_gate, w_up) @ w_down.mT
