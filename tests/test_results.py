"""Rows on disk: nothing recorded is lost, nothing is measured twice, and damage is told plainly."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fusedlib.bench import machine
from measure.recording import results
from measure.recording.files import WriteError, write_whole
from measure.recording.jsonl import TornLineWarning, append_object, read_objects
from measure.recording.results import Recorder, ResultsError
from played_clock import PlayedClock
from processes import wait_for

CASE = {"model": "small", "process": 1}


def recorder(tmp_path: Path, profile: str = "quick", study: str = "01_x", **options):
    return Recorder(study, profile=profile, directory=tmp_path, **options)


def test_a_row_is_flat_and_what_all_rows_share_stands_once(tmp_path):
    own = recorder(tmp_path)
    row = own.append(CASE, {"median_ms": 1.5, "samples_ms": [1.0, 2.0]})
    own.append({**CASE, "process": 2})
    assert recorder(tmp_path, "full").missing([CASE]) == [CASE], "another profile's"
    assert json.loads(own.path.read_text().splitlines()[0]) == row
    assert set(row) == {*results.HEAD, *CASE, "median_ms", "samples_ms"}
    assert not any(isinstance(v, dict) for v in row.values())
    assert own.path == tmp_path / machine.key() / own.recording / "01_x.jsonl"
    shared = json.loads((own.path.parent / "machine.json").read_text())
    [run] = shared["runs"]
    assert shared["profile"] == "quick" and run["began"] == row["measured_at"]
    assert {"commit", "dirty", "host", "device_name", "driver", "torch", "triton"} <= set(run)
    assert shared["files"]["notebooks/measure/recording/results.py"] and "key" not in run


def test_another_field_is_another_case(tmp_path):
    recorder(tmp_path).append(CASE, {"median_ms": 1.0})
    other = {**CASE, "process": 2}
    assert recorder(tmp_path).missing([other, CASE]) == [other]


@pytest.mark.parametrize("status", ["failed", "unavailable"])
def test_bad_luck_is_tried_again(tmp_path, status):
    recorder(tmp_path).append(CASE, status=status, reason="no")
    assert recorder(tmp_path).missing([CASE]) == [CASE]


def test_same_unavailability_is_recorded_once(tmp_path):
    for _ in range(3):
        recorder(tmp_path).append(CASE, status="unavailable", reason="no GPU")
    recorder(tmp_path).append(CASE, status="unavailable", reason="no Triton")
    reasons = [r["reason"] for r in read_objects(recorder(tmp_path).path)]
    assert reasons == ["no GPU", "no Triton"]


def test_of_a_case_that_a_recording_measured_twice_the_later_row_counts(tmp_path):
    for value in (1.0, 2.0):
        recorder(tmp_path).append(CASE, {"median_ms": value})
    assert recorder(tmp_path).rows()["median_ms"].tolist() == [2.0]
    recorder(tmp_path, profile="full").append(CASE, {"median_ms": 3.0})
    assert recorder(tmp_path).rows()["median_ms"].tolist() == [3.0], "the profile full counts"
    assert recorder(tmp_path).rows()["own"].all()


def test_inf_and_nan_become_null_and_are_named(tmp_path):
    row = recorder(tmp_path).append(CASE, {"error": float("inf"), "fine": 1.0})
    assert row["error"] is None
    assert row["nonfinite"] == ["error=inf"]


@pytest.mark.parametrize(
    ("case", "figures", "status", "message"),
    [
        ({"status": "x"}, {}, "ok", "head has it"),
        ({"shape": [1, 2]}, {}, "ok", "flat"),
        (CASE, {"model": 1.0}, "ok", "own fields"),
        (CASE, {"odd": {"a": 1}}, "ok", "flat"),
        (CASE, {}, "great", "known are ok, wrong"),
    ],
)
def test_a_row_that_no_reader_knows_is_refused(tmp_path, case, figures, status, message):
    with pytest.raises(ValueError, match=message):
        recorder(tmp_path).append(case, figures, status=status)


def test_torn_last_line_is_dropped_with_a_warning_and_measured_again(tmp_path):
    recorder(tmp_path).append(CASE, {"median_ms": 1.0})
    path = recorder(tmp_path).path
    with path.open("a") as file:
        file.write('{"schema": 1, "stu')
    with pytest.warns(TornLineWarning, match="cut off after 18 bytes"):
        assert len(results.read_rows(path)) == 1
    with pytest.warns(TornLineWarning):
        recorder(tmp_path).append({**CASE, "process": 2}, {"median_ms": 2.0})
    assert [r["median_ms"] for r in results.read_rows(path)] == [1.0, 2.0]


EDITED = {  # how a file ends, and what of it is torn
    "no end": (b'{"a": 1}\n{"a": 2}', b""),
    "CRLF": (b'{"a": 1}\r\n{"a": 2}\r\n', b""),
    "CRLF, no end": (b'{"a": 1}\r\n{"a": 2}', b""),
    "CR": (b'{"a": 1}\r{"a": 2}\r', b""),
    "CR, no end": (b'{"a": 1}\r{"a": 2}', b""),
    "blanks": (b'{"a": 1}\n{"a": 2}\n  ', b""),
    "torn": (b'{"a": 1}\n{"a": 2}\n{"a": ', b'{"a": '),
    "torn after CR": (b'{"a": 1}\r{"a": 2}\r{"a": ', b'{"a": '),
    "nul bytes after a power cut": (b'{"a": 1}\n{"a": 2}\n\0\0\0', b"\0\0\0"),
}


@pytest.mark.filterwarnings("ignore::measure.recording.jsonl.TornLineWarning")
@pytest.mark.parametrize("edited", EDITED)
def test_no_row_of_a_file_that_somebody_edited_is_lost(tmp_path, edited):
    content, torn = EDITED[edited]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert [row["a"] for row in read_objects(path)] == [1, 2]
    append_object(path, {"a": 3})
    assert [row["a"] for row in read_objects(path)] == [1, 2, 3]
    beside = [other.read_bytes() for other in tmp_path.iterdir() if other != path]
    assert beside == ([torn] if torn else [])


@pytest.mark.filterwarnings("ignore::measure.recording.jsonl.TornLineWarning")
def test_each_torn_line_is_kept(tmp_path):
    path, torn = tmp_path / "rows.jsonl", [b"{", b'{"a"']
    for piece in torn:
        with path.open("ab") as file:
            file.write(piece)
        append_object(path, {"a": 1})
    kept = sorted(other.read_bytes() for other in tmp_path.iterdir() if other != path)
    assert kept == torn and len(read_objects(path)) == 2


def test_what_is_no_line_of_ours_is_left_to_people(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('[{"a":1},{"a":2}]')  # as pandas' to_json writes them
    append_object(path, {"a": 3})
    with pytest.raises(ResultsError, match="line 1 is not a JSON object"):
        read_objects(path)
    assert path.read_text() == '[{"a":1},{"a":2}]\n{"a": 3}\n'


def test_half_written_row_is_taken_back(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    append_object(path, {"a": 1})

    def fails(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(ResultsError, match="No space left on device.*FUSEDLIB_RESULTS"):
        append_object(path, {"a": 2})
    assert path.read_text() == '{"a": 1}\n'


def _write_many(path: Path, writer: int) -> None:
    for i in range(40):
        append_object(path, {"writer": writer, "i": i, "samples": [writer] * 2000})


def test_two_processes_at_once_do_not_interleave(tmp_path):
    path = tmp_path / "rows.jsonl"
    workers = [multiprocessing.Process(target=_write_many, args=(path, w)) for w in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    rows = read_objects(path)
    assert len(rows) == 80
    for writer in (1, 2):
        assert [r["i"] for r in rows if r["writer"] == writer] == list(range(40))


# --- files that are rewritten --------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = write_whole(tmp_path / "copy.ipynb", "old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match=r"cannot write .*No space left.*Make room"):
        write_whole(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def _describe_often(tmp_path: Path) -> None:
    for number in range(10**9):
        recorder(tmp_path, **at(f"{number:040}")).append(CASE | {"process": number})


def test_a_recording_can_be_read_while_runs_begin_and_after_one_is_killed(tmp_path):
    own = recorder(tmp_path)
    own.append(CASE)
    for _ in range(5):
        run = multiprocessing.Process(target=_describe_often, args=(tmp_path,), daemon=True)
        run.start()
        for _ in range(100):
            assert results.Recording.read(own.path.parent).runs
        run.kill()
        run.join()
        recorder(tmp_path, **at("f" * 40)).append(CASE)
    assert results.Recording.read(own.path.parent).runs[-1]["commit"] == "f" * 40


def _on_a_full_disk(tmp_path: Path) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    with pytest.raises(ResultsError, match="File too large.*make room"):
        recorder(tmp_path, **at("b" * 40)).append(CASE)


def test_a_recording_outlives_a_disk_without_room_for_another_run(tmp_path):
    recorder(tmp_path, **at("a" * 40)).append(CASE)
    run = multiprocessing.Process(target=_on_a_full_disk, args=(tmp_path,), daemon=True)
    run.start()
    run.join(60)
    assert run.exitcode == 0
    [one] = results.recordings(tmp_path)
    assert one.commits == ["a" * 7]
    assert {path.name for path in one.folder.iterdir()} == {"01_x.jsonl", "machine.json"}


# --- one run at a time ---------------------------------------------------------------------------

CASES = [CASE | {"process": n} for n in range(4)]


def _sweep(tmp_path: Path, hold: Callable[[Path], object], fresh: bool = False) -> None:
    """Measure all cases, the second of which takes as long as `hold`."""

    def measure(case):
        began = time.time()
        if case["process"] == 1:
            hold(tmp_path)
        return {"began_s": began, "ended_s": time.time(), "pid": os.getpid()}

    with (tmp_path / f"{os.getpid()}.txt").open("w") as out, contextlib.redirect_stdout(out):
        recorder(tmp_path, fresh=fresh).sweep(CASES, measure)


def waiting(tmp_path: Path) -> list[str]:
    """What the runs say that have waited."""
    said = [path.read_text() for path in tmp_path.glob("*.txt")]
    return [text for text in said if "waits for" in text]


def until_another_waits(tmp_path: Path) -> None:
    wait_for(lambda: waiting(tmp_path), 30)


def started(*arguments, **options) -> multiprocessing.Process:
    process = multiprocessing.Process(target=_sweep, args=arguments, kwargs=options, daemon=True)
    process.start()
    return process


def test_of_two_runs_at_once_one_waits_and_measures_what_is_left(tmp_path):
    runs = [started(tmp_path, until_another_waits) for _ in range(2)]
    for run in runs:
        run.join(60)
    rows = results.read_rows(recorder(tmp_path).path)
    assert [row["process"] for row in rows] == [0, 1, 2, 3]
    [first] = {row["pid"] for row in rows}
    [told] = waiting(tmp_path)
    assert told.count("waits for") == 1 and f"process {first} on" in told


def test_two_runs_that_measure_all_anew_do_it_one_after_the_other(tmp_path):
    for run in [started(tmp_path, until_another_waits, fresh=True) for _ in range(2)]:
        run.join(60)
    rows = recorder(tmp_path).rows().sort_values("began_s")
    assert len(rows) == 2 * len(CASES) and rows["recording"].nunique() == 2
    assert (rows["began_s"].iloc[1:].to_numpy() >= rows["ended_s"].iloc[:-1].to_numpy()).all()


def test_who_waits_for_a_run_that_is_killed_goes_on_with_its_cases(tmp_path):
    killed = started(tmp_path, lambda _: time.sleep(600))
    path = recorder(tmp_path).path
    wait_for(path.exists, 60)
    other = started(tmp_path, lambda _: None)
    wait_for(lambda: waiting(tmp_path), 60)
    killed.kill()
    other.join(60)
    rows = results.read_rows(path)
    assert [row["process"] for row in rows] == [0, 1, 2, 3]
    assert [row["pid"] for row in rows] == [killed.pid, *[other.pid] * 3]


@pytest.fixture
def taken(tmp_path):
    """Another run has its turn on this machine."""
    folder = recorder(tmp_path).path.parents[1]
    folder.mkdir(parents=True)
    with (folder / results.LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_nobody_waits_who_has_nothing_to_measure(tmp_path, capsys):
    recorder(tmp_path).append(CASE)
    with (recorder(tmp_path).path.parents[1] / results.LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        recorder(tmp_path).sweep([CASE], lambda case: {})
    assert "1 unchanged rows kept" in capsys.readouterr().out


def test_nobody_waits_longer_than_its_time(tmp_path, taken, capsys):
    own = recorder(tmp_path, until=time.time() + 0.3)
    own.sweep([CASE], lambda case: {"median_ms": 1.0})
    assert "waits for another run" in capsys.readouterr().out
    assert not own.path.exists()


def test_what_a_measurement_starts_does_not_wait_for_it(tmp_path):
    def measure(case):
        inner = started(tmp_path, lambda _: None)
        inner.join(60)
        recorder(tmp_path, study="02_y").sweep([CASE], lambda case: {"median_ms": 1.0})
        return {"exitcode": inner.exitcode}

    recorder(tmp_path, study="03_z").sweep([CASE], measure)
    assert recorder(tmp_path, study="03_z").rows()["exitcode"].tolist() == [0]
    assert len(recorder(tmp_path).rows()) == len(CASES)
    assert len(recorder(tmp_path, study="02_y").rows()) == 1


def test_a_file_system_without_locks_is_told_and_measured_on(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    recorder(tmp_path).sweep(CASES, lambda case: {"median_ms": 1.0})
    assert len(recorder(tmp_path).rows()) == len(CASES)
    assert "cannot be locked" in capsys.readouterr().out


# --- recordings ----------------------------------------------------------------------------------


def at(commit: str, **facts):
    """What a recorder is given on a machine with other facts, with the code of this commit."""
    return {
        "machine": dataclasses.replace(machine.describe(), **facts),
        "commit": (commit, False),
    }


def test_a_run_goes_on_with_its_recording_and_a_fresh_one_begins_another(tmp_path):
    first = recorder(tmp_path, "full")
    first.append({"provider": "a"}, {"median_ms": 1.0})
    assert recorder(tmp_path, "full").recording == first.recording
    fresh = recorder(tmp_path, "full", fresh=True)
    assert fresh.recording == f"{first.recording}.2"
    fresh.append({"provider": "a"}, {"median_ms": 3.0})
    rows = recorder(tmp_path, "full").rows()
    assert rows["median_ms"].tolist() == [1.0, 3.0], "both recordings count"
    assert rows["recording"].tolist() == [first.recording, fresh.recording]


def test_another_study_goes_on_with_the_recording_that_has_it(tmp_path):
    for study in ("01_x", "02_y"):
        recorder(tmp_path, study=study).append(CASE)
    again = recorder(tmp_path, fresh=True)
    again.append(CASE)
    assert recorder(tmp_path).recording == again.recording
    assert recorder(tmp_path, study="02_y").missing([CASE]) == []
    assert recorder(tmp_path, study="03_z").recording == again.recording


def test_rows_of_other_code_count_and_a_second_run_at_another_commit_is_noted(tmp_path):
    recorder(tmp_path, **at("a" * 40)).append(CASE, {"median_ms": 1.0})
    second = recorder(tmp_path, **at("b" * 40))
    assert second.missing([CASE, CASE | {"process": 2}]) == [CASE | {"process": 2}]
    for number in (2, 3):
        second.append(CASE | {"process": number}, {"median_ms": 2.0})
    assert recorder(tmp_path).rows()["median_ms"].tolist() == [1.0, 2.0, 2.0]
    [one] = results.recordings(tmp_path)
    assert one.commits == ["a" * 7, "b" * 7] and len(one.runs) == 2


@pytest.mark.parametrize(
    "change",
    [{"host": "other"}, {"environment": "other"}, {"boot_id": "other"}, {"gpu_uuid": "other"}],
)
def test_a_recording_on_several_hosts_has_a_run_for_each(tmp_path, change):
    recorder(tmp_path, **at("a" * 40)).append(CASE)
    recorder(tmp_path, **at("a" * 40, **change)).append(CASE | {"process": 2})
    [one] = results.recordings(tmp_path)
    [name] = change
    assert [run[name] for run in one.runs] == [getattr(machine.describe(), name), "other"]


def test_a_recording_has_one_profile(tmp_path, monkeypatch):
    monkeypatch.setenv(results.RECORDING, "x")
    recorder(tmp_path, "quick").append(CASE)
    with pytest.raises(ResultsError, match="recording of the profile quick, not full"):
        recorder(tmp_path, "full").append(CASE)


def test_an_assembled_recording_takes_no_more_rows(tmp_path, monkeypatch):
    monkeypatch.setenv(results.RECORDING, results.ASSEMBLED)
    recorder(tmp_path).append(CASE)
    monkeypatch.delenv(results.RECORDING)
    assert recorder(tmp_path).recording != results.ASSEMBLED


def test_a_visitor_s_folder_ignores_itself_and_a_named_machine_s_does_not(tmp_path, monkeypatch):
    recorder(tmp_path).append(CASE)
    assert (tmp_path / machine.key() / ".gitignore").read_text() == "*\n"
    monkeypatch.setenv(machine.NAME, "my-gpu")
    recorder(tmp_path, **at("a" * 40, key="my-gpu")).append(CASE)
    assert not (tmp_path / "my-gpu" / ".gitignore").exists()
    committed = {one.machine: one.is_committed for one in results.recordings(tmp_path)}
    assert committed == {machine.key(): False, "my-gpu": True}


def test_the_leading_machine_has_most_experiments_then_most_cases_that_ran(tmp_path):
    for name, count in (("small", 1), ("large", 4)):
        for number in range(count):
            own = recorder(tmp_path, "full", **at("a" * 40, key=name, device_type="cuda"))
            own.append(CASE | {"process": number})
    lead = lambda: recorder(tmp_path).rows()["machine"].cat.categories[0]  # noqa: E731
    assert lead() == "large", "the one with most cases"
    for number in range(2, 9):
        own = recorder(tmp_path, "full", **at("a" * 40, key="small", device_type="cuda"))
        own.append(CASE | {"process": number}, status="oom", reason="too small")
    assert lead() == "large", "the one with most cases that ran"
    own.append(CASE | {"process": 9, "experiment": "another"})
    assert lead() == "small", "a machine that lacks an experiment would show nothing of it"


def test_a_row_says_what_it_took_and_time_over_ends_a_sweep(tmp_path, monkeypatch):

    own, cases = recorder(tmp_path), [CASE | {"process": n} for n in range(3)]
    own.until = 1e12
    clock = PlayedClock()
    monkeypatch.setattr(results, "time", clock)
    own.sweep(cases[:1], lambda case: clock.sleep(0.2) or {"median_ms": 1.0})
    [row] = results.read_rows(own.path)
    assert row["took_s"] == 0.2
    clock.sleep(2)
    own.until = 1
    own.sweep(cases, lambda case: {"median_ms": 1.0})
    assert len(results.read_rows(own.path)) == 1


def test_a_named_recording_measures_what_it_lacks_and_listed_cases_alone(tmp_path, monkeypatch):
    cases = [{"provider": "a"}, {"provider": "b"}]
    recorder(tmp_path, "full").append(cases[0], {"median_ms": 1.0})
    assert recorder(tmp_path, "full").missing(cases) == cases[1:]
    monkeypatch.setenv(results.RECORDING, "second day")
    assert recorder(tmp_path, "full").missing(cases) == cases
    again = recorder(tmp_path, "full")
    again.only = {results.case_id("01_x", cases[0])}
    assert again.missing(cases) == cases[:1] and again.path.parent.name == "second day"
    again.append(cases[0], {"median_ms": 2.0})
    before = again.path.read_text()
    again.append(cases[1], status="unavailable", reason="not asked for")
    assert again.path.read_text() == before
    again.append(cases[1], {"median_ms": 3.0})  # it took turns with the one that was
    assert again.path.read_text() != before


def test_the_full_profile_hides_toy_rows_and_this_machine_is_always_a_category(tmp_path):
    recorder(tmp_path, "quick").append({"provider": "a"}, {"median_ms": 9.0})
    assert recorder(tmp_path).rows()["median_ms"].tolist() == [9.0]
    recorder(tmp_path, "full").append({"provider": "a"}, {"median_ms": 1.0})
    rows = recorder(tmp_path).rows()
    assert rows["median_ms"].tolist() == [1.0]
    assert machine.key() in rows["machine"].cat.categories
    none = recorder(tmp_path / "none").rows()
    assert none.empty and none["machine"].cat.categories.tolist() == [machine.key()]
    assert {"own", "status", "machine"} <= set(none.columns)
