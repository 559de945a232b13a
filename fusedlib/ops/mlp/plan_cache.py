"""The plan of a call of the MLP, kept for all calls that go the same way.

A plan belongs to a class of lengths, all that take one route with the same products. What a call
needs is decided by `route`; here it is looked up. Importing this module imports no Triton.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedlib.compat import is_transform_wrapper, is_transformed
from fusedlib.launch import BoundedCache
from fusedlib.ops.matmul import function as linear_route
from fusedlib.ops.matmul.function import fp32_precision
from fusedlib.ops.mlp import route
from fusedlib.ops.mlp.problem import MLPProblem

if TYPE_CHECKING:
    from fusedlib.ops.mlp.plan import Plan

_PLANS: BoundedCache[Plan] = BoundedCache()


def forget() -> None:
    """Make all plans anew: after a change of `fusedlib.tuning`."""
    _PLANS.clear()


def lookup_plan(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None = None,
    activation: str = "silu",
) -> Plan | None:  # fmt: skip
    """The plan that `plan_for` gave operands like these before, or None.

    Nothing is checked, for it was then: at few tokens the checks cost as much as a launch.
    """
    if w_gate.ndim != 2:
        return None
    wide, hidden = w_gate.shape
    if w_up is not None:
        wide *= 2
    # Small fp32, where looking costs 7 % of PyTorch's own forward of 64·512.
    least = 2 * linear_route.MIN_SPLIT_WORK
    if x.dtype not in route.FUSED_KERNEL_DTYPES and x.numel() * wide < least:
        return None
    if not hidden or not x.ndim or x.shape[-1] != hidden:
        return None
    plan = _PLANS.get(_plan_key(x, w_gate, w_up, w_down, wide, hidden, activation))
    if plan is None or is_transformed():
        return None
    # A wrapper that is left over from a transform has no address.
    if is_transform_wrapper(x) or is_transform_wrapper(w_gate):
        return None
    if w_down is not None and is_transform_wrapper(w_down):
        return None
    return None if w_up is not None and is_transform_wrapper(w_up) else plan


def plan_for(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None = None,
    activation: str = "silu",
) -> Plan:  # fmt: skip
    """The plan for operands that go together and that the kernels run for, in autocast's dtype.

    Args:
        x: (..., hidden).
        w_gate: (inner, hidden), or packed (2·inner, hidden).
        w_up: (inner, hidden); None where w_gate is packed.
        w_down: (hidden, inner), or None for h alone.
        activation: of gate.
    """
    key = _plan_key(x, w_gate, w_up, w_down, *route.weight_sizes(w_gate, w_up), activation)
    plan = _PLANS.get(key)
    if plan is None:
        problem = route.problem_of(x, w_gate, w_up, w_down is not None, activation)
        plan = _PLANS[key] = make_plan(problem)
    return plan


def plan_of_sizes(
    like: Tensor, hidden: int, inner: int, down: bool, pair: bool, activation: str
) -> Plan:
    """The plan for operands of these sizes and as many rows, the dtype and the device of a matrix.

    Args:
        like: (tokens, width).
        hidden: columns of x.
        inner: columns of h.
        down: there is a down projection.
        pair: gate and up have a weight each.
        activation: of gate.
    """
    sizes = like.shape[0], hidden, inner
    problem = MLPProblem(
        like.device, like.dtype, fp32_precision(like), *sizes, down, pair, activation
    )
    key = problem._replace(tokens=route.length_class(like, *sizes))
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS[key] = make_plan(problem)
    return plan


def plan_at_current_precision(plan: Plan, like: Tensor) -> Plan:
    """The plan, or a new one if torch's fp32 precision was changed since it was made."""
    precision, problem = fp32_precision(like), plan.problem
    if precision == problem.precision:
        return plan
    return make_plan(problem._replace(precision=precision))


def make_plan(problem: MLPProblem) -> Plan:
    """A new plan; imports Triton, which need not be installed for all else here."""
    from fusedlib.ops.mlp import few_tokens, products, split_products
    from fusedlib.ops.mlp.plan import Plan

    chosen = route.choose_route(problem)
    if chosen.few:
        return Plan(problem, chosen, few_tokens.Products(problem))
    if chosen.split:
        return Plan(problem, chosen, split_products.SPLIT_PRODUCTS)
    if problem.dtype == torch.float32:
        return Plan(problem, chosen, products.TORCH_FP32_PRODUCTS)
    return Plan(problem, chosen, products.TORCH_PRODUCTS)


def _plan_key(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None, wide: int, hidden: int,
    activation: str,
) -> Hashable:  # fmt: skip
    dtype, device = x.dtype, x.device
    tokens = route.length_class(x, route.count_tokens(x, hidden), hidden, wide // 2)
    up = None if w_up is None else (w_up.shape, w_up.dtype, w_up.device)
    down = None if w_down is None else (w_down.shape, w_down.dtype, w_down.device)
    gate = w_gate.dtype, w_gate.device
    return activation, tokens, wide, hidden, dtype, device, gate, up, down
