"""Chrome traces made by hand: two steps on a GPU, as Kineto writes them."""

SECTION_US = {
    "forward": (1000.0, 1300.0),
    "backward": (1300.0, 1800.0),
    "optimizer": (1800.0, 1900.0),
}
GEMM = "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT"
SOFTMAX = (
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(int)"
)
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
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
    """An inference and two steps; in the last the device waits twice for the host and twice not.

    Kernels of the last step, in µs: 1050-1150 GEMM, 1160-1180 softmax, 1400-1600 GEMM and in
    it a copy on another stream, 1850-1880 Adam. The step before ended at 1030.
    """
    ranges = [
        event("inference", 0, 400, "user_annotation"),
        event("step", 450, 500, "user_annotation"),
        event("step", 990, 920, "user_annotation"),
        *(event(n, a, b - a, "user_annotation") for n, (a, b) in SECTION_US.items()),
        event("block 1", 1005, 200, "user_annotation"),
        event("block 1/attention/softmax", 1100, 50, "user_annotation"),
        event("block 1", 1350, 60, "user_annotation", ENGINE),
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


def cpu():
    """A forward section of 100 µs in which `aten::linear` (60) calls `aten::mm` (40)."""
    return [
        event("step", 0, 120, "user_annotation"),
        event("forward", 5, 100, "user_annotation"),
        event("aten::linear", 10, 60, "cpu_op"),
        event("aten::mm", 20, 40, "cpu_op"),
        event("aten::mul", 75, 10, "cpu_op"),
    ]
