"""What the full profile measures is known without measuring: the cases of a complete recording."""

import json
import os
import subprocess
import sys

import nbformat
import pytest

from fusedlib.bench import machine, race
from measure.recording import paths, results
from press import measuring
from press.running import config
from press.running.config import ConfigError

COMPLETE = {
    "05_anatomy": "nvidia-h200/2026-11-23m",
    "09_model_memory": "nvidia-h200/2026-11-21-1875111",
}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders of rows and products, in which nothing should appear."""
    measuring.full_cases.cache_clear()
    for name in ("rows", "build"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path / "rows"))
    monkeypatch.setenv("FUSEDLIB_BUILD", str(tmp_path / "build"))
    yield tmp_path
    measuring.full_cases.cache_clear()


def recorded(name: str) -> set[str]:
    return {
        row["case"] for row in results.read_rows(paths.RECORDED / COMPLETE[name] / f"{name}.jsonl")
    }


@pytest.mark.parametrize("name", COMPLETE)
def test_the_cases_of_a_study_are_those_of_its_complete_recording(name, folders, monkeypatch):
    monkeypatch.setattr(results.Recorder, "_write", lambda *_: pytest.fail("a row is written"))
    before = dict(os.environ)
    for module, begin in ((race, "_of_setup"), (machine, "conditions")):
        monkeypatch.setattr(module, begin, lambda *_: pytest.fail("something is measured"))
    cases = measuring.full_cases(name)
    assert set(cases) == recorded(name)
    assert list((folders / "rows").iterdir()) == list((folders / "build").iterdir()) == []
    assert dict(os.environ) == before
    for case, fields in list(cases.items())[:20]:
        assert case == results.case_id(name, fields), "an id is that of its fields"


def test_what_is_measured_already_or_asked_for_changes_no_plan(folders, monkeypatch):
    [name, _] = COMPLETE
    expected = recorded(name)
    some = folders / "some"
    some.write_text(next(iter(expected)))
    monkeypatch.setenv(results.CASES, str(some))
    monkeypatch.setenv(results.RECORDING, "today")
    monkeypatch.setenv(results.UNTIL, "1")
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(paths.RECORDED))
    assert set(measuring.full_cases(name)) == expected


def test_the_studies_are_those_of_the_study_file_and_others_are_refused(folders):
    assert measuring.studies() == sorted(measuring.studies(), key=measuring.studies().index)
    assert {*COMPLETE} < {*measuring.studies()}
    with pytest.raises(ConfigError, match="'05_anatmy' is unknown; known: "):
        measuring.full_cases("05_anatmy")


def test_variables_are_set_for_a_while(monkeypatch):
    monkeypatch.setenv("FUSEDLIB_PLAN", "before")
    with (
        pytest.raises(KeyError),
        measuring.environment({"FUSEDLIB_PLAN": "a", "FUSEDLIB_NEW": "b"}),
    ):
        assert (os.environ["FUSEDLIB_PLAN"], os.environ["FUSEDLIB_NEW"]) == ("a", "b")
        os.environ["FUSEDLIB_LATER"] = "c"
        raise KeyError
    assert os.environ["FUSEDLIB_PLAN"] == "before"
    assert not {"FUSEDLIB_NEW", "FUSEDLIB_LATER"} & {*os.environ}


STUDY = """
[[study]]
name = "tiny"
title = "Tiny"
question = "?"
quick = {sizes = [1]}
full = {sizes = [2, 3]}
"""
PARAMETERS = """
profile: str = "quick"  # whose
sizes: list[int] = [1]  # which
device: str = "cpu"  # where
"""
RECORDER = """
from measure.recording import results

recorder = results.Recorder("tiny", profile)
"""
SWEEP = """
for case in recorder.missing([{"size": size, "at": device} for size in sizes]):
    raise SystemError("measured")
"""
LACKING = 'recorder.append({"size": 9}, status="unavailable", reason="elsewhere")'
OTHER = 'raise SystemError("this cell measures nothing")'


def cell(source: str, *tags: str):
    return nbformat.v4.new_code_cell(source, metadata={"tags": [*tags]})


def test_measuring_cells_run_with_the_full_parameters_and_no_other_cell(folders, monkeypatch):
    cells = [cell(OTHER), cell(PARAMETERS, "parameters"), cell(RECORDER), cell(SWEEP, "measure"),
             cell(OTHER), cell(LACKING, "measure"), cell(OTHER)]  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbformat.write(notebook, folders / "tiny.ipynb")
    (folders / "study.toml").write_text(STUDY)
    loaded = config.load(folders / "study.toml")
    monkeypatch.setattr(measuring, "load", lambda: loaded)
    cases = measuring.full_cases("tiny")
    assert list(cases.values()) == [
        {"size": 2, "at": "cuda"},
        {"size": 3, "at": "cuda"},
        {"size": 9},
    ]
    assert list(cases) == [results.case_id("tiny", case) for case in cases.values()]
    assert json.loads(json.dumps(cases)) == cases
    assert list((folders / "rows").iterdir()) == []


LISTED = """
import json, sys
from press import measuring
print(json.dumps([*measuring.full_cases(sys.argv[1])]))
"""


@pytest.mark.parametrize(
    "study",
    [
        pytest.param(name, marks=[] if name == "06_end_to_end" else pytest.mark.long)
        for name in measuring.studies()
    ],
)
@pytest.mark.slow
def test_a_study_s_cases_do_not_depend_on_what_other_studies_have_imported(study):
    """Who computes an MLP is registered where it is imported: study 06 once lost Liger so."""
    for name in ("03_kernels", "04_memory"):  # whose imports register most
        measuring.full_cases(name)
    here = measuring.full_cases(study)
    command = [sys.executable, "-c", LISTED, study]
    alone = subprocess.run(command, check=True, capture_output=True, text=True, cwd=paths.ROOT)
    assert json.loads(alone.stdout.splitlines()[-1]) == [*here]
