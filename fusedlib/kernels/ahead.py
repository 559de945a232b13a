"""Every kernel that an MLP's layer can need, at whatever length: listed, and built before it is.

A layer's kernels depend on its two sizes, the dtype, the card and the class of lengths
(`route.most_tokens`); of a length they know nothing. `binaries_of` goes through the classes as a
call would, with operands that have a shape and no memory (`Looks`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial as bind
from typing import Any, cast

import torch
from torch import Tensor

from fusedlib.kernels import route, swiglu
from fusedlib.kernels.autotune import tuned
from fusedlib.kernels.few_tokens import kernels as few_tokens
from fusedlib.kernels.launch import Launch
from fusedlib.kernels.plan import Plan
from fusedlib.kernels.route import APART, ROLES, Kind

hopper: Any = swiglu.hopper


@dataclass(frozen=True)
class Looks:
    """What a launch asks of a contiguous matrix on a GPU, but its memory."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    is_cuda = True

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
class Needed:
    """A binary that a layer can need.

    Attributes:
        name: kernel and variant, to read.
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
        """What it is compiled for."""
        return self.launch.binary_key(*self.matrices)


def binaries_of(
    hidden: int, inner: int, dtype: torch.dtype, device: torch.device,
    tokens: range | None = None,
) -> dict[Hashable, Needed]:  # fmt: skip
    """By key, what calls of an MLP can need whose numbers of tokens lie in a range; of all: None.

    Operands are contiguous and begin at multiples of 16 bytes, as torch's allocator has them. Of
    fp32 it is what runs beside the products.
    """
    wanted = tokens or range(1, 1 << 62)
    bounds = route.most_tokens(device, inner)
    classes = zip(bounds, (*bounds[1:], wanted.stop - 1), strict=True)
    lengths = [most for least, most in classes if least < wanted.stop - 1 and most >= wanted.start]
    found: dict[Hashable, Needed] = {}
    for length in lengths:
        for each in needed(min(length, 1 << 30), hidden, inner, dtype, device):
            found.setdefault(each.key, each)
    return found


def build_for_training(plan: Plan, save: str) -> None:
    """Have other threads compile what a step needs, while the first of it is compiled here."""
    plan.cold = False
    for each in needed(*plan.kind.sizes, plan.kind.dtype, plan.kind.device):
        if save in each.trains:
            each.launch.build_ahead(*each.matrices)


BOTH = "gate_up", "input"
KEPT, AGAIN = BOTH[:1], BOTH[1:]


def needed(
    tokens: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Needed]:
    """What calls at one number of tokens can need."""

    def of(rows: int, columns: int) -> Tensor:
        return cast(Tensor, Looks((rows, columns), dtype, device))

    x, w_gate_up, w_down = of(tokens, hidden), of(2 * inner, hidden), of(hidden, inner)
    h, gate_up = of(tokens, inner), of(tokens, 2 * inner)
    matrices: tuple[Tensor, ...]
    way = route.ways(Kind(device, dtype, "ieee", tokens, hidden, inner))
    few = "few tokens, " * way.few
    yield _pointwise(gate_up, h, False, True, BOTH if way.forward == APART else ())
    for save in () if way.forward == APART else (True, False):
        matrices = x, w_gate_up, h, gate_up if save else h
        name, trains = f"{few}forward{', gate|up kept' * save}", BOTH if save else AGAIN
        if way.forward == ROLES:
            launch = hopper.forward_launch(x, inner, save)
            yield Needed(name, launch, (*matrices, h), trains)
        else:
            made = bind(swiglu.fwd_launch, x, inner, save)
            yield _tiled(name, made, matrices, trains)
    for output in (True, False):
        matrices = x, w_down, gate_up, gate_up, gate_up, h
        name, trains = f"{few}backward{', h again' * output}", KEPT if output else AGAIN
        if way.backward == APART:
            yield _pointwise(gate_up, h, True, output, trains)
        elif way.backward == ROLES:
            launch = hopper.backward_launch(x, inner, output)
            yield Needed(name, launch, matrices[:5], trains)
        else:
            for in_place in (True, False):
                variant = True, True, output, in_place
                made = bind(swiglu.bwd_launch, x, inner, variant)
                yield _tiled(name + ", in place" * in_place, made, matrices, trains * in_place)
    if way.few:
        sizes = device, tokens, hidden, inner
        yield Needed("few tokens, y", few_tokens.down_launch(*sizes), (h, w_down, x), BOTH)
        launch = few_tokens.gradients_launch((True, True, True), *sizes)
        results = x, w_gate_up, w_down
        matrices = x, x, h, gate_up, w_gate_up, *results
        yield Needed("few tokens, gradients", launch, matrices, BOTH)


def _pointwise(
    gate_up: Tensor, h: Tensor, gradient: bool, output: bool, trains: tuple[str, ...]
) -> Needed:
    launch = swiglu.bwd_launch(gate_up, h.shape[1], (False, gradient, output, gradient))
    name = f"pointwise{', d(gate|up)' * gradient}{', h' * output}"
    return Needed(name, launch, (*[gate_up] * 5, h), trains)


def _tiled(
    name: str, make: Callable[..., Launch], matrices: tuple[Tensor, ...], trains: tuple[str, ...]
) -> Needed:
    return Needed(name, tuned(make, matrices, time=False), matrices, trains)
