"""Compiles the kernels with fixed roles for sm_90 without a GPU and says what came out.

Run in a process of its own, without Triton's interpreter: prints one JSON object a kernel, as
`sass.show` says.
"""

import itertools
from collections.abc import Iterator

import torch
import triton
from sass import show
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from fusedlib.kernels.hopper import kernel as hopper
from fusedlib.kernels.hopper.launch import block_layout

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HIDDEN = {"fwd": 4096, "bwd": hopper.SHORT_SUM + 1, "bwd ahead": hopper.SHORT_SUM}


def compiled(name: str, store: bool, dtype: str):
    """The kernel as its launchers start it, with tokens of no known divisor."""
    start = hopper.forward_launch if name == "fwd" else hopper.backward_launch
    launch = start(torch.empty(1, HIDDEN[name]), 16, store)
    blocks = dict(zip(("a", "b", "gates"), launch.blocks, strict=False))
    constants = launch.constants.copy()
    options = {"num_warps": constants.pop("num_warps")}
    signature, attributes = {}, {}
    for index, operand in enumerate(launch.kernel.arg_names):
        if operand in constants:
            signature[operand] = "constexpr"
        elif operand in blocks:
            block = blocks[operand]
            layout, shape = block_layout(block, TYPES[dtype]), map(str, block)
            signature[operand] = f"tensordesc<{dtype}[{','.join(shape)}],{layout!r}>"
        else:
            size = operand in ("tokens", "hidden", "inner")
            signature[operand] = "i32" if size else "*" + dtype
            if operand != "tokens":
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def made() -> Iterator[tuple[dict, object]]:
    """(what is said of it, kernel)."""
    for name, store, dtype in itertools.product(HIDDEN, (True, False), TYPES):
        label = f"{name} {dtype} {'storing' if store else ''}".strip()
        yield {"name": label, "arch": 90}, compiled(name, store, dtype)


if __name__ == "__main__":
    show(made())
