"""Study 09's formulas against what autograd and the allocator of a CPU really hold, to the byte."""

import gc
import weakref
from collections import Counter

import pytest
import torch

from fusedlib.bench import results
from fusedlib.bench.model_memory import cases, measure, saved
from fusedlib.bench.model_memory.program import Program
from fusedlib.bench.results import Recorder
from fusedlib.bench.sweep import outcome, sweep
from fusedlib.models import activations, checkpointed, transformer
from fusedlib.models.activations import PRECISIONS
from fusedlib.models.checkpointed import Plan

MIB = 2**20
LOSS = 4  # bytes of the scalar that a pass gives back
SCALE = 8  # of the number that plain attention's scores are scaled by, in each block


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small wait longer for a second thread than they take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def program(precision, attention="plain", model="nano", context=24, batch=3, **options):
    return Program(model, context, batch, attention, precision, "cpu", **options)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_what_is_kept_is_the_formula_part_by_part(attention, precision):
    one = program(precision, attention)
    counted: Counter[str] = Counter()
    for kept in activations.of_block(one.shape, precision, "cpu", 3):
        counted[kept.part] += one.shape.num_layers * kept.nbytes
    for kept in activations.of_head(one.shape, precision, 3):
        counted[kept.part] += kept.nbytes
    counted["casts"] = activations.cast_weights(one.shape, precision)
    assert saved.saved_bytes(one) == {part: n for part, n in counted.items() if n}
    assert counted.total() - counted["casts"] == activations.saved_bytes(
        one.shape, precision, "cpu", 3
    )


def test_a_block_by_hand():
    shape = transformer.TransformerConfig("hand", 8, 32, 1, 2, 100, context_length=5)
    tokens, wide = 2 * 5, 4
    norm = 2 * (2 * tokens * 8 + tokens) * wide
    mlp = (tokens * 8 + 4 * tokens * 32) * wide
    plain = (5 * tokens * 8 + 2 * 2 * 5 * 5) * wide + 5 * 5
    by_hand = norm + mlp + plain
    kept = activations.of_block(
        transformer.replace(shape, attention="plain"), "fp32", "cuda", batch_size=2
    )
    assert activations.total(kept) == by_hand
    assert activations.tensor_bytes(shape, "bf16", 2) == 2 * 5 * 8 * 2


def test_autocast_s_softmax_is_fp32_on_a_gpu_only():
    shape = transformer.config("nano", attention="plain")
    gpu, cpu = (activations.saved_bytes(shape, "bf16 autocast", d) for d in ("cuda", "cpu"))
    weights = shape.num_layers * 4 * shape.num_heads * shape.context_length**2
    assert gpu - cpu == 4 * weights


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="unknown precision 'fp8'; known: fp32, bf16 autocast"):
        activations.widths("fp8")


# --- checkpointing -------------------------------------------------------------------------------

PLANS = [
    Plan("none"), Plan("first", 3), Plan("segments", 1), Plan("segments", 3), Plan("nested", 2),
    Plan("nested", 4),
]  # fmt: skip


def gradients(one, plan):
    one.model.zero_grad(set_to_none=True)
    one.forward(plan).backward()
    return {name: p.grad.clone() for name, p in one.model.named_parameters()}


@pytest.mark.parametrize("precision", ["fp32", "bf16 autocast"])
def test_checkpoints_leave_every_gradient_as_it_is(precision):
    one = program(precision, model="micro", context=16)
    true = gradients(one, PLANS[0])
    for plan in PLANS[1:]:
        found = gradients(one, plan)
        assert all(torch.equal(found[name], true[name]) for name in true), plan


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_blocks_run_as_often_as_the_plan_says(plan):
    one = program("fp32", model="micro", context=8)
    calls = 0

    def count(module, inputs):
        nonlocal calls
        calls += 1

    for block in one.model.blocks:
        block.register_forward_pre_hook(count)
    one.forward(plan).backward()
    assert calls / one.shape.num_layers == plan.passes(one.shape.num_layers)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_a_plan_keeps_is_the_formula(plan, precision):
    # With fewer tokens than features the output layer's gradient would be the peak.
    one = program(precision, model="micro", context=64)
    held = checkpointed.held_bytes(one.shape, precision, "cpu", plan, 3)
    measure._pass(one, plan)
    found = measure._held(one, plan)
    least = max(held.values()) + LOSS
    assert least <= found["peak_mib"] * MIB <= least + one.shape.num_layers * SCALE


def test_the_best_spacing_is_where_the_formula_is_least():
    shape = transformer.config("2.7b", context_length=512, attention="plain")
    best = checkpointed.best_size(shape, "fp32", "cuda", "segments")
    assert best < 2 < checkpointed.best_size(shape, "fp32", "cuda", "nested") == 32**0.5
    block = activations.total(activations.of_block(shape, "fp32", "cuda"))
    entry = activations.tensor_bytes(shape, "fp32")

    def blocks(k):
        return shape.num_layers / k * entry + k * block

    assert blocks(best) <= min(blocks(0.99 * best), blocks(1.01 * best))


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("some", 1, "unknown kind of checkpointing 'some'; known: none, first"),
        ("none", 1, "'none' cannot have size 1"),
        ("segments", 0, "'segments' cannot have size 0"),
        ("nested", -1, "cannot have size -1"),
    ],
)
def test_a_bad_plan_is_refused(kind, size, message):
    with pytest.raises(ValueError, match=message):
        Plan(kind, size)


def test_a_plan_larger_than_the_model_is_refused():
    with pytest.raises(ValueError, match="segments of 5 blocks, but the model has 4"):
        Plan("segments", 5).segments(4)


def test_a_plan_is_timed_beside_no_plan(tmp_path):
    shared = cases.setting("nano", 8, attention="plain", precision="fp32", device="cpu")
    asked = cases.checkpoints(shared, [1], [2], [1], 1)
    recorder = Recorder(cases.STUDY, profile="quick", code="c", directory=tmp_path)
    sweep(recorder, asked[:1], measure.Measure(), cases.label)
    sweep(recorder, asked, measure.Measure(), cases.label)
    assert (recorder.measured, recorder.skipped) == (4, 1)  # a stopped run goes on
    rows = results.load(cases.STUDY, directory=tmp_path)
    assert set(rows["status"]) == {"ok"}
    assert rows.set_index("plan")["ratio"].isna().to_dict() == {
        "none": True, "segments": False, "nested": False, "first": False,
    }  # fmt: skip


# --- what a case needs ---------------------------------------------------------------------------


def case(mode, precision, **options):
    shared = cases.setting("nano", 24, attention="plain", precision=precision, device="cpu")
    return {"experiment": "pass", "mode": mode, **shared, **options}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mode", cases.MODES)
def test_a_watched_pass_peaks_where_the_formula_says(mode, precision):
    one = case(mode, precision)
    found, parts = measure.Measure()(one), cases.counted(one)
    scales = 0 if mode == cases.MODES[0] else SCALE * cases.shape_of(one).num_layers
    for name in ("weights", "activations", "casts", "optimizer"):
        more = LOSS + scales if name == "activations" else 0
        assert found[f"forward_{name}_mib"] * MIB == parts[name] + more, name
    more = found["peak_other_mib"] * MIB + LOSS + scales
    assert found["events_peak_mib"] * MIB - cases.counted_peak(one) == pytest.approx(more, abs=4)
    assert found["weights_bytes"] == parts["weights"]
    assert found["state_bytes"] == parts["optimizer"]


def test_what_cannot_fit_is_predicted_and_not_tried():
    huge = case("step", "fp32", model="2.7b", context_length=10**6)
    found = measure.Measure()(huge)
    assert found["status"] == "oom (predicted)" and " GiB by formula, more than" in found["reason"]
    assert cases.hopeless(case("step", "fp32")) is None


def test_other_devices_say_that_they_tell_nothing():
    figures, status, reason = outcome(measure.Measure(), case("step", "fp32", device="mps"))
    assert (figures, status) == ({}, "unavailable") and "mps keeps neither" in reason


def test_nothing_stays_of_a_model_whose_graph_was_looked_at():
    one = program("bf16 autocast")
    storage = weakref.ref(one.model.embedding.weight.untyped_storage())
    saved.saved_bytes(one)
    del one
    gc.collect()
    assert storage() is None
