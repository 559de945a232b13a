"""The topic profile on a GPU: sums, threads, ranges that change nothing, OOM that harms nobody."""

import pytest

from study import profile

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
