"""The topic anatomy: its verdicts, its published figures, and the cage of the flawed kernel."""

import os
import subprocess
import sys

import pandas as pd
import pytest

import flawed_swiglu
from flawed_swiglu import TASK
from interpreter import passed_in_the_interpreter
from press import published
from study import anatomy, mlp, paths, rivals, run

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
def registry(monkeypatch):
    """Further rivals, for one test."""
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))


def measured(cases):
    """What a topic's measuring gives for these cases, as a frame."""
    races = run.grouped("anatomy", cases).values()
    return pd.DataFrame([row.as_dict() for race in races for row in anatomy.measure(race)])


def python_races(names, directions, **how):
    cases = anatomy.races([(64, 128)], directions, names, device="cpu", **how)
    return [case for case in cases if case["launch"] == "python"]


def test_a_wrong_kernel_is_timed_in_turns_with_the_others_and_says_what_is_wrong(registry):
    """The emulated kernel, raced as the Triton one is on a GPU; `run` names its times."""
    traits = {"dtypes": ("float32",), "traits": frozenset({"timed"})}
    rivals.rival(TASK, "caged", **traits)(flawed_swiglu.emulated)
    directions = ["forward", "forward+backward"]
    rows = measured(python_races(["eager", "caged"], directions, repetitions=3))
    caged, eager = (rows[rows["provider"] == name] for name in ("caged", "eager"))
    assert len(caged) == 4, "fp32 at both settings, both ways"
    assert caged["wrong"].str.contains("no gradient arrived at w_gate").all()
    assert (rows["median_ms"] > 0).all() and caged["y_error"].between(0.9, 1.1).all()
    assert eager["wrong"].isna().all() and eager["session"].nunique() == len(eager) == 6
    assert set(caged["session"]) < set(eager["session"]), "in turns with the others"


def test_errors_are_none_in_one_block_and_everything_beyond():
    sizes = [(16, 16), (16, 32), (64, 64), (64, 128), (128, 128), (128, 256)]
    rows = measured(anatomy.alone("errors", sizes, rivals.names(TASK, "emulated"), "cpu"))
    one = rows["hidden_size"] == rows["tokens"]
    assert rows[one]["y_error"].max() < 1e-6 and rows[~one]["y_error"].between(0.9, 1.1).all()
    assert rows["wrong"].notna().all(), "even in one block the gradients are wrong"
    first = rows["provider"] == "published-kernel-emulated"
    assert rows[first]["d_w_up_error"].isna().all() and (rows[~first]["d_w_up_error"] > 0.9).all()


def test_a_rival_that_should_be_right_and_is_not_gets_no_time_at_all(registry):
    @rivals.rival(mlp.TASK, "broken", dtypes=("float32",))
    def broken(inputs):
        """Leaves a block of K out."""
        return flawed_swiglu.emulated(inputs)

    rows = measured(python_races(["broken"], ["forward"], repetitions=1))
    assert set(rows["status"]) == {"wrong"} and len(rows) == 2
    assert not [name for name in rows if name.endswith("_ms")]


@pytest.mark.parametrize("tf32", [False, True])
def test_the_wider_bounds_of_tf32_let_no_dropped_block_through(tf32, registry):
    traits = frozenset({"tf32"}) if tf32 else frozenset()
    rivals.rival(TASK, "one block", traits=traits)(flawed_swiglu.second_version)
    [case] = anatomy.alone("errors", [(16, 32)], ["one block"], "cpu")
    assert "y: norm error" in anatomy.errors(case)["wrong"]


def test_a_width_that_the_kernel_s_blocks_do_not_divide_is_refused():
    with pytest.raises(run.SizesError, match="width 100 is no multiple"):
        run.races("anatomy", widths=[100])


# --- published figures ---------------------------------------------------------------------------


TABLES = [published.load(name) for name in published.OF_TOPIC["anatomy"]]


def test_every_published_figure_is_a_row_and_stands_as_printed():
    rows = anatomy.from_tables(*TABLES)
    assert len(rows) == sum(map(len, TABLES)) and rows["race"].is_unique
    at = rows[(rows["shape"] == "1024·4096") & (rows["direction"] == "forward+backward")]
    first = at[(at["series"] == "grid") & (at["experiment"] == "time")].set_index("provider")
    assert first["median_ms"].to_dict() == {"liger": 28.86, "published-kernel": 9.22}
    assert first["repair"]["published-kernel"] == "kernel as published"
    assert first["result"].to_dict() == {"liger": "right", "published-kernel": "wrong"}
    assert first["ratio"].to_dict() == pytest.approx({"liger": 1, "published-kernel": 28.86 / 9.22})
    stated = rows[(rows["series"] == "sweep") & (rows["hidden_size"] == 16384)]
    assert stated["ratio"].dropna().tolist() == [2.94, 2.96]
    assert stated["peak_ratio"].dropna().tolist() == [1.5]


@pytest.mark.gpu
def test_a_step_on_the_gpu():
    pytest.importorskip("liger_kernel")
    asked = ["liger", "fused", *rivals.names(TASK, "timed")]
    rows = measured([
        *anatomy.races([(64, 256)], ["forward+backward"], asked, device="cuda", repetitions=2),
        *anatomy.alone("peak", [(64, 256)], asked, "cuda"),
    ])  # fmt: skip
    for name, own in rows.groupby("provider"):
        flawed = name in ("published-kernel", "whole-sum")
        assert set(own["status"]) == {"ok"} and own["wrong"].notna().eq(flawed).all(), name
    held = rows[rows["experiment"] == "peak"].set_index("provider")
    parts = (held["weights_mib"] + held["gradients_mib"]) / (4 * 256**2 / 2**20)
    assert parts["liger"] == 6 and parts["published-kernel"] == 4
