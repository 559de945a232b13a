"""Study 12: its cases, and what measures each experiment.

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

from collections.abc import Sequence
from itertools import count, takewhile
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from fusedlib.bench.arguments import require_least
from measure import accumulation, formats, study, tensor_core, torch_precision
from measure.accumulation import DTYPES, Figures
from measure.racing import settings
from measure.racing.cases import Case, grid
from measure.study import Column, Experiment, Study

FORMATS = tuple(formats.FORMATS)
HALVES = ("fp16", "bf16")
FORWARD = {"direction": "forward"}
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


def decades(largest: int) -> list[int]:
    """1 and 3 times each power of ten from 10 up to `largest`."""
    require_least(10, largest=largest)
    numbers = (m * 10**e for e in range(1, len(str(largest)) + 1) for m in (1, 3))
    return [n for n in numbers if n <= largest]


def lengths(largest: int, step: int = 4) -> list[int]:
    """Powers of two from 16 up to `largest`, each `step` times the one before."""
    require_least(16, largest=largest)
    return [*takewhile(lambda n: n <= largest, (16 * step**power for power in count()))]


def four_sums(devices: Sequence[str]) -> list[dict[str, Any]]:
    """One case a published sum and device."""
    sums = [{"provider": n, "dtype": spec.total} for n, spec in accumulation.FOUR_SUMS.items()]
    shared = {**FORWARD, "experiment": "four_sums", "distribution": "constant", "n_terms": 1000}
    return grid(shared, device=devices, sum=sums)


def growth(max_terms: int, kahan_terms: int, seeds: int) -> list[dict[str, Any]]:
    """Sums of more and more terms; Kahan's, which is dear to emulate, up to `kahan_terms` only."""
    distributions = [
        {"distribution": name, "seeds": 1 if name == "constant" else seeds}
        for name in accumulation.DISTRIBUTIONS
    ]
    every = grid(
        {**FORWARD, "experiment": "growth", "seed": 0, "device": "cpu"},
        n_terms=decades(max_terms), distribution=distributions, dtype=FORMATS,
        method=accumulation.SUMS,
    )  # fmt: skip
    return [
        {**case, "provider": f"{case['method']} {case['dtype']}"} for case in every
        if case["method"] != "kahan" or case["n_terms"] <= kahan_terms
    ]  # fmt: skip


def stagnation() -> list[dict[str, Any]]:
    """One case a format and term, 0.01 and 1."""
    sums = [{"provider": f"sequential {dtype}", "dtype": dtype} for dtype in FORMATS]
    shared = {**FORWARD, "experiment": "stagnation", "distribution": "constant", "device": "cpu"}
    return grid(shared, sum=sums, term_text=("0.01", "1"))


def dots(max_k: int, seeds: int) -> list[dict[str, Any]]:
    """One case an input format, accumulator, distribution and K; fp32 into fp32 once."""
    into = [
        {"provider": f"{dtype} into {accumulator}", "dtype": dtype, "accumulator": accumulator}
        for dtype in FORMATS for accumulator in dict.fromkeys(("fp32", dtype))
    ]  # fmt: skip
    shared = {**FORWARD, "experiment": "dots", "seed": 0, "seeds": seeds, "device": "cpu"}
    return grid(shared, k=lengths(max_k), distribution=("uniform", "normal"), dot=into)


def torch_sums(
    max_terms: int, seeds: int, devices: Sequence[str]
) -> list[dict[str, Any]]:  # fmt: skip
    """One case a way of summing, dtype, device and number of terms, uniform in [0, 1)."""
    if max_terms > 100_000:
        raise ValueError(f"at most 100000 uniform terms, got {max_terms}: fp16 ends at 65504")
    alone = torch_precision.ONE_BY_ONE
    shared = {**FORWARD, "experiment": "torch_sum", "distribution": "uniform", "seed": 0}
    every = grid(
        {**shared, "seeds": seeds}, device=devices,
        n_terms=sorted({min(1000, max_terms), max_terms}), dtype=DTYPES,
        provider=(*torch_precision.SUMS, alone),
    )  # fmt: skip
    return [c for c in every if c["provider"] != alone or c["device"] == "cpu"]


def torch_products(
    size: int, k: int, devices: Sequence[str]
) -> list[dict[str, Any]]:  # fmt: skip
    """fp32 products [size, size] at each precision; fp16 and bf16 of long K with and without
    reduced-precision reductions.
    """
    shared: Case = {**FORWARD, "experiment": "torch_matmul", "distribution": "normal"}
    square = {"dtype": "fp32", "reduced_reduction": False, "m": size, "n": size, "k": size}
    precisions = [{"provider": f'precision "{p}"', "precision": p} for p in settings.PRECISIONS]
    long = {"precision": "highest", "m": 64, "n": 64, "k": k, "device": "cuda"}
    reductions = [
        {"provider": f"reduced-precision reduction {setting}", "reduced_reduction": allowed}
        for setting, allowed in (("allowed", True), ("forbidden", False))
    ]
    return [
        *grid({**shared, **square}, device=devices, precision=precisions),
        *grid({**shared, **long}, dtype=HALVES, reduction=reductions),
    ]


def autocast(devices: Sequence[str]) -> list[dict[str, Any]]:
    """One case an operation, and one a part of a small network, by autocast dtype and device."""
    operations = grid({**FORWARD, "experiment": "autocast"}, provider=torch_precision.OPERATIONS)
    operations += [
        {"experiment": "autocast_model", "provider": part,
         "direction": "backward" if part == "gradients" else "forward"}
        for part in torch_precision.MODEL_PARTS
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


# --- the study -----------------------------------------------------------------------------------


class Sizes(study.Sizes):
    """Numbers of terms, lengths of products, and draws of study 12."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cuda for the CPU and a CUDA GPU, cpu for it alone, auto for what there is"""
    max_terms: Annotated[int, Field(ge=10, le=100_000_000)] = 100_000
    """largest number of terms in a sum"""
    kahan_terms: Annotated[int, Field(ge=10, le=10_000_000)] = 30_000
    """largest number of terms in Kahan's sum"""
    seeds: Annotated[int, Field(ge=1, le=100)] = 5
    """draws of each random case"""
    max_k: Annotated[int, Field(ge=16, le=4_194_304)] = 16_384
    """longest dot product"""
    matmul_size: Annotated[int, Field(ge=16, le=16_384)] = 256
    """rows and columns of the square fp32 products"""
    reduced_k: Annotated[int, Field(ge=16, le=1_048_576)] = 32_768
    """K of the fp16 and bf16 products with reduced reductions"""
    core_max_k: Annotated[int, Field(ge=16, le=1_048_576)] = 16_384
    """largest K in the tensor core"""
    core_step: Literal[2, 4, 8] = 4
    """factor from one K in the tensor core to the next"""

    @property
    def devices(self) -> list[str]:
        """The CPU, and a CUDA GPU where there is one."""
        return ["cpu", "cuda"] if self.where == "cuda" else ["cpu"]


def _cases(sizes: Sizes) -> list[dict[str, Any]]:
    return [
        *four_sums(sizes.devices),
        *growth(sizes.max_terms, sizes.kahan_terms, sizes.seeds),
        *stagnation(),
        *dots(sizes.max_k, sizes.seeds),
        *torch_sums(min(sizes.max_terms, 100_000), sizes.seeds, sizes.devices),
        *torch_products(sizes.matmul_size, sizes.reduced_k, sizes.devices),
        *autocast(sizes.devices),
        *tensor_cores(sizes.core_max_k, sizes.core_step),
    ]


COLUMNS = {
    "experiment": Column(
        "experiment",
        names={"four_sums": "0.01 a thousand times", "growth": "long sums",
               "stagnation": "sums that stop", "dots": "dot products", "torch_sum": "torch's sums",
               "torch_matmul": "torch's products", "autocast": "operations under autocast",
               "autocast_model": "a model under autocast", "tensor_core": "tensor core"},
    ),
    "dtype": Column("format", names={name: name for name in FORMATS}),
    "device": Column("device", names={"cpu": "CPU", "cuda": "GPU"}),
    "method": Column(
        "added",
        names={"sequential": "one by one", "pairwise": "pairwise", "kahan": "Kahan's way"},
    ),
    "distribution": Column(
        "data",
        names={"uniform": "positive", "normal": "signed", "constant": "equal"},
    ),
    "n_terms": Column("number of terms", ",d", log=True),
    "k": Column("length K of the sums", ",d", log=True),
    "relative_error": Column("relative error", "2", log=True),
    "representation_error": Column("error of the inputs", "2", log=True),
    "total_error": Column("error of inputs and sums", "2", log=True),
    "error_in_roundoffs": Column("error in unit roundoffs", "2", log=True),
    "toward_zero_share": Column("results that are too small", "2%"),
    "modelled_share": Column("results with the rule's bits", "3%"),
    "changed_fraction": Column("results that the setting changes", "3%"),
    "value": Column("stops at", ",d"),
    "additions": Column("additions until then", ",d"),
    "term_text": Column("term"),
    "sums": Column("sums"),
    "adds": Column(
        "sums are added",
        names={"in the tensor core": "in the tensor core", "promoted": "promoted",
               "cuBLAS": "cuBLAS", "IEEE fp32": "fp32 units",
               "model: align and chop": "our rule: align and cut",
               "model: round to fp32": "our rule: round"},
    ),
    "setting": Column("product"),
    "operation": Column(
        "operation",
        names={n: n for n in (*torch_precision.OPERATIONS, *torch_precision.MODEL_PARTS)},
    ),
    "kind": Column(
        "autocast runs it in",
        names={"half": "bf16 or fp16", "fp32": "fp32", "follows its input": "its input's format",
               "fp32, also without autocast": "fp32, also without autocast"},
    ),
    "output_dtype": Column("format"),
}  # fmt: skip


def described(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with four further columns.

    `operation` is what ran under autocast, or a part of the model that did. `adds` is how a product
    in the tensor core was added. `sums` is the format that a dot product is summed in. `setting`
    names one of torch's products and the setting it ran under; its categories are in the order of
    formats, lengths and settings.
    """
    rows = rows.assign(**{name: rows.get(name) for name in ("k", "accumulator")})
    dots = rows["experiment"] == "dots"
    autocast = rows["experiment"].isin(["autocast", "autocast_model"])
    sums = rows["accumulator"] == rows["dtype"]
    return rows.assign(
        operation=rows["provider"].where(autocast),
        adds=rows["provider"].where(rows["experiment"] == "tensor_core"),
        sums=sums.map({True: "in the inputs' format", False: "in fp32"}).where(dots),
        setting=_settings(rows),
    )


SETTINGS = {
    **{f'precision "{name}"': f'"{name}"' for name in settings.PRECISIONS},
    "reduced-precision reduction forbidden": "reduced sums forbidden",
    "reduced-precision reduction allowed": "reduced sums allowed",
}  # fmt: skip
"""Providers of torch's products, and how a picture names the setting."""


def _settings(rows: pd.DataFrame) -> pd.Series:
    """Names of torch's products and their settings, such as 'fp32, 256³, "high"'."""
    places = {name: at for at, name in enumerate([*FORMATS, *SETTINGS])}
    products = rows[rows["experiment"] == "torch_matmul"].sort_values(
        ["dtype", "k", "provider"], key=lambda column: column.map(places).fillna(column)
    )  # fmt: skip
    names = [
        f"{dtype}, {f'{k:,.0f}³' if dtype == 'fp32' else f'K = {k:,.0f}'}, {SETTINGS[setting]}"
        for dtype, k, setting in products[["dtype", "k", "provider"]].itertuples(index=False)
    ]
    kind = pd.CategoricalDtype([*dict.fromkeys(names)], ordered=True)
    return pd.Series(names, products.index, kind).reindex(rows.index)


STUDY = Study(
    "12_precision", Sizes, [Experiment("errors", measure, _cases)], COLUMNS, described
)  # fmt: skip
