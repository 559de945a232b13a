"""Rows on disk: nothing recorded is lost, nothing is measured twice, and damage is told plainly."""

import dataclasses
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from fusedlib.bench import machine, results
from fusedlib.bench.jsonl import TornLineWarning, append_object, read_objects
from fusedlib.bench.results import Recorder, ResultsError

CASE = {"model": "small", "process": 1}


def recorder(tmp_path: Path, code: str = "c1", profile: str = "quick", **options):
    return Recorder("01_x", profile=profile, code=code, directory=tmp_path, **options)


def test_row_is_flat_and_complete(tmp_path):
    row = recorder(tmp_path).append(CASE, {"median_ms": 1.5, "samples_ms": [1.0, 2.0]})
    path = tmp_path / machine.key() / "01_x.jsonl"
    stored = json.loads(path.read_text())
    assert stored == row
    assert {"study", "profile", "machine", "environment", "commit", "code", "status"} <= set(stored)
    assert not any(isinstance(v, dict) for v in stored.values())


def test_second_run_measures_nothing_and_says_so(tmp_path):
    recorder(tmp_path).append(CASE, {"median_ms": 1.0})
    again = recorder(tmp_path)
    assert again.missing([CASE]) == []
    assert again.skipped == 1
    assert "1 unchanged rows kept (FRESH=1 measures them anew)" in again.summary()


@pytest.mark.parametrize(
    "change", [{"code": "c2"}, {"profile": "full"}, {"fresh": True}], ids=lambda c: next(iter(c))
)
def test_a_change_measures_again(tmp_path, change):
    recorder(tmp_path).append(CASE, {"median_ms": 1.0})
    assert recorder(tmp_path, **change).missing([CASE]) == [CASE]


def test_another_field_is_another_case(tmp_path):
    recorder(tmp_path).append(CASE, {"median_ms": 1.0})
    other = {**CASE, "process": 2}
    assert recorder(tmp_path).missing([other, CASE]) == [other]


def test_fresh_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FRESH", "1")
    assert Recorder("s", profile="quick", code="c", directory=tmp_path).fresh is True
    monkeypatch.setenv("FRESH", "0")
    assert Recorder("s", profile="quick", code="c", directory=tmp_path).fresh is False


@pytest.mark.parametrize("status", ["failed", "unavailable"])
def test_bad_luck_is_tried_again(tmp_path, status):
    recorder(tmp_path).append(CASE, status=status, reason="no")
    assert recorder(tmp_path).missing([CASE]) == [CASE]


def test_same_unavailability_is_recorded_once(tmp_path):
    for _ in range(3):
        recorder(tmp_path).append(CASE, status="unavailable", reason="no GPU")
    recorder(tmp_path).append(CASE, status="unavailable", reason="no Triton")
    reasons = [r["reason"] for r in read_objects(tmp_path / machine.key() / "01_x.jsonl")]
    assert reasons == ["no GPU", "no Triton"]


def test_of_a_case_that_a_recording_measured_twice_the_later_row_counts(tmp_path):
    for value in (1.0, 2.0):
        recorder(tmp_path).append(CASE, {"median_ms": value})
    assert recorder(tmp_path).rows()["median_ms"].tolist() == [2.0]
    recorder(tmp_path, profile="full").append(CASE, {"median_ms": 3.0})
    assert recorder(tmp_path).rows()["median_ms"].tolist() == [3.0], "the profile full counts"
    assert recorder(tmp_path).rows()["own"].all()


def test_no_rows_are_an_empty_frame_with_columns(tmp_path):
    frame = recorder(tmp_path).rows()
    assert frame.empty
    assert {"own", "status", "machine"} <= set(frame.columns)


def test_inf_and_nan_become_null_and_are_named(tmp_path):
    row = recorder(tmp_path).append(CASE, {"error": float("inf"), "fine": 1.0})
    assert row["error"] is None
    assert row["nonfinite"] == ["error=inf"]


@pytest.mark.parametrize(
    ("case", "figures", "message"),
    [
        ({"status": "x"}, {}, "head has it"),
        ({"shape": [1, 2]}, {}, "flat"),
        (CASE, {"model": 1.0}, "own fields"),
        (CASE, {"odd": {"a": 1}}, "flat"),
    ],
)
def test_rows_that_are_not_flat_or_clash_are_refused(tmp_path, case, figures, message):
    with pytest.raises(ValueError, match=message):
        recorder(tmp_path).append(case, figures)


def test_unknown_status_lists_the_known(tmp_path):
    with pytest.raises(ValueError, match="known are ok, wrong"):
        recorder(tmp_path).append(CASE, status="great")


def test_torn_last_line_is_dropped_with_a_warning_and_measured_again(tmp_path):
    recorder(tmp_path).append(CASE, {"median_ms": 1.0})
    path = tmp_path / machine.key() / "01_x.jsonl"
    with path.open("a") as file:
        file.write('{"schema": 1, "stu')
    with pytest.warns(TornLineWarning, match="cut off after 18 bytes"):
        assert len(results.read_rows(path)) == 1
    with pytest.warns(TornLineWarning):
        recorder(tmp_path).append({**CASE, "process": 2}, {"median_ms": 2.0})
    assert [r["median_ms"] for r in results.read_rows(path)] == [1.0, 2.0]


def test_whole_last_line_without_its_end_is_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}')
    append_object(path, {"a": 2})
    assert read_objects(path) == [{"a": 1}, {"a": 2}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_told_plainly(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(ResultsError, match="No space left on device.*FUSEDLIB_RESULTS"):
        append_object(path, {"a": 1})


def test_half_written_row_is_taken_back(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    append_object(path, {"a": 1})

    def fails(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(ResultsError):
        append_object(path, {"a": 2})
    assert path.read_text() == '{"a": 1}\n'


def test_unwritable_folder_is_told_plainly(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="cannot write to .*only what is missing is measured"):
        append_object(tmp_path / "file" / "rows.jsonl", {"a": 1})


def _write_many(path: Path, writer: int) -> None:
    for i in range(150):
        append_object(path, {"writer": writer, "i": i, "samples": [writer] * 2000})


def test_two_processes_at_once_do_not_interleave(tmp_path):
    path = tmp_path / "rows.jsonl"
    workers = [multiprocessing.Process(target=_write_many, args=(path, w)) for w in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    rows = read_objects(path)
    assert len(rows) == 300
    for writer in (1, 2):
        assert [r["i"] for r in rows if r["writer"] == writer] == list(range(150))


def test_import_brings_each_row_once_and_changes_none(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    recorder(source).append(CASE, {"median_ms": 1.0})
    first = results.import_rows(source, target)
    second = results.import_rows(source, target)
    assert first == "2 rows added from 2 files, 0 were there already"
    assert second == "0 rows added from 2 files, 2 were there already"
    name = f"{machine.key()}/01_x.jsonl"
    assert (source / name).read_text() == (target / name).read_text()


def test_rows_without_a_name_are_filed_under_a_machine_with_their_environment(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    recorder(source).append(CASE, {"median_ms": 1.0})
    with pytest.raises(ResultsError, match="'my-gpu' has none of"):
        results.import_rows(source, target, "my-gpu")
    assert not target.exists()
    named = dataclasses.replace(machine.describe(), key="my-gpu")
    recorder(target, machine=named).append(CASE, {"median_ms": 2.0})
    results.import_rows(source, target, "my-gpu")
    rows = results.read_rows(target / "my-gpu" / "01_x.jsonl")
    assert [(r["machine"], r["median_ms"]) for r in rows] == [("my-gpu", 2.0), ("my-gpu", 1.0)]
    again = results.import_rows(source, target, "my-gpu")
    assert again == "0 rows added from 2 files, 2 were there already"


def test_import_of_a_damaged_folder_writes_nothing(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    recorder(source).append(CASE, {"median_ms": 1.0})
    bad = source / "other" / "01_x.jsonl"
    bad.parent.mkdir()
    bad.write_text("junk\n{}\n")
    with pytest.raises(ResultsError, match="line 1"):
        results.import_rows(source, target)
    assert not target.exists()
    with pytest.raises(ResultsError, match="holds no <machine>"):
        results.import_rows(tmp_path / "empty", target)


def test_machines_seen_once_a_change(tmp_path):
    for i in range(3):
        recorder(tmp_path).append({**CASE, "process": i})
    seen = results.machines_seen(tmp_path)
    assert len(seen) == 1
    assert seen["machine"].tolist() == [machine.key()]


# --- recordings ----------------------------------------------------------------------------------


def coded(tmp_path, **options):
    """A recorder whose fingerprints follow the provider."""
    from fusedlib.bench.code import Code

    made = Code((results,), (machine,), lambda name: f"fp-{name}")
    options = {"profile": "full", "directory": tmp_path} | options
    return Recorder("01_x", code=made, **options)


def test_a_run_goes_on_with_its_recording_and_a_fresh_one_begins_another(tmp_path):
    first = coded(tmp_path)
    first.append({"provider": "a"}, {"median_ms": 1.0})
    assert coded(tmp_path).recording == first.recording
    fresh = coded(tmp_path, fresh=True)
    assert fresh.recording == f"{first.recording}.2"
    fresh.append({"provider": "a"}, {"median_ms": 3.0})
    rows = coded(tmp_path).rows()
    assert rows["median_ms"].tolist() == [1.0, 3.0], "both recordings count"
    assert rows["recording"].tolist() == [first.recording, fresh.recording]


def test_a_named_recording_measures_what_it_lacks_and_listed_cases_alone(tmp_path, monkeypatch):
    cases = [{"provider": "a"}, {"provider": "b"}]
    coded(tmp_path).append(cases[0], {"median_ms": 1.0})
    assert coded(tmp_path).missing(cases) == cases[1:]
    monkeypatch.setenv(results.RECORDING, "second day")
    assert coded(tmp_path).missing(cases) == cases
    listed = tmp_path / "cases.txt"
    listed.write_text(results.case_id("01_x", cases[0]))
    monkeypatch.setenv(results.CASES, str(listed))
    again = coded(tmp_path)
    assert again.missing(cases) == cases[:1]
    assert again.append(cases[0], {"median_ms": 2.0})["recording"] == "second day"
    before = again.path.read_text()
    again.append(cases[1], status="unavailable", reason="not asked for")
    assert again.path.read_text() == before
    again.append(cases[1], {"median_ms": 3.0})  # it took turns with the one that was
    assert again.path.read_text() != before


def test_a_plan_lists_what_would_be_measured_and_leaves_it(tmp_path, monkeypatch):
    cases = [{"provider": "a"}, {"provider": "b"}]
    coded(tmp_path).append(cases[0], {"median_ms": 1.0})
    plan = tmp_path / "plan"
    monkeypatch.setenv(results.PLAN, str(plan))
    assert coded(tmp_path).missing(cases) == []
    line = f'{results.case_id("01_x", cases[1])} 01_x {{"provider": "b"}}\n'
    assert plan.read_text() == line
    for case in cases:  # as a race does with what this machine lacks
        coded(tmp_path).append(case, status="unavailable", reason="no GPU")
    assert plan.read_text() == line + line
    monkeypatch.delenv(results.PLAN)
    monkeypatch.setenv(results.CASES, str(plan))
    assert coded(tmp_path).missing([*cases, {"provider": "c"}]) == cases[1:]


def test_rows_of_changed_code_do_not_count_until_they_are_carried(tmp_path):
    old = Recorder("01_x", profile="full", code="former", directory=tmp_path)
    old.append({"provider": "a", "dtype": "bf16"}, {"median_ms": 1.0})
    old.append({"provider": "a", "dtype": "fp32"}, {"median_ms": 2.0})
    assert coded(tmp_path).rows().empty
    harness, problem, own = coded(tmp_path).code_of({"provider": "a"}).split("-", 2)
    (tmp_path / "carried.toml").write_text(
        f"""[[carried]]
study = "01_x"
old = "former"
harness = "{harness}"
problem = "{problem}"
rivals = {{ a = "{own}" }}
where = {{ dtype = ["bf16"] }}
why = "the same lines in another file"
"""
    )
    rows = coded(tmp_path).rows()
    assert rows["median_ms"].tolist() == [1.0]
    assert rows["recording"].str.startswith("20").all(), "day and commit of what had no recording"
    assert coded(tmp_path).missing([{"provider": "a", "dtype": "bf16"}]) == []


@pytest.mark.parametrize("old", ["1-2", ["0-2", "1-2"]])
def test_rivals_that_a_carry_does_not_name_keep_their_part(old):
    entry = {"study": "x", "old": old, "harness": "1", "problem": "3", "rivals": {"b": "6"}}
    carried = results.Carried((entry | {"why": "moved"},))
    code_of = lambda who, code: carried.code_of({"study": "x", "provider": who, "code": code})  # noqa: E731
    assert code_of("a", "1-2-4") == "1-3-4" and code_of("b", "1-2-5") == "1-3-6"
    assert code_of("a", "1-7-4") == "1-7-4"


def test_a_rival_that_is_the_same_is_so_in_every_study():
    entry = {"study": "x", "old": "1-2", "harness": "1", "problem": "3", "why": "moved"}
    same = {"rivals": {"4": "5", "8": "9"}}, {"rivals": {"5": "6"}, "where": {"dtype": ["bf16"]}}
    carried = results.Carried((entry,), same)
    code_of = lambda code, **row: carried.code_of({"code": code, "provider": "a", **row})  # noqa: E731
    assert code_of("1-2-4", study="x") == "1-3-5" and code_of("7-7-4.8", study="y") == "7-7-5.9"
    assert code_of("1-2-4", study="x", dtype="bf16") == "1-3-6"
    assert code_of("7-7-7") == "7-7-7" and code_of("former") == "former"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[carried]]\nstudy = 'x'\n", "carried 1 lacks harness, old, problem, why"),
        ("[[same]]\nwhy = 'x'\n", "same 1 lacks rivals"),
        ("[[", "TOML"),
    ],
)
def test_a_damaged_list_of_carried_rows_is_told(tmp_path, text, message):
    (tmp_path / "carried.toml").write_text(text)
    with pytest.raises(ResultsError, match=message):
        coded(tmp_path)


def test_a_new_rival_s_rows_leave_the_others_current(tmp_path):
    coded(tmp_path).append({"provider": "a"}, {"median_ms": 1.0})
    coded(tmp_path).append({"provider": "new"}, {"median_ms": 2.0})
    assert coded(tmp_path).missing([{"provider": "a"}, {"provider": "new"}]) == []
    assert set(coded(tmp_path).rows()["provider"]) == {"a", "new"}


def test_the_full_profile_hides_toy_rows_and_this_machine_is_always_a_category(tmp_path):
    coded(tmp_path, profile="quick").append({"provider": "a"}, {"median_ms": 9.0})
    assert coded(tmp_path).rows()["median_ms"].tolist() == [9.0]
    coded(tmp_path).append({"provider": "a"}, {"median_ms": 1.0})
    rows = coded(tmp_path).rows()
    assert rows["median_ms"].tolist() == [1.0]
    assert machine.key() in rows["machine"].cat.categories
    assert coded(tmp_path / "none").rows()["machine"].cat.categories.tolist() == [machine.key()]
