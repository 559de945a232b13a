"""What the library's modules are beside their functions: parameters, checkpoints, settings."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, silu

import fusedlib
from fusedlib import GeGLUMLP, LinearCrossEntropyLoss, LinearLogProbs, RMSNorm, SwiGLUMLP

HIDDEN, INNER = 12, 20


class Plain(nn.Module):
    """As Hugging Face writes it."""

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


def test_checkpoints_go_both_ways():
    for ours, plain, again in (
        (SwiGLUMLP(HIDDEN, INNER), Plain(), SwiGLUMLP(HIDDEN, INNER)),
        (RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN, eps=1e-6), RMSNorm(HIDDEN)),
    ):
        for weight in ours.parameters():
            nn.init.normal_(weight)
        assert list(ours.state_dict()) == list(plain.state_dict())
        plain.load_state_dict(ours.state_dict())
        again.load_state_dict(plain.state_dict())
        x = torch.randn(3, HIDDEN)
        torch.testing.assert_close(plain(x), ours(x))
        assert torch.equal(again(x), ours(x))


def test_weights_come_to_a_module_without_memory():
    plain, ours = Plain().to(torch.bfloat16), SwiGLUMLP(HIDDEN, INNER, device="meta")
    assert ours.up_proj.weight.is_meta
    assert ours(torch.zeros(3, HIDDEN, device="meta")).shape == (3, HIDDEN)
    ours.load_state_dict(plain.state_dict(), assign=True)
    weight = ours.gate_proj.weight
    assert weight.dtype == torch.bfloat16 and isinstance(weight, nn.Parameter)
    assert torch.equal(weight, plain.gate_proj.weight)
    with torch.device("meta"):
        lazy, norm = SwiGLUMLP(HIDDEN, INNER), RMSNorm(HIDDEN)
    lazy.to_empty(device="cpu").reset_parameters()
    assert 0 < lazy.up_proj.weight.abs().max() <= HIDDEN**-0.5
    norm.to_empty(device="cpu").reset_parameters()
    assert (norm.weight == 1).all()


def test_mlps_are_ordinary_modules():
    ours, x = SwiGLUMLP(HIDDEN, INNER, save="input"), torch.randn(3, HIDDEN)
    twin = copy.deepcopy(ours).half()
    assert twin.down_proj.weight.dtype == torch.float16 and twin.save == "input"
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), ours(x), atol=1e-6)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_hooks_of_an_mlp_s_layers_run(approximate):
    ours, x = GeGLUMLP(HIDDEN, INNER, approximate=approximate), torch.randn(5, HIDDEN)
    gate = gelu(ours.gate_proj(x), approximate=approximate)
    torch.testing.assert_close(ours(x), ours.down_proj(gate * ours.up_proj(x)))
    ours.up_proj.register_forward_hook(lambda _, __, y: y + 1)
    torch.testing.assert_close(ours(x), ours.down_proj(gate * ours.up_proj(x)))


def test_a_loss_s_settings_are_read_at_each_call():
    hidden, weight, target = torch.randn(13, 8), torch.randn(201, 8), torch.arange(13)
    module = LinearCrossEntropyLoss(label_smoothing=0.1, z_loss=1e-3, reduction="sum")
    settings = {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": "sum"}
    for changed in ({}, {"reduction": "mean", "z_loss": 0.0}, {"softcap": 3.0, "ignore_index": 5}):
        settings |= changed
        for name, value in changed.items():
            setattr(module, name, value)
        wanted = fusedlib.linear_cross_entropy(hidden, weight, target, **settings)
        assert torch.equal(module(hidden, weight, target), wanted)
    assert not list(module.parameters()) and not module.state_dict()
    weighted = LinearCrossEntropyLoss(class_weights=weight[:, 0])
    assert list(weighted.state_dict()) == ["class_weights"]
    module.memory = "most"
    with pytest.raises(ValueError, match="got 'most'"):
        module(hidden, weight, target)
    policy = LinearLogProbs(temperature=0.7, ignore_index=7)
    scores = policy(hidden, weight, target)
    assert scores.log_probs[7] == scores.entropy[7] == 0
    policy.entropy = False
    assert policy(hidden, weight, target).entropy is None and not list(policy.parameters())


@pytest.mark.parametrize(
    ("module", "faulty"),
    [
        (SwiGLUMLP, {"hidden_size": 0}), (SwiGLUMLP, {"intermediate_size": -2}),
        (SwiGLUMLP, {"hidden_size": "4"}), (SwiGLUMLP, {"hidden_size": 4.5}),
        (SwiGLUMLP, {"save": "x"}), (GeGLUMLP, {"approximate": "Tanh"}),
        (RMSNorm, {"hidden_size": True}), (RMSNorm, {"hidden_size": 0}),
        (RMSNorm, {"eps": "a"}), (RMSNorm, {"cast": "no"}),
        (LinearCrossEntropyLoss, {"reduction": "avg"}), (LinearLogProbs, {"temperature": -1}),
    ],
)  # fmt: skip
def test_faulty_settings_are_named_with_their_value(module, faulty):
    sizes = {SwiGLUMLP: (4, 4), GeGLUMLP: (4, 4), RMSNorm: (4,)}.get(module, ())
    names = ("hidden_size", "intermediate_size")
    [(name, value)] = faulty.items()
    with pytest.raises(ValueError, match=f"{name} must .*got {value!r}"):
        module(**dict(zip(names, sizes, strict=False)) | faulty)
