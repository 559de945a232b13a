"""Tiny models of every causal language model of transformers, built without a network.

No model is named here: sizes are put where a configuration, or one that it holds, has an attribute
of that name, a layer of each kind is asked for, and what does not build so is tried with a few
other settings.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY, TOKENS, MOST_ELEMENTS = 211, 12, 5_000_000
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
    loss_and_gradients(model)
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


def batches() -> list[dict[str, torch.Tensor]]:
    """Token ids (2, TOKENS), none of them special: whole, and with a row that is padded in front.

    In both some labels are ignored, in the second all of what is padded.
    """
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (2, TOKENS), generator=draw)
    labels = ids.where(ids % 5 > 0, -100)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    padded = {"input_ids": ids * mask, "attention_mask": mask}
    return [
        {"input_ids": ids, "labels": labels},
        padded | {"labels": labels.where(mask > 0, -100)},
    ]


def loss_and_gradients(model: nn.Module, **asked: Any) -> dict[str, torch.Tensor]:
    """The loss of each batch, and gradients of all by name; of parameters out of reach none."""
    model.zero_grad()
    found = {}
    for number, batch in enumerate(batches()):
        torch.manual_seed(3)
        loss = model(**batch, **asked).loss
        loss.backward()
        found[f"loss of batch {number}"] = loss.detach()
    reached = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found | reached


def outputs(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Logits and loss in evaluation, and the tokens that greedy decoding with a cache adds."""
    model.eval()
    with torch.no_grad():
        for number, batch in enumerate(batches()):
            torch.manual_seed(3)
            evaluated = model(**batch)
            yield f"logits of batch {number}", evaluated.logits
            yield f"evaluated loss of batch {number}", evaluated.loss
            del batch["labels"]
            torch.manual_seed(3)
            tokens = model.generate(**batch, max_new_tokens=4, do_sample=False, use_cache=True)
            yield f"generated from batch {number}", tokens
    model.train()


def checkpointed(model: nn.Module) -> dict[str, torch.Tensor]:
    """Loss and gradients with layers that are computed again in backward."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = loss_and_gradients(model)
    model.gradient_checkpointing_disable()
    return found


def intermediate(model: nn.Module) -> dict[str, torch.Tensor]:
    """What layers and eager attention give, in training and in evaluation."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    found = {}
    for training in (False, True):
        torch.manual_seed(3)
        model.train(training)
        output = model(**batches()[0], output_attentions=True, output_hidden_states=True)
        for name in ("attentions", "hidden_states"):
            for layer, value in enumerate(output.get(name) or ()):
                if isinstance(value, torch.Tensor):
                    found[f"{name} {layer}, {training=}"] = value.detach()
    model.set_attn_implementation(usual)
    return found


def balanced(model: nn.Module) -> dict[str, torch.Tensor]:
    """Loss and gradients with the balance of experts; nothing of a model that has no such."""
    asks = hasattr(model.config, "output_router_logits")
    return loss_and_gradients(model, output_router_logits=True) if asks else {}


def trained(model: nn.Module, optimizer: str) -> dict[str, torch.Tensor]:
    """The state after one step of AdamW, or of Muon on all matrices and AdamW on the rest.

    AdamW's eps is so large that a gradient of nothing but rounding moves no weight.
    """
    model.zero_grad()
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim == 2] if optimizer == "Muon" else []
    others = [p for p in parameters if p.ndim != 2 or optimizer != "Muon"]
    steps = [torch.optim.AdamW(others, lr=1e-3, eps=1e-3)] if others else []
    steps += [torch.optim.Muon(matrices, lr=1e-3)] if matrices else []
    loss_and_gradients(model)
    for step in steps:
        step.step()
    return {name: value.clone() for name, value in model.state_dict().items()}
