"""Study 08's reading of traces: classes, own times, launches, idle time, sums."""

import gzip
import json
from itertools import pairwise

import numpy as np
import profile_traces as made
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedlib import paths
from fusedlib.bench import results
from fusedlib.bench.profiles import __main__ as command
from fusedlib.bench.profiles import cases, classes, idle, keep, measure, nsys, trace, work

# Names as Kineto gives them on an H200 with torch 2.11.
KERNELS = {
    "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT": "GEMM",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>(cutlass_80_simt_sgemm_"
    "256x128_8x4_tn_align1::Params)": "GEMM",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_"
    "alignc4_execute_kernel__5x_cublas": "GEMM",
    "ampere_sgemm_128x64_tn": "GEMM",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float>(int)": "GEMM",
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4>(int)": "GEMM",
    "triton_tem_fused_mm_0": "GEMM",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64>>(int)":
        "fused attention",
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)": "fused attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "fused attention",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8>(int)": "softmax",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForwardGmem<4, float>(int)": "softmax",
    "triton_per_fused__softmax_masked_fill_4": "softmax",
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, "
    "float, at::native::binary_internal::MulFunctor<float>>>(int)": "element-wise",
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::"
    "CUDAFunctor_add<float>>>(int)": "element-wise",
    "triton_poi_fused_mul_silu_5": "element-wise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps>>()":
        "reduction",
    "triton_red_fused_mean_pow_2": "reduction",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2": "reduction",
    "triton_red_fused_embedding_mean_pow_0": "reduction",
    "triton_poi_fused__to_copy_mul_silu_3": "element-wise",
    "triton_poi_fused__to_copy_clone_transpose_7": "copy and cast",
    "triton_poi_fused_embedding_dense_backward_3": "indexing",
    "triton_for_fused_0": "element-wise",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(int)>()":
        "copy and cast",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)":
        "copy and cast",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, int, 4>(int)":
        "copy and cast",
    "Memcpy DtoD (Device -> Device)": "copy and cast",
    "Memset (Device)": "copy and cast",
    "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float>(int)":
        "indexing",
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>()":
        "indexing",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::Foo>(int)":
        "optimizer",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)": "fused attention",
    "void cudnn::fusion::convert_dq_to_16bits<true>(void const*)": "fused attention",
    "nvjet_sm90_tst_96x128_64x6_2x1_v_bz_splitK_NNN": "GEMM",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)": "indexing",
    "void at::native::triu_tril_kernel<bool, int, true, 8, false>(int)": "element-wise",
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
    assert classes.of_kernel(name) == KERNELS[name]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "GEMM"), ("aten::addmm", "GEMM"), ("aten::linear", "dispatch"),
        ("aten::_softmax", "softmax"), ("aten::_log_softmax_backward_data", "softmax"),
        ("aten::mul_", "element-wise"), ("aten::silu_backward", "element-wise"),
        ("aten::sum", "reduction"), ("aten::copy_", "copy and cast"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "fused attention"),
        ("autograd::engine::evaluate_function: MmBackward0", "dispatch"),
        ("MmBackward0", "dispatch"), ("somebody::own_operator", "other"),
    ],
)  # fmt: skip
def test_an_operator_is_told_by_its_name(name, kind):
    assert classes.of_operator(name) == kind


@pytest.mark.parametrize("name", KERNELS)
def test_short_names_are_short(name):
    short = classes.short_name(name)
    assert 0 < len(short) <= classes.MOST


def test_a_short_name_keeps_what_tells_kernels_apart():
    named = "void at::native::(anonymous namespace)::softmax_warp<float, 4>(float*, int)"
    assert classes.short_name(named) == "softmax_warp<float, 4>"
    inner = "void at::f<at::native::copy(at::TensorIterator&)::{lambda(int)#1}>(int, char*)"
    assert classes.short_name(inner) == "f<copy>"


intervals = st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (p[0], p[0] + p[1]))


@given(st.lists(intervals, max_size=12))
def test_the_union_of_intervals_covers_what_they_cover(found):
    merged = idle.union(found)
    covered = np.zeros(100, dtype=bool)
    for start, end in found:
        covered[start:end] = True
    assert sum(b - a for a, b in merged) == covered.sum()
    assert all(a[1] < b[0] for a, b in pairwise(merged))


def test_launches_give_kernels_their_sections_whatever_thread_issued_them():
    found = trace.parse(made.gpu())
    assert found.on_device and found.unlinked == 0 and len(found.pieces) == 7
    names = {s: len(found.during(found.last(s))) for s in ("inference", "forward", "backward")}
    assert names == {"inference": 1, "forward": 2, "backward": 2}
    assert not [r for r in found.ranges if "#" in r.name], "torch's own annotations are not ours"


def test_a_kernel_without_a_launch_is_counted():
    events = [e for e in made.gpu() if not (e.get("cat") == "cuda_runtime"
                                            and e["args"]["correlation"] == 3)]  # fmt: skip
    found = trace.parse(events)
    assert found.unlinked == 1 and len(found.pieces) == 7
    assert len(found.during(found.last("forward"))) == 2, "it counts where it began"


def test_sections_add_up_to_the_step():
    apart = measure.taken_apart(trace.parse(made.gpu()))
    sections = {s[0]: s[1:] for s in apart["sections"]}
    assert sections["forward"] == [2, 0.12, 0.12, 0.3]
    assert sections["backward"] == [2, 0.3, 0.2, 0.5], "two kernels at once: busy is their union"
    assert apart["kernels_ms"] == 0.45 and apart["outside_sections_ms"] == 0
    by_class = {(s, k): ms for s, k, _, ms in apart["classes"]}
    assert by_class["forward", "GEMM"] == 0.1 and by_class["forward", "softmax"] == 0.02
    assert by_class["backward", "copy and cast"] == 0.1
    assert by_class["optimizer", "optimizer"] == 0.03


def test_idle_time_is_between_kernels_and_since_the_step_before():
    seen = measure.idleness(trace.parse(made.gpu()))
    # 1030-1050 and 1150-1160 were launched in time; 1180-1400 and 1600-1850 waited for the host.
    assert seen["busy_ms"] == pytest.approx(0.35) and seen["idle_ms"] == pytest.approx(0.5)
    assert (seen["gaps"], seen["late_gaps"]) == (4, 2)
    assert seen["late_ms"] == pytest.approx(0.22 + 0.25)
    assert seen["gap_percentiles_us"][-1] == 250 and seen["lead_us"] == 40


def test_parts_are_told_by_the_innermost_range_of_the_launching_thread():
    found = {(s, p): (n, ms) for s, p, n, ms in measure.parts(trace.parse(made.gpu()))}
    assert found["forward", "block"] == (1, 0.1)
    assert found["forward", "block/attention/softmax"] == (1, 0.02)
    assert found["backward", "block"] == (1, 0.2)
    assert found["backward", "no part"] == (1, 0.1), "it was launched behind the range's end"


def test_an_operators_own_time_is_without_those_it_calls():
    found = trace.parse(made.cpu())
    assert {p.name: p.us for p in found.pieces} == {
        "aten::linear": 20, "aten::mm": 40, "aten::mul": 10
    }  # fmt: skip
    assert measure.taken_apart(found)["kernels_ms"] == 0.07
    assert measure.idleness(found) == {}


def test_the_same_operator_in_two_threads_is_not_nested():
    both = [made.event("aten::mm", 0, 10, "cpu_op", thread) for thread in (1, 2)]
    assert [p.us for p in trace.parse(both).pieces] == [10, 10]


def test_the_rest_is_added_up_and_nothing_is_dropped():
    events = [made.event("step", 0, 4000, "user_annotation"),
              made.event("forward", 0, 4000, "user_annotation")]  # fmt: skip
    for n in range(40):
        events += [made.event(f"aten::op{n}", 50 * n, n + 1, "cpu_op")]
    kernels = measure.taken_apart(trace.parse(events))["kernels"]
    assert len(kernels) == measure.TOP + 1 and kernels[-1][2] == measure.REST
    assert sum(k[3] for k in kernels) == 40
    assert sum(k[4] for k in kernels) == pytest.approx(sum(range(41)) / 1e3)


def test_a_kernel_dear_in_one_section_has_its_line_in_every_other():
    events = [made.event("step", 0, 8000, "user_annotation"),
              made.event("forward", 0, 4000, "user_annotation"),
              made.event("backward", 4000, 4000, "user_annotation")]  # fmt: skip
    for n in range(40):
        events += [made.event(f"aten::op{n}", 50 * n, n + 1, "cpu_op")]
        events += [made.event(f"aten::op{n}", 4000 + 50 * n, 40 - n, "cpu_op")]
    kernels = measure.taken_apart(trace.parse(events))["kernels"]
    times = {(section, name): ms for section, _, name, _, ms in kernels}
    assert times["forward", "aten::op39"] == 0.04 and times["backward", "aten::op39"] == 0.001
    assert times["forward", "aten::op0"] == 0.001 and times["backward", "aten::op0"] == 0.04
    for section in ("forward", "backward"):
        listed = sum(ms for (s, _), ms in times.items() if s == section)
        assert listed == pytest.approx(sum(range(41)) / 1e3)


@pytest.mark.parametrize(
    ("step_ms", "asked", "timed"), [(50.0, 5, 5), (600.0, 5, 4), (2500.0, 5, 3), (9e4, 2, 2)]
)
def test_long_steps_are_timed_less_often(step_ms, asked, timed):
    assert work.affordable(asked, step_ms) == timed


def test_what_is_no_trace_is_refused():
    with pytest.raises(ValueError, match="no Chrome trace"):
        trace.read(b"[]")
    with pytest.raises(ValueError, match="at least one kernel"):
        idle.idle([])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("build")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDLIB_BUILD", str(folder))
        [case] = cases.cases(["nano"], [32], ["fp32"], device="cpu", repetitions=2)
        return case, measure.measure(case), paths.traces_dir()


def test_a_real_step_is_taken_apart_completely(measured):
    _, figures, _ = measured
    whole = sum(s[2] for s in figures["sections"] if s[0] != "inference")
    assert abs(figures["outside_sections_ms"]) < 0.01 * figures["kernels_ms"]
    assert figures["kernels_ms"] == pytest.approx(whole, rel=0.01)
    for listed, column in (("classes", 3), ("kernels", 4)):
        assert sum(r[column] for r in figures[listed] if r[0] == "forward") == pytest.approx(
            next(s[2] for s in figures["sections"] if s[0] == "forward"), rel=0.01
        )
    # 2 blocks of 7 linear layers and the output are a product each, plain attention two a block.
    products = {s: n for s, kind, n, _ in figures["classes"] if kind == "GEMM"}
    assert products == {"inference": 19, "forward": 19, "backward": 38}
    assert len(json.dumps(figures)) < 20_000, "a row stays small"


def test_a_kept_trace_is_json_that_names_the_parts(measured):
    _, figures, folder = measured
    events = json.loads(gzip.decompress((folder / figures["trace_file"]).read_bytes()))
    names = {e["name"] for e in events["traceEvents"]}
    assert {"step", "forward", "block 1/attention/softmax", "loss"} <= names
    assert figures["trace_whole"]


def test_a_trace_too_large_is_kept_without_operators_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDLIB_BUILD", str(tmp_path))
    [case] = cases.cases(["nano"], [32], ["fp32"], device="cuda", repetitions=1)
    noise = [made.event(f"aten::op{n}", n, 1, "cpu_op", note=f"{n**9}") for n in range(2000)]
    document = json.dumps({"traceEvents": [*made.gpu(), *noise]}).encode()
    found = keep.kept(case, document, most_bytes=5000)
    assert not found["trace_whole"] and found["trace_mib"] == len(document) / 2**20
    kept = trace.read(gzip.decompress(keep.path_of(case).read_bytes()))
    whole = trace.read(document)
    assert (kept.pieces, kept.ranges) == (whole.pieces, whole.ranges)
    assert keep.kept(case, document, most_bytes=10) == {"trace_mib": len(document) / 2**20}


def test_mps_says_why_it_cannot():
    [case] = cases.cases(["nano"], [32], ["fp32"], device="mps", repetitions=1)
    with pytest.raises(results.Unavailable, match="MPS"):
        measure.measure(case)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["huge"], [32], ["fp32"]), "unknown model size"),
        ((["nano"], [32], ["fp8"]), "unknown precision 'fp8'; known: fp32"),
        ((["nano"], [0], ["fp32"]), "must be at least 1"),
    ],
)
def test_cases_refuse_what_there_is_not(arguments, message):
    with pytest.raises(ValueError, match=message):
        cases.cases(*arguments, device="cpu", repetitions=1)


def test_one_case_leaves_a_trace_on_request(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEDLIB_BUILD", str(tmp_path))
    given = ["--model", "nano", "--context-length", "16", "--device", "cpu", "--trace"]
    assert command.main(given) == 0
    [kept] = tmp_path.rglob("*.json.gz")
    assert str(kept) in capsys.readouterr().out
    assert trace.read(gzip.decompress(kept.read_bytes())).last("block 0/mlp")
    assert command.main([*given[:2], "--context-length", "0"]) == 1
    assert "must be at least 1" in capsys.readouterr().err


def test_the_nsys_command_runs_the_case_it_names(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert command.main(["--model", "nano", "--context-length", "64", "--show-nsys"]) == 0
    shown = capsys.readouterr().out.split()
    assert shown[:2] == ["nsys", "profile"] and "--capture-range=cudaProfilerApi" in shown
    target = shown[shown.index("fusedlib.bench.profiles") + 1 :]
    assert command._options(target).model == "nano"
    assert command.main(["--model", "nano", "--nsys"]) == 1
    assert "nsys is not installed" in capsys.readouterr().err
    assert "unavailable" in nsys.status()
