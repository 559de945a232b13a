"""Every kernel that an MLP can need, at any length: listed, and compiled before it is needed.

A layer's kernels depend on its two sizes, the dtype, the card and the class of lengths
(`route.length_class_ends`); of a length they know nothing. `layer_binaries` makes a plan for each
of the classes, as a call would, and the plan lists its launches.
"""

from __future__ import annotations

from collections.abc import Hashable

from fusedlib.launch import PlannedLaunch
from fusedlib.ops.arguments import FEW_TOKENS
from fusedlib.ops.matmul.function import UNBOUNDED_TOKENS
from fusedlib.ops.mlp import route
from fusedlib.ops.mlp.plan import Plan
from fusedlib.ops.mlp.plan_cache import make_plan
from fusedlib.ops.mlp.problem import MLPProblem


def layer_binaries(
    problem: MLPProblem, tokens: range | None = None
) -> dict[Hashable, PlannedLaunch]:
    """The binaries that calls like `problem`, but of so many tokens, can need, by key; None is any.

    Each is named by its way, the most tokens of its class and its step. Operands are contiguous and
    begin at multiples of 16 bytes, as torch's allocator has them; fp32 is multiplied at "highest".
    """
    wanted = tokens or range(1, 1 << 62)
    bounds = route.length_class_ends(problem.device, problem.hidden, problem.inner)
    classes = zip(bounds, (*bounds[1:], wanted.stop - 1), strict=True)
    lengths = [most for least, most in classes if least < wanted.stop - 1 and most >= wanted.start]
    binaries: dict[Hashable, PlannedLaunch] = {}
    for length in lengths:
        tokens_of_class = min(length, UNBOUNDED_TOKENS)
        plan = make_plan(problem._replace(tokens=tokens_of_class, down=True, pair=False))
        bounded = FEW_TOKENS < tokens_of_class < UNBOUNDED_TOKENS
        most = f" up to {tokens_of_class} tokens" if bounded else ""
        for each in plan.launches():
            key = each.launch.binary_key(device_index(problem), *each.matrices)
            named = each._replace(name=f"{plan.path}{most}, {each.name}")
            binaries.setdefault(key, named)
    return binaries


def build_for_training(plan: Plan, save: str) -> None:
    """Have other threads compile what a step needs, while the first of it is compiled here."""
    plan.training_not_built = False
    for each in plan.launches():
        if save in each.trains:
            each.launch.build_ahead(device_index(plan.problem), *each.matrices)


def device_index(problem: MLPProblem) -> int:
    """The number of the GPU that a problem is on."""
    return problem.device.index or 0
