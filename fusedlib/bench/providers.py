"""Who is measured: one decorated function a rival.

A provider takes the problem's inputs, sets itself up, and returns a `Workload`: a callable without
arguments that gives y, and the leaves whose gradients a backward pass must fill. Everything else
(tests, sweeps, tables, colours) goes through `PROVIDERS` and names nobody.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fusedlib import reference
from fusedlib.bench.machine import version_of
from fusedlib.bench.problems import Inputs
from fusedlib.bench.results import Unavailable


@dataclass(frozen=True)
class Workload:
    """One provider, ready to run.

    `forward` gives y; `leaves` are the tensors that receive gradients, by the reference's names.
    Packed gate and up rows go by the name `w_gate_up`.
    """

    forward: Callable[[], Tensor]
    leaves: Mapping[str, Tensor]

    def reset(self) -> None:
        """Drop all gradients."""
        for leaf in self.leaves.values():
            leaf.grad = None


@dataclass(frozen=True)
class Provider:
    """A registered rival: its name, its set-up, and the packages it cannot do without."""

    name: str
    build: Callable[[Inputs], Workload]
    requires: tuple[str, ...]
    needs_cuda: bool

    def set_up(self, inputs: Inputs) -> Workload:
        """The workload on these inputs.

        Raises:
            Unavailable: a package is missing, or it needs a CUDA GPU and the inputs are elsewhere.
        """
        for package in self.requires:
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"the package {package} is not installed")
        if self.needs_cuda and inputs.x.device.type != "cuda":
            raise Unavailable(f"needs a CUDA GPU, the inputs are on {inputs.x.device.type}")
        return self.build(inputs)

    def version(self) -> str:
        """Versions of the packages behind it; torch's for those that need nothing else."""
        packages = self.requires or ("torch",)
        return ", ".join(f"{p} {version_of(p.replace('_', '-'))}" for p in packages)


PROVIDERS: dict[str, Provider] = {}


def provider(
    name: str, *, requires: tuple[str, ...] = (), needs_cuda: bool = False
) -> Callable[[Callable[[Inputs], Workload]], Callable[[Inputs], Workload]]:
    """Register a rival under `name`.

    Raises:
        ValueError: the name is taken.
    """

    def register(build: Callable[[Inputs], Workload]) -> Callable[[Inputs], Workload]:
        if name in PROVIDERS:
            raise ValueError(f"there is a provider named {name!r} already")
        PROVIDERS[name] = Provider(name, build, requires, needs_cuda)
        return build

    return register


def get(name: str) -> Provider:
    """The provider of that name.

    Raises:
        ValueError: unknown, with the list of known ones.
    """
    if name not in PROVIDERS:
        raise ValueError(f"unknown provider {name!r}; known: {', '.join(sorted(PROVIDERS))}")
    return PROVIDERS[name]


@provider("eager")
def eager(inputs: Inputs) -> Workload:
    """Plain PyTorch, an operation at a time."""
    leaves = inputs.leaves()
    return Workload(lambda: reference.swiglu_mlp(**leaves), leaves)


@provider("inductor")
def inductor(inputs: Inputs) -> Workload:
    """The same lines through `torch.compile`."""
    leaves = inputs.leaves()
    compiled = torch.compile(reference.swiglu_mlp, fullgraph=True, dynamic=False)
    return Workload(lambda: compiled(**leaves), leaves)


@provider("liger", requires=("liger_kernel",), needs_cuda=True)
def liger(inputs: Inputs) -> Workload:
    """Liger's fused silu(gate) · up between cuBLAS products, as its `LigerSwiGLUMLP` does it."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    leaves = inputs.leaves()

    def forward() -> Tensor:
        gate = nn.functional.linear(leaves["x"], leaves["w_gate"])
        up = nn.functional.linear(leaves["x"], leaves["w_up"])
        return nn.functional.linear(LigerSiLUMulFunction.apply(gate, up), leaves["w_down"])

    return Workload(forward, leaves)


@provider("fused", requires=("triton",), needs_cuda=True)
def fused(inputs: Inputs) -> Workload:
    """Our kernels: gate, up and activation in one, and the backward of the down projection."""
    from fusedlib.functional import swiglu_mlp

    w_gate_up = torch.cat([inputs.w_gate, inputs.w_up]).detach().requires_grad_()
    leaves = {"x": inputs.x, "w_gate_up": w_gate_up, "w_down": inputs.w_down}
    return Workload(lambda: swiglu_mlp(inputs.x, w_gate_up, inputs.w_down), leaves)
