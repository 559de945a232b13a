"""Every notebook as anybody runs it by papermill, with its defaults and with its knobs turned."""

import json
from typing import Any

import nbformat
import papermill
import pytest

import visitor
from press import run

GUIDES = run.guides()


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    for variable, value in visitor.environment(tmp_path).items():
        monkeypatch.setenv(variable, value)


def outputs_of(part, tmp_path, values: dict[str, Any]):
    """Outputs of a notebook that papermill executed."""
    copy = tmp_path / "executed.ipynb"
    papermill.execute_notebook(
        part.notebook, copy, values, cwd=part.notebook.parent, progress_bar=False
    )
    executed = nbformat.read(copy, as_version=4)
    return [output for cell in executed.cells for output in cell.get("outputs", [])]


def require_pictures(part, outputs) -> None:
    pictures = sum("image/svg+xml" in o.get("data", {}) for o in outputs)
    assert pictures >= (0 if part.name == "00_tour" else 2), "that one has a table"


def require_honest_rows(folder) -> None:
    """No row failed, and none without a right result has a time."""
    for path in folder.glob("results/visitor/*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            if "status" in row and row["status"] != "ok":
                times = [n for n in row if n.endswith("_ms") and not n.startswith("published")]
                assert row["status"] != "failed" and row["reason"] and not times, row


@pytest.mark.slow
@pytest.mark.parametrize("part", GUIDES, ids=lambda part: part.name)
def test_a_notebook_runs_and_shows_pictures(part, tmp_path):
    outputs = outputs_of(part, tmp_path, {})
    require_pictures(part, outputs)
    require_honest_rows(tmp_path)
    printed = "".join(o.get("text", "") for o in outputs) + str([o.get("data") for o in outputs])
    assert part.name != "01_kernel" or printed.count("wrong") >= 1, "a wrong mask was accepted"
    refused = printed.count("<td>wrong</td>")
    assert part.name != "02_faster" or refused == 7, "the kernel and six cheats"


def turned(part) -> dict[str, Any]:
    """Each knob that has choices at its last one."""
    return {
        name: knob.choices[-1] for name, knob in part.knobs().items()
        if knob.choices and not knob.listed
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("part", [g for g in GUIDES if turned(g)], ids=lambda part: part.name)
def test_a_notebook_runs_with_its_knobs_turned(part, tmp_path):
    """`direction="backward"` once drew one rival alone and then raised a KeyError."""
    outputs = outputs_of(part, tmp_path, turned(part))
    require_pictures(part, outputs)
    require_honest_rows(tmp_path)
