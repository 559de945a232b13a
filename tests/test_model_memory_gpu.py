"""A model's memory on a GPU: the history meets CUDA's counters, one OOM leaves the next whole."""

import re

import pytest

from outcomes import outcome
from study import model_memory
from study.model_memory import Plans, watched
from study.models.activations import PRECISIONS

pytestmark = pytest.mark.gpu


def case(mode, precision, attention="plain", model="small", context=128):
    shared = model_memory.setting(model, context, attention, precision, "cuda")
    return {"experiment": "pass", "mode": mode, **shared}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_a_forward_keeps_what_the_formula_says(attention, precision):
    one = case("forward", precision, attention)
    actual, counted = watched(one), model_memory.moments(one)["forward"]
    kept = counted["activations"] + counted["casts"]
    assert actual["saved_whole_bytes"] == pytest.approx(kept, rel=1e-5)


@pytest.mark.parametrize("mode", model_memory.MODES)
def test_the_history_s_peak_is_the_allocator_s(mode):
    actual = watched(case(mode, "bf16 autocast"))
    parts = [n for n in actual if re.fullmatch(r"peak_\w+_mib", n) and "backward" not in n]
    events = sum(actual[name] for name in parts)
    assert events == pytest.approx(actual["requested_peak_mib"], rel=1e-6)
    assert actual["peak_mib"] >= actual["requested_peak_mib"]


def test_a_plan_that_needs_checkpoints_is_measured_without_its_rival(limit_memory):
    sizes = {"segments": [1], "nested": [], "first": [], "contexts": []}
    none, plan = model_memory.cases(device="cuda", plan_model="small", plan_context=512, **sizes)
    both = Plans()
    limit_memory(3)
    assert outcome(both, none)[1] == "oom"
    figures, status, reason = outcome(both, plan)
    assert status == "ok", reason
    assert "ratio" not in figures and figures["median_ms"] > 0
