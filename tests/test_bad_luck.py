"""Bad luck from end to end: what is missing, full, damaged or stopped, met by real processes."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import limits
from bad_luck import NAME, WITHOUT_NETWORK, WITHOUT_TRITON, Study
from fusedlib.bench import machine as machines
from measure.racing.cases import Row
from measure.recording import results
from measure.recording.jsonl import read_objects
from measure.recording.results import Recorder
from outcomes import outcome
from press import cli, say
from study import run, warmup

linux = pytest.mark.skipif(sys.platform != "linux", reason="uses what only Linux has")

# --- no Triton, no GPU, no network ---------------------------------------------------------------


def without_interfaces() -> list[str]:
    """A command that takes even the loopback interface away; empty where that is not allowed."""
    command = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None:
        return []
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if tried.returncode == 0 else []


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Study:
    """A study where there is neither Triton nor a network, as two probes have seen."""
    folder = tmp_path_factory.mktemp("bare")
    start = WITHOUT_TRITON + WITHOUT_NETWORK
    study = Study(folder / "study", start, ATTEMPTS=str(folder / "attempts"))
    study.before = without_interfaces()
    call = "import socket; socket.create_connection(('192.0.2.1', 9))"
    for code, error in (
        ("import triton", b"No module named 'triton'"),
        (call, b"Temporary failure"),
    ):
        probe = subprocess.run(
            [*study.before, sys.executable, "-c", code],
            env=study.env,
            capture_output=True,
            check=False,
        )
        assert error in probe.stderr, "else these tests show nothing"
    (folder / "attempts").unlink()
    return study


@pytest.mark.slow
def test_without_triton_a_machine_is_described_and_studies_are_listed(bare):
    facts = bare.call("machine")
    assert facts.returncode == 0, facts.stderr
    assert json.loads(facts.stdout)["triton"] is None
    assert json.loads(facts.stdout)["device_type"] != "cuda"
    assert bare.call("list").returncode == 0


@pytest.mark.slow
def test_without_triton_gpu_and_network_a_report_is_made_and_rows_say_why(bare):
    done = bare.call("report")
    assert done.returncode == 0, done.stdout + done.stderr
    attempts = Path(bare.env["ATTEMPTS"])
    assert not attempts.exists(), attempts.read_text()
    assert (bare.build / "report.html").stat().st_size > 10_000
    assert (bare.build / "report.pdf").read_bytes().startswith(b"%PDF-")
    assert "this machine has no CUDA GPU" in done.stdout
    study = bare
    rows = {row["case_no"]: row for row in results.read_rows(study.path())}
    assert {n: row["status"] for n, row in rows.items()} == {
        0: "ok", 1: "ok", 2: "unavailable", 3: "unavailable", 4: "ok",
    }  # fmt: skip
    assert rows[2]["reason"] == "the package triton is not installed"
    assert rows[3]["reason"] == "needs a CUDA GPU with tensor cores"
    assert "Traceback" not in done.stderr


def test_a_package_that_is_missing_makes_a_case_unavailable_and_ours_a_failure():
    def theirs(case):
        import no_such_package.at_all  # noqa: F401

    def ours(case):
        import fusedlib.no_such_module  # noqa: F401

    def broken(case):
        from measure.recording.paths import no_such_name  # noqa: F401

    assert outcome(theirs, {}) == (
        {},
        "unavailable",
        "the package no_such_package is not installed",
    )
    assert outcome(ours, {})[1] == "failed"
    assert outcome(broken, {})[1] == "failed"


# --- damaged rows --------------------------------------------------------------------------------

GOOD = json.dumps({"case": "x", "status": "ok"})
GOOD_FACTS = json.dumps({"schema": results.SCHEMA, "profile": "full", "runs": [{}]})
ROWS, FACTS = f"{NAME}.jsonl", results.DESCRIPTION
DAMAGED = {
    "not JSON": (ROWS, f"{GOOD}\nnonsense\n{GOOD}\n", "line 2 is not a JSON object: 'nonsense'"),
    "a list": (ROWS, f"[1]\n{GOOD}\n", "line 1 is not a JSON object: '[1]'"),
    "an array": (ROWS, f"[{GOOD},{GOOD}]", "line 1 is not a JSON object"),
    "binary": (ROWS, f"\0\xff\n{GOOD}\n", "line 1 is not a JSON object"),
    "foreign": (ROWS, '{"time": 3}\n', "row 1 lacks case, status; it was not written by fusedlib"),
    "no status": (ROWS, f'{GOOD}\n{{"case": "x"}}\n', "row 2 lacks status;"),
    "a number as case": (ROWS, '{"case": 3, "status": "ok"}\n', "row 1 lacks case;"),
    "a folder": (ROWS, None, "cannot read"),
    "newer": (FACTS, GOOD_FACTS.replace("2", "7", 1), "schema 7, this fusedlib reads up to 2"),
    "torn facts": (FACTS, GOOD_FACTS[:-9], "cannot be read (JSONDecodeError"),
    "facts of nothing": (FACTS, "{}", "cannot be read (KeyError: 'schema'"),
    "a list of facts": (FACTS, "[1]", "cannot be read (TypeError"),
    "no facts": (FACTS, "", "rows beside it are of no known machine. Restore the file"),
    "a folder of facts": (FACTS, None, "cannot be read (IsADirectoryError"),
}


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Study:
    study = Study(tmp_path / "study")
    monkeypatch.setenv("FUSEDLIB_BUILD", str(study.build))
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(study.rows))
    return study


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_rows_stop_a_run_before_it_begins(tiny, damage):
    damaged, content, message = DAMAGED[damage]
    folder = tiny.rows / "elsewhere" / "2026-11-25"
    path = folder / damaged
    folder.mkdir(parents=True)
    for name, whole in ((ROWS, f"{GOOD}\n"), (FACTS, GOOD_FACTS)):
        (folder / name).write_text(whole)
    assert results.check(None, tiny.rows) == []
    command = "run" if damaged == ROWS else "report"
    path.unlink()
    if content is None:
        path.mkdir()
    elif content:
        path.write_text(content, encoding="latin-1")
    done = CliRunner().invoke(cli.app, [command, "--config", str(tiny.config)])
    assert done.exit_code == 2
    cannot = "cannot read " if damage == "a folder" else ""
    assert done.stderr.startswith(f"fusedlib: {cannot}{path}")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tiny.build / "notebooks").iterdir()) == []
    if content:
        assert path.read_text(encoding="latin-1") == content, "damage is for people to look at"


def test_damage_of_another_study_s_rows_does_not_stop_this_one(tmp_path):
    folder = tmp_path / "elsewhere" / "2026-11-25"
    folder.mkdir(parents=True)
    (folder / FACTS).write_text(GOOD_FACTS)
    (folder / "other.jsonl").write_text("nonsense\n{}\n")
    assert results.check([NAME], tmp_path) == []


# --- nothing is measured -------------------------------------------------------------------------


def test_a_study_that_failed_here_still_shows_the_recorded_rows(tmp_path, monkeypatch, request):
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path))
    monkeypatch.setenv("FUSEDLIB_MACHINE", "unlucky")  # a clone may have rows of this one
    for function in (machines.key, machines.describe):  # another test may have asked for its name
        function.cache_clear()
        request.addfinalizer(function.cache_clear)
    monkeypatch.setattr(
        warmup, "measure", lambda race: [Row(case, "failed", "bad luck") for case in race]
    )
    found = run.run("warmup", device="cpu")
    assert (found["status"] == "failed").sum() == len(warmup.cases(device="cpu"))
    shown = say.every("warmup")
    assert len(shown) >= 2
    for stated in shown:
        assert stated.summary().count("holds in") >= 1, "the recorded machine's"
        named = "this machine: no recording has all of its numbers" in stated.summary()
        assert named or "in the published tables" in stated.summary()
        assert "—" not in stated.sentence()


# --- full disks and unwritable folders -----------------------------------------------------------


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


@pytest.mark.slow
@linux
def test_no_room_or_a_torn_row_keeps_the_rows_before_it_and_the_rest_is_measured(tmp_path):
    study = Study(tmp_path / "study", bare=True)
    arguments = ("--profile", "quick", "--set", "samples=1000000")
    # The system itself refuses a file beyond a size, in the middle of the last case's long row.
    done = study.call("run", *arguments, preexec_fn=limit_file_size)
    assert done.returncode == 1
    path = study.path()
    assert f"ResultsError: cannot write to {path}: File too large" in done.stdout
    assert "Rows written so far are kept" in study.printed()
    assert path.read_text().endswith("}\n")
    assert [row["case_no"] for row in results.read_rows(path)] == [0, 1, 2, 3]
    path.write_text(path.read_text()[:-40])
    again = study.call("run", *arguments)
    assert again.returncode == 0, again.stdout
    assert f"{path}: the last line was cut off after" in again.stderr
    assert "measuring 3" in study.printed() and "measuring 2" not in study.printed()
    assert [row["case_no"] for row in read_objects(path)] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_of_two_runs_at_once_each_case_is_measured_once(tmp_path):
    study = Study(tmp_path / "study", bare=True, TINY_S="1")
    runs = [
        subprocess.Popen(study.command("run"), env=study.env, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for child in runs:
        assert child.wait(limits.PROCESS_S) == 0, child.stderr.read()
        child.stderr.close()
    assert [row["case_no"] for row in results.read_rows(study.path())] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("file", ["/dev/full", "/dev/null/progress"])
def test_progress_that_cannot_be_written_ends_no_sweep(tmp_path, monkeypatch, file):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    monkeypatch.setenv("FUSEDLIB_PROGRESS", file)
    recorder = Recorder("01_x", profile="quick", directory=tmp_path)
    recorder.sweep([{"case_no": 1}, {"case_no": 2}], lambda case: {"median_ms": 1.0})
    assert len(recorder.rows()) == 2


@pytest.mark.long
@linux
def test_a_home_that_cannot_be_written_does_no_harm(tmp_path):
    home = "/dev/null/home"
    study = Study(tmp_path / "study", HOME=home, IPYTHONDIR=f"{home}/ipython")
    done = study.call("run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(results.read_rows(study.path())) == 5
