"""The runner on tiny notebooks, one for each way that a run can go."""

import io
import json
import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest

import tiny_study
from measure.recording import paths, results
from measure.recording.progress import tell
from press.running import config, kernel, monitor, products, runner

NOTEBOOKS = tiny_study.folder()


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDLIB_BUILD", str(tmp_path / "build"))
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path / "rows"))


@pytest.fixture
def study(tmp_path) -> config.Config:
    """A study of its own, whose notebooks a test may change."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for path in NOTEBOOKS.glob("run_*"):
        shutil.copy(path, folder)
    return config.load(folder / "run_study.toml")


def run(study, *names, fresh=False, settings=()):
    """Run notebooks; their outcomes by name, and what was said."""
    jobs = runner.jobs(study.select(names), list(settings), "quick")
    stream = io.StringIO()
    shown = monitor.Monitor(len(jobs), stream)
    outcomes = runner.run(jobs, shown, fresh=fresh)
    return {outcome.name: outcome for outcome in outcomes}, stream.getvalue()


def outputs_of(copy: Path) -> list:
    cells = nbformat.read(copy, as_version=4).cells
    return [output for cell in cells for output in cell.get("outputs", [])]


def printed(copy: Path) -> str:
    """All that the cells of an executed copy printed."""
    return "".join(output.get("text", "") for output in outputs_of(copy))


def errors(copy: Path) -> list[str]:
    return [output.ename for output in outputs_of(copy) if output.output_type == "error"]


def test_of_ten_thousand_lines_that_are_flushed_none_is_lost(study, tmp_path):
    line = "for n in range(10_000):\n    print(n, flush=True)"
    noisy = tiny_study.write(tmp_path / "noisy.ipynb", "Noisy", tiny_study.PROFILE, line)
    job = runner.Job("noisy", noisy, {"profile": "quick"}, "quick", set())
    outcome = runner.execute(job, monitor.Monitor(1, io.StringIO()))
    assert (outcome.status, outcome.error) == ("ok", None)
    assert printed(outcome.copy).split() == [str(n) for n in range(10_000)]


def test_a_notebook_runs_with_its_parameters_in_this_python(study):
    outcomes, printed_text = run(study, "run_ok", settings=["sizes=a,b"])
    outcome = outcomes["run_ok"]
    assert (outcome.status, outcome.error) == ("ok", None)
    text = printed(outcome.copy)
    assert "fresh None\n" in text
    assert "profile='quick' count=3 scale=1.0 sizes=['a', 'b'] kind='plain'" in text
    assert f"python {sys.executable}\n" in text
    noted = products.read_metadata(outcome.copy)
    assert noted["profile"] == "quick"
    assert noted["parameters"]["sizes"] == ["a", "b"]
    assert "[1/1] run_ok: started, 4 cells\n[1/1] run_ok: ok after " in printed_text


def test_a_failing_notebook_keeps_its_part_and_the_others_go_on(study):
    outcomes, printed_text = run(study, "run_fails", "run_dies", "run_ok")
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "run_fails": "failed",
        "run_ok": "ok",
        "run_dies": "failed",
    }
    dead = outcomes["run_dies"]
    assert "the kernel died" in dead.error and errors(dead.copy) == ["DeadKernelError"]
    assert products.read_metadata(dead.copy)["status"] == "failed"
    failed = outcomes["run_fails"]
    notebook = nbformat.read(failed.copy, as_version=4)
    nbformat.validate(notebook)
    assert "ValueError: it broke here" in failed.error
    assert printed(failed.copy) == "this much was done\n"
    assert errors(failed.copy) == ["ValueError"]
    assert "run_fails: failed after" in printed_text


def test_an_unchanged_notebook_is_kept_and_a_failed_one_runs_again(study):
    run(study, "run_ok", "run_fails")
    before = products.copy_path("run_ok").read_bytes()
    outcomes, printed_text = run(study, "run_ok", "run_fails")
    assert outcomes["run_ok"].status == "kept"
    assert outcomes["run_fails"].status == "failed"
    assert products.copy_path("run_ok").read_bytes() == before
    assert "run_ok: unchanged, kept" in printed_text
    again, _ = run(study, "run_ok", fresh=True)
    assert again["run_ok"].status == "ok"
    assert "fresh 1\n" in printed(again["run_ok"].copy)


def job_of(study, name, *settings):
    [job] = runner.jobs(study.select([name]), list(settings), "quick")
    return job


def test_what_makes_a_notebook_run_again(study, tmp_path, monkeypatch):
    run(study, "run_ok")

    def unchanged(*settings):
        return runner.is_unchanged(job_of(study, "run_ok", *settings))

    assert unchanged()
    assert not unchanged("count=4")

    # Another machine's rows of this study count, another study's do not.
    rows = tmp_path / "rows" / "elsewhere" / "2026-11-25"
    rows.mkdir(parents=True)
    (rows / "run_fails.jsonl").write_text("{}\n")
    assert unchanged()
    (rows / "run_ok.jsonl").write_text("{}\n")
    assert not unchanged()
    (rows / "run_ok.jsonl").unlink()

    notebook = study.select(["run_ok"])[0].notebook
    text = notebook.read_text()
    notebook.write_text(text.replace("# A notebook that works", "# Renamed"))
    assert not unchanged()
    notebook.write_text(text.replace('"Python 3"', '"Another name"'))
    assert unchanged()

    (notebook.parent / "helper.py").write_text("changed = 1\n")
    assert not unchanged()
    (notebook.parent / "helper.py").unlink()
    for name in ("PUBLISHED", "ROOT"):
        with monkeypatch.context() as patch:
            patch.setattr(paths, name, tmp_path)
            assert not unchanged()
    with monkeypatch.context() as patch:
        patch.setenv(results.RECORDING, "another")
        assert not unchanged()
    assert unchanged()
    products.copy_path("run_ok").write_text('{"cells": [')
    assert not unchanged(), "a damaged copy"


def test_rows_that_the_run_itself_wrote_do_not_make_it_run_again(study, tmp_path):
    notebook = study.select(["run_ok"])[0].notebook
    content = nbformat.read(notebook, as_version=4)
    content.cells[-1].source = (
        "from measure.recording.results import Recorder\n"
        "Recorder('run_ok', profile=profile).append({'model': 'nano'}, {'median_ms': 1.0})"
    )
    nbformat.write(content, notebook)
    run(study, "run_ok")
    again, _ = run(study, "run_ok")
    assert again["run_ok"].status == "kept"
    [path] = (tmp_path / "rows").glob("*/*/run_ok.jsonl")
    assert len(results.read_rows(path)) == 1


def test_the_frame_reads_all_rows(study):
    [job] = runner.jobs([study.frame], [], "quick")
    assert (job.name, job.reads) == ("report", None)
    outcome = runner.execute(job, monitor.Monitor(1, io.StringIO()))
    assert outcome.status == "ok"
    assert printed(outcome.copy) == "the frame\n"
    assert runner.is_unchanged(job)
    rows = paths.results_dir() / "new" / "2026-11-25"
    rows.mkdir(parents=True)
    (rows / "any.jsonl").write_text("{}\n")
    assert not runner.is_unchanged(job)


def test_kernels_that_the_users_home_registers_are_not_used(study, tmp_path, monkeypatch):
    folder = tmp_path / "home" / "share" / "kernels" / "python3"
    folder.mkdir(parents=True)
    wrong = {"argv": ["/bin/false", "{connection_file}"], "display_name": "x", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(wrong))
    startup = tmp_path / "home" / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00-own.py").write_text("raise SystemExit('the home was read')")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "home" / "share"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "home" / "share"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "home" / "ipython"))
    outcomes, _ = run(study, "run_ok")
    assert outcomes["run_ok"].status == "ok"
    assert f"python {sys.executable}\n" in printed(outcomes["run_ok"].copy)


def test_relative_folders_mean_the_same_in_a_kernel(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEDLIB_RESULTS", "rows-here")
    env = kernel.variables()
    assert env["FUSEDLIB_RESULTS"] == str(tmp_path / "rows-here")
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(paths.ROOT)


def test_who_waits_for_another_run_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDLIB_PROGRESS", str(tmp_path / "progress"))
    tell("12_precision", "waits for process 12 on here")
    assert monitor.last_case(tmp_path / "progress") == "waits for process 12 on here"
