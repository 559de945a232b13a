"""What is left to torch.compile."""

from __future__ import annotations

import torch

from fusedlib.kernels.swiglu_configs import FEW_TOKENS


def left_to_compiler(rows: int) -> bool:
    """Whether a compiler shall have the formula of a norm or a rotation of so few tokens.

    It joins them with what is beside them and launches the kernel itself; an operator is called by
    way of Python, 90 µs a call longer (one H200, Inductor, one token), where the kernel takes 2. A
    number of rows that the compiler keeps open is not few, and gets no guard.
    """
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(rows <= FEW_TOKENS)
