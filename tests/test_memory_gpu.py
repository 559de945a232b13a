"""Study 04 on a GPU: counting meets CUDA's own count, and one OOM leaves the next case whole."""

import pytest

from fusedlib.bench.attempt import Attempt
from measure import mlp_ledger, mlp_memory
from study.mlp import SwiGLUProblem

pytestmark = pytest.mark.gpu
# Every tensor a multiple of 2 MiB: other sizes CUDA's allocator rounds up to whole blocks.
SHAPE = "2048·1024·3072"
BF16_CUDA = {"dtype": "bfloat16", "device": "cuda"}


@pytest.mark.parametrize("name", ["eager", "liger", "fused", "fused-input"])
def test_a_step_and_a_stack_hold_what_is_counted(name):
    saved, step = mlp_memory.cases([SHAPE], [name], **BF16_CUDA)
    tried = Attempt.at(mlp_memory.measure, saved)
    if tried.status == "unavailable":
        pytest.skip(tried.reason)
    book, problem = mlp_ledger.of(name), SwiGLUProblem.of(saved)
    assert tried.ok, tried.reason
    assert tried.value["saved_mib"] == book.kept().mib(problem)
    actual = mlp_memory.measure(step)
    assert actual["complete"]
    assert actual["peak_mib"] == mlp_ledger.total(book.peak(problem)[1]).mib(problem)
    for case in mlp_memory.stack_cases(SHAPE, [3], [name], **BF16_CUDA):
        assert mlp_memory.measure(case)["total_peak_mib"] == mlp_memory.counted_mib(case)


@pytest.mark.parametrize(("tokens", "path"), [(64, "plain PyTorch"), (2048, "kernels")])
def test_rows_say_which_path_fp32_took(tokens, path):
    shape, at = f"{tokens}·2048·2048", {"dtype": "float32", "device": "cuda"}
    (case, _), stack = (
        mlp_memory.cases([shape], ["fused"], **at),
        mlp_memory.stack_cases(shape, [1], ["fused"], **at),
    )
    assert mlp_memory.measure(stack[0])["path"] == path
    own = "split fp32" if path == "kernels" else path
    assert mlp_memory.measure(case)["path"] == own


def test_running_out_of_memory_leaves_the_next_case_whole(limit_memory):
    case = mlp_memory.cases([SHAPE], ["eager"], **BF16_CUDA)[1]
    usual = mlp_memory.measure(case)["peak_mib"]
    deep = mlp_memory.stack_cases(SHAPE, [64], ["eager"], **BF16_CUDA)[0]
    limit_memory(1)
    tried = Attempt.at(mlp_memory.measure, deep)
    assert tried.status == "oom" and "out of memory" in tried.reason
    assert mlp_memory.measure(case)["peak_mib"] == usual
