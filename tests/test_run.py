"""Notebooks are run with their knobs: tiny ones, one for each way that a run can go."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import IPython.core.getipython
import nbformat
import pytest
from jupyter_client import KernelManager

import limits
import tiny_notebooks
from press import knobs, run
from press import render as renderer
from press.run import ChoiceError
from press_called import called
from processes import alive, wait_for
from study import paths
from study.errors import SizesError
from visitor import search_path


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDLIB_BUILD", str(tmp_path / "build"))
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path / "rows"))
    monkeypatch.setenv("PYTHONPATH", search_path())


def parts(tmp_path: Path, *names: str) -> list[run.Part]:
    return [*map(run.Part, tiny_notebooks.made(tmp_path / "made", *names))]


def outputs_of(copy: Path) -> list:
    cells = nbformat.read(copy, as_version=4).cells
    return [output for cell in cells for output in cell.get("outputs", [])]


def printed(copy: Path) -> str:
    """All that the cells of an executed copy printed."""
    return "".join(output.get("text", "") for output in outputs_of(copy))


# --- how a run goes ------------------------------------------------------------------------------


def test_a_notebook_runs_with_its_knobs_in_this_python(tmp_path):
    [works] = parts(tmp_path, "works")
    assert run.run([works], run.settings([works], ["sizes=a,b", "works.count=3"])) is False
    text = printed(works.copy)
    assert "count=3 scale=1.0 sizes=['a', 'b'] kind='plain'\n" in text
    assert f"python {sys.executable}\n" in text
    assert run.error_of(works.copy) is None


def test_a_failing_notebook_keeps_its_part_and_the_others_go_on(tmp_path, capsys):
    every = parts(tmp_path, "fails", "dies", "works")
    assert run.run(every, {}) is True
    failed, dead, works = (part.copy for part in every)
    assert run.error_of(failed) == "cell 4: ValueError: it broke here"
    assert printed(failed) == "this much was done\n"
    nbformat.validate(nbformat.read(failed, as_version=4))
    assert "the kernel died" in run.error_of(dead)
    assert run.error_of(works) is None
    assert "fails: cell 4: ValueError: it broke here, " in capsys.readouterr().out


def test_a_copy_is_kept_until_its_notebook_or_its_knobs_change(tmp_path, capsys):
    every = works, fails = parts(tmp_path, "works", "fails")
    run.run(every, {})
    before = works.copy.read_bytes()
    assert run.run(every, {}) is True, "what failed runs again"
    assert works.copy.read_bytes() == before
    assert "works: unchanged, kept" in capsys.readouterr().out
    assert not run.is_kept(works, {"count": 3})
    os.utime(works.notebook)
    assert not run.is_kept(works, {})
    run.run([works], {})
    assert run.is_kept(works, {})
    with run.environment({"FRESH": "1"}):
        run.run([works], {}, fresh=True)
    assert "fresh 1\n" in printed(works.copy)
    assert not run.is_kept(fails, {})


def test_what_a_recorded_row_or_a_line_of_code_changes_runs_again(tmp_path, monkeypatch):
    [works] = parts(tmp_path, "works")
    run.run([works], {})
    for name in ("report/results/nvidia-h100/kernels.jsonl", "notebooks/study/kernels.py"):
        monkeypatch.setattr(paths, "ROOT", tmp_path / "root")
        monkeypatch.setattr(paths, "RECORDED", tmp_path / "root" / "report" / "results")
        changed = tmp_path / "root" / name
        changed.parent.mkdir(parents=True)
        changed.touch()
        assert not run.is_kept(works, {})
        changed.unlink()
        assert run.is_kept(works, {})


def test_kernels_that_the_user_s_home_registers_are_not_used(tmp_path, monkeypatch):
    folder = tmp_path / "home" / "share" / "kernels" / "python3"
    folder.mkdir(parents=True)
    wrong = {"argv": ["/bin/false", "{connection_file}"], "display_name": "x", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(wrong))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "home" / "share"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "home" / "share"))
    [works] = parts(tmp_path, "works")
    run.run([works], {})
    assert f"python {sys.executable}\n" in printed(works.copy)


SLEEPS = (
    "",
    """
import os, subprocess, sys, time
from pathlib import Path

sleeper = [sys.executable, "-c", "import time; time.sleep(3600)"]
child = subprocess.Popen(sleeper)
loner = subprocess.Popen(sleeper, start_new_session=True)
Path(os.environ["RUN_PIDS"]).write_text(" ".join(map(str, [os.getpid(), child.pid, loner.pid])))
print("waiting", flush=True)
time.sleep(3600)""",
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("send", "number", "status"),
    [(os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGTERM, 143)],
    ids=["ctrl-c, as a terminal tells the group", "term of the runner alone"],
)
def test_a_stopped_run_leaves_no_process(tmp_path, send, number, status):
    sleeps, pids = tiny_notebooks.write(tmp_path / "sleeps.ipynb", *SLEEPS), tmp_path / "pids"
    process = subprocess.Popen(
        [sys.executable, "-m", "press", "run", "--only", str(sleeps)],
        env=os.environ | {"RUN_PIDS": str(pids)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: process.poll() is not None or (pids.exists() and pids.read_text()))
        assert process.poll() is None, process.communicate()
        started = [int(pid) for pid in pids.read_text().split()]
        assert len(started) == 3 and all(map(alive, started))
        time.sleep(0.5)
        send(process.pid, number)
        _, errors = process.communicate(timeout=limits.PROCESS_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status
    wait_for(lambda: not any(map(alive, started)))
    assert "stopped; rows measured so far are kept" in errors and "Traceback" not in errors


# --- what is asked for ---------------------------------------------------------------------------


def test_notebooks_go_by_name_number_and_path(tmp_path):
    names = [part.name for part in run.guides()]
    assert [part.name for part in run.select("04, 3_fp32")] == [
        next(name for name in names if name.startswith("04")), "3_fp32",
    ]  # fmt: skip
    [path] = tiny_notebooks.made(tmp_path / "made", "works")
    assert run.select(str(path)) == [run.Part(path)]
    assert [*run.sections(), *run.guides()] == run.select()
    with pytest.raises(ChoiceError, match="notebook '17' is unknown; known: .*3_fp32"):
        run.select("17")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("count=two", r"works: count must be int in \[1..9\], not 'two'"),
        ("count=10", r"count must be int in \[1..9\], not 10"),
        ("kind=big", "kind must be plain or fancy, not 'big'"),
        ("coutn=3", "'coutn=3' sets no knob.*known: count, kind, scale, sizes"),
        ("fails.count=3", "sets no knob"),
        ("count", "write name=value"),
    ],
)
def test_a_wrong_setting_is_one_line_and_status_2_before_anything_runs(tmp_path, setting, message):
    [works] = parts(tmp_path, "works")
    with pytest.raises((ChoiceError, SizesError), match=message):
        run.settings([works], [setting])
    done = called("run", "--only", works.notebook, "--set", setting)
    assert done.status == 2 and done.stderr.startswith("fusedlib: ")
    assert not works.copy.exists()


@pytest.mark.parametrize("name", ["README.md", "Makefile"])
def test_the_knobs_that_documents_set_are_there(name):
    text = (paths.ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"\b(\d\d_\w+\.\w+=\w+)", text)
    assert named and run.settings(run.guides(), named)


DECLARED = """hidden: int = 512  # width of the layer [16..4096]
direction: str = "forward"  # redraws all [forward | forward and backward]
warmup: int = 1  # steps [0 | 1 | 5]
models: list[str] = ["64·128·384"]  # to race here
waits: list[float] = [1.5]  # of a kernel [0.5..2.25]
tokens: int = 64  # of a sequence [1..128]"""


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("hidden = 5000000", "hidden must be int in [16..4096], not 5000000"),
        ("tokens = 129", "tokens must be int in [1..128], not 129"),
        ('direction = "backward"',
         "direction must be forward or forward and backward, not 'backward'"),
        ("warmup = 2", "warmup must be 0, 1 or 5, not 2"),
        ('models = "a,b"', "models must be list of str, not 'a,b'; papermill takes it by -y "
                           """'models: ["64·128·384"]'"""),
        ("hiden = 64", "'hiden' is no knob of this notebook; known: hidden, direction, warmup, "
                       "models, waits, tokens"),
        ("waits = [1.0, 0.25]", "waits must be list of float in [0.5..2.25], not [1.0, 0.25]"),
        ("waits = []", "waits must be list of float in [0.5..2.25], not []"),
        ("waits = [0.5, 2.25]", None),
        ("hidden = 4096", None),
    ],
)  # fmt: skip
def test_a_notebook_refuses_a_knob_that_is_set_to_what_its_line_does_not_allow(
    monkeypatch, line, sentence
):
    """Set by papermill's -p, in a cell below the declared ones, as also by hand."""
    ran = ["", DECLARED, f"# Parameters\n{line}\n", "import torch"]
    names: dict = {"In": ran}
    exec("\n".join(ran[:3]), names)
    shell = SimpleNamespace(user_ns=names)
    monkeypatch.setattr(IPython.core.getipython, "get_ipython", lambda: shell)
    if sentence is None:
        knobs.check_knobs()
        return
    with pytest.raises(SizesError) as refused:
        knobs.check_knobs()
    assert str(refused.value) == sentence


def test_a_cell_that_arrives_after_a_refused_knob_is_not_run():
    """It ran on the values refused above, or raised what no student caused."""
    refused = "from study.errors import SizesError; raise SizesError('x must be int')"
    manager = KernelManager()
    manager.start_kernel(env=os.environ | run.for_kernels())
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(60)
        client.execute(refused)
        time.sleep(0.1)
        client.execute("late = 1")
        replies = [client.get_shell_msg(timeout=60)["content"]["status"] for _ in range(2)]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert replies == ["error", "aborted"]


def test_every_notebook_and_section_declares_knobs_that_can_be_read():
    for part in run.select():
        part.knobs()
        assert part.title, part.name


# --- the report ----------------------------------------------------------------------------------


def test_report_renders_what_failed_too_and_says_where(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(renderer, "check_ready", lambda: None)
    monkeypatch.setattr(renderer, "render", lambda parts, out: given.extend(parts) or [out / "x"])
    fails, section = parts(tmp_path, "fails", "works")
    monkeypatch.setattr(run, "sections", lambda: [section])
    monkeypatch.setattr(run, "select", lambda only="": [fails] if only else [fails, section])
    done = called("report", "--only", "fails")
    assert done.status == 1
    assert [(part.name, part.error) for part in given] == [
        ("fails", "cell 4: ValueError: it broke here"), ("works", None),
    ]  # fmt: skip
    assert (tmp_path / "build" / "x").as_uri() in done.stdout


def test_a_report_that_nobody_ran_is_said():
    done = called("render")
    assert done.status == 2 and "run `make report`" in done.stderr
