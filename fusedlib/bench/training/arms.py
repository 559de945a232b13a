"""Who computes the layer: an arm is a function from x and the weights to h, and what it needs.

The published kernel is wrong and may not be imported from here: whoever measures hands it over as
one more arm (see `published`).
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fusedlib
from fusedlib import functional, reference
from fusedlib.bench.machine import version_of
from fusedlib.bench.results import Unavailable
from fusedlib.bench.torch_precision import matmul_settings
from fusedlib.bench.training.network import Packed, Separate

PRECISIONS = {
    "fp32": "IEEE products and convolutions in fp32",
    "tf32": "TF32 products and convolutions",
    "bf16": "bf16 autocast",
}
# Three shapes of batch and three precisions a process; Dynamo's own limit is eight.
RECOMPILATIONS = 64


@dataclass(frozen=True)
class Arm:
    """One way to compute the layer.

    Attributes:
        name: in rows and legends.
        function: h of (x, w_gate, w_up), or of (x, w_gate_up) where `packed`.
        packed: whether gate and up rows lie in one parameter.
        trained: whether gate and up weights are trained.
        wrong: an arm known to miss the reference, trained as the study's subject.
        requires: packages it cannot do without.
        needs_cuda: whether it runs on NVIDIA cards only.
        distribution: the package whose version tells what was measured.
    """

    name: str
    function: Callable[..., Tensor]
    packed: bool = False
    trained: bool = True
    wrong: bool = False
    requires: tuple[str, ...] = ()
    needs_cuda: bool = False
    distribution: str = "torch"

    def layer(
        self, hidden: int, width: int, device: torch.device | str | None = None
    ) -> Separate | Packed:
        """The layer with freshly drawn weights."""
        kind = Packed if self.packed else Separate
        return kind(hidden, width, self.function, trained=self.trained, device=device)

    def check_available(self, device: str, precision: str) -> None:
        """Whether it can run here.

        Raises:
            Unavailable: a package, a CUDA GPU or TF32 is missing.
        """
        on_cuda = torch.device(device).type == "cuda"
        for package in self.requires:
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"the package {package} is not installed")
        if self.needs_cuda and not on_cuda:
            raise Unavailable(f"needs a CUDA GPU, this is {device}")
        if precision == "tf32" and not (on_cuda and torch.cuda.get_device_capability() >= (8, 0)):
            raise Unavailable("TF32 needs a CUDA GPU of compute capability 8.0 or later")

    def version(self) -> str:
        """Name and version of the package behind it."""
        ours = self.distribution == "fusedlib"
        version = fusedlib.__version__ if ours else version_of(self.distribution)
        return f"{self.distribution} {version}"


def _inductor(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """torch.compile of the reference's line, default mode, fullgraph=True, dynamic=False."""
    compiled = _compiled.get("swiglu")
    if compiled is None:
        torch._dynamo.config.recompile_limit = RECOMPILATIONS
        compiled = torch.compile(reference.swiglu, fullgraph=True, dynamic=False)
        _compiled["swiglu"] = compiled
    return compiled(x, w_gate, w_up)


_compiled: dict[str, Callable[..., Tensor]] = {}


def _liger(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """Liger's silu(gate) · up behind two products, as its `LigerSwiGLUMLP` has it."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gate, up = nn.functional.linear(x, w_gate), nn.functional.linear(x, w_up)
    return LigerSiLUMulFunction.apply(gate, up)


ARMS = {
    arm.name: arm
    for arm in (
        Arm("eager", reference.swiglu),
        Arm("inductor", _inductor),
        Arm("liger", _liger, requires=("liger_kernel",), needs_cuda=True,
            distribution="liger-kernel"),
        Arm("fused", functional.swiglu, packed=True, distribution="fusedlib"),
        Arm("frozen", reference.swiglu, trained=False),
    )
}  # fmt: skip
"""All arms but the published kernel."""

FLAWED = "flawed"


def published(function: Callable[[Tensor, Tensor], Tensor]) -> Arm:
    """The published kernel as an arm: wrong, and its gate and up weights receive no gradient."""
    return Arm(FLAWED, function, packed=True, wrong=True)


def get(name: str, others: Mapping[str, Arm]) -> Arm:
    """The arm of that name, ours or one of the others.

    Raises:
        ValueError: unknown, with the list of known ones.
    """
    known = {**ARMS, **others}
    if name not in known:
        raise ValueError(f"unknown arm {name!r}; known: {', '.join(known)}")
    return known[name]


@contextmanager
def settings(precision: str) -> Iterator[None]:
    """torch as this precision wants it, and convolutions by deterministic algorithms.

    Raises:
        ValueError: unknown precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; known: {', '.join(PRECISIONS)}")
    cudnn: Any = torch.backends.cudnn
    before = cudnn.conv.fp32_precision, cudnn.deterministic
    with ExitStack() as stack:
        stack.enter_context(matmul_settings("highest" if precision == "fp32" else "high", True))
        cudnn.conv.fp32_precision = "ieee" if precision == "fp32" else "tf32"
        cudnn.deterministic = True
        try:
            yield
        finally:
            cudnn.conv.fp32_precision, cudnn.deterministic = before


def autocast(precision: str, device: str) -> torch.autocast:
    """bf16 autocast, or none; weights are cast anew each step, in a CUDA graph they must be."""
    return torch.autocast(
        torch.device(device).type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    )
