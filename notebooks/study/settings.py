"""What a measurement is asked for: its dtype, its passes, and torch's precision of products."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DIRECTIONS = ("forward", "backward", "forward+backward")
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes an element
MIB = 2**20
PRECISIONS = ("highest", "high", "medium")


@contextmanager
def matmul_settings(precision: str, reduced: bool) -> Iterator[None]:
    """Set fp32 matmul precision, and whether cuBLAS may reduce half-precision products in half
    precision; both as before afterwards.
    """
    cuda = torch.backends.cuda.matmul
    names = [f"allow_{half}_reduced_precision_reduction" for half in ("fp16", "bf16")]
    before = torch.get_float32_matmul_precision(), [getattr(cuda, name) for name in names]
    torch.set_float32_matmul_precision(precision)
    for name in names:
        setattr(cuda, name, reduced)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        for name, value in zip(names, before[1], strict=True):
            setattr(cuda, name, value)
