"""Ctrl-C and SIGTERM in the middle of a notebook, with real processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

import limits
import tiny_study
from measure.recording import results
from press.running import products
from processes import alive, wait_for
from visitor import search_path

STUDY = """
[[study]]
name = "run_sleeps"
title = "Sleeps"
question = "Does it end?"
quick = {}
full = {}
"""
CELLS = (
    tiny_study.PROFILE,
    """
import os, subprocess, sys
from pathlib import Path
from measure.recording.results import Recorder

Recorder("run_sleeps", profile=profile).append({"model": "nano"}, {"median_ms": 1.0})
""",
    """
sleeper = [sys.executable, "-c", "import time; time.sleep(3600)"]
child = subprocess.Popen(sleeper)
loner = subprocess.Popen(sleeper, start_new_session=True)
pids = [os.getpid(), child.pid, loner.pid]
Path(os.environ["RUN_PIDS"]).write_text(" ".join(map(str, pids)))
""",
    'import time\n\nprint("waiting", flush=True)\ntime.sleep(3600)',
)
"""It takes long and has children."""


@pytest.fixture
def running(tmp_path):
    """A run in the middle of its long cell: its process, and the ids of all that it started."""
    tiny_study.write(tmp_path / "run_sleeps.ipynb", "Sleeps", *CELLS)
    (tmp_path / "study.toml").write_text(STUDY)
    pids = tmp_path / "pids"
    env = {
        **os.environ,
        "FUSEDLIB_BUILD": str(tmp_path / "build"),
        "FUSEDLIB_RESULTS": str(tmp_path / "rows"),
        "RUN_PIDS": str(pids),
        "PYTHONPATH": search_path(),
    }
    command = [sys.executable, "-m", "press", "run", "--profile", "quick"]
    command += ["--config", str(tmp_path / "study.toml")]
    # A group of its own, as a shell gives a command: the signal reaches the runner only.
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: process.poll() is not None or (pids.exists() and pids.read_text()))
        assert process.poll() is None, process.communicate()
        time.sleep(0.5)
        yield process, [int(pid) for pid in pids.read_text().split()]
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("send", "number", "status"),
    [(os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGTERM, 143)],
    ids=["ctrl-c, as a terminal tells the group", "term of the runner alone"],
)
def test_a_stopped_run_keeps_what_it_has_and_leaves_no_process(
    running, tmp_path, send, number, status
):
    process, pids = running
    assert len(pids) == 3
    assert all(alive(pid) for pid in pids)
    send(process.pid, number)
    _, errors = process.communicate(timeout=limits.PROCESS_S)
    assert process.returncode == status
    assert not [pid for pid in pids if alive(pid)]
    [path] = (tmp_path / "rows").glob("*/*/run_sleeps.jsonl")
    [row] = results.read_rows(path)
    assert (row["status"], row["median_ms"]) == ("ok", 1.0)
    assert "stopped; rows measured so far are kept" in errors
    assert "Traceback" not in errors
    assert "pending" not in errors
    copy = tmp_path / "build" / "notebooks" / "run_sleeps.ipynb"
    assert products.read_metadata(copy)["status"] == "interrupted"
    assert "waiting" in copy.read_text()
    assert list(copy.parent.iterdir()) == [copy]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_runner_takes_the_kernel_with_it(running):
    process, pids = running
    process.kill()
    process.wait()
    # ipykernel looks after its parent once a second.
    wait_for(lambda: not alive(pids[0]))
    for pid in pids[1:]:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
