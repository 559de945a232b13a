"""FLOPs by formula against torch's counter, and MLPs that change hands in a Transformer."""

import pytest
import torch
from torch.utils import flop_counter

from measure import mlp_rivals
from models import flops
from models.transformer import Transformer, config, loss

aten = torch.ops.aten
# torch's own formulas; it only lacks the names that attention has on the CPU.
ON_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: (
        flop_counter.sdpa_flop_count(q, k, v)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda dy, q, k, v, *_, **__: (
        flop_counter.sdpa_backward_flop_count(dy, q, k, v)
    ),
}


def nano(**options):
    return config("nano", vocab_size=96, context_length=16, **options)


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
@pytest.mark.parametrize("tokens", [16, 7])
def test_flops_are_those_that_torch_counts(attention, tokens):
    shape = nano(attention=attention, d_ff=200)
    model = Transformer(shape)
    drawn = torch.randint(shape.vocab_size, (3, tokens))
    with flop_counter.FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
        loss(model(drawn), drawn).backward()
    # A fused backward computes QKᵀ again, which is no work of the model.
    again = shape.num_layers * 2 * 3 * tokens**2 * shape.d_model if attention == "sdpa" else 0
    assert flops.count(shape, 3, tokens) + again == counter.get_total_flops()


def gradients_of(model):
    return {name: weight.grad for name, weight in model.named_parameters()}


def stepped(model, tokens):
    model.zero_grad(set_to_none=True)
    logits = model(tokens)
    loss(logits, tokens).backward()
    actual = {name: g.clone() for name, g in gradients_of(model).items()}
    model.zero_grad(set_to_none=True)
    return logits.detach(), actual


def variants(model):
    own = [block.mlp for block in model.blocks]
    return {
        "fused": [mlp_rivals.FusedMLP(one) for one in own],
        "compiled": [mlp_rivals.compiled(one, "eager") for one in own],
        "own": own,
    }


def put_in(model, modules):
    for block, mlp in zip(model.blocks, modules, strict=True):
        block.mlp = mlp


def test_every_mlp_gives_the_same_step_and_names():
    torch.manual_seed(0)
    model = Transformer(nano())
    tokens = torch.randint(96, (2, 16))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    logits, gradients = stepped(model, tokens)
    for name, modules in variants(model).items():
        put_in(model, modules)
        assert list(model.state_dict()) == list(state), name
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        actual, theirs = stepped(model, tokens)
        torch.testing.assert_close(actual, logits)
        assert list(theirs) == list(gradients) == list(state), name
        for key, gradient in gradients.items():
            torch.testing.assert_close(theirs[key], gradient, msg=f"{name}: {key}")
