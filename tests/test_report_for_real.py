"""One of the study's own notebooks, run in small under `quick`, and the paper made from it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import limits
import visitor
from measure.recording import paths, results
from slides_checks import loads

# The same profile as `make report`, with less to measure.
SMALL = """
frame = "../report/report.ipynb"

[[study]]
name = "05_warmup"
measure = "measure.warmup"
title = "Warm-up"
question = "How many steps?"
full = {}

[study.quick]
models = ["nano"]
directions = ["forward+backward", "step"]
processes = 1
context_length = 16
compiled = []
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A copy of the notebooks with a smaller study.toml, and the recorded rows beside."""
    folder = tmp_path_factory.mktemp("study")
    shutil.copytree(paths.NOTEBOOKS, folder / "notebooks")
    (folder / "notebooks" / "study.toml").write_text(SMALL)
    (folder / "report").mkdir()
    shutil.copy(paths.REPORT / "report.ipynb", folder / "report")
    recorded = paths.REPORT / "results" / "nvidia-h200"
    shutil.copytree(recorded, folder / "results" / "nvidia-h200")
    return folder


@pytest.fixture(scope="module")
def first(study) -> subprocess.CompletedProcess:
    return make_report(study)


def make_report(study: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "press", "report", "--profile", "quick"]
    command += ["--config", str(study / "notebooks" / "study.toml")]
    return subprocess.run(
        command, env=visitor.environment(study), capture_output=True, text=True, check=False,
        timeout=limits.PROCESS_S,
    )  # fmt: skip


@pytest.mark.slow
def test_a_study_runs_under_quick(study, first):
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    page = (study / "build" / "report.html").read_text()
    for shown in (
        "course report",
        "warm-up notebook",
        'id="05-warmup-',
        'class="claim"',
    ):
        assert shown in page, f"{shown} does not stand in the report"
    assert loads(page) == []
    assert (study / "build" / "report.pdf").read_bytes().startswith(b"%PDF")
    [path] = study.glob("results/visitor/*/05_warmup.jsonl")
    own = results.read_rows(path)
    assert own and results.Recording.read(path.parent).profile == "quick"
    assert not [r["reason"] for r in own if r["status"] == "failed"]
    assert (study / "build" / "notebooks" / "05_warmup.html").is_file()


@pytest.mark.slow
def test_the_second_report_measures_nothing_and_runs_no_cell(study, first):
    before = {p: p.read_bytes() for p in study.glob("results/visitor/*/*")}
    assert {p.name for p in before} == {"05_warmup.jsonl", "machine.json"}
    paper = {n: (study / "build" / n).read_bytes() for n in ("report.html", "report.pdf")}
    copies = {p: p.read_bytes() for p in study.glob("build/notebooks/*.ipynb")}
    assert len(copies) == 2, "each notes when it ran"
    done = make_report(study)
    assert done.returncode == 0
    assert done.stderr.count("unchanged, kept") == 2
    assert {p: p.read_bytes() for p in copies} == copies
    assert {p: p.read_bytes() for p in study.glob("results/visitor/*/*")} == before
    assert {n: (study / "build" / n).read_bytes() for n in paper} == paper
