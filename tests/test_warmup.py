"""First steps: what is derived of series and of published means, and how a process is measured."""

import numpy as np
import pandas as pd
import pytest

from study import first_step, warmup
from study.warmup import after_warmup, derive

SERIES = [32.0, 4.0, *[2.0] * 18]
LINE = {"experiment": "steps", "direction": "forward+backward", "isolation": "fresh"}
PROBLEM = {
    "device": "cpu", "precision": "fp32", "batch_size": 2, "context_length": 16,
    "attention": "plain",
}  # fmt: skip


def rows(*series):
    lines = [LINE | {"samples_ms": s} for s in series]
    return derive(pd.DataFrame(lines))


def test_a_first_step_stands_above_the_late_ones():
    [row] = rows(SERIES).to_dict("records")
    assert (row["late_ms"], row["extra_ms"], row["added_ms"]) == (2.0, 30.0, 3.0)
    assert row["over_late"] == pytest.approx((32 + 4 + 8 * 2) / 10 / 2)


def test_each_number_of_warm_up_steps_leaves_ten():
    left = after_warmup(rows(SERIES), 0, 1, 2).set_index("warmup_steps")
    assert left["mean_ms"].to_dict() == pytest.approx({0: 5.2, 1: 2.2, 2: 2.0})
    assert left["std_ms"][1] == pytest.approx(np.std([4.0, *[2.0] * 9], ddof=1))
    assert after_warmup(rows(SERIES), 11).empty, "nine steps are no ten"


def test_stages_cover_the_way_to_a_settled_step():
    actual = first_step.stages(model="nano", direction="step", **PROBLEM)
    assert set(actual) == set(warmup.STAGES)
    assert min(actual.values()) > 0


def series_of(isolation):
    listed = warmup.cases(device="cpu")
    return [case for case in listed if case.get("isolation") == isolation]


def test_a_shared_process_runs_its_sizes_once_together():
    nano, micro = (warmup.measure([case])[0].figures for case in series_of("shared"))
    assert (nano["position"], micro["position"]) == (1, 2)
    assert nano["num_parameters"] < micro["num_parameters"]
    assert len(nano["samples_ms"]) == warmup.STEPS


@pytest.mark.parametrize(("isolation", "processes"), [("fresh", 2), ("shared", 1)])
def test_a_size_that_does_not_fit_is_a_row_out_of_memory(monkeypatch, isolation, processes):
    runs = {"nano": {"samples_ms": [1.0]}, "micro": {"oom": "CUDA out of memory."}}
    started = []

    def run(target, call, timeout_s):
        started.append(call["models"])
        return [runs[m] for m in call["models"]]

    monkeypatch.setattr(warmup.fresh, "run", run)
    for again in (1, 2):  # a row is of a process that was begun for it
        actual = {c["model"]: warmup.measure([c])[0] for c in series_of(isolation)}
        assert {name: a.status for name, a in actual.items()} == {"nano": "ok", "micro": "oom"}
        assert actual["micro"].reason == "CUDA out of memory."
        assert len(started) == again * processes, "each fresh case has one of its own"
