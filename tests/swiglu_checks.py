"""Calls of the SwiGLU MLP for tests of what is particular to it; what holds of every operation is
in `tests/laws`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedlib import swiglu_mlp
from study.mlp import SwiGLUProblem, draw

Leaves = tuple[Tensor, ...]  # x, w_gate_up, w_down; of a pair x, w_gate, w_up, w_down
PAIRS = (False, True)  # a packed weight; w_gate and w_up


def small(
    device: str, dtype: str, shape: tuple[int, int, int], pair: bool = False
) -> tuple[Leaves, Tensor]:
    """Leaves, and dy, of tokens, hidden and inner."""
    inputs = draw(SwiGLUProblem(*shape, dtype), device)
    if pair:
        return tuple(inputs.leaves().values()), inputs.dy
    packed = torch.cat([inputs.w_gate, inputs.w_up]).detach().requires_grad_()
    return (inputs.x, packed, inputs.w_down), inputs.dy


def mlp(x: Tensor, *weights: Tensor, save: str = "gate_up") -> Tensor:
    """A call on leaves, in their order."""
    *gate_up, w_down = weights
    return swiglu_mlp(x, gate_up if len(gate_up) == 2 else gate_up[0], w_down, save=save)


def peak_over(step: Callable[[], Sequence[Tensor]]) -> int:
    """Bytes that a step on the GPU takes at most over what is there, once it has run twice.

    Results live until the end: autograd's thread lets go of the last ones when it next gets
    Python's lock, which can be after the bytes that are there were read.
    """
    results = [step() for _ in range(2)]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results.append(step())
    return torch.cuda.max_memory_allocated() - before
