"""What torch itself does, the study's cases, and what its pictures show of them."""

import pandas as pd
import pytest
import torch

from fusedlib.bench import machine as machines
from measure import precision, torch_precision
from measure.racing import settings
from outcomes import outcome
from press.rows import Rows

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


def test_autocast_of_well_known_operations():
    kinds = {
        c["provider"]: torch_precision.measure_autocast(c)["kind"]
        for c in precision.autocast(DEVICES)
        if (c["experiment"], c["device"], c["dtype"]) == ("autocast", "cpu", "bf16")
    }
    assert kinds["linear"] == kinds["matmul"] == "half"
    assert kinds["relu"] == "follows its input"
    assert kinds["x + fp32"] == "fp32, also without autocast"


# --- what pictures show --------------------------------------------------------------------------


def rows_of(lines: list[dict]) -> Rows:
    """Rows of a machine, with the study's derived columns."""
    shared = {"machine": "nvidia-h200", "recording": "a", "status": "ok", "dtype": "fp32"}
    frame = pd.DataFrame([{**shared, "case": str(n), **line} for n, line in enumerate(lines)])
    frame["machine"] = pd.Categorical(frame["machine"], ["nvidia-h200", "nvidia-h100"])
    rows = Rows(precision.described(frame))
    rows.attrs = {"study": precision.STUDY.name}
    return rows


def test_a_visitor_s_machine_may_be_a_recorded_one(monkeypatch):
    monkeypatch.setattr(machines, "key", lambda: "nvidia-h200")
    rows = rows_of([{"experiment": "autocast", "provider": "linear"}])
    assert len(rows.of(machine="H200")) == len(rows.of(machine="this machine")) == 1
