"""What torch itself does, the study's cases, and what its pictures show of them."""

import pandas as pd
import pytest
import torch

from fusedlib.bench import machine as machines
from fusedlib.bench import settings
from measure import precision, torch_precision
from outcomes import outcome
from press import display, plots, style
from press.rows import Rows
from report_sample import outputs_of

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


# --- what pictures show --------------------------------------------------------------------------


def rows_of(lines: list[dict]) -> Rows:
    """Rows of a machine, with the study's derived columns."""
    shared = {"machine": "nvidia-h200", "recording": "a", "status": "ok", "dtype": "fp32"}
    frame = pd.DataFrame([{**shared, "case": str(n), **line} for n, line in enumerate(lines)])
    frame["machine"] = pd.Categorical(frame["machine"], ["nvidia-h200", "nvidia-h100"])
    rows = Rows(precision.described(frame))
    rows.attrs = {"study": precision.STUDY.name}
    return rows


def test_torch_s_products_are_named_in_the_order_of_formats_lengths_and_settings():
    products = [
        {"dtype": "bf16", "k": 32768, "provider": "reduced-precision reduction allowed"},
        {"k": 4096, "provider": 'precision "high"'},
        {"k": 256, "provider": 'precision "medium"'},
        {"k": 256, "provider": 'precision "highest"'},
    ]
    rows = rows_of([{"experiment": "torch_matmul", **product} for product in products])
    assert [*rows["setting"].cat.categories] == [
        'fp32, 256³, "highest"', 'fp32, 256³, "medium"', 'fp32, 4,096³, "high"',
        "bf16, K = 32,768, reduced sums allowed",
    ]  # fmt: skip
    assert rows._ordered("setting", rows["setting"].unique()) == [*rows["setting"].cat.categories]


def test_every_setting_of_torch_s_products_has_a_name():
    cases = precision.torch_products(16, 16, DEVICES)
    assert {case["provider"] for case in cases} == set(precision.SETTINGS)


def test_derived_columns_are_of_their_experiment_alone():
    rows = rows_of([
        {"experiment": "dots", "accumulator": "fp32", "dtype": "bf16", "provider": "into fp32"},
        {"experiment": "tensor_core", "provider": "promoted"},
        {"experiment": "autocast", "provider": "linear"},
    ])  # fmt: skip
    derived = rows[["sums", "adds", "operation"]].astype(object)
    assert derived.where(derived.notna(), None).to_numpy().tolist() == [
        ["in fp32", None, None], [None, "promoted", None], [None, None, "linear"]
    ]  # fmt: skip
    assert rows_of([{"experiment": "autocast", "provider": "linear"}])["setting"].isna().all()


def test_a_table_of_texts_lists_each_once_in_the_order_of_their_names():
    rows = rows_of([
        {"experiment": "autocast", "provider": operation, "device": device, "kind": kind,
         "recording": recording}
        for recording in ("a", "b") for device in ("cpu", "cuda")
        for operation, kind in (("softmax", "fp32"), ("matmul", "half"), ("linear", "half"))
    ])  # fmt: skip
    [shown] = outputs_of(lambda: rows.table("kind", columns="device", value="operation"))
    content = shown["data"][display.TABLE_MIME]
    assert content["columns"] == [["autocast runs it in"], ["CPU"], ["GPU"]]
    assert content["rows"] == [
        ["bf16 or fp16", "linear, matmul", "linear, matmul"], ["fp32", "softmax", "softmax"]
    ]  # fmt: skip
    mixed = pd.concat([rows, rows.assign(dtype="bf16")])
    mixed.attrs = rows.attrs
    with pytest.raises(ValueError, match="differ in dtype"):
        mixed.table("kind", columns="device", value="operation")


def test_names_of_a_column_have_colours_of_their_own():
    rows = rows_of([
        {"experiment": "tensor_core", "provider": name, "k": 16, "relative_error": 1e-3}
        for name in precision.COLUMNS["adds"].names
    ])  # fmt: skip
    outputs_of(lambda: rows.lines(x="k", y="relative_error", by="adds"))
    assert len({*map(style.colour, precision.COLUMNS["adds"].names.values())}) == 6


@pytest.mark.parametrize(("xs", "ticks"), [([16, 64, 256], 2), ([10, 30, 100, 300], 10)])
def test_a_logarithmic_axis_counts_in_twos_or_tens_as_its_values_do(xs, ticks):
    frame = pd.DataFrame({"x": xs, "y": 1.0, "by": "fp32"})
    [ax] = plots.lines(frame, "x", "y", "by", logx=True).figure.axes
    assert ax.xaxis.get_transform().base == ticks


def test_a_visitor_s_machine_may_be_a_recorded_one(monkeypatch):
    monkeypatch.setattr(machines, "key", lambda: "nvidia-h200")
    rows = rows_of([{"experiment": "autocast", "provider": "linear"}])
    assert len(rows.of(machine="H200")) == len(rows.of(machine="this machine")) == 1
