"""Deep stacks of SwiGLU MLPs, as modules that a network would hold: rivals of the task `STACK`."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from fusedlib import modules, reference
from fusedlib.bench import rivals
from fusedlib.bench.rivals import Workload, rival
from fusedlib.kernels.host import route
from measure.problems import Inputs, SwiGLUProblem
from measure.swiglu import PLAIN_PATH

STACK = "swiglu stack"
# How modules name what the reference calls otherwise.
_NAMES = {"gate_proj.weight": "w_gate", "up_proj.weight": "w_up", "down_proj.weight": "w_down"}


class PlainMLP(nn.Module):
    """`reference.swiglu_mlp` with weights of its own: PyTorch, an operation at a time."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.empty(intermediate_size, hidden_size))
        self.w_up = nn.Parameter(torch.empty(intermediate_size, hidden_size))
        self.w_down = nn.Parameter(torch.empty(hidden_size, intermediate_size))

    def forward(self, x: Tensor) -> Tensor:
        """y of x (..., hidden_size)."""
        return reference.swiglu_mlp(x, self.w_gate, self.w_up, self.w_down)


@rival(STACK, "eager")
def eager(hidden_size: int, intermediate_size: int) -> nn.Module:
    """Plain PyTorch, an operation at a time."""
    return PlainMLP(hidden_size, intermediate_size)


@rival(STACK, "liger", requires=("liger_kernel",), needs_cuda=True)
def liger(hidden_size: int, intermediate_size: int) -> nn.Module:
    """Liger's `LigerSwiGLUMLP`."""
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    return LigerSwiGLUMLP(SimpleNamespace(**sizes, hidden_act="silu"))


@rival(STACK, "fused", requires=("triton",), needs_cuda=True)
def fused(hidden_size: int, intermediate_size: int) -> nn.Module:
    """`fusedlib.SwiGLUMLP`."""
    return modules.SwiGLUMLP(hidden_size, intermediate_size)


@rival(STACK, "fused-input", requires=("triton",), needs_cuda=True)
def fused_input(hidden_size: int, intermediate_size: int) -> nn.Module:
    """`fusedlib.SwiGLUMLP` with save="input"."""
    return modules.SwiGLUMLP(hidden_size, intermediate_size, save="input")


def build(name: str, problem: SwiGLUProblem, layers: int, device: str) -> nn.Sequential:
    """That many layers, weights drawn small, in the problem's dtype and never in fp32 beside it."""
    one, before = rivals.get(STACK, name).build, torch.get_default_dtype()
    torch.set_default_dtype(problem.torch_dtype)
    try:
        with torch.device(device):
            sizes = problem.hidden_size, problem.intermediate_size
            stack = nn.Sequential(*(one(*sizes) for _ in range(layers)))
    finally:
        torch.set_default_dtype(before)
    for weight in stack.parameters():
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return stack


def path(layer: nn.Module, x: Tensor) -> str | None:
    """Which code of ours a layer runs on x; None for other rivals' layers."""
    if not isinstance(layer, modules.SwiGLUMLP):
        return None
    gate, up = layer.gate_proj.weight, layer.up_proj.weight
    return "kernels" if route.runs_kernels(x, gate, up) else PLAIN_PATH


def one_layer(name: str, problem: SwiGLUProblem, inputs: Inputs) -> Workload:
    """A layer with the inputs' weights, to be held against the reference."""
    layer = build(name, problem, 1, str(inputs.x.device))[0]
    given = inputs.leaves()
    leaves = {_NAMES.get(n, n): weight for n, weight in layer.named_parameters()}
    with torch.no_grad():
        for leaf_name, leaf in leaves.items():
            leaf.copy_(given[leaf_name])
    return Workload(lambda: layer(inputs.x), {"x": inputs.x, **leaves}, path=path(layer, inputs.x))
