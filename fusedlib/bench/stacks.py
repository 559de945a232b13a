"""Deep stacks of SwiGLU MLPs, as modules that a network would hold, each y the next layer's x."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from fusedlib import reference
from fusedlib.bench.problems import SwiGLUProblem
from fusedlib.modules import SwiGLUMLP


class PlainMLP(nn.Module):
    """`reference.swiglu_mlp` with weights of its own: eager PyTorch."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.empty(intermediate_size, hidden_size))
        self.w_up = nn.Parameter(torch.empty(intermediate_size, hidden_size))
        self.w_down = nn.Parameter(torch.empty(hidden_size, intermediate_size))

    def forward(self, x: Tensor) -> Tensor:
        """y of x (..., hidden_size)."""
        return reference.swiglu_mlp(x, self.w_gate, self.w_up, self.w_down)


def _liger(hidden_size: int, intermediate_size: int) -> nn.Module:
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    return LigerSwiGLUMLP(SimpleNamespace(**sizes, hidden_act="silu"))


def _fused_input(hidden_size: int, intermediate_size: int) -> nn.Module:
    return SwiGLUMLP(hidden_size, intermediate_size, save="input")


MODULES: dict[str, Callable[[int, int], nn.Module]] = {
    "eager": PlainMLP,
    "liger": _liger,
    "fused": SwiGLUMLP,
    "fused (input)": _fused_input,
}


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError for a rival that has no module, with the list of those that have one."""
    if unknown := [name for name in names if name not in MODULES]:
        raise ValueError(f"no module of {unknown[0]!r} to stack; there are {', '.join(MODULES)}")


def build(name: str, problem: SwiGLUProblem, layers: int) -> nn.Sequential:
    """That many layers on the current default device, weights drawn small, in the problem's dtype.

    Raises:
        ValueError: as `check_names`.
    """
    check_names([name])
    before = torch.get_default_dtype()
    torch.set_default_dtype(problem.torch_dtype)  # never a copy in fp32 beside it
    try:
        made = MODULES[name]
        sizes = problem.hidden_size, problem.intermediate_size
        stack = nn.Sequential(*(made(*sizes) for _ in range(layers)))
    finally:
        torch.set_default_dtype(before)
    for weight in stack.parameters():
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return stack
