"""The accumulation probe: right numbers in the interpreter, right instructions when compiled."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from ahead import faults, kernels_ahead
from interpreter import passed_in_the_interpreter
from study import precision, sums, tensor_core


def test_probe_vs_float64_in_the_interpreter():
    assert passed_in_the_interpreter("interpreted/accumulate.py") == 3


@pytest.fixture(scope="module")
def compiled() -> dict[int, list[dict]]:
    """Every kernel's figures by architecture."""
    return kernels_ahead("accumulate")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_probe_compiles_without_spills(compiled: dict[int, list[dict]], capability: int):
    rows = compiled[capability]
    assert len(rows) == 6 and [fault for row in rows for fault in faults(row, True)] == []
    # Promotion is a fused multiply-add for each element, which the other kernel lacks: were it
    # folded into the matrix instruction again, the two would be the same kernel.
    assert all(bool(row.get("FFMA2?")) == row["name"].endswith("True") for row in rows), rows


# --- the models ----------------------------------------------------------------------------------


def errors_of(model: Callable[..., torch.Tensor], k: int) -> dict[str, object]:
    left, right = tensor_core.operands("uniform", "fp16", k, 16, "cpu")
    return tensor_core.errors(model(left, right, 16), left.double() @ right.double())


def test_chopping_is_biased_and_linear():
    chopped = [errors_of(tensor_core.aligned, k) for k in (1024, 8192)]
    assert chopped[1]["toward_zero_share"] == 1.0
    assert 6 < chopped[1]["relative_error"] / chopped[0]["relative_error"] < 10  # as K: 8


def exponent(value: Fraction) -> int:
    return math.frexp(float(value))[1] - 1


def aligned_by_fractions(left: list[float], right: list[float], together: int, extra: int) -> float:
    """The model's definition for one element, written with exact fractions."""
    total = Fraction(0)
    for start in range(0, len(left), together):
        factors = list(zip(left, right, strict=True))[start : start + together]
        places = [exponent(Fraction(x)) + exponent(Fraction(y)) for x, y in factors if x * y]
        last = Fraction(2) ** (max([*places, *([exponent(total)] if total else [])]) - 23 - extra)
        summands = [Fraction(x) * Fraction(y) for x, y in factors] + [total]
        total = sum((math.trunc(s / last) * last for s in summands), Fraction(0))
        if total:
            unit = Fraction(2) ** (exponent(total) - 23)
            total = math.trunc(total / unit) * unit
    return float(total)


@pytest.mark.parametrize(("together", "extra"), [(16, 2), (8, 2), (4, 0)])
def test_aligned_model_vs_fractions(together: int, extra: int):
    generator = np.random.default_rng(0)
    raw = generator.standard_normal((2, 3, 64)) * 2.0 ** generator.integers(-6, 6, (2, 3, 64))
    raw[0, 0, :3] = 0.0
    left, right = sums.round_to(raw.astype(np.float32), "fp16")
    out = tensor_core.aligned(torch.from_numpy(left), torch.from_numpy(right.T), together, extra)
    wanted = [
        [aligned_by_fractions(x.tolist(), y.tolist(), together, extra) for y in right] for x in left
    ]
    assert out.tolist() == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not tensor_core.has_tensor_cores(), reason="needs a GPU with tensor cores")
@pytest.mark.parametrize("dtype", list(tensor_core.DTYPES))
def test_promotion_beats_the_tensor_core_whose_bits_the_model_gives(dtype: str):
    figures = {
        c["provider"]: tensor_core.measure(c)
        for c in precision.tensor_cores(16384)
        if (c["k"], c["distribution"], c["dtype"]) == (16384, "uniform", dtype)
    }
    errors = {name: actual["relative_error"] for name, actual in figures.items()}
    assert max(errors.values()) < 1e-3
    assert errors["promoted"] < errors["in the tensor core"]
    assert figures["promoted"]["modelled_share"] < 0.5
    if torch.cuda.get_device_capability() == (9, 0):
        assert figures["in the tensor core"]["modelled_share"] == 1.0
