"""The kernels' source files, for the fingerprint of the studies that measure what they compute."""

import importlib.util
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from fusedlib import kernels


def kernel_modules() -> Iterator[ModuleType]:
    """Modules of `fusedlib.kernels`, not run: their text counts, and triton may be missing.

    Of a package its `__init__` alone. What else `kernels.autotune` holds chooses among tiles where
    a card is not in `swiglu_configs.MEASURED`, which its `__init__` decides; on those that are, and
    all recorded rows are of such, none of it runs.
    """
    for found in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        spec = importlib.util.find_spec(found.name)
        assert spec is not None
        yield importlib.util.module_from_spec(spec)
