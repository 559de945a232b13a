"""Tune ahead: `python -m fusedlib.kernels.autotune --tokens 64,4096 --hidden 4096 --inner 14336`.

Runs what training and inference run at these sizes, each variant of both kernels once, so that its
tiles are in the file before they are needed. Exit status: 0 done, 2 nothing to tune with.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from fusedlib import paths
from fusedlib.kernels import autotune
from fusedlib.kernels.autotune import store
from fusedlib.kernels.swiglu_configs import MEASURED


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; its exit status."""
    given = _parsed(arguments)
    device = torch.device(given.device)
    if device.type != "cuda" or not torch.cuda.is_available():
        print(f"nothing to tune: needs an NVIDIA GPU, got --device {device}", file=sys.stderr)
        return 2
    if not autotune.enabled():
        print("tuning is off: unset FUSEDLIB_AUTOTUNE, and do not ask torch for deterministic "
              "algorithms", file=sys.stderr)  # fmt: skip
        return 2
    device = torch.device("cuda", device.index or 0)
    found = autotune.card(device)
    if found is not None and found[0] in MEASURED:
        print(f"{found[0]} has measured tiles in the table: nothing to tune")
        return 0
    for tokens in given.tokens:
        run_variants(tokens, given.hidden, given.inner, getattr(torch, given.dtype), device)
    for key, config in autotune.chosen().items():
        print(key, config, sep="\n    ")
    print(f"kept in {paths.cache_dir() / store.NAME}")
    return 0


def run_variants(
    tokens: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The forward that keeps gate|up and the one that does not; the backward over gate|up, as eager
    mode runs it, and beside it, as torch.compile does.
    """
    from fusedlib.kernels.route import plan_of

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device) * shape[1] ** -0.5

    x, dy = drawn(tokens, hidden), drawn(tokens, hidden)
    w_gate_up, w_down = drawn(2 * inner, hidden), drawn(hidden, inner)
    plan = plan_of(x, w_gate_up, w_down)
    plan.activate(x, w_gate_up, False)
    _, gate_up = plan.activate(x, w_gate_up, True)
    assert gate_up is not None
    for in_place in (False, True):
        plan.differentiate(dy, w_down, gate_up, True, in_place)


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fusedlib.kernels.autotune",
        description="Tune the SwiGLU kernels' tiles for this GPU ahead of their first use.",
    )
    parser.add_argument("--tokens", type=_numbers, required=True, help="of a call, e.g. 64,4096")
    parser.add_argument("--hidden", type=_number, required=True, help="width of x")
    parser.add_argument("--inner", type=_number, required=True, help="intermediate size")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [_number(part) for part in text.split(",")]


def _number(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; it must be 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
