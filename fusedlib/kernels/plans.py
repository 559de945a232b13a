"""Which plan a call of the MLP gets: for few tokens, on cuBLAS's products, of split fp32, or none.

A plan takes sizes that are multiples of 16, contiguous operands at 16-byte aligned addresses; fp32
only where some product is split. Anything else, and sizes at which the device hides what the host
does, go by `fusedlib.kernels.swiglu_calls`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedlib.kernels import swiglu_calls
from fusedlib.kernels.cublas_plan import CublasPlan
from fusedlib.kernels.few_tokens_plan import Plan
from fusedlib.kernels.split.plan import SplitPlan, some_split
from fusedlib.kernels.swiglu_calls import BACKWARD_N
from fusedlib.kernels.swiglu_configs import ALIGNMENT, FEW_TOKENS, precision_of

MOST_PLANS = 1024  # kept; varying sequence lengths make one each
DTYPES = (torch.bfloat16, torch.float16)


def plan_of(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Plan | None:
    """A plan for operands that are known to go together, or None where none would take them."""
    hidden, inner = w_down.shape
    even = hidden > 0 and inner > 0 and not hidden % ALIGNMENT and not inner % ALIGNMENT
    if not even or not x.numel():
        return None
    tokens = x.numel() // hidden
    if swiglu_calls._splits(x):
        if precision_of(x) != "ieee" or not some_split(tokens, hidden, inner):
            return None
        plan: Plan = SplitPlan(x, w_gate_up, w_down)
    elif x.dtype not in DTYPES:
        return None
    elif tokens <= FEW_TOKENS:
        plan = Plan(x, w_gate_up, w_down)
    elif swiglu_calls._apart(x, tokens, inner, BACKWARD_N):
        plan = CublasPlan(x, w_gate_up, w_down)
    else:
        return None
    return plan if plan.fits(x, w_gate_up, w_down) else None
