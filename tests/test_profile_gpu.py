"""Study 08 on a GPU: sums, threads, ranges that change nothing, and one OOM that harms nobody."""

import gc
import shutil
import subprocess
import sys

import pytest
import torch

from fusedlib import paths
from fusedlib.bench.profiles import cases, measure, nsys, work
from fusedlib.bench.sweep import outcome
from fusedlib.models import transformer

pytestmark = pytest.mark.gpu


def case_of(model="nano", context=128, precision="fp32", **options):
    [case] = cases.cases(
        [model], [context], [precision], device="cuda", repetitions=3, **options
    )  # fmt: skip
    return case


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDLIB_BUILD", str(tmp_path))


@pytest.mark.parametrize("precision", cases.PRECISIONS)
def test_sections_and_parts_add_up_to_the_step(precision):
    found = measure.measure(case_of(precision=precision))
    assert found["on_device"] and found["unlinked"] == 0
    sections = {s[0]: s[2] for s in found["sections"]}
    assert abs(found["outside_sections_ms"]) <= 0.01 * found["kernels_ms"]
    for section in work.SECTIONS:
        listed = sum(ms for s, _, _, ms in found["classes"] if s == section)
        assert listed == pytest.approx(sections[section], rel=0.01)
    assert 0 < found["busy_ms"] <= found["kernels_ms"] * 1.001
    nameless = sum(ms for s, p, _, ms in found["parts"] if p == "no part" and s != "optimizer")
    named = sum(ms for s, p, _, ms in found["parts"] if p != "no part")
    assert nameless < 0.05 * named, "backward kernels find their ranges in autograd's thread"


def test_every_kernel_of_a_step_has_a_class():
    found = measure.measure(case_of(precision="bf16 autocast"))
    assert [k for k in found["kernels"] if k[1] == "other"] == []


def test_products_of_forward_and_backward_are_as_many_as_the_layers_ask():
    found = measure.measure(case_of("micro"))
    calls = {s: n for s, kind, n, _ in found["classes"] if kind == "GEMM"}
    # 4 blocks of 7 layers and 2 products, and the output; a split sum adds a kernel of its own.
    assert calls["forward"] >= 37 and calls["backward"] >= 74


def test_ranges_change_no_result_on_the_device():
    made = work.Work(case_of(precision="bf16 autocast"))
    model = made.trainer.model
    found = []
    for steps in (made.named_step, made.step):
        torch.manual_seed(0)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        made.trainer.optimizer.state.clear()
        steps()
        found.append([p.grad.clone() for p in model.parameters()])
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name])
    # The embedding's gradient is summed by atomics in an order of its own.
    for (name, _), a, b in zip(model.named_parameters(), *found, strict=True):
        assert torch.equal(a, b) or name == "embedding.weight", name


def test_running_out_of_memory_leaves_the_next_case_whole():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(3 * 2**30 / total)
    try:
        figures, status, reason = outcome(measure.measure, case_of("small", 1024))
        assert (figures, status) == ({}, "oom") and "out of memory" in reason
        assert measure.measure(case_of())["busy_ms"] > 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_compiled_model_is_measured_without_a_compilation_and_forgotten():
    found = measure.measure(case_of(provider="inductor", precision="bf16 autocast"))
    assert "status" not in found and found["unlinked"] == 0
    assert [k for k in found["kernels"] if k[1] == "other"] == []
    assert not [o for o in gc.get_objects() if type(o) is transformer.Transformer]


@pytest.mark.skipif(not shutil.which("nsys"), reason="nsys is not installed")
def test_nsys_records_the_case(tmp_path):
    assert nsys.launch(case_of()) == 0
    assert list(tmp_path.rglob("*.nsys-rep"))


def test_one_case_runs_as_a_process_of_its_own():
    words = nsys.target(case_of())
    subprocess.run([sys.executable, *words], cwd=paths.ROOT, check=True, timeout=120)
