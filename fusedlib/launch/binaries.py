"""Compiled kernels, kept by what they were compiled for and by nothing else: not by lengths.

Triton compiles a kernel for its compile-time arguments, the dtypes of its matrices, and for numbers
that are 1, multiples of 16 or beyond 32 bits. Those that are called `do_not_specialize`, as every
number of tokens here, are for any value. So what a layer can ever need is few, and can be built
before it is needed, several at a time: the compiler and the assembler let other threads run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

from fusedlib.launch.internals import build_launcher, load_kernel

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
_LOCK = Lock()


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
