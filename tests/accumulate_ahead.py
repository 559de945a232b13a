"""Compiles the accumulation probe for architectures without a GPU and says what came out.

Run in a process of its own, without Triton's interpreter:
    python accumulate_ahead.py ARCHITECTURE[,ARCHITECTURE ...]
prints one JSON object a kernel, as `sass.show` says.
"""

import itertools
import sys

import triton
from sass import show
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedlib.kernels import accumulate


def compiled(arch: int, dtype: str, promote: bool):
    """The kernel as Triton would compile it at its launch."""
    constants = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "PROMOTE": promote}
    constants |= {"PRECISION": "tf32"}
    types = {"a_ptr": "*" + dtype, "b_ptr": "*" + dtype, "c_ptr": "*fp32"}
    types |= {"n": "i32", "k": "i32", "one": "fp32"} | dict.fromkeys(constants, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(5)}
    source = ASTSource(accumulate._accumulate_kernel, types, constants, attributes)
    options = {"num_warps": accumulate.NUM_WARPS, "num_stages": accumulate.NUM_STAGES}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


if __name__ == "__main__":
    show(
        ({"name": f"{dtype} {promote}", "arch": arch}, compiled(arch, dtype, promote))
        for arch in map(int, sys.argv[1].split(","))
        for dtype, promote in itertools.product(("fp16", "bf16", "fp32"), (False, True))
    )
