"""A rival of one decorated function is in the rows, tables, figures and claims without an edit."""

import dataclasses
import json
import shutil

import pytest

from fusedlib import reference
from fusedlib.bench import rivals
from fusedlib.bench.attempt import Unavailable
from measure import mlp_memory, mlp_rivals, study, swiglu
from measure.end_to_end import cases as end_to_end
from measure.end_to_end import races as end_to_end_course
from measure.recording import paths
from measure.recording.results import DESCRIPTION, Recorder, case_id, read_rows
from press import display, replay

STUDY = "03_kernels"
MACHINE = "nvidia-h200"
CASE = (
    "experiment", "group", "provider", "tokens", "hidden_size", "intermediate_size", "dtype",
    "direction", "weight_gradients", "precision", "launch", "device", "repetitions",
)  # fmt: skip


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
    with pytest.raises(ValueError, match="swiglu has a rival named 'eager' already"):
        mlp_rivals.swiglu_mlp("eager")(reference.swiglu_mlp)


@pytest.fixture
def swift(monkeypatch, tmp_path):
    """A rival a quarter faster than ours, beside the recorded rows of ours."""
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))
    before = set(rivals.labels())
    study.full_cases.cache_clear()

    @rivals.rival("swiglu", "swift", label="Swift MLP")
    def swift(inputs):
        """Faster than light."""

    assert set(rivals.labels()) - before == {"swift"}
    for path in sorted((paths.RECORDED / MACHINE).glob(f"*/{STUDY}.jsonl")):
        lines = []
        for row in read_rows(path):
            if row["experiment"] != swiglu.TASK or row["provider"] != "fused":
                continue
            row |= {"provider": "swift", "path": None}
            for name in [n for n in row if n.endswith("median_ms")]:
                row[name] *= 0.8
            if row.get("samples_ms"):
                row["samples_ms"] = [0.8 * s for s in row["samples_ms"]]
            case = {name: row[name] for name in CASE}
            lines.append(json.dumps(row | {"case": case_id(STUDY, case)}) + "\n")
        folder = tmp_path / MACHINE / path.parent.name
        folder.mkdir(parents=True)
        (folder / path.name).write_text("".join(lines))
        shutil.copy(path.with_name(DESCRIPTION), folder)
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path))
    yield "Swift MLP"
    study.full_cases.cache_clear()


def test_a_new_rival_is_everywhere(swift, monkeypatch):
    shown: list[tuple[dict, dict]] = []
    monkeypatch.setattr(display, "_emit", lambda data, meaning, *_: shown.append((data, meaning)))
    folders = paths.NOTEBOOKS, paths.REPORT / "sections"
    notebooks = (folder / f"{STUDY}.ipynb" for folder in folders)
    stated = [claim for path in notebooks for claim in replay.analysis_of(path).claims]
    claims = {claim.name: claim for claim in stated}
    tables = " ".join(d["text/html"] for d, m in shown if m["kind"] == "table")
    figures = [m for _, m in shown if m["kind"] == "figure"]
    assert swift in tables
    assert any(swift in m["alt"] for m in figures), "the figures' text names it by its label"
    assert any("swift" in m["data"] for m in figures), "and so do their data"
    standings_of_claim = claims["few-tokens"].standings
    assert not any(
        e.holds for v in standings_of_claim if v.machine == MACHINE for e in v.evaluations
    ), "the fastest rival is it now, and a claim that ours is faster is false"


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
    with pytest.raises(Unavailable, match=f"the package {package} is not installed"):
        rivals_own.check_available("cpu", "float32")
    dataclasses.replace(rivals_own, requires=("fusedlib.bench",)).check_available("cpu", "float32")
