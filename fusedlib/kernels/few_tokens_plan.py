"""The whole MLP at few tokens: two launches forward, two backward, and nothing looked up twice.

At 64 tokens the device needs 11 to 50 µs for a forward and the host more than that, so a call must
cost the host as little as can be. A `Plan` belongs to a layer's sizes, a dtype, a device and a
class of lengths (`plans.class_of`). It keeps the launches by length, which are a grid and a few
numbers around a binary that all lengths share; a call allocates its results and starts them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from fusedlib.kernels import few_tokens, swiglu
from fusedlib.kernels.autotune import tuned
from fusedlib.kernels.launch import MOST_LAUNCHES, Launch, current_index

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Plan:
    """The MLP for operands of a kind and class of these: x (..., hidden), weights as everywhere."""

    def __init__(self, x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> None:
        self.weights = w_gate_up.shape, w_down.shape
        wide, hidden = w_gate_up.shape
        self.sizes = x.device, x.numel() // hidden, hidden, wide // 2
        self._hidden, self._inner, self._wide, self._dtype = hidden, wide // 2, wide, x.dtype
        self._index, self._new = x.get_device(), _allocator(x.device)
        self._w_gate_up, self._w_down = (_laid_out(shape, x.dtype) for shape in self.weights)
        self._launches: dict[Hashable, Launch] = {}
        self.cold = self._index >= 0

    def build_for_training(self, save: str) -> None:
        """Have other threads compile what a step needs, while the first of it is compiled here."""
        from fusedlib.kernels.ahead import needed

        self.cold = False
        device, tokens, hidden, inner = self.sizes
        for each in needed(tokens, hidden, inner, self._dtype, device):
            if save in each.trains:
                each.launch.build_ahead(*each.matrices)

    def forward(
        self, x: Tensor, w_gate_up: Tensor, w_down: Tensor, save: bool
    ) -> tuple[Tensor, Tensor | None]:
        """y, of x's shape, and gate|up (tokens, 2·inner) if saved."""
        h, gate_up = self._activated(x, w_gate_up, save)
        y = self._new(tuple(x.shape), x.stride(), self._dtype)
        name = "down", h.shape[0]
        launch = self._launches.get(name) or self._made(name, few_tokens.down_launch)
        launch(h, w_down, y)
        return y, gate_up

    def _activated(self, x: Tensor, w_gate_up: Tensor, save: bool) -> tuple[Tensor, Tensor | None]:
        tokens = x.numel() // self._hidden
        h = self._rows(tokens, self._inner)
        gate_up = self._rows(tokens, self._wide) if save else None
        stored = h if gate_up is None else gate_up
        name = save, tokens
        launch = self._launches.get(name)
        if launch is None:
            matrix = x.view(-1, self._hidden)
            make = partial(swiglu.fwd_launch, matrix, w_gate_up, h, save)
            launch = self._kept(name, tuned(make, (matrix, w_gate_up, h, stored)))
        launch(x, w_gate_up, h, stored)
        return h, gate_up

    def _rows(self, tokens: int, width: int) -> Tensor:
        return self._new((tokens, width), (width, 1), self._dtype)

    def fits(self, x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> bool:
        """Whether operands of its kind and class lie in memory as a plan wants them.

        The device must be the current one too, where the allocator takes its memory from.
        """
        if self._index >= 0 and self._index != current_index():
            return False
        whole = x.is_contiguous() and w_gate_up.is_contiguous() and w_down.is_contiguous()
        return whole and not (x.data_ptr() | w_gate_up.data_ptr() | w_down.data_ptr()) % 16

    def takes(self, dy: Tensor, saved: tuple[Tensor | None, ...]) -> bool:
        """Whether a backward pass can go by this plan.

        dy may have any strides, and the storage of a saved tensor can have been exchanged
        (`tensor.data = ...`), which torch does not notice.
        """
        bits, same = dy.data_ptr(), dy.is_contiguous()
        for tensor, shape in zip(saved, (dy.shape, *self.weights), strict=True):
            if tensor is not None:
                bits |= tensor.data_ptr()
                same = same and tensor.shape == shape and tensor.is_contiguous()
        return same and not bits % 16

    def gradients(
        self, wants: tuple[bool, bool, bool], saved: list[Tensor | None], dy: Tensor, in_place: bool
    ) -> Gradients:
        """d_x, d_w_gate_up and d_w_down, each if wanted.

        Args:
            wants: which of the three.
            saved: x, w_gate_up, w_down and gate|up, as `swiglu_autograd.kept` gave them. gate|up
                is taken out of the list, so that nobody holds its memory any longer.
            dy: of x's shape, contiguous.
            in_place: gate|up may be overwritten; one computed again always may.
        """
        gate_up = saved.pop()
        x, w_gate_up, w_down = saved
        gradient, h = wants[0] or wants[1], None
        if gate_up is None:
            assert x is not None and w_gate_up is not None
            h, gate_up = self._activated(x, w_gate_up, gradient)
            h, in_place = (h if wants[2] else None), True
        d_gate_up = None
        if gradient or h is None:
            assert gate_up is not None
            again = wants[2] and h is None
            d_gate_up, found = self._differentiated(dy, w_down, gate_up, gradient, again, in_place)
            h = found if again else h
            found = None
        held = [h, d_gate_up]
        del gate_up, h, d_gate_up
        return self._products(wants, dy, x, held, w_gate_up)

    def _differentiated(
        self, dy: Tensor, w_down: Tensor | None, gate_up: Tensor, gradient: bool, output: bool,
        in_place: bool,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """d(gate|up) if there is a gradient to compute, and h if it is an output."""
        d_gate_up, h = self._targets(gate_up, gradient, output, in_place)
        variant = gradient, gradient, output, gradient and in_place
        # What a variant does not read or write, it is given gate|up for.
        a, b = (dy, w_down) if gradient else (gate_up, gate_up)
        assert b is not None
        target, output_to = gate_up if d_gate_up is None else d_gate_up, gate_up if h is None else h
        others = b, gate_up, gate_up, target, output_to
        name = variant, gate_up.shape[0]
        launch = self._launches.get(name)
        if launch is None:
            matrix = a.view(-1, a.shape[-1])
            make = partial(swiglu.bwd_launch, matrix, b, gate_up, variant)
            launch = self._kept(name, tuned(make, (matrix, *others)))
        launch(a, *others)
        return d_gate_up, h

    def _targets(
        self, gate_up: Tensor, gradient: bool, output: bool, in_place: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Where d(gate|up) and h go, each if wanted."""
        d_gate_up = h = None
        if gradient:
            d_gate_up = gate_up if in_place else self._rows(*gate_up.shape)
        if output:
            h = self._rows(gate_up.shape[0], self._inner)
        return d_gate_up, h

    def _products(
        self, wants: tuple[bool, bool, bool], dy: Tensor, x: Tensor | None,
        held: list[Tensor | None], w_gate_up: Tensor | None,
    ) -> Gradients:  # fmt: skip
        h, d_gate_up = held
        name = wants, dy.numel() // self._hidden
        launch = self._launches.get(name)
        if launch is None:
            launch = self._made(name, partial(few_tokens.gradients_launch, wants))
        wants_x, wants_w_gate_up, wants_w_down = wants
        # What is not wanted is neither read nor written: any matrix will do.
        d_x = self._new(tuple(dy.shape), dy.stride(), self._dtype) if wants_x else dy
        d_w_gate_up = self._new(*self._w_gate_up) if wants_w_gate_up else dy
        d_w_down = self._new(*self._w_down) if wants_w_down else dy
        launch(
            dy, dy if x is None else x, dy if h is None else h,
            dy if d_gate_up is None else d_gate_up, dy if w_gate_up is None else w_gate_up,
            d_x, d_w_gate_up, d_w_down,
        )  # fmt: skip
        return (
            d_x if wants_x else None,
            d_w_gate_up if wants_w_gate_up else None,
            d_w_down if wants_w_down else None,
        )

    def _made(self, name: tuple[Hashable, int], make: Callable[..., Launch]) -> Launch:
        return self._kept(name, make(self.sizes[0], name[1], self._hidden, self._inner))

    def _kept(self, name: tuple[Hashable, int], launch: Launch) -> Launch:
        """`name` is of a variant and the number of tokens."""
        if len(self._launches) >= MOST_LAUNCHES:
            self._launches.clear()
        self._launches[name] = launch
        return launch


def _laid_out(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Shape, strides and dtype of a contiguous tensor."""
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    return tuple(shape), tuple(strides), dtype


def _allocator(device: torch.device) -> Callable[..., Tensor]:
    """Gives an empty tensor on the current device of that type from what `_laid_out` gives.

    Inductor's own where torch has it: on one host 1.0 µs where `new_empty` took 2.5, and 5.5 where
    it took 13.4 in a call after other work.
    """
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if quick is not None:
        return cast(Callable[..., Tensor], quick)
    return lambda shape, strides, dtype: torch.empty(shape, dtype=dtype, device=device)
