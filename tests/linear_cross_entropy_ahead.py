"""Compiles the loss's kernels for architectures without a GPU and says what came out.

Run in a process of its own, without Triton's interpreter:
    python linear_cross_entropy_ahead.py ARCHITECTURE[,ARCHITECTURE ...]
prints one JSON object a kernel, as `sass.show` says.
"""

import sys

import triton
from sass import show
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedlib.kernels import linear_cross_entropy as kernels

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
VARIANTS = {
    "gradient": {"GRADIENT": True, "WEIGHTED": False, "SMOOTHED": False},
    "gradient, all": {"GRADIENT": True, "WEIGHTED": True, "SMOOTHED": True},
    "loss alone": {"GRADIENT": False, "WEIGHTED": False, "SMOOTHED": False},
}
CASES = [
    ("bf16", "gradient", 128256), ("bf16", "gradient", 64),
    ("bf16", "gradient, all", 128256), ("bf16", "loss alone", 128256),
    ("fp16", "gradient, all", 128256), ("fp32", "gradient, all", 128256),
]  # fmt: skip
POINTERS = {"target": "*i64", "token_weights": "*fp32", "scale": "*fp32", "losses": "*fp32",
            "factor": "*fp32"}  # fmt: skip
NUMBERS = {"label_smoothing": "fp32", "z_loss": "fp32"}
COUNTED = {"LDG": r"LDG\S*\.128\S*", "STG": r"STG\S*\.128\S*", "STL": "STL", "LDL": "LDL"}


def cases(arch: int):
    """(name, kernel, types of what is not in the tables, constants, warps)."""
    for dtype, name, vocabulary in CASES:
        block, warps = kernels.block_and_warps(vocabulary, ITEMSIZE[dtype], arch)
        constants = {**VARIANTS[name], "BLOCK": block}
        label = f"{dtype} {name}, {block} at a time"
        yield label, kernels._cross_entropy_kernel, {"logits": "*" + dtype}, constants, warps
    for source, in_place in (("bf16", True), ("fp32", False)):
        types = {"source": "*" + source, "result": "*bf16"}
        constants = {"IN_PLACE": in_place, "BLOCK": kernels.SCALED}
        yield f"scaled {source}", kernels._scaled_kernel, types, constants, kernels.SCALED_WARPS


def compiled(arch: int, function, types: dict, constants: dict, warps: int):
    """The kernel as Triton would compile it at its launch, at any vocabulary."""
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        known = types | POINTERS | NUMBERS
        signature[name] = "constexpr" if name in constants else known.get(name, "i32")
        if signature[name].startswith("*") or name in ("row_stride", "count"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})


if __name__ == "__main__":
    made = (
        ({"name": name, "arch": arch}, compiled(arch, *case))
        for arch in map(int, sys.argv[1].split(","))
        for name, *case in cases(arch)
    )
    show(made, COUNTED)
