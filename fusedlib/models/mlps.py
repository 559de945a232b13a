"""The same Transformer with its MLPs computed by others: same weights, same memory, same names.

An MLP made of a block's own changes how it is computed and nothing else. All read one set of
weights: for `packed`, whose gate and up rows lie in one parameter, the model's own gate and up
weights become views of its rows. So several can take turns in one model, and what one step updates
all have.
"""

import torch
from torch import Tensor, nn

from fusedlib.models.transformer import SwiGLU, Transformer
from fusedlib.modules import SwiGLUMLP


class LigerMLP(nn.Module):
    """Liger's silu(gate) · up between plain products, as its `LigerSwiGLUMLP` does it."""

    def __init__(self, own: SwiGLU) -> None:
        super().__init__()
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        self.gate_proj, self.up_proj, self.down_proj = own.gate_proj, own.up_proj, own.down_proj
        self._activate = LigerSiLUMulFunction.apply

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        return self.down_proj(self._activate(self.gate_proj(x), self.up_proj(x)))


class CompiledMLP(SwiGLU):
    """The model's own lines through torch.compile (dynamic=False); all layers share one graph."""

    def __init__(self, own: SwiGLU, backend: str = "inductor") -> None:
        nn.Module.__init__(self)
        self.gate_proj, self.up_proj, self.down_proj = own.gate_proj, own.up_proj, own.down_proj
        self.compile(backend=backend, dynamic=False)


def gradients(model: Transformer) -> dict[str, Tensor | None]:
    """Gradients by the state dict's names; packed gate and up rows apart, as views."""
    found: dict[str, Tensor | None] = {}
    for name, weight in model.named_parameters():
        if name.endswith("w_gate_up"):
            gate, up = (None, None) if weight.grad is None else weight.grad.chunk(2)
            stem = name.removesuffix("w_gate_up")
            found |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif name.endswith("w_down"):
            found[f"{name.removesuffix('w_down')}down_proj.weight"] = weight.grad
        else:
            found[name] = weight.grad
    return found


@torch.no_grad()
def packed(own: SwiGLU) -> SwiGLUMLP:
    """`fusedlib.SwiGLUMLP` on packed rows, of which the own gate and up weights become views.

    Raises:
        ValueError: what is given is no `SwiGLU` of a model.
    """
    if type(own) is not SwiGLU:
        raise ValueError(f"an MLP is made from a model's own SwiGLU, not from {type(own).__name__}")
    inner, width = own.gate_proj.weight.shape
    mlp = SwiGLUMLP(width, inner, device="meta")
    rows = torch.cat([own.gate_proj.weight, own.up_proj.weight])
    mlp.register_parameter("w_gate_up", nn.Parameter(rows))
    assert isinstance(own.down_proj.weight, nn.Parameter)
    mlp.register_parameter("w_down", own.down_proj.weight)
    own.gate_proj.weight.data, own.up_proj.weight.data = rows.chunk(2)
    return mlp
