"""The topic profile on a GPU: sums, threads, ranges that change nothing, OOM that harms nobody."""

import gc
import shutil
import subprocess
import sys

import pytest
import torch

import limits
from outcomes import outcome
from study import paths, profile
from study.models import transformer

pytestmark = pytest.mark.gpu


def case_of(
    model="nano", context=128, precision="fp32", experiment="profile", seconds=0.02, **options
):  # fmt: skip
    shared = {"experiment": experiment, "batch_size": 4, "seconds": seconds}
    [case] = profile.settings(shared, "cuda", [model], [context], [precision], **options)
    return case


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDLIB_BUILD", str(tmp_path))


@pytest.mark.parametrize("precision", profile.WEIGHTS)
def test_sections_and_parts_add_up_to_the_step(precision):
    actual = profile.figures(case_of(precision=precision))
    assert actual["on_device"] and actual["unlinked"] == 0
    sections = {s[0]: s[2] for s in actual["sections"]}
    assert abs(actual["outside_sections_ms"]) <= 0.01 * actual["kernels_ms"]
    for section in profile.SECTIONS:
        listed = sum(ms for s, _, _, ms in actual["classes"] if s == section)
        assert listed == pytest.approx(sections[section], rel=0.01)
    nameless = sum(ms for s, p, _, ms in actual["parts"] if p == "no part" and s != "optimizer")
    named = sum(ms for s, p, _, ms in actual["parts"] if p != "no part")
    assert nameless < 0.05 * named, "backward kernels find their ranges in autograd's thread"


@pytest.mark.parametrize("context", [128, 1024])
def test_every_kernel_of_a_step_has_a_class(context):
    actual = profile.figures(case_of(context=context, precision="bf16 autocast"))
    assert [k for k in actual["kernels"] if k[1] == "other"] == []
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


def test_ranges_change_no_result_on_the_device():
    made = profile.warm(case_of(precision="bf16 autocast"))
    model = made.model
    actual = []
    for step in (profile.named_step, profile.step):
        torch.manual_seed(0)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        made.optimizer.state.clear()
        step(made)
        actual.append([p.grad.clone() for p in model.parameters()])
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name])
    # The embedding's gradient is summed by atomics in an order of its own.
    for (name, _), a, b in zip(model.named_parameters(), *actual, strict=True):
        assert torch.equal(a, b) or name == "embedding.weight", name


def test_running_out_of_memory_leaves_the_next_case_whole(limit_memory):
    limit_memory(3)
    figures, status, reason = outcome(profile.figures, case_of("small", 1024))
    assert (figures, status) == ({}, "oom") and "out of memory" in reason
    assert profile.figures(case_of())["kernels_ms"] > 0


def test_a_compiled_model_is_measured_without_a_compilation_and_forgotten():
    actual = profile.figures(case_of(provider="inductor", precision="bf16 autocast"))
    assert actual["unlinked"] == 0 and "parts" not in actual
    assert [k for k in actual["kernels"] if k[1] == "other"] == []
    assert not [o for o in gc.get_objects() if type(o) is transformer.Transformer]


def test_one_step_runs_for_nsys_in_a_process_of_its_own(tmp_path):
    words = [sys.executable, "-m", "study.profile", "nano", "128", "fp32"]
    nsys = ["nsys", "profile", "--trace=cuda,nvtx", "--capture-range=cudaProfilerApi",
            "--capture-range-end=stop", f"--output={tmp_path / 'nano'}"]  # fmt: skip
    words = [*nsys, *words] if shutil.which("nsys") else words
    subprocess.run(words, cwd=paths.ROOT, check=True, timeout=limits.PROCESS_S)
    assert list(tmp_path.glob("*.nsys-rep")) or not shutil.which("nsys")
