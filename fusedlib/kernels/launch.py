"""What every launcher does: check its matrices, and start programs on their device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedlib.kernels.swiglu_configs import DTYPES, Config

INTERPRETED_PROCESSORS = 3  # fewer than a test has tiles, so that a program computes several


def rows_contiguous(matrix: Tensor) -> Tensor:
    """The matrix with the elements of a row side by side; copied if they are not."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def grid(config: Config, like: Tensor, tokens: int, inner: int) -> tuple[int]:
    """One program a tile; persistent ones no more than the device has multiprocessors."""
    tiles = triton.cdiv(tokens, config.block_m) * triton.cdiv(inner, config.block_n)
    if not config.persistent:
        return (tiles,)
    if not like.is_cuda:
        return (min(tiles, INTERPRETED_PROCESSORS),)
    return (min(tiles, torch.cuda.get_device_properties(like.device).multi_processor_count),)


def factors(
    config: Config, a: Tensor, a_block: list[int], b: Tensor, b_block: list[int]
) -> tuple[Any, Any]:
    """Both factors of a product as the kernel takes them."""
    if not config.descriptors:
        return a, b
    return TensorDescriptor.from_tensor(a, a_block), TensorDescriptor.from_tensor(b, b_block)


def current_device(like: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(like.device) if like.is_cuda else nullcontext()


def check_matrix(
    name: str, matrix: Tensor, shape: tuple[int | str, int | str], like: Tensor
) -> None:
    """A matrix of that shape (a word stands for any size), of like's dtype and device."""
    wanted = f"({shape[0]}, {shape[1]})"
    fits = matrix.ndim == 2 and all(
        isinstance(want, str) or want == size
        for want, size in zip(shape, matrix.shape, strict=True)
    )
    if not fits or (str(shape[0]).startswith("2·") and matrix.shape[0] % 2):
        raise ValueError(f"{name} must be {wanted}, got {tuple(matrix.shape)}")
    if matrix.dtype != like.dtype or matrix.dtype not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise ValueError(f"{name} must be {like.dtype}, one of {known}; got {matrix.dtype}")
    if matrix.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {matrix.device}")
