"""An MLP's memory on a GPU: counting meets CUDA's count, and one OOM leaves the next case whole."""

import pytest

from fusedlib.bench.attempt import Attempt
from study import ledger, memory
from study.mlp import SwiGLUProblem

pytestmark = pytest.mark.gpu
# Every tensor a multiple of 2 MiB: other sizes CUDA's allocator rounds up to whole blocks.
SHAPE = "2048·1024·3072"


def alone(shape, name, dtype="bfloat16"):
    """What is kept, and one step, of an MLP."""
    sizes = {"bfloat16": {"shapes": [shape], "sweep_widths": []}, "float32": {
        "shapes": [], "sweep_tokens": int(shape.split("·")[0]),
        "sweep_widths": [int(shape.split("·")[1])]}}[dtype]  # fmt: skip
    return [c for c in cases(name, **sizes) if c["experiment"] != "stack"]


def stacks(shape, layers, name, dtype="bfloat16"):
    """Stacks of these depths, of each without gradients and with them."""
    sizes = {"stack_bf16" if dtype == "bfloat16" else "stack_fp32": shape}
    found = cases(name, shapes=[], sweep_widths=[], layers=layers, **sizes)
    return [c for c in found if c["dtype"] == dtype]


def cases(name, **sizes):
    who = {"rivals": [name], "everywhere": [name]}
    return memory.cases(device="cuda", tokens=[], grid_widths=[], **who, **sizes)


@pytest.mark.parametrize("name", ["eager", "liger", "fused", "fused-input"])
def test_a_step_holds_what_is_counted_and_a_stack_at_least(name):
    saved, step = alone(SHAPE, name)
    tried = Attempt.at(memory.figures, saved)
    if tried.status == "unavailable":
        pytest.skip(tried.reason)
    book, problem = ledger.of(name), SwiGLUProblem.of(saved)
    assert tried.ok, tried.reason
    assert tried.value["saved_mib"] == book.kept().mib(problem)
    actual = memory.figures(step)
    assert actual["complete"]
    assert actual["peak_mib"] == ledger.total(book.peak(problem)[1]).mib(problem)
    for case in stacks(SHAPE, [3], name):
        assert memory.figures(case)["total_peak_mib"] >= memory.counted_mib(case)


@pytest.mark.parametrize(("tokens", "path"), [(64, "plain PyTorch"), (2048, "kernels")])
def test_rows_say_which_path_fp32_took(tokens, path):
    shape = f"{tokens}·2048·2048"
    case, _ = alone(shape, "fused", "float32")
    stack = stacks(shape, [1], "fused", "float32")
    assert memory.figures(stack[0])["path"] == path
    own = "split fp32" if path == "kernels" else path
    assert memory.figures(case)["path"] == own
