"""Where there is neither Triton nor a GPU nor a network: a report is made, and rows say why."""

import json
import os
import shutil
import subprocess
import sys

import pytest

import limits
from fusedlib.bench import machine as machines
from outcomes import outcome
from press import say
from study import mnist, run
from study.cases import Row
from visitor import search_path

# Python as on a machine where triton was never installed: neither module nor metadata is found.
WITHOUT_TRITON = """
from importlib import metadata
from importlib.machinery import PathFinder

find, version = PathFinder.find_spec, metadata.version

def find_all_else(name, path=None, target=None):
    return None if name.partition(".")[0] == "triton" else find(name, path, target)

def version_of_all_else(name):
    if name == "triton":
        raise metadata.PackageNotFoundError(name)
    return version(name)

PathFinder.find_spec = staticmethod(find_all_else)
metadata.version = version_of_all_else
"""
# Every attempt to leave the machine is noted and fails as it does where no cable is plugged in.
WITHOUT_NETWORK = """
import errno, os, socket

def note(what):
    with open(os.environ["ATTEMPTS"], "a") as file:
        file.write(f"{what}\\n")

connect = socket.socket.connect

def connect_locally(self, address):
    if self.family == socket.AF_UNIX:
        return connect(self, address)
    note(address)
    raise OSError(errno.ENETUNREACH, "Network is unreachable")

def look_up(host, *rest, **more):
    note(host)
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

socket.socket.connect = connect_locally
socket.getaddrinfo = look_up
"""


def without_interfaces() -> list[str]:
    """A command that takes even the loopback interface away; empty where that is not allowed."""
    command = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None:
        return []
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if tried.returncode == 0 else []


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Runs one of our modules on such a machine; its folder."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "start").mkdir()
    (folder / "start" / "sitecustomize.py").write_text(WITHOUT_TRITON + WITHOUT_NETWORK)
    env = os.environ | {
        "FUSEDLIB_RESULTS": str(folder / "rows"), "FUSEDLIB_BUILD": str(folder / "build"),
        "FUSEDLIB_MACHINE": "here", "PYTHONPATH": search_path(folder / "start"),
        "CUDA_VISIBLE_DEVICES": "", "ATTEMPTS": str(folder / "attempts"),
    }  # fmt: skip

    def call(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*without_interfaces(), sys.executable, *arguments], env=env, check=False,
            capture_output=True, text=True, timeout=limits.PROCESS_S,
        )  # fmt: skip

    for code, error in (
        ("import triton", "No module named 'triton'"),
        ("import socket; socket.create_connection(('192.0.2.1', 9))", "Temporary failure"),
    ):
        assert error in call("-c", code).stderr, "else these tests show nothing"
    (folder / "attempts").unlink()
    return call, folder


@pytest.mark.slow
def test_a_report_is_made_and_its_rows_say_what_is_missing(bare):
    call, folder = bare
    done = call("-m", "press", "report", "--only", "06_attention")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder / "attempts").exists(), (folder / "attempts").read_text()
    assert (folder / "build" / "report.html").stat().st_size > 10_000
    assert (folder / "build" / "report.pdf").read_bytes().startswith(b"%PDF-")
    assert "Traceback" not in done.stderr
    done = call("-m", "study", "memory", "layers=[2]", "sweep_widths=[]", "grid_widths=[]")
    assert done.returncode == 0, done.stderr
    lines = (folder / "rows" / "here" / "memory.jsonl").read_text().splitlines()
    status = {(row["status"], row["reason"]) for row in map(json.loads, lines)}
    assert ("ok", None) in status
    assert ("unavailable", "the package triton is not installed") in status
    facts = call("-m", "press", "machine")
    assert facts.returncode == 0, facts.stderr
    assert json.loads(facts.stdout)["triton"] is None


def test_a_package_that_is_missing_makes_a_case_unavailable_and_ours_a_failure():
    def theirs(case):
        import no_such_package.at_all  # noqa: F401

    def ours(case):
        import fusedlib.no_such_module  # noqa: F401

    def broken(case):
        from study.paths import no_such_name  # noqa: F401

    said = "the package no_such_package is not installed"
    assert outcome(theirs, {}) == ({}, "unavailable", said)
    assert outcome(ours, {})[1] == "failed"
    assert outcome(broken, {})[1] == "failed"


def test_a_topic_that_failed_here_still_shows_the_recorded_rows(tmp_path, monkeypatch, request):
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path))
    monkeypatch.setenv("FUSEDLIB_MACHINE", "unlucky")  # a clone may have rows of this one
    for function in (machines.key, machines.describe):  # another test may have asked for its name
        function.cache_clear()
        request.addfinalizer(function.cache_clear)
    monkeypatch.setattr(
        mnist, "measure", lambda race: [Row(case, "failed", "bad luck") for case in race]
    )
    found = run.run("mnist", device="cpu")
    assert (found["status"] == "failed").sum() == len(mnist.cases(device="cpu"))
    [stated] = say.every("mnist")
    assert [mark.split()[1].strip(",") for mark in stated.marks()] == ["H200", "H100"], "no other"
    assert "—" not in stated.sentence()
