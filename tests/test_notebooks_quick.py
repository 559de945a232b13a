"""Every notebook under `quick`, by papermill as anybody calls it, without our runner.

`tests/test_report_for_real.py` runs two as `make report` does; the sections of the appendix, which
measure nothing, are run by `tests/test_report_paper.py`.
"""

import nbformat
import papermill
import pytest

import visitor
from measure import study as studies
from measure.recording import paths, results
from press.running import config, runner

LOADED = config.load(paths.NOTEBOOKS / "study.toml")
MEASURING = [part for part in LOADED.studies if part.measure]
SMALLER = {
}  # fmt: skip
"""Sizes below those of `quick`, by which no path is lost."""


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    for variable, value in visitor.environment(tmp_path).items():
        monkeypatch.setenv(variable, value)


def outputs_of(part, tmp_path, settings=()):
    """Outputs of a notebook that papermill executed."""
    [job] = runner.jobs([part], settings, "quick")
    copy, folder = tmp_path / "executed.ipynb", part.notebook.parent
    values = dict(job.parameters) if settings else {}
    papermill.execute_notebook(part.notebook, copy, values, cwd=folder, progress_bar=False)
    executed = nbformat.read(copy, as_version=4)
    return [output for cell in executed.cells for output in cell.get("outputs", [])]


@pytest.mark.slow
@pytest.mark.parametrize("part", MEASURING, ids=lambda part: part.name)
def test_a_notebook_runs_and_no_case_fails(part, tmp_path):
    settings = SMALLER.get(part.name, ())
    outputs = outputs_of(part, tmp_path, settings)
    assert any("text/html" in o.get("data", {}) for o in outputs)
    assert any("image/svg+xml" in o.get("data", {}) for o in outputs)
    [path] = tmp_path.glob(f"results/visitor/*/{part.name}.jsonl")
    own, study = results.read_rows(path), studies.load(part.name)
    assert {row["status"] for row in own} - {"unavailable"}, "nothing was measured"
    assert not [row["reason"] for row in own if row["status"] == "failed"]
    texts = dict(setting.split("=") for setting in settings)
    values = {n: studies.parsed(n, t, study.sizes.kinds()[n]) for n, t in texts.items()}
    assert {row["case"] for row in own} == {*study.cases(study.sized(values))}, "one for each case"
    for row in own:
        if row["status"] != "ok":
            times = [n for n in row if n.endswith("_ms") and not n.startswith(results.PROTOCOL)]
            assert row["reason"] and not times, "no time without a right result"


@pytest.mark.slow
@pytest.mark.parametrize("guide", LOADED.guides, ids=lambda guide: guide.name)
def test_a_guide_runs_and_shows_pictures(guide, tmp_path):
    outputs = outputs_of(guide, tmp_path)
    pictures = sum("image/svg+xml" in o.get("data", {}) for o in outputs)
    assert pictures >= (1 if guide.name == "00_tour" else 2)  # that one has a table
    printed = "".join(o.get("text", "") for o in outputs) + str([o.get("data") for o in outputs])
    assert guide.name != "01_kernel" or printed.count("wrong") >= 1, "a wrong mask was accepted"
    refused = printed.count("<td>wrong</td>")
    assert guide.name != "02_faster" or refused == 8, "the kernel, six cheats, the suspect"
