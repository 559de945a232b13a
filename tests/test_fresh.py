"""Fresh processes: answers, failures, and no orphans whatever happens to the parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import limits
from fusedlib.bench.attempt import Unavailable, Wrong
from processes import alive, wait_for
from study import fresh, paths

HERE = Path(__file__).parent
FOUND = [str(HERE), str(paths.ROOT / "notebooks")]


@pytest.fixture(autouse=True)
def _targets(monkeypatch):
    """Where the functions are found, and a torch that is there at once."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*FOUND, str(HERE / "torchless")]))


def call(function: str, **arguments):
    return fresh.run(f"fresh_targets:{function}", arguments, timeout_s=limits.PROCESS_S)


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        ("fail", fresh.FreshProcessError, r"broken on purpose \(fresh_targets.py:\d+\)$"),
        ("out_of_memory", MemoryError, "out of memory"),
        ("killed", MemoryError, "the system killed the process"),
        ("unavailable", Unavailable, "no such card"),
        ("crash", fresh.FreshProcessError, "ended with status 7: last words"),
        ("no_such_function", fresh.FreshProcessError, "no_such_function"),
    ],
)
def test_failures_are_told_apart(function, kind, message):
    with pytest.raises(kind, match=message):
        call(function)


def test_the_first_of_several_that_fails_ends_all_and_gives_the_reason(tmp_path):
    note = tmp_path / "pid"
    ways = [{"path": str(note), "wrong": None}, {"path": str(note), "wrong": {"losses": [1.0]}}]
    with pytest.raises(Wrong, match="of one") as failed:
        fresh.run_together("fresh_targets:sleep_or_fail", ways, timeout_s=limits.PROCESS_S)
    assert failed.value.figures == {"losses": [1.0]}
    assert not alive(int(note.read_text()))


def test_a_late_process_is_ended(tmp_path, monkeypatch):
    """However far it has come: on a slow machine its Python has not begun by then."""
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(fresh.subprocess, "Popen", Noted)
    sleep = "fresh_targets:sleep", {"path": str(tmp_path / "pid")}
    with pytest.raises(fresh.FreshProcessError, match=r"did not end within 2 s"):
        fresh.run(*sleep, timeout_s=2)
    [process] = started
    assert not alive(process.pid)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_orphan_is_left_when_the_parent_goes(tmp_path, how):
    note = tmp_path / "pid"
    script = (
        "from study import fresh\n"
        f"path = {str(note)!r}\n"
        f"fresh.run('fresh_targets:sleep', {{'path': path}}, timeout_s={limits.TEST_S})\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=paths.ROOT, stderr=subprocess.DEVNULL,
        # A shell starts what it puts in the background with ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    wait_for(lambda: note.exists() and note.read_text())
    child = int(note.read_text())
    assert alive(child)
    parent.send_signal(how)
    assert parent.wait(limits.PROCESS_S) != 0
    wait_for(lambda: not alive(child))
