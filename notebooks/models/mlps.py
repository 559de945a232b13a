"""The same Transformer with its MLPs computed by others: same weights, same memory, same names.

An MLP made of a block's own holds the same projections and changes how they are computed. So
several can take turns in one model, and what one step updates all have.
"""

from torch import Tensor, nn

from fusedlib.modules import SwiGLUMLP
from models.transformer import SwiGLU


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


class FusedMLP(SwiGLUMLP):
    """`fusedlib.SwiGLUMLP`."""

    def __init__(self, own: SwiGLU) -> None:
        inner, width = own.gate_proj.weight.shape
        super().__init__(width, inner, device="meta")
        self.gate_proj, self.up_proj, self.down_proj = own.gate_proj, own.up_proj, own.down_proj
