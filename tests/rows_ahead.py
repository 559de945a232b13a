"""Compiles the kernels of `rms_norm` and `rope` for architectures without a GPU.

Run in a process of its own, without Triton's interpreter:
    python rows_ahead.py ARCHITECTURE[,ARCHITECTURE ...] [name ...]
prints one JSON object a kernel, of all kernels or of those named. The launchers themselves say what
they would launch.
"""

import re
import sys
from collections.abc import Iterator

import torch
import triton
from sass import show
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedlib.kernels import rms_norm, rope
from fusedlib.kernels.launch import Launch

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
            torch.int64: "*i64"}  # fmt: skip
WIDTHS = (64, 80, 128, 2048, 3072, 4096, 8192, 16384, 32768)
Made = tuple[Launch, tuple[Tensor, ...]]
MADE: list[Made] = []


def noted(make, _, *matrices):
    """In place of `kept_launch`: nothing is started."""
    MADE.append((make(), matrices))
    return lambda *_: None


def cases() -> Iterator[tuple[str, Made]]:
    """(name, launch) of every kind of kernel, with the addresses and strides of real calls."""
    rms_norm.kept_launch = rope.kept_launch = noted
    rms_norm.multiprocessors = lambda _: 132
    for dtype in (torch.bfloat16, torch.float32):
        kind = "half" if dtype == torch.bfloat16 else "fp32"
        for width in WIDTHS:
            x, weight = torch.empty(300, width, dtype=dtype), torch.empty(width, dtype=dtype)
            _, _, rstd = rms_norm.rms_norm_fwd(x, weight, x, 1e-6, True)
            rms_norm.rms_norm_bwd(x, x, x, weight, rstd, True, True)
            for name in ("fwd", "bwd", "sum"):
                yield f"{name} {kind} {width}", MADE.pop(0)
        for head_dim, rotary in ((64, 64), (128, 128), (80, 80), (96, 32), (10, 6)):
            q, k = (torch.empty(2, 64, h, head_dim, dtype=dtype).transpose(1, 2) for h in (32, 8))
            cos = torch.empty(1, 64, rotary, dtype=dtype)
            rope.rope_call(q, k, cos, cos, None, False)
            yield f"rope {kind} {rotary} of {head_dim}", MADE.pop()
            at = torch.zeros(64, dtype=torch.int64)
            rope.rope_call(q, k, cos[0], cos[0], at, True)
            yield f"rope back at positions {kind} {rotary} of {head_dim}", MADE.pop()


def compiled(arch: int, launch: Launch, matrices: tuple[Tensor, ...]):
    """The kernel as Triton would compile it at this launch."""
    values = iter((*matrices, *launch.scalars))
    signature, attributes = {}, {}
    constants = {k: v for k, v in launch.constants.items() if not k.startswith("num_")}
    for index, name in enumerate(launch.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = next(values)
        if isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
        elif value == 1 and not isinstance(value, float):
            signature[name], constants[name] = "constexpr", 1
            continue
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.constants["num_warps"]}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def wanted(archs: list[int], names: list[str]) -> Iterator[tuple[dict, object]]:
    """(what is said of it, kernel)."""
    for name, made in cases():
        for arch in archs if name in names or not names else ():
            kernel = compiled(arch, *made)
            # Loads of two bytes: of what should come by sixteen.
            narrow = len(re.findall(r"ld\.global\S*\.b16\b", kernel.asm["ptx"]))
            yield {"name": name, "arch": arch, "narrow": narrow}, kernel


if __name__ == "__main__":
    show(wanted([int(arch) for arch in sys.argv[1].split(",")], sys.argv[2:]))
