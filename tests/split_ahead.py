"""Compiles the split kernels for one architecture without a GPU and says what came out.

Run in a process of its own, without Triton's interpreter:
    python split_ahead.py ARCHITECTURE
prints one JSON object a kernel, as `swiglu_ahead.py` does.
"""

import json
import sys

import triton
from swiglu_ahead import figures
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedlib.kernels import split, split_configs, split_product
from fusedlib.kernels.split import TILE, WHOLE

ALIGNED = [["tt.divisibility", 16]]
TYPES = {
    "a_high": "fp16", "a_low": "fp16", "b_high": "fp16", "b_low": "fp16", "high": "fp16",
    "low": "fp16", "a_shares": "i32", "b_shares": "i32", "shares": "i32",
}  # fmt: skip
POINTERS = (*TYPES, "a_factors", "b_factors", "factors", "c", "a", "b", "source")


def compiled(
    arch: int, function, constants: dict, options: dict, blocks: dict, aligned: tuple = ()
):
    """The kernel as Triton would compile it at a launch with sizes of no known divisor."""
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in blocks:
            signature[name] = f"tensordesc<fp16{list(blocks[name])}>".replace(" ", "")
        elif name in POINTERS:
            signature[name] = "*" + TYPES.get(name, "fp32")
            attributes[(index,)] = ALIGNED
        else:
            signature[name] = "fp32" if name == "one" else "i32"
            if name in aligned:
                attributes[(index,)] = ALIGNED
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def fast(arch: int, turned_a: bool, turned_b: bool):
    config = split_configs.FAST[arch]
    m, n, k = config.block_m, config.block_n, config.block_k
    a, b = (k, m) if turned_a else (m, k), (n, k) if turned_b else (k, n)
    blocks = {"a_high": a, "a_low": a, "b_high": b, "b_low": b} if config.descriptors else {}
    constants = {
        "A_TURNED": turned_a, "B_TURNED": turned_b, "DESCRIPTORS": config.descriptors,
        "TILE": TILE, "WHOLE": WHOLE, **sizes(config),
    }  # fmt: skip
    return compiled(
        arch, split_product._split_product_kernel, constants, warps(config), blocks,
        ("a_row", "b_row"),
    )  # fmt: skip


def on_hopper(turned_a: bool, turned_b: bool):
    """The Gluon kernel, whose blocks bring their layout along."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from fusedlib.kernels import split_hopper

    k = split_hopper.BLOCK_K
    a, b = [k, TILE] if turned_a else [TILE, k], [TILE, k] if turned_b else [k, TILE]
    constants = {
        "A_TURNED": turned_a, "B_TURNED": turned_b, "TILE": TILE, "WHOLE": WHOLE, "K": k,
        "STAGES": split_hopper.STAGES, "GROUP_M": split_hopper.GROUP_M,
        "CONSUMER": split_hopper.CONSUMER_REGISTERS, "PRODUCER": split_hopper.PRODUCER_REGISTERS,
    }  # fmt: skip
    signature, attributes = {}, {}
    for index, name in enumerate(split_hopper._hopper_split_product_kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith(("_high", "_low")):
            block = a if name.startswith("a") else b
            layout = split_hopper.block_layout(block)
            signature[name] = f"tensordesc<fp16[{block[0]},{block[1]}],{layout!r}>"
        elif name in POINTERS:
            signature[name] = "*" + TYPES.get(name, "fp32")
            attributes[(index,)] = ALIGNED
        else:
            signature[name] = "i32"
    kernel = split_hopper._hopper_split_product_kernel
    source = GluonASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def sizes(config) -> dict[str, int]:
    return {k: v for k, v in config.launch().items() if k.isupper()}


def warps(config) -> dict[str, int]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def main() -> None:
    arch = int(sys.argv[1])
    for turned_a in (False, True):
        for turned_b in (False, True):
            show(f"fast {turned_a:d}{turned_b:d}", arch, fast(arch, turned_a, turned_b))
            if arch == 90:
                show(f"gluon {turned_a:d}{turned_b:d}", arch, on_hopper(turned_a, turned_b))
    constants = {"TILE": TILE, "WHOLE": WHOLE}
    options = {"num_warps": split.NUM_WARPS, "num_stages": 1}
    for name, aligned in (("split", ("width", "row_stride")), ("split unaligned", ("width",))):
        show(name, arch, compiled(arch, split._split_kernel, constants, options, {}, aligned))
    exact = split_configs.EXACT
    constants = {"A_ALONG": 0, "B_ALONG": 0, "WHOLE": WHOLE, **sizes(exact)}
    kernel = split_product._exact_product_kernel
    show("exact", arch, compiled(arch, kernel, constants, warps(exact), {}))


def show(name: str, arch: int, kernel) -> None:
    print(json.dumps({"name": name, "arch": arch, **figures(kernel)}), flush=True)


if __name__ == "__main__":
    main()
