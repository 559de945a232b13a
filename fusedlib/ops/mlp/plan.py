"""A `Plan` computes the MLP of one problem: two fused kernels, forward and backward, and products.

    forward     gate|up = x Wguᵀ    h = silu(gate) ⊙ up            y = h Wdᵀ
    backward    dh = dy Wd          d_gate|up, h                   d_x, d_Wgu, d_Wd

The first two of each line are one fused kernel, or a plain product and a pointwise one ("apart").
The device needs 11 to 150 µs for a small forward and the host more than that, when every size and
address is looked at anew. So a plan keeps its launches; a call allocates its results and starts
them. `Plan.launches` lists them for those who compile before.

**Order of the products in backward.** After dh and its epilogue a pass holds d(gate|up), 2·F, and
h, F (F = tokens·inner, D = tokens·hidden, W = hidden·inner elements). Before, h is gone when d_x
and d_w_gate_up come, D + 2·W, but d_w_down, W, is there; after, the other way round, and d(gate|up)
is gone when d_w_down comes:

    before    2 F + W + max(F, D + 2 W)          after    F + D + 2 W + max(2 F, W)

So few tokens for their width want it last: at 4096·8192·28672 in bf16 1856 and 1632 MiB.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear
from triton.errors import TritonError

from fusedlib.launch import (
    PREPARED,
    Config,
    Launch,
    PlannedLaunch,
    allocator,
    cdiv,
    contiguous_layout,
    current_index,
    multiprocessors,
    prepared,
    without_memory,
)
from fusedlib.ops.arguments import FEW_TOKENS
from fusedlib.ops.matmul.function import (
    UNBOUNDED_TOKENS,
    SplitProduct,
    fp32_precision,
    multiply,
    splits,
)
from fusedlib.ops.mlp import route
from fusedlib.ops.mlp.kernels import _swiglu_bwd_kernel, _swiglu_fwd_kernel
from fusedlib.ops.mlp.route import (
    POINTWISE,
    TILED,
    UNFUSED,
    WARP_SPECIALIZED,
    Gradients,
    MLPProblem,
    Route,
    WantedGradients,
    choose_config,
    choose_route,
)

try:
    from fusedlib.ops.mlp import hopper
except (ImportError, AttributeError):  # Gluon is experimental: other releases may name it otherwise
    hopper = None  # type: ignore[assignment]

# --- launches of the fused kernels ---------------------------------------------------------------


def _grid(
    config: Config, device: torch.device, tokens: int, inner: int
) -> tuple[int, int, int]:  # fmt: skip
    """One program a tile; persistent ones no more than the device has multiprocessors."""
    tiles = cdiv(tokens, config.block_m) * cdiv(inner, config.block_n)
    if not config.persistent:
        return (tiles, 1, 1)
    return (min(tiles, multiprocessors(device)), 1, 1)


def fwd_launch(
    device: torch.device, tokens: int, hidden: int, inner: int, up_row: int, save: bool,
    activation: str = "silu", config: Config | None = None,
) -> Launch:  # fmt: skip
    """The launch of the forward kernel for x (tokens, hidden) and h (tokens, inner).

    It takes x, w_gate, w_up, gate_up, or h in its place, and h.
    """
    config = config or choose_config("forward", device, tokens, hidden, inner)
    m, n, k = config.block_m, config.block_n, config.block_k
    scalars = tokens, hidden, inner, up_row
    constants = {"ACTIVATION": activation, "SAVE": save, "FLATTEN": config.persistent}
    programs, blocks = _grid(config, device, tokens, inner), ([m, k], [n, k], [n, k])
    return Launch(_swiglu_fwd_kernel, config, programs, blocks, scalars, constants)


def disable_hopper_kernels(error: TritonError) -> None:
    """From now on; what did not compile has written nothing."""
    global hopper
    if hopper is not None:
        warnings.warn(
            f"fusedlib's MLP for Hopper does not compile with Triton {triton.__version__}; a "
            f"slower kernel runs instead. {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
    hopper = None  # type: ignore[assignment]


class Variant(NamedTuple):
    """What the backward kernel does.

    Attributes:
        product: dh = dy Wd is computed; otherwise dh is given, if anything is.
        gradient: d(gate|up) is computed.
        output: h is computed.
        in_place: d(gate|up) is written over gate|up.
    """

    product: bool
    gradient: bool
    output: bool
    in_place: bool


def bwd_launch(
    device: torch.device, tokens: int, hidden: int, inner: int, variant: Variant,
    activation: str = "silu", config: Config | None = None,
) -> Launch:  # fmt: skip
    """The launch of the backward kernel for dy (tokens, hidden) and h (tokens, inner).

    It takes dy, or dh (tokens, inner) where there is no product, w_down, gate_up, d_gate_up and h,
    gate_up in place of each that it neither reads nor writes.
    """
    product, gradient, output, in_place = variant
    config = config or (
        choose_config("backward", device, tokens, hidden, inner) if product else POINTWISE
    )
    m, n, k = config.block_m, config.block_n, config.block_k
    scalars = tokens, hidden if product else inner, inner
    # In a flattened loop a barrier would keep loads from being pipelined; elsewhere it costs
    # nothing, and one binary serves both.
    in_place = in_place or (gradient and not config.persistent)
    constants = {
        "ACTIVATION": activation, "PRODUCT": product, "GRADIENT": gradient, "OUTPUT": output,
        "IN_PLACE": in_place, "FLATTEN": config.persistent and not in_place,
    }  # fmt: skip
    programs = _grid(config, device, tokens, inner)
    return Launch(_swiglu_bwd_kernel, config, programs, ([m, k], [k, n]), scalars, constants)


# --- the plain products --------------------------------------------------------------------------

EITHER_SAVE = "gate_up", "input"
SAVES_GATE_UP, SAVES_INPUT = EITHER_SAVE[:1], EITHER_SAVE[1:]

Multiplication = Callable[[Tensor, Tensor], Tensor]
# Of a matrix with w_gate and w_up, or with a packed weight and None.
GateUpMultiplication = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def as_matrix(tensor: Tensor) -> Tensor:
    """(tokens, width) of (..., width), contiguous."""
    if tensor.ndim == 2:
        return tensor
    return tensor.view(tensor.shape[:-1].numel(), tensor.shape[-1])


def transposed_mm(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b."""
    return torch.mm(a.t(), b)


def gate_up(x: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
    """gate|up (tokens, 2·inner); a pair is two products, each written to its columns."""
    if w_up is None:
        return linear(x, w_gate)
    both = x.new_empty((x.shape[0], 2 * w_gate.shape[0]))
    for weight, columns in zip((w_gate, w_up), both.chunk(2, dim=1), strict=True):
        torch.mm(x, weight.t(), out=columns)
    return both


def gate_up_by_two_products(x: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
    """gate|up (tokens, 2·inner) in fp32, by two products for a packed weight too.

    Over packed weights cuBLAS's TF32 took 3 % longer than Liger's two products and kernel at
    4096·4096 (H200, torch 2.11), and its IEEE product erred 1.3 times more at 256·4096.
    """
    # Halves that do not begin at 16 bytes would be slower than what is gained.
    if w_up is None and w_gate.shape[0] % 8 == 0:
        w_gate, w_up = w_gate.chunk(2)
    return gate_up(x, w_gate, w_up)


def d_x(d_gate_up: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
    """d_x = d_gate|up Wgu; for a pair d_gate Wg is rounded, and d_up Wu added to it.

    On an H100 that took 1.5 to 4 % longer than the one product; packing the weights takes more.
    """
    if w_up is None:
        return torch.mm(d_gate_up, w_gate)
    d_gate, d_up = d_gate_up.chunk(2, dim=1)
    return torch.mm(d_gate, w_gate).addmm_(d_up, w_up)


@dataclass(eq=False)
class Products:
    """An implementation of the six plain matrix products.

    Each multiplies two matrices as they are stored: rows are tokens, or outputs for a weight. With
    `splits` some split their factors, and hold parts as large as both meanwhile.
    """

    gate_up: GateUpMultiplication = gate_up
    y: Multiplication = linear
    dh: Multiplication = torch.mm
    d_x: GateUpMultiplication = d_x
    d_w_gate_up: Multiplication = transposed_mm
    d_w_down: Multiplication = transposed_mm
    splits: bool = False

    def launches(self, problem: MLPProblem) -> Iterator[PlannedLaunch]:
        """The launches of ours that these products of a problem can need: none of torch's."""
        return iter(())

    def output(self, h: Tensor, w_down: Tensor, like: Tensor) -> Tensor:
        """y = h Wdᵀ, of like's shape."""
        y = self.y(h, w_down)
        # In place: autograd lets nobody write to a view that a Function returns.
        return y if like.ndim == 2 else y.resize_(like.shape)

    def gradients(
        self, wants: WantedGradients, pair: bool, buffers: list[Tensor | None], upstream: Tensor,
        x: Tensor | None, w_gate: Tensor | None, w_up: Tensor | None,
    ) -> Gradients:  # fmt: skip
        """The wanted ones of d_x, d_w_gate_up and d_w_down, in the order of less memory.

        d_w_gate_up has the rows of both weights of a pair, or of the one whose gradient is wanted.
        `buffers` holds h and d(gate|up); each leaves the list and is released after its products.
        """
        d_gate_up, h = buffers.pop(), buffers.pop()
        d_x = d_w_gate_up = d_w_down = None
        rows = as_matrix(upstream)
        tokens, hidden = rows.shape
        if h is not None and not is_d_w_down_last(
            tokens, hidden, h.shape[1], wants, splits=self.splits
        ):
            d_w_down = self.d_w_down(rows, h)
            h = None  # before the next products allocate
        if wants[0]:
            assert d_gate_up is not None and w_gate is not None
            d_x = self.d_x(d_gate_up, w_gate, w_up)
            if upstream.ndim != 2:
                d_x = d_x.view(*upstream.shape[:-1], w_gate.shape[1])
        if wants[1] or wants[2]:
            assert d_gate_up is not None and x is not None
            inner = d_gate_up.shape[1] // 2
            if pair and not (wants[1] and wants[2]):
                d_gate_up = d_gate_up[:, :inner] if wants[1] else d_gate_up[:, inner:]
            d_w_gate_up = self.d_w_gate_up(d_gate_up, as_matrix(x))
        d_gate_up = None
        if h is not None:
            d_w_down = self.d_w_down(rows, h)
        return d_x, d_w_gate_up, d_w_down


TORCH_PRODUCTS = Products()
TORCH_FP32_PRODUCTS = Products(gate_up=gate_up_by_two_products)


def is_d_w_down_last(
    tokens: int, hidden: int, inner: int, wants: WantedGradients, *, splits: bool = False
) -> bool:  # fmt: skip
    """True if backward holds less memory with d_w_down computed last.

    One of a pair's gradients counts as both, which never changes the order. A product that `splits`
    its factors holds parts as large as both meanwhile.
    """
    f, d, w = tokens * inner, tokens * hidden, hidden * inner
    wants_gate_up = wants[1] or wants[2]
    results = wants[0] * d + wants_gate_up * 2 * w
    down, others = f + w, 2 * f + results
    if splits:
        down += f + d
        for_d_x = wants[0] * (2 * f + 2 * w + d)
        for_d_weights = wants_gate_up * (2 * f + d + results)
        others = 2 * f + max(for_d_x, for_d_weights)
    return max(f + others, results + down) < max(2 * f + down, w + others)


# --- products of split factors, in fp32 at torch's "highest" -------------------------------------


def _split_y(h: Tensor, w_down: Tensor) -> Tensor:
    return multiply(h, w_down, (False, True))


def _split_d_weight(upstream: Tensor, rows: Tensor) -> Tensor:
    return multiply(upstream, rows, (True, False))


# A pair is split as one matrix, so that its product has the bits of a packed weight's.


def _split_gate_up(x: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
    if not splits(x, w_gate, (False, True), w_up):
        return TORCH_FP32_PRODUCTS.gate_up(x, w_gate, w_up)
    return multiply(x, w_gate, (False, True), lower_half=w_up)


def _split_d_x(d_gate_up: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
    if not splits(d_gate_up, w_gate):
        return TORCH_FP32_PRODUCTS.d_x(d_gate_up, w_gate, w_up)
    return multiply(d_gate_up, w_gate, lower_half=w_up)


class SplitProducts(Products):
    """Products of an MLP in fp32 at "highest"."""

    def launches(self, problem: MLPProblem) -> Iterator[PlannedLaunch]:
        """The launches of the six products of an MLP, as if all of them were split."""
        tokens, hidden, inner = problem.sizes
        sizes = (tokens, hidden), (tokens, inner), (tokens, 2 * inner), (2 * inner, hidden)
        layouts = [contiguous_layout(size, problem.dtype) for size in (*sizes, (hidden, inner))]
        x, h, gate_up, w_gate_up, w_down = without_memory(*layouts)
        for rows, upstream, weight in ((x, gate_up, w_gate_up), (h, x, w_down)):
            forms = {"y": (rows, weight, (False, True)), "d_x": (upstream, weight, (False, False)),
                     "d_w": (upstream, rows, (True, False))}  # fmt: skip
            for name, (a, b, turned) in forms.items():
                product = SplitProduct(problem.device, a, b, turned, False)
                for launch, matrices in product.launches(a, b):
                    kernel = launch.kernel.fn.__name__.strip("_").removesuffix("_kernel")
                    words = f"{kernel.replace('_', ' ')} of {name}"
                    yield PlannedLaunch(words, EITHER_SAVE, launch, matrices)


SPLIT_PRODUCTS = SplitProducts(
    _split_gate_up, _split_y, multiply, _split_d_x, _split_d_weight, _split_d_weight, splits=True
)


# --- the plan ------------------------------------------------------------------------------------


class Plan:
    """The MLP of a problem: x (..., hidden) and its weights, all contiguous and 16-byte aligned.

    Attributes:
        problem: what it was made for.
        path: the name of its route in the table of `route`.
        products: the implementation of the plain matrix products.
        pair: gate and up have a weight each; a packed weight comes without a w_up.
    """

    def __init__(self, problem: MLPProblem, route: Route, products: Products) -> None:
        self.problem, self.path = problem, route.path
        self.products, self.pair = products, problem.pair
        self._forward, self._backward = route.forward, route.backward
        self._activation, self._device = problem.activation, problem.device
        self._hopper = hopper
        self._hidden, self._inner, self._wide = problem.hidden, problem.inner, 2 * problem.inner
        # The row of `w_up`, or of the packed weight in its place, where up begins.
        self._up_row = 0 if problem.pair else problem.inner
        # What starts by tensor maps, or is a plain product, wants matrices.
        self._needs_matrices = not route.few or problem.tokens > FEW_TOKENS
        self._dtype, self._new = problem.dtype, allocator(problem.device)
        self._index = -1 if problem.device.type == "cpu" else problem.device.index or 0
        self._launches: dict[Hashable, Launch] = {}

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
            launch = self._launches.get(save)
            if launch is None:
                launch = self._launches[save] = self._forward_launch(save)
            launch(*matrices)
        except TritonError as error:
            if self._forward != WARP_SPECIALIZED:
                raise
            self._fall_back_to_tiles(error)
            self._forward_launch(save)(*matrices)
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
            variant = Variant(multiplies, gradient, recompute_h, gradient and in_place)
            matrices = first, weight, gate_up, target, stored
            try:
                launch = self._launches.get(variant)
                if launch is None:
                    launch = self._launches[variant] = self._backward_launch(variant)
                launch(*matrices)
            except TritonError as error:
                if not (multiplies and self._backward == WARP_SPECIALIZED):
                    raise
                self._fall_back_to_tiles(error)
                self._backward_launch(variant)(*matrices)
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
        pointwise = self._backward_launch(only_h), (gate_up, gate_up, gate_up, gate_up, h)
        yield PlannedLaunch("h", (), *pointwise)
        for save in (True, False):
            name = f"forward{', gate|up kept' * save}"
            trains: tuple[str, ...] = EITHER_SAVE if save else SAVES_INPUT
            if self._forward == UNFUSED:
                yield PlannedLaunch(name, trains, *pointwise)
            else:
                launch = self._forward_launch(save)
                matrices = x, w_gate_up, w_gate_up, gate_up if save else h, h
                yield PlannedLaunch(name, trains, launch, matrices)
        multiplies = self._backward != UNFUSED
        first, weight = (x, w_down) if multiplies else (h, gate_up)
        for recompute_h, in_place in product((True, False), (False, True)):
            name = f"backward{', h again' * recompute_h}{', in place' * in_place}"
            trains = (SAVES_GATE_UP if recompute_h else SAVES_INPUT) * in_place
            launch = self._backward_launch(Variant(multiplies, True, recompute_h, in_place))
            matrices = first, weight, gate_up, gate_up, h if recompute_h else gate_up
            yield PlannedLaunch(name, trains, launch, matrices)
        yield from self.products.launches(self.problem)

    def _forward_launch(self, save: bool) -> Launch:
        sizes = *self.problem.sizes, self._up_row
        if self._forward == WARP_SPECIALIZED:
            return self._hopper.forward_launch(self._device, *sizes, save, self._activation)
        return fwd_launch(self._device, *sizes, save, self._activation)

    def _backward_launch(self, variant: Variant) -> Launch:
        sizes = self.problem.sizes
        if variant.product and self._backward == WARP_SPECIALIZED:
            return self._hopper.backward_launch(
                self._device, *sizes, variant.output, self._activation
            )
        return bwd_launch(self._device, *sizes, variant, self._activation)

    def _fall_back_to_tiles(self, error: TritonError) -> None:
        """Use the kernels by tiles from now on: those with roles do not compile."""
        disable_hopper_kernels(error)
        self._forward = TILED if self._forward == WARP_SPECIALIZED else self._forward
        self._backward = TILED if self._backward == WARP_SPECIALIZED else self._backward
        self.path = self.path.replace(WARP_SPECIALIZED, TILED)
        self._launches.clear()
        PREPARED.clear()

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
    from fusedlib.ops.mlp import few_tokens

    chosen = choose_route(problem)
    if chosen.few:
        return Plan(problem, chosen, few_tokens.Products(problem))
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
