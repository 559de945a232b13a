"""Study 07 on a GPU: who runs is right, holds what is counted, and an OOM ends nothing."""

import pytest
import torch

from fusedlib.bench import check
from fusedlib.bench.attempt import Unavailable
from measure.attention import exact, footprint, races
from measure.attention.problem import AttentionProblem, draw, kept, plain_peak
from measure.racing import rivals
from measure.racing.roofline import precision_of
from measure.recording import results

pytestmark = pytest.mark.gpu
MIB = 2**20
# The node of autograd that shows which backend torch took.
NODES = {"flash": "FlashAttention", "efficient": "EfficientAttention", "cudnn": "CudnnAttention"}


def prepared(name, dtype, context=1024):
    one, rival = AttentionProblem(context, 64, 8, dtype), rivals.get(races.TASK, name)
    operands = draw(one, "cuda")
    try:
        rival.check_available("cuda", dtype)
        return one, operands, rival.build(operands)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", rivals.names(races.TASK))
def test_a_way_is_right_and_keeps_what_is_counted(name, dtype):
    torch.compiler.reset()
    one, operands, work = prepared(name, dtype)
    with precision_of("highest"):
        true = exact.results(operands)
        actual = exact.errors(check.results_of(work, operands.dy), true)
        check.require(actual, exact.baseline_errors(operands, true), one.torch_dtype)
        seen = footprint.measure(work, operands.dy)
    output = work.forward()  # kept: without it the node that made it is gone
    assert NODES.get(name, "") in output.grad_fn.name()
    if form := races.counted_form(name):
        # Flash and cuDNN keep a random state besides, FlexAttention its mask of blocks.
        assert seen["kept_mib"] * MIB == pytest.approx(sum(kept(form, one).values()), abs=16 * 1024)
    if name == "plain":
        assert seen["peak_mib"] * MIB == pytest.approx(plain_peak(one, "cuda"), rel=0.02)


@pytest.mark.parametrize("name", ["plain", "inductor", "math", "efficient"])
def test_a_look_at_what_is_kept_leaves_nothing_behind(name):
    torch.compiler.reset()
    _, operands, work = prepared(name, "float32", 2048)
    footprint.measure(work, operands.dy)
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        footprint.measure(work, operands.dy)
    assert torch.cuda.memory_allocated() == before


def test_running_out_of_memory_leaves_the_next_shape_whole(tmp_path, limit_memory):
    def raced(*contexts):
        recorder = results.Recorder("07_attention", "quick", fresh=True, directory=tmp_path)
        recorder.race(races.RACE, races.cases(
            "course", contexts, [64], ["float32"], ["plain", "efficient"], batch_size=8,
            repetitions=2, device="cuda",
        ))  # fmt: skip
        rows = recorder.rows()
        rows = rows[rows["recording"] == recorder.recording]
        return rows.set_index(["direction", "context_length", "provider"]).loc["backward"]

    usual = raced(1024)["peak_mib"]
    torch.cuda.empty_cache()
    limit_memory(12)
    rows = raced(16384, 1024)
    assert rows.loc[(16384, "plain"), "status"] == "oom"
    assert "Tried to allocate" in rows.loc[(16384, "plain"), "reason"]
    assert rows.loc[(16384, "efficient"), "status"] == "ok"
    for at in ((1024, "plain"), (1024, "efficient")):
        assert rows.loc[at, "status"] == "ok"
        assert rows.loc[at, "peak_mib"] == usual[at]
