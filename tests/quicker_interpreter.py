"""Takes most of its time off Triton's interpreter when it is imported, and changes no result.

Triton's interpreter makes a type of a block, with its name and its shape as a tuple of constants,
for each operation, and asks types whether they are equal by name. At each call of a device function
it looks through all names of `triton.language` for those that it has replaced at the launch, for
each array it makes a table of all dtypes, and each operation on integers it does again in int64,
for an assertion of overflow that it then leaves out (`debug`). Here each is done once.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

patched, patched_all, told, launched = (
    interpreter._patch_builtin, interpreter._patch_lang, interpreter._get_np_dtype,
    interpreter.GridExecutor.__call__,
)  # fmt: skip
typed, held, equal, alike = (
    tl.block_type.__init__, tl.tensor.__init__, tl.dtype.__eq__, tl.tuple.__eq__
)  # fmt: skip
semantic = type(interpreter.interpreter_semantic)
broadcast, computed = semantic.broadcast_impl_value, semantic.computation_type_impl
builtins: dict[object, str | None] = {}
dtypes: dict[str, np.dtype] = {}
blocks: dict[tuple, dict] = {}
commons: dict[tuple, tl.dtype] = {}
seen: set[int] = set()
TRUTH = {truth: tl.constexpr(truth) for truth in (False, True)}


def patch_once(package: object, *others: object) -> None:
    """As `_patch_builtin`, which patches a package as a whole, where that is not done yet."""
    if package not in builtins:
        members = vars(package).items()
        builtins[package] = next((n for n, m in members if tl.core.is_builtin(m)), None)
    name = builtins[package]
    if name is None or tl.core.is_builtin(getattr(package, name)):
        patched(package, *others)


def patch_all_once(function: object) -> object:
    """As `_patch_lang`; nothing for a device function of a module that this launch has met."""
    module = id(function.__globals__)
    if module in seen:
        return None
    seen.add(module)
    return patched_all(function)


def launch(self: interpreter.GridExecutor, *arguments: object, **named: object) -> None:
    """As `GridExecutor`, which begins and ends with a `triton.language` that is not patched."""
    seen.clear()
    launched(self, *arguments, **named)


def np_dtype(of: tl.dtype) -> np.dtype:
    """As `_get_np_dtype`, for blocks that of their elements."""
    scalar = of.scalar
    if scalar.name not in dtypes:
        dtypes[scalar.name] = told(scalar)
    return dtypes[scalar.name]


def block(self: tl.block_type, element_ty: tl.dtype, shape: Sequence) -> None:
    """As a type of blocks, which nobody changes: equal ones share what they hold."""
    key = element_ty.name, getattr(element_ty, "address_space", None), *shape
    if key not in blocks:
        typed(self, element_ty, shape)
        blocks[key] = vars(self)
    self.__dict__ = blocks[key]


def tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
    """As a tensor, whose type keeps all that is not its handle."""
    kept = vars(type)
    if "of_tensors" not in kept:
        held(self, handle, type)
        kept["of_tensors"] = {n: value for n, value in vars(self).items() if n != "handle"}
    self.__dict__.update(kept["of_tensors"], handle=handle)


def same_dtype(self: tl.dtype, other: object) -> bool:
    return self is other or equal(self, other)


def same_tuple(self: tl.tuple, other: object) -> tl.constexpr:
    """As of two tuples, quicker where the other one is of plain numbers."""
    values = other.values if isinstance(other, tl.tuple) else other
    if isinstance(values, list) and all(type(v) is int for v in values):
        return TRUTH[self.values == values]
    return alike(self, other)


def one_shape(self: object, left: tl.tensor, right: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """As `broadcast_impl_value`, which has nothing to do for two of one shape."""
    a, b = left.type, right.type
    if a.is_block() == b.is_block() and (not a.is_block() or list(a.shape) == list(b.shape)):
        return left, right
    return broadcast(self, left, right)


def common(self: object, *of: object) -> tl.dtype:
    """As `computation_type_impl`: a dtype by the names of two, and what else is asked."""
    key = tuple(v.name if isinstance(v, tl.dtype) else v for v in of)
    if key not in commons:
        commons[key] = computed(self, *of)
    return commons[key]


interpreter._patch_builtin, interpreter._get_np_dtype = patch_once, np_dtype
interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_all_once, launch
tl.block_type.__init__, tl.tensor.__init__ = block, tensor
tl.dtype.__eq__, tl.tuple.__eq__ = same_dtype, same_tuple
semantic.broadcast_impl_value, semantic.computation_type_impl = one_shape, common
options = interpreter.interpreter_builder.options
assert not options.debug, "overflow would be found: leave sanitize_overflow on"
interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
