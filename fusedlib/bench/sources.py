"""Source files of a package, for the fingerprints of the studies: of a study's own room, and of
the kernels where it measures what they compute.
"""

import importlib.util
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from fusedlib import kernels


def modules_of(package: str) -> Iterator[ModuleType]:
    """Modules of a package by its name, not run: their text counts. Of packages in it `__init__`.

    Raises:
        ModuleNotFoundError: there is no such package.
    """
    home = importlib.util.find_spec(package)
    if home is None or home.submodule_search_locations is None:
        raise ModuleNotFoundError(f"there is no package {package!r}", name=package)
    for found in pkgutil.iter_modules(home.submodule_search_locations, f"{package}."):
        spec = importlib.util.find_spec(found.name)
        assert spec is not None
        yield importlib.util.module_from_spec(spec)


def kernel_modules() -> Iterator[ModuleType]:
    """Modules of `fusedlib.kernels`; triton may be missing.

    Of a package its `__init__` alone. What else `kernels.autotune` holds chooses among tiles where
    a card is not in `swiglu_configs.MEASURED`, which its `__init__` decides; on those that are, and
    all recorded rows are of such, none of it runs.
    """
    return modules_of(kernels.__name__)
