"""Compiles the SwiGLU kernels for architectures without a GPU and says what came out.

Run in a process of its own, without Triton's interpreter:
    python swiglu_ahead.py ARCHITECTURE[,ARCHITECTURE ...] [kind ...]
prints one JSON object a kernel, as `sass.show` says.
"""

import sys
from collections.abc import Iterator

import triton
from sass import show
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedlib.kernels import swiglu, swiglu_configs
from fusedlib.kernels.few_tokens import kernels as few_tokens
from fusedlib.kernels.swiglu_configs import Config

TYPES = {"half": "bf16", "ieee": "fp32"}
FORWARD = {"kernel": "_swiglu_fwd_kernel", "a": "x", "b": "w_gate_up", "variant": {"SAVE": True}}
BACKWARD = {
    "kernel": "_swiglu_bwd_kernel", "a": "dy", "b": "w_down",
    "variant": {"PRODUCT": True, "GRADIENT": True, "OUTPUT": True, "IN_PLACE": False},
}  # fmt: skip
IN_PLACE = {**BACKWARD, "variant": {**BACKWARD["variant"], "IN_PLACE": True}}


def cases(arch: int):
    """(name, kernel, kind, configuration, aligned) of everything that may be launched there."""
    for table, spec in ((swiglu_configs.FORWARD, FORWARD), (swiglu_configs.BACKWARD, BACKWARD)):
        direction = "forward" if spec is FORWARD else "backward"
        variants = {"": spec} if spec is FORWARD else {"": spec, "in place ": IN_PLACE}
        for name, variant in variants.items():
            yield name.strip(), variant, "half", table[arch], True
            for small in swiglu_configs.few_tokens(direction, arch):
                yield f"{name}few tokens {small.block_n} wide", variant, "half", small, True
        yield "unaligned", spec, "half", swiglu_configs.UNALIGNED, False
    pointwise = {**IN_PLACE, "variant": {**IN_PLACE["variant"], "PRODUCT": False}}
    for kind in ("half", "ieee"):
        yield "pointwise", pointwise, kind, swiglu_configs.POINTWISE, True
        yield "pointwise unaligned", pointwise, kind, swiglu_configs.POINTWISE, False


def compiled(arch: int, spec: dict, kind: str, config: Config, aligned: bool):
    """The kernel as Triton would compile it at its launch."""
    forward, dtype = spec is FORWARD, TYPES[kind]
    m, n, k = config.block_m, config.block_n, config.block_k
    constants = {
        **spec["variant"], "DESCRIPTORS": config.descriptors,
        "FLATTEN": config.persistent and not spec["variant"].get("IN_PLACE"),
        "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": config.group_m,
    }  # fmt: skip
    function = getattr(swiglu, spec["kernel"])
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in (spec["a"], spec["b"]) and config.descriptors:
            block = [m, k] if name == spec["a"] else [n, k] if forward else [k, n]
            signature[name] = f"tensordesc<{dtype}{block}>".replace(" ", "")
        elif name in ("tokens", "hidden", "inner"):
            signature[name] = "i32"
            if aligned and name != "tokens":
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "*" + dtype
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def few_cases(arch: int):
    """(name, kernel, configuration, constants) of the products at few tokens."""
    for config in few_tokens.DOWN.get(arch, few_tokens.OTHERWISE):
        yield f"few down {config.block_n} wide", few_tokens._few_down_kernel, config, {}
    side = few_tokens.SIDE.get(arch, few_tokens.OTHER_SIDE)
    spans = {"SIDE": side, "SPAN": 4, "TOKENS": swiglu_configs.FEW_TOKENS}
    for config in few_tokens.D_X.get(arch, few_tokens.OTHERWISE):
        name = f"few gradients {config.block_n} wide"
        yield name, few_tokens._few_gradients_kernel, config, spans


def compiled_few(arch: int, function, config: Config, constants: dict):
    """One of them as Triton would compile it at its launch."""
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    constants = constants | blocks
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        size = name in ("tokens", "hidden", "inner", "of_x", "of_gate_up")
        signature[name] = "constexpr" if name in constants else "i32" if size else "*bf16"
        if name not in (*constants, "tokens", "of_x", "of_gate_up"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def made(arch: int, kinds: list[str]) -> Iterator[tuple[dict, object]]:
    """(what is said of it, kernel)."""
    for name, spec, kind, config, aligned in cases(arch):
        if kind in kinds:
            label = f"{spec['kernel'].split('_')[2]} {kind} {name}".strip()
            yield {"name": label, "arch": arch}, compiled(arch, spec, kind, config, aligned)
    for name, *case in few_cases(arch) if "half" in kinds else ():
        yield {"name": name, "arch": arch}, compiled_few(arch, *case)


if __name__ == "__main__":
    kinds = sys.argv[2:] or list(TYPES)
    show(kernel for arch in sys.argv[1].split(",") for kernel in made(int(arch), kinds))
