"""Study 02's measuring: its cases, its verdicts, and the cage that the flawed kernel lives in."""

import os
import re
import subprocess
import sys

import pytest

from interpreter import passed_in_the_interpreter
from measure import anatomy, study
from measure.racing import rivals
from measure.recording import paths, results
from press.published import as_rows
from study import mlp

HELPERS = ("flawed_swiglu", "flawed_kernels", "flawed_layer")


# --- the flawed kernel stays where it is ----------------------------------------------------------


def test_the_flawed_kernel_cannot_be_imported_from_fusedlib(tmp_path):
    """In a process that no test has shown the notebooks' folder."""
    rooms = "fusedlib", "fusedlib.ops", "fusedlib.ops.mlp"
    names = [f"{room}.{name}" for room in rooms for name in HELPERS]
    code = f"from importlib.util import find_spec; print([n for n in {names} if find_spec(n)])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(paths.ROOT)},
    )  # fmt: skip
    assert done.stdout == "[]\n"


# --- verdicts ------------------------------------------------------------------------------------


def test_in_the_interpreter():
    """Runs `interpreted/anatomy.py`; what fails there is shown here."""
    assert passed_in_the_interpreter("interpreted/anatomy.py") >= 7


@pytest.fixture
def flawed(monkeypatch):
    monkeypatch.syspath_prepend(str(paths.NOTEBOOKS))
    import flawed_swiglu

    return flawed_swiglu


@pytest.fixture
def timed_on_the_cpu(flawed, monkeypatch):
    """The emulated kernel, raced as the Triton one is on a GPU."""
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))
    traits = {"dtypes": ("float32",), "traits": frozenset({"timed"})}
    rivals.rival(anatomy.TASK, "caged", **traits)(flawed.emulated)
    return ["eager", "caged"]


def recorder_at(folder):
    return results.Recorder("02_anatomy", profile="quick", directory=folder)


def run(folder, cases):
    recorder = recorder_at(folder)
    for name, single in (("errors", anatomy.errors), ("peak", anatomy.peak)):
        recorder.sweep([c for c in cases if c["experiment"] == name], single)
    recorder.race(anatomy.RACE, [c for c in cases if c["experiment"] == "time"])
    return recorder.rows()


def test_a_wrong_kernel_is_timed_beside_the_others_and_has_no_ordinary_time(
    timed_on_the_cpu, tmp_path
):
    cases = anatomy.cases(
        [(64, 128)], ["forward", "forward+backward"], timed_on_the_cpu, device="cpu", repetitions=3
    )
    rows = run(tmp_path, [c for c in cases if c["launch"] == "python"])
    caged = rows[rows["provider"] == "caged"]
    assert set(caged["status"]) == {"wrong"} and len(caged) == 4, "fp32 at both settings, both ways"
    assert not [n for n in caged.dropna(axis=1, how="all") if re.fullmatch(r"[a-z0-9]+_ms", n)]
    assert (caged["published_protocol_median_ms"] > 0).all()
    assert caged["y_error"].between(0.9, 1.1).all()
    assert caged["reason"].str.contains("no gradient arrived at w_gate").all()
    eager = rows[rows["provider"] == "eager"]
    assert set(eager["status"]) == {"ok"} and (eager["median_ms"] > 0).all()
    assert eager["session"].nunique() == len(eager) == 6
    assert set(caged["session"]) < set(eager["session"]), "in turns with the others"


def test_errors_are_none_in_one_block_and_everything_beyond(flawed, tmp_path):
    names = rivals.names(anatomy.TASK, "emulated")
    sizes = [(16, 16), (16, 32), (64, 64), (64, 128)]
    rows = run(tmp_path, anatomy.single_cases("errors", sizes, names, "cpu"))
    one = rows["hidden_size"] == rows["tokens"]
    assert rows[one]["y_error"].max() < 1e-6 and rows[~one]["y_error"].between(0.9, 1.1).all()
    assert set(rows["status"]) == {"wrong"}, "even in one block the gradients are wrong"
    first = rows["provider"] == "published-kernel-emulated"
    assert rows[first]["d_w_up_error"].isna().all() and (rows[~first]["d_w_up_error"] > 0.9).all()


def test_a_rival_that_should_be_right_and_is_not_gets_no_time_at_all(flawed, monkeypatch, tmp_path):
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))

    @rivals.rival(mlp.TASK, "broken")
    def broken(inputs):
        """Leaves a block of K out."""
        return flawed.emulated(inputs)

    cases = anatomy.cases([(64, 128)], ["forward"], ["broken"], device="cpu", repetitions=1)
    rows = run(tmp_path, [c for c in cases if c["launch"] == "python" and c["dtype"] == "float32"])
    assert set(rows["status"]) == {"wrong"} and len(rows) == 2
    assert not [name for name in rows.dropna(axis=1, how="all") if name.endswith("_ms")]


@pytest.mark.parametrize("tf32", [False, True])
def test_the_wider_bounds_of_tf32_let_no_dropped_block_through(flawed, tf32, monkeypatch):
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))
    traits = frozenset({"tf32"}) if tf32 else frozenset()
    rivals.rival(anatomy.TASK, "one block", traits=traits)(flawed.second_version)
    [case] = anatomy.single_cases("errors", [(16, 32)], ["one block"], "cpu")
    assert "y: norm error" in anatomy.errors(case)["wrong"]


def test_without_a_gpu_no_time_is_taken_and_the_row_says_why(flawed, tmp_path):
    names = rivals.names(anatomy.TASK, "timed")
    cases = anatomy.cases([(64, 64)], ["forward"], names, device="cpu", repetitions=1)
    rows = run(tmp_path, cases + anatomy.single_cases("peak", [(64, 64)], names, "cpu"))
    assert len(rows) and set(rows["status"]) == {"unavailable"}
    assert rows["reason"].str.contains("CUDA").all()
    assert not [name for name in rows if name.endswith(("_ms", "_mib"))]


# --- cases ----------------------------------------------------------------------------------------


def test_errors_are_taken_in_tiles_of_any_size(flawed):
    sizes = anatomy.Sizes(device="cpu", error_tokens=[128], error_widths=[64, 512])
    every = anatomy.STUDY.cases(sizes).values()
    cases = [case for case in every if case["experiment"] == "errors"]
    assert {(case["tokens"], case["hidden_size"]) for case in cases} == {
        (128, 128), (128, 256), (128, 512)
    }  # fmt: skip
    first = next(c for c in cases if c["hidden_size"] == 128)
    wide = next(c for c in cases if c["hidden_size"] == 256)
    assert anatomy.errors(first)["y_error"] < 1e-6 and anatomy.errors(wide)["y_error"] > 0.9
    with pytest.raises(study.SizesError, match="error_widths.*192"):
        anatomy.STUDY.plan(anatomy.Sizes(device="cpu", error_tokens=[128], error_widths=[192]))


# --- published figures ---------------------------------------------------------------------------


TABLES = [as_rows(f"swiglu_{name}", "02_anatomy") for name in ("times", "ratios", "memory")]


def test_every_published_figure_is_a_row_and_stands_as_printed():
    rows = anatomy.from_tables(*TABLES)
    assert len(rows) == sum(map(len, TABLES)) and rows["case"].is_unique
    at = rows[(rows["shape"] == "1024·4096") & (rows["direction"] == "forward+backward")]
    first = at[(at["series"] == "grid") & (at["experiment"] == "time")].set_index("provider")
    assert first["median_ms"].to_dict() == {"liger": 28.86, "published-kernel": 9.22}
    assert first["step"]["published-kernel"] == "kernel as published"
    assert first["result"].to_dict() == {"liger": "right", "published-kernel": "wrong"}
    assert first["ratio"].to_dict() == pytest.approx({"liger": 1, "published-kernel": 28.86 / 9.22})
    stated = rows[(rows["series"] == "sweep") & (rows["hidden_size"] == 16384)]
    assert stated["ratio"].dropna().tolist() == [2.94, 2.96]
    assert stated["peak_ratio"].dropna().tolist() == [1.5]


def test_weights_that_come_faster_than_memory_sends_them_were_never_read():
    rows = anatomy.from_tables(*TABLES)
    forward = rows[(rows["shape"] == "64·4096") & (rows["direction"] == "forward")]
    share = forward.set_index(["series", "provider"])["bandwidth_share"]
    assert share["grid", "published-kernel"] == pytest.approx(203.4e6 / 0.35e-3 / 300e9, rel=1e-3)
    assert share["grid", "liger"] < 1


@pytest.mark.gpu
def test_a_step_on_the_gpu(flawed, tmp_path):
    pytest.importorskip("liger_kernel")
    asked = ["liger", "fused", *rivals.names(anatomy.TASK, "timed")]
    cases = anatomy.cases([(64, 256)], ["forward+backward"], asked, device="cuda", repetitions=2)
    peaks = anatomy.single_cases("peak", [(64, 256)], asked, "cuda")
    rows = run(tmp_path, cases + peaks)
    wrong = {"published-kernel", "whole-sum"}
    for name, status in rows.groupby("provider")["status"]:
        assert set(status) == {"wrong" if name in wrong else "ok"}, (name, rows["reason"].tolist())
    held = rows[rows["experiment"] == "peak"].set_index("provider")
    parts = (held["weights_mib"] + held["gradients_mib"]) / (4 * 256**2 / 2**20)
    assert parts["liger"] == 6 and parts["published-kernel"] == 4
