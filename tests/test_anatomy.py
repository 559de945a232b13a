"""The topic anatomy: its verdicts, its published figures, and the cage of the flawed kernel."""

import pandas as pd
import pytest

import flawed_swiglu
from flawed_swiglu import TASK
from interpreter import passed_in_the_interpreter
from study import anatomy, mlp, rivals, run

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


def test_a_width_that_the_kernel_s_blocks_do_not_divide_is_refused():
    with pytest.raises(run.SizesError, match="width 100 is no multiple"):
        run.races("anatomy", widths=[100])


# --- published figures ---------------------------------------------------------------------------


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
