"""A `Plan` computes the MLP of one problem: two fused kernels, forward and backward, and products.

    forward     gate|up = x Wguᵀ    h = silu(gate) ⊙ up            y = h Wdᵀ
    backward    dh = dy Wd          d_gate|up, h                   d_x, d_Wgu, d_Wd

The first two of each line are one fused kernel, or a plain product and a pointwise one ("apart");
the rest are `products`. The device needs 11 to 150 µs for a small forward and the host more than
that, when every size and address is looked at anew. So a plan keeps its launches; a call allocates
its results and starts them. `Plan.launches` lists them for those who compile before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator

import torch
from torch import Tensor
from triton.errors import TritonError

from fusedlib.launch import (
    Launch,
    PlannedLaunch,
    allocator,
    contiguous_layout,
    current_index,
    forget,
    prepared,
    without_memory,
)
from fusedlib.ops.arguments import FEW_TOKENS
from fusedlib.ops.matmul.function import UNBOUNDED_TOKENS, fp32_precision
from fusedlib.ops.mlp import route
from fusedlib.ops.mlp.few_tokens import FewTokensProducts
from fusedlib.ops.mlp.kernels import Variant, bwd_launch, fwd_launch
from fusedlib.ops.mlp.products import (
    EITHER_SAVE,
    SAVES_GATE_UP,
    SAVES_INPUT,
    SPLIT_PRODUCTS,
    TORCH_FP32_PRODUCTS,
    TORCH_PRODUCTS,
    Products,
    as_matrix,
)
from fusedlib.ops.mlp.route import TILED, UNFUSED, WARP_SPECIALIZED, MLPProblem, Route, choose_route


class Plan:
    """The MLP of a problem: x (..., hidden) and its weights, all contiguous and 16-byte aligned.

    Attributes:
        problem: what it was made for.
        path: the name of its route in the table of `route`.
        products: the implementation of the plain matrix products.
        pair: gate and up have a weight each; a packed weight comes without a w_up.
    """

    def __init__(self, problem: MLPProblem, chosen: Route, products: Products) -> None:
        self.problem, self.path = problem, chosen.path
        self.products, self.pair = products, problem.pair
        self._forward, self._backward = chosen.forward, chosen.backward
        self._activation, self._device = problem.activation, problem.device
        self._hidden, self._inner, self._wide = problem.hidden, problem.inner, 2 * problem.inner
        # The row of `w_up`, or of the packed weight in its place, where up begins.
        self._up_row = 0 if problem.pair else problem.inner
        # What starts by tensor maps, or is a plain product, wants matrices.
        self._needs_matrices = not chosen.few or problem.tokens > FEW_TOKENS
        self._dtype, self._new = problem.dtype, allocator(problem.device)
        self._index = -1 if problem.device.type == "cpu" else problem.device.index or 0
        self._launches: dict[bool | Variant, Launch] = {}

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
        tokens = self.problem.tokens
        h = self._new_matrix(tokens, self._inner)
        gate_up = self._new_matrix(tokens, self._wide) if save else None
        second_weight, stored = w_gate if w_up is None else w_up, h if gate_up is None else gate_up
        matrices = x, w_gate, second_weight, stored, h
        try:
            self._launch(save)(*matrices)
        except TritonError as error:
            if self._forward != WARP_SPECIALIZED:
                raise
            self._fall_back_to_tiles(error)
            self._launch(save)(*matrices)
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
        tokens = self.problem.tokens
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
            variant = Variant(multiplies, gradient, recompute_h)
            matrices = first, weight, gate_up, target, stored
            try:
                self._launch(variant)(*matrices)
            except TritonError as error:
                if not (multiplies and self._backward == WARP_SPECIALIZED):
                    raise
                self._fall_back_to_tiles(error)
                self._launch(variant)(*matrices)
        return d_gate_up, h

    def launches(self) -> Iterator[PlannedLaunch]:
        """The launches that calls of the problem can need, with a down projection.

        Their binaries are those of a packed weight and of a pair.
        """
        tokens, hidden, inner = self.problem.sizes
        sizes = (tokens, hidden), (tokens, inner), (tokens, self._wide), (self._wide, hidden)
        layouts = [contiguous_layout(size, self._dtype) for size in (*sizes, (hidden, inner))]
        x, h, gate_up, w_gate_up, w_down = without_memory(*layouts)
        only_h = Variant(product=False, gradient=False, output=True)
        pointwise = self._launch(only_h), (gate_up, gate_up, gate_up, gate_up, h)
        yield PlannedLaunch("h", (), *pointwise)
        for save in (True, False):
            name = f"forward{', gate|up kept' * save}"
            trains: tuple[str, ...] = EITHER_SAVE if save else SAVES_INPUT
            if self._forward == UNFUSED:
                yield PlannedLaunch(name, trains, *pointwise)
            else:
                launch = self._launch(save)
                matrices = x, w_gate_up, w_gate_up, gate_up if save else h, h
                yield PlannedLaunch(name, trains, launch, matrices)
        multiplies = self._backward != UNFUSED
        first, weight = (x, w_down) if multiplies else (h, gate_up)
        for recompute_h in (True, False):
            name = f"backward{', h again' * recompute_h}"
            trains = SAVES_GATE_UP if recompute_h else SAVES_INPUT
            launch = self._launch(Variant(multiplies, True, recompute_h))
            matrices = first, weight, gate_up, gate_up, h if recompute_h else gate_up
            yield PlannedLaunch(name, trains, launch, matrices)
        yield from self.products.launches(self.problem)

    def _launch(self, kind: bool | Variant) -> Launch:
        """The launch of the forward, saving gate|up or not, or of a variant of the backward; made
        once.
        """
        launch = self._launches.get(kind)
        if launch is None:
            launch = self._launches[kind] = self._make_launch(kind)
        return launch

    def _make_launch(self, kind: bool | Variant) -> Launch:
        arguments = self._device, *self.problem.sizes
        launch: Launch
        if isinstance(kind, Variant):
            if kind.product and self._backward == WARP_SPECIALIZED:
                backward_launch = route.hopper_kernels().backward_launch
                launch = backward_launch(*arguments, kind.output, self._activation)
            else:
                launch = bwd_launch(*arguments, kind, self._activation)
        else:
            roles = self._forward == WARP_SPECIALIZED
            forward_launch = route.hopper_kernels().forward_launch if roles else fwd_launch
            launch = forward_launch(*arguments, self._up_row, kind, self._activation)
        return launch

    def _fall_back_to_tiles(self, error: TritonError) -> None:
        """Use the kernels by tiles from now on: those with roles do not compile."""
        route.disable_hopper_kernels(error)
        self._forward = TILED if self._forward == WARP_SPECIALIZED else self._forward
        self._backward = TILED if self._backward == WARP_SPECIALIZED else self._backward
        self.path = self.path.replace(WARP_SPECIALIZED, TILED)
        self._launches.clear()
        forget()

    def _new_matrix(self, tokens: int, width: int) -> Tensor:
        return self._new((tokens, width), (width, 1), self._dtype)


def plan_for(problem: MLPProblem) -> Plan:
    """The plan of a problem, kept for the next call that poses it."""
    plan: Plan = prepared(problem, make_plan, problem)
    return plan


def plan_at_current_precision(plan: Plan, like: Tensor) -> Plan:
    """The plan, or another if torch's fp32 precision was changed since it was made."""
    precision, problem = fp32_precision(like), plan.problem
    return (
        plan if precision == problem.precision else plan_for(problem._replace(precision=precision))
    )


def make_plan(problem: MLPProblem) -> Plan:
    """A new plan."""
    chosen = choose_route(problem)
    if chosen.few:
        return Plan(problem, chosen, FewTokensProducts(problem))
    if chosen.split:
        return Plan(problem, chosen, SPLIT_PRODUCTS)
    fp32 = problem.dtype == torch.float32
    return Plan(problem, chosen, TORCH_FP32_PRODUCTS if fp32 else TORCH_PRODUCTS)


# --- compiled before they are needed -------------------------------------------------------------
#
# A layer's kernels depend on its two sizes, the dtype, the card and the class of lengths
# (`route.length_class_ends`); of a length they know nothing.


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
    """Have other threads compile what a step needs, while the first of it is compiled here; once
    for all lengths of a class.
    """
    problem = plan.problem
    if problem.device.type == "cpu" or 0 in problem.sizes:
        return
    bounds = route.length_class_ends(problem.device, problem.hidden, problem.inner)
    key = save, plan.path, problem._replace(tokens=bisect_left(bounds, problem.tokens))
    if key in _TRAINING_BUILT:
        return
    _TRAINING_BUILT.add(key)
    for each in plan.launches():
        if save in each.trains:
            each.launch.build_ahead(device_index(problem), *each.matrices)


_TRAINING_BUILT: set[Hashable] = set()


def device_index(problem: MLPProblem) -> int:
    """The number of the GPU that a problem is on."""
    return problem.device.index or 0
