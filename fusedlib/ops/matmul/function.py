"""fp32 products of split factors on NVIDIA GPUs, where that is faster, else PyTorch; linear layers.

`multiply` is the one door to a split product, for every operation. A linear layer's three products

    y = x Wᵀ + b          d_x = dy W          d_W = dyᵀ x          d_b = Σ_tokens dy

| product | sum over | x          | W          | dy         |
|---------|----------|------------|------------|------------|
| y       | inputs   | by rows    | by rows    |            |
| d_x     | outputs  |            | by columns | by rows    |
| d_W     | tokens   | by columns |            | by columns |

split each operand twice, once for each of its axes, for an operand is scaled along the sum. Saved
are x and W, as by torch, each where the other wants a gradient; the parts, as large as both
factors, live as long as their product. Splitting again in backward instead of keeping parts costs
one pass over x and one over W, 8 bytes an element: 8192·4096·4096 reads and writes 0.4 GB, 0.1 ms
of 4.6 at an H200's 3.8 TB/s. W's parts are kept where the user says that it stays as it is
(`fusedlib.fixed_weights`). Where backward itself is differentiated or batched all products are
torch's, which have derivatives of every order. `kernels` beside this has the error bound; a bias
adds one more rounding of y.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional
from torch.overrides import has_torch_function

from fusedlib.compat import constant_while_compiling, is_transformed
from fusedlib.fixed import kept_of_fixed
from fusedlib.invariant import is_batch_invariant
from fusedlib.launch import (
    Config,
    HopperLaunch,
    Launch,
    allocator,
    architecture,
    cdiv,
    contiguous_layout,
    current_device,
    current_index,
    has_kernels,
    launch_for,
    multiprocessors,
    with_roles,
    without_memory,
)
from fusedlib.op import (
    PLAIN_TYPES,
    STRIDED,
    call_prepared,
    declare,
    is_plain_eager,
    is_transformed_gradient,
    operator,
    save_operands,
)
from fusedlib.ops.arguments import autocast_enabled, require_alike, require_tensors, shape_of

# Below these sizes splitting an fp32 product costs what the tensor cores save, and the MLP in fp32
# is plain PyTorch. The launches take the host 30 to 60 µs, cuBLAS's one 18; for 2³¹ multiplications
# cuBLAS needs the device for 98 µs, for 2³² 185. TF32 products stay torch's: our blocks cut the low
# bits of their factors off, an error of 1.6e-3 where cuBLAS has 5.1e-4 (H200, torch 2.11, triton
# 3.6).
MIN_SPLIT_SIZE, MIN_SPLIT_RESULTS, MIN_SPLIT_WORK = 256, 2**20, 2**32
SPLITTING_ALLOWED = os.environ.get("FUSEDLIB_SPLIT") != "0"  # 0: IEEE fp32, every product torch's
UNBOUNDED_TOKENS = 1 << 20
SPAN = 1024  # terms that are scaled as one
TILE = 128  # The parts are filled up with zeros to multiples of it: no product masks its loads.
# Lines of which a program splits a span. One H100, 16384·3072 and 3072·8192, TB/s, where a copy has
# 3.0: 2 rows of 4 warps 2.92 and 2.78; 16 columns of 8 warps 2.45 and 2.30, of 16 2.31 and 2.18, 32
# of 32 2.07 and 1.90.
ROWS, COLUMNS = Config(num_warps=4, lines=2), Config(num_warps=8, lines=16)
INTERPRETED_LINES = Config(num_warps=4, lines=TILE)  # fewer operations are faster there
# Where Hopper's own kernel is not: three tiles of fp32 live at once.
CONFIGS = {
    80: Config(64, 64, 32, 4, 4),
    89: Config(64, 64, 32, 4, 3),
    90: Config(128, 64, 64, 8, 3),
    100: Config(128, 64, 64, 8, 3),
}
INTERPRETER = Config(64, 32, 64, 4, 1, group_m=2)  # fewer operations are faster there
WITH_ROLES = with_roles(240, 24)  # Hopper's own kernel
# Few results are shared among programs along the sum.
MAX_K_SPLITS, MIN_K_PER_SPLIT = 4, 1024
Shape = tuple[int, ...]
Turned = tuple[bool, bool]  # whether A, whether B is given transposed


# --- linear layers -------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b with true gradients of all three, as `torch.nn.functional.linear`.

    In fp32, where torch's matmul precision is "highest" and products are large, all three products
    (y, d_x and d_W) run on the tensor cores from two fp16 parts a factor. An element that sums k
    terms a b, of a row of one factor and a column of the other, errs by at most

        (18 + k/4096) 2⁻²² Σ|a||b| + 2⁻³⁹ (max|a| Σ|b| + max|b| Σ|a|)

    (before Hopper 30 for 18), and a bias adds half a unit in y's last place; derived in
    `fusedlib.ops.matmul.kernels`. IEEE fp32's own bound is k/4 2⁻²² Σ|a||b|; FUSEDLIB_SPLIT=0 in
    the environment asks for IEEE arithmetic.
    Any other dtype, precision, size or device is `torch.nn.functional.linear`; so is a call under
    autocast, in a transform of torch.func or in forward-mode differentiation, on a subclass of
    Tensor or a sparse or nested one, and every derivative of a derivative.

    Kept for backward are x and W, as by torch. `torch.autograd.grad(y, x)` computes d_W too if W
    wants a gradient. A product holds parts as large as both its factors while it runs.

    Args:
        x: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,), or None.

    Returns:
        (..., out_features), in x's dtype, or autocast's.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: shapes, dtypes or devices that do not go together.
    """
    # Most calls are torch's: the key of a prepared one takes the host four times as long as this.
    if type(x) in PLAIN_TYPES and isinstance(weight, Tensor) and not is_dynamo_compiling():
        shape = weight.shape
        fits = bias is None or (isinstance(bias, Tensor) and bias.shape == shape[:1])
        if (
            (len(shape) == 2 and fits and weight.device == x.device)
            and (x.dtype is not torch.float32 or x.numel() * shape[0] < MIN_SPLIT_WORK)
            and not is_batch_invariant()
        ):  # fmt: skip
            try:
                return functional.linear(x, weight, bias)
            except RuntimeError:  # torch's, which names none of them
                _prepare(False, x, weight, bias)
                raise
    y: Tensor = call_prepared(_prepare, (x, weight, bias))
    return y


def _prepare(
    eager: bool, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Callable[..., Tensor]:  # fmt: skip
    """Check the operands, and choose what multiplies them."""
    if any(map(_is_for_torch, (x, weight, bias))):
        return functional.linear
    _check(x, weight, bias)
    return _by_products if _may_split(x, [weight], [bias]) else functional.linear


def _by_products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Any = LINEAR if _is_ieee(x.device) else functional.linear
    y: Tensor = product(x, weight, bias)
    return y


def _is_ieee(device: torch.device) -> bool:
    """True if torch would multiply fp32 in IEEE arithmetic."""
    return not autocast_enabled(device.type) and _precision() == "ieee"


def linear_by_each(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """`linear` of one x by each weight, (outputs, inputs), with each bias, (outputs,) or None.

    Where all products go the same way they are one product: x is split once, and narrow layers
    count with the wide ones. Values have the same bits as those of the joined weight.
    """
    if (
        is_plain_eager(x, *weights)
        and len({w.requires_grad for w in weights}) == len({b is None for b in biases}) == 1
        and _may_split(x, weights, biases)
        and _is_ieee(x.device)
    ):
        for weight, bias in zip(weights, biases, strict=True):
            _check(x, weight, bias)
        y: Tensor = JOINED_LINEAR.direct(x, *weights, *biases)
        # Nobody else has y: results may be written to, which autograd forbids for `split`'s.
        return y.unsafe_split_with_sizes([w.shape[0] for w in weights], dim=-1)
    return tuple(map(partial(linear, x), weights, biases))


def _may_split(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """True if a product of this call or of its backward may run from split factors.

    A subclass, DTensor say, may have rules for torch's operators and none for ours; so may sparse
    tensors.
    """
    if x.dtype != torch.float32 or not has_kernels(x.device) or is_transformed():
        return False
    if any(
        t is not None and (type(t) not in PLAIN_TYPES or t.layout is not STRIDED)
        for t in (x, *weights, *biases)
    ):
        return False
    inputs, outputs = x.shape[-1], sum(weight.shape[0] for weight in weights)
    tokens = tokens_to_route_by(x.numel() // max(inputs, 1), MIN_SPLIT_SIZE)
    return any_is_faster_split(tokens, outputs, inputs)


def _is_for_torch(operand: object) -> bool:
    """True for what torch knows and `_check` does not: sparse, nested, or of torch.fx, say."""
    if isinstance(operand, Tensor):
        return operand.is_nested or operand.layout is not STRIDED
    return operand is not None and has_torch_function((operand,))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise where the operands do not go together."""
    require_tensors("bias", x=x, weight=weight, bias=bias)
    if x.ndim == 0:
        raise ValueError("x must be (..., in_features), got a scalar")
    if weight.ndim != 2:
        raise ValueError(f"weight must be (out_features, in_features), got {shape_of(weight)}")
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x must be (..., {weight.shape[1]}) for weight {shape_of(weight)}, got {shape_of(x)}"
        )
    if bias is not None and (bias.ndim != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(
            f"bias must be ({weight.shape[0]},) for weight {shape_of(weight)}, got {shape_of(bias)}"
        )
    require_alike(x=x, weight=weight, bias=bias)


# --- which products are split --------------------------------------------------------------------


def is_faster_split(m: int, n: int, k: int) -> bool:
    """True if the fp32 product of (m, k) by (k, n) is faster split than by cuBLAS, and allowed.

    Where m may not count, as in `batch_invariant`, the other factor decides, a weight mostly.
    """
    if is_batch_invariant():
        return SPLITTING_ALLOWED and min(n, k) >= MIN_SPLIT_SIZE and n * k >= MIN_SPLIT_RESULTS
    large = min(m, n, k) >= MIN_SPLIT_SIZE and m * n >= MIN_SPLIT_RESULTS
    return SPLITTING_ALLOWED and large and m * n * k >= MIN_SPLIT_WORK


def any_is_faster_split(tokens: int, outputs: int, inputs: int) -> bool:
    """True if any of the three products of a linear layer, y, d_x and d_W, is faster split."""
    return (
        is_faster_split(tokens, outputs, inputs)
        or is_faster_split(tokens, inputs, outputs)
        or is_faster_split(outputs, inputs, tokens)
    )


def tokens_to_route_by(tokens: int, least: int) -> int:
    """The number of tokens to decide by: under torch.compile and torch.export an open one may be
    any that its bounds allow, so that it counts as many, unless all of them are fewer than `least`.
    In `batch_invariant` it counts as many, too.
    """
    if is_batch_invariant():
        return UNBOUNDED_TOKENS
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import has_static_value, statically_known_true

        if not has_static_value(tokens):
            return 0 if statically_known_true(tokens < least) else UNBOUNDED_TOKENS
    return tokens


def fp32_precision(like: Tensor) -> str:
    """How torch multiplies fp32; "ieee" for other dtypes.

    "tf32" at `torch.set_float32_matmul_precision` "high" and "medium" (which torch on CUDA does not
    tell apart) and where `torch.backends.cuda.matmul.fp32_precision` says so.
    """
    return "ieee" if like.dtype != torch.float32 else _precision()


@constant_while_compiling  # torch.compile traces anew when it changes
def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def splits(
    a: Tensor, b: Tensor, turned: Turned = (False, False), lower_half: Tensor | None = None
) -> bool:  # fmt: skip
    """True if `multiply` computes this product from split factors."""
    faster = is_faster_split(*_sizes(a.shape, b.shape, turned, lower_half))
    return faster and a.dtype == torch.float32 and fp32_precision(a) == "ieee"


def _sizes(a: Shape, b: Shape, turned: Turned, lower_half: object) -> tuple[int, int, int]:
    """m, n and k."""
    m, k = a[::-1] if turned[0] else a
    n = b[not turned[1]]
    return m, 2 * n if turned[1] and lower_half is not None else n, k


# --- a product -----------------------------------------------------------------------------------


def multiply(
    a: Tensor, b: Tensor, turned: Turned = (False, False), bias: Tensor | None = None,
    lower_half: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A B (m, n), or A B + bias, as a new tensor without a gradient: split, or torch's.

    Whatever watches operators sees one, which decides when it runs.

    Args:
        a: A, (m, k), or its transpose; copied where neither rows nor columns are contiguous.
        b: B, (k, n), or its transpose.
        turned: whether a, whether b is the transpose.
        bias: (n,).
        lower_half: where `splits` says so of all four, the lower half of b's rows, of b's shape; b
            is the upper one then. Rows of both are contiguous.
    """
    product: Callable[..., Tensor] = _multiply if is_plain_eager(a, b) else SPLIT_MM
    return product(a, b, *turned, bias, lower_half)


def sum_of_products(factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ A B of (tokens, k) and (k, n), all torch's: each is rounded as it is added to the others.

    In `batch_invariant` the sum of half-precision products is fp32 and rounded once: to numbers of
    half precision cuBLAS adds few rows another way than many (H200, 16 rows: 29 % of elements).
    """
    (a, b), *others = factors
    if is_batch_invariant() and a.is_cuda and a.dtype.itemsize == 2:
        total = torch.mm(a, b, out_dtype=torch.float32)
        for left, right in others:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        return total.to(a.dtype)
    total = torch.mm(a, b)
    for left, right in others:
        total.addmm_(left, right)
    return total


def _multiply(
    a: Tensor, b: Tensor, a_turned: bool, b_turned: bool, bias: Tensor | None,
    lower_half: Tensor | None,
) -> Tensor:  # fmt: skip
    turned = a_turned, b_turned
    if lower_half is None and not splits(a, b, turned):
        a, b = a.t() if a_turned else a, b.t() if b_turned else b
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    a, a_turned = _stored(a, a_turned)
    if lower_half is None:
        b, b_turned = _stored(b, b_turned)
    else:
        b, lower_half = b.contiguous(), lower_half.contiguous()
    product = _split_product(a, b, (a_turned, b_turned), lower_half)
    if bias is not None:
        product += bias
    return product


def _stored(factor: Tensor, turned: bool) -> tuple[Tensor, bool]:
    """A factor whose rows are contiguous, and whether it is transposed."""
    if factor.stride(1) == 1:
        return factor, turned
    return (factor.mT, not turned) if factor.stride(0) == 1 else (factor.contiguous(), turned)


def _split_product(a: Tensor, b: Tensor, turned: Turned, lower_half: Tensor | None) -> Tensor:
    """A B of factors whose rows are contiguous.

    A `SplitProduct` is kept where its binaries serve again: on a GPU, for addresses of 16 bytes.
    """
    if a.is_cuda and current_index() != a.get_device():
        with current_device(a):
            return _split_product(a, b, turned, lower_half)
    has_lower_half = lower_half is not None
    sizes = a.shape, b.shape, a.stride(0), b.stride(0)
    key = "split", sizes, turned, a.get_device(), has_lower_half
    make = partial(SplitProduct, a.device, a, b, turned, has_lower_half)
    lowest = b if lower_half is None else lower_half
    # A product costs an H200's host 25 µs where it is kept, 75 where all is looked up anew, torch's
    # 17.
    product: Callable[..., Tensor] = launch_for(key, make, a, b, lowest)
    return product(a, b, lower_half)


def _fake_product(a: Tensor, b: Tensor, *more: Any) -> Tensor:
    return a.new_empty(_sizes(a.shape, b.shape, more[:2], more[3])[:2])


def _product_flops(a: Shape, b: Shape, *more: Any, **_: Any) -> int:
    return 2 * prod(_sizes(a, b, more[:2], more[3]))


SPLIT_MM = operator("split_mm", _multiply, _fake_product, flops=_product_flops)


class FactorSplitter:
    """Splits matrices like one, (rows, columns), along rows or by columns; half of their rows may
    lie in another tensor.
    """

    def __init__(
        self, device: torch.device, like: Tensor, by_columns: bool, has_lower_half: bool = False
    ) -> None:  # fmt: skip
        from fusedlib.ops.matmul.kernels import _split_kernel

        upper_rows, columns = like.shape
        rows = 2 * upper_rows if has_lower_half else upper_rows
        tall, wide = cdiv(rows, TILE) * TILE, cdiv(columns, TILE) * TILE
        self._new, self._by_columns = allocator(device), by_columns
        parts = contiguous_layout((2 * tall, wide), torch.float16)
        length, lines = (tall, wide) if by_columns else (wide, tall)
        spans = cdiv(length, SPAN)
        self.results = parts, contiguous_layout((2 * spans, lines), torch.int32)
        config = (COLUMNS if by_columns else ROWS) if device.type == "cuda" else INTERPRETED_LINES
        programs = spans * cdiv(lines, config.lines), 1, 1
        sizes = rows, columns, like.stride(0), upper_rows
        constants = {"BY_COLUMNS": by_columns, "TILE": TILE, "SPAN": SPAN}
        self.launch = Launch(_split_kernel, config, programs, sizes, constants)

    def __call__(self, source: Tensor, lower_half: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The parts and factors; `lower_half` has source's strides."""
        return kept_of_fixed(self._split_now, self._by_columns, source, lower_half)

    def _split_now(self, source: Tensor, lower_half: Tensor | None) -> tuple[Tensor, Tensor]:
        parts, factors = self._new(*self.results[0]), self._new(*self.results[1])
        self.launch(source, source if lower_half is None else lower_half, parts, factors)
        return parts, factors


class SplitProduct:
    """C = A B at the sizes and strides of two factors whose rows are contiguous; b may be half."""

    def __init__(
        self, device: torch.device, a: Tensor, b: Tensor, turned: Turned, has_lower_half: bool
    ) -> None:
        m, n, k = _sizes(a.shape, b.shape, turned, has_lower_half or None)
        self._split_a = FactorSplitter(device, a, by_columns=turned[0])
        self._split_b = FactorSplitter(device, b, not turned[1], has_lower_half)
        k_splits = choose_k_splits(m, n, k, multiprocessors(device))
        k_per_split = cdiv(k, k_splits * MIN_K_PER_SPLIT) * MIN_K_PER_SPLIT
        k_splits = cdiv(k, k_per_split)
        self._c = contiguous_layout((m, n) if k_splits == 1 else (k_splits, m, n), torch.float32)
        self._new = allocator(device)
        self._multiply = _launch(device, (m, n, k, k_per_split), turned)

    def launches(self, a: Tensor, b: Tensor) -> Iterator[tuple[Launch, tuple[Tensor, ...]]]:
        """Each launch, and matrices like those that it takes."""
        a_parts, a_factors = without_memory(*self._split_a.results)
        b_parts, b_factors = without_memory(*self._split_b.results)
        yield self._split_a.launch, (a, a, a_parts, a_factors)
        yield self._split_b.launch, (b, b, b_parts, b_factors)
        c = without_memory(self._c)
        yield self._multiply, (a_parts, b_parts, a_factors, b_factors, *c)

    def __call__(self, a: Tensor, b: Tensor, lower_half: Tensor | None = None) -> Tensor:
        """C (m, n), fp32, on the current device."""
        a_parts, a_factors = self._split_a(a)
        b_parts, b_factors = self._split_b(b, lower_half)
        c = self._new(*self._c)
        self._multiply(a_parts, b_parts, a_factors, b_factors, c)
        if c.ndim == 2:
            return c
        del a_parts, b_parts  # before the sum allocates
        return c[0] + c[1] if len(c) == 2 else c.sum(0)  # 10 µs for 19, 1024·3072 on an H100


def choose_k_splits(m: int, n: int, k: int, programs: int) -> int:
    """Into how many shares the sum is cut, so that there is no last round of few tiles.

    In rounds of whole tiles; shares are written and read again, 8 bytes a result, by a launch more.
    A round takes 17 ns a term on an H200, as long as 4 MB.
    """
    tiles = cdiv(m, TILE) * cdiv(n, TILE)

    def rounds(k_splits: int) -> float:
        more = (tiles / programs * 250 * k_splits + 300) / k if k_splits > 1 else 0
        return cdiv(tiles * k_splits, programs) / k_splits + more

    most = 1 if is_batch_invariant() else min(MAX_K_SPLITS, k // MIN_K_PER_SPLIT)
    return min(range(1, max(1, most) + 1), key=rounds)


def _launch(device: torch.device, sizes: tuple[int, int, int, int], turned: Turned) -> Launch:
    """Of products of these m, n and k, and of so many terms that a program sums."""
    if device.type == "cuda" and architecture(device) == 90 and has_hopper_kernel():
        return _hopper_launch(device, sizes, turned)
    from fusedlib.ops.matmul.kernels import _split_product_kernel

    config = CONFIGS[architecture(device)] if device.type == "cuda" else INTERPRETER
    tiles = cdiv(sizes[0], config.block_m) * cdiv(sizes[1], config.block_n)
    grid = tiles, cdiv(sizes[2], sizes[3]), 1
    constants = {"A_T": turned[0], "B_T": turned[1], "SPAN": SPAN, "TILE": TILE}
    return Launch(_split_product_kernel, config, grid, sizes, constants)


@cache
def has_hopper_kernel() -> bool:
    """False where Gluon, which is experimental, has other names than those of 3.6 and 3.7."""
    try:
        import fusedlib.ops.matmul.hopper  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def _hopper_launch(
    device: torch.device, sizes: tuple[int, int, int, int], turned: Turned
) -> HopperLaunch:
    from fusedlib.ops.matmul.hopper import _hopper_split_product_kernel

    tiles = cdiv(sizes[0], TILE) * cdiv(sizes[1], TILE)
    tiles *= cdiv(sizes[2], sizes[3])
    k = WITH_ROLES.block_k
    blocks = [[k, TILE] if turned[0] else [TILE, k], [TILE, k] if turned[1] else [k, TILE]]
    constants = {"A_T": turned[0], "B_T": turned[1], "TILE": TILE, "SPAN": SPAN // k}
    programs = min(tiles, multiprocessors(device))
    kernel = _hopper_split_product_kernel
    return HopperLaunch(kernel, WITH_ROLES, programs, blocks, sizes, constants)


# --- forward and backward of a linear layer ------------------------------------------------------


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y (..., outputs) of x (..., inputs), fp32."""
    outputs, inputs = weight.shape
    rows = x.reshape(x.shape[:-1].numel(), inputs)
    y = multiply(rows, weight, (False, True), bias)
    # In place: autograd lets nobody write to a view that a Function returns.
    return y.resize_(*x.shape[:-1], outputs)


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


# The next two are of one layer, and of several: of x, their weights and then their biases.


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    weights = inputs[1 : 1 + len(inputs) // 2]
    wants_x, wants_weights, *_ = ctx.needs_input_grad
    ctx.outputs = [weight.shape[0] for weight in weights]
    kept = weights if wants_x else [None] * len(weights)
    save_operands(ctx, (inputs[0] if wants_weights else None, *kept), with_graph=True)


def _gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    x, *weights = ctx.saved_tensors
    count = len(weights)
    if dy is None:
        return (None,) * (1 + 2 * count)
    wants_x, *wanted = ctx.needs_input_grad
    d_x, *others = _products(dy, x, _joined(weights) if wants_x else None, any(wanted[count:]))
    if count == 1:
        return d_x, *others
    parts = [[None] * count if g is None else g.split(ctx.outputs) for g in others]
    return d_x, *parts[0], *parts[1]


def _products(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, wants_bias: bool
) -> tuple[Tensor | None, ...]:
    """d_x, d_W and d_b, each if wanted: x is given for d_W, weight for d_x."""
    plain = torch.is_grad_enabled() or is_transformed_gradient(dy)
    product: Callable[..., Tensor] = torch.mm if plain else multiply
    rows = dy.reshape(-1, dy.shape[-1])
    if 1 not in rows.stride():
        rows = rows.contiguous()  # once for both products
    d_x = d_weight = None
    if weight is not None:
        d_x = product(rows, weight).view(*dy.shape[:-1], weight.shape[1])
    if x is not None:
        d_weight = product(rows.t(), x.reshape(-1, x.shape[-1]))
    return d_x, d_weight, rows.sum(0) if wants_bias else None


def _flops(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(x) * weight[0]


LINEAR = declare(
    "linear",
    linear_fwd,
    _shape,
    setup_context=_setup_context,
    gradients=_gradients,
    flops=_flops,
    differentiable_twice=True,
)


def _joined_fwd(x: Tensor, *operands: Any) -> Tensor:
    """All results, side by side; the weights are joined for each product and not kept."""
    weights, biases = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    return linear_fwd(x, _joined(weights), None if biases[0] is None else _joined(biases))


def _joined(operands: Sequence[Tensor]) -> Tensor:
    return operands[0] if len(operands) == 1 else torch.cat([*operands])


# Of layers of which all want gradients, or none does.
JOINED_LINEAR: Any = type(
    "JoinedLinear", (LINEAR.function,), {"forward": staticmethod(_joined_fwd)}
)
