"""SwiGLUMLP: a drop-in whose checkpoints are those of the modules it replaces."""

import copy
import io
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import silu

import fusedlib
from fusedlib import SwiGLUMLP, reference

HIDDEN, INNER = 12, 20
KEYS = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]


class Plain(nn.Module):
    """As Hugging Face writes it."""

    def __init__(self, hidden_size=HIDDEN, intermediate_size=INNER):
        super().__init__()
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.norm = mlp, nn.LayerNorm(HIDDEN)


@pytest.mark.parametrize("save", ["gate_up", "input"])
def test_output_and_gradients_vs_the_plain_module(save):
    plain, ours = Plain(), SwiGLUMLP(HIDDEN, INNER, save=save)
    assert str(ours.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    y = plain(x)
    assert torch.allclose(ours(x), y, atol=1e-6)
    y.square().sum().backward()
    ours(x).square().sum().backward()
    wanted = {name: weight.grad for name, weight in plain.named_parameters()}
    found = {name: weight.grad for name, weight in ours.named_parameters()}
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_geglu_s_module_vs_plain_pytorch(approximate):
    ours, x = fusedlib.GeGLUMLP(HIDDEN, INNER, approximate=approximate), torch.randn(5, HIDDEN)
    weights = ours.gate_proj.weight, ours.up_proj.weight, ours.down_proj.weight
    wanted = reference.geglu_mlp(x, *weights, approximate=approximate)
    torch.testing.assert_close(ours(x), wanted)
    ours.up_proj.register_forward_hook(lambda *_: None)  # unfused
    assert ours.weights() is None
    torch.testing.assert_close(ours(x), wanted)
    assert repr(ours).startswith(
        "GeGLUMLP(\n  hidden_size=12, intermediate_size=20, save='gate_up'"
    )
    for call in (partial(fusedlib.GeGLUMLP, 2, 3), partial(fusedlib.geglu_mlp, x, *[x] * 2)):
        with pytest.raises(ValueError, match="approximate must be one of tanh, none, got 'Tanh'"):
            call(approximate="Tanh")


def test_checkpoints_go_both_ways_also_through_a_file():
    ours, plain = Block(SwiGLUMLP(HIDDEN, INNER)), Block(Plain())
    assert list(ours.state_dict()) == list(plain.state_dict())
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file))
    again = Block(SwiGLUMLP(HIDDEN, INNER))
    again.load_state_dict(plain.state_dict())
    assert all(map(torch.equal, again.state_dict().values(), ours.state_dict().values()))
    assert torch.equal(plain.mlp.up_proj.weight, ours.mlp.up_proj.weight)


def test_weights_come_to_a_module_without_memory():
    plain = Plain().to(torch.bfloat16)
    ours = SwiGLUMLP(HIDDEN, INNER, device="meta")
    assert ours.up_proj.weight.is_meta and ours(torch.zeros(3, HIDDEN, device="meta")).shape == (
        3,
        12,
    )
    ours.load_state_dict(plain.state_dict(), assign=True)
    weight = ours.gate_proj.weight
    assert weight.dtype == torch.bfloat16 and isinstance(weight, nn.Parameter)
    assert torch.equal(weight, plain.gate_proj.weight)
    with torch.device("meta"):
        lazy = SwiGLUMLP(HIDDEN, INNER)
    lazy.to_empty(device="cpu").reset_parameters()
    assert 0 < lazy.up_proj.weight.abs().max() <= HIDDEN**-0.5


def test_new_weights_are_drawn_as_linear_draws_them():
    torch.manual_seed(0)
    ours = SwiGLUMLP(256, 1024, dtype=torch.float64)
    for weight, width in ((ours.gate_proj.weight, 256), (ours.down_proj.weight, 1024)):
        assert weight.dtype == torch.float64
        assert 0.99 * width**-0.5 < weight.abs().max() <= width**-0.5
        assert abs(weight.std() * (3 * width) ** 0.5 - 1) < 0.01


def test_it_is_an_ordinary_module():
    ours = SwiGLUMLP(HIDDEN, INNER, save="input")
    assert [n for n, _ in ours.named_parameters()] == KEYS
    assert "hidden_size=12, intermediate_size=20, save='input'" in repr(ours)
    twin = copy.deepcopy(ours).half()
    assert twin.down_proj.weight.dtype == torch.float16 and twin.save == "input"
    x = torch.randn(3, HIDDEN)
    other = {n: torch.zeros_like(p) for n, p in ours.named_parameters()}
    assert not torch.func.functional_call(ours, other, x).any()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), ours(x), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hidden_size": 0}, "hidden_size must be a whole number of at least 1, got 0"),
        (
            {"intermediate_size": -2},
            "intermediate_size must be a whole number of at least 1, got -2",
        ),
        ({"hidden_size": "4"}, "a whole number of at least 1, got '4'"),
        ({"hidden_size": 4.5}, "a whole number of at least 1, got 4.5"),
        ({"save": "x"}, "gate_up, input, got 'x'"),
    ],
)
def test_errors_name_what_was_given(arguments, words):
    with pytest.raises(ValueError, match=words):
        SwiGLUMLP(**{"hidden_size": 4, "intermediate_size": 4, **arguments})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1.0], r"the list \[1.0\]"),
        (np.ones(2), r"the ndarray array\(\[1., 1.\]\)"),
        (None, "None"),
    ],
    ids=["list", "array", "None"],
)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda t, other: SwiGLUMLP(1, 4)(other), "x"),
        (lambda t, other: fusedlib.RMSNorm(1)(other), "x"),
        (lambda t, other: fusedlib.swiglu_mlp(other, t, t), "x"),
        (lambda t, other: fusedlib.swiglu(t, other), "w_gate_up"),
        (lambda t, other: fusedlib.swiglu_mlp(t, torch.ones(2, 1), other), "w_down"),
        (lambda t, other: fusedlib.rms_norm(other, t), "x"),
        (lambda t, other: fusedlib.rope(t, t, other, t), "cos"),
        (lambda t, other: fusedlib.linear_cross_entropy(t, t, other), "target"),
    ],
    ids=["SwiGLUMLP", "RMSNorm", "mlp", "swiglu", "w_down", "rms_norm", "rope", "loss"],
)
def test_what_is_no_tensor_is_said(call, name, given, words):
    with pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, got {words}$"):
        call(torch.ones(1, 1), given)


def test_apply_to_takes_a_module():
    with pytest.raises(TypeError, match="changes a torch.nn.Module, got int"):
        fusedlib.apply_to(3)
