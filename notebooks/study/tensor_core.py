"""The tensor core's own accumulation error against K, and a model that gives its very bits.

The operands are numbers whose products are exact in fp32 (fp16, bf16, or TF32 values held in fp32),
so that what differs from the float64 product is the accumulation alone: in the unit's own
accumulator, in fp32 once every K block of 64 ("promoted"), as cuBLAS does it, or by fp32
multiply-adds without a tensor core. `aligned` is a model, computed on the CPU, whose accumulator
takes several products at once and cuts every summand off. Models of that kind: Fasi, Higham,
Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Comput. Sci. 7:e330, 2021
(V100, T4, A100); Xie, Wang, Yang and Yang, "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores
and Matrix Cores", arXiv 2511.10909, 2025, and Khattak and Mikaitis, "Accurate Models of NVIDIA
Tensor Cores", arXiv 2512.07004, 2025, both with Hopper's.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.turns import Figures
from study import settings, sums
from study.cases import Case

MODEL = "model: align and chop"
SIZE = 128  # C is [SIZE, SIZE]: 16384 samples of the error
MODEL_SIZE = 32
CORNER = 16  # rows and columns of a measured C that are held against the model
MEASURED = ("in the tensor core", "promoted", "cuBLAS", "IEEE fp32")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}
TOGETHER = {"fp16": 16, "bf16": 16, "tf32": 8}  # products in one MMA instruction of sm_90
EXTRA_BITS = 2  # bits below fp32's last one that an aligned summand keeps on sm_90


@lru_cache(maxsize=1)
def operands(
    distribution: str, dtype: str, k: int, size: int, device: str
) -> tuple[Tensor, Tensor]:
    """A [size, k] and B [k, size] with values of the format, the same on every machine."""
    raw = sums.draw(distribution, 2 * size * k, 1)[:, 0].copy()
    values = torch.from_numpy(sums.round_to(raw, dtype)).to(DTYPES[dtype])
    left, right = values[: size * k].view(size, k), values[size * k :].view(k, size)
    return left.to(device), right.to(device)


def aligned(left: Tensor, right: Tensor, together: int, extra_bits: int = EXTRA_BITS) -> Tensor:
    """A B as a tensor core adds: the accumulator and so many products are brought to the largest
    exponent among them, each is cut off `extra_bits` below fp32's last bit, and their sum is cut
    off to fp32. A product's exponent is the sum of its factors', also where it has carried.
    """
    a, b = left.double().numpy(), right.double().numpy()
    above, beside = _exponents(a), _exponents(b)
    acc = np.zeros((a.shape[0], b.shape[1]))
    for start in range(0, a.shape[1], together):
        part = slice(start, start + together)
        products = a[:, part, None] * b[part]  # [m, together, n]
        largest = (above[:, part, None] + beside[part]).max(axis=1)
        last = np.ldexp(1.0, np.maximum(largest, _exponents(acc)) - 23 - extra_bits)
        units = np.trunc(products / last[:, None]).sum(axis=1) + np.trunc(acc / last)
        acc = truncate_to_fp32(units * last)
    return torch.from_numpy(acc)


def truncate_to_fp32(values: np.ndarray) -> np.ndarray:
    """Chop float64 values of fp32's normal range to its 24 bits, toward zero; float64 again."""
    bits = values.view(np.uint64) & np.uint64(0xFFFFFFFFFFFFFFFF ^ ((1 << 29) - 1))
    return bits.view(np.float64)


def _exponents(values: np.ndarray) -> np.ndarray:
    """Binary exponents; of zero one below all others."""
    return np.where(values == 0, -500, np.frexp(values)[1] - 1)


@lru_cache(maxsize=1)
def corner(distribution: str, dtype: str, k: int, device: str) -> Tensor:
    """What the model `aligned` gives for the first rows and columns of a measured product."""
    left, right = operands(distribution, dtype, k, SIZE, device)
    return aligned(left[:CORNER].cpu(), right[:, :CORNER].cpu(), TOGETHER[dtype])


def product(way: str, left: Tensor, right: Tensor) -> Tensor:
    """The product by one way on a CUDA device, fp32 [m, n]."""
    from study.product_kernel import accumulate_fwd

    if way == "IEEE fp32":
        return accumulate_fwd(left.float(), right.float(), promote=False, precision="ieee")
    if way != "cuBLAS":
        return accumulate_fwd(left, right, promote=way == "promoted")
    if left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    with settings.matmul_settings("high", reduced=True):
        return left @ right


def errors(out: Tensor, ref: Tensor) -> Figures:
    """Error of a product [m, n] relative to |ref| as a whole, and the share of its elements that
    are too small in magnitude: one half where the signs of the errors are as likely either way.
    """
    error = out.double() - ref
    return {
        "relative_error": float(error.norm() / ref.norm()),
        "toward_zero_share": float((error * ref.sign() < 0).double().mean()),
    }


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here."""
    if case["device"] == "cuda" and not has_tensor_cores():
        raise Unavailable("needs a CUDA GPU with tensor cores")


def measure(case: Case) -> Figures:
    """One way of accumulating, with the share of elements that are the model's bit for bit; or the
    model.
    """
    available(case)
    way, device = case["provider"], case["device"]
    distribution, dtype, k = case["distribution"], case["dtype"], case["k"]
    size = MODEL_SIZE if way == MODEL else SIZE
    left, right = operands(distribution, dtype, k, size, device)
    true = left.double() @ right.double()
    if way == MODEL:
        return errors(aligned(left, right, TOGETHER[dtype]), true)
    out = product(way, left, right)
    same = out[:CORNER, :CORNER].double().cpu() == corner(distribution, dtype, k, device)
    return errors(out, true) | {"modelled_share": float(same.double().mean())}


def has_tensor_cores() -> bool:
    """Whether torch sees an NVIDIA GPU of compute capability 8.0 or later."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability() >= (8, 0)
