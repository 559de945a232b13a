"""Study 02 from rows to sentences: tables, findings, figures, and the notebook itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fusedlib.bench import accumulation, dots, formats, results, tensor_core, torch_precision
from fusedlib.study import style
from fusedlib.study.precision import figures as plots
from fusedlib.study.precision import findings as precision
from fusedlib.study.precision import tables

ROOT = Path(__file__).parents[1]
HEAD = {
    "study": "02_precision", "profile": "quick", "machine": "here", "device_type": "cpu",
    "device_name": "A CPU", "own": True, "status": "ok", "reason": None,
    "measured_at": "2026-01-01T00:00:00+00:00",
}  # fmt: skip
TABLES = (
    tables.four_sums_table, tables.split_table, tables.growth_table, tables.stagnation_table,
    tables.dots_table, tables.torch_sum_table, tables.torch_matmul_table, tables.autocast_table,
    tables.autocast_model_table, tables.tensor_core_table, tables.agreement_table,
)  # fmt: skip
FIGURES = (
    plots.sums_by_format, plots.sums_by_method, plots.dots, plots.tensor_core, plots.bias,
)  # fmt: skip
FINDINGS = (
    precision.four_sums, precision.growth, precision.stagnation, precision.dots,
    precision.torch_itself, precision.tensor_core, precision.checklist, precision.findings,
)  # fmt: skip


def measured(cases: list, measure, **head: object) -> list[dict[str, object]]:
    return [HEAD | head | case | measure(case) for case in cases]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    every = ["fp32", "tf32", "fp16", "bf16"]
    growth = accumulation.growth_cases(every, list(accumulation.DISTRIBUTIONS), 3000, 1000, 2)
    models = [
        c
        for c in tensor_core.tensor_core_cases(1024, ["fp16"])
        if c["provider"] in tensor_core.MODELS
    ]
    return [
        *measured(accumulation.four_sum_cases(), accumulation.measure_four_sum),
        *measured(growth, accumulation.measure_growth),
        *measured(accumulation.stagnation_cases(["fp16", "bf16"]), accumulation.measure_stagnation),
        *measured(dots.dot_cases(every, 256, 2), dots.measure_dot),
        *measured(torch_precision.sum_cases(3000, 2), torch_precision.measure_sum),
        *measured(torch_precision.matmul_cases(32, 32)[:3], torch_precision.measure_matmul),
        *measured(torch_precision.autocast_cases(), torch_precision.measure_autocast),
        *measured(torch_precision.autocast_model_cases(), torch_precision.measure_autocast_model),
        *measured(models, tensor_core.measure_tensor_core),
    ]


@pytest.fixture(scope="module")
def frame(rows: list[dict[str, object]]) -> pd.DataFrame:
    return pd.DataFrame(rows)


def gpu_rows(slope: float, **head: object) -> list[dict[str, object]]:
    """Tensor-core rows as a GPU that truncates would give: error as K^slope inside the unit."""
    unit = {"in the tensor core": 1e-8, "promoted": 1e-9, "cuBLAS": 1.1e-8, "IEEE fp32": 1e-9}
    gpu = {"machine": "gpu", "device_name": "A GPU", "device_type": "cuda", "own": False}
    return [
        HEAD | gpu | {"profile": "full"} | head | case
        | {
            "relative_error": unit[case["provider"]] * case["k"] ** slope,
            "toward_zero_share": 1.0 if unit[case["provider"]] > 5e-9 else 0.5,
        }
        for case in tensor_core.tensor_core_cases(4096, ["fp16"])
        if case["provider"] in unit
    ]  # fmt: skip


def empty() -> pd.DataFrame:
    return pd.DataFrame(columns=[*HEAD, "experiment"])


def unavailable() -> pd.DataFrame:
    cases = [*tensor_core.tensor_core_cases(64, ["fp16"]), *torch_precision.matmul_cases(8, 16)]
    return pd.DataFrame(
        [HEAD | {"status": "unavailable", "reason": tensor_core.NEEDS_GPU} | c for c in cases]
    )


@pytest.mark.parametrize("make", [empty, unavailable])
def test_without_usable_rows_everything_says_so_and_nothing_breaks(make, tmp_path: Path):
    none = make()
    for table in TABLES:
        assert isinstance(table(none), pd.DataFrame)
    for figure in FIGURES:
        assert "<svg" in style.svg(figure(none))
    for finding in FINDINGS:
        sentences = finding(none)
        assert sentences and all(isinstance(s, str) and s for s in sentences)
    assert precision.headline(none) == []


def test_loaded_frame_without_rows(tmp_path: Path):
    none = results.load("02_precision", directory=tmp_path)
    assert all(len(finding(none)) for finding in FINDINGS)


def test_all_tables_and_figures_from_real_rows(frame: pd.DataFrame):
    for table in TABLES:
        found = table(frame)
        assert len(found) or table is tables.agreement_table, table.__name__
    for figure in FIGURES:
        assert style.svg(figure(frame)) == style.svg(figure(frame)), figure.__name__


def test_findings_read_the_rows(frame: pd.DataFrame):
    text = "\n".join(precision.findings(frame))
    assert "4 of 4 measured values" in text
    assert "holds for fp16 into fp32 and fp16 upcast, then added" in text
    assert "does not hold for the fp16 sum" in text
    assert "nan" not in text.lower()
    worse = frame.copy()
    worse.loc[worse["provider"] == "fp16", "displayed"] = "9.9999"
    assert "3 of 4 measured values" in precision.four_sums(worse)[0]
    assert "agree only in part" in precision.four_sums(worse)[0]


def test_explanation_follows_the_shares(frame: pd.DataFrame):
    turned = frame.copy()
    turned.loc[turned["experiment"] == "four_sums", "accumulation_error"] = 0.0
    assert not any("does not hold" in s for s in precision.four_sums(turned))


def test_published_stands_beside_measured(frame: pd.DataFrame):
    table = tables.four_sums_table(frame)
    assert table["Published"].tolist() == ["10.0001", "9.9531", "10.0021", "10.0021"]
    assert table["Published"].tolist() == table["this machine (A CPU)"].tolist()


def test_a_full_recorded_gpu_run_is_preferred(frame: pd.DataFrame, rows: list[dict[str, object]]):
    recorded = {"machine": "gpu", "device_name": "A GPU", "device_type": "cuda", "own": False}
    both = pd.DataFrame([*rows, *(r | recorded | {"profile": "full"} for r in rows)])
    assert set(tables.source(both, "growth")["machine"]) == {"gpu"}
    assert set(tables.source(frame, "growth")["machine"]) == {"here"}
    assert "CPU beside A GPU" in tables.four_sums_table(both).columns
    agreement = tables.agreement_table(both)
    assert (agreement["Same cases"] == agreement["Same bits"]).all()
    assert set(agreement["Experiment"]) >= {"four_sums", "growth", "dots"}


def test_a_rerun_with_other_seeds_replaces_the_older_row(rows: list[dict[str, object]]):
    again = [r | {"seeds": 99, "measured_at": "2026-02-01T00:00:00+00:00"} for r in rows]
    kept = tables.rows_of(pd.DataFrame([*again, *rows]), "dots")
    assert set(kept["seeds"]) == {99}


def test_tensor_core_findings_tell_slope_and_bias(rows: list[dict[str, object]]):
    frame = pd.DataFrame([*rows, *gpu_rows(1.0)])
    first = precision.tensor_core(frame)[0]
    assert (
        "$K^{1.00}$" in first and "100% of the elements too small" in first and "10 times" in first
    )
    assert "$K^{0.50}$" in precision.tensor_core(pd.DataFrame(gpu_rows(0.5)))[0]
    assert any("nearer to unpromoted" in s for s in precision.tensor_core(frame))
    assert first in precision.headline(frame)
    assert len(precision.headline(frame)) <= 3
    shown = tables.tensor_core_table(frame)
    assert {"in the tensor core", "model: chop to fp32"} <= set(shown["Sum over K kept"])
    for figure in (plots.tensor_core, plots.bias):
        assert "<svg" in style.svg(figure(frame))


@pytest.mark.parametrize("slope", [0.5, 1.0])
def test_exponent_finds_the_slope_of_a_power(slope: float):
    k = np.array([16.0, 64, 256, 1024, 4096])
    assert tables.exponent(
        pd.DataFrame({"k": k, "relative_error": 3e-8 * k**slope}), "k"
    ) == pytest.approx(slope)
    assert tables.exponent(pd.DataFrame({"k": k[:2], "relative_error": k[:2]}), "k") is None


def test_theory_lines_have_slopes_one_and_one_half(frame: pd.DataFrame):
    uniform = plots.sums_by_format(frame).axes[1]
    slopes = {}
    for line in uniform.lines:
        x, y = (np.asarray(v, float) for v in line.get_data())
        if len(x) > 20 and y[0] > 0:  # theory is drawn at many points, measurements at few
            fitted = np.polyfit(np.log(x), np.log(y), 1)[0]
            at_ten = y[0] / formats.get("fp32").unit_roundoff
            slopes[round(float(at_ten), 1)] = round(float(fitted), 3)
    assert set(slopes.values()) == {1.0, 0.5}
    assert slopes[10.0] == 1.0  # n u at n = 10 in fp32
    assert slopes[3.2] == 0.5  # sqrt(n) u


def test_kahan_beyond_its_bound_is_reported(frame: pd.DataFrame):
    broken = frame.copy()
    at = (broken["provider"] == "kahan bf16") & (broken["distribution"] == "constant")
    broken.loc[at, "relative_error"] = 0.1
    assert any("Kahan's sum is not safe in bf16" in s for s in precision.growth(broken))
    assert not any("not safe" in s for s in precision.growth(frame))


def test_torch_that_loses_more_is_told(frame: pd.DataFrame):
    worse = frame.copy()
    worse.loc[worse["provider"] == "torch.sum", "error_in_roundoffs"] = 50.0
    assert "loses more than the rounding of its result" in precision.torch_itself(worse)[0]
    assert "wider format" in precision.torch_itself(frame)[0]


def test_matmul_settings_are_put_back():
    import torch

    before = torch.get_float32_matmul_precision()
    with (
        pytest.raises(RuntimeError, match="inside"),
        torch_precision.matmul_settings("medium", reduced=False),
    ):
        assert torch.get_float32_matmul_precision() == "medium"
        raise RuntimeError("inside")
    assert torch.get_float32_matmul_precision() == before
    with (
        pytest.raises(ValueError, match="highest, high, medium"),
        torch_precision.matmul_settings("low", reduced=False),
    ):
        pass


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
    import torch

    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("expected scalar type Half but found Float")

    assert not torch_precision._gives_fp32_alone(refuses, torch.float16, "cpu")
    assert torch_precision._gives_fp32_alone(lambda x: x + torch.ones(8), torch.float16, "cpu")


def test_autocast_of_well_known_operations(frame: pd.DataFrame):
    table = tables.autocast_table(frame)["this machine (A CPU)"]
    assert table["linear"] == table["matmul"] == "half"
    assert table["relu"] == "follows its input"
    assert table["x + fp32"] == "fp32, also without autocast"


@pytest.mark.slow
def test_notebook_runs_and_a_second_run_measures_nothing(tmp_path: Path):
    environment = os.environ | {
        "FUSEDLIB_RESULTS": str(tmp_path / "results"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    small = {"max_terms": 1000, "kahan_terms": 300, "seeds": 2, "max_k": 256, "core_max_k": 256}
    small |= {"matmul_size": 32, "reduced_k": 64}
    options = [word for name, value in small.items() for word in ("-p", name, str(value))]
    notebook = ROOT / "notebooks" / "02_precision.ipynb"
    rows: list[set[str]] = []
    for run in ("first", "second"):
        out = tmp_path / f"{run}.ipynb"
        done = subprocess.run(
            [sys.executable, "-m", "papermill", notebook, out, *options],
            capture_output=True, text=True, env=environment, cwd=ROOT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        lines = next((tmp_path / "results").glob("*/02_precision.jsonl")).read_text().splitlines()
        rows.append({json.loads(line)["case"] for line in lines})
        assert len(lines) == len(rows[0])
    assert rows[0] == rows[1]
    kinds = [
        output["metadata"].get("fusedlib", {}).get("kind")
        for cell in json.loads(out.read_text())["cells"]
        for output in cell.get("outputs", [])
        if "metadata" in output
    ]
    assert kinds.count("figure") == 5
    assert kinds.count("table") == len(TABLES)
    assert kinds.count("finding") == 7
