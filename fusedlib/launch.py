"""Starting kernels: on which devices, cut into which tiles, from which binaries, and at what cost.

Triton's own `kernel[grid](...)` looks at every argument to find the binary: 20 to 40 µs for a score
of them. A `Launch` is one kernel with its grid and numbers; it looks once, and starts the binary
directly from then on. Three things are kept:

| what       | by what                                         | so that                          |
|------------|-------------------------------------------------|----------------------------------|
| `PREPARED` | all that a call is prepared for, lengths too    | the next call like it looks once |
| `_LOADED`  | what a binary is compiled for, no lengths       | a new length compiles nothing    |
| maps       | address, shape, strides and block of a matrix   | TMA's 128 bytes are encoded once |

Importing this module imports no Triton, unless its interpreter is asked for.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import cache
from functools import partial as bind
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fusedlib.compat import (
    build_launcher,
    constant_while_compiling,
    current_stream,
    empty_strided,
    encode_tensor_map,
    has_launch_hooks,
    load_kernel,
    make_driver,
    mend_interpreted_bf16,
    unwrap_launcher,
)
from fusedlib.compat import current_device_index as current_index

Value = TypeVar("Value")

# --- on which devices ----------------------------------------------------------------------------

# Bytes of shared memory that one program may have, by architecture. 8.6, 8.9 and 12.x have the
# least, so that unknown cards are treated as 8.9.
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
DEFAULT_ARCHITECTURE = 89
MIN_CAPABILITY = (8, 0)
INTERPRETED_PROCESSORS = 3  # fewer than a test has tiles, so that a program computes several


def _asks_for_interpreter() -> bool:
    """Triton's own answer; Triton is imported where its variable is set, and nowhere else."""
    if not {"TRITON_INTERPRET", "triton"} & {*os.environ, *sys.modules}:
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


# Whether Triton's interpreter runs the kernels, on the CPU: for tests, and for who switches it on.
INTERPRETED = _asks_for_interpreter()
if INTERPRETED:
    mend_interpreted_bf16()


@cache
def architecture(device: torch.device) -> int:
    """The key of a GPU in tables of tiles."""
    major, minor = torch.cuda.get_device_capability(device)
    architectures = {(8, 0): 80, (9, 0): 90, (10, 0): 100, (10, 3): 100}
    return architectures.get((major, minor), DEFAULT_ARCHITECTURE)


@constant_while_compiling
def has_kernels(device: torch.device) -> bool:
    """True if Triton is installed and the device is a GPU that the kernels run on."""
    return _find_kernels(device)


@cache
def _find_kernels(device: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cpu" or INTERPRETED:
        return INTERPRETED and device.type == "cpu"
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


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
    return nullcontext() if index < 0 or index == current_index() else torch.cuda.device(index)


def bind_context() -> None:
    """Give this thread the current device's context, without which the driver makes no tensor map.

    Triton does so where it loads a binary. A thread that finds all of them loaded, autograd's after
    `fusedlib.warm_up` say, may have done nothing yet that wants a context.
    """
    if not hasattr(_THREAD, "bound"):
        torch.cuda.mem_get_info()  # the runtime binds it for any such question
        _THREAD.bound = True


_THREAD = threading.local()


# --- what calls keep for the next ones like them -------------------------------------------------


class BoundedCache(dict[Hashable, Value]):
    """A dict that drops its oldest entry when it is full; a varying length makes an entry each."""

    most = 4096

    def __setitem__(self, key: Hashable, value: Value) -> None:
        with _CHANGING:
            if len(self) >= self.most:
                del self[next(iter(self))]
            super().__setitem__(key, value)


_CHANGING = threading.Lock()
PREPARED: BoundedCache[Any] = BoundedCache()
_ELSEWHERE: dict[Hashable, Any] = {}
_MISSING = object()


def prepared(key: Hashable, prepare: Callable[..., Any], *arguments: Any) -> Any:
    """What `prepare(*arguments)` gave for the key; the key holds all that it depends on."""
    found = PREPARED.get(key, _MISSING)
    if found is _MISSING:
        found = PREPARED[key] = prepare(*arguments)
    return found


def launch_for(key: Hashable, make: Callable[[], Any], *matrices: Tensor) -> Any:
    """`prepared` for operands of any address: unaligned ones keep nothing."""
    return make() if misalignment(matrices) else prepared(key, make)


def exchange_prepared() -> None:
    """Let what was prepared inside and outside of `fusedlib.batch_invariant` change places."""
    with _CHANGING:
        prepared_now = dict(PREPARED)
        PREPARED.clear()
        PREPARED.update(_ELSEWHERE)
        _ELSEWHERE.clear()
        _ELSEWHERE.update(prepared_now)


def forget() -> None:
    """Prepare all calls anew: after a change of `fusedlib.tuning`."""
    PREPARED.clear()
    _ELSEWHERE.clear()
    allocator.cache_clear()


def misalignment(matrices: Sequence[Tensor]) -> int:
    """Bytes by which some matrix misses a multiple of 16; 0 if none does."""
    bits = 0
    for matrix in matrices:
        bits |= matrix.data_ptr()
    return bits % 16


# --- matrices ------------------------------------------------------------------------------------


def rows_contiguous(matrix: Tensor) -> Tensor:
    """The matrix with the elements of a row side by side; copied if they are not."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


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


def cdiv(length: int, block: int) -> int:
    """Blocks that cover a length. `triton.cdiv` serves kernels too, and takes the host 1 µs."""
    return -(-length // block)


def next_power_of_2(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()


# --- how kernels are cut -------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """How one kernel is cut: each field is the kernel's argument of that name in capitals.

    A number that a kernel has no argument for is 0.

    Attributes:
        block_m: rows of its result that a program computes.
        block_n: columns of each of its results.
        block_k: terms of the sum at a time.
        num_warps: of a program; with roles, of its first role.
        num_stages: blocks of the sum in flight, by Triton's pipeliner.
        group_m: row tiles that share the other factor's blocks in the L2 cache.
        lines: rows or columns of a factor that a program splits.
        stages: blocks in the ring of a kernel whose warps have roles.
        consumer_registers: of a thread that multiplies, where warps have roles.
        other_registers: of a thread of the other roles.
    """

    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    num_warps: int = 4
    num_stages: int = 0
    group_m: int = 8
    lines: int = 0
    stages: int = 0
    consumer_registers: int = 0
    other_registers: int = 0

    def launch(self) -> dict[str, int]:
        """The keyword arguments of a kernel's launch, also of some that it may not take."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name if name in ("num_warps", "num_stages") else name.upper(): value
            for name, value in values.items()
            if value
        }


def with_roles(consumer_registers: int, other_registers: int, group_m: int = 8) -> Config:
    """The configuration of a kernel whose warps have roles: registers of a thread of each."""
    return Config(
        block_k=64, stages=3, group_m=group_m,
        consumer_registers=consumer_registers, other_registers=other_registers,
    )  # fmt: skip


# --- binaries ------------------------------------------------------------------------------------
#
# Triton compiles a kernel for its compile-time arguments, the dtypes of its matrices, and for
# numbers that are 1, multiples of 16 or beyond 32 bits. Those that are called `do_not_specialize`,
# as every number of tokens here, are for any value. So what a layer can ever need is few, and can
# be built before it is needed, several at a time: the compiler and the assembler let other threads
# run.

MAX_COMPILER_THREADS = 16  # the front end of the compiler is Python's, one thread at a time


class Binary(NamedTuple):
    """A loaded kernel.

    Attributes:
        run: the function that starts it.
        prefix: what `run` takes between the stream and the kernel's own arguments.
    """

    run: Callable[..., None]
    prefix: tuple[Any, ...]


_LOADED: dict[Hashable, Future[Binary]] = {}
_COMPILING: dict[Hashable, Future[Any]] = {}
_LOCK = threading.Lock()


def cached_binary(key: Hashable, compiled: Callable[[], Any]) -> Binary:
    """The binary of that key; `compiled()` compiles it, where nobody has before.

    The device that it is loaded on must be current. A second thread with the same key waits.
    """
    with _LOCK:
        future, compiling = _LOADED.get(key), _COMPILING.pop(key, None)
        is_first = future is None
        if future is None:
            future = _LOADED[key] = Future()
    if is_first:
        try:
            kernel = compiled() if compiling is None else compiling.result()
            future.set_result(Binary(*load_kernel(kernel)))
        except BaseException as error:
            del _LOADED[key]
            future.set_exception(error)
            raise
    return future.result()


def compile_in_background(key: Hashable, compiled: Callable[[], Any]) -> None:
    """Compile in another thread, for `cached_binary` to load, unless that was done before."""
    with _LOCK:
        if key not in _LOADED and key not in _COMPILING:
            _COMPILING[key] = _pool().submit(_with_launcher, compiled)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILER_THREADS), "fusedlib-compile")


def _with_launcher(compiled: Callable[[], Any]) -> Any:
    """The compiled kernel; the C function that starts it is in Triton's cache then."""
    kernel = compiled()
    if kernel is not None:
        build_launcher(kernel)
    return kernel


# --- launches ------------------------------------------------------------------------------------

MAX_GRID = 2**31 - 1, 2**16 - 1, 2**16 - 1  # of a grid along x, y and z, by CUDA


class Launch:
    """One kernel with its configuration, its grid and all arguments but the matrices.

    Args:
        kernel: a `triton.jit` function that takes matrices first, then `scalars`, then constants.
        config: how it is cut; its blocks are among the constants.
        programs: the grid.
        scalars: numbers, in the kernel's order.
        constants: compile-time arguments by name, without the configuration's.

    Raises:
        ValueError: more programs along an axis than CUDA starts.
    """

    def __init__(
        self, kernel: Any, config: Config, programs: tuple[int, int, int],
        scalars: tuple[float, ...], constants: dict[str, Any],
    ) -> None:  # fmt: skip
        if any(count > most for count, most in zip(programs, MAX_GRID, strict=True)):
            raise ValueError(f"a grid of {programs} programs is more than CUDA's {MAX_GRID}")
        self.kernel, self.config, self.programs = kernel, config, programs
        accepted = {*kernel.arg_names, "num_warps", "num_stages"}
        named = constants | config.launch()
        self.scalars, self.constants = scalars, {n: v for n, v in named.items() if n in accepted}
        ordered = [self.constants[n] for n in kernel.arg_names if n in self.constants]
        self._suffix = (*scalars, *ordered)
        self._run: Callable[..., None] | None = None
        self._hooks = sys.modules["triton"].knobs.runtime

    def __call__(self, *matrices: Tensor) -> None:
        """Start the programs on these matrices' device, which is that of the first call.

        Matrices go as addresses: Triton asks the driver about every tensor it is given.
        """
        run = self._run
        if run is None or current_index() != self._index or has_launch_hooks(self._hooks):
            return self._start(*matrices)
        stream = current_stream(self._index)
        return run(*self.programs, stream, *self._prefix, *self._taken(*matrices), *self._suffix)

    def _taken(self, *matrices: Tensor) -> Sequence[Any]:
        """What the binary takes of the matrices."""
        return [m.data_ptr() for m in matrices]

    def _start(self, *matrices: Tensor) -> None:
        """Find the binary and start it; Triton starts what no cached binary serves."""
        self._index = matrices[0].get_device()
        if (
            self._index < 0
            or self._index != current_index()
            or has_launch_hooks(self._hooks)
            or misalignment(matrices)
        ):
            with current_device(matrices[0]):
                if self._index >= 0:
                    bind_context()
                self.kernel[self.programs](*self.operands(*matrices), **self.constants)
            return
        self._use_binary(self.build(self._index, *matrices))
        self(*matrices)

    def _use_binary(self, binary: Binary) -> None:
        self._run, self._prefix = binary

    # The next four take the number of a device and matrices, which may be without memory.

    def build(self, device: int, *matrices: Tensor) -> Binary:
        """The binary for such matrices on a device, compiled and loaded."""
        key, compiled = self.binary_key(device, *matrices), bind(self.compiled, device, *matrices)
        with _device(device):
            return cached_binary(key, compiled)

    def build_ahead(self, device: int, *matrices: Tensor) -> None:
        """Have another thread compile the binary, unless that was done before."""
        make_driver()
        compiled = bind(self.compiled, device, *matrices)
        compile_in_background(self.binary_key(device, *matrices), compiled)

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
            numbers, tuple(self.constants.items()),
        )  # fmt: skip

    def operands(self, *matrices: Tensor) -> tuple[Any, ...]:
        """All but the compile-time arguments, as Triton takes them."""
        return *matrices, *self.scalars


def _specialization_key(number: Any, parameter: Any) -> Hashable:
    """Triton's specialization key for a scalar: it compiles anew where this differs."""
    if isinstance(number, float):
        return float
    wide = not -(2**31) <= number < 2**31
    return wide if parameter.do_not_specialize else (wide, number == 1, number % 16 == 0)


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


# --- kernels in Gluon, whose matrices come by tensor maps ----------------------------------------


class HopperLaunch(Launch):
    """A `Launch` whose first matrices, as many as there are blocks, come by TMA.

    A tensor map is the 128 bytes from which TMA takes a matrix's address, shape, strides and block.
    It holds nothing of the tensor itself, so that one made for the same values before serves again:
    that of a weight at every length. Triton 3.6 encodes every map anew at every launch, in Python;
    so its C function is called without that wrapper, with maps that were encoded before.
    """

    def __init__(
        self, kernel: Any, config: Config, programs: int, blocks: list[list[int]],
        scalars: tuple[int, ...], constants: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(kernel, config, (programs, 1, 1), scalars, constants)
        self.blocks = blocks
        self._maps: list[BoundedCache[list[Any]]] = [BoundedCache() for _ in blocks]
        self._launcher: tuple[Callable[..., None], list[Any]] | None = None

    def __call__(self, *matrices: Tensor) -> None:
        """Start the programs on these matrices, past Triton's wrapper where that is known."""
        launcher = self._launcher
        if launcher is None or current_index() != self._index or has_launch_hooks(self._hooks):
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

    def _taken(self, *matrices: Tensor) -> Sequence[Any]:
        bind_context()
        count = len(self.blocks)
        return *self._descriptors(matrices), *[m.data_ptr() for m in matrices[count:]]

    def operands(self, *matrices: Tensor) -> tuple[Any, ...]:
        """All but the compile-time arguments, as Triton takes them."""
        rest = super().operands(*matrices[len(self.blocks) :])
        return *self._descriptors(matrices), *rest

    def binary_key(self, device: int, *matrices: Tensor) -> Hashable:
        """All that the binary is compiled for; matrices lie at multiples of 16 bytes."""
        return super().binary_key(device, *matrices), *map(tuple, self.blocks)

    def _descriptors(self, matrices: Sequence[Tensor]) -> list[Any]:
        """Of the first matrices."""
        return [_descriptor(m, block) for m, block in zip(matrices, self.blocks, strict=False)]


# By looks, for all launches; each keeps its own by address besides, for the allocator gives few
# addresses, over and over: in a model, a few for every layer.
_TENSOR_MAPS: BoundedCache[list[Any]] = BoundedCache()


@dataclass(frozen=True)
class _DescriptorBase:
    """What a descriptor asks a tensor for, which it must not keep alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def _descriptor(matrix: Tensor, block: list[int]) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    base = _DescriptorBase(matrix.data_ptr(), matrix.dtype)
    layout = _block_layout(tuple(block), matrix.dtype)
    return TensorDescriptor(base, list(matrix.shape), list(matrix.stride()), block, layout)


@cache
def _block_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """How a block of bf16 or fp16 lies in shared memory."""
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(block), element)
