"""The README's example: a model whose MLPs are replaced computes what it computed before."""

import torch
from test_swiglu_module import Plain
from torch import nn

import fusedlib


class LlamaMLP(Plain):
    """With the attributes of transformers' and Liger's classes."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__(hidden_size, intermediate_size)
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = LlamaMLP(24, 56)


class Llama(nn.Module):
    """What the example asks of a model: `model.layers`, `dtype` and `device`."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer() for _ in range(2))
        self.dtype, self.device = torch.float64, torch.device("cpu")
        self.to(self.dtype)

    def forward(self, x):
        for layer in self.model.layers:
            x = x + layer.mlp(x)
        return x


def fuse(model):
    import fusedlib

    for layer in model.model.layers:
        mlp = fusedlib.SwiGLUMLP(layer.mlp.hidden_size, layer.mlp.intermediate_size)
        mlp.to(device=model.device, dtype=model.dtype).load_state_dict(layer.mlp.state_dict())
        layer.mlp = mlp


def test_a_model_with_fused_mlps_computes_the_same_and_saves_the_same_checkpoint():
    torch.manual_seed(0)
    model, x = Llama(), torch.randn(5, 24, dtype=torch.float64)
    before = model(x)
    names = set(model.state_dict())
    fuse(model)
    assert all(isinstance(layer.mlp, fusedlib.SwiGLUMLP) for layer in model.model.layers)
    assert torch.allclose(model(x), before, rtol=1e-12, atol=1e-12)
    assert set(model.state_dict()) == names
