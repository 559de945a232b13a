"""Which fp32 products are split: those that are faster so than by cuBLAS. Imports no Triton."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fusedlib.launch import has_kernels

# Below these sizes splitting an fp32 product costs what the tensor cores save, and the MLP in fp32
# is plain PyTorch. The launches take the host 30 to 60 µs, cuBLAS's one 18; for 2³¹ multiplications
# cuBLAS needs the device for 98 µs, for 2³² 185. TF32 products stay torch's: our blocks cut the low
# bits of their factors off, an error of 1.6e-3 where cuBLAS has 5.1e-4 (H200, torch 2.11, triton
# 3.6).
MIN_SPLIT_SIZE = 256


MIN_SPLIT_RESULTS = 2**20


MIN_SPLIT_WORK = 2**32


SPLITTING_ALLOWED = os.environ.get("FUSEDLIB_SPLIT") != "0"  # 0: IEEE fp32, every product torch's


UNBOUNDED_TOKENS = 1 << 20


def is_faster_split(m: int, n: int, k: int) -> bool:
    """True if the fp32 product of (m, k) by (k, n) is faster split than by cuBLAS, and allowed."""
    large = min(m, n, k) >= MIN_SPLIT_SIZE and m * n >= MIN_SPLIT_RESULTS
    return SPLITTING_ALLOWED and large and m * n * k >= MIN_SPLIT_WORK


def any_is_faster_split(tokens: int, outputs: int, inputs: int) -> bool:
    """True if any of the three products of a linear layer, y, d_x and d_W, is faster split."""
    return (
        is_faster_split(tokens, outputs, inputs)
        or is_faster_split(tokens, inputs, outputs)
        or is_faster_split(outputs, inputs, tokens)
    )


def splits_product(like: Tensor, m: int, n: int, k: int) -> bool:
    """True if the product (m, k) by (k, n) of tensors like this one runs from split factors."""
    if like.dtype != torch.float32 or fp32_precision(like) != "ieee":
        return False
    return is_faster_split(m, n, k)


def may_split_linear(x: Tensor, outputs: int) -> bool:
    """True if a linear layer of x, or its backward, may run a product from split factors."""
    if x.dtype != torch.float32 or not has_kernels(x.device):
        return False
    inputs = x.shape[-1]
    tokens = tokens_to_route_by(x.numel() // max(inputs, 1), MIN_SPLIT_SIZE)
    return any_is_faster_split(tokens, outputs, inputs)


def tokens_to_route_by(tokens: int, least: int) -> int:
    """The number of tokens to decide by: under torch.compile and torch.export an open one may be
    any that its bounds allow, so that it counts as many, unless all of them are fewer than `least`.
    """
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
    if like.dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
