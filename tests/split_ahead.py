"""Compiles the split kernels for one architecture without a GPU and says what came out.

Run in a process of its own, without Triton's interpreter:
    python split_ahead.py ARCHITECTURE
prints one JSON object a kernel, as `swiglu_ahead.py` does.
"""

import itertools
import json
import sys

import torch
import triton
from swiglu_ahead import figures
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from fusedlib.kernels import (
    split,
    split_configs,
    split_exact,
    split_hopper,
    split_product,
    split_thirds,
)  # fmt: skip
from fusedlib.kernels.hopper_launch import block_layout
from fusedlib.kernels.split import TILE

ALIGNED = [["tt.divisibility", 16]]
POINTERS = {
    "a": "*fp32", "b": "*fp32", "c": "*fp32", "a_high": "*fp16", "b_high": "*fp16",
    "a_parts": "*fp16", "b_parts": "*fp16", "a_tiles": "*i32", "b_tiles": "*i32",
    "flags": "*i32",
}  # fmt: skip


def compiled(
    arch: int, function, config, constants: dict, even: bool = False, blocks: dict | None = None
):
    """The kernel as Triton would compile it at a launch, whose sizes have divisors if `even`.

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
            signature[name] = POINTERS.get(name, "fp32" if name == "one" else "i32")
            if name in POINTERS or even:
                attributes[(index,)] = ALIGNED
    made = ASTSource if blocks is None else GluonASTSource
    options = {n: v for n, v in launched.items() if n in ("num_warps", "num_stages")}
    source = made(function, signature, named, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def products(arch: int):
    """(name, kernel) of the fast products, with the factors stored as they are and transposed."""
    for a, b in itertools.product((False, True), repeat=2):
        turned = {"A_TURNED": a, "B_TURNED": b, "TILE": TILE}
        kernel, config = split_product._split_product_kernel, split_configs.FAST[arch]
        spans = {"SPAN": split_configs.SPAN}
        yield f"fast {a:d}{b:d}", compiled(arch, kernel, config, turned | spans)
        if arch == 90:
            config = split_hopper.CONFIG
            k = split_hopper.BLOCK_K
            blocks = {"a": [k, TILE] if a else [TILE, k], "b": [TILE, k] if b else [k, TILE]}
            kernel = split_hopper._hopper_split_product_kernel
            yield f"gluon {a:d}{b:d}", compiled(arch, kernel, config, turned, blocks=blocks)
            for even, span in itertools.product((True, False), split_thirds.SPANS.values()):
                kernel, config = split_thirds._thirds_kernel, split_thirds.CONFIG
                constants = turned | {"EVEN": even, "SPAN": span}
                made = compiled(arch, kernel, config, constants, even, {})
                yield f"thirds {span}{'' if even else ' ragged'} {a:d}{b:d}", made


def main() -> None:
    arch = int(sys.argv[1])
    for name, kernel in products(arch) if len(sys.argv) < 3 else ():
        show(name, arch, kernel)
    for name, even in (("split", True), ("split ragged", False)):
        constants = {"EVEN": even, "TILE": TILE}
        show(name, arch, compiled(arch, split._split_kernel, split_configs.SPLIT, constants, even))
    looked, tiles = split_configs.LOOK[arch]
    constants = {
        "A_ALONG": 0, "B_ALONG": 0, "TILE": TILE, "LOOKED": looked, "TILES": tiles,
        "TERMS": split_exact.LEAST_TERMS, "HEARD": split_exact.LEAST_HEARD,
        "OF_ROW": split_exact.LEAST_OF_ROW,
        "THIRDS": arch == 90, "DOUBLE": arch in split_configs.DOUBLE,
    }  # fmt: skip
    kernel = split_exact._exact_product_kernel
    show("exact", arch, compiled(arch, kernel, split_configs.EXACT, constants))


def show(name: str, arch: int, kernel) -> None:
    print(json.dumps({"name": name, "arch": arch, **figures(kernel)}), flush=True)


if __name__ == "__main__":
    main()
