"""Study 05's measuring: its cases, its verdicts, and the cage that the flawed kernel lives in."""

import ast
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from fusedlib import paths
from fusedlib.bench import anatomy, dissection, providers, results, timing
from fusedlib.bench.anatomy import Variant
from fusedlib.bench.sweep import outcome

TESTS = Path(__file__).parent
HELPERS = ("flawed_swiglu", "flawed_kernels", "flawed_layer")


def python(code: str, *folders: Path, cwd: Path, **environment: str):
    """Run code in a process that finds fusedlib and these folders."""
    search = os.pathsep.join(map(str, (paths.ROOT, *folders)))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=250,
        env=os.environ | {"PYTHONPATH": search} | environment, cwd=cwd,
    )  # fmt: skip


# --- the flawed kernel stays where it is ----------------------------------------------------------


@pytest.mark.parametrize("name", HELPERS)
def test_the_flawed_kernel_cannot_be_imported_from_fusedlib(name, tmp_path):
    tries = [f"import {name}", f"import fusedlib.{name}", f"from fusedlib.kernels import {name}"]
    for code in tries:
        done = python(code, cwd=tmp_path)
        assert done.returncode and "ImportError" in done.stderr.replace("ModuleNotFound", "Import")


def test_nothing_in_fusedlib_imports_or_registers_it():
    for path in (paths.ROOT / "fusedlib").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in getattr(node, "names", []) if isinstance(a, ast.alias)]
            names.append(getattr(node, "module", None) or "")
            assert not any(h in n for h in HELPERS for n in names), path
    assert not [name for name in providers.PROVIDERS if "flawed" in name or "published" in name]
    assert {p.stem for p in paths.ROOT.rglob("flawed_*.py")} == set(HELPERS)


@pytest.mark.parametrize("name", HELPERS)
def test_it_says_that_it_is_wrong_before_anything_else(name):
    text = (paths.NOTEBOOKS / f"{name}.py").read_text(encoding="utf-8")
    assert text.startswith('"""WRONG ON PURPOSE: ')


# --- errors -------------------------------------------------------------------------------------


def test_in_the_interpreter():
    """Runs `interpreted/anatomy.py`; what fails there is shown here."""
    pytest.importorskip("triton")
    code = (
        "import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', "
        f"{str(TESTS / 'interpreted' / 'anatomy.py')!r}]))"
    )
    done = python(code, paths.NOTEBOOKS, cwd=paths.ROOT, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    [passed] = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= 5


@pytest.fixture
def flawed(monkeypatch):
    monkeypatch.syspath_prepend(str(paths.NOTEBOOKS))
    import flawed_swiglu

    return flawed_swiglu


@pytest.fixture
def measured(flawed, tmp_path):
    """Rows of a small run on the CPU."""
    recorder = results.Recorder(
        anatomy.STUDY, profile="quick", code="test", directory=tmp_path, fresh=False
    )
    cases = anatomy.correctness_cases([64, 128], device="cpu", gradients_width=128)
    cases += anatomy.step_cases([64], [64], ["forward"], device="cpu", repetitions=1)
    cases += anatomy.memory_cases(64, [64], device="cpu")
    measure = dissection.Measure(flawed.build)
    for case in cases:
        figures, status, reason = outcome(measure, case)
        recorder.append(case, figures, status=status, reason=reason)
    return results.load(anatomy.STUDY, directory=tmp_path)


def test_it_is_right_in_one_block_and_unrelated_beyond(measured):
    rows = measured[measured["implementation"] == "published, emulated"]
    one = rows[rows["hidden_size"] == rows["block"]]
    beyond = rows[(rows["hidden_size"] > rows["block"]) & (rows["inputs"] == "random")]
    assert len(one) == 3 and one["y_error"].max() < 1e-6
    assert len(beyond) and beyond["y_error"].between(0.9, 1.1).all()
    assert set(rows["status"]) == {"wrong"}, "even in one block a gradient is missing"
    assert all(m == ["w_gate_up"] for m in rows["missing_gradients"])


def test_the_second_published_version_gives_a_wrong_gradient(measured):
    row = measured[measured["implementation"].str.contains("weight gradients", na=False)].iloc[0]
    assert row["status"] == "wrong" and row["missing_gradients"] == []
    assert row["d_w_gate_up_error"] > 0.9


def test_without_a_gpu_no_time_is_taken_and_the_row_says_why(measured):
    rows = measured[measured["experiment"].isin(["step", "memory"])]
    assert len(rows) and set(rows["status"]) == {"unavailable"}
    assert rows["reason"].str.contains("CUDA").all()
    times = [c for c in measured if c.endswith("_ms") or c in ("ratio", "ms")]
    assert times == []


def test_a_wrong_result_has_no_time_under_an_ordinary_name():
    times = {
        name: timing.Timing((1.0 * k, 2.0 * k), 0, False)
        for name, k in (("rival", 1), ("liger", 3))
    }
    right = dissection._times(times, wrong=False)
    wrong = dissection._times(times, wrong=True)
    assert right["ratio"] == pytest.approx(3) and right["liger_ms"] == pytest.approx(4.5)
    assert all(name.startswith("published_protocol_") for name in wrong)
    assert list(wrong.values()) == list(right.values())


def test_verdict_names_missing_gradients_and_rejects_a_dropped_block(flawed):
    problem = anatomy.SwiGLUProblem(16, 32, 32, "float32")
    scene = dissection._draw_scene(problem, "cpu", "random")
    eager = providers.get("eager").set_up(scene.inputs)
    assert "status" not in scene.verdict(eager, forward_only=False, products="ieee")
    frozen = providers.get("eager").set_up(scene.inputs.frozen())
    found = scene.verdict(frozen, forward_only=False, products="ieee")
    assert found["missing_gradients"] == ["w_gate", "w_up", "w_down"]
    assert found["status"] == "wrong" and "no gradient arrived at w_gate" in found["reason"]
    one_block = flawed.build(scene.inputs, Variant(block=16, emulated=True))
    # Nor do the wider bounds of TF32 let it through.
    for products in ("ieee", "tf32", "cut"):
        found = scene.verdict(one_block, forward_only=True, products=products)
        assert "y: norm error" in found["reason"]


# --- cases ----------------------------------------------------------------------------------------


def test_steps_change_one_thing_at_a_time():
    cases = anatomy.step_cases(
        [64], [128], ["forward", "forward+backward"], device="cuda", repetitions=3
    )
    for direction, count in (("forward", 7), ("forward+backward", 8)):
        chosen = {c["step"]: c for c in cases if c["direction"] == direction}
        assert len(chosen) == count
        changed = {"redone": ("reduction", {"whole_sum"}), "precision": ("launch", {"launch"})}
        if direction != "forward":
            changed |= {
                "reduction": ("gradients", {"weight_gradients"}),
                "gradients": ("precision", {"dot_precision"}),
            }
        for before, (after, fields) in changed.items():
            first, second = chosen[before], chosen[after]
            assert {k for k in first if first[k] != second[k]} == {"step", *fields}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: anatomy.step_cases([64], [100], [], device="cpu", repetitions=1), "width 100"),
        (lambda: anatomy.step_cases([64], [64], [], device="cpu", repetitions=0), "got 0"),
        (lambda: anatomy.memory_cases(64, [32], device="cpu"), "multiple of the kernel's block"),
    ],
)
def test_bad_cases_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_published_kernel_refuses_what_it_never_took(flawed):
    inputs = dissection.draw(anatomy.SwiGLUProblem(64, 64, 128, "float32"), "cpu")
    with pytest.raises(ValueError, match=r"square weights.*got \(128, 64\)"):
        flawed.build(inputs, Variant(emulated=True))
    square = dissection.draw(anatomy.SwiGLUProblem(64, 64, 64, "float32"), "cpu")
    with pytest.raises(results.Unavailable, match="need a CUDA GPU"):
        flawed.build(square, replace(Variant(), whole_sum=True))


@pytest.mark.gpu
def test_a_step_on_the_gpu(flawed):
    pytest.importorskip("liger_kernel")
    cases = anatomy.step_cases([64], [256], ["forward+backward"], device="cuda", repetitions=2)
    measure = dissection.Measure(flawed.build)
    found = {c["step"]: outcome(measure, c) for c in cases}
    assert {n for n, f in found.items() if f[1] == "wrong"} == {"redone", "reduction"}, found
    assert {f[1] for f in found.values()} == {"ok", "wrong"}, found
    assert math.isclose(found["redone"][0]["y_error"], 1.0, abs_tol=0.1)
    assert isinstance(pd.DataFrame([f[0] for f in found.values()])["ratio"].max(), float)
