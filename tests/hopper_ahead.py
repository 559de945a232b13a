"""Compiles the kernels with fixed roles for sm_90 without a GPU and says what came out.

Run in a process of its own, without Triton's interpreter: prints one JSON object a kernel, as
`swiglu_ahead.py` does.
"""

import itertools
import json

import torch
import triton
from swiglu_ahead import figures
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from fusedlib.kernels.hopper import kernel as hopper
from fusedlib.kernels.hopper import launch as hopper_launch
from fusedlib.kernels.hopper.launch import HopperConfig, block_layout

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def cases():
    """(name, whether forward, configuration) of everything that may be launched."""
    yield "fwd", True, hopper_launch.FORWARD_CONFIG
    yield "bwd", False, hopper_launch.backward_config(hopper_launch.SHORT_SUM + 1)
    yield "bwd ahead", False, hopper_launch.backward_config(hopper_launch.SHORT_SUM)


def compiled(forward: bool, store: bool, config: HopperConfig, dtype: str):
    """The kernel as its launchers start it, with tokens of no known divisor."""
    made = config.forward_blocks() if forward else config.backward_blocks()
    blocks = dict(zip(("a", "b", "gates"), made, strict=False))
    constants = {**config.launch(), "FORWARD": forward, "STORE": store}
    options = {"num_warps": constants.pop("num_warps")}
    function = hopper._hopper_swiglu_kernel
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in blocks:
            layout, shape = block_layout(blocks[name], TYPES[dtype]), map(str, blocks[name])
            signature[name] = f"tensordesc<{dtype}[{','.join(shape)}],{layout!r}>"
        else:
            signature[name] = "i32" if name in ("tokens", "hidden", "inner") else "*" + dtype
            if name != "tokens":
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    for (name, forward, config), store, dtype in itertools.product(cases(), (True, False), TYPES):
        row = figures(compiled(forward, store, config, dtype))
        label = f"{name} {dtype} {'storing' if store else ''}".strip()
        print(json.dumps({"name": label, "arch": 90, **row}), flush=True)


if __name__ == "__main__":
    main()
