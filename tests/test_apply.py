"""apply_to: a patched model computes, saves, generates and trains as the one it was made of."""

import copy
import functools
import inspect
import io
import os
import pickle
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

import fusedlib
import limits
from fusedlib.ops.fused_class import Fused, fusion_state
from fusedlib.ops.linear import function as projection
from fusedlib.patch import apply, cache_argument
from fusedlib.patch import modules as fused_modules
from llama_models import (
    NAMES,
    TOKENS,
    VOCABULARY,
    make,
    misses_of,
    parameter,
    results,
    tokens,
)

TESTS = Path(__file__).parent
SWITCHES = ("mlp", "rms_norm", "rope", "attention", "loss", "linear")
GATE = "model.layers.0.mlp.gate_proj.weight"
KEY = "model.layers.1.self_attn.k_proj.weight"


def pair(name="Llama", *, switches=None, **settings):
    plain = make(name, **settings)
    patched = copy.deepcopy(plain)
    fusedlib.apply_to(patched, **(switches or {}))
    return plain, patched


def from_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def same_state(one, other):
    states = one.state_dict(), other.state_dict()
    return list(states[0]) == list(states[1]) and all(map(torch.equal, *map(dict.values, states)))


# --- the same numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_all_gradients_vs_the_plain_model(name):
    assert misses_of(*pair(name), *tokens()) == []


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_part_alone_and_all_but_it(switch):
    for on in (True, False):
        switches = {s: (s == switch) == on for s in SWITCHES}
        plain, patched = pair("Qwen3", switches=switches)
        assert misses_of(plain, patched, *tokens()) == []
        again = fusedlib.apply_to(patched, **switches)
        assert {s: bool(paths) for s, paths in again.already.items()} == switches
        assert not any(again.replaced.values()) and same_state(plain, patched)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", NAMES)
def test_attention_gets_heads_that_its_kernels_take(monkeypatch, name, device):
    """In half precision on a GPU multiples of 8, and what was added to each leaves again."""
    widths = []
    plainly = functional.scaled_dot_product_attention

    def noted(*qkv, **kwargs):
        widths.append({x.shape[-1] for x in qkv})
        return plainly(*qkv, **kwargs)

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    plain, patched = (m.to(device, dtype) for m in pair(name, head_dim=20))
    if device == "cpu":
        monkeypatch.setattr(fused_modules.FusedAttention, "_padded_width", lambda *_: 24)
    assert misses_of(plain, patched, *tokens(device)) == []
    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    patched(*tokens(device)[:1], use_cache=False)
    patched(*tokens(device)[:1], use_cache=True)  # which keeps heads as they are
    assert widths == 2 * [{24}] + 2 * [{20}]


def test_a_gradient_of_another_slice_is_rejected(monkeypatch):
    def mixed_up(self, x):
        q, k, v = whole(self, x)
        return q, v, k

    whole = fused_modules.FusedAttention._projected
    monkeypatch.setattr(fused_modules.FusedAttention, "_projected", mixed_up)
    assert any("k_proj" in line for line in misses_of(*pair(), *tokens()))


@pytest.mark.parametrize("name", ["open_llama_3b", "Llama-3.2-1B", "Qwen3-0.6B"])
def test_litgpt_forward_gradients_and_cache(name):
    litgpt = pytest.importorskip("litgpt.model")
    sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4, "head_size": 32, "intermediate_size": 344}
    groups = {} if name == "open_llama_3b" else {"n_query_groups": 2}
    config = litgpt.Config.from_name(
        name, padded_vocab_size=VOCABULARY, block_size=64, **sizes, **groups
    )
    torch.manual_seed(0)
    plain = litgpt.GPT(config)
    patched = copy.deepcopy(plain)
    report = fusedlib.apply_to(patched)
    assert len(report.replaced["mlp"]) == len(report.replaced["rope"]) == 2
    assert report.left["loss"] and len(report.left["attention"]) == 2
    ids, _ = tokens()
    wanted, found = plain(ids), patched(ids)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(wanted)
    wanted.backward(upstream)
    found.backward(upstream)
    for path, weight in plain.named_parameters():
        torch.testing.assert_close(parameter(patched, path).grad, weight.grad)
    assert same_state(plain, patched)
    for positions in (torch.arange(8), torch.arange(8, 9)):
        logits = []
        for model in (plain, patched):
            if positions[0] == 0:
                model.set_kv_cache(2)
            logits.append(model(ids[:, positions], positions))
        torch.testing.assert_close(*logits)


# --- the loss ------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements of a result while it is on."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_a_function_put_in_an_activation_s_place_is_called():
    plain, patched = pair()
    for model in (plain, patched):
        for layer in model.model.layers:
            del layer.mlp.act_fn
            layer.mlp.act_fn = torch.nn.functional.relu
    ids, _ = tokens()
    torch.testing.assert_close(patched(ids).logits, plain(ids).logits)


def test_training_never_builds_the_logits(monkeypatch):
    """Plain PyTorch, which runs here, builds them inside linear_cross_entropy: a sum stands in."""

    def stand_in(hidden, weight, target, *, bias, **settings):
        settings = {name: value for name, value in settings.items() if value is not None}
        assert settings == {"ignore_index": -100, "reduction": "mean"} and bias is None
        return hidden.sum() + weight.sum()

    plain, patched = pair(vocab_size=4096)
    monkeypatch.setattr(fused_modules, "linear_cross_entropy", stand_in)
    ids, labels = tokens()
    wide = ids.numel() * 4096
    with Largest() as largest:
        plain(ids, labels=labels).loss.backward()
    assert largest.elements >= wide
    with Largest() as largest:
        output = patched(ids, labels=labels)
        output.loss.backward()
    assert output.logits is None and largest.elements <= max(4096 * 64, wide - 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_items_in_batch": 17},
        {"num_items_in_batch": torch.tensor(17)},
        {"ignore_index": 5},
        {"shift_labels": True},
        {"num_items_in_batch": 9, "return_dict": False},
    ],
)
def test_the_loss_is_shifted_counted_and_ignored_as_theirs(settings):
    plain, patched = pair()
    ids, labels = tokens()
    if "ignore_index" in settings:
        labels = torch.where(labels == -100, 5, labels)
    if "shift_labels" in settings:
        settings = {"shift_labels": labels.roll(-3, dims=1)}
    wanted, found = (m(ids, labels=labels, **settings)[0] for m in (plain, patched))
    torch.testing.assert_close(found, wanted)


def test_logits_where_they_are_asked_for():
    plain, patched = pair()
    ids, labels = tokens()
    torch.testing.assert_close(patched(ids).logits, plain(ids).logits)
    kept = patched(ids, labels=labels[:, -2:], logits_to_keep=2)
    assert kept.logits.shape == (2, 2, VOCABULARY)
    evaluated = patched.eval()(ids, labels=labels)
    assert evaluated.logits.shape == (2, TOKENS, VOCABULARY)
    torch.testing.assert_close(evaluated.loss, plain.eval()(ids, labels=labels).loss)


class Step(nn.Module):
    """A training forward with labels, called with `asked`; `drop` takes the logits away."""

    def __init__(self, model, drop=False, **asked):
        super().__init__()
        self.model, self.drop, self.asked = model, drop, asked

    def forward(self, ids, labels, mask):
        output = self.model(ids, mask, labels=labels, use_cache=False, **self.asked)
        if self.drop:
            output = type(output)(**{n: v for n, v in output.items() if n != "logits"})
        return output


def in_fp32(step, *batch):
    operations = pytest.importorskip("accelerate.utils.operations")
    with torch.autocast("cpu", torch.bfloat16):
        output = step(*batch)
    return operations.convert_to_fp32(output)


def padded(step, *batch):
    operations = pytest.importorskip("accelerate.utils.operations")
    return operations.pad_across_processes(step(*batch), dim=1)


def on_meta(step, *batch):
    return step.to("meta")(*(t.to("meta") for t in batch))


def faked(step, *batch):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return step(*batch)


def traced(step, *batch):
    return torch.jit.trace(step, batch, strict=False, check_trace=False)(*batch)


def mapped(step, *batch):
    return torch.func.vmap(step)(*(torch.stack([t, t.roll(1, 1)]) for t in batch))


def gradients_of_given_weights(step, *batch):
    given = {n: (0.9 * p.detach()).requires_grad_() for n, p in step.named_parameters()}
    output = torch.func.functional_call(step, given, batch)
    total = sum(value.square().mean() for value in output.values())
    return dict(zip(given, torch.autograd.grad(total, [*given.values()]), strict=True))


def after_a_step(step, *batch):
    output = step(*batch)
    output.loss.backward()
    torch.optim.AdamW(step.parameters(), fused=True).step()
    return output


READERS = {
    "accelerate's conversion": in_fp32,
    "padded across processes": padded,
    "from a file": lambda step, *batch: from_file(step(*batch)),
    "a tree of tensors": lambda step, *batch: pytree.tree_map(torch.clone, step(*batch)),
    "on meta": on_meta,
    "fake": faked,
    "traced": traced,
    "vmap": mapped,
    "functional_call": gradients_of_given_weights,
    "after a step": after_a_step,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_training_output_is_the_plain_one_with_logits_where_they_are_asked_for(reader):
    ids, labels = tokens()
    causal = torch.ones(
        TOKENS, TOKENS, dtype=torch.bool
    ).tril()  # of others transformers asks values
    batch = ids, labels, causal.expand(2, 1, -1, -1)
    for drop, asked in ((True, {}), (False, {"skip_logits": False})):
        plain, patched = pair()
        wanted = READERS[reader](Step(plain, drop), *batch)
        found = READERS[reader](Step(patched, **asked), *batch)
        assert [*found] == [*wanted] and type(found) is type(wanted)
        for key, value in wanted.items():
            assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype)
            if reader not in ("on meta", "fake"):
                torch.testing.assert_close(found[key], value)


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_a_tuple_has_its_logits(name):
    plain, patched = pair(name)
    ids, labels = tokens()
    wanted, found = (
        m(ids, labels=labels, return_dict=False, use_cache=False) for m in (plain, patched)
    )
    assert len(found) == len(wanted) > 1
    torch.testing.assert_close(found, wanted)


def test_a_model_in_float64_has_a_loss_of_the_dtype_it_had():
    plain, patched = (m.double() for m in pair())
    ids, labels = tokens()
    for given in ({}, {"num_items_in_batch": 17}):
        losses = [m(ids, labels=labels, **given).loss for m in (plain, patched)]
        torch.testing.assert_close(*losses)
    losses[1].backward()


@pytest.mark.parametrize("name", ["ForCausalLMLoss", "fixed_cross_entropy"])
def test_a_loss_of_others_in_the_place_of_the_library_s_is_left_and_said(monkeypatch, name):
    from transformers.loss import loss_utils

    before = getattr(loss_utils, name)

    @functools.wraps(before)
    def theirs(*args, **kwargs):
        return 2 * before(*args, **kwargs)

    monkeypatch.setattr(loss_utils, name, theirs)
    if name in vars(loss_utils) and before in loss_utils.LOSS_MAPPING.values():
        monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", theirs)
    plain, patched = make(), make()
    report = fusedlib.apply_to(patched)
    assert __file__ in report.left["loss"][0][1]
    ids, labels = tokens()
    assert patched(ids, labels=labels).loss == plain(ids, labels=labels).loss


def test_a_loss_or_head_of_others_is_respected():
    _, patched = pair()
    ids, labels = tokens()

    def ForCausalLMLoss(logits, labels, vocab_size, **_):  # noqa: N802
        return logits.sum() * 0 + 7

    for theirs in (ForCausalLMLoss, functools.partial(ForCausalLMLoss)):
        patched.loss_function = theirs
        assert patched(ids, labels=labels).loss == 7
    del patched._loss_function
    plain, patched = pair()
    for model in (plain, patched):
        forward = model.lm_head.forward
        model.lm_head.forward = lambda x, own=forward: 2 * own(x)
    torch.testing.assert_close(patched(ids, labels=labels).loss, plain(ids, labels=labels).loss)
    del patched.lm_head.forward
    patched.resize_token_embeddings(VOCABULARY + 5)
    assert patched(ids, labels=labels).logits.shape[-1] == VOCABULARY + 5


# --- checkpoints, copies, weights by their old names ---------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_checkpoints_go_both_ways(name, tied, tmp_path):
    plain, patched = pair(name, tie_word_embeddings=tied)
    assert same_state(plain, patched)
    assert (patched.lm_head.weight is patched.model.embed_tokens.weight) == tied
    patched.save_pretrained(tmp_path)
    assert same_state(type(plain).from_pretrained(tmp_path), plain)
    other = make(name, tie_word_embeddings=tied)
    for weight in other.parameters():
        weight.data.mul_(2)
    fusedlib.apply_to(other)
    assert not same_state(other, plain)
    assert str(other.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert same_state(other, plain)


def test_a_patched_model_s_class_is_pickled_as_a_class():
    """Here and in another process; and so is one that someone derived of it."""
    _, patched = pair()
    classes = [*{type(module) for module in patched.modules()}]
    assert len([kind for kind in classes if issubclass(kind, Fused)]) == 7
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(classes, protocol)) == classes
        assert type(pickle.loads(pickle.dumps(patched, protocol))) is type(patched)
    for kind in classes:  # as dill and cloudpickle make a class anew
        names = dict(vars(kind)) if issubclass(kind, Fused) else None
        assert names is None or type(kind)(kind.__name__, kind.__bases__, names) is kind
    there = (
        "import pickle, sys; kind = pickle.load(sys.stdin.buffer);"
        "print(kind.__name__, kind.forward.__qualname__, len(kind.__mro__))"
    )
    done = subprocess.run(
        [sys.executable, "-c", there], input=pickle.dumps(type(patched)), capture_output=True,
        check=True,
    )  # fmt: skip
    count = len(type(patched).__mro__)
    assert done.stdout.decode().split() == [
        "LlamaForCausalLM", "FusedCausalLM.forward", str(count)
    ]  # fmt: skip
    patched.__class__ = Derived = type("Derived", (type(patched),), {"__module__": __name__})  # noqa: N806
    Derived.__qualname__ = "Derived"
    assert type(copy.deepcopy(patched)) is Derived
    globals()["Derived"] = Derived
    try:
        assert pickle.loads(pickle.dumps(Derived)) is Derived
    finally:
        del globals()["Derived"]


def test_assigned_loading_from_meta():
    plain, _ = pair()
    with torch.device("meta"):
        empty = make()
    fusedlib.apply_to(empty)
    empty.load_state_dict(plain.half().state_dict(), assign=True)
    assert same_state(empty, plain) and empty.model.layers[0].mlp.up_proj.weight.dtype == torch.half


@pytest.mark.parametrize("layers", [True, False])
def test_a_copy_of_a_compiled_model_has_weights_of_its_own(layers):
    patched = pair()[1].eval()
    patched.config.use_cache = False
    for module in patched.model.layers if layers else [patched]:
        module.compile(backend="eager")
    ids, copied = tokens()[0], copy.deepcopy(patched)
    loaded, logits = from_file(patched), patched(ids).logits
    with torch.no_grad():
        for parameter_ in patched.parameters():
            parameter_.zero_()
    for other in (copied, loaded):
        torch.testing.assert_close(other(ids).logits, logits)


@pytest.mark.parametrize("way", ["deepcopy", "file"])
def test_copies_are_independent_and_whole(way):
    plain, patched = pair()
    copied = copy.deepcopy(patched) if way == "deepcopy" else from_file(patched)
    parameter(copied, KEY).data.zero_()
    assert parameter(copied, KEY).abs().sum() == 0 and same_state(plain, patched)
    assert not any(fusedlib.apply_to(copied).replaced.values())
    assert isinstance(copied, type(plain)) and type(copied).__name__ == type(plain).__name__


# --- with what else there is ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_generate_gives_the_same_tokens(name):
    plain, patched = pair(name)
    ids, _ = tokens(shape=(2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    settings = {"max_new_tokens": 9, "do_sample": False, "attention_mask": mask}
    wanted, found = (m.eval().generate(ids, **settings) for m in (plain, patched))
    assert wanted.shape == (2, 16) and torch.equal(found, wanted)


def test_continuous_batching_gives_the_same_tokens():
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    prompts = tokens(shape=(2, 7))[0].tolist()
    found = []
    for model in pair():
        outputs = model.eval().generate_batch(prompts, settings, progress_bar=False)
        found.append([output.generated_tokens for output in outputs.values()])
    assert found[0] == found[1] and list(map(len, found[0])) == [4, 4]


def test_a_cache_has_the_name_that_the_plain_model_gives_it():
    plain, patched = pair()
    for path in ("", "model.layers.0", "model.layers.0.self_attn"):
        theirs, ours = (inspect.signature(m.get_submodule(path).forward) for m in (plain, patched))
        assert [*theirs.parameters] == [*ours.parameters]
    ids, _ = tokens()
    following = []
    for model in (plain, patched):
        model.eval()
        output = model(ids, use_cache=True)
        following.append(model(ids[:, :1], **{cache_argument.CACHE: output[1]}).logits)
    torch.testing.assert_close(*following)


def test_the_old_name_of_a_cache_is_taken_with_a_warning(monkeypatch):
    """As transformers 5.24 does it, whichever is installed."""
    monkeypatch.setattr(cache_argument, "CACHE", "cache")

    @cache_argument.takes_cache
    def forward(self, x, past_key_values=None, **kwargs):
        return x, past_key_values, kwargs

    assert [*inspect.signature(forward).parameters] == ["self", "x", "cache", "kwargs"]
    assert forward(None, 1, 2) == forward(None, 1, cache=2) == (1, 2, {})
    with pytest.warns(FutureWarning, match="`past_key_values` is deprecated .* Use `cache`"):
        assert forward(None, 1, past_key_values=2, other=3) == (1, 2, {"other": 3})
    with pytest.warns(FutureWarning):
        assert forward(None, 1, past_key_values=2, cache=4) == (1, 4, {})


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    plain, patched = pair()
    patched.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    patched.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert misses_of(plain, patched, *tokens()) == []
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_autocast(name):
    plain, patched = pair(name)
    ids, labels = tokens()

    def run(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(ids, labels=labels).loss

    assert misses_of(plain, patched, ids, labels, run) == []


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_compile_in_one_graph(device):
    plain, patched = (model.to(device) for model in pair())
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    ids, labels = tokens(device)
    run = lambda m: (compiled if m is patched else m)(ids, labels=labels).loss  # noqa: E731
    assert misses_of(plain, patched, ids, labels, run) == []


@pytest.mark.parametrize("training", [True, False])
def test_compiled_attention_is_causal_without_a_mask(training):
    plain, patched = (model.train(training) for model in pair())
    masks = []

    def backend(graph, inputs):
        attended = [n for n in graph.graph.nodes if "scaled_dot_product" in str(n.target)]
        masks.extend(node.kwargs.get("attn_mask") for node in attended)
        return graph.forward

    ids, _ = tokens()
    compiled = torch.compile(patched, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(ids, labels=ids).loss, plain(ids, labels=ids).loss)
    assert masks == [None, None]


def test_hidden_states_and_attentions_are_recorded():
    plain, patched = pair(attn_implementation="eager")
    ids, labels = tokens()
    asked = {"labels": labels, "output_hidden_states": True, "output_attentions": True}
    wanted, found = plain(ids, **asked), patched(ids, **asked)
    for key in ("hidden_states", "attentions"):
        torch.testing.assert_close(found[key], wanted[key])
    patched.set_attn_implementation("sdpa")
    torch.testing.assert_close(patched(ids).logits, plain(ids).logits)


def test_lora_and_back():
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "gate_proj", "lm_head"]
    models = []
    for model in pair():
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=2))
        for path, weight in wrapped.named_parameters():
            if "lora_B" in path:
                nn.init.normal_(weight, std=0.1)
        models.append(wrapped)
    ids, labels = tokens()
    losses = [m(input_ids=ids, labels=labels).loss for m in models]
    torch.testing.assert_close(*losses)
    sum(losses).backward()
    grads = [
        {n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in models
    ]  # fmt: skip
    assert list(grads[0]) == list(grads[1]) and all("lora" in name for name in grads[0])
    torch.testing.assert_close(grads[1], grads[0])
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    plain, patched = (m.merge_and_unload() for m in models)
    torch.testing.assert_close(dict(patched.state_dict()), dict(plain.state_dict()))
    assert type(patched.model.layers[0].self_attn.q_proj) is nn.Linear
    torch.testing.assert_close(patched(ids).logits, plain(ids).logits)


def test_an_adapter_that_computes_its_loss_of_the_logits_learns_alike():
    """CPT, whose model is called with labels for its logits alone, and has to be asked for them."""
    peft = pytest.importorskip("peft")
    of_prompt = {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1] * 3, "cpt_tokens_type_mask": [1, 2, 4]}
    ids, labels = tokens()
    steps = []
    for model in pair():
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(model, peft.CPTConfig(task_type="CAUSAL_LM", **of_prompt))
        loss = wrapped.train()(ids, labels=labels, skip_logits=False).loss
        loss.backward()
        steps.append([loss, *(p.grad for p in wrapped.parameters() if p.requires_grad)])
    assert len(steps[0]) > 1
    torch.testing.assert_close(steps[1], steps[0])


def test_an_adapter_that_puts_biases_back_is_merged():
    peft = pytest.importorskip("peft")
    settings = {"target_modules": ["k_proj", "up_proj"], "feedforward_modules": ["up_proj"]}
    merged = []
    for model in pair():
        wrapped = peft.get_peft_model(model, peft.IA3Config(**settings))
        torch.manual_seed(3)
        for path, weight in wrapped.named_parameters():
            if "ia3" in path:
                nn.init.normal_(weight)
        merged.append(wrapped.merge_and_unload())
    assert merged[1].model.layers[0].mlp.weights() is not None
    torch.testing.assert_close(*(dict(model.state_dict()) for model in merged))


def test_a_model_under_lora_says_what_to_do():
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(make(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(ValueError, match=r"It holds a LlamaForCausalLM as \.base_model\.model"):
        fusedlib.apply_to(wrapped)
    report = fusedlib.apply_to(wrapped.base_model.model)
    assert len(report.left["attention"]) == 2 and "q_proj is a peft" in str(report)
    assert len(report.replaced["rope"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "trained"),
    [
        ("torch", ("DDP", "FSDP2", "FSDP1", "Tensor parallelism")),
        ("deepspeed", ("ZeRO-3",)),
        ("accelerate", ("accelerate's FSDP2",)),
    ],
)
def test_two_processes_train_as_with_the_plain_model(tmp_path, library, trained):
    if find_spec(library) is None:
        pytest.skip(f"no {library}")
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path])}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    environment |= {"FOLDER": str(tmp_path / "state")}
    command = [sys.executable, str(TESTS / "apply_parallel.py"), library]
    ranks = [
        subprocess.Popen(
            command, env=environment | {"RANK": rank}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in "01"
    ]  # fmt: skip
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=limits.PROCESS_S)
            assert rank.returncode == 0, output[-4000:]
            assert all(f"{name} trains" in output for name in trained)
    finally:
        for rank in ranks:
            rank.kill()


# --- the report, and bad input -------------------------------------------------------------------


def test_the_report_counts_and_prints():
    report = fusedlib.apply_to(make("Qwen3"), loss=False)
    counts = {switch: len(paths) for switch, paths in report.replaced.items()}
    assert counts == {
        "mlp": 2, "rms_norm": 9, "rope": 2, "attention": 2, "loss": 0, "linear": 9
    }  # fmt: skip
    assert report.left["loss"] == [("", "switched off")]
    lines = str(report).splitlines()
    assert lines[0] == "fusedlib in Qwen3ForCausalLM" and max(map(len, lines)) < 100
    assert "  rms_norm  9 replaced" in lines and "  loss      switched off" in lines


def test_the_report_says_where_all_is_plain_pytorch(monkeypatch):
    report = fusedlib.apply_to(make())
    assert "plain PyTorch: it lies on cpu, the kernels are for NVIDIA GPUs." in str(report)
    assert fusedlib.apply_to(make().double()).plain == "it is in float64"
    monkeypatch.setattr(apply, "has_kernels", lambda device: True)
    report = fusedlib.apply_to(make())
    assert report.plain is None and "plain PyTorch" not in str(report)
    monkeypatch.setattr(apply, "has_kernels", lambda device: False)
    monkeypatch.setattr(apply, "find_spec", lambda name: None)
    assert fusedlib.apply_to(make()).plain == "triton is not installed"


@pytest.mark.parametrize(
    ("settings", "switch", "why"),
    [
        ({"mlp_bias": True}, "mlp", "biases"),
        ({"hidden_act": "relu"}, "mlp", "ReLU"),
    ],
)
def test_what_does_not_fit_is_left_and_said(settings, switch, why):
    plain, patched = pair(**settings)
    report = fusedlib.apply_to(copy.deepcopy(plain))
    assert len(report.left[switch]) == 2 and why in report.left[switch][0][1]
    assert misses_of(plain, patched, *tokens()) == []


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "torch", "torch, tanh"])
def test_mlps_with_gelu_are_fused(name):
    plain = make(hidden_act="gelu" if "torch" in name[:5] else name)
    for layer in plain.model.layers if name.startswith("torch") else ():
        layer.mlp.act_fn = nn.GELU(approximate="tanh" if "tanh" in name else "none")
    patched = copy.deepcopy(plain)
    assert len(fusedlib.apply_to(patched).replaced["mlp"]) == 2
    wanted = "gelu" if name in ("gelu", "torch") else "gelu_tanh"
    assert {layer.mlp.activation for layer in patched.model.layers} == {wanted}
    assert misses_of(plain, patched, *tokens()) == []


def test_parts_that_someone_changed_are_left_and_said(monkeypatch):
    class OwnNorm(nn.LayerNorm):
        pass

    model = make()
    first = model.model.layers[0]
    first.self_attn.q_proj = nn.Sequential(first.self_attn.q_proj)
    first.mlp.forward = first.mlp.forward
    model.model.norm = OwnNorm(64)
    left = fusedlib.apply_to(model).left
    path = "model.layers.0.self_attn"
    why = "q_proj is a torch.nn.modules.container.Sequential, not a torch.nn.Linear"
    assert left["attention"] == [(path, why)]
    assert [path for path, _ in left["mlp"]] == ["model.layers.0.mlp"]
    assert "OwnNorm" in left["rms_norm"][0][1]


def test_another_transformers_is_left_and_said(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaAttention

    def forward(self, hidden_states, past_key_value=None):
        raise NotImplementedError

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    report = fusedlib.apply_to(make())
    assert "past_key_value" in report.left["rope"][0][1] and not report.replaced["attention"]


@pytest.mark.parametrize(
    ("owner", "name", "switch"),
    [
        ("LlamaMLP", "forward", "mlp"),
        ("LlamaRMSNorm", "forward", "rms_norm"),
        ("LlamaAttention", "forward", "attention"),
        ("LlamaForCausalLM", "forward", "loss"),
        (None, "apply_rotary_pos_emb", "rope"),
    ],
)
def test_patches_of_others_are_left_and_said(monkeypatch, owner, name, switch):
    from transformers.models.llama import modeling_llama

    patched = getattr(modeling_llama, owner) if owner else modeling_llama
    before = getattr(patched, name)
    marks = []

    def theirs(*args, **kwargs):
        marks.append(1)
        return before(*args, **kwargs)

    theirs.__signature__ = inspect.signature(before)
    monkeypatch.setattr(patched, name, theirs)
    model = make()
    report = fusedlib.apply_to(model)
    assert not report.replaced[switch]
    assert "theirs stands in the place of transformers." in report.left[switch][0][1]
    ids, labels = tokens()
    model(ids, labels=labels)
    assert marks


HOOKED = [
    "lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.down_proj", "model.layers.0.mlp.act_fn",
    "model.layers.0.post_attention_layernorm", "model.layers.0.input_layernorm",
]  # fmt: skip
REGISTERS = {
    "register_forward_hook": lambda module, given, found: found * 2,
    "register_forward_pre_hook": lambda module, given: (given[0] * 2, *given[1:]),
    "register_full_backward_hook": lambda module, into, out: (into[0] * 2, *into[1:]),
    "register_full_backward_pre_hook": lambda module, out: (out[0] * 2, *out[1:]),
}


@pytest.mark.parametrize("register", REGISTERS)
@pytest.mark.parametrize("path", HOOKED)
def test_hooks_go_on_working(path, register):
    """Set before or afterwards."""
    plain, patched = pair()
    ids, labels = tokens()
    before = copy.deepcopy(plain)
    handles = [
        getattr(model.get_submodule(path), register)(REGISTERS[register])
        for model in (plain, patched, before)
    ]
    fusedlib.apply_to(before)
    names = [name for name, _ in plain.named_parameters()]
    wanted = results(plain, names, plain(ids, labels=labels).loss)
    for model in (patched, before):
        found = results(model, names, model(ids, labels=labels).loss)
        torch.testing.assert_close(found, wanted)
    handles[1].remove()
    layer = patched.model.layers[0]
    assert layer.mlp.weights() is not None
    assert patched(ids, labels=labels).logits is None


def test_hooks_that_bring_weights_leave_all_fused():
    def bring(module, *_):
        brought.append(module)

    bring.__module__ = "deepspeed.runtime.zero.parameter_offload"
    brought = []
    _, patched = pair()
    ids, labels = tokens()
    for path in HOOKED:
        patched.get_submodule(path).register_forward_hook(bring)
    assert patched(ids, labels=labels).logits is None
    layer = patched.model.layers[0]
    assert set(brought) == {
        patched.lm_head, layer.post_attention_layernorm, layer.input_layernorm
    }  # fmt: skip


def test_bad_models_and_switches_raise_and_change_nothing():
    with pytest.raises(ValueError, match=r"nn\S+Linear is no model .* Llama, .*SwiGLUMLP"):
        fusedlib.apply_to(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="swiglu"):
        fusedlib.apply_to(make(), swiglu=True)
    with pytest.raises(ValueError, match=r"It holds a LlamaForCausalLM as \.module: .* before"):
        fusedlib.apply_to(nn.DataParallel(make()))
    model = make()
    with pytest.raises(TypeError, match="mlp must be True or False, got 'no'"):
        fusedlib.apply_to(model, mlp="no")
    assert not any(isinstance(module, Fused) for module in model.modules())


def test_no_class_is_changed():
    forwards = {type(m): type(m).forward for m in make().modules()}
    _, patched = pair()
    assert all(kind.forward is forward for kind, forward in forwards.items())
    assert {type(m) for m in make().modules()} == forwards.keys()
    assert [type(m).__name__ for m in patched.model.layers[0].modules()][:2] == [
        "LlamaDecoderLayer", "LlamaAttention",
    ]  # fmt: skip


def test_a_model_without_a_head():
    bare = make("Mistral").model
    report = fusedlib.apply_to(bare)
    assert len(report.replaced["mlp"]) == 2 and "LlamaForCausalLM" in report.left["loss"][0][1]


def test_litgpt_of_another_kind_is_refused():
    litgpt = pytest.importorskip("litgpt.model")
    with pytest.raises(ValueError, match=r"'pythia-14m' is not of the Llama kind.*GptNeoxMLP"):
        fusedlib.apply_to(litgpt.GPT.from_name("pythia-14m", n_layer=1))


# --- projections ---------------------------------------------------------------------------------

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_fp32_projections_are_ours_and_counted():
    plain = make()
    patched = copy.deepcopy(plain)
    report = fusedlib.apply_to(patched)
    paths = [f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in PROJECTIONS]
    assert report.replaced["linear"] == [*paths, "lm_head"]
    assert "  linear    9 replaced" in str(report).splitlines()
    layer = patched.model.layers[0]
    x = torch.randn(3, 64)
    for project in (layer.self_attn.o_proj, layer.self_attn.q_proj, patched.lm_head):
        assert torch.equal(project(input=x), project(x))  # as torch.nn.Linear takes it
    assert isinstance(layer.self_attn.o_proj, fused_modules.FusedLinear)
    assert type(layer.self_attn.o_proj).__name__ == "Linear"
    for module in (layer.self_attn, patched.lm_head):
        assert "linear" in module._fusion.switches
    assert type(layer.self_attn.q_proj) is type(layer.mlp.up_proj) is nn.Linear
    assert same_state(plain, patched)
    again = fusedlib.apply_to(copy.deepcopy(patched))
    assert again.already["linear"] == report.replaced["linear"] and not again.replaced["linear"]


def test_layers_of_ours_give_the_loss_and_stay():
    plain = make()
    patched = copy.deepcopy(plain)
    attention = patched.model.layers[0].self_attn
    for name in ("q_proj", "o_proj"):
        setattr(attention, name, fusedlib.Linear.from_torch(getattr(attention, name)))
    patched.lm_head = fusedlib.Linear.from_torch(patched.lm_head)
    paths = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "o_proj")] + ["lm_head"]
    for on in (False, True):  # a second call finds them too
        report = fusedlib.apply_to(patched, linear=on)
        assert report.already["linear"] == paths
        assert len(report.replaced["linear"]) == 6 * on and not report.left["attention"]
        assert type(attention.o_proj) is fusedlib.Linear
        assert type(attention.q_proj) is fusedlib.Linear
        assert "linear" in patched.lm_head._fusion.switches
    assert misses_of(plain, patched, *tokens()) == []


def test_every_call_of_a_projection_goes_by_ours(monkeypatch):
    """Of an attention; alone beside a layer of ours; and of a head without labels."""
    calls = []
    ours = projection.linear

    def noted(x, weight, bias=None):
        calls.append(tuple(weight.shape))
        return ours(x, weight, bias)

    monkeypatch.setattr(projection, "linear", noted)
    ids, _ = tokens()
    _, patched = pair(num_hidden_layers=1)
    patched(ids)
    every = [(64, 64), (32, 64), (32, 64), (64, 64), (VOCABULARY, 64)]
    assert calls == every
    calls.clear()
    attention = make(num_hidden_layers=1).model.layers[0].self_attn
    monkeypatch.setattr("fusedlib.ops.linear.module.linear", noted)
    patched.model.layers[0].self_attn.k_proj = fusedlib.Linear.from_torch(attention.k_proj)
    patched(ids)
    assert calls == [(32, 64), (64, 64), (VOCABULARY, 64)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_keep_their_linear_layers(dtype):
    model = make().to(dtype)
    report = fusedlib.apply_to(model)
    assert not report.replaced["linear"] and len(report.left["linear"]) == 9
    assert f"{dtype}; only fp32 is split" in str(report)
    assert max(map(len, str(report).splitlines())) < 100
    assert type(model.model.layers[0].self_attn.o_proj) is nn.Linear
    assert not any("linear" in fusion_state(m).switches for m in model.modules())


def test_projections_first_and_the_rest_later():
    plain, patched = pair(switches=dict.fromkeys(SWITCHES[:5], False))
    assert sum(isinstance(m, fused_modules.FusedLinear) for m in patched.modules()) == 15
    report = fusedlib.apply_to(patched)
    assert len(report.replaced["attention"]) == len(report.replaced["mlp"]) == 2
    assert report.replaced["loss"] and not report.left["linear"]
    assert len(report.replaced["linear"]) + len(report.already["linear"]) == 9
    assert type(patched.model.layers[0].self_attn.q_proj) is nn.Linear
    assert misses_of(plain, patched, *tokens()) == [] and same_state(plain, patched)


def test_linear_layers_of_others_are_left_and_said():
    class Doubling(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Odd(nn.Parameter):
        pass

    model = make()
    first, second = (layer.self_attn for layer in model.model.layers)
    first.o_proj = Doubling(64, 64, bias=False)
    second.o_proj.weight = Odd(second.o_proj.weight.detach())
    model.lm_head.forward = model.lm_head.forward
    why = dict(fusedlib.apply_to(model).left["linear"])
    assert "Doubling with a forward of its own" in why["model.layers.0.self_attn.o_proj"]
    assert "its weight is a " in why["model.layers.1.self_attn.o_proj"]
    assert "torch.nn.modules.linear.Linear with a forward of its own" in why["lm_head"]


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_vs_the_plain_model(name, head_dim, dtype):
    sizes = {"hidden_size": 256, "intermediate_size": 688, "head_dim": head_dim}
    plain = make(name, **sizes).to("cuda", dtype)
    patched = copy.deepcopy(plain)
    fusedlib.apply_to(patched)
    assert misses_of(plain, patched, *tokens("cuda", (3, 61))) == []


@pytest.mark.gpu
def test_logits_take_no_memory_in_training():
    sizes = {"hidden_size": 128, "vocab_size": 128256, "tie_word_embeddings": True}
    model = make(**sizes, max_position_embeddings=8192).to("cuda", torch.bfloat16)
    fusedlib.apply_to(model)
    ids = torch.randint(0, 128256, (1, 8192), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(ids, labels=ids).loss.backward()
    # Whole logits are 2.1 GB in bf16 and 4.2 GB in fp32; a chunk is half a GiB.
    assert torch.cuda.max_memory_allocated() - before < 1.2e9


@pytest.mark.parametrize("masked", [False, True])
def test_no_mask_is_made_while_a_cuda_graph_is_captured(monkeypatch, masked):
    """transformers makes a causal one then, and sdpa is three times as slow with it."""
    masks = []
    plain = functional.scaled_dot_product_attention

    def noted(*args, attn_mask=None, **kwargs):
        masks.append(attn_mask)
        return plain(*args, attn_mask=attn_mask, **kwargs)

    _, patched = pair()
    ids, labels = tokens()
    given = {"attention_mask": torch.ones_like(ids)} if masked else {}
    wanted = patched(ids, labels=labels, **given).loss
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    found = patched(ids, labels=labels, **given).loss
    torch.testing.assert_close(found, wanted)
    assert len(masks) == 2 and all((m is None) != masked for m in masks)


@pytest.mark.gpu
def test_a_step_captured_in_a_cuda_graph():
    plain, patched = pair(hidden_size=256, intermediate_size=688)
    plain, patched = (m.to("cuda", torch.bfloat16) for m in (plain, patched))
    ids, labels = tokens("cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            patched(ids, labels=labels).loss.backward()
    torch.cuda.current_stream().wait_stream(stream)
    patched.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = patched(ids, labels=labels).loss
        loss.backward()
    graph.replay()
    torch.cuda.synchronize()
    captured = {n: p.grad.clone() for n, p in patched.named_parameters()}
    patched.zero_grad(set_to_none=True)
    again = patched(ids, labels=labels).loss
    again.backward()
    torch.testing.assert_close(loss, again)
    torch.testing.assert_close(captured, {n: p.grad for n, p in patched.named_parameters()})
