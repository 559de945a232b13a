"""The topic profile on a GPU: sums, threads, ranges that change nothing, OOM that harms nobody."""

import gc

import pytest

from outcomes import outcome
from study import profile
from study.models import transformer

pytestmark = pytest.mark.gpu


def case_of(
    model="nano", context=128, precision="fp32", experiment="profile", seconds=0.02, **options
):  # fmt: skip
    shared = {"experiment": experiment, "batch_size": 4, "seconds": seconds}
    [case] = profile.settings(shared, "cuda", [model], [context], [precision], **options)
    return case


@pytest.mark.parametrize("precision", profile.WEIGHTS)
def test_sections_add_up_to_the_step_and_parts_to_attention(precision):
    actual = profile.figures(case_of(precision=precision))
    listed = sum(ms for *_, ms in actual["classes"])
    assert listed == pytest.approx(actual["kernels_ms"], rel=0.01)
    forward = {kind: (n, ms) for s, kind, n, ms in actual["classes"] if s == "forward"}
    parts = {part.rpartition("/")[2]: (n, ms) for _, part, n, ms in actual["parts"]}
    assert all(parts[step][0] >= 2 for step in ("scores", "softmax", "values"))  # two blocks
    casts = forward.get("copy and cast", (0, 0.0))[1]  # the loss has a softmax of its own
    assert 0 < parts["softmax"][1] < forward["softmax"][1] + casts
    assert parts["scores"][1] + parts["values"][1] < forward["GEMM"][1]


@pytest.mark.parametrize("context", [128, 1024])
def test_every_kernel_of_a_step_has_a_class(context):
    actual = profile.figures(case_of(context=context, precision="bf16 autocast"))
    assert "other" not in {kind for _, kind, *_ in actual["classes"]}


def test_products_of_forward_and_backward_are_as_many_as_the_layers_ask():
    actual = profile.figures(case_of("micro"))
    calls = {s: n for s, kind, n, _ in actual["classes"] if kind == "GEMM"}
    # 4 blocks of 7 layers and 2 products, and the output; a split sum adds a kernel of its own.
    assert calls["forward"] >= 37 and calls["backward"] >= 74


def test_the_clocked_step_is_no_shorter_than_its_kernels():
    clocked = profile.figures(case_of("small", 512, experiment="step", seconds=0.3))
    kernels = profile.figures(case_of("small", 512))["kernels_ms"]
    assert 0.5 < kernels / clocked["step_median_ms"] < 1.01


def test_running_out_of_memory_leaves_the_next_case_whole(limit_memory):
    limit_memory(3)
    figures, status, reason = outcome(profile.figures, case_of("small", 1024))
    assert (figures, status) == ({}, "oom") and "out of memory" in reason
    assert profile.figures(case_of())["kernels_ms"] > 0


def test_a_compiled_model_is_measured_without_a_compilation_and_forgotten():
    actual = profile.figures(case_of(provider="inductor", precision="bf16 autocast"))
    assert "parts" not in actual and "other" not in {kind for _, kind, *_ in actual["classes"]}
    assert not [o for o in gc.get_objects() if type(o) is transformer.Transformer]
