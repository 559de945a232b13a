"""Launches of the kernels over rows of elements, `rms_norm` and `rope`."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor

from fusedlib.launch.cache import BoundedCache
from fusedlib.launch.launch import Launch, misalignment

_LAUNCHES: BoundedCache[Launch] = BoundedCache()


def cached_launch(make: Callable[[], Launch], key: Hashable, *matrices: Tensor) -> Launch:
    """The launch that `make()` gives, cached by the key.

    Its grid and numbers are for the key's exact sizes and 16-byte aligned addresses, so the key
    must hold shapes, strides, dtype, device and variant. Unaligned addresses keep nothing, nor does
    the interpreter, whose configuration tests change.
    """
    if misalignment(matrices) or not matrices[0].is_cuda:
        return make()
    launch = _LAUNCHES.get(key)
    if launch is None:
        launch = _LAUNCHES[key] = make()
    return launch
