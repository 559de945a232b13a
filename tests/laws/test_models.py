"""What holds of a patched model in every situation of `situations.py`.

    python -m pytest tests/laws/test_models.py -k "Phi3"                     plain PyTorch, or a GPU
    TRITON_INTERPRET=1 python -m pytest tests/laws/test_models.py -k "gelu"  the kernels, on a CPU

Right is what the unpatched model does in the same situation.
"""

import copy
import gc
import inspect
import os
import socket
import subprocess
import sys
import warnings
import weakref
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import situations
import torch
from copied import library_with
from situations import IN_KERNELS, SHARES, SWITCHES, Situation, transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fusedlib
import limits
from called import note_launches
from fusedlib import tuning
from fusedlib.bench.check import Errors, errors, misses
from fusedlib.patch import cache_argument
from interpreter import INTERPRETED
from llama_models import make, tokens, truth_of

PLAIN = pytest.mark.plain
WIDE = {"hidden_size": 256, "intermediate_size": 688}
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:lm_head of"),
]


def of(chosen: dict[str, Situation]) -> pytest.MarkDecorator:
    there = [pytest.param(each, id=name, marks=[] if find_spec(each.needs) else pytest.mark.skip(
        reason=f"no {each.needs}")) for name, each in chosen.items()]  # fmt: skip
    return pytest.mark.parametrize("situation", there)


@pytest.fixture(autouse=True)
def small_tiles():
    """Two or three in each direction, the last one ragged; a program takes several."""
    if not INTERPRETED:
        yield
        return
    with tuning.override(norm_tile=512, rope_pairs=512):
        yield


# --- the numbers ---------------------------------------------------------------------------------

# What the loss of a few tokens may err in half precision: of one number the unpatched model's error
# is no measure, for it may be nearly 0.
LOSS_IN_HALF = 2.0**-15


def differences(found: dict[str, Any], wanted: dict[str, Any], share: float) -> list[str]:
    """Names of what differs by more than rounding, or of what only one of both has."""
    wrong = [f"{name}: only one of both has it" for name in found.keys() ^ wanted.keys()]
    for name in found.keys() & wanted.keys():
        one, other = found[name], wanted[name]
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            wrong += [] if one == other else [f"{name}: {one} for {other}"]
        elif (one.shape, one.dtype) != (other.shape, other.dtype):
            wrong.append(f"{name}: {one.dtype} {one.shape} for {other.dtype} {other.shape}")
        elif has_values(one) and not one.is_floating_point():
            wrong += [] if torch.equal(one, other) else [f"{name}: other integers"]
        elif has_values(one) and one.numel():
            allowed = max(share, SHARES[one.dtype]) if share else 0
            strange = ~other.isfinite()
            same = torch.equal(one[strange].nan_to_num(), other[strange].nan_to_num())
            one, other = (t.masked_fill(strange, 0).double() for t in (one, other))
            scale, error = other.abs().max().item(), (one - other).abs().max().item()
            if not (same and error <= allowed * scale + 1e-3 * allowed):
                wrong.append(f"{name}: error {error:.1e} of {scale:.1e}")
    return sorted(wrong)


def has_values(t: Tensor) -> bool:
    return not t.is_meta and type(t) in (Tensor, nn.Parameter)


def wrongs(situation: Situation, device: str = "cpu", library: Any = fusedlib) -> list[str]:
    """What is otherwise in a patched model, and what it loses."""
    with situation.around():
        plain, patched = (situation.model(device) for _ in range(2))
        changed = changes(situation, patched, library)
        true = truth(situation, plain) if situation.by_truth else None
        wanted, found = (situation.used(model) for model in (plain, patched))
    if true is None:
        share = situation.tolerance or SHARES[getattr(torch, situation.dtype)]
        return changed + differences(found, wanted, share)
    true = {name: t for name, t in true.items() if isinstance(t, Tensor)}
    usual, actual = (errors({n: r[n] for n in true if n in r}, true) for r in (wanted, found))
    if situation.half:
        usual["loss"] = Errors(*(max(e, LOSS_IN_HALF) for e in vars(usual["loss"]).values()))
    return changed + misses(actual, usual, plain.dtype)


def truth(situation: Situation, model: nn.Module) -> dict[str, Any]:
    """Loss and gradients in float64, of which transformers' norms and losses in fp32 are no part
    where fp32 is compared with it.
    """
    if situation.dtype == "float32":
        return truth_of(model, *tokens(model.device))
    return situation.use(copy.deepcopy(model).double())


# --- what stays ----------------------------------------------------------------------------------


def state(model: nn.Module) -> dict[str, Any]:
    """What others hold on to, by name."""
    modules, weights = dict(model.named_modules()), dict(model.named_parameters())
    hooks = {
        f"{kind} of {path}": [*getattr(module, kind).values()] for path, module in modules.items()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    }  # fmt: skip
    return hooks | {
        "modules": [*modules],
        "which modules": [*map(id, modules.values())],
        "parameters": [*weights],
        "which parameters": [*map(id, weights.values())],
        "addresses": [p.data_ptr() for p in weights.values()],
        "which learn": [p.requires_grad for p in weights.values()],
        "buffers": [(name, id(b)) for name, b in model.named_buffers()],
        "state_dict": [*model.state_dict()],
        "names of classes": [m._get_name() for m in modules.values()],
        "modes": [m.training for m in modules.values()],
    }


def arguments(model: nn.Module) -> dict[str, set[str]]:
    return {path: {*inspect.signature(m.forward).parameters} - {"args", "kwargs"}
            for path, m in model.named_modules()}  # fmt: skip


def replaced(report: Any) -> str:
    return " ".join(str(len(report.replaced[switch])) for switch in SWITCHES)


def changes(situation: Situation, model: nn.Module, library: Any) -> list[str]:
    """What `apply_to` changes that it must not; it leaves the model patched."""
    before, taken = state(model), arguments(model)
    values = {n: t.clone() for n, t in model.state_dict().items()}
    report = situation.apply_to(model, library)
    after = state(model)
    wrong = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    wrong += differences({**model.state_dict()}, values, 0)
    wrong += [f"arguments of {path}" for path, names in arguments(model).items()
              if not names >= taken[path]]  # fmt: skip
    for switch, paths in report.replaced.items():
        wrong += [f"{switch} is off" for _ in paths if not situation.switches.get(switch, True)]
    if situation.replaced and replaced(report) != situation.replaced:
        wrong.append(f"replaced {replaced(report)}, not {situation.replaced}:\n{report}")
    for switch, word in situation.left.items():
        if not any(word in why for _, why in report.left[switch]):
            wrong.append(f"{word} is no reason in {report.left[switch]}")
    again = situation.apply_to(model, library)
    wrong += [f"{switch} a second time" for switch in SWITCHES if again.replaced[switch]]
    wrong += [f"{switch} is forgotten" for switch in SWITCHES
              if not {*again.already[switch]} >= {*report.replaced[switch]}]  # fmt: skip
    twice = state(model)
    return wrong + [f"a second time {name}" for name in after if twice[name] != after[name]]


@of(situations.PLAIN)
def test_a_patched_model_is_as_the_unpatched_one(situation):
    """Loss, gradients, logits, tokens within the bound; parameters, names and hooks as before."""
    assert wrongs(situation) == []


@PLAIN
@of(IN_KERNELS)
def test_in_half_precision_too(situation, device):
    assert wrongs(situation, device) == []


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@of(situations.TRUTHS)
def test_errors_are_those_of_the_unpatched_model(situation, where):
    if where == "cuda":
        situation = replace(situation, config=situation.config | WIDE)
    assert wrongs(situation, where) == []


@pytest.mark.interpreter
@pytest.mark.parametrize(("right", "wrong"), situations.FAULTS_OF_NORMED_HEADS)
def test_a_fault_of_normed_heads_is_noticed(right, wrong, device, tmp_path):
    with library_with("ops/rope/kernels.py", right, wrong, tmp_path) as broken:
        tuned = import_module(f"{broken.__name__}.tuning").override
        with tuned(norm_tile=512, rope_pairs=512):
            assert wrongs(IN_KERNELS[situations.UNEVEN], device, broken)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "switches", "refusal", "words"),
    [
        (lambda: nn.Linear(2, 2), {}, ValueError, r"Linear is no model"),
        (lambda: nn.DataParallel(make()), {}, ValueError, r"LlamaForCausalLM as \.module"),
        (lambda: pytest.importorskip("peft") and situations.several(make()), {}, ValueError,
         r"LlamaForCausalLM as \.base_model\.model"),
        (lambda: pytest.importorskip("litgpt.model").GPT.from_name("pythia-14m", n_layer=1), {},
         ValueError, "pythia-14m"),
        (make, {"swiglu": True}, TypeError, "swiglu"),
        (make, {"mlp": "no"}, TypeError, "mlp must be True or False, got 'no'"),
        (lambda: 3, {}, TypeError, "changes a torch.nn.Module, got int"),
    ],
)  # fmt: skip
def test_what_is_refused_stays_as_it_was(made, switches, refusal, words):
    model = made()
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    classes = list(map(type, modules))
    with pytest.raises(refusal, match=words):
        fusedlib.apply_to(model, **switches)
    assert list(map(type, modules)) == classes


def test_another_transformers_is_left_and_said(monkeypatch):
    def forward(self, hidden_states, past_key_value=None):
        raise NotImplementedError

    attention = transformers.models.llama.modeling_llama.LlamaAttention
    monkeypatch.setattr(attention, "forward", forward)
    report = fusedlib.apply_to(make())
    assert "past_key_value" in report.left["rope"][0][1] and not report.replaced["attention"]


def test_no_class_is_changed():
    kinds = {type(module): type(module).forward for module in make().modules()}
    fusedlib.apply_to(make())
    assert kinds == {type(module): type(module).forward for module in make().modules()}


def test_the_report_says_where_all_is_plain_pytorch():
    assert "cpu" in fusedlib.apply_to(make()).plain
    assert "float64" in fusedlib.apply_to(make().double()).plain


# --- logits --------------------------------------------------------------------------------------


def patched_model(name="Llama", device="cpu", dtype=torch.float32, **settings):
    model = make(name, **settings).to(device, dtype)
    fusedlib.apply_to(model)
    return model


def test_logits_are_there_where_they_are_asked_for():
    """Not in training with labels; otherwise as `skip_logits` says."""
    model, (ids, labels) = patched_model(), tokens()
    for training, asked, given in (
        (True, {}, False), (True, {"skip_logits": True}, False), (False, {}, True),
        (True, {"skip_logits": False}, True), (False, {"skip_logits": True}, False),
    ):  # fmt: skip
        output = model.train(training)(ids, labels=labels, use_cache=False, **asked)
        assert (output.logits is not None) == given, (training, asked)
    assert len(model.train()(ids, labels=labels, use_cache=False, return_dict=False)) == 2
    assert model(ids, skip_logits=True).logits is not None  # without labels


def test_a_batch_without_any_label_leaves_gradients_of_0():
    """Whatever its loss is divided by, where the unpatched model's weights become NaN."""
    model, (ids, _) = patched_model(), tokens()
    model(ids, labels=0 * ids - 100, num_items_in_batch=torch.tensor(0)).loss.backward()
    assert not any(p.grad.isnan().any() or p.grad.any() for p in model.parameters())


def test_hooks_that_bring_weights_and_those_that_went_leave_the_loss_fused():
    def bring(module, *_):
        brought.append(module)

    bring.__module__ = "deepspeed.runtime.zero.parameter_offload"
    brought, model, (ids, labels) = [], patched_model(), tokens()
    model.lm_head.register_forward_hook(lambda module, given, found: 2 * found).remove()
    for path in situations.HOOKED:
        model.get_submodule(path).register_forward_hook(bring)
    assert model(ids, labels=labels).logits is None and model.lm_head in brought


@pytest.mark.parametrize("exchange", [
    lambda m: m.resize_token_embeddings(223), situations.has("lm_head", nn.Linear(64, 211)),
])  # fmt: skip
def test_a_head_that_was_exchanged_is_warned_of_once_and_fused_by_another_call(exchange):
    model, (ids, labels) = patched_model(), tokens()
    exchange(model)
    with pytest.warns(UserWarning, match=r"lm_head .* fusedlib\.apply_to"):
        wanted = model(ids, labels=labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, labels=labels)
        assert fusedlib.apply_to(model).replaced["loss"] == [""]
        found = model(ids, labels=labels)
    assert found.logits is None
    torch.testing.assert_close(found.loss, wanted.loss)


def test_the_trainer_evaluates_without_logits(tmp_path):
    """As `fusedlib/patch/PATCHING.md` says."""
    pytest.importorskip("accelerate")

    class LossTrainer(transformers.Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            inputs = {**inputs, "skip_logits": prediction_loss_only}
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    rows = [{"input_ids": i, "labels": t} for i, t in zip(*tokens(shape=(5, 16)), strict=True)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=2, use_cpu=True, report_to=[]
    )
    plain, model, given = make(), patched_model(), []
    model.register_forward_hook(lambda _, __, output: given.append(output.logits))
    trainer = LossTrainer(model, arguments, eval_dataset=rows)
    wanted = transformers.Trainer(plain, arguments, eval_dataset=rows).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)
    assert given == [None] * 3
    assert trainer.predict(rows).predictions.shape == (5, 16, model.config.vocab_size)


@pytest.mark.interpreter
def test_training_never_builds_the_logits(device):
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
            self.elements = max([self.elements, *(t.numel() for t in tensors)])
            return result

    ids, labels = tokens(shape=(2, 65))
    found = []
    for model in (make(vocab_size=512), patched_model(vocab_size=512)):
        with tuning.override(loss_logits_bytes=2**16), Largest() as largest:
            model(ids, labels=labels).loss.backward()
        found.append(largest.elements)
    assert found[0] >= ids.numel() * 512 > found[1]


@pytest.mark.interpreter
def test_numbers_of_tuning_reach_a_layer_that_has_run(monkeypatch, device):
    """An ablation once measured nothing, for layers kept the plan of their first call."""
    model, (ids, _) = patched_model(device=device, dtype=torch.bfloat16), tokens(device)
    model(ids)
    with tuning.override(mlp_unfused_tokens=1 << 40):
        started = note_launches(monkeypatch)
        model(ids)
    assert started and "_swiglu_fwd_kernel" not in started


# --- masks, and arguments ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "given", "masked"),
    [("Llama", {}, {}, False), ("Llama", {}, {"attention_mask": torch.ones(2, 33)}, True),
     ("Phi3", {"sliding_window": 33}, {}, False), ("Phi3", {"sliding_window": 32}, {}, True)],
)  # fmt: skip
def test_a_mask_is_made_where_tokens_are_masked_alone(name, settings, given, masked):
    """transformers makes a causal one for CUDA graphs and compilers; sdpa takes thrice as long."""
    model, (ids, labels) = patched_model(name, **settings), tokens()
    plain = functional.scaled_dot_product_attention
    with situations.captured(), mock.patch.object(
        functional, "scaled_dot_product_attention", wraps=plain
    ) as calls:  # fmt: skip
        for training in (True, False):
            model.train(training)(ids, labels=labels, **given)
    masks = [call.kwargs["attn_mask"] for call in calls.call_args_list]
    assert len(masks) == 4 and all((mask is not None) == masked for mask in masks)


def test_a_compiled_model_has_no_mask():
    masks = []

    def backend(graph, inputs):
        attended = [n for n in graph.graph.nodes if "scaled_dot_product" in str(n.target)]
        masks.extend(node.kwargs.get("attn_mask") for node in attended)
        return graph.forward

    torch.compiler.reset()
    ids, labels = tokens()
    model = patched_model(num_hidden_layers=1)
    torch.compile(model, backend=backend, fullgraph=True)(ids, labels=labels)
    assert masks == [None]


def test_the_old_name_of_a_cache_is_taken_with_a_warning(monkeypatch):
    """As transformers 5.24 does it, whichever is installed."""
    monkeypatch.setattr(cache_argument, "CACHE", "cache")

    @cache_argument.takes_cache
    def forward(self, x, past_key_values=None, **kwargs):
        return x, past_key_values, kwargs

    assert [*inspect.signature(forward).parameters] == ["self", "x", "cache", "kwargs"]
    assert forward(None, 1, 2) == forward(None, 1, cache=2) == (1, 2, {})
    with pytest.warns(FutureWarning, match="`past_key_values` is deprecated"):
        assert forward(None, 1, past_key_values=2, other=3) == (1, 2, {"other": 3})
    with pytest.warns(FutureWarning):
        assert forward(None, 1, past_key_values=2, cache=4) == (1, 4, {})


@pytest.mark.parametrize("name", ["Phi3", "Olmo2", "Gemma"])
def test_norms_round_where_theirs_do(name):
    norms = [model.bfloat16().model.norm for model in (make(name), patched_model(name))]
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    assert torch.equal(*(norm(x) for norm in norms))


# --- layers that are computed as a whole ---------------------------------------------------------


def half_layer(device, name="Qwen3"):
    """A patched layer, and a call of it."""
    model = patched_model(name, device, torch.bfloat16, head_dim=16)
    layer, x = model.model.layers[0], torch.randn(2, 33, 64, device=device).bfloat16()
    tables = model.model.rotary_emb(x, torch.arange(33, device=device)[None])
    own = [x.requires_grad_(), *layer.parameters()]
    return layer(x, position_embeddings=tables), own, tables


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
def test_gradients_are_of_what_forward_read(device, name):
    """Whatever memory weights get afterwards, and outside autocast as forward ran."""
    y, own, tables = half_layer(device, name)
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(y, own, dy, retain_graph=True)
    with torch.autocast(device, torch.float16):
        cast = torch.autograd.grad(y, own, dy, retain_graph=True)
    assert all(map(torch.equal, cast, wanted))
    for operand in (*own, *tables):
        operand.data = torch.zeros_like(operand)
    assert all(map(torch.equal, torch.autograd.grad(y, own, dy), wanted))


def test_second_derivatives_raise(device):
    y, (x, *_), _ = half_layer(device)
    [d_x] = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        d_x.float().square().sum().backward()


@PLAIN
def test_a_dropped_model_is_freed(device):
    """By its last reference: memory that waits for the garbage collector is missing meanwhile."""
    model, (ids, _) = patched_model("Llama", device, torch.bfloat16), tokens(device)
    fusedlib.apply_to(model)
    model(ids, use_cache=False).logits.sum().backward()
    weight = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


# --- processes and GPUs --------------------------------------------------------------------------


TRAINED = {
    "torch": ("DDP", "FSDP2", "FSDP1", "Tensor parallelism"), "accelerate": ("accelerate",),
    "deepspeed": ("ZeRO-3",),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("libraries", [("torch", "accelerate"), ("deepspeed",)])
def test_two_processes_train_as_with_the_plain_model(tmp_path, libraries):
    libraries = [*filter(find_spec, libraries)]
    if not libraries or not torch.distributed.is_available():
        pytest.skip("no deepspeed, or no torch.distributed")
    patched = make("Qwen2", tie_word_embeddings=True)
    fusedlib.apply_to(patched)
    torch.save(patched, tmp_path / "model")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    tests = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), *sys.path])}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tests / "apply_parallel.py"), str(tmp_path), *libraries],
            env=environment | {"RANK": rank}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in "01"
    ]  # fmt: skip
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=limits.PROCESS_S)
            assert rank.returncode == 0, output[-4000:]
            assert all(f"{name} trains" in output for each in libraries for name in TRAINED[each])
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("adapt", [situations.stays, situations.adapted(target_modules=["q_proj"])])
def test_data_parallel_trains_as_the_plain_model(adapt):
    found = []
    for model in (make(), patched_model()):
        model = model.cuda()
        torch.manual_seed(3)
        model = adapt(model) or model
        ids, labels = tokens("cuda", shape=(4, 33))
        nn.DataParallel(model)(input_ids=ids, labels=labels).loss.sum().backward()
        found.append(situations.gradients(model))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
