"""SwiGLU MLPs as modules that a network would hold: rivals of the task `MODULE`.

A rival makes a module of the network's own `models.transformer.SwiGLU`: same projections, same
memory, same names, computed otherwise. So several can take turns in one model, and what one step
updates all have. `swiglu_mlp` registers a plain function here and in the races of the MLP alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusedlib.ops.mlp import route
from fusedlib.ops.mlp.module import SwiGLUMLP
from measure.mlp_problem import PLAIN_PATH, Inputs, SwiGLUProblem
from measure.racing import rivals
from measure.racing.rivals import Bound, Task, Workload, rival
from models.transformer import SwiGLU, sharing_copy

TASK = Task[[Inputs], Workload | Bound]("swiglu")
MODULE = Task[[SwiGLU], nn.Module]("mlp")
# How the reference calls the modules' weights.
_OPERANDS = {"gate_proj.weight": "w_gate", "up_proj.weight": "w_up", "down_proj.weight": "w_down"}


def swiglu_mlp(
    name: str, *, path: str | None = None, **options: Any
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:  # fmt: skip
    """Register a function of x, w_gate, w_up and w_down that gives y, as in `fusedlib.reference`,
    as a rival of every study that races a SwiGLU MLP.

    Args:
        path: which code it runs, where its package has several implementations.
    """

    def register(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def alone(inputs: Inputs) -> Workload:
            leaves = inputs.leaves()
            return Workload(lambda: compute(**leaves), leaves, path=path)

        def module(own: SwiGLU) -> nn.Module:
            return FunctionMLP(own, compute)

        for build in (alone, module):
            build.__doc__, build.__module__ = compute.__doc__, compute.__module__
        rival(TASK, name, **options)(alone)
        rival(MODULE, name, **options)(module)
        return compute

    return register


class FunctionMLP(nn.Module):
    """An MLP's own projections, computed by a function of x and their three weights."""

    def __init__(self, own: SwiGLU, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = own.gate_proj, own.up_proj, own.down_proj
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        return self.compute(x, *(p.weight for p in (self.gate_proj, self.up_proj, self.down_proj)))


def compiled(own: SwiGLU, backend: str = "inductor") -> nn.Module:
    """The model's own lines through torch.compile (dynamic=False); all layers share one graph."""
    same = sharing_copy(own)
    same.compile(backend=backend, dynamic=False)
    return same


class FusedMLP(SwiGLUMLP):
    """`fusedlib.SwiGLUMLP`."""

    def __init__(self, own: SwiGLU, save: str = "gate_up") -> None:
        inner, width = own.gate_proj.weight.shape
        super().__init__(width, inner, save=save, device="meta")
        self.gate_proj, self.up_proj, self.down_proj = own.gate_proj, own.up_proj, own.down_proj


rival(MODULE, "eager", settings="The model's own SwiGLU, plain PyTorch")(lambda own: own)
rival(
    MODULE, "inductor", traits=frozenset({"slow to set up"}),
    settings="The model's own lines through torch.compile, dynamic=False, one graph for all layers",
)(compiled)  # fmt: skip
rival(
    MODULE, "fused", requires=("triton",), needs_cuda=True,
    settings="fusedlib.SwiGLUMLP, which runs plain PyTorch where fp32 products are small",
)(FusedMLP)  # fmt: skip
rival(
    MODULE, "fused-input", requires=("triton",), needs_cuda=True, traits=frozenset({"on request"}),
    settings='fusedlib.SwiGLUMLP with save="input"',
)(partial(FusedMLP, save="input"))  # fmt: skip


def path(layer: nn.Module, x: Tensor) -> str | None:
    """Which code of ours a layer runs on x; None for other rivals' layers."""
    if not isinstance(layer, SwiGLUMLP):
        return None
    gate, up = layer.gate_proj.weight, layer.up_proj.weight
    return "kernels" if route.runs_kernels(x, gate, up) else PLAIN_PATH


def stack(name: str, problem: SwiGLUProblem, layers: int, device: str) -> nn.Sequential:
    """That many layers of a rival in the problem's dtype, weights drawn small."""
    sizes, build = (problem.hidden_size, problem.intermediate_size), rivals.get(MODULE, name).build
    factory: dict[str, Any] = {"device": device, "dtype": problem.torch_dtype}
    return nn.Sequential(*(build(SwiGLU(*sizes, **factory)) for _ in range(layers)))


def one_layer(name: str, problem: SwiGLUProblem, inputs: Inputs) -> Workload:
    """A layer with the inputs' weights, to be held against the reference."""
    layer = stack(name, problem, 1, str(inputs.x.device))[0]
    given = inputs.leaves()
    leaves = {_OPERANDS[name]: weight for name, weight in layer.named_parameters()}
    with torch.no_grad():
        for operand, weight in leaves.items():
            weight.copy_(given[operand])
    return Workload(lambda: layer(inputs.x), {"x": inputs.x, **leaves}, path=path(layer, inputs.x))
