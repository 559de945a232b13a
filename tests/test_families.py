"""apply_to knows modules by their code: models of other names compute as before, and train."""

import ast
import copy
import functools
import sys

import pytest
import torch
from packaging.version import Version

transformers = pytest.importorskip("transformers")

import fusedlib  # noqa: E402
from fusedlib.bench.check import errors, misses  # noqa: E402
from fusedlib.ops.fused_class import fuse  # noqa: E402
from fusedlib.patch import families  # noqa: E402
from fusedlib.patch.cache_argument import CACHE  # noqa: E402
from llama_models import SIZES, parameter, results, tokens  # noqa: E402

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
# What is replaced, by the order of the switches: MLPs, norms, rotations, attentions, loss.
MODELS = {
    "Ministral": ({"head_dim": 16}, "2 5 2 2 1"),
    "Phi3": ({"resid_pdrop": 0.5, "partial_rotary_factor": 0.5}, "2 5 2 0 1"),
    "Olmo2": ({}, "2 9 2 2 1"),
    "Olmo3": ({"sliding_window": 8}, "2 9 2 2 1"),
    "SmolLM3": ({"no_rope_layers": [1, 0]}, "2 5 2 2 1"),
    "Granite": ({"logits_scaling": 2.0}, "2 5 2 2 0"),
    "Glm4": ({"head_dim": 16}, "2 9 0 2 1"),
    "Ernie4_5": ({"head_dim": 16}, "2 5 0 2 1"),
    "Helium": ({"head_dim": 16}, "2 0 0 2 1"),
    "Gemma": ({"head_dim": 16}, "2 5 2 2 1"),
    "Gemma2": (
        {"head_dim": 16, "final_logit_softcapping": 1.0, "attn_logit_softcapping": 0.5},
        "2 9 2 2 1",
    ),
    "Gemma3Text": ({"head_dim": 16, "sliding_window": 8}, "2 13 2 2 1"),
    "NanoChat": ({"head_dim": 16}, "0 9 0 0 1"),
    "Mixtral": (EXPERTS, "0 5 2 2 1"),
    "Qwen2Moe": (EXPERTS, "2 5 2 2 1"),
    "Qwen3Moe": (
        EXPERTS | {"head_dim": 16, "moe_intermediate_size": 32, "output_router_logits": True},
        "0 9 2 2 1",
    ),
    "DeepseekV3": (LATENT, "2 9 0 0 1"),
}


def make(name, **settings):
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name][0] | settings)
    torch.manual_seed(1)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.1 * torch.randn_like(weight) + (weight.ndim == 1))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_models_of_other_names_compute_as_before(name):
    plain = make(name)
    patched = copy.deepcopy(plain)
    report = fusedlib.apply_to(patched)
    found = [len(report.replaced[s]) for s in ("mlp", "rms_norm", "rope", "attention", "loss")]
    assert " ".join(map(str, found)) == MODELS[name][1], str(report)
    ids, labels = tokens()
    losses = []
    for model in (plain, patched):
        torch.manual_seed(3)  # of dropout
        losses.append(model(ids, labels=labels).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    for path, weight in plain.named_parameters():
        wanted, gradient = weight.grad, parameter(patched, path).grad
        if wanted is None:
            assert gradient is None or not gradient.any()
            continue
        scale = wanted.abs().max().item() + 1e-6
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-4 * scale, msg=path)
    logits = [model.eval()(ids).logits for model in (plain, patched)]
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "name", ["Phi3", "Olmo2", "Olmo3", "SmolLM3", "Granite", "Gemma", "Gemma2"]
)
def test_errors_in_bf16_are_those_of_the_plain_model(name, device):
    plain = make(name, resid_pdrop=0.0, hidden_size=128).to(device, torch.bfloat16)
    true, patched = copy.deepcopy(plain).float(), copy.deepcopy(plain)
    fusedlib.apply_to(patched)
    ids, labels = tokens(device)
    names = [n for n, _ in plain.named_parameters()]
    wanted, usual, found = (
        results(m, names, m(ids, labels=labels).loss) for m in (true, plain, patched)
    )
    assert misses(errors(found, wanted), errors(usual, wanted), torch.bfloat16) == []


@pytest.mark.parametrize("name", ["Phi3", "Olmo2", "Gemma"])
def test_norms_round_where_theirs_do(name):
    plain = make(name).bfloat16()
    patched = copy.deepcopy(plain)
    fusedlib.apply_to(patched)
    x = torch.randn(5, SIZES["hidden_size"], dtype=torch.bfloat16)
    assert torch.equal(patched.model.norm(x), plain.model.norm(x))


def test_what_reads_otherwise_is_left_and_said():
    left = fusedlib.apply_to(make("Gemma", hidden_act="relu")).left
    assert left["mlp"][0][1].endswith("ReLU, not one of silu, gelu, gelu_tanh")
    left = fusedlib.apply_to(make("Helium")).left
    why = "modeling_helium.HeliumRMSNorm, which does not compute as LlamaRMSNorm or Olmo2RMSNorm"
    assert why in left["rms_norm"][0][1]
    left = fusedlib.apply_to(make("Glm4")).left
    assert left["rope"][0][1] == "modeling_glm4 turns q and k in a way of its own"


def test_a_method_that_forward_leads_to_is_read_too():
    known, other = (
        families._methods_used({m.name: m for m in ast.parse(text).body})
        for text in (
            "def forward(s): s.a()\ndef a(s): s.b\ndef b(s): 0\ndef c(s): 0",
            "def forward(s): c",
        )
    )
    assert (known, other) == (["forward", "a", "b"], ["forward"])


@pytest.mark.parametrize(
    ("code", "same"),
    [
        ('def forward(self, x: "Tensor", y=1) -> None:\n  "Words."\n  z: int = x + y\n', True),
        ("@decorated\ndef forward(self, x, y=1):\n  z: float = x + y\n", True),
        ("def forward(self, x, y=2):\n  z: int = x + y\n", False),
        ("def forward(self, x, y=1):\n  z: int = x - y\n", False),
    ],
)
def test_code_is_compared_without_words(code, same):
    known = "def forward(self, x, y=1):\n  z: int = x + y\n"
    bare = [families._code_alone(ast.parse(text).body[0]) for text in (known, code)]
    assert (bare[0] == bare[1]) == same


def test_only_decoders_with_the_usual_mask_go_without():
    """Under torch.compile: where a decoder of another code makes its own, it is left to do so."""
    for name, usual in (("Ministral", False), ("Ernie4_5", True), ("Olmo2", True)):
        model = make(name)
        fusedlib.apply_to(model)
        assert model._fusion.causal == usual
    model = make("Ernie4_5")
    model.config.is_causal = False
    fusedlib.apply_to(model)
    assert not model._fusion.causal


@pytest.mark.parametrize("name", ["Gemma2", "Phi3", "SmolLM3"])
def test_a_compiled_window_is_a_mask_only_where_tokens_reach_beyond_it(name):
    """The results are those of the plain model, which has a mask in both cases."""
    ids, labels = tokens()
    length = ids.shape[1]
    settings = {"attn_implementation": "sdpa"}
    if name == "SmolLM3":
        settings |= {"use_sliding_window": True}
    if name == "Gemma2" and Version(transformers.__version__) >= Version("5.21"):
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):  # has no softcap
            make(name, **settings)
        return
    for window in (length - 1, length):
        plain = make(name, sliding_window=window, **settings).eval()
        patched = copy.deepcopy(plain)
        fusedlib.apply_to(patched)
        masks = []

        def backend(graph, inputs, masks=masks):
            attended = [n for n in graph.graph.nodes if "scaled_dot_product" in str(n.target)]
            masks.extend(node.kwargs.get("attn_mask") for node in attended)
            return graph.forward

        torch.compiler.reset()
        compiled = torch.compile(patched, backend=backend, fullgraph=True)
        torch.testing.assert_close(
            compiled(ids, labels=labels).loss, plain(ids, labels=labels).loss
        )
        assert all(m is None for m in masks) == (window == length), masks


@pytest.mark.parametrize("asked", [True, False])
def test_the_balance_of_experts_is_part_of_the_loss_where_it_is_asked_for(asked):
    plain = make("Mixtral", router_aux_loss_coef=0.5)
    patched = copy.deepcopy(plain)
    fusedlib.apply_to(patched)
    ids, labels = tokens()
    given = {"labels": labels, "output_router_logits": asked, "num_items_in_batch": 40}
    wanted, found = (model(ids, **given) for model in (plain, patched))
    assert found.logits is None and (found.aux_loss is not None) == asked
    torch.testing.assert_close(found.loss, wanted.loss)
    torch.testing.assert_close(found.aux_loss, wanted.aux_loss)
    as_tuple = patched(ids, return_dict=False, **given)
    torch.testing.assert_close(as_tuple[0], wanted.loss)
    assert patched(ids).logits is not None and patched.eval()(ids, **given).logits is not None


# --- what users put in the place of a part -------------------------------------------------------


def wrapped(old):
    @functools.wraps(old)
    def theirs(*args, **kwargs):
        return 2 * old(*args, **kwargs)

    return theirs


class SiLU(torch.nn.Module):
    def forward(self, x):
        return x.relu()


REPLACED = {
    "a wrapped forward": ("Phi3MLP", "forward", "mlp"),
    "a wrapped method that forward calls": ("GemmaRMSNorm", "_norm", "rms_norm"),
    "the function that halves are turned by": ("modeling_phi3", "rotate_half", "rope"),
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_stands_around_the_librarys_own_is_left_and_said(monkeypatch, what):
    owner, function, switch = REPLACED[what]
    name = "Gemma" if "Gemma" in owner else "Phi3"
    place = sys.modules[type(make(name)).__module__]
    place = getattr(place, owner, place)
    monkeypatch.setattr(place, function, wrapped(getattr(place, function)))
    plain = make(name).eval()
    patched = copy.deepcopy(plain)
    report = fusedlib.apply_to(patched)
    assert not report.replaced[switch] and function in report.left[switch][0][1]
    ids, _ = tokens()
    torch.testing.assert_close(patched(ids).logits, plain(ids).logits)


def test_an_activation_that_is_only_called_silu_is_left_and_said():
    plain = make("Phi3").eval()
    first, second = (layer.mlp for layer in plain.model.layers)
    first.activation_fn, second.activation_fn.forward = SiLU(), torch.relu
    patched = copy.deepcopy(plain)
    left = fusedlib.apply_to(patched).left["mlp"]
    assert "test_families.SiLU, not one of silu" in left[0][1] and "someone else's" in left[1][1]
    ids, _ = tokens()
    torch.testing.assert_close(patched(ids).logits, plain(ids).logits)


def test_an_activation_whose_class_others_changed_is_left_and_said(monkeypatch):
    plain = make("Phi3").eval()
    act = type(plain.model.layers[0].mlp.activation_fn)
    monkeypatch.setattr(act, "forward", lambda self, x: torch.relu(x))
    patched = copy.deepcopy(plain)
    assert "stands in the place of" in fusedlib.apply_to(patched).left["mlp"][0][1]
    ids, _ = tokens()
    torch.testing.assert_close(patched(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("way", ["module", "forward"])
def test_a_norm_replaced_afterwards_is_called(way):
    plain = make("Phi3").eval()
    patched = copy.deepcopy(plain)
    fusedlib.apply_to(patched)
    for model in (plain, patched):
        layer = model.model.layers[0]
        if way == "module":
            layer.post_attention_layernorm = torch.nn.Softmax(dim=-1)
        else:
            layer.post_attention_layernorm.forward = lambda x: 2 * x
    ids, _ = tokens()
    torch.testing.assert_close(patched(ids).logits, plain(ids).logits)


def test_a_decoder_that_gets_its_mask_from_a_hook_is_asked(monkeypatch):
    """Compiled, it is not handed the mask that hides nothing."""
    model = make("Phi3")
    fusedlib.apply_to(model)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    given = dict.fromkeys(("attention_mask", "position_ids", CACHE, "inputs_embeds"))
    given["input_ids"] = tokens()[0]
    assert model._needs_no_mask(given)
    model.model.register_forward_pre_hook(lambda *given: None)
    assert not model._needs_no_mask(given)
    model = make("Phi3")
    place = sys.modules[type(model).__module__]
    monkeypatch.setattr(place, "create_causal_mask", wrapped(place.create_causal_mask))
    fusedlib.apply_to(model)
    assert not model._needs_no_mask(given)


def test_a_residual_in_a_wider_dtype_is_added_as_torch_adds():
    norm = make("Olmo2").bfloat16().model.norm
    x, residual = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(3, 64)
    wanted = copy.deepcopy(norm)(x + residual)
    fuse(norm, families.modules.FusedWideNorm)
    assert torch.equal(norm(x, residual)[0], wanted)


def test_an_own_subclass_is_named_as_such():
    class Own(transformers.Phi3ForCausalLM):
        pass

    model = make("Phi3")
    model.__class__ = Own
    assert "Own, no class of transformers" in fusedlib.apply_to(model).left["loss"][0][1]
