"""Mends float arguments in Triton's interpreter: kernels get a Python float, on a GPU an fp32 scalar.

Without it `argument.to(tl.float32)` fails, as in Liger's kernels.
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
