"""Private names of torch and Triton mean what they are taken for: those that no law tells."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import limits
from fusedlib import compat
from study import paths


def test_wrappers_of_transforms_are_known_alive_and_dead():
    left = []
    torch.func.grad(lambda x: left.append(x) or x.sum())(torch.ones(3))
    assert compat.is_transform_wrapper(left[0])
    assert not compat.is_transform_wrapper(torch.ones(3))
    assert not compat.is_transform_wrapper(compat.unwrap_dead_wrappers((left[0],))[0])


def test_modes_tracing_and_autocast_are_seen():
    def state() -> tuple:
        counts = compat.dispatch_mode_count(), compat.function_mode_count()
        return *counts, compat.autocasts_anywhere(), compat.tracing_state() is not None

    assert state() == (0, 0, False, False) and compat.dispatch_modes() == []
    with TorchDispatchMode() as mode:
        assert state() == (1, 0, False, False) and compat.dispatch_modes() == [mode]
    with TorchFunctionMode():
        assert state() == (0, 1, False, False)
    with torch.autocast("cpu", torch.bfloat16):
        assert state()[2]
    seen = []
    torch.jit.trace(lambda x: seen.append(state()[3]) or x + 1, torch.ones(1), check_trace=False)
    assert seen == [True]


def test_fakes_are_known():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert compat.is_fake(type(torch.empty(2))) and not compat.is_fake(nn.Parameter)


def test_an_asynchronous_assertion_fails_on_what_is_false():
    compat.assert_async(torch.tensor(True), "no")
    with pytest.raises(RuntimeError, match="a reason"):
        compat.assert_async(torch.tensor(False), "a reason")


def test_the_device_s_index_stream_and_allocator_are_asked_for():
    if torch.cuda.is_available():
        assert compat.current_device_index() == torch.cuda.current_device()
        stream = torch.cuda.current_stream().cuda_stream
        assert compat.current_stream(torch.cuda.current_device()) == stream
        assert not compat.is_capturing()
    new = compat.empty_strided("cpu")
    made = new((2, 3), (1, 2), torch.float16)
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.float16)
    assert compat.empty_strided("no such device") is None


def test_triton_s_wrapper_of_tensor_maps_is_taken_off_where_it_is_known():
    def wrapper(*arguments):
        return launcher, tensordesc_meta

    launcher, tensordesc_meta = print, [None]
    unknown = None, print, lambda: 0, wrapper
    assert [compat.unwrap_launcher(run) for run in unknown] == [None] * 4
    tensordesc_meta = ["known"]
    assert compat.unwrap_launcher(wrapper) == (print, ["known"])
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    if hasattr(driver, "wrap_handle_tensordesc"):
        meta = ["of dy", "of w"]
        signature = {0: "tensordesc<bf16[128,64]>", 1: "tensordesc<bf16[128,64]>", 2: "*bf16"}
        wrapped = driver.wrap_handle_tensordesc(print, signature, meta)
        assert compat.unwrap_launcher(wrapped) == (print, meta)


def test_gluon_s_shared_memory_is_reinterpreted_by_either_name():
    gl = pytest.importorskip("triton.experimental.gluon.language")
    assert callable(compat.reinterpret(gl.shared_memory_descriptor))


def test_a_user_s_interpreter_computes_in_bf16_as_plain_pytorch():
    """By any value that Triton takes; it multiplies bit patterns itself, 1.8e19 for 256."""
    pytest.importorskip("triton")
    code = """if True:
        import torch, fusedlib
        from fusedlib import reference
        from fusedlib.launch import has_kernels
        x, gate, up, down = (torch.randn(n, 32).bfloat16() for n in (48, 32, 32, 32))
        labels = torch.arange(48) % 32
        for actual, true in (
            (fusedlib.swiglu_mlp(x, (gate, up), down), reference.swiglu_mlp(x, gate, up, down)),
            (fusedlib.rms_norm(x, down[0]), reference.rms_norm(x, down[0])),
            (fusedlib.linear_cross_entropy(x, down, labels),
             reference.linear_cross_entropy(x, down, labels)),
        ):
            torch.testing.assert_close(actual, true, rtol=2e-2, atol=2e-2 * true.abs().max().item())
        print("kernels" if has_kernels(x.device) else "plain")
    """
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "true"},
        capture_output=True, text=True, timeout=limits.PROCESS_S, check=False, cwd=paths.ROOT,
    )  # fmt: skip
    assert done.stdout == "kernels\n", done.stdout + done.stderr[-2000:]


def test_a_module_compiled_by_itself_is_known():
    layer = nn.Linear(2, 2)
    assert not compat.calls_more_than_its_class(layer)
    layer.compile()
    assert compat.calls_more_than_its_class(layer)


def test_a_function_is_constant_while_compiling_as_torch_marks_it():
    def one() -> int:
        return 1

    def other() -> int:
        return 1

    marks = vars(compat.constant_while_compiling(one))
    assert marks == vars(torch.compiler.assume_constant_result(other)) != {}
