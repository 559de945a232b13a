"""Mends bf16 in Triton's interpreter, which holds it as uint16 and multiplies those.

Importing this replaces three functions of the interpreter: conversions between bf16 and fp32, exact
one way and rounded to nearest even the other (it truncates), `tl.dot` of bf16 blocks, and `*` of
them (an exact product, rounded once, as on a GPU).
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def widen(bits: np.ndarray) -> np.ndarray:
    """fp32 values of bf16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """bf16 bit patterns of fp32 values, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


convert, builder = interpreter._convert_float, interpreter.InterpreterBuilder
dot, times = builder.create_dot, builder.create_fmul


def converted(data, source, target, rounding):
    if (source, target) == (tl.bfloat16, tl.float32):
        return widen(data)
    if (source, target) == (tl.float32, tl.bfloat16):
        return narrow(data)
    return convert(data, source, target, rounding)


def multiplied(self, a, b, d, *options):
    a, b = (
        interpreter.TensorHandle(widen(t.data), tl.float32) if t.dtype.scalar == tl.bfloat16 else t
        for t in (a, b)
    )
    return dot(self, a, b, d, *options)


def scaled(self, a, b):
    if a.dtype.scalar != tl.bfloat16:
        return times(self, a, b)
    return interpreter.TensorHandle(narrow(widen(a.data) * widen(b.data)), tl.bfloat16)


interpreter._convert_float = converted
builder.create_dot, builder.create_fmul = multiplied, scaled
