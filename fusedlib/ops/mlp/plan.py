"""A `Plan` computes the MLP of one problem: two fused kernels, forward and backward, and products.

    forward     gate|up = x Wguᵀ    h = silu(gate) ⊙ up            y = h Wdᵀ
    backward    dh = dy Wd          d_gate|up, h                   d_x, d_Wgu, d_Wd

The first two of each line are one fused kernel, or a plain product and a pointwise one ("apart").
The device needs 11 to 150 µs for a small forward and the host more than that, when every size and
address is looked at anew. So a plan keeps its launches by length, which are a grid and a few
numbers around a binary that all lengths share; a call allocates its results and starts them.
`Plan.launches` lists them for those who compile before.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from torch import Tensor
from triton.errors import TritonError

from fusedlib import launch as launching
from fusedlib.launch import (
    Launch,
    PlannedLaunch,
    allocator,
    contiguous_layout,
    current_index,
    prepared,
    without_memory,
)
from fusedlib.ops.arguments import FEW_TOKENS
from fusedlib.ops.mlp import tiles
from fusedlib.ops.mlp.problem import TILED, UNFUSED, WARP_SPECIALIZED, MLPProblem, Route
from fusedlib.ops.mlp.products import (
    EITHER_SAVE,
    SAVES_GATE_UP,
    SAVES_INPUT,
    Products,
    as_matrix,
)
from fusedlib.ops.mlp.tiles import Variant


class Plan:
    """The MLP of a problem: x (..., hidden) and its weights, all contiguous and 16-byte aligned.

    Attributes:
        problem: what it was made for.
        path: the name of its route in the table of `route`.
        products: the implementation of the plain matrix products.
        pair: gate and up have a weight each; a packed weight comes without a w_up.
        training_not_built: nobody has started to compile what its first training step needs.
    """

    def __init__(self, problem: MLPProblem, route: Route, products: Products) -> None:
        self.problem, self.path = problem, route.path
        self.products, self.pair = products, problem.pair
        self._forward, self._backward = route.forward, route.backward
        self._activation, self._device = problem.activation, problem.device
        self._hopper = tiles.hopper
        self._hidden, self._inner, self._wide = problem.hidden, problem.inner, 2 * problem.inner
        # The row of `w_up`, or of the packed weight in its place, where up begins.
        self._up_row = 0 if problem.pair else problem.inner
        # What starts by tensor maps, or is a plain product, wants matrices.
        self._needs_matrices = not route.few or problem.tokens > FEW_TOKENS
        self._dtype, self._new = problem.dtype, allocator(problem.device)
        self._index = -1 if problem.device.type == "cpu" else problem.device.index or 0
        self.training_not_built = self._index >= 0 and 0 not in problem.sizes

    def accepts(
        self, x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None
    ) -> bool:  # fmt: skip
        """True if the operands are contiguous, 16-byte aligned, and on the current device.

        The allocator takes its memory from the current device.
        """
        if self._index >= 0 and self._index != current_index():
            return False
        if w_up is not None and (w_up.data_ptr() % 16 or not w_up.is_contiguous()):
            return False
        if w_down is None:
            w_down = x
        whole = x.is_contiguous() and w_gate.is_contiguous() and w_down.is_contiguous()
        return whole and not (x.data_ptr() | w_gate.data_ptr() | w_down.data_ptr()) % 16

    def forward(
        self, x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor | None, save: bool
    ) -> tuple[Tensor, Tensor | None]:
        """y, of x's shape, or h where w_down is None, and gate|up (tokens, 2·inner) if saved."""
        h, gate_up = self.activate(x, w_gate, w_up, save)
        if w_down is None:
            # In place: autograd lets nobody write to a view that a Function returns.
            return (h if x.ndim == 2 else h.resize_(*x.shape[:-1], self._inner)), gate_up
        return self.products.output(h, w_down, x), gate_up

    def activate(
        self, x: Tensor, w_gate: Tensor, w_up: Tensor | None, save: bool
    ) -> tuple[Tensor, Tensor | None]:
        """h (tokens, inner), and gate|up (tokens, 2·inner) if saved."""
        if self._needs_matrices:
            x = as_matrix(x)
        if self._forward == UNFUSED:
            both = self.products.gate_up(x, w_gate, w_up)
            _, activated = self.differentiate(None, None, both, recompute_h=True, in_place=False)
            assert activated is not None
            return activated, both if save else None
        tokens = x.numel() // self._hidden
        h = self._new_matrix(tokens, self._inner)
        gate_up = self._new_matrix(tokens, self._wide) if save else None
        second_weight, stored = w_gate if w_up is None else w_up, h if gate_up is None else gate_up
        matrices = x, w_gate, second_weight, stored, h
        try:
            prepared((self, save, tokens), self._forward_launch, save, tokens)(*matrices)
        except TritonError as error:
            if self._forward != WARP_SPECIALIZED:
                raise
            self._fall_back_to_tiles(error)
            self._forward_launch(save, tokens)(*matrices)
        return h, gate_up

    def differentiate(
        self, upstream: Tensor | None, w_down: Tensor | None, gate_up: Tensor, *,
        recompute_h: bool, in_place: bool,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """d(gate|up) (tokens, 2·inner), if there is an upstream, and h (tokens, inner) if wanted.

        Args:
            upstream: dy (..., hidden), or dh (..., inner) where w_down is None.
            w_down: (hidden, inner), or None.
            gate_up: (tokens, 2·inner), what the forward saved.
            recompute_h: also recompute h.
            in_place: d(gate|up) is written over gate_up and is the same tensor.
        """
        gradient, multiplies = upstream is not None, w_down is not None and upstream is not None
        if upstream is not None and w_down is not None:
            if self._needs_matrices:
                upstream = as_matrix(upstream)
            if self._backward == UNFUSED:
                upstream, multiplies = self.products.dh(upstream, w_down), False
        tokens = gate_up.shape[0]
        d_gate_up = h = None
        if gradient:
            d_gate_up = gate_up if in_place else self._new_matrix(tokens, self._wide)
        if recompute_h:
            h = self._new_matrix(tokens, self._inner)
        # What a variant does not read or write, it is given gate|up for.
        target, stored = gate_up if d_gate_up is None else d_gate_up, gate_up if h is None else h
        first, weight = gate_up if upstream is None else upstream, w_down if multiplies else gate_up
        assert weight is not None
        if gate_up.numel():
            variant = Variant(multiplies, gradient, recompute_h, gradient and in_place)
            matrices = first, weight, gate_up, target, stored
            try:
                prepared((self, variant, tokens), self._backward_launch, variant, tokens)(*matrices)
            except TritonError as error:
                if not (multiplies and self._backward == WARP_SPECIALIZED):
                    raise
                self._fall_back_to_tiles(error)
                self._backward_launch(variant, tokens)(*matrices)
        return d_gate_up, h

    def launches(self) -> Iterator[PlannedLaunch]:
        """The launches that calls of the problem can need, with a down projection.

        Their binaries are those of a packed weight and of a pair.
        """
        tokens, hidden, inner = self.problem.sizes
        sizes = (tokens, hidden), (tokens, inner), (tokens, self._wide), (self._wide, hidden)
        layouts = [contiguous_layout(size, self._dtype) for size in (*sizes, (hidden, inner))]
        x, h, gate_up, w_gate_up, w_down = without_memory(*layouts)
        only_h = Variant(product=False, gradient=False, output=True, in_place=False)
        pointwise = self._backward_launch(only_h, tokens), (gate_up, gate_up, gate_up, gate_up, h)
        yield PlannedLaunch("h", (), *pointwise)
        for save in (True, False):
            name = f"forward{', gate|up kept' * save}"
            trains: tuple[str, ...] = EITHER_SAVE if save else SAVES_INPUT
            if self._forward == UNFUSED:
                yield PlannedLaunch(name, trains, *pointwise)
            else:
                launch = self._forward_launch(save, tokens)
                matrices = x, w_gate_up, w_gate_up, gate_up if save else h, h
                yield PlannedLaunch(name, trains, launch, matrices)
        multiplies = self._backward != UNFUSED
        first, weight = (x, w_down) if multiplies else (h, gate_up)
        for recompute_h, in_place in product((True, False), (False, True)):
            name = f"backward{', h again' * recompute_h}{', in place' * in_place}"
            trains = (SAVES_GATE_UP if recompute_h else SAVES_INPUT) * in_place
            launch = self._backward_launch(Variant(multiplies, True, recompute_h, in_place), tokens)
            matrices = first, weight, gate_up, gate_up, h if recompute_h else gate_up
            yield PlannedLaunch(name, trains, launch, matrices)
        yield from self.products.launches(self.problem)

    def _forward_launch(self, save: bool, tokens: int) -> Launch:
        sizes = tokens, self._hidden, self._inner, self._up_row
        if self._forward == WARP_SPECIALIZED:
            return self._hopper.forward_launch(self._device, *sizes, save, self._activation)
        return tiles.fwd_launch(self._device, *sizes, save, self._activation)

    def _backward_launch(self, variant: Variant, tokens: int) -> Launch:
        sizes = tokens, self._hidden, self._inner
        if variant.product and self._backward == WARP_SPECIALIZED:
            return self._hopper.backward_launch(
                self._device, *sizes, variant.output, self._activation
            )
        return tiles.bwd_launch(self._device, *sizes, variant, self._activation)

    def _fall_back_to_tiles(self, error: TritonError) -> None:
        """Use the kernels by tiles from now on: those with roles do not compile."""
        tiles.disable_hopper_kernels(error)
        self._forward = TILED if self._forward == WARP_SPECIALIZED else self._forward
        self._backward = TILED if self._backward == WARP_SPECIALIZED else self._backward
        self.path = self.path.replace(WARP_SPECIALIZED, TILED)
        launching.PREPARED.clear()

    def _new_matrix(self, tokens: int, width: int) -> Tensor:
        return self._new((tokens, width), (width, 1), self._dtype)


def contiguous_and_aligned(*operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands; those that are not contiguous or not 16-byte aligned are copied."""
    bits, whole = 0, True
    for operand in operands:
        if operand is not None:
            bits |= operand.data_ptr()
            whole = whole and operand.is_contiguous()
    return operands if whole and not bits % 16 else tuple(map(_contiguous_and_aligned, operands))


def _contiguous_and_aligned(operand: Tensor | None) -> Tensor | None:
    if operand is None:
        return None
    whole = operand.contiguous()
    return whole.clone() if whole.data_ptr() % 16 else whole
