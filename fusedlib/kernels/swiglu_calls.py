"""The fused kernels as functions that check their matrices and allocate their results.

Shapes and equations as in `fusedlib.kernels.swiglu`. `product` is where every plain product of the
MLP goes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedlib.kernels.launch import check_matrix, multiprocessors, rows_contiguous
from fusedlib.kernels.split import split_mm, split_mm_operator, split_pays
from fusedlib.kernels.swiglu import fill_bwd, fill_fwd
from fusedlib.kernels.swiglu_configs import FEW_TOKENS, architecture, precision_of

# Tiles of the fused kernel on Hopper (`fusedlib.kernels.hopper`).
BLOCK_M, FORWARD_N, BACKWARD_N = 128, 128, 256


def product(a: Tensor, b: Tensor) -> Tensor:
    """A B (m, n) of A (m, k) and B (k, n), any strides, in their dtype.

    fp32 on a GPU, where torch's own precision is "highest", by split factors.
    """
    if not _splits(a) or precision_of(a) != "ieee":
        return torch.mm(a, b)
    watched = torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling()
    if watched or any(type(t) is not Tensor and type(t) is not Parameter for t in (a, b)):
        return split_mm_operator(a, b)
    return split_mm(a, b)


def _splits(like: Tensor) -> bool:
    """Whether products of such tensors are plain ones of split factors, no epilogue fused."""
    return like.dtype == torch.float32 and like.is_cuda


def _gate_up(x: Tensor, w_gate_up: Tensor) -> Tensor:
    """gate|up (tokens, 2·inner) as a plain product.

    In fp32, where torch multiplies, as two: over packed weights cuBLAS's TF32 took 3 % longer than
    Liger's two products and kernel at 4096·4096 (H200, torch 2.11), and its IEEE product erred 1.3
    times more at 256·4096.
    """
    tokens, wide, hidden = x.shape[0], *w_gate_up.shape
    splits = precision_of(x) == "ieee" and split_pays(tokens, wide, hidden)
    # Halves that do not begin at 16 bytes would be slower than what is gained.
    if not _splits(x) or splits or wide % 8:
        return product(x, w_gate_up.t())
    both = x.new_empty((tokens, wide))
    for rows, columns in zip(w_gate_up.chunk(2), both.chunk(2, dim=1), strict=True):
        torch.mm(x, rows.t(), out=columns)
    return both


def _apart(like: Tensor, tokens: int, inner: int, block_n: int) -> bool:
    """Whether cuBLAS's product and a pointwise kernel run instead of one fused kernel.

    They are faster on Hopper where the fused kernel's tiles, BLOCK_M tokens by block_n columns of
    h, are no more than its multiprocessors: nothing then hides an epilogue. One H200, bf16, in a
    graph with a cold L2, µs (apart / fused), forward and dh:

    | tokens·width | 128·4096 | 256·2048 | 256·8192 | 512·4096 | 1024·2048 |
    |--------------|----------|----------|----------|----------|-----------|
    | gate, up, h  | 32 / 63  | 17 / 35  | 106 / 126| 53 / 64  | 32 / 37   |
    | d(gate|up)   | 23 / 37  | 14 / 23  | 62 / 68  | 35 / 39  | 25 / 26   |
    """
    if not like.is_cuda or tokens <= FEW_TOKENS or like.dtype == torch.float32:
        return False
    return tokens <= most_apart(like.device, inner, block_n)


def most_apart(device: torch.device, inner: int, block_n: int) -> int:
    """The most tokens in half precision for which `_apart` holds, at least FEW_TOKENS."""
    if device.type != "cuda" or architecture(device) != 90:
        return FEW_TOKENS
    return max(multiprocessors(device) // -(-inner // block_n) * BLOCK_M, FEW_TOKENS)


def swiglu_fwd(x: Tensor, w_gate_up: Tensor, *, save: bool) -> tuple[Tensor, Tensor | None]:
    """h (tokens, inner), and gate|up (tokens, 2·inner) if it is to be saved.

    Args:
        x: (tokens, hidden), fp16, bf16 or fp32 (as precise as torch's own fp32 products are set).
        w_gate_up: (2·inner, hidden), of x's dtype and device.
        save: also store gate|up.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    check_matrix("x", x, ("tokens", "hidden"), x)
    check_matrix("w_gate_up", w_gate_up, ("2·inner", x.shape[1]), x)
    return unchecked_fwd(x, w_gate_up, save)


def unchecked_fwd(x: Tensor, w_gate_up: Tensor, save: bool) -> tuple[Tensor, Tensor | None]:
    """`swiglu_fwd` on matrices that are known to fit."""
    tokens, wide = x.shape[0], w_gate_up.shape[0]
    if _splits(x) or _apart(x, tokens, wide // 2, FORWARD_N):
        both = _gate_up(x, w_gate_up)
        _, activated = unchecked_bwd(None, None, both, True, False)
        assert activated is not None
        return activated, both if save else None
    h = x.new_empty((tokens, wide // 2))
    gate_up = x.new_empty((tokens, wide)) if save else None
    if 0 in (tokens, wide, x.shape[1]):  # no program to launch: an empty sum is zero
        return h.zero_(), None if gate_up is None else gate_up.zero_()
    fill_fwd(rows_contiguous(x), rows_contiguous(w_gate_up), h, gate_up)
    return h, gate_up


def swiglu_bwd(
    upstream: Tensor | None, w_down: Tensor | None, gate_up: Tensor, *, output: bool
) -> tuple[Tensor | None, Tensor | None]:
    """d(gate|up) (tokens, 2·inner) and, if asked for, h (tokens, inner), both new.

    Args:
        upstream: with `w_down` dy (tokens, hidden), without it dh (tokens, inner); None when only
            h is wanted.
        w_down: (hidden, inner), or None.
        gate_up: (tokens, 2·inner), what the forward saved.
        output: also recompute h.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    check_matrix("gate_up", gate_up, ("tokens", "2·inner"), gate_up)
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    hidden = inner if w_down is None else w_down.shape[0]
    if w_down is not None:
        check_matrix("w_down", w_down, (hidden, inner), gate_up)
    if upstream is not None:
        check_matrix("dh" if w_down is None else "dy", upstream, (tokens, hidden), gate_up)
    return unchecked_bwd(upstream, w_down, gate_up.contiguous(), output, False)


def unchecked_bwd(
    upstream: Tensor | None, w_down: Tensor | None, gate_up: Tensor, output: bool, in_place: bool
) -> tuple[Tensor | None, Tensor | None]:
    """`swiglu_bwd` on matrices that are known to fit, gate_up contiguous.

    In place, d(gate|up) is written over gate_up and is the same tensor.
    """
    tokens, wide = gate_up.shape
    apart = _splits(gate_up) or _apart(gate_up, tokens, wide // 2, BACKWARD_N)
    if apart and upstream is not None and w_down is not None:
        upstream, w_down = product(upstream, w_down), None
    d_gate_up = None
    if upstream is not None:
        d_gate_up = gate_up if in_place else gate_up.new_empty((tokens, wide))
    h = gate_up.new_empty((tokens, wide // 2)) if output else None
    if 0 in (tokens, wide) or (w_down is not None and w_down.shape[0] == 0):
        for result in filter(torch.is_tensor, (d_gate_up, h)):
            result.zero_()
    elif upstream is None or w_down is None:
        upstream = None if upstream is None else upstream.contiguous()
        fill_bwd(upstream, None, gate_up, d_gate_up, h)
    else:
        fill_bwd(rows_contiguous(upstream), rows_contiguous(w_down), gate_up, d_gate_up, h)
    return d_gate_up, h
