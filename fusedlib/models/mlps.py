"""The same Transformer with its MLPs computed by others: same weights, same memory, same names.

A provider changes how each block's MLP is computed and nothing else. All read one set of weights:
for `fused`, whose gate and up rows lie in one parameter, the model's own gate and up weights become
views of its rows. So several can take turns in one model, and what one step updates all have.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fusedlib.models.transformer import Block, SwiGLU, Transformer
from fusedlib.modules import SwiGLUMLP

PROVIDERS = ("eager", "inductor", "liger", "fused")


class ProviderUnavailableError(RuntimeError):
    """The provider cannot run here; the message says what is missing."""


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


def check_available(provider: str, device: torch.device | str) -> None:
    """Whether a provider can run on a device.

    Raises:
        ValueError: unknown provider, with the list of known ones.
        ProviderUnavailableError: a package or a CUDA GPU is missing.
    """
    if provider not in PROVIDERS:
        raise ValueError(f"unknown MLP provider {provider!r}; known: {', '.join(PROVIDERS)}")
    package = {"liger": "liger_kernel", "fused": "triton"}.get(provider)
    if package and importlib.util.find_spec(package) is None:
        raise ProviderUnavailableError(f"the package {package} is not installed")
    if provider in ("liger", "fused") and torch.device(device).type != "cuda":
        raise ProviderUnavailableError(f"{provider} needs a CUDA GPU, the model is on {device}")


def make(model: Transformer, provider: str) -> list[nn.Module]:
    """An MLP of `provider` for each block, on the model's own weights; nothing is placed yet.

    Raises:
        ValueError, ProviderUnavailableError: as `check_available`.
    """
    check_available(provider, model.embedding.weight.device)
    return [_made(_own(block), provider) for block in model.blocks]


def place(model: Transformer, mlps: Sequence[nn.Module]) -> Transformer:
    """Put one MLP into each block, and give the model back."""
    for block, mlp in zip(model.blocks, mlps, strict=True):
        block.mlp = mlp
    return model


def with_mlp(model: Transformer, provider: str) -> Transformer:
    """The model with every block's MLP computed by `provider`, changed in place.

    "eager" leaves it as it is, "inductor" compiles the MLP's forward, "liger" has Liger's
    element-wise kernel between plain products, "fused" is `fusedlib.SwiGLUMLP`. Its state dict
    has the same names and values.

    Raises:
        ValueError, ProviderUnavailableError: as `check_available`.
    """
    return place(model, make(model, provider))


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


def _own(block: nn.Module) -> SwiGLU:
    assert isinstance(block, Block)
    if type(block.mlp) is not SwiGLU:
        raise ValueError(
            f"the model's MLPs are {type(block.mlp).__name__}, not its own SwiGLU: make the MLPs "
            "of all providers from the model as it was built"
        )
    return block.mlp


def _made(own: SwiGLU, provider: str) -> nn.Module:
    if provider == "inductor":
        return CompiledMLP(own)
    if provider == "liger":
        return LigerMLP(own)
    return _packed(own) if provider == "fused" else own


@torch.no_grad()
def _packed(own: SwiGLU) -> SwiGLUMLP:
    """The module on packed rows, of which the model's own gate and up become views."""
    inner, width = own.gate_proj.weight.shape
    mlp = SwiGLUMLP(width, inner, device="meta")
    rows = torch.cat([own.gate_proj.weight, own.up_proj.weight])
    mlp.register_parameter("w_gate_up", nn.Parameter(rows))
    assert isinstance(own.down_proj.weight, nn.Parameter)
    mlp.register_parameter("w_down", own.down_proj.weight)
    own.gate_proj.weight.data, own.up_proj.weight.data = rows.chunk(2)
    return mlp
