"""Study 09 on a GPU: the history meets CUDA's counters, one OOM leaves the next case whole."""

import pytest

from measure import model_memory
from models.activations import PRECISIONS
from outcomes import outcome

pytestmark = pytest.mark.gpu
MIB = 2**20


def case(mode, precision, attention="plain", model="small", context=128):
    shared = model_memory.setting(
        model, context, attention=attention, precision=precision, device="cuda"
    )
    return {"experiment": "pass", "mode": mode, **shared}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_a_forward_keeps_what_the_formula_says(attention, precision):
    one = case("forward", precision, attention)
    actual, counted = model_memory.Measure()(one), model_memory.moments(one)["forward"]
    kept = sum(n for name, n in actual.items() if name.startswith("saved_"))
    assert kept == pytest.approx(counted["activations"] + counted["casts"], rel=1e-5)
    assert actual["forward_casts_mib"] * MIB == counted["casts"]
    assert actual["forward_activations_mib"] * MIB == pytest.approx(
        counted["activations"], rel=1e-3
    )


@pytest.mark.parametrize("mode", model_memory.MODES)
def test_the_history_s_peak_is_the_allocator_s(mode):
    actual = model_memory.Measure()(case(mode, "bf16 autocast"))
    assert actual["events_peak_mib"] == pytest.approx(actual["requested_peak_mib"], rel=1e-6)
    assert actual["peak_mib"] >= actual["requested_peak_mib"]


def test_running_out_of_memory_leaves_the_next_case_whole(limit_memory):
    one, large = case("step", "fp32"), case("step", "fp32", model="medium", context=512)
    both = model_memory.Measure()
    usual = both(one)["events_peak_mib"]
    limit_memory(4)
    figures, status, reason = outcome(both, large)
    assert (figures, status) == ({}, "oom") and "out of memory" in reason
    assert both(one)["events_peak_mib"] == usual


def test_a_plan_that_needs_checkpoints_is_measured_without_its_rival(limit_memory):
    shared = model_memory.setting("small", 512, attention="plain", precision="fp32", device="cuda")
    none, plan = model_memory.checkpoints(shared, [1], [], [], 2)
    both = model_memory.Measure()
    limit_memory(3)
    assert outcome(both, none)[1] == "oom"
    figures, status, reason = outcome(both, plan)
    assert status == "ok", reason
    assert "ratio" not in figures and figures["median_ms"] > 0
