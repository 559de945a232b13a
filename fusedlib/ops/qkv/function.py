"""q, k and v of one x by three linear layers, as one operation with one gradient of x.

torch alone would keep three gradients of x and add them in passes of their own; here each product
adds to the one before it. The weights are used where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusedlib.compat import is_transformed
from fusedlib.invariant import is_batch_invariant
from fusedlib.launch import (
    Launch,
    allocator,
    contiguous_layout,
    current_device,
    has_kernels,
    misalignment,
    prepared,
)
from fusedlib.op import (
    DirectFunction,
    is_plain_eager,
    is_transformed_gradient,
    outside_autocast,
    save_operands,
)
from fusedlib.ops.arguments import ALIGNMENT, autocast_enabled, contiguous_and_aligned
from fusedlib.ops.matmul import function as linear_function
from fusedlib.ops.mlp.route import FUSED_KERNEL_DTYPES
from fusedlib.ops.recomputed import recompute_in_backward

# Elements of all three weights, up to which backward joins them, as it joins the gradients. One
# H100, bf16, µs, the products apart / joined: Llama-1B's (6.3 M) with 512, 2,048 and 8,192 tokens
# 40 / 40, 91 / 93 and 348 / 339, and 40 of the host's less; Qwen's 0.5B (1 M) 23 / 15, 38 / 28 and
# 92 / 77; Llama-8B's (25 M) 101 / 127, 318 / 346 and 1267 / 1294.
MOST_JOINED = 2**23
MAX_TOKENS = 1024  # the most whose q, k and v one launch may give


def projections(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], *, split: bool = False
) -> tuple[Tensor, ...]:  # fmt: skip
    """x Wᵀ + b of each of three linear layers.

    Args:
        x: (..., inputs).
        weights: three, (outputs, inputs).
        biases: three, (outputs,) or None.
        split: fp32 products of split factors where they pay, as by `fusedlib.linear`.

    Returns:
        (..., outputs) of each.
    """
    if x.dtype == torch.float32 and split:
        return linear_function.linear_by_each(x, weights, biases)
    if not is_plain_eager(x, *weights) or is_transformed():
        return tuple(map(partial(linear, x), weights, biases))
    operands: list[Any] = [x, *weights, *biases]
    if autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        operands = [None if t is None else t.to(dtype) for t in operands]
    if any(t is not None and t.dtype != operands[0].dtype for t in operands):
        return tuple(map(partial(linear, x), weights, biases))  # torch says what is wrong
    results: tuple[Tensor, ...] = Projections.direct(*operands)
    recompute_in_backward(x, results[0])
    return results


class Projections(DirectFunction):
    """q, k and v of x (..., inputs), three weights and three biases, each of which may be None.

    At few tokens all results come by one launch and all gradients by another
    (`fusedlib.ops.qkv.kernels`). With more, small weights are joined for the one
    product that gives d_x, and large ones multiplied apart: then each product is rounded to x's
    dtype as it is added to the ones before.
    """

    @staticmethod
    def forward(x: Tensor, *weights_and_biases: Tensor | None) -> tuple[Tensor, ...]:
        """Three results (..., outputs)."""
        weights: Any = weights_and_biases[:3]
        biases = weights_and_biases[3:]
        results = _at_once(x, weights, biases)
        return results or tuple(map(partial(linear, x), weights, biases))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep x where a weight wants a gradient, and weights where x does."""
        x, *weights = inputs[:4]
        wants_x, *wants_weights = ctx.needs_input_grad[:4]
        ctx.set_materialize_grads(False)
        kept = x if any(wants_weights) else None, *(w if wants_x else None for w in weights)
        save_operands(ctx, kept, with_graph=True)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of x, the weights and the biases, each if it is wanted."""
        x, *weights = ctx.saved_tensors
        wants_x, *wanted = ctx.needs_input_grad
        matrices = [None if dy is None else dy.reshape(-1, dy.shape[-1]) for dy in upstream]
        d_biases = [
            dy.sum(0) if wants and dy is not None else None
            for wants, dy in zip(wanted[3:], matrices, strict=True)
        ]
        d_rows, *d_weights = gradients(
            x if x is None else x.reshape(-1, x.shape[-1]), weights, matrices, wants_x, wanted[:3]
        )
        shape = next((dy.shape[:-1] for dy in upstream if dy is not None), ())
        d_x = None if d_rows is None else d_rows.view(*shape, d_rows.shape[-1])
        return d_x, *d_weights, *d_biases


def gradients(
    x: Tensor | None, weights: Sequence[Tensor | None], upstream: Sequence[Tensor | None],
    wants_x: bool, wants_weights: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """d_x (tokens, inputs) and d_W (outputs, inputs) of each projection, each if wanted.

    Args:
        x: (tokens, inputs), where a weight wants a gradient.
        weights: (outputs, inputs) each, where x does.
        upstream: dy (tokens, outputs) of each, or None.
        wants_x: d_x is wanted.
        wants_weights: d_W of each is.
    """
    every = wants_x and all(wants_weights) and all(dy is not None for dy in upstream)
    if (
        every
        and not torch.is_grad_enabled()
        and not any(is_transformed_gradient(dy) for dy in upstream if dy is not None)
    ):
        few = _gradients_at_once(x, weights, upstream)
        if few is not None:
            return few
    if every and sum(w.numel() for w in weights if w is not None) <= MOST_JOINED:
        assert x is not None
        joined = torch.cat([dy for dy in upstream if dy is not None], dim=1)
        present = [w for w in weights if w is not None]
        d_x = torch.mm(joined, torch.cat(present))
        d_weight = torch.mm(joined.t(), x)
        return d_x, *d_weight.split([w.shape[0] for w in present])
    pairs = zip(upstream, weights, strict=True)
    factors = [(dy, weight) for dy, weight in pairs if dy is not None and weight is not None]
    d_rows = linear_function.sum_of_products(factors) if wants_x and factors else None
    d_weights = [
        torch.mm(dy.t(), x) if wants and dy is not None and x is not None else None
        for dy, wants in zip(upstream, wants_weights, strict=True)
    ]
    return d_rows, *d_weights


# --- few tokens: all results by one launch, all gradients by another -----------------------------

# Of calls with the same sizes: a launch and the results' layouts; nothing where torch is asked.
Prepared = tuple[Launch, tuple[Any, ...]] | tuple[()]


def _at_once(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...] | None:
    """y (..., outputs) of x (..., inputs) and each weight, or None where they are torch's.

    They are for tokens whose tiles do not run at once, other dtypes, sizes that are no multiples
    of 16, where some have a bias and others not, and for operands that are not contiguous or not at
    16 bytes.
    """
    given = [b for b in biases if b is not None]
    if not _may_have_kernels(x) or len(given) not in (0, len(biases)):
        return None
    launch_and_layouts = _prepared("projections_launch", x, weights, bool(given))
    operands = x, *weights, *(given or (x,) * len(biases))  # which is not read
    if not launch_and_layouts or not all(t.is_contiguous() for t in operands):
        return None
    return None if misalignment(operands) else _start(*launch_and_layouts, *operands)


def _gradients_at_once(
    x: Tensor | None, weights: Sequence[Any], upstream: Sequence[Any]
) -> tuple[Tensor, ...] | None:
    """d_x and d_W of each, of dy (tokens, outputs), or None where they are torch's."""
    if x is None or not _may_have_kernels(x):
        return None
    launch_and_layouts = _prepared("gradients_launch", x, weights)
    if not launch_and_layouts:
        return None
    operands: Any = contiguous_and_aligned(x, *weights, *upstream)
    return _start(*launch_and_layouts, *operands)


def _start(launch: Launch, layouts: tuple[Any, ...], *operands: Tensor) -> tuple[Tensor, ...]:
    with current_device(operands[0]):
        new = allocator(operands[0].device)
        results = tuple(new(*layout) for layout in layouts)
        launch(*operands, *results)
    return results


def _may_have_kernels(x: Tensor) -> bool:
    """Whether the kernels for few tokens are asked for x (..., inputs)."""
    return 0 < x.numel() <= MAX_TOKENS * x.shape[-1] and has_kernels(x.device)


def _prepared(name: str, x: Tensor, weights: Sequence[Tensor], *options: bool) -> Prepared:
    key = name, x.shape, *[w.shape for w in weights], x.dtype, x.device, options
    launch_and_layouts: Prepared = prepared(key, _prepare, name, x, weights, *options)
    return launch_and_layouts


def _prepare(name: str, x: Tensor, weights: Sequence[Tensor], *options: bool) -> Prepared:
    inputs, widths = x.shape[-1], tuple(w.shape[0] for w in weights)
    even = not any(size % ALIGNMENT for size in (inputs, *widths))
    if not even or x.dtype not in FUSED_KERNEL_DTYPES or is_batch_invariant():
        return ()
    launch = getattr(_kernels(), name)(x.device, x.numel() // inputs, inputs, widths, *options)
    if launch is None:
        return ()
    shapes: list[tuple[int, ...]] = [(*x.shape[:-1], width) for width in widths]
    if name == "gradients_launch":
        shapes = [tuple(x.shape), *((width, inputs) for width in widths)]
    return launch, tuple(contiguous_layout(shape, x.dtype) for shape in shapes)


@cache
def _kernels() -> Any:
    """Imported late, for Triton need not be there."""
    from fusedlib.ops.qkv import kernels

    return kernels
