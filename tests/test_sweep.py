"""A sweep gives every case a row and loses none."""

import json

import pytest
import torch

from fusedlib.bench import machine
from fusedlib.bench.attempt import Unavailable, Wrong
from fusedlib.bench.sweep import sweep
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
    sweep(recorder, cases, how)
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


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ResultsError])
def test_ctrl_c_and_a_full_disk_end_the_sweep_and_keep_the_rows(tmp_path, kind):
    def stops(case):
        if case["case_no"] == 2:
            raise kind("stop")
        return {"median_ms": 1.0}

    with pytest.raises(kind):
        run(tmp_path, how=stops)
    assert recorder_at(tmp_path).rows()["case_no"].tolist() == [0, 1]


def test_rows_on_nvidia_carry_the_state_before_and_after(tmp_path, monkeypatch):
    clocks = iter([345, 1980])
    state = lambda when: {f"sm_clock_{when}_mhz": next(clocks)}  # noqa: E731
    monkeypatch.setattr(machine, "conditions", state)
    run(tmp_path, CASES[:1])
    row = recorder_at(tmp_path).rows().iloc[0]
    assert (row["sm_clock_before_mhz"], row["sm_clock_after_mhz"]) == (345, 1980)


def test_the_runner_is_told_notebook_case_and_count(tmp_path, monkeypatch):
    progress_file = tmp_path / "progress"
    monkeypatch.setenv("FUSEDLIB_PROGRESS", str(progress_file))
    run(tmp_path, CASES[:2])
    lines = [json.loads(line) for line in progress_file.read_text().splitlines()]
    assert lines[0] == {"study": "01_x", "case": "case_no 0", "done": 0, "total": 2}
    assert lines[-1]["done"] == 2
