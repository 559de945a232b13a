"""Situations of patched models, an entry each: what the laws of `test_models.py` know of them.

**To add a situation**, write an entry: how the model is made, what is done to it before `apply_to`
and afterwards, and how it is used. The unpatched model goes through the same, so an entry says
nothing of right values. A new family is a line of `FAMILIES`.
"""

import contextlib
import copy
import functools
import inspect
import io
import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

transformers = pytest.importorskip("transformers")

import fusedlib  # noqa: E402
from llama_models import NAMES, TOKENS, VOCABULARY, make, replica_of, tokens  # noqa: E402

Named = dict[str, Any]
Change = Callable[..., Any]
LAYER = "model.layers.0"
MLP, ATTENTION = f"{LAYER}.mlp", f"{LAYER}.self_attn"
GATE, DOWN, ACTIVATION = f"{MLP}.gate_proj", f"{MLP}.down_proj", f"{MLP}.act_fn"
QUERY, OUT = f"{ATTENTION}.q_proj", f"{ATTENTION}.o_proj"
FIRST_NORM, SECOND_NORM = f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"
SWITCHES = "mlp", "rms_norm", "rope", "attention", "loss", "linear"


def stays(model: Any) -> None:
    """What is done where an entry says nothing."""


# --- how a model is used -------------------------------------------------------------------------


def device_of(model: nn.Module) -> torch.device:
    weight = next(iter(model.parameters()), None)  # a replica has none
    return torch.device("cpu") if weight is None else weight.device


def batch(model: nn.Module, **asked: Any) -> Named:
    """Token ids and labels; what is asked for stands beside them, or is computed of the labels."""
    ids, labels = tokens(device_of(model))
    asked = {name: ask(labels) if callable(ask) else ask for name, ask in asked.items()}
    return {"input_ids": ids, "labels": labels} | asked


def loss_of(model: nn.Module, **asked: Any) -> Tensor:
    loss: Tensor = model(**batch(model, **asked))[0]
    return loss


def gradients(model: nn.Module) -> Named:
    """By name; experts that no token reached may have none or zeros."""
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {n: g for n, g in found.items() if g.any()}


def learned(model: nn.Module, called: nn.Module | None = None, **asked: Any) -> Named:
    """Loss and gradients; of a call of something that holds the model's weights."""
    model.zero_grad()
    output = (model if called is None else called)(**batch(model, **asked))
    output[0].backward()
    found = {"loss": output[0].detach(), "type": type(output).__name__}
    return found | {"balance": getattr(output, "aux_loss", None)} | gradients(model)


def learning(**asked: Any) -> Change:
    return partial(learned, **asked)


def evaluated(model: nn.Module, called: nn.Module | None = None, **asked: Any) -> Named:
    model.eval()
    with torch.no_grad():
        output = (model if called is None else called)(**batch(model, **asked))
    model.train()
    return {"evaluated loss": output.loss, "logits": output.logits}


def usual(model: nn.Module) -> Named:
    return learned(model) | evaluated(model)


def in_turn(*uses: Change) -> Change:
    """What several uses give, one after the other; changes between them give nothing."""

    def used(model: nn.Module) -> Named:
        found = {}
        for number, use in enumerate(uses):
            torch.manual_seed(3)
            found |= {f"{name}, {number}": value for name, value in (use(model) or {}).items()}
        return found

    return used


def stepped(model: nn.Module, steps: int = 3, optimizer: Any = None) -> Named:
    """What some steps of an optimizer make of the weights."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(weights, lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stepped_in_backward(model: nn.Module) -> Named:
    for p in model.parameters():
        own = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda q, own=own: own.step() or own.zero_grad())
    for _ in range(3):
        loss_of(model).backward()
    return dict(model.state_dict())


def under_autocast(model: nn.Module) -> Named:
    with torch.autocast(device_of(model).type, torch.bfloat16):
        return learned(model)


def compiled(model: nn.Module, use: Change = learned, backend: str = "eager") -> Named:
    """As one graph."""
    torch._dynamo.reset()
    whole = torch.compile(model, backend=backend, fullgraph=True)
    return use(model, whole, use_cache=False)


def generated(model: nn.Module, **settings: Any) -> Named:
    """Greedily, of prompts of which one is padded in front."""
    ids, _ = tokens(device_of(model), shape=(2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    settings = {"max_new_tokens": 9, "do_sample": False, "attention_mask": mask} | settings
    found = {"tokens": model.eval().generate(ids, **settings)}
    model.train()
    return found


def followed(model: nn.Module) -> Named:
    """A prompt's logits and the cache for the token that follows."""
    ids, _ = tokens(device_of(model), shape=(2, 9))
    with torch.no_grad():
        output = model(ids, use_cache=True)
        [name] = {"past_key_values", "cache"} & output.keys()
        following = model(ids[:, :1], **{name: output[name]})
    return {"logits": output.logits, "next logits": following.logits}


def continuously(model: nn.Module) -> Named:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    settings = transformers.GenerationConfig(
        max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32)
    prompts = tokens(shape=(2, 7))[0].tolist()
    outputs = model.eval().generate_batch(prompts, settings, small, progress_bar=False)
    found = [output.generated_tokens for output in outputs.values()]
    assert [*map(len, found)] == [4, 4]
    return {"tokens": found}


def recorded(model: nn.Module) -> Named:
    """Hidden states and attention's weights, in evaluation and in training."""
    way, found = model.config._attn_implementation, {}
    model.set_attn_implementation("eager")
    for training in (False, True):
        asked = {"output_hidden_states": True, "output_attentions": True}
        output = model.train(training)(**batch(model, **asked))
        found |= {f"{k} {i}, {training=}": t.detach() for k in ("hidden_states", "attentions")
                  for i, t in enumerate(output.get(k) or ()) if torch.is_tensor(t)}  # fmt: skip
    model.set_attn_implementation(way)
    return found


def checkpointed(model: nn.Module, reentrant: bool = False) -> Named:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = learned(model)
    model.gradient_checkpointing_disable()
    return found


def hidden(model: nn.Module) -> Named:
    y = model(tokens()[0]).last_hidden_state
    y.square().sum().backward()
    return {"hidden states": y.detach()} | gradients(model)


def litgpt(name: str, **settings: Any) -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4, "head_size": 32, "intermediate_size": 344}
    library = import_module("litgpt.model")
    torch.manual_seed(0)
    return library.GPT(library.Config.from_name(
        name, padded_vocab_size=VOCABULARY, block_size=64, **sizes, **settings))  # fmt: skip


def by_litgpt(model: nn.Module) -> Named:
    """Logits, gradients, and the logits of a prompt and of a token by a cache."""
    ids, _ = tokens()
    y = model(ids)
    y.backward(torch.sin(torch.arange(y.numel()).view(y.shape)))
    found = {"logits": y.detach()} | gradients(model)
    model.set_kv_cache(2)
    with torch.no_grad():
        for at in (torch.arange(8), torch.arange(8, 9)):
            found[f"logits at {len(at)}"] = model(ids[:, at], at)
    return found


def seen_by_a_hook(model: nn.Module) -> Named:
    """Which modules of layers a hook of every module sees, in order."""
    names, calls = {m: n for n, m in model.named_modules()}, []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _, found: calls.append(names.get(module))
    )
    loss_of(model)
    handle.remove()
    return {"called": [name for name in calls if name and "layers" in name]}


def twice(model: nn.Module) -> Named:
    """A graph that is kept and gone through again."""
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    return gradients(model)


def saved(model: nn.Module) -> Named:
    """What a folder of `save_pretrained` has, and what the model has loaded of others' weights."""
    plain = getattr(transformers, type(model).__name__)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = {f"saved {n}": t for n, t in plain.from_pretrained(folder).state_dict().items()}
    others = {name: 2 * t for name, t in model.state_dict().items()}
    assert str(model.load_state_dict(others)) == "<All keys matched successfully>"
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    return found | model.state_dict() | {"tied": tied} | usual(model)


def merged(model: nn.Module) -> Named:
    """An adapter trained, switched off and on, merged in place and back, and for good."""
    found, ids = learned(model), tokens()[0]
    with torch.no_grad():
        with model.disable_adapter():
            found["without"] = model(ids).logits
        model.merge_adapter()
        found["merged"] = model(ids).logits
        model.unmerge_adapter()
        found["back"] = model(ids).logits
    found |= model.state_dict()
    alone = model.merge_and_unload()
    return found | {f"merged {n}": t for n, t in alone.state_dict().items()} | evaluated(alone)


def allocated(model: nn.Module) -> Named:
    """AdaLoRA, which leaves two of four ranks a layer."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(5):
        stepped(model, 1, optimizer)
        model.base_model.update_and_allocate(step)
    return dict(model.state_dict())


def trained(**settings: Any) -> Change:
    """Some steps of transformers' Trainer, its evaluation and predictions."""

    def used(model: nn.Module) -> Named:
        ids, labels = tokens(shape=(6, 16))
        rows = [{"input_ids": i, "labels": t} for i, t in zip(ids, labels, strict=True)]
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(folder, **{
                "max_steps": 3, "learning_rate": 1e-2, "per_device_train_batch_size": 2,
                "per_device_eval_batch_size": 2, "use_cpu": True, "report_to": [], "seed": 7,
                "save_strategy": "no", "disable_tqdm": True,
            } | settings)  # fmt: skip
            trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
            losses = trainer.train().training_loss, trainer.evaluate()["eval_loss"]
            predicted = torch.tensor(trainer.predict(rows).predictions)
        return {"losses": torch.tensor(losses), "predicted": predicted} | model.state_dict()

    return used


def by_keyword(model: nn.Module) -> Named:
    """What own attention functions are given, and every norm and MLP by its argument's name."""
    found = {"loss": loss_of(model).detach(), "given": model.given}
    for path, module in model.named_modules():
        if path.endswith(("norm", "mlp", "layernorm")):
            plain = getattr(type(module), "_base", type(module))
            first = [*inspect.signature(plain.forward).parameters][1]
            width = 64 if path.endswith("mlp") else module.weight.shape[0]
            x = torch.ones(1, 2, width, dtype=model.dtype)
            found[f"{path}({first}=)"] = module(**{first: x}).detach()
    return found


def traced(model: nn.Module) -> Named:
    given, model.config.use_cache = batch(model), False
    whole = torch.jit.trace(model, example_kwarg_inputs=given, strict=False, check_trace=False)
    return {"loss": whole(**given)["loss"].detach()}


def each_alone(model: nn.Module) -> Named:
    """Gradients of each row, by torch.func; a mask is given, for its values are asked."""
    causal = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()

    def loss(weights: Named, ids: Tensor, labels: Tensor) -> Tensor:
        given = {"labels": labels[None], "attention_mask": causal, "use_cache": False}
        found: Tensor = torch.func.functional_call(model, weights, (ids[None],), given).loss
        return found

    weights = {name: 0.9 * p.detach() for name, p in model.named_parameters()}
    found: Named = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, *tokens())
    return found


# --- what is done to a model ---------------------------------------------------------------------


def freezing(*words: str) -> Change:
    """All weights with such a word in their name."""

    def freeze(model: nn.Module) -> None:
        for name, weight in model.named_parameters():
            weight.requires_grad_(weight.requires_grad and not any(w in name for w in words))

    return freeze


def on(path: str, change: Change) -> Change:
    """Of the module that stands there."""
    return lambda model: change(model.get_submodule(path)) and None


def put(path: str, new: Change) -> Change:
    """Something made of what stands there in its place; a function too."""

    def exchange(model: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        owner, old = model.get_submodule(parent), model.get_submodule(path)
        delattr(owner, name)
        setattr(owner, name, new(old))

    return exchange


def all_of(*changes: Change) -> Change:
    def change(model: Any) -> Any:
        for each in changes:
            torch.manual_seed(4)
            model = each(model) or model
        return model

    return change


def has(name: str, value: Any) -> Change:
    return lambda module: setattr(module, name, value)


def doubled(old: Any) -> Any:
    @functools.wraps(old)
    def theirs(*given: Any, **named: Any) -> Any:
        found = old(*given, **named)
        if isinstance(found, tuple):
            return 2 * found[0], *found[1:]
        return 2 * found if torch.is_tensor(found) else found

    return theirs


def own_forward(module: nn.Module) -> None:
    module.forward = doubled(module.forward)


def own_class(module: nn.Module) -> None:
    """A class derived of its own, which computes something else."""
    base = type(module)
    module.__class__ = type(base.__name__, (base,), {"forward": doubled(base.forward)})


def on_weights(change: Change) -> Change:
    return all_of(*(on(path, lambda m: change(m.weight)) for path in (QUERY, GATE, "lm_head")))


def alone(copied: Change) -> Change:
    """A copy, which keeps its weights when the original loses its own."""

    def change(model: nn.Module) -> nn.Module:
        loss_of(model).backward()
        model.zero_grad()
        other: nn.Module = copied(model)
        assert type(other) is type(model)
        for weight in model.parameters():
            weight.data.zero_()
        return other

    return change


def from_file(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def near(*_: Any, **__: Any) -> Tensor:
    """A mask by which a token sees itself and three before."""
    ones = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    return ones.tril() & ones.triu(-3)


def masked_by_a_hook(model: nn.Module) -> None:
    model.model.register_forward_pre_hook(
        lambda _, given, named: (given, named | {"attention_mask": near()}), with_kwargs=True
    )


def compiles_layers(model: nn.Module) -> None:
    model.config.use_cache = False
    for layer in model.model.layers:
        layer.compile(backend="eager")


def strided(model: nn.Module) -> None:
    for module in model.model.layers.modules():
        for leaf, weight in [*module._parameters.items()]:
            if weight is not None:
                wide = torch.randn(*weight.shape, 3).to(weight) / weight.shape[-1]
                setattr(module, leaf, nn.Parameter((wide + weight.detach()[..., None])[..., 1]))


class Odd(nn.Parameter):
    """As of a library that quantizes."""


def odd(linear: nn.Linear) -> None:
    linear.weight = Odd(linear.weight.detach())


def attends(way: str) -> Change:
    """By an attention function of one's own, which keeps what it was given."""

    def attend(module, query, key, value, attention_mask, **own):
        module.config.given.append(sorted(own))
        groups = query.shape[1] // key.shape[1]
        if way == "writes over values":
            value.mul_(2)
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2)
        return (mixed.flatten(2) if way == "joins heads" else mixed.contiguous()), None

    def change(model: nn.Module) -> None:
        model.__dict__["given"] = model.config.given = []
        transformers.AttentionInterface.register(way, attend)
        model.set_attn_implementation(way)

    return change


def adapted(kind: str = "Lora", **settings: Any) -> Change:
    """Under an adapter of PEFT, whose own weights are drawn."""

    def change(model: nn.Module) -> nn.Module:
        peft = import_module("peft")
        defaults = {"r": 2, "init_lora_weights": False} if kind == "Lora" else {}
        config = getattr(peft, f"{kind}Config")(**defaults | settings)
        wrapped: nn.Module = peft.get_peft_model(model, config).train()
        for path, weight in wrapped.named_parameters():
            if "ia3" in path:
                nn.init.normal_(weight)
        return wrapped

    return change


def has_been_called(model: nn.Module) -> None:
    with torch.no_grad():
        model(tokens(device_of(model))[0][:1, :5])


def hooked_once(model: nn.Module) -> None:
    handle = model.get_submodule(MLP).register_forward_hook(lambda *_: None)
    has_been_called(model)
    handle.remove()


@contextlib.contextmanager
def transformers_has(place: str, new: Change = doubled) -> Iterator[None]:
    """A function of others in the place of one of the library's."""
    file, _, name = place.partition(":")
    *path, last = name.split(".")
    owner: Any = functools.reduce(getattr, path, import_module(f"transformers.{file}"))
    before = getattr(owner, last)
    losses = import_module("transformers.loss.loss_utils").LOSS_MAPPING
    own = {key: new(before) for key, loss in losses.items() if loss is before}
    with mock.patch.object(owner, last, new(before)), mock.patch.dict(losses, own):
        yield


@contextlib.contextmanager
def captured(others: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Iterator[None]:
    """As while a CUDA graph is captured. There, and under torch.compile, transformers makes a mask
    where attention is causal and no more, and a patched model asks for none.
    """
    capturing = {"is_available": lambda: True, "is_current_stream_capturing": lambda: True}
    with others(), mock.patch.multiple(torch.cuda, **capturing):
        yield


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One way in which a model is patched and used."""

    # A model of transformers, by the name of its configuration and settings of it; or made so.
    family: str = "Llama"
    config: Named = field(default_factory=dict)
    made: Callable[[], nn.Module] | None = None
    dtype: str = "float64"  # least can hide in it; only fp32 and half precision have kernels
    # Done before `apply_to` to both models, and then; it may return another around it, an adapter.
    before: Change = stays
    after: Change = stays
    # How it is patched: switches, or another call of `apply_to`.
    switches: dict[str, bool] = field(default_factory=dict)
    patched: Callable[[Any, Any], Any] | None = None
    # What gives by name what must be as with the unpatched model, and what else is so meanwhile.
    use: Change = usual
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    # The largest error, as a share of the largest element; by default `SHARES` has it. Or the loss
    # and gradients are compared with float64, the errors of the unpatched model as the measure.
    tolerance: float | None = None
    by_truth: bool = False
    half: bool = False  # products are in half precision, whatever the model's dtype
    # What the report has: how many modules by each of `SWITCHES`, and a word of why one is left.
    replaced: str = ""
    left: dict[str, str] = field(default_factory=dict)
    needs: str = "transformers"  # a package without which there is no such situation

    def model(self, device: str = "cpu") -> nn.Module:
        """Unpatched, as it is before `apply_to`."""
        model = self.made() if self.made else make(self.family, **self.config)
        model = model if self.made else model.to(device, getattr(torch, self.dtype))
        torch.manual_seed(4)
        return self.before(model) or model

    def apply_to(self, model: nn.Module, library: Any = fusedlib) -> Any:
        """The report."""
        if self.patched:
            return self.patched(library, model)
        return library.apply_to(model, **self.switches)

    def used(self, model: nn.Module) -> Named:
        torch.manual_seed(4)
        model = self.after(model) or model
        torch.manual_seed(3)  # of dropout
        found: Named = self.use(model)
        return found


# Models in float64 round to fp32 in places.
SHARES = {torch.float64: 1e-5, torch.float32: 2e-5, torch.float16: 0.01, torch.bfloat16: 0.05}
Situations = dict[str, Situation]
Single = partial(Situation, dtype="float32")
ONE_LAYER, HEADS, WINDOW = {"num_hidden_layers": 1}, {"head_dim": 16}, {"sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
# How many modules are replaced, by the order of SWITCHES: a release of transformers that rewrites a
# module shows here.
FAMILIES: dict[str, tuple[Named, str]] = {
    "Llama": ({}, "2 5 2 2 1 9"),
    "Mistral": (WINDOW, "2 5 2 2 1 9"),
    "Qwen2": ({}, "2 5 2 2 1 9"),
    "Qwen3": (HEADS, "2 9 2 2 1 9"),
    "Ministral": (HEADS, "2 5 2 2 1 9"),
    "Phi3": ({"partial_rotary_factor": 0.5}, "2 5 2 0 1 5"),
    "Olmo2": ({}, "2 9 2 2 1 9"),
    "Olmo3": (WINDOW, "2 9 2 2 1 9"),
    "SmolLM3": ({"no_rope_layers": [1, 0]}, "2 5 2 2 1 9"),
    "Granite": ({"logits_scaling": 2.0}, "2 5 2 2 0 9"),
    "Glm4": (HEADS, "2 9 0 2 1 9"),
    "Ernie4_5": (HEADS, "2 5 0 2 1 9"),
    "Helium": (HEADS, "2 0 0 2 1 9"),
    "Gemma": (HEADS, "2 5 2 2 1 9"),
    "Gemma2": (HEADS | {"final_logit_softcapping": 1.0, "attn_logit_softcapping": 0.5},
               "2 9 2 2 1 9"),
    "Gemma3Text": (HEADS | WINDOW, "2 13 2 2 1 9"),
    "NanoChat": (HEADS, "0 9 0 0 1 13"),
    "Mixtral": (EXPERTS, "0 5 2 2 1 9"),
    "Qwen2Moe": (EXPERTS, "2 5 2 2 1 11"),
    "Qwen3Moe": (EXPERTS | HEADS | {"moe_intermediate_size": 32, "output_router_logits": True},
                 "0 9 2 2 1 9"),
    "DeepseekV3": (LATENT, "2 9 0 0 1 11"),
}  # fmt: skip
LEFT = {
    "Helium": {"rms_norm": "HeliumRMSNorm, which does not compute as LlamaRMSNorm"},
    "Glm4": {"rope": "turns q and k in a way of its own"},
}


def of_family(name: str, dtype: str = "float32", **more: Any) -> Situation:
    config = FAMILIES[name][0] | more.pop("config", {})
    return Situation(family=name, dtype=dtype, config=config, **more)


def either(table: dict[str, Change]) -> Situations:
    """Each change before `apply_to`, and afterwards."""
    return {f"{name}, {word}": Situation(**{moment: change}) for name, change in table.items()
            for word, moment in (("before", "before"), ("later", "after"))}  # fmt: skip


# What is done and computed beside the kernels, on a CPU: at first models of all kinds.
PLAIN = {name: of_family(name, replaced=replaced, left=LEFT.get(name, {}))
         for name, (_, replaced) in FAMILIES.items()}  # fmt: skip
for switch, is_on in itertools.product(SWITCHES, (True, False)):
    switches = {s: (s == switch) == is_on for s in SWITCHES}
    PLAIN[f"{switch} alone, {is_on}"] = Single(family="Qwen3", switches=switches)
PLAIN |= {
    **{name: Single(config={"hidden_act": name}, replaced="2 5 2 2 1 9")
       for name in ("gelu", "gelu_new", "gelu_pytorch_tanh")},
    **{f"torch's GELU, {kind}": Single(
        config=ONE_LAYER, before=put(ACTIVATION, lambda _, kind=kind: nn.GELU(kind)),
        replaced="1 3 1 1 1 5") for kind in ("none", "tanh")},
    **{f"litgpt's {name}": Single(
        made=partial(litgpt, name, **groups), use=by_litgpt, needs="litgpt", left={"loss": ""})
       for name, groups in (("open_llama_3b", {}), ("Llama-3.2-1B", {"n_query_groups": 2}),
                            ("Qwen3-0.6B", {"n_query_groups": 2}))},
    "Phi3, with dropout": of_family("Phi3", config={"resid_pdrop": 0.5}),
    "attention's dropout": Single(config={"attention_dropout": 0.5}),
    "biases of an MLP": Single(config={"mlp_bias": True}, left={"mlp": "biases"}),
    "biases of attention": Single(config={"attention_bias": True}),
    "ReLU": Single(config={"hidden_act": "relu"}, left={"mlp": "ReLU"}),
    "ReLU, Gemma": of_family("Gemma", config={"hidden_act": "relu"}, left={"mlp": "ReLU"}),
    "tied": Situation(config={"tie_word_embeddings": True}),
    "without a head": Situation(family="Mistral", before=lambda model: model.model, use=hidden,
                                left={"loss": "LlamaForCausalLM"}),
    "an activation that is only called SiLU": Situation(
        family="Phi3", left={"mlp": "SiLU, not one of"},
        before=put(f"{MLP}.activation_fn", lambda _: type("SiLU", (nn.ReLU,), {})())),
    "a subclass of others": Situation(
        before=has("__class__", type("Own", (transformers.LlamaForCausalLM,), {})),
        left={"loss": "Own, no class of transformers"}),
}  # fmt: skip

# Functions, modules and weights of others: left, and said; or called where they come later.
OF_LLAMA, OF_PHI3 = "models.llama.modeling_llama:", "models.phi3.modeling_phi3:"
PLAIN |= {
    f"another {place.rpartition(':')[2]}": Situation(
        family=family, around=partial(transformers_has, place), left={switch: ""})
    for place, family, switch in (
        (f"{OF_LLAMA}LlamaMLP.forward", "Llama", "mlp"),
        (f"{OF_LLAMA}LlamaRMSNorm.forward", "Llama", "rms_norm"),
        (f"{OF_LLAMA}LlamaAttention.forward", "Llama", "attention"),
        (f"{OF_LLAMA}LlamaForCausalLM.forward", "Llama", "loss"),
        (f"{OF_LLAMA}apply_rotary_pos_emb", "Llama", "rope"),
        ("loss.loss_utils:ForCausalLMLoss", "Llama", "loss"),
        ("loss.loss_utils:fixed_cross_entropy", "Llama", "loss"),
        ("models.gemma.modeling_gemma:GemmaRMSNorm._norm", "Gemma", "rms_norm"),
        (f"{OF_PHI3}rotate_half", "Phi3", "rope"),
        ("activations:SiLUActivation.forward", "Phi3", "mlp"),
    )
}  # fmt: skip
for path, switch in ((f"{ATTENTION}.v_proj", "attention"), (DOWN, "mlp")):
    name = path.rpartition(".")[2]
    for way, change in (("in a Sequential", put(path, nn.Sequential)), ("odd", on(path, odd)),
                        ("scripted", put(path, torch.jit.script))):  # fmt: skip
        PLAIN[f"{name} {way}"] = Situation(before=change, left={switch: name})
        PLAIN[f"{name} {way}, later"] = Situation(after=change)
    PLAIN[f"{name} a function, later"] = Situation(after=put(path, lambda old: doubled(old)))
own_loss = doubled(import_module("transformers.loss.loss_utils").ForCausalLMLoss)
PLAIN |= either({
    f"{way} of {path.rpartition('.')[2]}": on(path, change)
    for path in (QUERY, OUT, "lm_head", MLP, ACTIVATION, FIRST_NORM, SECOND_NORM)
    for way, change in (("own forward", own_forward), ("derived class", own_class))
} | {
    "another activation": put(ACTIVATION, lambda _: nn.Mish()),
    "an activation that is a function": put(ACTIVATION, lambda _: torch.relu),
    "another norm": put(SECOND_NORM, lambda _: nn.Softmax(dim=-1)),
    "an own loss": has("loss_function", own_loss),
    "an own loss, bound": has("loss_function", partial(own_loss)),
    "a head in a Sequential": put("lm_head", nn.Sequential),
    "resized embeddings": lambda m: m.resize_token_embeddings(223) and None,
    "another head": put("lm_head", lambda _: nn.Linear(64, 211).double()),
})  # fmt: skip
PLAIN |= {
    **{f"an own attention function, {name}": of_family(
        name, "float64", after=attends("own"), use=by_keyword)
       for name in (*NAMES, "SmolLM3", "Olmo2", "Olmo3", "Phi3", "Gemma", "Gemma2")},
    **{way: Situation(after=attends(way)) for way in ("joins heads", "writes over values")},
    **{f"layers of ours, {linear=}": Single(switches={"linear": linear}, before=all_of(
        *(put(path, fusedlib.Linear.from_torch) for path in (QUERY, OUT, "lm_head"))))
       for linear in (False, True)},
    "a projection of an own class": Single(
        before=on(OUT, own_class), left={"linear": "Linear with a forward of its own"}),
    "a weight of an own class": Single(before=on(OUT, odd), left={"linear": "Odd"}),
}  # fmt: skip

# Frozen, hooked, computed by others, stepped.
FROZEN = (
    "q_proj", "o_proj", "input_layernorm", "gate_proj", "mlp", "norm", "embed", "proj", "layers",
)  # fmt: skip
HOOKED = "lm_head", QUERY, GATE, DOWN, ACTIVATION, SECOND_NORM, FIRST_NORM
REGISTERS: dict[str, Any] = {
    "register_forward_hook": lambda module, given, found: found * 2,
    "register_forward_pre_hook": lambda module, given: (given[0] * 2, *given[1:]),
    "register_full_backward_hook": lambda module, into, out: (into[0] * 2, *into[1:]),
    "register_full_backward_pre_hook": lambda module, out: (out[0] * 2, *out[1:]),
}
WEIGHT_NORM, SPECTRAL_NORM = parametrizations.weight_norm, parametrizations.spectral_norm
STORED = partial(parametrize.remove_parametrizations, tensor_name="weight")


def hook(path: str, register: str) -> Change:
    return on(path, lambda module: getattr(module, register)(REGISTERS[register]))


def computed(path: str, leaf: str) -> Change:
    return on(path, lambda m: parametrize.register_parametrization(m, leaf, nn.Tanh()))


def in_two_calls(*first: str) -> Callable[[Any, Any], Any]:
    """The second with all switches, the first without these."""
    off = dict.fromkeys(first, False)
    return lambda library, m: (library.apply_to(m, **off), library.apply_to(m))[1]


PLAIN |= either({
    **{f"{word} frozen": freezing(word) for word in FROZEN},
    **{f"{register} of {path.rpartition('.')[2]}": hook(path, register)
       for path in HOOKED for register in REGISTERS},
    "some frozen": freezing("0.mlp.gate_proj", "0.mlp.up_proj", "0.self_attn.q_proj",
                            "1.self_attn.k_proj"),
    "a weight's hook": on_weights(lambda w: w.register_hook(lambda g: 0 * g)),
    "a hook after accumulation": on_weights(lambda w: w.register_post_accumulate_grad_hook(
        lambda p: setattr(p, "grad", 3 * p.grad))),
})  # fmt: skip
for path in (QUERY, GATE, "lm_head", OUT):
    name = path.rpartition(".")[2]
    PLAIN |= {
        f"{name} weight_norm, later": Situation(after=on(path, WEIGHT_NORM)),
        f"{name} pruned, later": Situation(
            after=on(path, partial(prune.l1_unstructured, name="weight", amount=0.5))),
        # It iterates whenever it computes the weight.
        f"{name} spectral_norm, later": Situation(after=on(path, SPECTRAL_NORM)),
        f"{name} spectral_norm before, then removed": Situation(
            before=on(path, SPECTRAL_NORM), use=in_turn(usual, on(path, STORED), usual)),
    }  # fmt: skip
PLAIN |= {
    "weight_norm put on and taken off": Situation(
        after=all_of(on(GATE, WEIGHT_NORM), on(GATE, STORED))),
    "weight_norm, in two calls": Situation(
        before=all_of(*(on(path, WEIGHT_NORM) for path in (QUERY, GATE, "lm_head"))),
        patched=in_two_calls("attention", "mlp", "loss")),
    "projections first and the rest later": Single(patched=in_two_calls(*SWITCHES[:5])),
    "a bias that is computed": Situation(
        family="Qwen2", after=computed(f"{ATTENTION}.k_proj", "bias")),
    "a norm's weight that is computed": Situation(after=computed(SECOND_NORM, "weight")),
    "another weight": Situation(after=on(f"{MLP}.up_proj", lambda m: setattr(
        m.weight, "data", torch.full_like(m.weight, 0.125)))),
    "strided weights": Situation(family="Qwen3", after=strided),
    "strided weights, Qwen2": Situation(family="Qwen2", after=strided),
    "a layer that turns nothing": Situation(
        family="SmolLM3", after=on(ATTENTION, has("use_rope", 0))),
    "GELU by another formula": Situation(
        before=put(ACTIVATION, lambda _: nn.GELU()),
        use=in_turn(learned, on(ACTIVATION, has("approximate", "tanh")), learned)),
    "a hook that came and went": Situation(use=in_turn(learned, hooked_once, learned)),
    "a hook of every module": Situation(use=seen_by_a_hook),
    "an optimizer that steps in backward": Situation(use=stepped_in_backward),
    "a replica": Situation(use=lambda m: learned(m, replica_of(m))),
    "a hooked replica": Situation(after=hook(QUERY, "register_forward_hook"),
                                  use=lambda m: learned(m, replica_of(m))),
    "a graph that is kept": Situation(use=twice),
    "patched in inference mode": Situation(patched=torch.inference_mode()(
        lambda library, model: library.apply_to(model))),
}  # fmt: skip


# Ways to call a model.
def at(labels: Tensor) -> Tensor:
    """The position of each token."""
    return torch.arange(labels.shape[1], device=labels.device).expand(labels.shape)


ASKED: dict[str, Named] = {
    "num_items_in_batch": {"num_items_in_batch": 17},
    "num_items_in_batch as a tensor": {"num_items_in_batch": torch.tensor(17)},
    "num_items_in_batch 0": {"num_items_in_batch": torch.tensor(0)},
    "an ignore_index": {"ignore_index": 5, "labels": lambda t: torch.where(t == -100, 5, t)},
    "shifted labels": {"shift_labels": lambda t: t.roll(-3, dims=1)},
    "a tuple": {"return_dict": False, "num_items_in_batch": 9},
    "all labels ignored": {"labels": lambda t: 0 * t - 100},
    "all labels ignored, counted": {"labels": lambda t: 0 * t - 100, "num_items_in_batch": 9},
    "padded in front": {"attention_mask": lambda t: (at(t) > 4).long(),
                        "labels": lambda t: t.where(at(t) > 4, -100)},
    "padded behind": {"attention_mask": lambda t: (at(t) < 29).long()},
    "a mask of ones": {"attention_mask": torch.ones_like},
    "packed": {"position_ids": lambda t: at(t) % 17, "use_cache": False},
    "the last logits": {"labels": lambda t: t[:, -2:], "logits_to_keep": 2},
    "embeddings": {"input_ids": None, "inputs_embeds": lambda t: torch.sin(
        at(t)[..., None] + torch.arange(64, device=t.device).double())},
    "asks for logits": {"skip_logits": False},
    "a cache": {"use_cache": True},
}  # fmt: skip
PLAIN |= {
    **{name: Situation(use=learning(**asked)) for name, asked in ASKED.items()},
    **{f"{name}, Mistral": of_family("Mistral", "float64", use=learning(**ASKED[name]))
       for name in ("padded in front", "packed", "a tuple")},
    **{f"captured, {name}": Situation(use=learning(**ASKED[name]), around=captured)
       for name in ("padded in front", "packed", "embeddings", "a cache")},
    **{f"captured, {name}": of_family(name, around=captured)
       for name in (*NAMES, "Ministral", "Ernie4_5", "Gemma2")},
    **{f"captured, {name}, window {window}": of_family(name, around=captured, config={
        "sliding_window": window, "use_sliding_window": True})
       for name in ("Phi3", "SmolLM3") for window in (TOKENS - 1, TOKENS)},
    "captured, with a mask of others": of_family("Phi3", around=partial(
        captured, partial(transformers_has, f"{OF_PHI3}create_causal_mask", lambda old: near))),
    "captured, with a mask by a hook": of_family("Phi3", around=captured, after=masked_by_a_hook),
    "captured, not causal": of_family(
        "Ernie4_5", before=lambda m: setattr(m.config, "is_causal", False), around=captured),
    "compiled, with a window": of_family(
        "Phi3", config={"sliding_window": TOKENS - 1} | ONE_LAYER,
        use=partial(compiled, use=evaluated)),
    "compiled, hooked": Single(
        config=ONE_LAYER, after=hook(GATE, "register_forward_hook"), use=compiled),
    **{f"generates, {name}": of_family(name, "float64", use=in_turn(generated, followed))
       for name in (*NAMES, "Gemma2", "SmolLM3")},
    "a static cache": Situation(use=partial(generated, cache_implementation="static")),
    "continuous batching": Situation(use=continuously),
    **{f"the balance of experts, {asks}": of_family(
        "Mixtral", config={"router_aux_loss_coef": 0.5}, use=in_turn(*(
            learning(output_router_logits=asks, num_items_in_batch=40, return_dict=as_dict)
            for as_dict in (True, False)))) for asks in (True, False)},
    "on meta": Single(use=lambda model: {"loss": loss_of(model.to("meta"))}),
    "traced": Single(use=traced),
    "each row's gradients": Single(use=each_alone),
    "hidden states and attentions": Situation(use=in_turn(recorded, usual)),
    "train after eval": Situation(use=in_turn(evaluated, learned, evaluated, learned)),
    "gradient checkpointing": Situation(use=checkpointed),
    "gradient checkpointing, reentrant": Situation(use=partial(checkpointed, reentrant=True)),
}  # fmt: skip

# Copied, saved, loaded.
PLAIN |= {
    **{f"{way}{words}": Situation(after=all_of(change, alone(copied)))
       for way, copied in (("deepcopy", copy.deepcopy), ("from a file", from_file))
       for words, change in (("", stays), (", layers compiled", compiles_layers))},
    **{f"pickled by protocol {n}": Situation(
        after=alone(lambda model, n=n: pickle.loads(pickle.dumps(model, n))))
       for n in (2, pickle.HIGHEST_PROTOCOL)},
    **{f"saved, {name}{', tied' * tied}": Situation(
        family=name, config={"tie_word_embeddings": tied}, use=saved)
       for name in ("Llama", "Qwen2") for tied in (False, True)},
    "deepcopy of a derived class": Situation(after=all_of(own_class, alone(copy.deepcopy))),
    "a parametrization, copied": Situation(before=on(GATE, SPECTRAL_NORM), after=copy.deepcopy),
    "assigned on meta": Single(
        before=lambda m: m.to("meta"), use=lambda m: m.load_state_dict(
            make().half().state_dict(), assign=True) and dict(m.state_dict())),
}  # fmt: skip

# PEFT, and transformers' Trainer.
LORA: dict[str, Named] = {
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["k_proj"]},
    "bias=all": {"target_modules": ["q_proj"], "bias": "all"},
    "bias=lora_only": {"target_modules": ["q_proj", "gate_proj"], "bias": "lora_only"},
    "target_parameters": {"target_parameters": ["mlp.gate_proj.weight"]},
    "several": {"target_modules": ["q_proj", "v_proj", "up_proj", "lm_head"]},
}
several, adapts = adapted(**LORA["several"]), partial(Situation, needs="peft")
trains = partial(Single, needs="accelerate", tolerance=1e-3)
PLAIN |= {
    **{f"LoRA {name}": adapts(family="Qwen2" if "bias" in name else "Llama",
                              after=adapted(**each), use=stepped, tolerance=1e-4)
       for name, each in LORA.items()},
    "LoRA, merged": adapts(after=several, use=merged),
    "LoRA, merged, biased": adapts(family="Qwen2", after=several, use=merged),
    "LoRA before": adapts(
        before=adapted(target_modules=["q_proj"]), use=in_turn(usual, merged),
        patched=lambda library, model: library.apply_to(model.base_model.model),
        left={"attention": "q_proj is a peft"}),
    "IA3, merged": adapts(use=merged, after=adapted(
        "IA3", target_modules=["k_proj", "up_proj"], feedforward_modules=["up_proj"])),
    "CPT": adapts(use=learning(skip_logits=False), after=adapted(
        "CPT", cpt_token_ids=[1, 2, 3], cpt_mask=[1] * 3, cpt_tokens_type_mask=[1, 2, 4],
        task_type="CAUSAL_LM")),
    "AdaLoRA": adapts(use=allocated, tolerance=1e-3, after=adapted(
        "AdaLora", target_modules=["q_proj", "gate_proj"], init_r=4, target_r=2, total_step=6,
        tinit=1, tfinal=1, deltaT=1, task_type="CAUSAL_LM")),
    "Trainer, accumulating and checkpointing": trains(use=trained(
        gradient_accumulation_steps=2, gradient_checkpointing=True)),
    "Trainer, label smoothing": trains(use=trained(label_smoothing_factor=0.1)),
    "Trainer, bf16": trains(use=trained(bf16=True, optim="sgd", learning_rate=0.1),
                            tolerance=0.05),
}  # fmt: skip

# Against float64, by the project's one rule; on a GPU in kernels.
truth = partial(Situation, by_truth=True, use=learned)
TRUTHS = {
    **{f"{name}{words}, {dtype}": truth(
        family=name, dtype=dtype, config=config,
        left={} if dtype == "float32" else {"linear": dtype})
       for words, config in (("", {}), (", heads of 20", {"head_dim": 20})) for name in NAMES
       for dtype in ("float32", "float16", "bfloat16")},
    **{f"{name}, bfloat16": of_family(
        name, "bfloat16", config={"hidden_size": 128}, by_truth=True, use=learned)
       for name in ("Phi3", "Olmo2", "Olmo3", "SmolLM3", "Granite", "Gemma", "Gemma2")},
    **{f"{name}, autocast": truth(family=name, dtype="float32", half=True, use=under_autocast)
       for name in ("Llama", "Qwen3")},
    "Llama, compiled": truth(dtype="float32", config=ONE_LAYER,
                             use=partial(compiled, backend="aot_eager")),
}  # fmt: skip

# Layers in half precision, which are computed as a whole where their modules are plain: in Triton's
# interpreter and on a GPU. All but the loss, as torch's products of bf16 with an odd number of
# columns read one more on the CPU.
UNEVEN = "Qwen3, heads that no block divides"
SIZES: dict[str, Named] = {
    "Llama": {},
    "Mistral": {"family": "Mistral", "config": WINDOW},
    "Qwen2, q, k and v with biases": {"family": "Qwen2"},
    "Qwen3, norms of q and k": {"family": "Qwen3", "config": HEADS},
    UNEVEN: {"family": "Qwen3",
             "config": {"head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 3}},
    f"{UNEVEN}, float16": {"family": "Qwen3", "dtype": "float16", "config": {"head_dim": 24}},
    "Llama, float16": {"dtype": "float16"},
    "gelu": {"config": {"hidden_act": "gelu"}},
    "gelu by tanh": {"config": {"hidden_act": "gelu_pytorch_tanh"}},
    "one head of keys": {"config": {"num_key_value_heads": 1}},
    "rows that no block divides": {
        "config": {"hidden_size": 80, "intermediate_size": 144, "head_dim": 24}},
    "wide heads": {"config": {"head_dim": 40}},
    "every projection with a bias": {"config": {"attention_bias": True}},
    "two layers": {"config": {"num_hidden_layers": 2}},
}  # fmt: skip
# What is done to models in float64 and may also be done to layers that are computed as a whole.
DONE_TO_LAYERS = (
    *(f"{word} frozen, later" for word in FROZEN),
    *(f"v_proj {way}, later" for way in ("in a Sequential", "a function", "odd")),
    *(f"own forward of {name}, later" for name in ("q_proj", "mlp", "input_layernorm")),
    *(f"derived class of {name}, later" for name in (
        "input_layernorm", "post_attention_layernorm", "mlp", "o_proj", "q_proj")),
    "down_proj in a Sequential, later", "another activation, later",
    "an activation that is a function, later", "GELU by another formula",
    "q_proj weight_norm, later", "a bias that is computed", "a norm's weight that is computed",
    "another weight", "strided weights", "strided weights, Qwen2", "a layer that turns nothing",
    "a hook that came and went", "a replica", "deepcopy", "a graph that is kept",
    "gradient checkpointing", "gradient checkpointing, reentrant", "padded in front",
    "train after eval", "LoRA several",
)  # fmt: skip


def half(situation: Situation, **more: Any) -> Situation:
    small = {"intermediate_size": 48} | ONE_LAYER
    dtype = "float16" if situation.dtype == "float16" else "bfloat16"
    whole = {"dtype": dtype, "switches": {"loss": False}, "config": small | situation.config}
    return replace(situation, **whole | more)


IN_KERNELS = {
    **{name: half(truth(**{"dtype": "bfloat16"} | more)) for name, more in SIZES.items()},
    **{name: half(PLAIN[name], after=all_of(has_been_called, PLAIN[name].after), tolerance=None,
                  use=learned if PLAIN[name].use in (usual, stepped) else PLAIN[name].use)
       for name in DONE_TO_LAYERS},
    **{f"hook of {path}": half(Situation(after=hook(path, "register_forward_hook"), use=learned))
       for path in (SECOND_NORM, FIRST_NORM, MLP, ACTIVATION, DOWN, GATE, f"{MLP}.up_proj",
                    *(f"{ATTENTION}.{n}_proj" for n in "qkvo"))},
    "a cache": half(Situation(use=followed)),
    "autocast": half(Situation(use=under_autocast), dtype="float32", tolerance=0.05),
}  # fmt: skip
# In the kernels of the rotation with the norms of q and k in the same launch.
FAULTS_OF_NORMED_HEADS = [
    ("(0.5 / HALF) + eps", "(1.0 / HALF) + eps"), ("a *= scale * w_a", "a *= scale + 0 * w_a"),
    ("back_a *= w_a", "back_a *= 1.0"), ("back_b - b * mean", "back_b"),
    ("total_a += back_a * a", "total_a = back_a * a"), ("own + 2 * HALF, eps", "own, eps"),
    ("sin, q_weight, own", "sin, k_weight, own"), ("(i < rows)", "(i < rows - 1)"),
    ("up_a * c + up_b * f, up_b * d - up_a * e", "up_a * c - up_b * f, up_b * d + up_a * e"),
]  # fmt: skip
