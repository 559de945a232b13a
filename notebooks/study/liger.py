"""Whose kernels of Liger's run: it has them in Triton, and many of them in CuTe too.

Installed alone, Liger runs Triton. Where `cutlass` can be imported it gives RoPE to CuTe by itself.
With LIGER_KERNEL_IMPL=cutedsl, which it reads when it is imported, SwiGLU and RMSNorm are CuTe's as
well, and the fused loss, which then raises on Hopper. Here both run in one process, in turns, and
the rows' `path` names those whose kernels were seen.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType

from fusedlib.bench.attempt import Unavailable
from study.profiler import profiling

TRITON, CUTE = "nvidia-triton", "nvidia-cutedsl"
"""As Liger calls them."""
FOR_BLACKWELL = "LigerFusedLinearCrossEntropyFunction"
"""Of CuTe's functions the one that raises on every other card."""


LOSS = "liger_fused_linear_cross_entropy"


def has_cute() -> bool:
    """Whether Liger can run CuTe's kernels, by what is installed."""
    return importlib.util.find_spec("cutlass") is not None


@cache
def _replaced() -> list[tuple[dict[str, Any], str, Any, Any]]:
    """What the variable replaces where modules of `liger_kernel.transformers` have it: their
    names, one of these, what it is, and CuTe's.
    """
    from liger_kernel import ops
    from liger_kernel.ops.cutedsl import ops as cute

    for name in ("functional", "rms_norm", "swiglu"):
        importlib.import_module(f"liger_kernel.transformers.{name}")
    blackwell = torch.cuda.get_device_capability() == (10, 0)
    names = [name for name in cute.__all__ if blackwell or name != FOR_BLACKWELL]
    spaces = [
        vars(module) for name, module in sys.modules.items()
        if name.startswith("liger_kernel.transformers.")
    ]  # fmt: skip
    return [
        (space, name, space[name], getattr(cute, name))
        for space in spaces for name in names
        if name in space and space[name] is getattr(ops, name, None)
    ]  # fmt: skip


@contextmanager
def kernels_of(implementation: str, loss: Callable[..., Any] | None = None) -> Iterator[None]:
    """While inside, Liger's functions run these kernels wherever it has them; a `loss` stands in
    the place of its fused one.
    """
    from liger_kernel import backends
    from liger_kernel.transformers import functional

    replaced, before = [*_replaced()] if implementation == CUTE else [], backends.get_impl()
    if loss is not None:
        replaced.append((vars(functional), LOSS, getattr(functional, LOSS), loss))
    backends.set_impl(implementation)
    for space, name, _, cute in replaced:
        space[name] = cute
    try:
        yield
    finally:
        for space, name, own, _ in replaced:
            space[name] = own
        backends.set_impl(before)


def by(
    implementation: str, call: Callable[..., Any], loss: Callable[..., Any] | None = None
) -> Callable[..., Any]:  # fmt: skip
    """A call whose forward pass runs these kernels of Liger's; backward is then theirs too."""
    if implementation == TRITON and not has_cute():
        return call  # there is no other

    def called(*given: Any, **more: Any) -> Any:
        with kernels_of(implementation, loss):
            return call(*given, **more)

    return called


def hopper_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, *, reduction: str = "mean",
    ignore_index: int = -100, **more: Any,
) -> Tensor:  # fmt: skip
    """Liger's fused loss in CuTe for Hopper, which none of its settings reaches."""
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as sm90

    if asked := {name: value for name, value in more.items() if value not in (None, False)}:
        raise Unavailable(f"liger_fused_linear_cross_entropy_sm90 does not take {asked}")
    try:
        loss: Tensor = sm90.liger_fused_linear_cross_entropy_sm90(
            hidden, weight, target, ignore_index, reduction
        )
    except NotImplementedError as problem:  # tokens and vocabulary are multiples of its tiles
        raise Unavailable(str(problem)) from problem
    return loss


def is_liger(provider: str) -> bool:
    """Whether a provider runs Liger's kernels, so that its rows say whose."""
    return provider.partition("-")[0] == "liger"


def path(work: Callable[[], object]) -> str | None:
    """Whose kernels of Liger's `work` starts on a CUDA device, by the kernels' names; None, for
    nothing is looked at, where cutlass is not installed and there is no choice.
    """
    if not has_cute():
        return None
    work()  # what is compiled at the first call is no kernel of it
    with profiling("cuda") as profile:
        work()
    return _path({e.key for e in profile.key_averages() if e.device_type == DeviceType.CUDA})


def _path(kernels: set[str]) -> str:
    from triton.runtime import KernelInterface

    own = {
        name for module_name, module in list(sys.modules.items())
        if module_name.startswith("liger_kernel.")
        for name, value in vars(module).items() if isinstance(value, KernelInterface)
    }  # fmt: skip
    seen = {
        CUTE: any(name.startswith("kernel_cutlass") for name in kernels),
        TRITON: bool(kernels & own),
    }
    return " and ".join(name for name, ran in seen.items() if ran) or "no kernel of Liger's"
