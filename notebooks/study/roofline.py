"""Ceilings of a device as measured on it, under which a problem takes some least time.

Williams, Waterman and Patterson 2009: time ≥ max(FLOPs / rate, bytes / bandwidth).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import timing
from study.cases import grid
from study.settings import matmul_settings

COPY, GEMM = "copy", "gemm"


def cases(
    device: str, formats: Sequence[str], *, gemm_size: int, copy_mib: int, repetitions: int
) -> list[dict[str, Any]]:  # fmt: skip
    """One copy and one square product a dtype, fp32 by IEEE products."""
    ceilings: list[dict[str, Any]] = [{"ceiling": COPY, "size": copy_mib, "dtype": "int8"}]
    for dtype in formats:
        setting = "highest" if dtype == "float32" else None
        ceilings.append({"ceiling": GEMM, "size": gemm_size, "dtype": dtype, "precision": setting})
    shared = {"experiment": "ceiling", "device": device, "repetitions": repetitions}
    return grid(shared, ceiling=ceilings)


def precision_of(setting: str | None) -> AbstractContextManager[None]:
    """torch's fp32 setting while measuring, half-precision reductions as torch has them."""
    return matmul_settings(setting or "highest", True)


def measure(case: Mapping[str, Any]) -> dict[str, Any]:
    """Time a copy of `size` MiB or a product of `size`³ on random data.

    Returns the times, and `bytes_per_s` (read and written) or `flops_per_s` at the median.
    """
    size, device = case["size"], case["device"]
    call: Callable[[], Tensor]
    if case["ceiling"] == COPY:
        source = torch.zeros(size * 2**20, dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        name, work, call = "bytes_per_s", 2 * source.numel(), lambda: target.copy_(source)
    else:
        name, work, call = "flops_per_s", 2 * size**3, square_product(case)
    how: dict[str, Any] = {"warmup": 3, "repetitions": case["repetitions"], "flush_l2": True}
    with precision_of(case.get("precision")):
        times = timing.in_turns({"it": call}, device=device, **how)["it"].figures()
    return {**times, name: work / (times["median_ms"] / 1e3)}


def square_product(case: Mapping[str, Any]) -> Callable[[], Tensor]:
    """A product of two matrices of `size`² random numbers, into a tensor that exists."""
    size, device = case["size"], case["device"]
    generator = torch.Generator(device=device).manual_seed(0)
    left, right = (
        torch.randn(size, size, generator=generator, device=device).to(
            getattr(torch, case["dtype"])
        )
        for _ in range(2)
    )
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right.mT, out=out)
