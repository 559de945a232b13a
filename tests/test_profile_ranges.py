"""Named ranges of a Transformer: their names, their nesting, and that they change no result."""

from collections import Counter

import pytest
import torch

from study import trace
from study.models import ranges, transformer

LAYERS = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
          "mlp": ("gate_proj", "up_proj", "down_proj")}  # fmt: skip


def setup(attention="plain", dtype=torch.float32):
    torch.manual_seed(0)
    shape = transformer.config("nano", context_length=16, attention=attention)
    model = transformer.Transformer(shape, dtype=dtype)
    tokens, targets = torch.randint(100, (2, 2, 16)).unbind()
    return model, tokens, targets


def gradients(model, tokens, targets, tracer=None):
    """Logits and every gradient of one pass."""
    model.zero_grad(set_to_none=True)
    logits = model(tokens)
    if tracer is None:
        value = transformer.loss(logits, targets)
    else:
        with tracer.within("loss"):
            value = transformer.loss(logits, targets)
    with ranges.Range("backward"):
        value.backward()
    return [logits.detach(), *(p.grad for p in model.parameters())]


def recorded(attention):
    model, tokens, targets = setup(attention)
    with ranges.named_ranges(model) as tracer:
        return trace.record("cpu", lambda: gradients(model, tokens, targets, tracer))


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranges_change_no_result(attention, dtype):
    model, tokens, targets = setup(attention, dtype)
    before = gradients(model, tokens, targets)
    with ranges.named_ranges(model) as tracer:
        inside = gradients(model, tokens, targets, tracer)
    after = gradients(model, tokens, targets)
    for a, b, c in zip(before, inside, after, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_every_product_of_the_backward_pass_is_somebodys():
    actual = recorded("plain")
    backward = actual.last("backward")
    products = [p for p in actual.during("backward") if p.name in ("aten::mm", "aten::bmm")]
    owners = Counter(
        name.rpartition("/")[2]
        for _, name in trace.innermost(products, [r for r in actual.ranges if r is not backward])
    )
    weights = [p for p in actual.during("backward") if p.name == "torch::autograd::AccumulateGrad"]
    assert {n for _, n in trace.innermost(weights, actual.ranges)} == {"backward"}, (
        "a weight's own node outlives the graph, and so would its range"
    )
    linear = dict.fromkeys([*LAYERS["attention"], *LAYERS["mlp"]], 4)
    assert owners == linear | {"scores": 4, "values": 4, "output": 2}


def test_the_model_is_left_as_it_was_even_after_an_error():
    model, *_ = setup()
    with pytest.raises(ValueError, match="tokens must be"), ranges.named_ranges(model) as tracer:
        model(torch.zeros(3, dtype=torch.long))
    assert tracer._path == []
    assert not [m for m in model.modules() if "forward" in m.__dict__]
