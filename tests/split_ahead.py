"""Compiles the split kernels for architectures without a GPU and says what came out.

Run in a process of its own, without Triton's interpreter:
    python split_ahead.py ARCHITECTURE[,ARCHITECTURE ...]
prints one JSON object a kernel, as `sass.show` says.
"""

import itertools
import sys
from collections.abc import Iterator

import torch
import triton
from sass import show
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from fusedlib.kernels.hopper.launch import block_layout
from fusedlib.kernels.split import hopper, parts, product
from fusedlib.kernels.split.parts import TILE

ALIGNED = [["tt.divisibility", 16]]
POINTERS = {
    "source": "*fp32", "c": "*fp32", "parts": "*fp16", "a_high": "*fp16", "b_high": "*fp16",
    "words": "*i32", "a_words": "*i32", "b_words": "*i32", "seen": "*i32",
}  # fmt: skip
VARYING = ("rows", "chunk", "chunks", "m", "k", "share")  # never known to have divisors


def compiled(
    arch: int, function, config, constants: dict, even: bool = True, blocks: dict | None = None
):
    """The kernel as Triton would compile it at a launch, whose widths have divisors if `even`.

    In Gluon if `blocks` are given, those that TMA fetches of operands by name.
    """
    launched = config.launch()
    named = {n: v for n, v in launched.items() if n in function.arg_names} | constants
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in named:
            signature[name] = "constexpr"
        elif blocks and name in blocks:
            block = blocks[name]
            layout = block_layout(block, torch.float16)
            signature[name] = f"tensordesc<fp16[{block[0]},{block[1]}],{layout!r}>"
        else:
            signature[name] = POINTERS.get(name, "i32")
            if name in POINTERS or (even and name not in VARYING):
                attributes[(index,)] = ALIGNED
    made = ASTSource if blocks is None else GluonASTSource
    options = {n: v for n, v in launched.items() if n in ("num_warps", "num_stages")}
    source = made(function, signature, named, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def products(arch: int) -> Iterator[tuple[str, object]]:
    """(name, kernel) of the products, with the factors stored as they are and transposed."""
    for a, b in itertools.product((False, True), repeat=2):
        turned = {"A_TURNED": a, "B_TURNED": b, "TILE": TILE}
        kernel, config = product._split_product_kernel, product.CONFIGS[arch]
        yield f"tl {a:d}{b:d}", compiled(arch, kernel, config, turned | {"SPAN": product.SPAN})
        if arch == 90:
            k = hopper.CONFIG.block_k
            blocks = {"a": [k, TILE] if a else [TILE, k], "b": [TILE, k] if b else [k, TILE]}
            kernel = hopper._hopper_split_product_kernel
            constants = turned | {"SPAN": hopper.SPAN}
            made = compiled(arch, kernel, hopper.CONFIG, constants, blocks=blocks)
            yield f"gluon {a:d}{b:d}", made


def splits(arch: int) -> Iterator[tuple[str, object]]:
    """(name, kernel) of what splits factors, along rows and along columns."""
    for even in (True, False):
        for name, kernel, config in (
            ("split rows", parts._split_rows_kernel, parts.ROWS),
            ("look at columns", parts._look_at_columns_kernel, parts.COLUMNS),
            ("split columns", parts._split_columns_kernel, parts.COLUMNS),
        ):
            constants = {"TILE": TILE} if "TILE" in kernel.arg_names else {}
            made = compiled(arch, kernel, config, constants, even)
            yield name if even else f"{name}, ragged", made


if __name__ == "__main__":
    show(
        ({"name": name, "arch": arch}, kernel)
        for arch in map(int, sys.argv[1].split(","))
        for name, kernel in itertools.chain(products(arch), splits(arch))
    )
