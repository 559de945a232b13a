"""The private names of torch and Triton that the library uses: spelt here, and nowhere else.

`tests/test_internals.py` tries each of them, so that a release which changes one fails a test with
its name. None of them has a public counterpart that costs as little, or any at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch import utils as functorch_utils
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.utils import _python_dispatch

# --- transforms ----------------------------------------------------------------------------------

# True for a tensor made by a transform of torch.func, in use or left over.
is_transform_wrapper = torch._C._functorch.is_functorch_wrapped_tensor
# True for a gradient made by is_grads_batched or vectorize=True.
is_batched_gradient = torch._C._functorch.is_legacy_batchedtensor
# The tensor within a wrapper that is left over; of one tensor, and of all in a tuple.
unwrap_if_dead = torch._C._functorch.unwrap_if_dead
unwrap_dead_wrappers = functorch_utils.unwrap_dead_wrappers


def in_forward_mode() -> bool:
    """True inside `torch.autograd.forward_ad.dual_level`."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """True under a transform of torch.func and in forward-mode differentiation.

    Both need every step as an ordinary operation; the kernels would drop tangents silently.
    """
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


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


# The collections of hooks in a module's `__dict__`, at the least cost; Dynamo cannot trace it.
own_hooks = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
# Marks of a module that FSDP has split, and of a copy that `torch.nn.DataParallel` makes of one.
FSDP_MANAGED, REPLICA = "_is_fsdp_managed_module", "_is_replica"
COMPILED_CALL = "_compiled_call_impl"  # in the `__dict__` of a module that was compiled by itself


def hooks_of(module: Any) -> Iterator[Any]:
    """The hooks that were registered on a module and run when it is called."""
    for hooks in own_hooks(module.__dict__):
        yield from hooks.values()


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
assert_async = torch._assert_async  # fails on the device, without waiting for it

# --- the device ----------------------------------------------------------------------------------

# What Triton's own launcher asks of torch; absent from a torch without CUDA, where nobody asks.
current_device_index: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


def empty_strided(device_type: str) -> Callable[..., Tensor] | None:
    """Inductor's allocator: an empty tensor of a shape, strides and a dtype, on the current device.

    None where torch has none for that type of device.
    """
    function = getattr(torch._C._dynamo.guards, f"_empty_strided_{device_type}", None)
    return cast("Callable[..., Tensor] | None", function)


# --- Triton --------------------------------------------------------------------------------------


def reinterpret(descriptor: Any) -> Any:
    """Gluon's view of shared memory by another shape, a method; Triton 3.9 renamed it."""
    return getattr(descriptor, "reinterpret", None) or descriptor._reinterpret
