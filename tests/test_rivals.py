"""A rival of one decorated function is in the rows, tables, figures and claims without an edit."""

import dataclasses

import pytest

from fusedlib import reference
from fusedlib.bench.attempt import Unavailable
from measure import mlp_memory, mlp_rivals, swiglu
from measure.end_to_end import cases as end_to_end
from measure.end_to_end import races as end_to_end_course
from measure.racing import rivals
from measure.recording.results import Recorder, read_rows

STUDY = "03_kernels"
MACHINE = "nvidia-h200"


def test_a_rival_of_the_notebook_itself_is_registered_and_measured_again_when_it_was_edited(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))
    factors = []

    def define(factor: float, module: str = "__main__") -> None:
        def mine(x, w_gate, w_up, w_down):
            factors.append(factor)
            return factor * reference.swiglu_mlp(x, w_gate, w_up, w_down)

        mine.__module__ = module
        mlp_rivals.swiglu_mlp("mine")(mine)

    statuses = []
    for factor in (2.0, 1.0):
        define(factor)
        own = Recorder(STUDY, profile="quick", directory=tmp_path)
        cases = swiglu.cases(["4·16·16"], ["mine"], dtype="float32", device="cpu", repetitions=2)
        own.race(swiglu.RACE, cases)
        statuses.append({row["status"] for row in read_rows(own.path)[-len(cases) :]})
    assert statuses == [{"wrong"}, {"ok"}] and set(factors) == {2.0, 1.0}
    with pytest.raises(ValueError, match="'eager'"):
        mlp_rivals.swiglu_mlp("eager")(reference.swiglu_mlp)


def test_one_function_is_a_rival_in_every_study_that_races_its_operation(monkeypatch, one_thread):
    """Alone (03), its memory and deep stacks (04), and in a whole model (06): right in each."""
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))

    @mlp_rivals.swiglu_mlp("swift", label="Swift MLP")
    def swift(x, w_gate, w_up, w_down):
        """Faster than light."""
        return reference.swiglu_mlp(x, w_gate, w_up, w_down)

    small = {"dtype": "float32", "device": "cpu"}
    alone = swiglu.cases(["8·16·24"], ["all"], repetitions=1, **small)
    held = mlp_memory.cases(["8·16·24"], ["all"], **small)
    deep = mlp_memory.stack_cases("8·16·24", [2], ["all"], **small)
    shared = end_to_end.setting("cpu", batch_size=1, seconds=0.0, repetitions=1)
    whole = end_to_end.races(shared, "mlp", ["nano"], [8], ["fp32"])
    for cases in (alone, held, deep, whole):
        assert "swift" in {case["provider"] for case in cases}
    for case in [*held, *deep]:
        if case["provider"] == "swift":
            assert mlp_memory.measure(case)["y_error"] < 1e-6
    for setup, cases in ((swiglu.Setup, alone), (end_to_end_course.Setup, whole)):
        case = next(case for case in cases if case["provider"] == "swift")
        assert setup(case).check(case).figures["settings"] == "Faster than light"


@pytest.mark.parametrize("package", ["nowhere", "nowhere.inside", "fusedlib.nowhere"])
def test_a_package_inside_one_that_is_not_there_is_not_there(package):
    rivals_own = dataclasses.replace(rivals.get(swiglu.TASK, "eager"), requires=(package,))
    with pytest.raises(Unavailable, match=package):
        rivals_own.check_available("cpu", "float32")
    dataclasses.replace(rivals_own, requires=("fusedlib.bench",)).check_available("cpu", "float32")
