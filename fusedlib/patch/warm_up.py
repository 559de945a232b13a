"""`warm_up`: every kernel that a module's MLPs can need, compiled before the first step."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusedlib.launch import has_kernels
from fusedlib.ops.arguments import KERNEL_DTYPES
from fusedlib.ops.mlp.module import SwiGLUMLP
from fusedlib.ops.mlp.route import MLPProblem, disable_hopper_kernels, hopper_kernels
from fusedlib.patch.apply import why_plain
from fusedlib.patch.modules import FusedMLP


@dataclass(frozen=True)
class WarmUpReport:
    """What `warm_up` did.

    Attributes:
        names: of all kernels that the module can need, by kernel, variant, sizes and dtype.
        seconds: what it took; most of it in the first process alone, for Triton keeps them on disk.
        why: the reason why nothing was compiled; None where something was.
    """

    names: tuple[str, ...]
    seconds: float
    why: str | None = None

    def __str__(self) -> str:
        lines = "\n".join(f"  {name}" for name in self.names)
        why = f": {self.why}" if self.why else ""
        return f"{len(self.names)} kernels in {self.seconds:.1f} s{why}\n{lines}".rstrip()


def warm_up(
    module: nn.Module, dtypes: Iterable[torch.dtype] | None = None, *,
    tokens: range | int | None = None, progress: bool = True,
) -> WarmUpReport:  # fmt: skip
    """Compile all kernels that the gated MLPs in a module can need, several at a time.

    No kernel depends on the number of tokens, so that afterwards no length compiles anything. Every
    `SwiGLUMLP` and `GeGLUMLP` is looked at, and every MLP that `apply_to` has fused; layers of the
    same sizes share their kernels. Nothing is computed, and no memory of the GPU is taken but the
    kernels' own. Without it the first training step compiles what it needs, and the first of
    another kind (few tokens, inference) again. Triton keeps what is compiled on disk
    (`TRITON_CACHE_DIR`), where the next process only reads it.

    Left out are the products of fp32, and operands that do not begin at multiples of 16 bytes.

    Args:
        module: on its device.
        dtypes: of x and weights in the calls to come, under autocast autocast's; None takes those
            of the weights.
        tokens: the numbers of tokens to come, `range(1, 4097)` or one; None takes all.
        progress: show a bar, if tqdm is there.

    Returns:
        What was compiled. Nothing, where plain PyTorch runs instead of kernels, and why.

    Raises:
        TypeError: a module, dtype or number of tokens of another kind.
        ValueError: a dtype that the kernels do not take, no dtypes, or no tokens.
    """
    began = time.perf_counter()
    wanted, lengths = _dtypes(dtypes), _lengths(tokens)
    if not isinstance(module, nn.Module):
        raise TypeError(f"warm_up takes a torch.nn.Module, got {type(module).__name__}")
    mlps = list(_fused_mlps(module))
    layers = dict.fromkeys(
        _problem(activation, weight, dtype)
        for activation, weight in mlps
        for dtype in wanted or (weight.dtype,)
        if dtype in KERNEL_DTYPES and has_kernels(weight.device) and weight.is_cuda
    )
    if not layers:
        why = _why_nothing([weight for _, weight in mlps])
        return WarmUpReport((), time.perf_counter() - began, why)
    from triton.errors import TritonError

    from fusedlib.ops.mlp import plan

    needed: dict[Hashable, tuple[str, int, Any]] = {}
    for problem in layers:
        listed = plan.layer_binaries(problem, lengths)
        dtype = str(problem.dtype).removeprefix("torch.")
        sizes = f"{problem.activation}, {problem.hidden}·{problem.inner}, {dtype}"
        device = plan.device_index(problem)
        needed |= {key: (f"{each.name} ({sizes})", device, each) for key, each in listed.items()}
    for _, device, each in needed.values():
        each.launch.build_ahead(device, *each.matrices)
    for _, device, each in _with_bar(needed.values(), progress):
        try:
            each.launch.build(device, *each.matrices)
        except TritonError as error:
            if not hopper_kernels() or not each.launch.config.stages:  # warps have no roles
                raise
            disable_hopper_kernels(error)
            return warm_up(module, wanted or None, tokens=tokens, progress=progress)
    return WarmUpReport(tuple(name for name, *_ in needed.values()), time.perf_counter() - began)


def _why_nothing(weights: list[Any]) -> str:
    if not weights:
        return "there is no SwiGLUMLP or GeGLUMLP, and no MLP that apply_to has fused"
    if all(weight.is_meta for weight in weights):
        return "the weights lie on meta"
    first = weights[0]
    return why_plain(weights) or f"no kernels are for {first.dtype} on {first.device}"


def _fused_mlps(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Activation and down weight (hidden, inner) of every MLP that runs fused."""
    for each in module.modules():
        if isinstance(each, SwiGLUMLP | FusedMLP):
            activation, weights = each.activation, each.weights()
            if activation is not None and weights is not None:
                yield activation, weights[1]


def _problem(activation: str, w_down: Tensor, dtype: torch.dtype) -> MLPProblem:
    """The problem of an MLP at any number of tokens."""
    device, (hidden, inner) = torch.device("cuda", w_down.device.index or 0), w_down.shape
    return MLPProblem(device, dtype, "ieee", 0, hidden, inner, activation=activation)


def _dtypes(given: Iterable[torch.dtype] | None) -> tuple[torch.dtype, ...]:
    if given is None:
        return ()
    several = isinstance(given, Iterable) and not isinstance(given, str)
    listed: tuple[Any, ...] = tuple(given) if several else (given,)
    if not listed:
        raise ValueError(f"dtypes must be at least one, or None for the weights', got {given!r}")
    for dtype in listed:
        if not isinstance(dtype, torch.dtype):
            number = f"; tokens={dtype} is for a number of tokens" if isinstance(dtype, int) else ""
            raise TypeError(f"dtypes must be torch dtypes, got {dtype!r}{number}")
        if dtype not in KERNEL_DTYPES:
            names = ", ".join(map(str, KERNEL_DTYPES))
            raise ValueError(f"dtypes must be among {names}, got {dtype}")
    return listed


def _lengths(given: range | int | None) -> range | None:
    if given is None:
        return None
    if not isinstance(given, (range, int)) or isinstance(given, bool):
        raise TypeError(f"tokens must be a range, a whole number or None, got {given!r}")
    lengths = given if isinstance(given, range) else range(given, given + 1)
    least, most = sorted((lengths[0], lengths[-1])) if lengths else (0, 0)
    if least < 1:
        raise ValueError(f"tokens must be at least 1, got {given!r}")
    return range(least, most + 1)


def _with_bar(needed: Collection[Any], wanted: bool) -> Iterable[Any]:
    """What is given, with a bar of how much of it is done, if tqdm is there."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return needed
    bar: Iterable[Any] = tqdm(needed, desc="fusedlib: kernels", unit="kernel", disable=not wanted)
    return bar
