"""A sweep gives every case a row; one that is recorded measures what is missing and loses none."""

import pytest
import torch

from fusedlib.bench.attempt import Unavailable, Wrong
from measure.recording import results
from measure.recording.results import Recorder, ResultsError

CASES = [{"case_no": i} for i in range(6)]


def measure(case):
    match case["case_no"]:
        case 1:
            raise Unavailable("no such package")
        case 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
        case 3:
            raise ZeroDivisionError("by nothing")
        case 4:
            raise Wrong("y is off", {"y_error": 1.0})
        case _:
            return {"median_ms": 1.0}


def recorder_at(tmp_path, **options):
    return Recorder("01_x", profile="quick", directory=tmp_path, **options)


def run(tmp_path, cases=CASES, how=measure, **options):
    recorder = recorder_at(tmp_path, **options)
    recorder.sweep(cases, how)
    return recorder


def test_every_outcome_is_a_row_with_its_reason(tmp_path, capsys):
    run(tmp_path)
    rows = recorder_at(tmp_path).rows().set_index("case_no")
    statuses = rows["status"].to_dict()
    assert statuses == {0: "ok", 1: "unavailable", 2: "oom", 3: "failed", 4: "wrong", 5: "ok"}
    assert rows["reason"][1] == "no such package"
    assert rows["reason"][2] == "CUDA out of memory. Tried to allocate 9 GiB"
    assert rows["reason"][3].startswith("ZeroDivisionError: by nothing (test_sweep.py:")
    assert "6 rows written" in capsys.readouterr().out
    assert rows["median_ms"][4] != rows["median_ms"][4], "a wrong provider has no time"


def test_the_next_run_measures_only_what_is_missing(tmp_path, capsys):
    run(tmp_path, CASES[:1])
    seen = []

    def watched(case):
        seen.append(case["case_no"])
        return measure(case)

    run(tmp_path, how=watched)
    assert seen == [1, 2, 3, 4, 5]
    seen.clear()
    run(tmp_path, how=watched)
    assert seen == [1, 3], "only bad luck is tried again"
    assert "4 unchanged rows kept" in capsys.readouterr().out


def test_ctrl_c_ends_the_sweep_and_keeps_the_rows(tmp_path):
    def stops(case):
        if case["case_no"] == 2:
            raise KeyboardInterrupt
        return {"median_ms": 1.0}

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, how=stops)
    assert recorder_at(tmp_path).rows()["case_no"].tolist() == [0, 1]


def test_a_full_disk_ends_the_sweep_and_keeps_the_rows(tmp_path, monkeypatch):
    seen, append = [], results.append_object

    def full(path, row):
        if row["case_no"] == 2:
            raise ResultsError("no space")
        append(path, row)

    monkeypatch.setattr(results, "append_object", full)
    with pytest.raises(ResultsError):
        run(tmp_path, how=lambda case: seen.append(case["case_no"]) or {"median_ms": 1.0})
    assert recorder_at(tmp_path).rows()["case_no"].tolist() == [0, 1]
    assert seen == [0, 1, 2], "no further case begins"
