"""Formulas of a model's memory against what autograd and a CPU's allocator hold, to the byte."""

import pytest
import torch

from outcomes import outcome
from study import model_memory
from study.model_memory import Plans, Program, watched
from study.models import activations, checkpointed, transformer
from study.models.activations import PRECISIONS
from study.models.checkpointed import CheckpointPlan
from study.trainers import gradients_of

MIB = 2**20
LOSS = 4  # bytes of the scalar that a pass gives back
SCALE = 8  # of the number that plain attention's scores are scaled by, in each block
PLANS = [
    CheckpointPlan("none"), CheckpointPlan("first", 3), CheckpointPlan("segments", 1),
    CheckpointPlan("segments", 3), CheckpointPlan("nested", 2), CheckpointPlan("nested", 4),
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def program(precision, attention="plain", model="nano", context=24):
    shared = model_memory.setting(model, context, attention, precision, "cpu", batch_size=3)
    return Program.of(shared, "forward+backward")


def case(mode, precision, **options):
    shared = model_memory.setting("nano", 24, "plain", precision, "cpu")
    return {"experiment": "pass", "mode": mode, **shared, **options}


def plans(segments, nested, first):
    sizes = {"segments": segments, "nested": nested, "first": first}
    found = model_memory.cases(
        device="cpu", contexts=[], plan_model="nano", plan_context=8, **sizes
    )
    assert {one["experiment"] for one in found} == {"checkpoint"}
    return found


# --- counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_what_is_kept_is_the_formula(attention, precision):
    one = program(precision, attention)
    counted = activations.saved_bytes(one.shape, precision, "cpu", 3)
    casts = activations.cast_weights(one.shape, precision)
    assert model_memory.saved_bytes(one) == counted + casts


def test_a_block_by_hand():
    shape = transformer.TransformerConfig("hand", 8, 32, 1, 2, 100, context_length=5)
    tokens, wide = 2 * 5, 4
    norm = 2 * (2 * tokens * 8 + tokens) * wide
    mlp = (tokens * 8 + 4 * tokens * 32) * wide
    plain = (5 * tokens * 8 + 2 * 2 * 5 * 5) * wide + 5 * 5
    attentive = transformer.replace(shape, attention="plain")
    assert activations.block_bytes(attentive, "fp32", "cuda", 2) == norm + mlp + plain
    assert activations.tensor_bytes(shape, "bf16", 2) == 2 * 5 * 8 * 2


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mode", model_memory.MODES)
def test_a_watched_pass_peaks_where_the_formula_says(mode, precision):
    one = case(mode, precision)
    actual, counted = watched(one), model_memory.moments(one)["forward"]
    scales = 0 if mode == model_memory.MODES[0] else SCALE * model_memory.shape_of(one).num_layers
    assert actual["peak_weights_mib"] * MIB == actual["weights_bytes"] == counted["weights"]
    assert actual["peak_optimizer_mib"] * MIB == counted.get("optimizer", 0)
    assert actual["state_bytes"] == counted.get("optimizer", 0)
    if mode == "forward":
        kept = counted["activations"] + counted["casts"]
        assert actual["saved_whole_bytes"] == kept
        assert actual["peak_activations_mib"] * MIB == kept + LOSS + scales
    more = actual["peak_other_mib"] * MIB + LOSS + scales
    over = (actual["peak_mib"] - model_memory.counted_mib(one)) * MIB
    assert over == pytest.approx(more, abs=4)
    assert actual.get("peak_in_backward_mib", 0.0) <= actual["peak_mib"]


def test_what_cannot_fit_is_predicted_and_not_tried():
    huge = case("step", "fp32", model="2.7b", context_length=10**6)
    figures, status, reason = outcome(watched, huge)
    assert (figures, status) == ({}, "oom (predicted)") and " GiB counted, more than" in reason
    model_memory.check_size(case("step", "fp32"))


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16 autocast"])
def test_checkpoints_leave_every_gradient_as_it_is(precision):
    one = program(precision, model="micro", context=16)
    true = []
    for plan in PLANS:
        one.model.zero_grad(set_to_none=True)
        one.run(plan)
        true = true or [g.clone() for g in gradients_of(one)]
        actual = gradients_of(one)
        assert all(torch.equal(f, t) for f, t in zip(actual, true, strict=True)), plan
        assert model_memory.gradient_error(actual, true) == 0.0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_a_plan_holds_is_the_formula(plan, precision):
    # With fewer tokens than features the output layer's gradient would be the peak.
    one = program(precision, model="micro", context=64)
    held = checkpointed.held_bytes(one.shape, precision, "cpu", plan, 3)
    one.run(plan)
    actual = model_memory.held_by(one, plan)
    least = max(held.values()) + LOSS
    assert least <= actual["peak_mib"] * MIB <= least + one.shape.num_layers * SCALE


def test_a_plan_is_timed_beside_no_plan():
    rows = model_memory.measure(plans([1], [2], [1]))
    assert {row.status for row in rows} == {"ok"}
    assert {row.figures["gradient_error"] for row in rows} == {0.0}
    assert {row.case["provider"]: "ratio" in row.figures for row in rows} == {
        "none 0": False, "segments 1": True, "nested 2": True, "first 1": True,
    }  # fmt: skip


@pytest.mark.parametrize("factor", [1.001, 0.0, float("nan")])
def test_a_plan_with_another_gradient_gets_no_time(monkeypatch, factor):
    real = checkpointed._again

    def broken(function, x):
        y = real(function, x)
        y.register_hook(lambda g: g * factor)
        return y

    measure, (none, segments) = Plans(), plans([2], [], [])
    assert outcome(measure, none)[1] == "ok"
    monkeypatch.setattr(checkpointed, "_again", broken)
    figures, status, reason = outcome(measure, segments)
    assert status == "wrong" and "gradients" in reason
    assert "median_ms" not in figures and "peak_mib" in figures
