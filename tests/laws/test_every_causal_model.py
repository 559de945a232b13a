"""A patched model beside the plain one, over every causal language model of transformers.

The models are tiny and built without a network. None is named here: sizes are put where a
configuration, or one that it holds, has an attribute of that name, a layer of each kind is asked
for, and what does not build so is tried with a few other settings.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from situations import (
    ASKED,
    VOCABULARY,
    Change,
    checkpointed,
    evaluated,
    generated,
    in_turn,
    learned,
    learning,
    recorded,
    transformers,
)
from test_models import differences, state
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import fusedlib

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MOST_ELEMENTS = 5_000_000
SIZES = {
    64: "hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim hidden_dim "
        "emb_dim max_position_embeddings n_positions max_seq_len mamba_d_ssm "
        "pronunciation_vocab_size shape_vocab_size mamba_chunk_size chunk_size "
        "backbone_hidden_size ple_embed_dim ngram_vocab_size_base hidden_size_per_layer_input",
    96: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff d_inner "
        "ffn_hidden_size intermediate_size_mlp feed_forward_size block_ff_dim dim_ff "
        "shared_intermediate_size",
    48: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    24: "q_lora_rank",
    16: "head_dim dim_head kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim "
        "mamba_d_head mamba_d_state mamba_head_dim ssm_state_size state_size linear_key_head_dim "
        "linear_value_head_dim linear_head_dim index_head_dim indexer_head_dim "
        "global_head_dim attention_head_size pronunciation_embed_dim shape_embed_dim image_size "
        "router_hidden_size hc_lowrank",
    8: "rotary_dim sliding_window index_topk attention_chunk_size laurel_rank",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
       "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
       "num_local_experts num_experts n_routed_experts moe_num_experts mamba_n_heads "
       "mamba_num_heads linear_num_value_heads linear_num_heads patch_size indexer_n_heads "
       "indexer_budget mm_tokens_per_image",
    2: "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_blocks "
       "num_decoder_layers num_encoder_layers num_key_value_heads num_experts_per_tok moe_topk "
       "n_mamba_heads linear_num_key_heads index_n_heads eos_token_id num_experts_per_token "
       "indexer_compress_ratio split_ngram_parts",
    1: "n_group topk_group first_k_dense_replace n_shared_experts mamba_n_groups mamba_expand "
       "n_groups expand mamba_ngroups bos_token_id zero_expert_num indexer_kv_heads",
    0: "pad_token_id num_kv_shared_layers",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
}  # fmt: skip
OTHERS = (
    {}, {"num_key_value_heads": 4}, {"num_hidden_layers": 4}, {"num_hidden_layers": 6},
    {"num_hidden_layers": 8}, {"num_experts_per_tok": 1}, {"attn_layer_indices": [1]},
    {"layer_types": ["mamba", "attention"]}, {"layer_types": ["conv", "full_attention"]},
    {"attention_types": [[["global", "local"], 1]]}, {"head_dim": 32},
    {"default_language": "en_XX"},
)  # fmt: skip


def build(name: str) -> nn.Module | str:
    """The model in training mode, without dropout, or why there is none."""
    reasons = []
    for others in OTHERS:
        try:
            return _built(name, others)
        except Exception as error:  # whatever this model's code raises is the reason
            first = (str(error) or type(error).__name__).splitlines()[0]
            reasons.append(f"{type(error).__name__}: {first[:100]}")
    return reasons[0]


def _built(name: str, others: dict[str, Any]) -> nn.Module:
    architecture = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    config = _tiny(architecture.config_class or CONFIG_MAPPING[name], others)
    config.is_decoder = True
    with torch.device("meta"):
        elements = sum(p.numel() for p in architecture(copy.deepcopy(config)).parameters())
    if elements > MOST_ELEMENTS:
        raise ValueError(f"{elements:.0e} parameters: a size that is not known here")
    torch.manual_seed(1)
    model = architecture(config).train()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases with values of their own
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for probability in [n for n in vars(module) if "dropout" in n]:
            if isinstance(getattr(module, probability), float):
                setattr(module, probability, 0.0)
    learned(model)
    return model


def _tiny(configuration: type, others: dict[str, Any]) -> Any:
    """A configuration with `SIZES` and `others`, where it has such attributes."""
    usual = configuration()
    known = {*usual.to_dict(), *configuration.attribute_map}
    sizes = {name: size for size, names in SIZES.items() for name in names.split()}
    kinds = list(dict.fromkeys(getattr(usual, "layer_types", None) or ()))
    if len(kinds) > 1:
        sizes |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    sizes |= others
    if "layer_types" in others:
        sizes["num_hidden_layers"] = len(others["layer_types"])
    elif "num_hidden_layers" in others:
        sizes.pop("layer_types", None)
    held = {n: _tiny(kind, others) for n, kind in configuration.sub_configs.items()
            if hasattr(kind, "sub_configs") and kind is not configuration and n in known
            and getattr(usual, n, None) is not None}  # fmt: skip
    return configuration(**{name: size for name, size in sizes.items() if name in known}, **held)


USES: dict[str, Change] = {
    "learned": in_turn(learned, learning(**ASKED["padded in front"])),
    "evaluated": in_turn(evaluated, partial(evaluated, **ASKED["padded in front"])),
    "generated": partial(generated, max_new_tokens=4),
    "checkpointed": checkpointed,
    "recorded": recorded,
    "balanced": learning(output_router_logits=True),
}
# How many models at least can be used so, of 178. In float64 least can hide, but `fusedlib.linear`
# takes fp32 weights alone.
LEAST = {
    ("float64", "learned"): 106, ("float64", "evaluated"): 106, ("float64", "generated"): 106,
    ("float32", "learned"): 108, ("float32", "evaluated"): 108, ("float32", "generated"): 108,
    ("float64", "checkpointed"): 105, ("float64", "recorded"): 108, ("float64", "balanced"): 23,
}  # fmt: skip
SHARES = {"float64": 1e-5, "float32": 2e-4}
COMPARED: dict[tuple[str, str], list[str]] = {use: [] for use in LEAST}


@pytest.mark.parametrize("dtype", SHARES)
@pytest.mark.parametrize("name", NAMES)
def test_a_patched_model_is_as_the_plain_one(name, dtype):
    plain, patched = (build(name) for _ in range(2))
    if isinstance(plain, str):
        print(plain)
        return
    for model in (plain, patched):
        model.to(getattr(torch, dtype))
        if dtype == "float64":  # grouped_mm multiplies in fp32 at most
            model.set_experts_implementation("eager")
    before, classes = state(patched), [*map(type, patched.modules())]
    try:
        fusedlib.apply_to(patched)
    except ValueError as error:
        assert "is no model that apply_to knows" in str(error)
        assert [*map(type, patched.modules())] == classes
        return
    assert state(patched) == before
    for use in [use for kind, use in LEAST if kind == dtype]:
        if use == "balanced" and not hasattr(plain.config, "output_router_logits"):
            continue
        try:
            wanted, again = USES[use](plain), USES[use](plain)
        except Exception as error:
            print(f"{use}: the plain model fails: {type(error).__name__}: {error}"[:150])
            continue
        numbers = [t for t in wanted.values() if torch.is_tensor(t)]
        if differences(again, wanted, 1e-5) or any(t.isnan().any() for t in numbers):
            print(f"{use}: the plain model gives NaN, or other values at each call")
            continue
        assert differences(USES[use](patched), wanted, SHARES[dtype]) == []
        COMPARED[dtype, use].append(name)


@pytest.mark.parametrize("use", LEAST)
def test_most_models_were_compared(use):
    """After all others, in one process."""
    print(*COMPARED[use])
    assert len(COMPARED[use]) >= LEAST[use]
