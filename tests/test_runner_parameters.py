"""Parameters: what a notebook declares, and what a study file or command line may set."""

import json
import re
from pathlib import Path

import nbformat
import pytest

from measure.recording import paths
from press.running import config, parameters, runner
from press.running.parameters import ParameterError

NOTEBOOKS = Path(__file__).parent / "notebooks"
PROFILE = 'profile: str = "quick"'


def notebook(folder: Path, *lines: str) -> Path:
    cell = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": "\n".join(lines)}
    path = folder / "made.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    return path


def test_read_gives_type_default_and_help():
    declared = parameters.read(NOTEBOOKS / "run_ok.ipynb")
    assert list(declared) == ["profile", "count", "scale", "sizes", "kind"]
    count = declared["count"]
    assert (count.type, count.default, count.help) == ("int", 2, "how many [1..10]")


def test_help_may_hold_what_looks_like_code(tmp_path):
    path = notebook(tmp_path, PROFILE, 'name: str = "a # b"  # x = 1, "quoted" # and more')
    assert parameters.read(path)["name"].help == 'x = 1, "quoted" # and more'


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run_no_tag", "no cells carry the tag 'parameters'; exactly one must"),
        ("run_two_tags", "2 cells carry the tag 'parameters'; exactly one must"),
        ("run_untyped", "line 'count = 2': must read `name: type = default"),
    ],
)
def test_a_faulty_parameters_cell_is_refused(name, message):
    with pytest.raises(ParameterError, match=message):
        parameters.read(NOTEBOOKS / f"{name}.ipynb")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("count: int = 1 + 1", "the default a literal"),
        ("count: int", "must read `name: type = default"),
        ("count: Path = 1", "the type one of bool, float, int, list"),
        ('count: int = "two"', "count must be int, not 'two'"),
        ("count: int = 20  # [1..10]", r"must be in \[1..10\], but 20 is not"),
        ("import os", "must read `name: type = default"),
        ("count: int = (1", r"made.ipynb: parameters cell: '\(' was never closed"),
    ],
)
def test_a_faulty_line_is_refused(tmp_path, line, message):
    with pytest.raises(ParameterError, match=message):
        parameters.read(notebook(tmp_path, line))


def test_a_file_that_is_no_notebook_is_refused(tmp_path):
    path = tmp_path / "torn.ipynb"
    path.write_text('{"cells": [')
    with pytest.raises(ParameterError, match="is not a Jupyter notebook"):
        parameters.read(path)


@pytest.mark.parametrize(
    ("declared", "text", "value"),
    [
        ("int", "5", 5),
        ("float", "5", 5.0),
        ("float", "1e-3", 0.001),
        ("bool", "true", True),
        ("bool", "False", False),
        ("str", "5", "5"),
        ("str", "a,b", "a,b"),
        ("str", "'quoted'", "quoted"),
        ("str", "", ""),
        ("list[int]", "[1, 2]", [1, 2]),
        ("list[int]", "1,2", [1, 2]),
        ("list[int]", "7", [7]),
        ("list[float]", "1,2.5", [1.0, 2.5]),
        ("list[str]", "small,2.7b", ["small", "2.7b"]),
        ("list[str]", "small", ["small"]),
        ("list[str]", '["a b", "c"]', ["a b", "c"]),
    ],
)
def test_a_text_is_read_as_the_declared_type(tmp_path, declared, text, value):
    default = {"int": 0, "float": 0.0, "bool": False, "str": ""}.get(declared, [])
    path = notebook(tmp_path, PROFILE, f"it: {declared} = {default!r}")
    parameter = parameters.read(path)["it"]
    parsed = parameter.parse(text, "here")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("count=two", r"run_ok: count must be int, not 'two'"),
        ("count=1.5", r"count must be int, not 1.5"),
        ("count=true", r"count must be int, not 'true'"),
        ("count=0", r"count must be in \[1..10\], but 0 is not"),
        ("count=11", r"count must be in \[1..10\], but 11 is not"),
        ("scale=wide", r"scale must be float, not 'wide'"),
        ("sizes=[1, 2]", r"sizes must be list\[str\], not \[1, 2\]"),
        ("kind=odd", r"kind must be in \[plain\|fancy\], but 'odd' is not"),
        ("coutn=3", r"'coutn' is unknown; known: count, kind, scale, sizes"),
        ("run_ok.coutn=3", r"'coutn' is unknown; known: count"),
        ("other.count=3", r"notebook 'other' is unknown or not selected; known: run_fails, run_ok"),
        ("profile=full", r"use PROFILE=quick or PROFILE=full"),
        ("count", r"is no setting; write name=value, and"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_runs(setting, message):
    studies = config.load(NOTEBOOKS / "run_study.toml").select(["run_ok", "run_fails"])
    with pytest.raises(ParameterError, match=message):
        runner.jobs(studies, [setting], "quick")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("count", "two", "two"),
        ("count", 0, "0"),
        ("sizes", [1, 2], "[1, 2]"),
        ("kind", "odd", "odd"),
    ],
)
def test_a_cell_that_a_reader_changed_is_refused_in_the_words_of_a_setting(
    monkeypatch, name, value, text
):
    monkeypatch.setattr(paths, "NOTEBOOKS", NOTEBOOKS)
    declared = parameters.read(NOTEBOOKS / "run_ok.ipynb")
    values = {n: parameter.default for n, parameter in declared.items()}
    parameters.require_valid("run_ok", values | {"another name": object()})
    with pytest.raises(ParameterError) as by_hand:
        parameters.require_valid("run_ok", values | {name: value})
    with pytest.raises(ParameterError) as by_papermill:
        parameters.choose({"run_ok": declared}, {}, [f"run_ok.{name}={text}"], "quick")
    assert str(by_hand.value) == str(by_papermill.value)


@pytest.mark.parametrize("study", config.load().studies, ids=lambda study: study.name)
def test_every_notebook_refuses_a_value_of_another_type_before_it_measures(study):
    """`max_k = "a lot"` gave "'<' not supported between instances of 'str' and 'int'"."""
    cells = nbformat.read(study.notebook, as_version=4).cells
    [declaring] = [cell for cell in cells if parameters.TAG in cell.metadata.get("tags", [])]
    recording = next(cell for cell in cells if "results.Recorder(" in cell.source)
    namespace = {"__name__": "__main__"}
    exec(declaring.source, namespace)
    name, declared = list(parameters.read(study.notebook).items())[-1]
    message = f"{study.name}: {name} must be {declared.type}, not"
    with pytest.raises(ParameterError, match=re.escape(message)):
        exec(recording.source, namespace | {name: {"a": "lot"}})


def test_the_study_file_may_not_set_what_a_notebook_lacks(tmp_path):
    text = (NOTEBOOKS / "run_study.toml").read_text().replace("count = 3", "cuont = 3")
    for path in NOTEBOOKS.glob("run_*.ipynb"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "study.toml").write_text(text)
    loaded = config.load(tmp_path / "study.toml")
    with pytest.raises(ParameterError, match=r"run_ok, quick: parameter 'cuont' is unknown; known"):
        runner.jobs(loaded.studies, [], "quick")


def test_the_study_file_does_not_change_the_profile():
    path = NOTEBOOKS / "run_ok.ipynb"
    declared = {"run_ok": parameters.read(path)}
    chosen = parameters.choose(declared, {"run_ok": {"profile": "full"}}, [], "quick")
    assert chosen == {"run_ok": {"profile": "quick"}}


def test_values_come_from_the_profile_and_then_from_settings():
    studies = config.load(NOTEBOOKS / "run_study.toml").select(["run_ok"])
    [plain] = runner.jobs(studies, [], "full")
    assert plain.parameters == {"profile": "full", "count": 5}
    [changed] = runner.jobs(studies, ["count=7", "run_ok.scale=2"], "full")
    assert changed.parameters == {"profile": "full", "count": 7, "scale": 2.0}


def test_a_setting_reaches_only_notebooks_that_have_the_parameter():
    studies = config.load(NOTEBOOKS / "run_study.toml").select(["run_ok", "run_fails"])
    jobs = {job.name: job for job in runner.jobs(studies, ["count=7"], "quick")}
    assert jobs["run_ok"].parameters["count"] == 7
    assert jobs["run_fails"].parameters == {"profile": "quick"}
