"""How kernels in Gluon are cut and start: tensor maps kept by address.

A tensor map is the 128 bytes from which TMA takes a matrix's address, shape, strides and block. It
holds nothing of the tensor itself, so that one made for the same values before serves again: that
of a weight at every length.

Triton 3.6 starts kernels by a C function, but encodes every tensor map anew at every launch, in
Python. So its C function is called without that wrapper, with maps that were encoded before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fusedlib.launch.binaries import Binary
from fusedlib.launch.cache import BoundedCache
from fusedlib.launch.config import Config
from fusedlib.launch.internals import (
    current_stream,
    encode_tensor_map,
    has_launch_hooks,
    unwrap_launcher,
)
from fusedlib.launch.launch import Launch, bind_context, current_index


@dataclass(frozen=True)
class _DescriptorBase:
    """What a descriptor asks a tensor for, which it must not keep alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class HopperLaunch(Launch):
    """A `Launch` whose first matrices, as many as there are blocks, come by TMA."""

    def __init__(
        self, kernel: Any, config: Config, programs: int, blocks: list[list[int]],
        scalars: tuple[int, ...], constants: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(kernel, config, (programs, 1, 1), blocks, scalars, constants)
        self._maps: list[BoundedCache[list[Any]]] = [BoundedCache() for _ in blocks]
        self._launcher: tuple[Callable[..., None], list[Any]] | None = None

    def __call__(self, *matrices: Tensor) -> None:
        """Start the programs on these matrices, past Triton's wrapper where that is known."""
        launcher, runtime = self._launcher, triton.knobs.runtime
        if launcher is None or current_index() != self._index or has_launch_hooks(runtime):
            return super().__call__(*matrices)
        operands: list[Any] = []
        for index, maps in enumerate(self._maps):
            matrix = matrices[index]
            operands += maps.get(matrix.data_ptr()) or self._tensor_map(index, matrix)
        operands += [m.data_ptr() for m in matrices[len(self._maps) :]]
        stream = current_stream(self._index)
        return launcher[0](*self.programs, stream, *self._prefix, *operands, *self._suffix)

    def _use_binary(self, binary: Binary) -> None:
        super()._use_binary(binary)
        self._launcher = unwrap_launcher(self._run)

    def _tensor_map(self, index: int, matrix: Tensor) -> list[Any]:
        """The tensor map, shape and strides of a matrix, as Triton's C function takes them."""
        assert self._launcher is not None
        block, metadata = self.blocks[index], self._launcher[1][index]
        address = matrix.data_ptr()
        key = address, matrix.dtype, matrix.shape, matrix.stride(), *block  # all that a map holds
        encoded = _TENSOR_MAPS.get(key)
        if encoded is None:
            bind_context()
            encoded = encode_tensor_map(_descriptor(matrix, block), metadata)
            _TENSOR_MAPS[key] = encoded
        self._maps[index][address] = encoded
        return encoded

    def _make_descriptors(self, *matrices: Tensor) -> tuple[Any, ...]:
        return tuple(map(_descriptor, matrices, self.blocks))


# By looks, for all launches; each keeps its own by address besides, for the allocator gives few
# addresses, over and over: in a model, a few for every layer.
_TENSOR_MAPS: BoundedCache[list[Any]] = BoundedCache()


def _descriptor(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    base = _DescriptorBase(matrix.data_ptr(), matrix.dtype)
    layout = _block_layout(tuple(block), matrix.dtype)
    return TensorDescriptor(base, list(matrix.shape), list(matrix.stride()), block, layout)


@cache
def _block_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a block of bf16 or fp16 lies in shared memory."""
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(block), element)
