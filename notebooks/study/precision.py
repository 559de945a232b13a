"""Precision: what number formats, sums, torch's settings and tensor cores lose.

Nothing is timed: a case is one computation against the exact result, and a race often one case.
The error of a computed sum s' of terms x_i that were meant to be X_i has two exact parts:
s' - sum X_i = (sum x_i - sum X_i) + (s' - sum x_i), *representation* and *accumulation*.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import count, takewhile
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

import fusedlib
from fusedlib.bench.attempt import Unavailable, Wrong
from fusedlib.bench.turns import Figures
from study import sums, tensor_core, token_bits
from study.cases import Case, Row, device_of, grid
from study.race import each
from study.run import sized
from study.settings import PRECISIONS, matmul_settings
from study.sums import CONSTANT, FORMATS

QUICK: dict[str, Any] = {
    "device": "auto",  # cuda for the CPU and a CUDA GPU, cpu for it alone, auto for what there is
    "max_terms": 100_000,  # largest number of terms in a sum
    "matmul_size": 256,  # rows and columns of the square fp32 products
    "reduced_k": 32_768,  # K of the fp16 and bf16 products with reduced reductions
    "core_max_k": 16_384,  # largest K in the tensor core
    "core_step": 4,  # factor from one K in the tensor core to the next
    "flag_k": 256,  # K of the products of all `flag_shapes`
    "flag_shapes": ["1·256", "64·64", "256·256", "64·1024"],  # rows·columns of them
    "linear_ks": [256, 1024],  # inputs of linear layers, the K of their sums
    "linear_size": 256,  # their tokens and outputs; on Hopper 4096 are enough to split
    "bits_model": "two layers",  # of study.patched.CONFIGS, whose log-probabilities are watched
    "bits_dtypes": ["float32"],  # of that model
    "probe": 16,  # tokens of the watched sequence
    "situations": ["batch 64", "longer 48", "padding 64", "packed 40"],  # tokens beside it, in all
    "batches": [2, 4, 64, 256],  # rows, with the one whose bits are watched
    "batch_widths": [256, 1024],  # inputs and outputs of the products there
}
FULL: dict[str, Any] = QUICK | {
    "max_terms": 10_000_000, "matmul_size": 4096, "reduced_k": 262_144, "core_max_k": 131_072,
    "core_step": 2, "flag_k": 16_384,
    "flag_shapes": ["1·4096", "64·64", "64·4096", "512·512", "4096·64", "4096·4096", "8192·11008"],
    "linear_ks": [256, 1024, 4096, 16_384, 65_536], "linear_size": 4096,
    "batches": [2, 4, 16, 64, 256, 1000, 1024, 4096, 8192], "batch_widths": [1024, 4096],
    "bits_model": "Llama-3.2-1B", "bits_dtypes": ["bfloat16", "float32"], "probe": 64,
    "situations": ["batch 256", "batch 4096", "longer 128", "longer 300", "longer 4096",
                   "padding 256", "packed 300"],
}  # fmt: skip
PROFILES = {"quick": QUICK, "full": FULL}
SEEDS = 5  # draws of each random sum
FORWARD = {"direction": "forward"}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HALVES = ("fp16", "bf16")
ALLOWED, FORBIDDEN = (f"reduced-precision reduction {way}" for way in ("allowed", "forbidden"))
ONE_BY_ONE = "one by one"
_BY_PRECISION = [{"provider": f'precision "{name}"', "precision": name} for name in PRECISIONS]


# --- cases ---------------------------------------------------------------------------------------


def cases(profile: str = "quick", **sizes: Any) -> list[dict[str, Any]]:
    """What is measured, by experiment."""
    s = sized(PROFILES, profile, sizes)
    where = device_of(s.device)
    devices = ["cpu", "cuda"] if where == "cuda" else ["cpu"]
    return [
        *four_sums(devices),
        *growth(s.max_terms),
        *stagnation(),
        *torch_sums(min(s.max_terms, 100_000), devices),
        *torch_products(s.matmul_size, s.reduced_k, devices),
        *tensor_cores(s.core_max_k, s.core_step),
        *flags(s.flag_shapes, s.flag_k, where),
        *linears(s.linear_ks, s.linear_size, where),
        *neighbours(s.batches, s.batch_widths, where),
        *token_bits.cases(
            s.situations, model=s.bits_model, probe=s.probe, dtypes=s.bits_dtypes, device=where
        ),
    ]  # fmt: skip


def four_sums(devices: Sequence[str]) -> list[dict[str, Any]]:
    """One case a published sum and device."""
    ways = [{"provider": name, "dtype": total} for name, (total, _, _) in FOUR_SUMS.items()]
    shared = {**FORWARD, "experiment": "four_sums", "distribution": "constant", "n_terms": 1000}
    return grid(shared, device=devices, sum=ways)


def growth(max_terms: int) -> list[dict[str, Any]]:
    """Sums of more and more positive terms, one after another and pairwise: of 1 and 3 times each
    power of ten.
    """
    numbers = (m * 10**e for e in range(1, len(str(max_terms)) + 1) for m in (1, 3))
    ways = [
        {"dtype": dtype, "method": method, "provider": f"{method} {dtype}"}
        for dtype in DTYPES for method in sums.SUMS
    ]  # fmt: skip
    shared = {**FORWARD, "experiment": "growth", "seed": 0, "device": "cpu"}
    shared |= {"distribution": "uniform", "seeds": SEEDS}
    return grid(shared, n_terms=[n for n in numbers if n <= max_terms], sum=ways)


def stagnation() -> list[dict[str, Any]]:
    """One case a format and term, 0.01 and 1."""
    ways = [{"provider": f"sequential {dtype}", "dtype": dtype} for dtype in FORMATS]
    shared = {**FORWARD, "experiment": "stagnation", "distribution": "constant", "device": "cpu"}
    return grid(shared, sum=ways, term_text=("0.01", "1"))


def torch_sums(max_terms: int, devices: Sequence[str]) -> list[dict[str, Any]]:
    """Terms uniform in [0, 1): at most 65,504 of them fit fp16."""
    shared = {**FORWARD, "experiment": "torch_sum", "distribution": "uniform", "seed": 0}
    every = grid(
        {**shared, "seeds": SEEDS}, device=devices,
        n_terms=sorted({min(1000, max_terms), max_terms}), dtype=DTYPES,
        provider=(*TORCH_SUMS, ONE_BY_ONE),
    )  # fmt: skip
    return [c for c in every if c["provider"] != ONE_BY_ONE or c["device"] == "cpu"]


def torch_products(size: int, k: int, devices: Sequence[str]) -> list[dict[str, Any]]:
    """fp32 products [size, size] at each precision; fp16 and bf16 of long K with and without
    reduced-precision reductions."""
    shared: Case = {**FORWARD, "experiment": "torch_matmul", "distribution": "normal"}
    square = {"dtype": "fp32", "reduced_reduction": False, "m": size, "n": size, "k": size}
    long = {"precision": "highest", "m": 64, "n": 64, "k": k, "device": "cuda"}
    reductions = [
        {"provider": ALLOWED, "reduced_reduction": True},
        {"provider": FORBIDDEN, "reduced_reduction": False},
    ]
    return [
        *grid({**shared, **square}, device=devices, precision=_BY_PRECISION),
        *grid({**shared, **long}, dtype=HALVES, reduction=reductions),
    ]


def flags(shapes: Sequence[str], k: int, device: str) -> list[dict[str, Any]]:
    """At each shape of one K: fp32 products at both settings that differ on a GPU, and those of
    half precision whose partial sums may be added in half precision."""
    sizes = [dict(zip("mn", map(int, text.split("·")), strict=True)) for text in shapes]
    fp32 = grid({"dtype": "fp32", "reduced_reduction": False}, precision=_BY_PRECISION[:2])
    half = {"precision": "highest", "reduced_reduction": True, "provider": ALLOWED}
    shared = {**FORWARD, "experiment": "flags", "distribution": "normal", "k": k, "device": device}
    return grid(shared, size=sizes, way=[*fp32, *grid(half, dtype=HALVES)])


def tensor_cores(max_k: int, step: int = 4) -> list[dict[str, Any]]:
    """One case a way to accumulate, operand format, distribution and K; a model of fp16 alone."""
    ways = [{"provider": name, "device": "cuda"} for name in tensor_core.MEASURED]
    ways.append({"provider": tensor_core.MODEL, "device": "cpu"})
    ks = takewhile(lambda k: k <= max_k, (16 * step**power for power in count()))
    every = grid(
        {**FORWARD, "experiment": "tensor_core", "seed": 0}, distribution=("uniform", "normal"),
        dtype=tensor_core.DTYPES, k=[*ks], way=ways,
    )  # fmt: skip
    return [c for c in every if c["provider"] in tensor_core.MEASURED or c["dtype"] == "fp16"]


def linears(ks: Sequence[int], size: int, device: str) -> list[dict[str, Any]]:
    """fp32 linear layers of K inputs by who multiplies, at the setting that each is for."""
    ways = [{"precision": "highest", "provider": name} for name in LINEARS]
    ways.append({"precision": "high", "provider": "eager"})
    shared = {**FORWARD, "experiment": "linear", "dtype": "fp32", "m": size, "n": size, "seed": 0}
    return grid(
        {**shared, "device": device}, distribution=("uniform", "normal"), k=ks, linear=ways
    )  # fmt: skip


def neighbours(
    batches: Sequence[int], widths: Sequence[int], device: str
) -> list[dict[str, Any]]:  # fmt: skip
    """One row alone and in batches, by operation, dtype and width."""
    return grid(
        {**FORWARD, "experiment": "neighbours", "seed": 0, "device": device},
        dtype=("fp32", "bf16"), k=widths, m=batches, provider=ROW_OPERATIONS,
    )  # fmt: skip


# --- measuring -----------------------------------------------------------------------------------


def measure(race: list[Case]) -> list[Row]:
    """A row a case."""
    return each(race, figures)


def figures(case: Case) -> Figures:
    """The figures of a case of any experiment; raises `Unavailable` as `available`."""
    available(case)
    return MEASURES[case["experiment"]](case)


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here."""
    if case["experiment"] == "tensor_core":
        tensor_core.available(case)
        return
    if case["experiment"] == "token bits":
        token_bits.available(case)
    on_card = case["device"] == "cuda" and torch.cuda.is_available()
    if not on_card and (case["device"] == "cuda" or case["provider"] == "triton-tf32x3"):
        raise Unavailable("needs a CUDA GPU")


FOUR_SUMS = {
    "fp32": ("fp32", "fp32", False),
    "fp16": ("fp16", "fp16", False),
    "fp16 into fp32": ("fp32", "fp16", False),
    "fp16 upcast, then added": ("fp32", "fp16", True),
}
"""Formats of the running sum and of the term, and whether the term is upcast by hand first."""


def four_sum(name: str, n_terms: int, device: str = "cpu") -> Tensor:
    """Add 0.01 `n_terms` times with torch, one after another, as the published script did."""
    of_total, of_term, upcast = FOUR_SUMS[name]
    total = torch.tensor(0.0, dtype=DTYPES[of_total], device=device)
    term = torch.tensor(float(CONSTANT), dtype=DTYPES[of_term], device=device)
    for _ in range(n_terms):
        total += term.to(DTYPES[of_total]) if upcast else term
    return total


def measure_four_sum(case: Case) -> Figures:
    """One published sum; the signed error in two parts, exact before they are stored."""
    name, n_terms = case["provider"], case["n_terms"]
    total = four_sum(name, n_terms, case["device"]).item()
    term = sums.nearest(CONSTANT, FOUR_SUMS[name][1])
    representation, accumulation = n_terms * (term - CONSTANT), Fraction(total) - n_terms * term
    return {
        "displayed": f"{total:.4f}", "error": float(representation + accumulation),
        "representation_error": float(representation),
        "accumulation_error": float(accumulation),
    }  # fmt: skip


def measure_growth(case: Case) -> Figures:
    """One sum against the exact sum of the same rounded terms, the median over its seeds."""
    dtype = case["dtype"]
    terms = sums.rounded_terms(case["distribution"], case["n_terms"], case["seeds"], dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        value = sums.SUMS[case["method"]](terms, dtype)
    if not np.isfinite(value).all():
        raise Wrong(f"overflow: the sum leaves the range of {dtype}")
    return {"relative_error": float(np.median(sums.relative_errors(value, terms)))}


def measure_stagnation(case: Case) -> Figures:
    """Add one term until the sum no longer changes; the stop by formula stands beside it."""
    dtype = case["dtype"]
    term = sums.nearest(Fraction(case["term_text"]), dtype)
    block = np.full((sums.BLOCK, 1), float(term), np.float32)
    before, total = None, np.zeros(1, np.float32)
    while total != before:
        before, total = total, sums.running(total, block, dtype)[-1]
    return {"value": float(total[0]), "predicted_value": sums.stagnation_value(term, dtype)}


TORCH_SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.sum": torch.sum,
    "torch.cumsum": lambda x: torch.cumsum(x, 0)[-1],
}


def measure_torch_sum(case: Case) -> Figures:
    """The largest error of one way of summing, in unit roundoffs of the terms' format."""
    dtype, provider = case["dtype"], case["provider"]
    terms = sums.rounded_terms(case["distribution"], case["n_terms"], case["seeds"], dtype)
    if provider == ONE_BY_ONE:
        value = sums.sequential(terms, dtype)
    else:
        columns = torch.from_numpy(terms.T.copy()).to(case["device"], DTYPES[dtype])
        value = np.array([TORCH_SUMS[provider](column).item() for column in columns])
    largest = sums.relative_errors(value, terms).max()
    return {"error_in_roundoffs": float(largest) / FORMATS[dtype].unit_roundoff}


def measure_matmul(case: Case) -> Figures:
    """Error |out - ref| / |ref| (Frobenius) against float64, and what share of the results the
    setting changed."""
    device = case["device"]
    generator = torch.Generator().manual_seed(0)
    m, n, k = (case[name] for name in "mnk")
    dtype = DTYPES[case["dtype"]]
    left = torch.randn(m, k, generator=generator).to(device, dtype)
    right = torch.randn(k, n, generator=generator).to(device, dtype)
    with matmul_settings("highest", reduced=False):
        plain = left @ right
    with matmul_settings(case["precision"], case["reduced_reduction"]):
        out = left @ right
    reference = left.double() @ right.double()
    return {
        "relative_error": float((out - reference).norm() / reference.norm()),
        "changed_fraction": float((out != plain).double().mean()),
    }


# --- linear layers -------------------------------------------------------------------------------


def _tf32x3(x: Tensor, weight: Tensor) -> Tensor:
    from study.product_kernel import split_product

    return split_product(x, weight.mT)


LINEARS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": fusedlib.linear,
    "eager": F.linear,
    "triton-tf32x3": _tf32x3,
}


def measure_linear(case: Case) -> Figures:
    """Error of a product of fp32 numbers, relative to the exact one as a whole. On a CPU, and where
    a product is small, fusedlib's is torch's."""
    device, size, k = case["device"], case["m"], case["k"]
    generator = torch.Generator().manual_seed(case["seed"])
    draw = torch.rand if case["distribution"] == "uniform" else torch.randn
    x, weight = (draw(size, k, generator=generator).to(device) for _ in range(2))
    with matmul_settings(case["precision"], reduced=False):
        y = LINEARS[case["provider"]](x, weight)
    return tensor_core.errors(y, x.double() @ weight.double().mT)


# --- a row and the rows beside it ----------------------------------------------------------------


def _mlp(x: Tensor, weight: Tensor) -> Tensor:
    return fusedlib.swiglu_mlp(x, (weight, weight.flip(0)), weight.mT.contiguous())


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    y: Any = fusedlib.rms_norm(x, weight[0])
    return y


def _inside(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def call(x: Tensor, weight: Tensor) -> Tensor:
        with fusedlib.batch_invariant():
            return operation(x, weight)

    return call


ROW_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.mm": lambda x, weight: torch.mm(x, weight.mT),
    "fusedlib.linear": fusedlib.linear,
    "fusedlib.swiglu_mlp": _mlp,
    "torch rms_norm": lambda x, weight: F.rms_norm(x, x.shape[-1:], weight[0]),
    "fusedlib.rms_norm": _norm,
    "torch.mm, batch_invariant": _inside(lambda x, weight: torch.mm(x, weight.mT)),
    "fusedlib.linear, batch_invariant": _inside(fusedlib.linear),
    "fusedlib.swiglu_mlp, batch_invariant": _inside(_mlp),
    "fusedlib.rms_norm, batch_invariant": _inside(_norm),
}


def measure_neighbours(case: Case) -> Figures:
    """Of the elements of one row's result: the share with other bits than alone where it is the
    first of `m` rows (`changed_by_size`), and than there where it is the last of them
    (`changed_by_place`) or where the others have other values (`changed_by_values`)."""
    device, dtype = case["device"], DTYPES[case["dtype"]]
    m, k, operation = case["m"], case["k"], ROW_OPERATIONS[case["provider"]]
    generator = torch.Generator().manual_seed(case["seed"])
    scaled = torch.randn(k, k, generator=generator) * k**-0.5
    row, others, weight = (
        values.to(device, dtype)
        for values in (
            torch.randn(1, k, generator=generator),
            torch.randn(m - 1, k, generator=generator), scaled,
        )
    )  # fmt: skip
    with matmul_settings("highest", reduced=False), torch.no_grad():
        alone = operation(row, weight)[0]
        first = operation(torch.cat([row, others]), weight)[0]
        last = operation(torch.cat([others, row]), weight)[-1]
        beside = operation(torch.cat([row, others.flip(0) * 3]), weight)[0]
    return {
        "changed_by_size": _changed(first, alone),
        "changed_by_place": _changed(last, first),
        "changed_by_values": _changed(beside, first),
    }


def _changed(one: Tensor, other: Tensor) -> float:
    return float((one != other).double().mean())


MEASURES: dict[str, Callable[[Case], Figures]] = {
    "four_sums": measure_four_sum, "growth": measure_growth, "stagnation": measure_stagnation,
    "torch_sum": measure_torch_sum, "torch_matmul": measure_matmul, "flags": measure_matmul,
    "tensor_core": tensor_core.measure, "linear": measure_linear,
    "neighbours": measure_neighbours, "token bits": token_bits.measure,
}  # fmt: skip

# --- what pictures show --------------------------------------------------------------------------

SETTINGS = {
    **{f'precision "{name}"': f'"{name}"' for name in PRECISIONS},
    FORBIDDEN: "reduced sums forbidden", ALLOWED: "reduced sums allowed",
}  # fmt: skip
"""Providers of torch's products, and how a picture names the setting."""
MULTIPLIERS = {
    ("linear", "highest"): "fusedlib.linear", ("triton-tf32x3", "highest"): "Triton, TF32x3",
    ("eager", "highest"): 'PyTorch, "highest"', ("eager", "high"): 'PyTorch, "high"',
}  # fmt: skip
"""Provider and precision of an fp32 linear layer, and how a picture names both."""


def derive(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with names for pictures: how a product in the tensor core was added, what torch's
    products ran under, and who multiplies in an fp32 linear layer.
    """
    names = ("experiment", "provider", "dtype", "precision")
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *names])))
    experiment = rows["experiment"]
    products = experiment == "torch_matmul"
    linear = rows[["provider", "precision"]].where(experiment == "linear")
    return rows.assign(
        adds=rows["provider"].where(experiment == "tensor_core"),
        torch_setting=(rows["dtype"] + ", " + rows["provider"].map(SETTINGS)).where(products),
        multiplier=[MULTIPLIERS.get(way) for way in linear.itertuples(index=False, name=None)],
    )
