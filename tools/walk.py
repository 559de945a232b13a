"""The way of a call of `fusedlib.swiglu_mlp` to its launch: `PYTHONPATH=. python tools/walk.py`.

Prints the library's files in the order in which their functions are entered, and how often the way
turns back to a file that it left before. Kernels are the interpreter's, and start nothing.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

import fusedlib

ROOT = Path(fusedlib.__file__).parents[1]


class LaunchedError(Exception):
    """The way is at its end."""


def walk(call: Callable[[], Any]) -> list[str]:
    """The files that a call enters until it starts a kernel, one after another."""
    from fusedlib.launch import Launch

    files: list[str] = []

    def enter(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "fusedlib"):
            name = path.relative_to(ROOT).as_posix()
            files.extend([] if files[-1:] == [name] else [name])

    def stop(*_: Any) -> None:
        raise LaunchedError

    start, Launch.__call__ = Launch.__call__, stop  # type: ignore[method-assign]
    sys.setprofile(enter)
    try:
        call()
    except LaunchedError:
        return files
    finally:
        sys.setprofile(None)
        Launch.__call__ = start  # type: ignore[method-assign]
    raise RuntimeError("the call started no kernel: plain PyTorch ran")


if __name__ == "__main__":
    weights = [torch.randn(size, dtype=torch.float16) for size in ((96, 64), (64, 48))]
    for words, tokens in (("imports", 16), ("first call", 80), ("next call", 80)):
        x = torch.randn(tokens, 64).half()
        way = walk(partial(fusedlib.swiglu_mlp, x, *weights))
        back = sum(name in way[:i] for i, name in enumerate(way))
        print(f"{words}: {len(way)} files, {back} turns back", *way, sep="\n  ")
