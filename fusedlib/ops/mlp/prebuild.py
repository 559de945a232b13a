"""Every kernel that an MLP can need, at any length: listed, and compiled before it is needed.

A layer's kernels depend on its two sizes, the dtype, the card and the class of lengths
(`route.length_class_ends`); of a length they know nothing. `layer_binaries` goes through the
classes as a call would, with operands that have a shape and no memory, so that launches are only
listed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

from fusedlib.launch.launch import Launch
from fusedlib.ops.arguments import FEW_TOKENS
from fusedlib.ops.linear.route import UNBOUNDED_TOKENS
from fusedlib.ops.mlp import few_tokens, route
from fusedlib.ops.mlp.plan import Plan
from fusedlib.ops.mlp.problem import MLPProblem
from fusedlib.ops.mlp.products import Products


@dataclass(frozen=True)
class FakeMatrix:
    """A contiguous matrix on a GPU without memory, which a plan and its launches take for one.

    A launch whose first matrix it is appends itself and all its matrices to `recorded_launches`.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    recorded_launches: list[Any]
    ndim = 2
    is_cuda = True

    def numel(self) -> int:
        """How many elements there are."""
        return self.shape[0] * self.shape[1]

    def stride(self, dimension: int | None = None) -> Any:
        """Elements from one row to the next, from one column to the next."""
        strides = self.shape[1], 1
        return strides if dimension is None else strides[dimension]

    def data_ptr(self) -> int:
        """A multiple of 16."""
        return 0

    def get_device(self) -> int:
        """The device's number."""
        return self.device.index or 0


@dataclass(frozen=True)
class NeededBinary:
    """A binary that a layer can need.

    Attributes:
        name: way, the most tokens of its class and step, to read.
        launch: one of those that start it.
        matrices: what that takes, without memory.
        trains: for which `save` eager training needs it, with gradients of x and of all weights.
    """

    name: str
    launch: Launch
    matrices: tuple[Tensor, ...]
    trains: tuple[str, ...]

    @property
    def key(self) -> Hashable:
        """The key of all that it is compiled for."""
        return self.launch.binary_key(*self.matrices)


def layer_binaries(
    problem: MLPProblem, tokens: range | None = None
) -> dict[Hashable, NeededBinary]:
    """The binaries that calls like `problem`, but of so many tokens, can need, by key; None is any.

    Operands are contiguous and begin at multiples of 16 bytes, as torch's allocator has them; fp32
    is multiplied at "highest".
    """
    wanted = tokens or range(1, 1 << 62)
    bounds = route.length_class_ends(problem.device, problem.hidden, problem.inner)
    classes = zip(bounds, (*bounds[1:], wanted.stop - 1), strict=True)
    lengths = [most for least, most in classes if least < wanted.stop - 1 and most >= wanted.start]
    binaries: dict[Hashable, NeededBinary] = {}
    for length in lengths:
        for each in needed_binaries(problem._replace(tokens=min(length, UNBOUNDED_TOKENS))):
            binaries.setdefault(each.key, each)
    return binaries


def build_for_training(plan: Plan, save: str) -> None:
    """Have other threads compile what a step needs, while the first of it is compiled here."""
    plan.training_not_built = False
    for each in needed_binaries(plan.problem):
        if save in each.trains:
            each.launch.build_ahead(*each.matrices)


EITHER_SAVE = "gate_up", "input"
SAVES_GATE_UP, SAVES_INPUT = EITHER_SAVE[:1], EITHER_SAVE[1:]


def needed_binaries(problem: MLPProblem) -> Iterator[NeededBinary]:
    """The binaries that calls of an MLP can need, listed by the plan that runs them.

    Those of a packed weight with a down projection; a pair starts the same.
    """
    problem = problem._replace(down=True, pair=False)
    device, dtype, (tokens, hidden, inner) = problem.device, problem.dtype, problem.sizes
    recorded_launches: list[tuple[Launch, tuple[Tensor, ...]]] = []

    def new(shape: tuple[int, int], _: Any = None, of: torch.dtype = dtype) -> Tensor:
        return cast(Tensor, FakeMatrix(shape, of, device, recorded_launches))

    def step(
        name: str, trains: tuple[str, ...], call: Callable[..., Any], *given: Any,
        **named: Any,
    ) -> NeededBinary:  # fmt: skip
        call(*given, **named)
        launch, matrices = recorded_launches.pop()
        return NeededBinary(f"{chosen.path}{most}, {name}", launch, matrices, trains)

    x, w_gate_up, w_down = map(new, ((tokens, hidden), (2 * inner, hidden), (hidden, inner)))
    h, gate_up = new((tokens, inner)), new((tokens, 2 * inner))
    chosen = route.choose_route(problem)
    most = f" up to {tokens} tokens" if FEW_TOKENS < tokens < UNBOUNDED_TOKENS else ""
    few, plain = few_tokens.Products(problem, new), Products()
    for products in (few, plain):  # what torch multiplies is no launch
        products.gate_up, products.dh = lambda *_: gate_up, lambda *_: h
    plan = Plan(problem, chosen, few if chosen.few else plain, new)
    yield step("h", (), plan.differentiate, None, None, gate_up, recompute_h=True, in_place=False)
    for save in (True, False):
        name = f"forward{', gate|up kept' * save}"
        yield step(
            name, EITHER_SAVE if save else SAVES_INPUT, plan.activate, x, w_gate_up, None, save
        )
    for recompute_h, in_place in product((True, False), (False, True)):
        name = f"backward{', h again' * recompute_h}{', in place' * in_place}"
        trains = (SAVES_GATE_UP if recompute_h else SAVES_INPUT) * in_place
        variant = {"recompute_h": recompute_h, "in_place": in_place}
        yield step(name, trains, plan.differentiate, x, w_down, gate_up, **variant)
    if chosen.path == "few tokens":
        yield step("y", EITHER_SAVE, few.output, h, w_down, x)
    if chosen.few:
        given = (True, True, False, True), False, [h, gate_up], x, x, w_gate_up, None
        yield step("gradients", EITHER_SAVE, few.gradients, *given)
    if chosen.split:
        from fusedlib.ops.linear.split.product import SplitProduct

        factors = ((x, gate_up, w_gate_up), (h, x, w_down))
        for rows, upstream, weight in factors:
            forms = {"y": (rows, weight, (False, True)), "d_x": (upstream, weight, (False, False)),
                     "d_w": (upstream, rows, (True, False))}  # fmt: skip
            for name, (a, b, transposed) in forms.items():
                recorded_launches.clear()
                SplitProduct(a, b, transposed, new)(a, b)
                for launch, matrices in recorded_launches:
                    kernel = launch.kernel.fn.__name__.strip("_").removesuffix("_kernel")
                    words = f"{chosen.path}{most}, {kernel.replace('_', ' ')} of {name}"
                    yield NeededBinary(words, launch, matrices, EITHER_SAVE)
