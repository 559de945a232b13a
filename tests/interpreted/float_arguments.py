"""Mends float arguments in Triton's interpreter: a kernel gets a Python float there.

On a GPU it gets an fp32 scalar, and Liger's kernels call its `.to`.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def apply() -> None:
    """Mend the interpreter of this process."""
    convert = interpreter._implicit_cvt

    def converted(argument):
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = converted
