"""Study 02: its cases, and what measures each experiment.

experiment      question
four_sums       0.01 added a thousand times, four ways, as published; each error split in two
growth          error against the number of terms, by format, method and distribution
stagnation      where a sum of equal terms stops growing
dots            inputs in a format, products summed in fp32 or in that same format
torch_*         what torch's own sums and products do
autocast*       which dtypes autocast gives
tensor_core     where the tensor core's accumulation errs

Nothing is timed and nothing races: a case is one computation against the exact result.
"""

import torch

from fusedlib.bench import settings
from fusedlib.bench.attempt import is_planning
from measure import accumulation, formats, tensor_core, torch_precision
from measure.accumulation import DTYPES, Case, Figures

STUDY = "02_precision"
FORMATS = tuple(formats.FORMATS)
HALVES = ("fp16", "bf16")
MEASURES = {
    "four_sums": accumulation.measure_four_sum,
    "growth": accumulation.measure_growth,
    "stagnation": accumulation.measure_stagnation,
    "dots": accumulation.measure_dot,
    "torch_sum": torch_precision.measure_sum,
    "torch_matmul": torch_precision.measure_matmul,
    "autocast": torch_precision.measure_autocast,
    "autocast_model": torch_precision.measure_autocast_model,
    "tensor_core": tensor_core.measure_tensor_core,
}


def measure(case: Case) -> Figures:
    """The figures of a case of any experiment."""
    return MEASURES[case["experiment"]](case)


def devices() -> list[str]:
    """The CPU, and a CUDA GPU when there is one."""
    return ["cpu", "cuda"] if torch.cuda.is_available() or is_planning() else ["cpu"]


def grid(largest: int) -> list[int]:
    """1 and 3 times each power of ten from 10 up to `largest`."""
    if largest < 10:
        raise ValueError(f"the largest number of terms must be at least 10, got {largest}")
    numbers = (m * 10**e for e in range(1, len(str(largest)) + 1) for m in (1, 3))
    return [n for n in numbers if n <= largest]


def lengths(largest: int, step: int = 4) -> list[int]:
    """Powers of two from 16 up to `largest`, each `step` times the one before."""
    if largest < 16:
        raise ValueError(f"the largest K must be at least 16, got {largest}")
    found = [16]
    while found[-1] * step <= largest:
        found.append(found[-1] * step)
    return found


def four_sums() -> list[Case]:
    """One case a published sum and device."""
    return [
        {"experiment": "four_sums", "provider": name, "dtype": spec.total, "direction": "forward",
         "distribution": "constant", "n_terms": 1000, "device": device}
        for device in devices() for name, spec in accumulation.FOUR_SUMS.items()
    ]  # fmt: skip


def growth(max_terms: int, kahan_terms: int, seeds: int) -> list[Case]:
    """Sums of more and more terms; Kahan's, which is dear to emulate, up to `kahan_terms` only."""
    return [
        {"experiment": "growth", "provider": f"{method} {dtype}", "method": method, "dtype": dtype,
         "direction": "forward", "distribution": distribution, "n_terms": n_terms, "seed": 0,
         "seeds": 1 if distribution == "constant" else seeds, "device": "cpu"}
        for n_terms in grid(max_terms) for distribution in accumulation.DISTRIBUTIONS
        for dtype in FORMATS for method in accumulation.SUMS
        if method != "kahan" or n_terms <= kahan_terms
    ]  # fmt: skip


def stagnation() -> list[Case]:
    """One case a format and term, 0.01 and 1."""
    return [
        {"experiment": "stagnation", "provider": f"sequential {dtype}", "dtype": dtype,
         "direction": "forward", "distribution": "constant", "term_text": text, "device": "cpu"}
        for dtype in FORMATS for text in ("0.01", "1")
    ]  # fmt: skip


def dots(max_k: int, seeds: int) -> list[Case]:
    """One case an input format, accumulator, distribution and K; fp32 into fp32 once."""
    return [
        {"experiment": "dots", "provider": f"{dtype} into {accumulator}", "dtype": dtype,
         "accumulator": accumulator, "direction": "forward", "distribution": distribution, "k": k,
         "seed": 0, "seeds": seeds, "device": "cpu"}
        for k in lengths(max_k) for distribution in ("uniform", "normal") for dtype in FORMATS
        for accumulator in dict.fromkeys(("fp32", dtype))
    ]  # fmt: skip


def torch_sums(max_terms: int, seeds: int) -> list[Case]:
    """One case a way of summing, dtype, device and number of terms, uniform in [0, 1)."""
    if max_terms > 100_000:
        raise ValueError(f"at most 100000 uniform terms, got {max_terms}: fp16 ends at 65504")
    alone = torch_precision.ONE_BY_ONE
    return [
        {"experiment": "torch_sum", "provider": provider, "dtype": dtype, "direction": "forward",
         "distribution": "uniform", "n_terms": n_terms, "seed": 0, "seeds": seeds,
         "device": device}
        for device in devices() for n_terms in sorted({min(1000, max_terms), max_terms})
        for dtype in DTYPES for provider in (*torch_precision.SUMS, alone)
        if provider != alone or device == "cpu"
    ]  # fmt: skip


def torch_products(size: int, k: int) -> list[Case]:
    """fp32 products [size, size] at each precision; fp16 and bf16 of long K with and without
    reduced-precision reductions.
    """
    shared: Case = {"experiment": "torch_matmul", "direction": "forward", "distribution": "normal"}
    fp32 = [
        {**shared, "provider": f'precision "{precision}"', "dtype": "fp32", "precision": precision,
         "reduced_reduction": False, "m": size, "n": size, "k": size, "device": device}
        for device in devices() for precision in settings.PRECISIONS
    ]  # fmt: skip
    half = [
        {**shared, "provider": f"reduced-precision reduction {setting}", "dtype": dtype,
         "precision": "highest", "reduced_reduction": setting == "allowed", "m": 64, "n": 64,
         "k": k, "device": "cuda"}
        for dtype in HALVES for setting in ("allowed", "forbidden")
    ]  # fmt: skip
    return [*fp32, *half]


def autocast() -> list[Case]:
    """One case an operation, and one a part of a small network, by autocast dtype and device."""
    asked = [("autocast", name) for name in torch_precision.OPERATIONS]
    asked += [("autocast_model", part) for part in torch_precision.MODEL_PARTS]
    return [
        {"experiment": experiment, "provider": name, "dtype": dtype,
         "direction": "backward" if name == "gradients" else "forward", "device": device}
        for device in devices() for dtype in HALVES for experiment, name in asked
    ]  # fmt: skip


def tensor_cores(max_k: int, step: int = 4) -> list[Case]:
    """One case a way to accumulate, operand format, distribution and K; models of fp16 alone."""
    return [
        {"experiment": "tensor_core", "provider": provider, "dtype": dtype, "direction": "forward",
         "distribution": distribution, "k": k, "seed": 0,
         "device": "cpu" if provider in tensor_core.MODELS else "cuda"}
        for distribution in ("uniform", "normal") for dtype in tensor_core.DTYPES
        for k in lengths(max_k, step)
        for provider in (*tensor_core.MEASURED, *tensor_core.MODELS)
        if provider in tensor_core.MEASURED or dtype == "fp16"
    ]  # fmt: skip
