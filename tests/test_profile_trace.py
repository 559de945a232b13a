"""How a trace is read, and what the rows of the topic profile hold."""

import json
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from study import paths, profile, trace
from study.models import transformer

# --- a trace made by hand: two steps on a GPU, as Kineto writes them ------------------------------

SECTION_US = {
    "forward": (1000.0, 1300.0),
    "backward": (1300.0, 1800.0),
    "optimizer": (1800.0, 1900.0),
}
GEMM = "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT"
SOFTMAX = (
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(int)"
)
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::Foo>(int)"
MAIN, ENGINE = 1, 2


def event(name, start, us, cat, thread=MAIN, **args):
    return {
        "ph": "X", "cat": cat, "name": name, "ts": start, "dur": us, "pid": 1, "tid": thread,
        "args": args,
    }  # fmt: skip


def kernel(number, name, launched, start, us, thread=MAIN, cat="kernel"):
    """A kernel, and the call that launched it."""
    call = "cudaMemcpyAsync" if cat == "gpu_memcpy" else "cudaLaunchKernel"
    return [
        event(call, launched, 5.0, "cuda_runtime", thread, correlation=number),
        event(name, start, us, cat, 7, correlation=number, stream=7),
    ]


def gpu():
    """A product and two steps; in the last the device waits twice for the host and twice not.

    Kernels of the last step, in µs: 1050-1150 GEMM, 1160-1180 softmax, 1400-1600 GEMM and in
    it a copy on another stream, 1850-1880 Adam. The step before ended at 1030.
    """
    ranges = [
        event("step", 450, 500, "user_annotation"),
        event("step", 990, 920, "user_annotation"),
        *(event(n, a, b - a, "user_annotation") for n, (a, b) in SECTION_US.items()),
        event("scores", 100, 20, "user_annotation"),
        event("scores", 1005, 20, "user_annotation"),
        event("softmax", 1100, 50, "user_annotation"),
        event("Optimizer.step#AdamW.step", 1805, 90, "user_annotation"),
        event("forward", 1040, 900, "gpu_user_annotation", 7),
    ]
    kernels = [
        *kernel(1, GEMM, 100, 120, 80),
        *kernel(2, GEMM, 900, 950, 80),
        *kernel(3, GEMM, 1010, 1050, 100),
        *kernel(4, SOFTMAX, 1110, 1160, 20),
        *kernel(5, GEMM, 1360, 1400, 200, ENGINE),
        *kernel(6, "Memcpy DtoD (Device -> Device)", 1420, 1450, 100, ENGINE, "gpu_memcpy"),
        *kernel(7, ADAM, 1820, 1850, 30),
    ]
    noise = [{"ph": "M", "name": "process_name", "pid": 1}, {"ph": "s", "cat": "ac2g", "id": 3}]
    return noise + kernels[::-1] + ranges


# --- names ----------------------------------------------------------------------------------------

# Names as Kineto gives them on an H200 with torch 2.11.
KERNELS = {
    "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT": "GEMM",
    "triton_tem_fused_mm_0": "GEMM",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8>(int)": "softmax",
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, "
    "float, at::native::binary_internal::MulFunctor<float>>>(int)": "element-wise",
    "triton_poi_fused_mul_silu_5": "element-wise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps>>()":
        "reduction",
    "triton_poi_fused_embedding_dense_backward_3": "indexing",
    "Memcpy DtoD (Device -> Device)": "copy and cast",
    "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float>(int)":
        "indexing",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::Foo>(int)":
        "optimizer",
    "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::"
    "TensorIteratorBase&)::{lambda(float)#1}, std::array<char*, 2ul>>(int)": "copy and cast",
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::"
    "(anonymous namespace)::masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::"
    "{lambda()#1}::operator()() const::{lambda(float)#1}>(at::TensorIteratorBase&)>(int)":
        "element-wise",
    "a_kernel_nobody_knows": "other",
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_told_by_its_name(name):
    assert profile.class_of(name) == KERNELS[name]


# --- launches and parts ---------------------------------------------------------------------------


def test_launches_give_kernels_their_sections_whatever_thread_issued_them():
    actual = trace.parse(gpu())
    assert len(actual.pieces) == 7
    assert {s: len(actual.during(s)) for s in ("forward", "backward", "nothing")} == {
        "forward": 2, "backward": 2, "nothing": 0
    }  # fmt: skip


def test_the_classes_of_all_sections_add_up_to_the_step():
    apart = profile.taken_apart(trace.parse(gpu()))
    assert apart["kernels_ms"] == 0.45 and apart["profiled_kernels"] == 5
    by_class = {(s, k): (n, ms) for s, k, n, ms in apart["classes"]}
    assert by_class == {
        ("forward", "GEMM"): (1, 0.1), ("forward", "softmax"): (1, 0.02),
        ("backward", "GEMM"): (1, 0.2), ("backward", "copy and cast"): (1, 0.1),
        ("optimizer", "optimizer"): (1, 0.03),
    }  # fmt: skip


@pytest.mark.parametrize("autocast", [False, True])
def test_each_step_of_plain_attention_has_its_range_and_no_result_changes(autocast):
    torch.manual_seed(0)
    shape = transformer.config("nano", context_length=16, attention="plain")
    model, tokens = transformer.Transformer(shape), torch.randint(100, (2, 16))

    def logits():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(tokens)

    with profile.AttentionSteps(), torch.profiler.profile() as profiled:
        named = logits()
    assert torch.equal(named, logits())
    inside = Counter(
        (event.name, child.name.strip("_"))
        for event in profiled.events() if event.name in ("scores", "softmax", "values")
        for child in event.cpu_children
    )  # fmt: skip
    assert inside["scores", "aten::matmul"] == inside["values", "aten::matmul"] == 2
    assert inside["softmax", "aten::softmax"] == 2
    assert not {name for _, name in inside} & {"aten::linear", "aten::pow"}


# --- a real step ----------------------------------------------------------------------------------


def case_of(context, precision, experiment="profile", device="cpu"):
    shared = {"experiment": experiment, "batch_size": 4, "seconds": 0.001}
    [case] = profile.settings(shared, device, ["nano"], [context], [precision])
    return case


def test_a_step_is_clocked_by_the_one_clock():
    figures = profile.figures(case_of(16, "bf16 autocast", experiment="step"))
    assert figures["step_median_ms"] > 0 and figures["issue_ms"] > 0
    assert "kernels_ms" not in figures


# --- what follows from rows -----------------------------------------------------------------------


def test_the_notebook_s_busy_share_counts_no_kernel_that_waits_for_other_gpus(monkeypatch):
    cells = json.loads((paths.NOTEBOOKS / "03_clock.ipynb").read_text(encoding="utf-8"))["cells"]
    [source] = ["".join(cell["source"]) for cell in cells if cell["id"] == "busy-share"]
    names = ("ncclDevKernel_AllGather_RING_LL", "gemm", "gemm")
    events = [
        SimpleNamespace(
            name=name, is_user_annotation=False, device_type=SimpleNamespace(name="CUDA"),
            time_range=SimpleNamespace(elapsed_us=lambda: 500.0),
        )
        for name in names
    ]  # fmt: skip
    seen = nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr("torch.profiler.profile", lambda **_: seen)
    found: dict = {}
    exec(source, found)
    share = found["busy_share"](lambda: None, count=1)
    assert share["kernels"] == 2 and share["kernels_ms"] == 1.0
