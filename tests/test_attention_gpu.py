"""Study 07 on a GPU: who runs is right, holds what is counted, and an OOM ends nothing."""

import pytest
import torch

from fusedlib.bench import check, results
from fusedlib.bench.attention import cases, footprint, held, measure, truth, ways
from fusedlib.bench.attention.problem import AttentionProblem, draw
from fusedlib.bench.roofline import precision_of

pytestmark = pytest.mark.gpu
MIB = 2**20
# The node of autograd that shows which backend torch took.
NODES = {"flash": "FlashAttention", "efficient": "EfficientAttention", "cudnn": "CudnnAttention"}


def prepared(name, dtype, context=1024):
    one = AttentionProblem(context, 64, 8, dtype)
    operands = draw(one, "cuda")
    try:
        return one, operands, ways.get(name).build(operands)
    except results.Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "inductor", "math", *NODES, "flex"])
def test_a_way_is_right_and_keeps_what_is_counted(name, dtype):
    torch.compiler.reset()
    one, operands, work = prepared(name, dtype)
    with precision_of("highest"):
        true = truth.truth(operands)
        found = truth.errors(check.results_of(work, operands.dout), true)
        said = truth.verdict(found, truth.usual_errors(operands, true), one.torch_dtype)
        assert "status" not in said, said["reason"]
        seen = footprint.measure(work, operands.dout)
    assert NODES.get(name, "") in seen["backward_node"]
    if counted := held.kept(name, one):
        # Flash and cuDNN keep a random state besides, FlexAttention its mask of blocks.
        assert seen["kept_mib"] * MIB == pytest.approx(sum(counted.values()), abs=16 * 1024)
    if name == "plain":
        assert seen["peak_mib"] * MIB == pytest.approx(held.plain_peak(one, "cuda"), rel=0.02)


@pytest.mark.parametrize("name", ["plain", "inductor", "math", "efficient"])
def test_a_look_at_what_is_kept_leaves_nothing_behind(name):
    torch.compiler.reset()
    _, operands, work = prepared(name, "float32", 2048)
    footprint.measure(work, operands.dout)
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        footprint.measure(work, operands.dout)
    assert torch.cuda.memory_allocated() == before


def test_running_out_of_memory_leaves_the_next_shape_whole(tmp_path):
    def recorder():
        return results.Recorder(cases.STUDY, "quick", "code", fresh=True, directory=tmp_path)

    def asked(*contexts):
        return cases.grid(
            "course", contexts, [64], ["float32"], ["plain", "efficient"], batch_size=8,
            repetitions=2, device="cuda",
        )  # fmt: skip

    measure.sweep(recorder(), asked(1024))
    usual = results.load(cases.STUDY, directory=tmp_path).set_index("provider")["peak_mib"]
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(12 * 2**30 / total)
    try:
        measure.sweep(recorder(), asked(16384, 1024))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    rows = results.load(cases.STUDY, directory=tmp_path).set_index(["context_length", "provider"])
    assert rows.loc[(16384, "plain"), "status"] == "oom"
    assert "Tried to allocate" in rows.loc[(16384, "plain"), "reason"]
    assert rows.loc[(16384, "efficient"), "status"] == "ok"
    for name in ("plain", "efficient"):
        assert rows.loc[(1024, name), "status"] == "ok"
        assert rows.loc[(1024, name), "peak_mib"] == usual[name]
