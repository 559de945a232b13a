"""A notebook of the study, run under `quick`, and the paper made beside it of one topic."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import limits
import visitor
from measure.recording import paths
from measure.recording.jsonl import read_objects
from slides_checks import loads

# The same profile as `make report`, with less to measure; the paper's topic is not the notebook's.
SMALL = """
frame = "../report/report.ipynb"
guides = ["03_clock"]

[[study]]
name = "profile"
title = "Where the time goes"
question = "For how long does the device do nothing?"
quick = {}
full = {}
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A copy of the notebooks with a smaller study.toml."""
    folder = tmp_path_factory.mktemp("study")
    shutil.copytree(paths.NOTEBOOKS, folder / "notebooks")
    (folder / "notebooks" / "study.toml").write_text(SMALL)
    (folder / "report").mkdir()
    shutil.copy(paths.REPORT / "report.ipynb", folder / "report")
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
        "Matrix products, everything else, and nothing",
        'id="profile-',
        'class="claim"',
    ):
        assert shown in page, f"{shown} does not stand in the report"
    assert loads(page) == []
    assert (study / "build" / "report.pdf").read_bytes().startswith(b"%PDF")
    own = read_objects(study / "results" / "visitor" / "warmup.jsonl")
    assert own and not [row["reason"] for row in own if row["status"] == "failed"]
    [recording] = read_objects(study / "results" / "recordings.jsonl")
    assert recording["profile"] == "quick"
    assert (study / "build" / "notebooks" / "03_clock.html").is_file()


@pytest.mark.slow
def test_the_second_report_measures_nothing_and_runs_no_cell(study, first):
    before = {p: p.read_bytes() for p in study.glob("results/**/*.jsonl")}
    assert {p.name for p in before} == {"warmup.jsonl", "recordings.jsonl"}
    paper = {n: (study / "build" / n).read_bytes() for n in ("report.html", "report.pdf")}
    copies = {p: p.read_bytes() for p in study.glob("build/notebooks/*.ipynb")}
    assert len(copies) == 3, "each notes when it ran"
    done = make_report(study)
    assert done.returncode == 0
    assert done.stderr.count("unchanged, kept") == 3
    assert {p: p.read_bytes() for p in copies} == copies
    assert {p: p.read_bytes() for p in study.glob("results/**/*.jsonl")} == before
    assert {n: (study / "build" / n).read_bytes() for n in paper} == paper
