"""The private names of torch and Triton that the library uses: spelt here, and nowhere else.

Where a release changes what one means, the laws of `tests/laws` fail, or `tests/test_compat.py`
where no law would. None of them has a public counterpart that costs as little, or any at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._functorch import utils as functorch_utils
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.utils import _python_dispatch

F = TypeVar("F", bound=Callable[..., Any])

# --- transforms ----------------------------------------------------------------------------------

# True for a tensor made by a transform of torch.func, in use or left over.
is_transform_wrapper = torch._C._functorch.is_functorch_wrapped_tensor
# True for a gradient made by is_grads_batched or vectorize=True.
is_batched_gradient = torch._C._functorch.is_legacy_batchedtensor
# The tensors of a tuple, those within a wrapper that is left over in its place.
unwrap_dead_wrappers = functorch_utils.unwrap_dead_wrappers


# True inside a transform of torch.func, also while torch traces it.
in_functorch = torch._C._are_functorch_transforms_active


def in_forward_mode() -> bool:
    """True inside `torch.autograd.forward_ad.dual_level`."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """True under a transform of torch.func and in forward-mode differentiation.

    Both need every step as an ordinary operation; the kernels would drop tangents silently.
    """
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or in_functorch()


def constant_while_compiling(function: F) -> F:
    """What torch.compiler.assume_constant_result does, without its import of all of torch._dynamo,
    1.5 s that only who compiles need wait for.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# --- who watches a call --------------------------------------------------------------------------

dispatch_mode_count = torch._C._len_torch_dispatch_stack
function_mode_count = torch._C._len_torch_function_stack
dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack
tracing_state = torch._C._get_tracing_state  # of torch.jit.trace
autocasts_anywhere = torch._C._is_any_autocast_enabled


def has_own_hooks(module: Any) -> bool:
    """True if a call of the module runs hooks that were registered on it."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks
        or module._backward_hooks or module._backward_pre_hooks
    )  # fmt: skip


def calls_more_than_its_class(module: Any) -> bool:
    """True if a call of the module runs hooks of its own, a `forward` that was put on it, or what
    `module.compile()` made; at the least cost, which Dynamo cannot trace.
    """
    held = module.__dict__
    return bool(
        held["_forward_hooks"] or held["_forward_pre_hooks"]
        or held["_backward_hooks"] or held["_backward_pre_hooks"]
        or "forward" in held or "_compiled_call_impl" in held
    )  # fmt: skip


def hooks_of(module: Any) -> Iterator[Any]:
    """The hooks that were registered on a module and run when it is called."""
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()
    yield from module._backward_hooks.values()
    yield from module._backward_pre_hooks.values()


def has_global_hooks() -> bool:
    """True if hooks run at the call of every module, which count operations for instance."""
    return bool(
        torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
    )  # fmt: skip


def is_fake(kind: type) -> bool:
    """True for the class of a tensor that stands for another while torch traces."""
    return kind.__module__.startswith("torch._subclasses.")


# --- autograd ------------------------------------------------------------------------------------

AccumulateGrad: Any = vars(torch._C._functions)["AccumulateGrad"]  # the node of a leaf
# True in a backward pass that may be run again.
retains_graph = torch._C._autograd._get_current_graph_task_keep_graph
# The hooks set by `torch.autograd.graph.saved_tensors_hooks`, or None. Called with False.
saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
# False where such hooks raise: in most transforms of torch.func, and where somebody disabled them.
keeps_by_hooks = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
assert_async = torch._assert_async  # fails on the device, without waiting for it
version_of = attrgetter("_version")  # how often a tensor was changed in place
base_of = attrgetter("_base")  # the tensor that a view is of, or None


def node_class(function: Any) -> Any:
    """The class of the graph's nodes of a `torch.autograd.Function`."""
    return function._backward_cls


# --- the device ----------------------------------------------------------------------------------

# What Triton's own launcher asks of torch; absent from a torch without CUDA, where nobody asks.
current_device_index: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
# True while the current stream's work goes into a CUDA graph.
is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", lambda: False
)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


def empty_strided(device_type: str) -> Callable[..., Tensor] | None:
    """Inductor's allocator: an empty tensor of a shape, strides and a dtype, on the current device.

    None where torch has none for that type of device.
    """
    function = getattr(torch._C._dynamo.guards, f"_empty_strided_{device_type}", None)
    return cast("Callable[..., Tensor] | None", function)


# --- Triton, which need not be there: imported where it is used -----------------------------------


def has_launch_hooks(runtime: Any) -> bool:
    """True if a profiler, say, has registered hooks that Triton calls at every launch.

    Args:
        runtime: `triton.knobs.runtime`.
    """
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))


def make_driver() -> None:
    """Have Triton find its driver, which one thread alone must do."""
    import triton

    _ = triton.runtime.driver.active


def build_launcher(kernel: Any) -> None:
    """Have the C function that starts a compiled kernel built, for Triton's cache on disk.

    The device is not asked for anything, for a graph may be captured meanwhile.
    """
    import triton

    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


def load_kernel(kernel: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function that starts a compiled kernel without metadata and hooks, and what it takes
    between the stream and the kernel's own arguments. The kernel is loaded on the current device.

    `run` looks for scratch memory at every call, 2 µs; these kernels have none, and 3.6 lets us
    past it.
    """
    import triton

    run, packed = kernel.run, kernel.packed_metadata  # `run` loads the binary
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if scratch or not triton.__version__.startswith("3.6."):
        return run, (kernel.function, packed, None, None, None)
    options = run.launch_cooperative_grid, run.launch_pdl
    return run.launch, (kernel.function, *options, None, None, packed, None, None, None)


def unwrap_launcher(run: Any) -> tuple[Callable[..., None], list[Any]] | None:
    """The C function below Triton 3.6's `wrap_handle_tensordesc`, and what is known of each map.

    None where `run` is not that wrapper, as in other releases.
    """
    names, cells = getattr(run, "__code__", None), getattr(run, "__closure__", None)
    if names is None or not cells:
        return None
    held = dict(zip(names.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    launcher, metadata = held.get("launcher"), held.get("tensordesc_meta")
    return (launcher, metadata) if launcher and metadata and None not in metadata else None


def encode_tensor_map(descriptor: Any, metadata: Any) -> list[Any]:
    """The tensor map, shape and strides of a matrix, as Triton 3.6's C function takes them."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    encoded: list[Any] = make_tensordesc_arg(descriptor, metadata)
    return encoded


def reinterpret(descriptor: Any) -> Any:
    """Gluon's view of shared memory by another shape, a method; Triton 3.9 renamed it."""
    return getattr(descriptor, "reinterpret", None) or descriptor._reinterpret


def mend_interpreted_bf16() -> None:
    """Have Triton's interpreter compute with bf16, which it holds as uint16 and multiplies so.

    Replaced are conversions between bf16 and fp32, exact one way and rounded to nearest even the
    other (it truncates), `tl.dot` of bf16 blocks, and `*` of them: an exact product, rounded once,
    as on a GPU. The library's kernels do nothing else with bf16.
    """
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    convert, dot, times = interpreter._convert_float, builder.create_dot, builder.create_fmul

    def widen(bits: Any) -> Any:
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def narrow(values: Any) -> Any:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return widen(data)
        if (source, target) == (tl.float32, tl.bfloat16):
            return narrow(data)
        return convert(data, source, target, rounding)

    def multiplied(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        a, b = (
            handle(widen(t.data), tl.float32) if t.dtype.scalar == tl.bfloat16 else t
            for t in (a, b)
        )
        return dot(self, a, b, d, *options)

    def scaled(self: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return times(self, a, b)
        return handle(narrow(widen(a.data) * widen(b.data)), tl.bfloat16)

    interpreter._convert_float = converted
    builder.create_dot, builder.create_fmul = multiplied, scaled
