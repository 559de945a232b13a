"""A pytest plugin that takes half of its time off Triton's interpreter, and changes no result.

At each call of a device function it looks through all names of `triton.language` for those that it
has replaced at the launch, for each array it makes a table of all dtypes, and each operation on
integers it does again in int64, for an assertion of overflow that it then leaves out (`debug`).
"""

from dataclasses import replace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

patched, told = interpreter._patch_builtin, interpreter._get_np_dtype
builtins: dict[object, str | None] = {}
dtypes: dict[str, np.dtype] = {}


def patch_once(package: object, *others: object) -> None:
    """As `_patch_builtin`, which patches a package as a whole, where that is not done yet."""
    if package not in builtins:
        members = vars(package).items()
        builtins[package] = next((n for n, m in members if tl.core.is_builtin(m)), None)
    name = builtins[package]
    if name is None or tl.core.is_builtin(getattr(package, name)):
        patched(package, *others)


def np_dtype(of: tl.dtype) -> np.dtype:
    """As `_get_np_dtype`, for blocks that of their elements."""
    scalar = of.scalar
    if scalar.name not in dtypes:
        dtypes[scalar.name] = told(scalar)
    return dtypes[scalar.name]


interpreter._patch_builtin, interpreter._get_np_dtype = patch_once, np_dtype
options = interpreter.interpreter_builder.options
assert not options.debug, "overflow would be found: leave sanitize_overflow on"
interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
