"""Every notebook under `quick`, as `make report` runs it on a machine like this one.

The first two are run by `tests/test_report_for_real.py`, with the paper made from them.
"""

import nbformat
import pytest
from typer.testing import CliRunner

import visitor
from measure import study as studies
from measure.recording import paths, results
from press import cli
from press.running import config

ELSEWHERE = ("05_warmup", "12_precision")
LOADED = config.load(paths.NOTEBOOKS / "study.toml")
STUDIES = [s.name for s in LOADED.studies]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in STUDIES if n not in ELSEWHERE])
def test_a_notebook_runs_and_no_case_fails(name, tmp_path, monkeypatch):
    """Its kernel is a process of its own; what starts it is this one, which has torch already.

    Which rivals are others than recorded is the same whatever is measured here; the test of the
    report for real has it.
    """
    executed = executed_copy(name, tmp_path, monkeypatch)
    [path] = tmp_path.glob(f"results/visitor/*/{name}.jsonl")
    own = results.read_rows(path)
    assert {row["status"] for row in own} - {"unavailable"}, "nothing was measured"
    assert not [row["reason"] for row in own if row["status"] == "failed"]
    study = studies.load(name)
    assert {row["case"] for row in own} == {*study.cases(study.sized({}))}, "a row for each case"
    for row in own:
        if row["status"] != "ok":
            times = [n for n in row if n.endswith("_ms") and not n.startswith(results.PROTOCOL)]
            assert row["reason"] and not times, "no time without a right result"
    outputs = [o for cell in executed.cells for o in cell.get("outputs", [])]
    assert any("text/html" in o.get("data", {}) for o in outputs)
    assert any("image/svg+xml" in o.get("data", {}) for o in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [guide.name for guide in LOADED.guides])
def test_a_guide_runs_and_shows_pictures(name, tmp_path, monkeypatch):
    executed = executed_copy(name, tmp_path, monkeypatch)
    outputs = [o for cell in executed.cells for o in cell.get("outputs", [])]
    assert sum("image/svg+xml" in o.get("data", {}) for o in outputs) > 2
    printed = "".join(o.get("text", "") for o in outputs) + str([o.get("data") for o in outputs])
    assert name != "14_your_kernel" or printed.count("wrong") >= 2, "a cheat was timed"
    assert name != "01_fooled" or printed.count("not refused") == 3, "others than those that pass"


def executed_copy(name, tmp_path, monkeypatch):
    """A notebook as `make report` executes it."""
    for variable, value in visitor.environment(tmp_path).items():
        monkeypatch.setenv(variable, value)
    command = ["run", "--profile", "quick", "--only", name]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return nbformat.read(tmp_path / "build" / "notebooks" / f"{name}.ipynb", as_version=4)
