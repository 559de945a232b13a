"""Launches: a kernel with its grid and scalars, started on its matrices' device.

Triton's own `kernel[grid](...)` looks at every argument to find the binary: 20 to 40 µs for a score
of them. `Launch` starts a binary directly, by `CompiledKernel.run`, which takes the same arguments
in the releases 3.6 and 3.7. The binary is shared by all launches that differ in nothing but lengths
(`fusedlib.launch.binaries`), so that a new length costs a `Launch` and no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from functools import partial as bind
from math import prod
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedlib.launch import binaries
from fusedlib.launch.cache import BoundedCache
from fusedlib.launch.config import Config
from fusedlib.launch.internals import current_device_index as current_index
from fusedlib.launch.internals import (
    current_stream,
    empty_strided,
    has_launch_hooks,
    make_driver,
    mend_interpreted_bf16,
)

if triton.knobs.runtime.interpret:
    mend_interpreted_bf16()
INTERPRETED_PROCESSORS = 3  # fewer than a test has tiles, so that a program computes several
MAX_GRID = 2**31 - 1, 2**16 - 1, 2**16 - 1  # of a grid along x, y and z, by CUDA


def rows_contiguous(matrix: Tensor) -> Tensor:
    """The matrix with the elements of a row side by side; copied if they are not."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def cdiv(length: int, block: int) -> int:
    """Blocks that cover a length. `triton.cdiv` serves kernels too, and takes the host 1 µs."""
    return -(-length // block)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many the device has; off a GPU, as many as the interpreter plays."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def current_device(like: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    return _device(like.get_device())


def _device(index: int) -> AbstractContextManager[object]:
    return torch.cuda.device(index) if index >= 0 else nullcontext()


def bind_context() -> None:
    """Give this thread the current device's context, without which the driver makes no tensor map.

    Triton does so where it loads a binary. A thread that finds all of them loaded, autograd's after
    `fusedlib.warm_up` say, may have done nothing yet that wants a context.
    """
    if not hasattr(_THREAD, "bound"):
        torch.cuda.mem_get_info()  # the runtime binds it for any such question
        _THREAD.bound = True


_THREAD = threading.local()


class Launch:
    """One kernel with its configuration, its grid and all arguments but the matrices.

    Args:
        kernel: a `triton.jit` function that takes matrices first, then `scalars`, then constants.
        config: how it is cut; its blocks are among the constants.
        programs: the grid.
        blocks: of the first matrices, for tensor descriptors; none for a kernel that takes none.
        scalars: numbers, in the kernel's order.
        constants: compile-time arguments by name, without the configuration's.

    Raises:
        ValueError: more programs along an axis than CUDA starts.
    """

    def __init__(
        self, kernel: Any, config: Config, programs: tuple[int, int, int],
        blocks: Sequence[list[int]], scalars: tuple[float, ...], constants: dict[str, Any],
    ) -> None:  # fmt: skip
        if any(count > most for count, most in zip(programs, MAX_GRID, strict=True)):
            raise ValueError(f"a grid of {programs} programs is more than CUDA's {MAX_GRID}")
        self.kernel, self.config, self.programs = kernel, config, programs
        self.blocks = blocks if config.descriptors else ()
        accepted = {*kernel.arg_names, "num_warps", "num_stages"}
        named = constants | config.launch()
        self.scalars, self.constants = scalars, {n: v for n, v in named.items() if n in accepted}
        ordered = [self.constants[n] for n in kernel.arg_names if n in self.constants]
        self._suffix = (*scalars, *ordered)
        self._run: Callable[..., None] | None = None

    def __call__(self, *matrices: Tensor) -> None:
        """Start the programs on these matrices' device, which is that of the first call.

        Matrices go as addresses: Triton asks the driver about every tensor it is given.
        """
        run = self._run
        if run is None or current_index() != self._index or has_launch_hooks(triton.knobs.runtime):
            return self._start(*matrices)
        addresses: list[Any] = [m.data_ptr() for m in matrices]
        if self.blocks:
            bind_context()
            count = len(self.blocks)
            addresses[:count] = self._make_descriptors(*matrices[:count])
        stream = current_stream(self._index)
        return run(*self.programs, stream, *self._prefix, *addresses, *self._suffix)

    def _start(self, *matrices: Tensor) -> None:
        """Find the binary and start it; Triton starts what no cached binary serves."""
        self._index = matrices[0].get_device()
        if (
            self._index < 0
            or self._index != current_index()
            or has_launch_hooks(triton.knobs.runtime)
            or misalignment(matrices)
        ):
            with current_device(matrices[0]):
                if self._index >= 0:
                    bind_context()
                self.kernel[self.programs](*self.operands(*matrices), **self.constants)
            return
        self._use_binary(self.build(self._index, *matrices))
        self(*matrices)

    def _use_binary(self, binary: binaries.Binary) -> None:
        self._run, self._prefix = binary

    # The next four take the number of a device and matrices, which may be without memory.

    def build(self, device: int, *matrices: Tensor) -> binaries.Binary:
        """The binary for such matrices on a device, compiled and loaded."""
        key, compiled = self.binary_key(device, *matrices), bind(self.compiled, device, *matrices)
        with _device(device):
            return binaries.cached_binary(key, compiled)

    def build_ahead(self, device: int, *matrices: Tensor) -> None:
        """Have another thread compile the binary, unless that was done before."""
        make_driver()
        compiled = bind(self.compiled, device, *matrices)
        binaries.compile_in_background(self.binary_key(device, *matrices), compiled)

    def compiled(self, device: int, *matrices: Tensor) -> Any:
        """Triton's compiled kernel, neither loaded nor started."""
        with _device(device):
            operands = self.operands(*matrices)
            return self.kernel.warmup(*operands, grid=self.programs, **self.constants)

    def binary_key(self, device: int, *matrices: Tensor) -> Hashable:
        """All that the binary is compiled for; matrices lie at multiples of 16 bytes."""
        parameters = self.kernel.params[len(matrices) :]
        numbers = tuple(map(_specialization_key, self.scalars, parameters))
        return (
            self.kernel, device, tuple(m.dtype for m in matrices),
            tuple(map(tuple, self.blocks)), numbers, tuple(self.constants.items()),
        )  # fmt: skip

    def operands(self, *matrices: Tensor) -> tuple[Any, ...]:
        """All but the compile-time arguments, as Triton takes them."""
        count = len(self.blocks)
        return (*self._make_descriptors(*matrices[:count]), *matrices[count:], *self.scalars)

    def _make_descriptors(self, *matrices: Tensor) -> Sequence[Any]:
        """Tensor descriptors of the first matrices."""
        pairs = zip(matrices, self.blocks, strict=True)
        return [TensorDescriptor.from_tensor(matrix, block) for matrix, block in pairs]


def _specialization_key(number: Any, parameter: Any) -> Hashable:
    """Triton's specialization key for a scalar: it compiles anew where this differs."""
    if isinstance(number, float):
        return float
    wide = not -(2**31) <= number < 2**31
    return wide if parameter.do_not_specialize else (wide, number == 1, number % 16 == 0)


def misalignment(matrices: Sequence[Tensor]) -> int:
    """Bytes by which some matrix misses a multiple of 16; 0 if none does."""
    bits = 0
    for matrix in matrices:
        bits |= matrix.data_ptr()
    return bits % 16


class PlannedLaunch(NamedTuple):
    """A launch that calls will start.

    Attributes:
        name: of the step, to read.
        trains: for which `save` eager training needs it, with gradients of x and of all weights.
        launch: one of those that start the same binary.
        matrices: like those that it takes, without memory.
    """

    name: str
    trains: tuple[str, ...]
    launch: Launch
    matrices: tuple[Tensor, ...]


# All launches that are kept, by what they are for: their grids and numbers are for exact sizes.
LAUNCHES: BoundedCache[Any] = BoundedCache()


def forget() -> None:
    """Make all launches anew: after a change of `fusedlib.tuning`."""
    LAUNCHES.clear()
    allocator.cache_clear()


def kept_launch(key: Hashable, make: Callable[..., Any], *arguments: Any) -> Any:
    """What `make(*arguments)` gave for the key, a launch or an object that has some.

    Operands are aligned to 16 bytes. The key must hold all else that they are made for: sizes,
    strides, dtype, device and variant.
    """
    kept = LAUNCHES.get(key)
    if kept is None:
        kept = LAUNCHES[key] = make(*arguments)
    return kept


def launch_for(key: Hashable, make: Callable[..., Any], *matrices: Tensor) -> Any:
    """`kept_launch` for operands of any address.

    Unaligned addresses keep nothing, nor does the interpreter, whose configuration tests change.
    """
    if misalignment(matrices) or not matrices[0].is_cuda:
        return make()
    return kept_launch(key, make)


def without_memory(*layouts: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Matrices of torch's meta device, of what `contiguous_layout` gives."""
    return tuple(
        torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        for shape, strides, dtype in layouts
    )


def contiguous_layout(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Shape, strides and dtype of a contiguous tensor."""
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    return tuple(shape), tuple(strides), dtype


@cache
def allocator(device: torch.device) -> Callable[..., Tensor]:
    """Gives an empty tensor on the current device of that type from what `contiguous_layout` gives.

    Inductor's own where torch has it: on one host 1.0 µs where `new_empty` took 2.5, and 5.5 where
    it took 13.4 in a call after other work. Where torch fills new memory, so do we: not by it.
    """
    filled = torch.are_deterministic_algorithms_enabled()
    quick = None if filled else empty_strided(device.type)
    return quick or (lambda shape, strides, dtype: torch.empty(shape, dtype=dtype, device=device))
