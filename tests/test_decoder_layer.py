"""A patched decoder layer in half precision, which goes as a whole or by modules: in Triton's
interpreter and on a GPU.
"""

import copy
import gc
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import llama_models
from fusedlib.ops.norm import kernels as norm_kernels
from fusedlib.ops.rope import kernels as rope_kernels
from fusedlib.patch import decoder_layer, layers
from fusedlib.patch.cache_argument import CACHE
from interpreter import INTERPRETED, passed_in_the_interpreter
from llama_models import LAYERS, misses_of, pair, replica_of, results, tokens, whole_layers
from rewritten import use_broken_kernels

ONE = {"num_hidden_layers": 1}
UNEVEN = "Qwen3, heads that no block divides"
SETTINGS = {
    "Llama": {"name": "Llama"},
    "Mistral": {"name": "Mistral", "sliding_window": 8},
    "Qwen2, q, k and v with biases": {"name": "Qwen2"} | ONE,
    "Qwen3, norms of q and k": {"name": "Qwen3", "head_dim": 16} | ONE,
    UNEVEN: {
        "name": "Qwen3",
        "head_dim": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    }
    | ONE,
    "gelu": {"name": "Llama", "hidden_act": "gelu"} | ONE,
    "gelu by tanh": {"name": "Llama", "hidden_act": "gelu_pytorch_tanh"} | ONE,
    "one head of keys": {"name": "Llama", "num_key_value_heads": 1} | ONE,
    "rows that no block divides": {
        "name": "Llama",
        "hidden_size": 80,
        "intermediate_size": 144,
        "head_dim": 24,
    }
    | ONE,
    "wide heads": {"name": "Llama", "head_dim": 40} | ONE,
}


def gradients(model, device, run=None, whole=True):
    """The loss and all gradients; not `whole`: every layer by modules."""
    ids, labels = tokens(device)
    run = run or (lambda model: model(ids, labels=labels).loss)
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    with mock.patch.object(
        layers, "_may_run_as_a_whole", wraps=layers._may_run_as_a_whole
    ) as allowed:
        if not whole:
            allowed.side_effect = lambda x: False
        return results(model, names, run(model))


def misses(device, dtype, case):
    """What the project's rule rejects of the loss and all gradients of layers as a whole."""
    plain, patched = pair(device, dtype, **SETTINGS[case])
    ids, labels = tokens(device)
    calls = []

    def loss(model):
        if model is plain:
            return model(ids, labels=labels).loss
        count, result = whole_layers(model, ids, labels=labels)
        calls.append(count)
        return result.loss

    actual = misses_of(plain, patched, ids, labels, run=loss)
    assert calls == [plain.config.num_hidden_layers]
    return actual


def test_in_the_interpreter():
    assert passed_in_the_interpreter("test_decoder_layer.py") > 30


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Two or three in each direction, the last one ragged; a program takes several."""
    if INTERPRETED:
        monkeypatch.setattr(norm_kernels, "TILE", 512)
        monkeypatch.setattr(rope_kernels, "PAIRS", 512)
        monkeypatch.setattr(decoder_layer, "_PLANS", {})
        monkeypatch.setitem(llama_models.SIZES, "intermediate_size", 48)


@pytest.mark.parametrize(
    ("dtype", "case"),
    [*((torch.bfloat16, case) for case in SETTINGS),
     (torch.float16, "Llama"), (torch.float16, UNEVEN)],
    ids=str,
)  # fmt: skip
def test_loss_and_all_gradients_vs_float64(device, dtype, case):
    assert misses(device, dtype, case) == []


# What stands in the kernels of the rotation with the norms of q and k in the same launch.
BROKEN = {
    "mean of squares over half a head": ("(0.5 / HALF) + eps", "(1.0 / HALF) + eps"),
    "weight left out": ("a *= scale * w_a", "a *= scale + 0 * w_a"),
    "weight left out of d_q and d_k": ("back_a *= w_a", "back_a *= 1.0"),
    "mean term left out of d_q and d_k": ("back_b - b * mean", "back_b"),
    "first rows alone in d_weight": ("total_a += back_a * a", "total_a = back_a * a"),
    "k's d_weight where q's is": ("own + 2 * HALF, eps", "own, eps"),
    "k's weight for q": ("sin, q_weight, own", "sin, k_weight, own"),
    "last head left out": ("(i < rows)", "(i < rows - 1)"),
    "backward turns on": ("up_a * c + up_b * f, up_b * d - up_a * e",
                          "up_a * c - up_b * f, up_b * d + up_a * e"),
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_rotation_of_normed_heads_is_rejected(device, monkeypatch, tmp_path, fault):
    use_broken_kernels(monkeypatch, tmp_path, rope_kernels, BROKEN[fault])
    assert misses(device, torch.bfloat16, UNEVEN)


def few_tokens(device):
    """As many as tell which way a call goes."""
    return tokens(device)[0][:1, :5]


def logits_as_plain(plain, patched, ids, whole, case=""):
    """The patched model's logits, which are the plain one's with so many layers as a whole."""
    count, actual = whole_layers(patched, ids)
    assert count == whole, case
    torch.testing.assert_close(
        actual.logits, plain(ids).logits, rtol=0.05, atol=0.02, msg=lambda m: f"{case}: {m}"
    )
    return actual.logits


def unlike(actual, wanted):
    """Names of results that differ by more than the order of roundings."""
    return [
        name
        for name, value in wanted.items()
        if (actual[name].double() - value.double()).norm() > 0.03 * value.double().norm()
    ]


def test_frozen_weights(device):
    """Whatever is frozen, the others get the gradients that they get by modules."""
    _, patched = pair(device, name="Llama", **ONE)
    frozen = (
        "q_proj", "o_proj", "input_layernorm", "gate_proj", "mlp", "norm", "embed", "proj",
    )  # fmt: skip
    for part in frozen:
        for name, weight in patched.named_parameters():
            weight.requires_grad_(part not in name)
        whole, by_modules = (gradients(patched, device, whole=w) for w in (True, False))
        assert len(whole) > 1 and not unlike(whole, by_modules), part
        assert all(w.grad is None for n, w in patched.named_parameters() if part in n)


def test_what_stands_in_the_way(device):
    """Hooks, a forward, adapters, a compiled child: that layer alone goes by modules."""
    ids = few_tokens(device)
    paths = [
        name
        for name, _ in pair(device)[1].model.layers[0].named_modules()
        if name and not name.endswith("rotary_emb")
    ]
    changes = {
        "hook": lambda m: m.register_forward_hook(lambda *_: None),
        "pre-hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
        "gradient": lambda m: m.register_full_backward_hook(lambda *_: None),
        "forward": lambda m: setattr(m, "forward", m.forward),
    }
    assert len(paths) == 12
    for path, change in zip(paths, 3 * [*changes.values()], strict=True):
        _, patched = pair(device)
        change(patched.model.layers[0].get_submodule(path))
        assert whole_layers(patched, ids)[0] == LAYERS - 1, path
    _, patched = pair(device)
    wanted = patched(ids).logits
    handle = patched.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert whole_layers(patched, ids)[0] == LAYERS - 1
    handle.remove()
    count, result = whole_layers(patched, ids)
    assert count == LAYERS and torch.equal(result.logits, wanted)


def test_children_put_in_later(device):
    """Another module, another weight, another class: seen at the next call."""
    ids = few_tokens(device)
    plain, patched = pair(device)
    whole_layers(patched, ids)
    for model in (plain, patched):
        attention = model.model.layers[0].self_attn
        torch.manual_seed(0)
        attention.q_proj = nn.Linear(64, 64, bias=False).to(device, torch.bfloat16)
        model.model.layers[1].mlp.up_proj.weight.data = torch.full_like(
            model.model.layers[1].mlp.up_proj.weight, 0.125
        )
    logits_as_plain(plain, patched, ids, LAYERS)
    patched.model.layers[0].self_attn.q_proj = nn.Sequential(
        patched.model.layers[0].self_attn.q_proj
    )
    logits_as_plain(plain, patched, ids, LAYERS - 1)
    for model in (plain, patched):
        model.model.layers[1].mlp.act_fn = nn.Mish()
    actual = logits_as_plain(plain, patched, ids, LAYERS - 2)
    fresh = copy.deepcopy(patched)
    for weight in patched.parameters():
        weight.data.zero_()
    assert torch.equal(fresh(ids).logits, actual)  # by weights of its own


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def derived(module, factor):
    """Gives the module a class of its own, which computes something else."""
    base = type(module)

    def forward(self, *x):
        return factor * base.forward(self, *x)

    module.__class__ = type(base.__name__, (base,), {"forward": forward})


def put_replica(model):
    model.model.layers[0] = replica_of(model.model.layers[0])


# What is done to a model before the call, and how many layers then go as a whole.
LATER = {
    "a weight that is computed": (1, lambda model: parametrizations.weight_norm(
        model.model.layers[0].self_attn.q_proj)),
    "a bias that is computed": (1, lambda model: parametrize.register_parametrization(
        model.model.layers[0].self_attn.k_proj, "bias", Doubled())),
    "a norm's weight that is computed": (1, lambda model: parametrize.register_parametrization(
        model.model.layers[0].post_attention_layernorm, "weight", Doubled())),
    "a replica": (1, put_replica),
    "a norm of another class": (1, lambda model: derived(model.model.layers[0].input_layernorm, 2)),
    "a second norm of another class": (1, lambda model: derived(
        model.model.layers[0].post_attention_layernorm, 2)),
    "an MLP of another class": (1, lambda model: derived(model.model.layers[0].mlp, 3)),
}  # fmt: skip


def test_weights_and_classes_of_others(device):
    """What is no parameter of its module, and what overrides a fused forward, is computed."""
    ids = few_tokens(device)
    for case, (whole, change) in LATER.items():
        plain, patched = pair(device, name="Qwen2")
        whole_layers(patched, ids)
        for model in (plain, patched):
            torch.manual_seed(0)
            change(model)
        logits_as_plain(plain, patched, ids, whole, case)


def test_settings_changed_later(device):
    """Of attention, whether it rotates; of the activation, which of two formulas."""
    ids, labels = tokens(device)
    plain, patched = pair(device, name="SmolLM3", bos_token_id=1, eos_token_id=2)
    few = few_tokens(device)
    assert whole_layers(patched, few)[0] == LAYERS
    for model in (plain, patched):
        for layer in model.model.layers:
            layer.self_attn.use_rope, layer.mlp.act_fn = 0, nn.GELU()
    assert misses_of(plain, patched, ids, labels) == []
    layer = patched.model.layers[0]
    layer.self_attn.use_rope = 1
    for approximate, name in (("none", "gelu"), ("tanh", "gelu_tanh")):
        layer.mlp.act_fn.approximate = approximate
        assert whole_layers(patched, few)[0] == 1
        assert layer._layer_modules.activation == name
    del layer.mlp.act_fn
    layer.mlp.act_fn = torch.relu
    assert whole_layers(patched, few)[0] == 0


def test_every_projection_may_have_a_bias(device):
    plain, patched = pair(device, attention_bias=True, **ONE)
    ids, labels = tokens(device)
    assert whole_layers(patched, few_tokens(device))[0] == 0  # o has one too
    assert misses_of(plain, patched, ids, labels) == []


def test_strided_weights(device):
    """Of norms, projections and biases."""
    ids, _ = tokens(device)
    for name in ("Qwen2", "Qwen3"):
        plain, patched = pair(device, name=name, head_dim=16, **ONE)
        for model in (plain, patched):
            draw = torch.Generator().manual_seed(5)
            for module in model.model.layers.modules():
                for leaf, weight in [*module._parameters.items()]:
                    if weight is not None:
                        wide = torch.randn(*weight.shape, 3, generator=draw) / weight.shape[-1]
                        every = (wide.to(weight) + weight[..., None])[..., 1]
                        setattr(module, leaf, nn.Parameter(every))
        logits_as_plain(plain, patched, ids, 1)
        whole, wanted = (gradients(model, device) for model in (patched, plain))
        assert not unlike(whole, wanted)


def test_a_dropped_model_is_freed(device):
    """By its last reference: memory that waits for the garbage collector is missing meanwhile."""
    _, patched = pair(device)
    ids = few_tokens(device)
    patched(ids, labels=ids).loss.backward()
    assert "_layer_modules" in vars(patched.model.layers[0])
    weight = weakref.ref(patched.model.layers[0].mlp.up_proj.weight)
    gc.disable()
    try:
        del patched
        assert weight() is None
    finally:
        gc.enable()


def test_other_ways_to_call(device):
    """A cache, a mask, no gradients, autocast, checkpointing, graphs that are kept."""
    _, patched = pair(device)
    ids, labels = tokens(device, (2, 9))
    with torch.no_grad():
        count, whole = whole_layers(patched, ids, use_cache=True)
    assert count == LAYERS
    with mock.patch.object(layers, "_may_run_as_a_whole", lambda x: False):
        by_modules = patched(ids, use_cache=True)
    assert torch.equal(whole.logits, by_modules.logits)
    following = ids[:, :1]
    count, again = whole_layers(patched, following, **{CACHE: whole[CACHE]})
    assert count == LAYERS
    torch.testing.assert_close(
        again.logits, patched(torch.cat([ids, following], 1)).logits[:, -1:], rtol=0.05, atol=0.02
    )
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    count, masked = whole_layers(patched, ids, attention_mask=mask)
    with mock.patch.object(layers, "_may_run_as_a_whole", lambda x: False):
        wanted = patched(ids, attention_mask=mask)
    assert count == LAYERS and torch.equal(masked.logits[mask > 0], wanted.logits[mask > 0])
    with torch.autocast(device, torch.bfloat16):
        assert whole_layers(patched, ids)[0] == 0

    def loss_of(model):
        return model(ids, labels=labels).loss

    first = gradients(patched, device, loss_of)
    patched.zero_grad()
    loss = loss_of(patched)
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    twice = {n: p.grad for n, p in patched.named_parameters()}
    assert not unlike(twice, {n: 2 * t for n, t in first.items() if n != "loss"})
    patched.gradient_checkpointing_enable({"use_reentrant": False})
    assert not unlike(gradients(patched, device, loss_of), first)
    patched.gradient_checkpointing_disable()
    layer, x = patched.model.layers[0], torch.randn(2, 9, 64, device=device).bfloat16()
    tables = patched.model.rotary_emb(x, torch.arange(9, device=device)[None])
    x.requires_grad_()
    y = checkpoint(layer, x, position_embeddings=tables, use_reentrant=False)
    [d_x] = torch.autograd.grad(layer(x, position_embeddings=tables).sum(), x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], d_x)


def test_gradients_are_of_what_forward_read(device):
    """Whatever memory weights get afterwards, and outside autocast as forward ran."""
    for case in ("Qwen2, q, k and v with biases", "Qwen3, norms of q and k"):
        _, patched = pair(device, **SETTINGS[case])
        layer, x = patched.model.layers[0], torch.randn(2, 33, 64, device=device).bfloat16()
        tables = patched.model.rotary_emb(x, torch.arange(33, device=device)[None])
        own = [x.requires_grad_(), *layer.parameters()]
        count, y = whole_layers(layer, x, position_embeddings=tables)
        assert count == 1
        dy = torch.randn_like(y)
        wanted = torch.autograd.grad(y, own, dy, retain_graph=True)
        with torch.autocast(device, torch.float16):
            cast = torch.autograd.grad(y, own, dy, retain_graph=True)
        assert all(map(torch.equal, cast, wanted)), case
        for operand in (*own, *tables):
            operand.data = torch.zeros_like(operand)
        assert all(map(torch.equal, torch.autograd.grad(y, own, dy), wanted)), case


def test_second_derivatives_raise(device):
    _, patched = pair(device)
    layer, x = patched.model.layers[0], torch.randn(1, 7, 64, device=device).bfloat16()
    tables = patched.model.rotary_emb(x, torch.arange(7, device=device)[None])
    x.requires_grad_()
    y = layer(x, position_embeddings=tables)
    [d_x] = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        d_x.float().square().sum().backward()
