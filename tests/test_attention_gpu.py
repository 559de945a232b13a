"""Attention on a GPU: who runs is right, holds what is counted, and an OOM ends nothing."""

import pytest
import torch

from fusedlib.bench import check
from fusedlib.bench.attempt import Unavailable
from study import attention, causal, race, rivals
from study.allocator import peak
from study.causal import AttentionProblem, draw, plain_peak
from study.roofline import precision_of

pytestmark = pytest.mark.gpu
MIB = 2**20
# The node of autograd that shows which backend torch took.
NODES = {"flash": "FlashAttention", "efficient": "EfficientAttention", "cudnn": "CudnnAttention"}


def prepared(name, dtype, context=1024):
    one, rival = AttentionProblem(context, 64, 8, dtype), rivals.get(causal.TASK, name)
    operands = draw(one, "cuda")
    try:
        rival.check_available("cuda", dtype)
        return one, operands, rival.build(operands)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", rivals.names(causal.TASK))
def test_a_way_is_right_and_plain_attention_holds_what_is_counted(name, dtype):
    torch.compiler.reset()
    one, operands, work = prepared(name, dtype)
    with precision_of("highest"):
        true = causal.exact(operands)
        actual = causal.errors(check.results_of(work, operands.dy), true)
        check.require(actual, causal.baseline_errors(operands, true), operands.dy.dtype)
        work.reset()
        held_mib = peak(lambda: work.forward().backward(operands.dy), "cuda")
    output = work.forward()  # kept: without it the node that made it is gone
    assert NODES.get(name, "") in output.grad_fn.name()
    if name == "plain":
        assert held_mib * MIB == pytest.approx(plain_peak(one, "cuda"), rel=0.02)


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_a_graph_of_short_contexts_is_right_and_waits_for_no_python(direction):
    sizes = {"short_contexts": [64], "dtypes": ["bfloat16"], "device": "cuda"}
    short = [case for case in attention.cases(**sizes) if case.get("grid") == "short"]
    ms = {}
    for launch in ("python", "graph"):
        one = [c for c in short if (c["launch"], c["direction"]) == (launch, direction)]
        rows = {row.case["provider"]: row for row in attention.measure(one)}
        ms[launch] = {n: r.figures["median_ms"] for n, r in rows.items() if r.status == "ok"}
        assert rows["sdpa"].figures["backend"] in NODES
    assert {"plain", "sdpa", "flash"} <= {*ms["graph"]} and ms["graph"].keys() == ms[
        "python"
    ].keys()
    assert ms["graph"]["plain"] < ms["python"]["plain"]
    race.free()
