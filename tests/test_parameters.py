"""A patched model keeps its parameters: what others do to them does what it does to the plain one.

Right values are those of the unpatched model in the same use.
"""

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

pytest.importorskip("transformers")

import fusedlib
from fusedlib.ops.fused_class import Fused
from llama_models import NAMES, make, misses_of, replica_of, tokens

GATE = "model.layers.0.mlp.gate_proj"
QUERY = "model.layers.0.self_attn.q_proj"
KEY = "model.layers.1.self_attn.k_proj"
EVERY = ["Llama", "Qwen2", "Qwen3", "SmolLM3", "Olmo2", "Olmo3", "Phi3", "Mixtral", "Gemma"]


def pair(name="Llama", **settings):
    """The same model plain and patched, in float64: what differs by more than rounding is wrong."""
    plain = make(name, **settings)
    if name != "Mixtral":  # whose experts are multiplied in fp32 at most
        plain = plain.double()
    patched = copy.deepcopy(plain)
    fusedlib.apply_to(patched)
    return plain, patched


def loss_of(model):
    ids, labels = tokens()
    return model(input_ids=ids, labels=labels).loss


def gradients(model):
    model.zero_grad()
    loss_of(model).backward()
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return dict(model.state_dict())


def same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


# --- the parameters themselves -------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_every_parameter_and_module_is_the_object_that_it_was(name):
    model = make(name)
    named, modules = dict(model.named_parameters()), dict(model.named_modules())
    addresses = [p.data_ptr() for p in named.values()]
    state = list(model.state_dict())
    assert any(fusedlib.apply_to(model).replaced.values())
    assert list(model.named_parameters()) == list(named.items())
    assert all(a is b for a, b in zip(model.parameters(), named.values(), strict=True))
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert list(model.state_dict()) == state
    assert all(a is b for a, b in zip(model.modules(), modules.values(), strict=True))
    assert [m._get_name() for m in model.modules()] == [m._get_name() for m in make(name).modules()]
    assert model.get_parameter(f"{KEY}.weight" if name != "Phi3" else "lm_head.weight") is not None
    projections = [m for n, m in modules.items() if n.endswith("q_proj")]
    assert {type(m) for m in projections} <= {nn.Linear}


@pytest.mark.parametrize("name", [*NAMES, "Phi3"])
def test_a_second_call_finds_nothing_and_a_switch_alone_the_rest(name):
    model = make(name)
    fusedlib.apply_to(model, mlp=False, loss=False)
    report = fusedlib.apply_to(model)
    assert len(report.replaced["mlp"]) == 2 and len(report.replaced["loss"]) == 1
    again = fusedlib.apply_to(model)
    assert not any(again.replaced.values()) and len(again.already["mlp"]) == 2


def test_what_apply_to_keeps_is_one_record():
    plain, patched = pair()
    for before, after in zip(plain.modules(), patched.modules(), strict=True):
        new = vars(after).keys() - vars(before).keys()
        assert new <= {"_fusion"} and (not new or isinstance(after, Fused))


# --- frozen, hooked, shaped by others ------------------------------------------------------------


@pytest.mark.parametrize(
    "frozen", [[QUERY], [GATE], [GATE, QUERY, "model.layers.0.mlp.up_proj", KEY], ["model.layers"]]
)
@pytest.mark.parametrize("before", [False, True])
def test_what_is_frozen_has_no_gradient_and_all_else_has_its_own(frozen, before):
    plain, patched = pair()
    if before:
        patched = make().double()
    for model in (plain, patched):
        for path in frozen:
            for p in model.get_submodule(path).parameters():
                p.requires_grad = False
    if before:
        report = fusedlib.apply_to(patched)
        assert not report.left["mlp"] and not report.left["attention"]
    found, wanted = gradients(patched), gradients(plain)
    assert all(wanted[f"{path}.weight"] is None for path in frozen if "layers." in path)
    same(found, wanted)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("before", [False, True])
def test_hooks_of_weights_see_and_change_gradients(register, before):
    plain, patched = pair()
    if before:
        patched = make().double()
    calls = []

    def scale(given):
        calls.append(1)
        if register == "register_hook":
            return given * 0
        given.grad.mul_(3)
        return None

    for model in (plain, patched):
        for path in (QUERY, GATE, "lm_head"):
            getattr(model.get_submodule(path).weight, register)(scale)
    if before:
        fusedlib.apply_to(patched)
    wanted, found = gradients(plain), gradients(patched)
    same(found, wanted)
    assert len(calls) == 6
    if register == "register_hook":
        assert not found[f"{QUERY}.weight"].any()


SHAPED = {
    "weight_norm": lambda layer: parametrizations.weight_norm(layer),
    "orthogonal": lambda layer: parametrizations.orthogonal(layer),
    "spectral_norm": lambda layer: parametrizations.spectral_norm(layer),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
}


@pytest.mark.parametrize("path", [QUERY, GATE, "lm_head"])
@pytest.mark.parametrize("shape", SHAPED)
def test_weights_that_others_compute_are_used(shape, path):
    models = pair()
    for model in models:
        torch.manual_seed(4)
        SHAPED[shape](model.get_submodule(path))
    wanted, found = map(gradients, models)
    assert any("original" in name or "orig" in name for name in wanted)
    same(found, wanted)


def test_a_parametrization_taken_off_leaves_the_fused_layer():
    plain, patched = pair()
    for model in (plain, patched):
        parametrizations.weight_norm(model.get_submodule(GATE))
        parametrize.remove_parametrizations(model.get_submodule(GATE), "weight")
    same(gradients(patched), gradients(plain))
    assert patched.model.layers[0].mlp.weights() is not None


@pytest.mark.parametrize("path", ["lm_head", QUERY, GATE, "model.layers.0.self_attn.o_proj"])
def test_a_parametrization_from_before_goes_on_and_is_taken_off(path):
    """Before `apply_to`, which is to compute no weight: spectral norm iterates whenever it does."""
    plain, patched = make(), make()  # no copy, which would share its class with the original
    for model in (plain, patched):
        torch.manual_seed(4)
        parametrizations.spectral_norm(model.get_submodule(path))
    fusedlib.apply_to(patched)
    assert all(torch.equal(t, patched.state_dict()[n]) for n, t in plain.state_dict().items())
    same(gradients(patched), gradients(plain))
    for model in (plain, patched):
        parametrize.remove_parametrizations(model.get_submodule(path), "weight")
    same(gradients(patched), gradients(plain))
    same(gradients(copy.deepcopy(patched)), gradients(plain))


def test_a_parametrization_put_on_between_two_calls_stays():
    plain, patched = make(), make()
    fusedlib.apply_to(patched, attention=False, mlp=False, loss=False)
    for path in (QUERY, GATE, "lm_head"):
        for model in (plain, patched):
            torch.manual_seed(4)
            parametrizations.weight_norm(model.get_submodule(path))
    fusedlib.apply_to(patched)
    same(gradients(patched), gradients(plain))


def test_functional_call_and_single_gradients():
    plain, patched = pair()
    ids, _ = tokens()
    state = {name: 0.9 * weight.detach() for name, weight in plain.state_dict().items()}
    found, wanted = (torch.func.functional_call(m, state, (ids,)).logits for m in (patched, plain))
    same(found, wanted)
    for path in (QUERY, KEY, GATE):
        found, wanted = (
            torch.autograd.grad(loss_of(m), m.get_parameter(f"{path}.weight"))[0]
            for m in (patched, plain)
        )
        same(found, wanted)


def test_hooks_of_every_module_see_every_module():
    plain, patched = pair()
    seen = {}
    for model in (plain, patched):
        names, calls = {m: n for n, m in model.named_modules()}, []
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, _, found, names=names, calls=calls: calls.append(names.get(module))
        )
        loss_of(model)
        handle.remove()
        seen[model] = [name for name in calls if name and "layers" in name]
    assert seen[patched] == seen[plain] and QUERY in seen[plain]


@pytest.mark.parametrize("child", ["mlp.up_proj", "mlp.down_proj", "self_attn.v_proj"])
@pytest.mark.parametrize("way", ["a function", "scripted"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_takes_a_projection_s_place_is_called(child, way):
    plain, patched = pair()
    owner, _, name = child.partition(".")
    for model in (plain, patched):
        module = getattr(model.model.layers[1], owner)
        linear = getattr(module, name)
        delattr(module, name)
        theirs = torch.jit.script(linear) if way == "scripted" else lambda x, by=linear: 2 * by(x)
        setattr(module, name, theirs)
    ids, _ = tokens()
    same(patched(ids).logits, plain(ids).logits)


def test_another_activation_put_in_afterwards_is_computed():
    plain, patched = pair()
    for model in (plain, patched):
        model.model.layers[1].mlp.act_fn = nn.GELU()
    assert misses_of(plain, patched, *tokens()) == []


def test_an_activation_hooked_afterwards_is_called():
    _, patched = pair()
    calls = []
    patched.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    loss_of(patched)
    assert calls == [1]


# --- optimizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_steps_inside_backward(fused):
    plain, patched = pair()
    for model in (plain, patched):
        for p in model.parameters():
            own = torch.optim.SGD([p], lr=0.1, fused=fused)
            p.register_post_accumulate_grad_hook(lambda q, own=own: own.step() or own.zero_grad())
        for _ in range(3):
            loss_of(model).backward()
    same(dict(patched.state_dict()), dict(plain.state_dict()))


def test_an_optimizer_made_before_and_its_state_go_on():
    plain, patched = make().double(), make().double()
    own = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    train(plain, own)
    patched.load_state_dict(plain.state_dict())
    optimizer = torch.optim.AdamW(patched.parameters(), lr=1e-3)  # before the model is patched
    fusedlib.apply_to(patched)
    optimizer.load_state_dict(copy.deepcopy(own.state_dict()))
    same(train(patched, optimizer), train(plain, own))


# --- adapters and trainers -----------------------------------------------------------------------


ADAPTERS = {
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["k_proj"]},
    "bias=all": {"target_modules": ["q_proj"], "bias": "all"},
    "bias=lora_only": {"target_modules": ["q_proj", "gate_proj"], "bias": "lora_only"},
    "target_parameters": {"target_parameters": ["mlp.gate_proj.weight"]},
    "several": {"target_modules": ["q_proj", "v_proj", "up_proj", "lm_head"]},
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_peft_trains_what_it_trains_in_the_plain_model(name, adapter):
    peft = pytest.importorskip("peft")
    trained, sizes = [], []
    for model in pair(name):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=2, init_lora_weights=False, **ADAPTERS[adapter])
        wrapped = peft.get_peft_model(model, config)
        sizes.append(wrapped.get_nb_trainable_parameters())
        weights = [p for p in wrapped.parameters() if p.requires_grad]
        train(wrapped, torch.optim.AdamW(weights, lr=1e-2))
        trained.append({n: p for n, p in wrapped.named_parameters() if p.requires_grad})
    assert sizes[0] == sizes[1] and list(trained[0]) == list(trained[1])
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-3, atol=1e-4)


def adapted_by_adalora(model):
    """With 4 ranks a layer, of which updates after each step leave 2."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.AdaLoraConfig(
        target_modules=["q_proj", "gate_proj"], init_r=4, target_r=2, total_step=6, tinit=1,
        tfinal=1, deltaT=1, task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(model, config)


def by_hand(model, folder):
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)


def by_the_trainer(model, folder):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Allocate(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            model.base_model.update_and_allocate(state.global_step)

    ids, labels = tokens(shape=(4, 16))
    rows = [{"input_ids": i, "labels": t} for i, t in zip(ids, labels, strict=True)]
    arguments = TrainingArguments(
        str(folder), max_steps=5, learning_rate=1e-2, per_device_train_batch_size=2,
        use_cpu=True, report_to=[], save_strategy="no", seed=7,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=rows, callbacks=[Allocate()]).train()


@pytest.mark.parametrize("run", [by_hand, by_the_trainer])
def test_adalora_trains_the_same_ranks(run, tmp_path):
    states, starts = [], []
    for model in map(adapted_by_adalora, pair()):
        starts.append({n: t.clone() for n, t in model.state_dict().items()})
        run(model, tmp_path)
        states.append(model.state_dict())
    wanted, found = states
    for name, before in starts[0].items():
        off, moved = ((t[name] - wanted[name]).norm() for t in (found, {name: before}))
        assert off <= 1e-3 * moved, f"{name}: a change of {moved:.1e} is off by {off:.1e}"
    ranks = [t.count_nonzero() for n, t in wanted.items() if "lora_E" in n]
    assert sum(ranks) == 2 * len(ranks)


def test_the_trainer_shifts_labels_for_its_label_smoothing(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    losses = []
    ids, labels = tokens()
    for model in pair():
        arguments = TrainingArguments(
            str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to=[]
        )
        trainer = Trainer(model, arguments)
        losses.append(trainer.compute_loss(model, {"input_ids": ids, "labels": labels}))
    same(losses[1], losses[0])


def test_skip_logits_says_whether_there_are_any():
    plain, patched = pair()
    ids, labels = tokens()
    for training in (True, False):
        for model in (plain, patched):
            model.train(training)
        wanted, without, both = (
            model(ids, labels=labels, skip_logits=skip)
            for model, skip in ((plain, True), (patched, True), (patched, False))
        )
        assert without.logits is None
        same(both.logits, wanted.logits)
        for found in (without, both):
            same(found.loss.float(), wanted.loss.float())
        assert patched(ids, skip_logits=True).logits is not None  # without labels


def test_the_trainer_evaluates_without_logits(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    class LossTrainer(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            inputs = {**inputs, "skip_logits": prediction_loss_only}
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    ids, labels = tokens(shape=(5, 16))
    rows = [{"input_ids": i, "labels": t} for i, t in zip(ids, labels, strict=True)]
    arguments = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=2, use_cpu=True, report_to=[]
    )
    losses, given = {}, []
    plain, patched = pair()
    patched.register_forward_hook(lambda _, __, output: given.append(output.logits))
    for kind, model in ((Trainer, plain), (LossTrainer, plain), (LossTrainer, patched)):
        trainer = kind(model, arguments, eval_dataset=rows)
        losses[kind, model] = torch.tensor(trainer.evaluate()["eval_loss"])
    assert given == [None] * 3
    for loss in losses.values():
        same(loss, losses[Trainer, plain])
    predicted = trainer.predict(rows)
    assert predicted.predictions.shape == (5, 16, model.config.vocab_size)


def test_resized_embeddings_are_fused_again_by_another_call():
    plain, patched = pair()
    for model in (plain, patched):
        torch.manual_seed(5)
        model.resize_token_embeddings(223)
    same(loss_of(patched).float(), loss_of(plain).float())
    report = fusedlib.apply_to(patched)
    assert report.replaced["loss"] == [""] and not report.already["loss"]
    ids, labels = tokens()
    assert patched(ids, labels=labels).logits is None
    same(loss_of(patched).float(), loss_of(plain).float())
    patched.lm_head = nn.Sequential(patched.lm_head)
    assert "not a torch.nn.Linear" in fusedlib.apply_to(patched).left["loss"][0][1]


def test_a_head_that_was_exchanged_is_warned_of_once():
    ids, labels = tokens()
    for exchange in (
        lambda model: model.resize_token_embeddings(223),
        lambda model: setattr(model, "lm_head", nn.Linear(64, 211).double()),
    ):
        _, patched = pair()
        exchange(patched)
        with pytest.warns(UserWarning, match=r"lm_head .* fusedlib\.apply_to"):
            patched(ids, labels=labels)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            patched(ids, labels=labels)
            fusedlib.apply_to(patched)
            patched(ids, labels=labels)


# --- what goes in and comes out ------------------------------------------------------------------


@pytest.mark.parametrize("name", [*EVERY, "Gemma2"])
def test_forwards_take_the_arguments_that_they_took(name):
    """By name: the first argument of every module, and what own attention functions are given."""
    from transformers import AttentionInterface

    given, found = [], []

    def attend(module, query, key, value, attention_mask, **own):
        given[-1].append(sorted(own))
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).contiguous(), None

    AttentionInterface.register("own", attend)
    for model in pair(name, attn_implementation="own"):
        given.append([])
        loss_of(model)
        for path, module in model.named_modules():
            if path.endswith(("norm", "mlp", "layernorm")):
                first = first_argument(module)
                width = 64 if path.endswith("mlp") else module.weight.shape[0]
                x = torch.ones(1, 2, width, dtype=model.dtype)
                found.append((f"{path}({first}=)", module(**{first: x})))
    assert given[0] == given[1]
    half = len(found) // 2
    assert half
    same(dict(found[half:]), dict(found[:half]))


@pytest.mark.parametrize("way", ["heads joined", "values written over"])
def test_an_attention_function_may_join_heads_and_write_over_values(way):
    from transformers import AttentionInterface

    def attend(module, query, key, value, attention_mask, **own):
        groups = query.shape[1] // key.shape[1]
        if way == "values written over":
            value.mul_(2)
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2)
        return (mixed.flatten(2) if way == "heads joined" else mixed.contiguous()), None

    AttentionInterface.register(way, attend)
    plain, patched = pair(attn_implementation=way)
    same(gradients(patched), gradients(plain))


def first_argument(module):
    plain = getattr(type(module), "_base", type(module))
    return list(inspect.signature(plain.forward).parameters)[1]


def test_a_model_patched_in_inference_mode_trains():
    plain, patched = make().double(), make().double()
    with torch.inference_mode():
        fusedlib.apply_to(patched)
    same(gradients(patched), gradients(plain))


def test_print_says_what_is_fused():
    _, patched = pair()
    words = str(patched)
    assert words.count("LlamaMLP") == 1 and "LlamaRMSNorm((64,), eps=1e-06, fused)" in words


@pytest.mark.parametrize("adapted", [False, True])
def test_a_replica_of_data_parallel_computes_with_its_own_weights(adapted):
    plain, patched = pair()
    calls = []
    for model in (plain, patched):
        if adapted:
            model.get_submodule(QUERY).register_forward_hook(lambda *_: calls.append(1))
        replica = replica_of(model)
        loss_of(replica).backward()
    same({n: p.grad for n, p in patched.named_parameters()},
         {n: p.grad for n, p in plain.named_parameters()})  # fmt: skip
    assert len(calls) == 2 * adapted


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("adapted", [False, True])
def test_data_parallel_trains_as_the_plain_model(adapted):
    peft = pytest.importorskip("peft") if adapted else None
    found = []
    for model in pair():
        model = model.float().cuda()
        if peft is not None:
            torch.manual_seed(3)
            config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"])
            model = peft.get_peft_model(model, config)
        ids, labels = tokens("cuda", shape=(4, 33))
        nn.DataParallel(model)(input_ids=ids, labels=labels).loss.sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
