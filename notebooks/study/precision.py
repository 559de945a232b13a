"""Precision: what number formats, sums, torch's settings and tensor cores lose.

experiment      question
four_sums       0.01 added a thousand times, four ways, as published; each error split in two
growth          error against the number of terms, by format, method and distribution
stagnation      where a sum of equal terms stops growing
dots            inputs in a format, products summed in fp32 or in that same format
torch_sum       is a sum of half-precision terms accumulated in half precision?
torch_matmul    what do set_float32_matmul_precision and the reduced-precision reductions change?
flags           the same at many shapes of one K
autocast        which operations run in half precision, which in fp32, which follow their input?
autocast_model  the dtypes inside a small network trained under autocast
tensor_core     where the tensor core's accumulation errs
linear          error of fp32 linear layers against K
neighbours      do a row's bits depend on the rows beside it?

Nothing is timed: a case is one computation against the exact result, and a race often one case.
The error of a computed sum s' of terms x_i that were meant to be X_i has two exact parts:
s' - sum X_i = (sum x_i - sum X_i) + (s' - sum x_i), *representation* and *accumulation*.
"""

import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import count, takewhile
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlib
from fusedlib.bench.arguments import require_least
from fusedlib.bench.attempt import Unavailable, Wrong
from fusedlib.bench.turns import Figures
from study import sums, tensor_core
from study.cases import Case, Row, device_of, grid
from study.race import each
from study.run import sized
from study.settings import PRECISIONS, matmul_settings
from study.sums import CONSTANT, FORMATS

QUICK: dict[str, Any] = {
    "device": "auto",  # cuda for the CPU and a CUDA GPU, cpu for it alone, auto for what there is
    "max_terms": 100_000,  # largest number of terms in a sum
    "kahan_terms": 30_000,  # largest number of terms in Kahan's sum, which is dear to emulate
    "seeds": 5,  # draws of each random case
    "max_k": 16_384,  # longest dot product
    "matmul_size": 256,  # rows and columns of the square fp32 products
    "reduced_k": 32_768,  # K of the fp16 and bf16 products with reduced reductions
    "core_max_k": 16_384,  # largest K in the tensor core
    "core_step": 4,  # factor from one K in the tensor core to the next
    "flag_k": 256,  # K of the products of all `flag_shapes`
    "flag_shapes": ["1·256", "64·64", "256·256", "64·1024"],  # rows·columns of them
    "linear_ks": [256, 1024],  # inputs of linear layers, the K of their sums
    "linear_size": 256,  # their tokens and outputs; on Hopper 4096 are enough to split
    "batches": [2, 4, 64, 256],  # rows, with the one whose bits are watched
    "batch_widths": [256, 1024],  # inputs and outputs of the products there
}
FULL: dict[str, Any] = QUICK | {
    "max_terms": 10_000_000, "kahan_terms": 300_000, "max_k": 262_144, "matmul_size": 4096,
    "reduced_k": 262_144, "core_max_k": 131_072, "core_step": 2, "flag_k": 16_384,
    "flag_shapes": ["1·4096", "64·64", "64·4096", "512·512", "4096·64", "4096·4096", "8192·11008"],
    "linear_ks": [256, 1024, 4096, 16_384, 65_536], "linear_size": 4096,
    "batches": [2, 4, 16, 64, 256, 1000, 1024, 4096, 8192], "batch_widths": [1024, 4096],
}  # fmt: skip
PROFILES = {"quick": QUICK, "full": FULL}
FORWARD = {"direction": "forward"}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HALVES = ("fp16", "bf16")
ALLOWED, FORBIDDEN = (f"reduced-precision reduction {way}" for way in ("allowed", "forbidden"))
ONE_BY_ONE = "one by one"


# --- cases ---------------------------------------------------------------------------------------


def cases(profile: str = "quick", **sizes: Any) -> list[dict[str, Any]]:
    """What is measured, by experiment.

    Raises:
        ValueError: an unknown size, a number that is too small, or a text that is no shape.
    """
    s = sized(PROFILES, profile, sizes)
    where = device_of(s.device)
    devices = ["cpu", "cuda"] if where == "cuda" else ["cpu"]
    return [
        *four_sums(devices),
        *growth(s.max_terms, s.kahan_terms, s.seeds),
        *stagnation(),
        *dots(s.max_k, s.seeds),
        *torch_sums(min(s.max_terms, 100_000), s.seeds, devices),
        *torch_products(s.matmul_size, s.reduced_k, devices),
        *autocast(devices),
        *tensor_cores(s.core_max_k, s.core_step),
        *flags(s.flag_shapes, s.flag_k, where),
        *linears(s.linear_ks, s.linear_size, where),
        *neighbours(s.batches, s.batch_widths, where),
    ]


def decades(largest: int) -> list[int]:
    """1 and 3 times each power of ten from 10 up to `largest`."""
    require_least(10, largest=largest)
    numbers = (m * 10**e for e in range(1, len(str(largest)) + 1) for m in (1, 3))
    return [n for n in numbers if n <= largest]


def lengths(largest: int, step: int = 4) -> list[int]:
    """Powers of two from 16 up to `largest`, each `step` times the one before."""
    require_least(16, largest=largest)
    require_least(2, step=step)
    return [*takewhile(lambda n: n <= largest, (16 * step**power for power in count()))]


def four_sums(devices: Sequence[str]) -> list[dict[str, Any]]:
    """One case a published sum and device."""
    ways = [{"provider": name, "dtype": total} for name, (total, _, _) in FOUR_SUMS.items()]
    shared = {**FORWARD, "experiment": "four_sums", "distribution": "constant", "n_terms": 1000}
    return grid(shared, device=devices, sum=ways)


def growth(max_terms: int, kahan_terms: int, seeds: int) -> list[dict[str, Any]]:
    """Sums of more and more terms; Kahan's, which is dear to emulate, up to `kahan_terms` only."""
    distributions = [
        {"distribution": name, "seeds": 1 if name == "constant" else seeds}
        for name in sums.DISTRIBUTIONS
    ]
    every = grid(
        {**FORWARD, "experiment": "growth", "seed": 0, "device": "cpu"},
        n_terms=decades(max_terms), distribution=distributions, dtype=FORMATS, method=sums.SUMS,
    )  # fmt: skip
    return [
        {**case, "provider": f"{case['method']} {case['dtype']}"} for case in every
        if case["method"] != "kahan" or case["n_terms"] <= kahan_terms
    ]  # fmt: skip


def stagnation() -> list[dict[str, Any]]:
    """One case a format and term, 0.01 and 1."""
    ways = [{"provider": f"sequential {dtype}", "dtype": dtype} for dtype in FORMATS]
    shared = {**FORWARD, "experiment": "stagnation", "distribution": "constant", "device": "cpu"}
    return grid(shared, sum=ways, term_text=("0.01", "1"))


def dots(max_k: int, seeds: int) -> list[dict[str, Any]]:
    """One case an input format, accumulator, distribution and K; fp32 into fp32 once."""
    into = [
        {"provider": f"{dtype} into {accumulator}", "dtype": dtype, "accumulator": accumulator}
        for dtype in FORMATS for accumulator in dict.fromkeys(("fp32", dtype))
    ]  # fmt: skip
    shared = {**FORWARD, "experiment": "dots", "seed": 0, "seeds": seeds, "device": "cpu"}
    return grid(shared, k=lengths(max_k), distribution=("uniform", "normal"), dot=into)


def torch_sums(max_terms: int, seeds: int, devices: Sequence[str]) -> list[dict[str, Any]]:
    """One case a way of summing, dtype, device and number of terms, at most 65,504 in fp16, uniform
    in [0, 1)."""
    shared = {**FORWARD, "experiment": "torch_sum", "distribution": "uniform", "seed": 0}
    every = grid(
        {**shared, "seeds": seeds}, device=devices,
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
        *grid({**shared, **square}, device=devices, precision=_precisions(PRECISIONS)),
        *grid({**shared, **long}, dtype=HALVES, reduction=reductions),
    ]


def _precisions(names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"provider": f'precision "{name}"', "precision": name} for name in names]


def flags(shapes: Sequence[str], k: int, device: str) -> list[dict[str, Any]]:
    """At each shape of one K: fp32 products at both settings that differ on a GPU, and those of
    half precision whose partial sums may be added in half precision."""
    sizes = [dict(zip("mn", _shape(text), strict=True)) for text in shapes]
    fp32 = [{"dtype": "fp32", "reduced_reduction": False} | one
            for one in _precisions(PRECISIONS[:2])]  # fmt: skip
    half = {"precision": "highest", "reduced_reduction": True, "provider": ALLOWED}
    shared = {**FORWARD, "experiment": "flags", "distribution": "normal", "k": k, "device": device}
    return grid(shared, size=sizes, way=[*fp32, *grid(half, dtype=HALVES)])


def _shape(text: str) -> list[int]:
    try:
        rows, columns = map(int, text.replace("x", "·").split("·"))
    except ValueError:
        raise ValueError(f'{text!r} is no shape: write rows and columns as "64·4096"') from None
    require_least(1, flag_shapes=[rows, columns])
    return [rows, columns]


def autocast(devices: Sequence[str]) -> list[dict[str, Any]]:
    """One case an operation, and one a part of a small network, by autocast dtype and device."""
    operations = grid({**FORWARD, "experiment": "autocast"}, provider=OPERATIONS)
    operations += [
        {"experiment": "autocast_model", "provider": part,
         "direction": "backward" if part == "gradients" else "forward"}
        for part in MODEL_PARTS
    ]  # fmt: skip
    return grid(device=devices, dtype=HALVES, operation=operations)


def tensor_cores(max_k: int, step: int = 4) -> list[dict[str, Any]]:
    """One case a way to accumulate, operand format, distribution and K; models of fp16 alone."""
    ways = [{"provider": name, "device": "cuda"} for name in tensor_core.MEASURED]
    ways += [{"provider": name, "device": "cpu"} for name in tensor_core.MODELS]
    every = grid(
        {**FORWARD, "experiment": "tensor_core", "seed": 0}, distribution=("uniform", "normal"),
        dtype=tensor_core.DTYPES, k=lengths(max_k, step), way=ways,
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
    require_least(2, batches=batches)
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
    elif case["device"] == "cuda" and not torch.cuda.is_available():
        products = case["experiment"] in ("torch_matmul", "flags")
        why = ": the setting only concerns cuBLAS" if products else ""
        raise Unavailable(f"needs a CUDA GPU{why}")
    elif case["provider"] == "triton-tf32x3" and case["device"] != "cuda":
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


def split_error(value: float, term: Fraction, n_terms: int) -> tuple[Fraction, Fraction]:
    """Exact parts of value - n/100: representation n(term - 1/100), accumulation value - n*term."""
    return n_terms * (term - CONSTANT), Fraction(value) - n_terms * term


def measure_four_sum(case: Case) -> Figures:
    """One published sum; absolute errors, signed, and exact before they are stored."""
    name, n_terms = case["provider"], case["n_terms"]
    total = four_sum(name, n_terms, case["device"])
    term = sums.nearest(CONSTANT, FOUR_SUMS[name][1])
    representation, accumulation = split_error(total.item(), term, n_terms)
    error = representation + accumulation
    return {
        "value": total.item(), "displayed": f"{total.item():.4f}",
        "exact": float(n_terms * CONSTANT), "term": float(term), "error": float(error),
        "representation_error": float(representation),
        "accumulation_error": float(accumulation),
        "relative_error": float(abs(error) / (n_terms * CONSTANT)),
    }  # fmt: skip


def measure_growth(case: Case) -> Figures:
    """One sum over its seeds against the exact sum of the same rounded terms.

    Raises:
        Wrong: the sum leaves the format's range.
    """
    dtype = case["dtype"]
    terms = sums.rounded_terms(case["distribution"], case["n_terms"], case["seeds"], dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        value = sums.SUMS[case["method"]](terms, dtype)
    if not np.isfinite(value).all():
        raise Wrong(f"overflow: the sum leaves the range of {dtype}")
    columns = [column.astype(np.float64)[:, None] for column in terms.T]  # float64: twice the size
    exact = np.concatenate([sums.exact_sums(column) for column in columns])
    return sums.error_figures(value, exact, np.array([np.abs(c).sum() for c in columns]))


def measure_stagnation(case: Case) -> Figures:
    """Add one term until the sum no longer changes; the stop by formula stands beside it."""
    dtype, meant = case["dtype"], Fraction(case["term_text"])
    term = sums.nearest(meant, dtype)
    block = np.full((sums.BLOCK, 1), float(term), np.float32)
    total, additions, moved = np.zeros(1, np.float32), 0, sums.BLOCK
    while moved:
        grown = sums.running(total, block, dtype)
        moved = int((np.diff(grown[:, 0], prepend=total) > 0).sum())
        total, additions = grown[-1], additions + moved
    return {
        "value": float(total[0]), "predicted_value": sums.stagnation_value(term, dtype),
        "term": float(term), "additions": additions, "exact": float(additions * meant),
    }  # fmt: skip


def measure_dot(case: Case) -> Figures:
    """One dot product over its seeds: `relative_error` is what the arithmetic lost,
    `representation_error` what rounding the inputs had lost before, both of sum |x_i y_i|."""
    raw = sums.operands(case["distribution"], case["k"], case["seeds"])
    left, right = (sums.round_to(values, case["dtype"]) for values in raw)
    value = sums.dot(left, right, case["accumulator"])
    products = left.astype(np.float64) * right.astype(np.float64)  # at most 48 bits: exact
    exact, magnitude = sums.exact_sums(products), np.abs(products).sum(axis=0)
    meant = sums.exact_sums(raw[0].astype(np.float64) * raw[1].astype(np.float64))
    return sums.error_figures(value, exact, magnitude) | {
        "representation_error": float(np.median(np.abs(exact - meant) / magnitude)),
        "total_error": float(np.median(np.abs(value - meant) / magnitude)),
    }


TORCH_SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.sum": torch.sum,
    "torch.sum, dtype=float32": lambda x: torch.sum(x, dtype=torch.float32),
    "torch.cumsum": lambda x: torch.cumsum(x, 0)[-1],
    "torch.dot with ones": lambda x: torch.dot(x, torch.ones_like(x)),
}


def measure_torch_sum(case: Case) -> Figures:
    """Error of one way of summing, and the same in unit roundoffs of the terms' format."""
    dtype, provider = case["dtype"], case["provider"]
    terms = sums.rounded_terms(case["distribution"], case["n_terms"], case["seeds"], dtype)
    wide = terms.astype(np.float64)
    if provider == ONE_BY_ONE:
        value = sums.sequential(terms, dtype)
    else:
        columns = torch.from_numpy(terms.T.copy()).to(case["device"], DTYPES[dtype])
        value = np.array([TORCH_SUMS[provider](column).item() for column in columns])
    found = sums.error_figures(value, sums.exact_sums(wide), np.abs(wide).sum(axis=0))
    roundoff = sums.format_of(dtype).unit_roundoff
    return found | {"error_in_roundoffs": found["relative_error_high"] / roundoff}


def measure_matmul(case: Case) -> Figures:
    """Error |out - ref| / |ref| (Frobenius) against float64, and what share of the results the
    setting changed; `best_possible_error` is that of the exact product rounded once."""
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
        "best_possible_error": float(
            (reference.to(dtype).double() - reference).norm() / reference.norm()
        ),
        "changed_fraction": float((out != plain).double().mean()),
    }


# --- autocast ------------------------------------------------------------------------------------

_IMAGE = (2, 8, 8, 8)


def _ones(like: Tensor, *shape: int) -> Tensor:
    return torch.ones(*shape, device=like.device)


def _module(make: Callable[[], nn.Module]) -> Callable[[Tensor], Tensor]:
    return lambda x: make().to(x.device)(x)


# Every operation takes x of shape [2, 8, 8, 8]; parameters and second operands are fp32, as in
# training.
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": _module(lambda: nn.Linear(8, 8)),
    "matmul": lambda x: x @ _ones(x, 8, 8),
    "conv2d": _module(lambda: nn.Conv2d(8, 8, 3)),
    "attention (sdpa)": lambda x: F.scaled_dot_product_attention(x, x, x),
    "layer_norm": _module(lambda: nn.LayerNorm(8)),
    "rms_norm": _module(lambda: nn.RMSNorm(8)),
    "batch_norm": _module(lambda: nn.BatchNorm2d(8)),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cross_entropy": lambda x: F.cross_entropy(
        x.flatten(1), torch.zeros(2, dtype=torch.long, device=x.device)
    ),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "cumsum": lambda x: x.cumsum(0),
    "exp": lambda x: x.exp(),
    "log": lambda x: x.abs().log(),
    "pow": lambda x: x.pow(2.0),
    "relu": lambda x: x.relu(),
    "gelu": lambda x: F.gelu(x),
    "silu": lambda x: F.silu(x),
    "x + fp32": lambda x: x + _ones(x, 8),
    "x + x": lambda x: x + x,
}


def classify(for_fp32: str, for_half: str, half: str, promoted: bool = False) -> str:
    """Name what autocast did from the output dtypes of an fp32 and a half-precision input.

    `promoted` says that the half-precision input gives fp32 without autocast too.
    """
    if promoted and (for_fp32, for_half) == ("fp32", "fp32"):
        return "fp32, also without autocast"
    kinds = {
        (half, half): "half",
        ("fp32", "fp32"): "fp32",
        ("fp32", half): "follows its input",
    }
    return kinds.get((for_fp32, for_half), f"{for_fp32} from fp32, {for_half} from {half}")


def _gives_fp32_alone(
    operation: Callable[[Tensor], Tensor], dtype: torch.dtype, device: str
) -> bool:
    """Whether a half-precision input gives fp32 without autocast; many operations refuse to mix."""
    try:
        with torch.no_grad():
            return operation(torch.ones(_IMAGE, dtype=dtype, device=device)).dtype == torch.float32
    except RuntimeError:
        return False


def measure_autocast(case: Case) -> Figures:
    """Output dtypes of one operation under autocast, for an fp32 and a half-precision input."""
    dtype, device = case["dtype"], case["device"]
    operation = OPERATIONS[case["provider"]]
    with warnings.catch_warnings(), torch.no_grad(), torch.autocast(device, dtype=DTYPES[dtype]):
        warnings.simplefilter("ignore")  # rms_norm warns that mixed dtypes are slow
        outputs = [
            NAMES[operation(torch.ones(_IMAGE, dtype=given, device=device)).dtype]
            for given in (torch.float32, DTYPES[dtype])
        ]
    promoted = outputs[1] == "fp32" and _gives_fp32_alone(operation, DTYPES[dtype], device)
    return {"kind": classify(outputs[0], outputs[1], dtype, promoted)}


MODEL_PARTS = (
    "parameters", "first linear's output", "layer norm's output", "logits", "loss", "gradients",
)  # fmt: skip


def measure_autocast_model(case: Case) -> Figures:
    """One training step of linear, ReLU, layer norm, linear, cross entropy: a part's dtype."""
    device, dtype = case["device"], DTYPES[case["dtype"]]
    first, norm, last = (
        m.to(device) for m in (nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    )
    x, target = torch.randn(2, 8, device=device), torch.zeros(2, dtype=torch.long, device=device)
    with torch.autocast(device, dtype=dtype):
        hidden = first(x)
        normed = norm(hidden.relu())
        logits = last(normed)
        loss = F.cross_entropy(logits, target)
    loss.backward()
    assert first.weight.grad is not None
    parts = (first.weight, hidden, normed, logits, loss, first.weight.grad)
    dtypes = {name: NAMES[part.dtype] for name, part in zip(MODEL_PARTS, parts, strict=True)}
    return {"output_dtype": dtypes[case["provider"]]}


# --- linear layers -------------------------------------------------------------------------------


def _tf32x3(x: Tensor, weight: Tensor) -> Tensor:
    from study.tf32x3_kernel import product

    return product(x, weight.mT)


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


ROW_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.mm": lambda x, weight: torch.mm(x, weight.mT),
    "fusedlib.linear": fusedlib.linear,
    "fusedlib.swiglu_mlp": _mlp,
    "torch rms_norm": lambda x, weight: F.rms_norm(x, x.shape[-1:], weight[0]),
    "fusedlib.rms_norm": _norm,
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
    "dots": measure_dot, "torch_sum": measure_torch_sum, "torch_matmul": measure_matmul,
    "flags": measure_matmul, "autocast": measure_autocast,
    "autocast_model": measure_autocast_model, "tensor_core": tensor_core.measure,
    "linear": measure_linear, "neighbours": measure_neighbours,
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
    """Rows with what follows from them: `adds` is how a product in the tensor core was added,
    `operation` what ran under autocast, `torch_setting` what torch's products ran under, with the
    dtype, `product_shape` their shape, and `multiplier` who multiplies in an fp32 linear layer.
    """
    names = ("experiment", "provider", "dtype", "precision", "m", "n", "k")
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *names])))
    experiment = rows["experiment"]
    products = experiment.isin(["torch_matmul", "flags"])
    sizes = rows[["m", "n", "k"]].where(products)
    linear = rows[["provider", "precision"]].where(experiment == "linear")
    return rows.assign(
        adds=rows["provider"].where(experiment == "tensor_core"),
        operation=rows["provider"].where(experiment.isin(["autocast", "autocast_model"])),
        torch_setting=(rows["dtype"] + ", " + rows["provider"].map(SETTINGS)).where(products),
        product_shape=[
            "·".join(f"{n:.0f}" for n in shape) if shape[0] == shape[0] else None
            for shape in sizes.astype(float).itertuples(index=False, name=None)
        ],
        multiplier=[MULTIPLIERS.get(way) for way in linear.itertuples(index=False, name=None)],
    )
