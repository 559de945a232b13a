"""A rival that is defined otherwise today is named beside the tables and figures that show it."""

import json
from functools import partial

import nbformat
import pandas as pd
import pytest

from fusedlib.bench import rivals
from measure import mlp_rivals, swiglu
from measure.recording import paths, provenance, results
from press import display, plots, redefined
from press.display import TABLE_MIME
from report_sample import outputs_of

SWIGLU, MLP = "notebooks/measure/swiglu.py", "notebooks/measure/mlp_rivals.py"
TODAY = {SWIGLU: "1" * 40, MLP: "2" * 40}
BEFORE = {SWIGLU: "3" * 40, "notebooks/measure/old_place.py": "2" * 40}
SENTENCE = "Recorded on H100 with another definition than today's: PyTorch."


@pytest.fixture(autouse=True)
def today(monkeypatch):
    monkeypatch.setattr(provenance, "files", lambda: TODAY)


def row(recording: str, provider: str, experiment: str, **fields):
    return {"machine": "m", "recording": recording, "provider": provider,
            "experiment": experiment, **fields}  # fmt: skip


FILES = {("m", "now"): TODAY, ("m", "then"): BEFORE, ("m", "nothing hashed"): {}}


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([row("now", "eager", "swiglu")], set()),
        ([row("now", "eager", "swiglu"), row("then", "eager", "swiglu")], {"eager"}),
        ([row("then", "eager", "mlp")], set()),  # another task's, in a file that only moved
        ([row("then", "eager", "sustained", race="swiglu")], {"eager"}),
        ([row("then", "eager", "peak", settings="Plain PyTorch, an operation at a time")],
         {"eager"}),
        ([row("then", "eager", "peak", settings="another")], set()),
        ([row("then", "fused-input", "swiglu")], {"fused-input"}),  # a partial
        ([row("then", "liger", "mlp"), row("then", "liger", "swiglu")], {"liger"}),  # a decorated
        ([row("then", "nobody", "swiglu")], set()),
        ([row("nothing hashed", "eager", "swiglu")], set()),
    ],
)  # fmt: skip
def test_who_is_defined_in_a_file_that_the_recording_did_not_hash(rows, names, monkeypatch):
    tasks = {swiglu.TASK, mlp_rivals.MODULE}
    known = {key: one for key, one in rivals.RIVALS.items() if key[0] in tasks}
    monkeypatch.setattr(rivals, "RIVALS", known)
    actual = redefined.redefined(pd.DataFrame(rows), FILES)
    assert actual == {(name, "m") for name in names}


def test_of_a_rival_outside_the_code_nothing_is_known(monkeypatch):
    monkeypatch.setattr(rivals, "RIVALS", {})
    rivals.rival("swiglu", "mine")(lambda inputs: None)
    rows = pd.DataFrame([row("then", "mine", "swiglu")])
    assert redefined.redefined(rows, FILES) == set()


def shown(show):
    [output] = outputs_of(show)
    return output


def test_each_table_and_figure_that_shows_one_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RECORDED", tmp_path)
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path))
    for machine, files in (("nvidia-h100", BEFORE), ("nvidia-h200", TODAY)):
        folder = tmp_path / machine / "x"
        folder.mkdir(parents=True)
        described = {"schema": 2, "profile": "full", "runs": [{}], "files": files}
        (folder / results.DESCRIPTION).write_text(json.dumps(described))
        lines = [
            {"case": "1", "status": "ok", "provider": "eager", "experiment": "swiglu"},
            {"case": "2", "status": "wrong", "provider": "fused", "experiment": "swiglu"},
        ]
        (folder / "01_x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = pd.DataFrame({"T": [1, 1], "ms": [2.0, 3.0], "by": ["eager", "fused"]})
    show = partial(display.table, caption="C", name="t")
    outputs = [
        shown(lambda: show(pd.DataFrame({"PyTorch": [1], "fusedlib": [2]}), note="A note.")),
        shown(lambda: show(pd.DataFrame({"who": ["PyTorch"]}))),
        shown(lambda: show(pd.DataFrame({"who": ["fusedlib", "PyTorch's"]}))),
        shown(lambda: display.figure(plots.bars(times, "ms", "T", "by"), "Drawn.", name="f")),
        shown(lambda: display.prose("PyTorch.")),
    ]
    before = [json.dumps(output) for output in outputs]
    cell = nbformat.v4.new_code_cell("x", outputs=outputs)
    notebook = nbformat.v4.new_notebook(cells=[cell])
    monkeypatch.setattr(redefined, "shown_machines", lambda _: ["nvidia-h200", "nvidia-h100"])
    redefined.mention(notebook, ["01_x"])
    noted, alone, other, figure, prose = cell.outputs
    assert noted["data"][TABLE_MIME]["note"] == f"A note. {SENTENCE}"
    assert alone["data"][TABLE_MIME]["note"] == SENTENCE
    assert "another definition" in noted["data"]["text/html"]
    caption = figure["metadata"]["fusedlib"]["caption"]
    assert caption == f"Drawn. {SENTENCE}" and "another definition" in figure["data"]["text/html"]
    assert [json.dumps(output) for output in (other, prose)] == [before[2], before[4]]
    nbformat.validate(notebook)


H200, H100 = "nvidia-h200", "nvidia-h100"


def put_rows(folder, machine: str, study: str, profile: str, count: int, kind: str = "cuda"):
    at = folder / machine / "day"
    at.mkdir(parents=True, exist_ok=True)
    run = {"device_type": kind, "began": "2026-11-25", "commit": "c" * 40}
    described = {"schema": 2, "profile": profile, "runs": [run]}
    (at / results.DESCRIPTION).write_text(json.dumps(described))
    rows = [{"case": f"{n}", "status": "ok", "n": n, "ms": len(machine)} for n in range(count)]
    (at / f"{study}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Two cards, a toy run, and a card that has another study alone."""
    monkeypatch.setattr(results.paths, "RECORDED", tmp_path)
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path))
    put_rows(tmp_path, H100, "01_x", "full", 2)
    put_rows(tmp_path, H200, "01_x", "full", 3)
    put_rows(tmp_path, "toy", "01_x", "quick", 9, "cpu")
    put_rows(tmp_path, "other", "02_y", "full", 1)
    return tmp_path


def test_the_leader_comes_first_then_those_with_rows_of_the_full_profile(rows):
    assert redefined.shown_machines(["01_x"]) == [H200, H100]
    assert redefined.shown_machines(["02_y"]) == ["other"]
    assert redefined.shown_machines(["01_x", "02_y"]) == [H200, H100, "other"]
    put_rows(rows, H100, "01_x", "full", 4)
    assert redefined.shown_machines(["01_x"]) == [H100, H200]
