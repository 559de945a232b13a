"""Study 07's sweep: statuses, failures that take nobody along, resume."""

import math
import warnings

import pytest
import torch

from fusedlib.bench import results
from fusedlib.bench.attention import cases, measure, truth, ways
from fusedlib.bench.attention.problem import AttentionProblem, draw
from fusedlib.bench.providers import Workload

ON_CPU = ("plain", "math", "flash")


def recorded(tmp_path, **more):
    return results.Recorder(cases.STUDY, "quick", "code", fresh=False, directory=tmp_path, **more)


def asked(*names, contexts=(24, 40)):
    return cases.grid(
        "course", contexts, [8], ["float32"], names, batch_size=2, repetitions=2, device="cpu"
    )


def swept(tmp_path, *names, contexts=(24, 40)):
    measure.sweep(recorded(tmp_path), asked(*names, contexts=contexts))
    rows = results.load(cases.STUDY, directory=tmp_path)
    return rows.set_index(["context_length", "provider"])


def added(monkeypatch, name, build, fused=True):
    monkeypatch.setitem(ways.WAYS, name, ways.Way(name, build, name, fused, False))


def test_a_sweep_measures_what_runs_and_says_what_does_not(tmp_path):
    rows = swept(tmp_path, *ON_CPU, "efficient", "flex")
    assert len(rows) == 10
    good = rows[rows["status"] == "ok"]
    assert set(good.index.get_level_values(1)) == set(ON_CPU)
    for column in ("median_ms", "forward_median_ms", "backward_median_ms", "kept_mib", "peak_mib"):
        assert (good[column] > 0).all(), column
    assert (good["speedup"].xs("plain", level=1) == 1).all()
    assert good["session"].groupby(level=0).nunique().eq(1).all()
    reasons = rows[rows["status"] == "unavailable"]["reason"]
    assert reasons.xs("efficient", level=1).str.contains("No viable backend").all()
    assert reasons.xs("flex", level=1).str.contains("CUDA only").all()
    again = recorded(tmp_path)
    measure.sweep(again, asked(*ON_CPU, "efficient", "flex"))
    assert again.measured == 0


def test_a_device_that_is_not_there_is_unavailable(tmp_path):
    lacking = [case | {"device": "xpu"} for case in asked("plain", contexts=(24,))]
    measure.sweep(recorded(tmp_path), lacking)
    [row] = results.load(cases.STUDY, directory=tmp_path).to_dict("records")
    assert (row["status"], row["reason"]) == ("unavailable", "this machine has no XPU device")


def test_what_forgets_the_mask_is_wrong_and_gets_no_time(tmp_path, monkeypatch):
    def unmasked(operands):
        leaves = operands.leaves()
        attend = torch.nn.functional.scaled_dot_product_attention
        return Workload(lambda: attend(*leaves.values()), leaves)

    added(monkeypatch, "unmasked", unmasked)
    rows = swept(tmp_path, "plain", "unmasked", contexts=(24,))
    row = rows.loc[(24, "unmasked")]
    assert row["status"] == "wrong" and "y: norm error" in row["reason"]
    assert math.isnan(row["median_ms"]) and row["y_error"] > 0.1
    assert rows.loc[(24, "plain"), "status"] == "ok"


def test_running_out_of_memory_is_a_status_and_the_next_shape_is_measured(tmp_path, monkeypatch):
    def greedy(operands):
        if operands.query.shape[-2] == 24:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        return ways.get("plain").build(operands)

    added(monkeypatch, "greedy", greedy)
    rows = swept(tmp_path, "plain", "greedy")
    assert rows.loc[(24, "greedy"), "status"] == "oom"
    assert "Tried to allocate" in rows.loc[(24, "greedy"), "reason"]
    others = rows.drop((24, "greedy"))
    assert (others["status"] == "ok").all() and len(others) == 3


def test_when_timing_does_not_fit_whoever_holds_most_goes(tmp_path, monkeypatch):
    real = measure._Clock.run

    def crowded(clock):
        if "math" in clock.ready:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(clock)

    monkeypatch.setattr(measure._Clock, "run", crowded)
    rows = swept(tmp_path, *ON_CPU, contexts=(40,)).loc[40]
    assert dict(rows["status"]) == {"plain": "ok", "math": "oom", "flash": "ok"}
    assert rows.loc["math", "kept_mib"] > 0 and math.isnan(rows.loc["math", "median_ms"])


def test_what_is_counted_far_above_the_memory_is_not_tried(tmp_path, monkeypatch):
    small = measure.machine.describe().__class__(
        **measure.machine.describe().as_dict() | {"memory_gib": 1e-6}
    )
    monkeypatch.setattr(measure.machine, "describe", lambda: small)
    rows = swept(tmp_path, *ON_CPU, contexts=(40,))
    assert dict(rows.loc[40, "status"]) == {
        "plain": "oom (predicted)", "math": "oom (predicted)", "flash": "ok"
    }  # fmt: skip
    assert rows.loc[(40, "plain"), "reason"].startswith("not tried: ")


def test_who_fails_under_the_clock_takes_nobody_along(tmp_path, monkeypatch):
    def brittle(operands):
        work, calls = ways.get("plain").build(operands), []

        def forward():
            calls.append(1)
            if len(calls) > 5:
                raise RuntimeError("device-side assert")
            return work.forward()

        return Workload(forward, work.leaves)

    added(monkeypatch, "brittle", brittle)
    rows = swept(tmp_path, "plain", "brittle", "flash", contexts=(24,)).loc[24]
    assert dict(rows["status"]) == {"plain": "ok", "brittle": "failed", "flash": "ok"}
    assert "device-side assert" in rows.loc["brittle", "reason"]


def test_a_probe_that_fails_leaves_it_to_the_case(tmp_path, monkeypatch):
    def broken(operands):
        raise RuntimeError("no such kernel image")

    added(monkeypatch, "broken", broken)
    measure._refusal.cache_clear()
    rows = swept(tmp_path, "plain", "broken", contexts=(24,)).loc[24]
    assert dict(rows["status"]) == {"plain": "ok", "broken": "failed"}


@pytest.mark.parametrize(("slow_ms", "rounds"), [(1e9, 7), (0.0, 5)])
def test_slow_rounds_are_fewer(slow_ms, rounds, monkeypatch):
    monkeypatch.setattr(measure, "SLOW_MS", slow_ms)
    monkeypatch.setattr(measure._Clock, "_calls", lambda clock, direction: (1, 1.0))
    operands = draw(AttentionProblem(16, 8, 1, "float32"), "cpu")
    work = ways.get("plain").build(operands)
    found = measure._Clock({"plain": work}, operands.dout, 7).run()["plain"]
    assert found["n"] == found["forward_n"] == rounds


def test_a_stopped_run_keeps_its_rows_and_measures_the_rest(tmp_path, monkeypatch):
    real, seen = truth.truth, []

    def stopped(operands):
        if seen:
            raise KeyboardInterrupt
        seen.append(True)
        return real(operands)

    monkeypatch.setattr(truth, "truth", stopped)
    with pytest.raises(KeyboardInterrupt):
        measure.sweep(recorded(tmp_path), asked("plain", "flash"))
    kept = results.load(cases.STUDY, directory=tmp_path)
    assert list(kept["context_length"]) == [24, 24]
    monkeypatch.setattr(truth, "truth", real)
    again = recorded(tmp_path)
    measure.sweep(again, asked("plain", "flash"))
    assert again.measured == 2


def test_a_refusal_keeps_the_reasons_of_the_backend_asked_for():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for text in (
            "Flash attention kernel not used because: (Triggered internally at /a/b.cpp:1.)",
            "Expected query, key and value to all be of dtype: {Half, BFloat16}. Got float "
            "instead. (Triggered internally at /a/b.h:2.)",
            "cuDNN attention has been runtime disabled. (Triggered internally at /a/c.cpp:3.)",
        ):
            warnings.warn(text, stacklevel=1)
    error = RuntimeError("No available kernel. Aborting execution.")
    said = ways._refusal(error, told)
    assert said.startswith("Expected query") and said.endswith("Got float instead.")
    assert ways._refusal(error, []) == "No available kernel. Aborting execution."
