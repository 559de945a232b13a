"""Study 04 on a GPU: counting meets CUDA's own count, and one OOM leaves the next case whole."""

import pytest
import torch

from fusedlib.bench import ledger, memory
from fusedlib.bench.sweep import outcome

pytestmark = pytest.mark.gpu
# Every tensor a multiple of 2 MiB: other sizes CUDA's allocator rounds up to whole blocks.
SHAPE = "2048·1024·3072"


@pytest.mark.parametrize("name", ["eager", "liger", "fused", "fused (input)"])
def test_a_step_holds_what_is_counted(name):
    problem = memory.shape(SHAPE, "bfloat16")
    saved, step = memory.mlp_cases([problem], [name], "cuda")
    figures, status, reason = outcome(memory.measure, saved)
    if status == "unavailable":
        pytest.skip(reason)
    book = ledger.of(name)
    assert status == "ok", reason
    assert figures["saved_mib"] == book.kept().mib(problem)
    found = memory.measure(step)
    assert found["complete"]
    assert found["peak_mib"] == ledger.total(book.peak(problem)[1]).mib(problem)


def test_running_out_of_memory_leaves_the_next_case_whole():
    case = memory.mlp_cases([memory.shape(SHAPE, "bfloat16")], ["eager"], "cuda")[1]
    usual = memory.measure(case)["peak_mib"]
    total = torch.cuda.get_device_properties(0).total_memory
    deep = memory.stack_cases(memory.shape(SHAPE, "bfloat16"), [64], ["eager"], "cuda")[0]
    torch.cuda.set_per_process_memory_fraction(2**30 / total)
    try:
        figures, status, reason = outcome(memory.measure, deep)
        assert (figures, status) == ({}, "oom") and "out of memory" in reason
        assert memory.measure(case)["peak_mib"] == usual
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
