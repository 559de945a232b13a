"""The tensor core's own accumulation error against K.

The operands are numbers whose products are exact in fp32 (fp16, bf16, or TF32 values held in fp32),
so that what differs from the float64 product is the accumulation alone. Four ways of keeping the
sum over K on a CUDA GPU:

- "in the tensor core": the unit's own accumulator, from the first product to the last;
- "promoted": each K block of 64 from zero, added to an fp32 accumulator by an ordinary addition;
- "cuBLAS": what torch.mm calls, with an fp32 result;
- "IEEE fp32": fp32 multiply-adds, no tensor core;

and two models of an accumulator that takes the exact sum of `step` products at once, computed on
the CPU: one that then chops to fp32 toward zero, one that rounds to nearest.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from fusedlib.bench import accumulation, formats
from fusedlib.bench.accumulation import Case, Figures
from fusedlib.bench.dots import lengths
from fusedlib.bench.results import Unavailable

SIZE = 128  # C is [SIZE, SIZE]: 16384 samples of the error
MODEL_SIZE = 32
MODEL_STEP = 16  # products that one fp16 MMA instruction of sm_90 sums
NEEDS_GPU = "needs a CUDA GPU with tensor cores"
MEASURED = ("in the tensor core", "promoted", "cuBLAS", "IEEE fp32")
MODELS = {"model: chop to fp32": True, "model: round to fp32": False}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}


def tensor_core_cases(max_k: int, dtypes: list[str], step: int = 4) -> list[Case]:
    """One case a provider, operand format, distribution and K; models only for fp16 values."""
    if unknown := [d for d in dtypes if d not in DTYPES]:
        raise ValueError(f"no tensor core case for {unknown}: choose from {', '.join(DTYPES)}")
    return [
        {
            "experiment": "tensor_core",
            "provider": provider,
            "dtype": dtype,
            "direction": "forward",
            "distribution": distribution,
            "k": k,
            "seed": 0,
            "device": "cpu" if provider in MODELS else "cuda",
        }
        for distribution in ("uniform", "normal")
        for dtype in dtypes
        for k in lengths(max_k, step)
        for provider in (*MEASURED, *MODELS)
        if provider in MEASURED or dtype == "fp16"
    ]


@lru_cache(maxsize=1)
def operands(
    distribution: str, dtype: str, k: int, size: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [size, k] and B [k, size] with values of the format, the same on every machine."""
    raw = accumulation.draw(distribution, 2 * size * k, 1)[:, 0].copy()
    values = torch.from_numpy(formats.round_to(raw, dtype)).to(DTYPES[dtype])
    left, right = values[: size * k].view(size, k), values[size * k :].view(k, size)
    return left.to(device), right.to(device)


@lru_cache(maxsize=1)
def reference(
    distribution: str, dtype: str, k: int, size: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """A B and |A| |B| in float64, both [size, size]."""
    left, right = (t.double() for t in operands(distribution, dtype, k, size, device))
    return left @ right, left.abs() @ right.abs()


def modelled(
    left: torch.Tensor, right: torch.Tensor, chop: bool, step: int = MODEL_STEP
) -> torch.Tensor:
    """A B where each `step` products are summed exactly with the accumulator, then brought to fp32.

    float64 holds the sum of 16 products of fp16 values and an fp32 number almost exactly, which is
    exact enough for a model: what is left out is far below fp32's unit roundoff.
    """
    a, b = left.double().numpy(), right.double().numpy()
    acc = np.zeros((a.shape[0], b.shape[1]))
    for start in range(0, a.shape[1], step):
        acc = acc + a[:, start : start + step] @ b[start : start + step]
        acc = formats.truncate_to_fp32(acc) if chop else acc.astype(np.float32).astype(np.float64)
    return torch.from_numpy(acc)


def product(provider: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product by one provider on a CUDA device, fp32 [m, n]."""
    from fusedlib.kernels.accumulate import accumulate_fwd

    if provider == "IEEE fp32":
        return accumulate_fwd(left.float(), right.float(), promote=False, precision="ieee")
    if provider != "cuBLAS":
        return accumulate_fwd(left, right, promote=provider == "promoted")
    if left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return left @ right
    finally:
        torch.set_float32_matmul_precision(before)


def errors(out: torch.Tensor, ref: torch.Tensor, magnitude: torch.Tensor) -> Figures:
    """Error figures of a product [m, n]: against |ref| as a whole, and each element against its |A|
    |B|.

    `toward_zero_error` is the mean of the elements' signed errors, positive when the result is too
    small in magnitude. `bias_share` is its size over the root mean square: 1 when every element
    errs alike, near 0 when the signs are as likely either way.
    """
    error = out.double() - ref
    relative = error / magnitude
    rms = float(relative.square().mean().sqrt())
    toward_zero = -relative * ref.sign()
    mean = float(toward_zero.mean())
    return {
        "relative_error": float(error.norm() / ref.norm()),
        "rms_relative_error": rms,
        "largest_relative_error": float(relative.abs().max()),
        "signed_relative_error": float(relative.mean()),
        "toward_zero_error": mean,
        "toward_zero_share": float((toward_zero > 0).double().mean()),
        "bias_share": abs(mean) / rms if rms else 0.0,
    }


def measure_tensor_core(case: Case) -> Figures:
    """Measure one way of accumulating, or compute one model; `Unavailable` without a GPU."""
    provider, device = str(case["provider"]), str(case["device"])
    if device == "cuda" and not has_tensor_cores():
        raise Unavailable(NEEDS_GPU)
    size = MODEL_SIZE if provider in MODELS else SIZE
    key = str(case["distribution"]), str(case["dtype"]), int(case["k"] or 0), size, device
    left, right = operands(*key)
    if provider in MODELS:
        out = modelled(left, right, MODELS[provider])
    else:
        out = product(provider, left, right)
    return errors(out, *reference(*key))


def has_tensor_cores() -> bool:
    """Whether torch sees an NVIDIA GPU of compute capability 8.0 or later."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability() >= (8, 0)
