"""Which plan a call of the MLP gets: for few tokens, on cuBLAS's products, or none.

A plan takes fp16 and bf16, sizes that are multiples of 16, contiguous operands at 16-byte aligned
addresses. Anything else, and sizes at which the device hides what the host does, go by
`fusedlib.kernels.swiglu_calls`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedlib.kernels import swiglu_calls
from fusedlib.kernels.cublas_plan import CublasPlan
from fusedlib.kernels.few_tokens_plan import Plan
from fusedlib.kernels.swiglu_calls import BACKWARD_N, FORWARD_N
from fusedlib.kernels.swiglu_configs import ALIGNMENT, FEW_TOKENS, architecture

MOST_PLANS = 1024  # kept; varying sequence lengths make one each
# Elements of w_down up to which the kernels for few tokens are faster than cuBLAS's on an H200.
WIDEST = 2**28
DTYPES = (torch.bfloat16, torch.float16)


def plan_of(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Plan | None:
    """A plan for operands that are known to go together, or None where none would take them."""
    hidden, inner = w_down.shape
    even = hidden > 0 and inner > 0 and not hidden % ALIGNMENT and not inner % ALIGNMENT
    if not even or x.dtype not in DTYPES or not x.numel():
        return None
    tokens, operands = x.numel() // hidden, (x, w_gate_up, w_down)
    if tokens <= FEW_TOKENS:
        wide = _wide(x, hidden * inner)
        plan = CublasPlan(*operands, fused_forward=False) if wide else Plan(*operands)
    elif swiglu_calls._apart(x, tokens, inner, BACKWARD_N):
        fused_forward = not swiglu_calls._apart(x, tokens, inner, FORWARD_N)
        plan = CublasPlan(*operands, fused_forward=fused_forward)
    else:
        return None
    return plan if plan.fits(*operands) else None


def _wide(like: Tensor, weight: int) -> bool:
    """Whether cuBLAS reads and writes weights of so many elements faster, few tokens or not."""
    return weight > WIDEST and like.is_cuda and architecture(like.device) == 90
