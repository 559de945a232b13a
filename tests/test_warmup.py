"""First steps: what is derived of series and of published means, and how a process is measured."""

import pytest

from study import warmup


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
