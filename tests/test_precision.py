"""What torch itself does, and the study's cases."""

import pytest
import torch

from fusedlib.bench import settings
from measure import precision, torch_precision
from outcomes import outcome

DEVICES = precision.STUDY.sized({}).devices


def test_every_experiment_is_measured_and_every_case_is_another():
    cases = [
        *precision.four_sums(DEVICES), *precision.growth(10, 10, 1), *precision.stagnation()[-1:],
        *precision.dots(16, 1), *precision.torch_sums(100, 1, DEVICES),
        *precision.torch_products(16, 16, DEVICES), *precision.autocast(DEVICES),
        *precision.tensor_cores(16),
    ]  # fmt: skip
    assert {c["experiment"] for c in cases} == set(precision.MEASURES)
    assert len({tuple(sorted(c.items())) for c in cases}) == len(cases)
    statuses = {outcome(precision.measure, c)[1] for c in cases}
    assert statuses <= {"ok", "unavailable"}


def test_too_many_uniform_terms_for_fp16_are_refused():
    with pytest.raises(ValueError, match="65504"):
        precision.torch_sums(100_001, 1, DEVICES)


def test_matmul_settings_are_put_back():
    def now():
        cuda = torch.backends.cuda.matmul
        halves = (getattr(cuda, f"allow_{h}_reduced_precision_reduction") for h in ("fp16", "bf16"))
        return torch.get_float32_matmul_precision(), *halves

    before = now()
    with (
        pytest.raises(RuntimeError, match="inside"),
        settings.matmul_settings("medium", reduced=not before[1]),
    ):
        assert now() == ("medium", not before[1], not before[1])
        raise RuntimeError("inside")
    assert now() == before
    with (
        pytest.raises(ValueError, match="highest, high, medium"),
        settings.matmul_settings("low", reduced=False),
    ):
        pass


def test_torch_sum_accumulates_wider_than_its_terms():
    figures = {
        c["provider"]: torch_precision.measure_sum(c)["error_in_roundoffs"]
        for c in precision.torch_sums(20_000, 2, DEVICES)
        if (c["dtype"], c["n_terms"], c["device"]) == ("bf16", 20_000, "cpu")
    }
    assert figures["torch.sum"] < 1 < 100 < figures["one by one"]


@pytest.mark.parametrize(
    ("for_fp32", "for_half", "promoted", "kind"),
    [
        ("fp16", "fp16", False, "half"),
        ("fp32", "fp32", False, "fp32"),
        ("fp32", "fp16", False, "follows its input"),
        ("fp32", "fp32", True, "fp32, also without autocast"),
        ("bf16", "fp16", False, "bf16 from fp32, fp16 from fp16"),
    ],
)
def test_autocast_kinds(for_fp32: str, for_half: str, promoted: bool, kind: str):
    assert torch_precision.classify(for_fp32, for_half, "fp16", promoted) == kind


def test_an_operation_that_refuses_mixed_dtypes_is_not_promotion():
    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("expected scalar type Half but found Float")

    assert not torch_precision._gives_fp32_alone(refuses, torch.float16, "cpu")
    assert torch_precision._gives_fp32_alone(lambda x: x + torch.ones(8), torch.float16, "cpu")


def test_autocast_of_well_known_operations():
    kinds = {
        c["provider"]: torch_precision.measure_autocast(c)["kind"]
        for c in precision.autocast(DEVICES)
        if (c["experiment"], c["device"], c["dtype"]) == ("autocast", "cpu", "bf16")
    }
    assert kinds["linear"] == kinds["matmul"] == "half"
    assert kinds["relu"] == "follows its input"
    assert kinds["x + fp32"] == "fp32, also without autocast"
