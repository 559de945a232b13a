"""What every launcher does: check its matrices, and start programs on their device.

Triton's own `kernel[grid](...)` looks at every argument to find the binary: 20 to 40 µs for a score
of them. `Launch` keeps the binary of one kernel at one set of sizes and starts it directly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedlib.kernels.swiglu_configs import DTYPES, Config

INTERPRETED_PROCESSORS = 3  # fewer than a test has tiles, so that a program computes several
MOST_LAUNCHES = 4096  # kept; varying sequence lengths make one each


def rows_contiguous(matrix: Tensor) -> Tensor:
    """The matrix with the elements of a row side by side; copied if they are not."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def grid(config: Config, like: Tensor, tokens: int, inner: int) -> tuple[int, int, int]:
    """One program a tile; persistent ones no more than the device has multiprocessors."""
    tiles = triton.cdiv(tokens, config.block_m) * triton.cdiv(inner, config.block_n)
    if not config.persistent:
        return (tiles, 1, 1)
    return (min(tiles, multiprocessors(like.device)), 1, 1)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many the device has; off a GPU, as many as the interpreter plays."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


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


class Launch:
    """One kernel with its configuration, its grid and all arguments but the matrices.

    Args:
        kernel: a `triton.jit` function that takes matrices first, then `scalars`, then constants.
        config: how it is cut; its blocks are among the constants.
        programs: the grid.
        blocks: of the first matrices, for tensor descriptors.
        scalars: numbers, in the kernel's order.
        constants: compile-time arguments by name, without the configuration's.
    """

    def __init__(
        self, kernel: Any, config: Config, programs: tuple[int, int, int],
        blocks: Sequence[list[int]], scalars: tuple[float, ...], constants: dict[str, Any],
    ) -> None:  # fmt: skip
        self.kernel, self.config, self.programs, self.blocks = kernel, config, programs, blocks
        self.scalars, self.constants = scalars, constants | config.launch()
        named = [self.constants[n] for n in kernel.arg_names if n in self.constants]
        self._tail = (*scalars, *named)
        self._start: Callable[..., None] | None = None

    def _factors(self, *matrices: Tensor) -> tuple[Any, ...]:
        """The first matrices, as many as there are blocks, as the kernel takes them."""
        a, b = matrices
        return factors(self.config, a, self.blocks[0], b, self.blocks[1])

    def __call__(self, *matrices: Tensor) -> None:
        """Start the programs on these matrices' device, which is that of the first call."""
        like = matrices[0]
        if like.is_cuda and torch.cuda.current_device() != like.get_device():
            with current_device(like):
                return self(*matrices)
        count = len(self.blocks)
        operands = (*self._factors(*matrices[:count]), *matrices[count:])
        if self._start is not None:
            return self._start(*operands, *self._tail)
        made = self.kernel[self.programs](*operands, *self.scalars, **self.constants)
        if hasattr(made, "packed_metadata"):  # a binary, not the interpreter
            self._start = made[self.programs]
        return None


_LAUNCHES: dict[Hashable, Launch] = {}


def kept_launch(make: Callable[..., Launch], key: Hashable, *matrices: Tensor) -> Launch:
    """`make()`, tuned, or what was found before for the same key.

    `make(config)` is the same launch cut otherwise, where `autotune.candidates` has other cuts.
    The binary is the one for the key's exact sizes and 16-byte aligned addresses, so the key must
    hold shapes, strides, dtype, device and variant. Unaligned addresses keep nothing, nor does the
    interpreter, whose configuration tests change.
    """
    bits = 0
    for matrix in matrices:
        bits |= matrix.data_ptr()
    if bits % 16 or not matrices[0].is_cuda:
        return make()
    found = _LAUNCHES.get(key)
    if found is None:
        if len(_LAUNCHES) >= MOST_LAUNCHES:
            _LAUNCHES.clear()
        from fusedlib.kernels.autotune import tuned  # it needs this module

        found = _LAUNCHES[key] = tuned(make, matrices)
    return found


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
