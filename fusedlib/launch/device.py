"""Which devices run the kernels, and which row of the tables of tiles is theirs.

Importing this module imports no Triton.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache

import torch

from fusedlib.launch.internals import constant_while_compiling

# Bytes of shared memory that one program may have, by architecture. 8.6, 8.9 and 12.x have the
# least, so that unknown cards are treated as 8.9.
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}


DEFAULT_ARCHITECTURE = 89


@cache
def architecture(device: torch.device) -> int:
    """The table's key for a GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    architectures = {(8, 0): 80, (9, 0): 90, (10, 0): 100, (10, 3): 100}
    return architectures.get((major, minor), DEFAULT_ARCHITECTURE)


MIN_CAPABILITY = (8, 0)


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
