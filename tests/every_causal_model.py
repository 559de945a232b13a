"""Tiny models of every causal language model of transformers, built without a network.

No model is named here: sizes are put where a configuration has an attribute of that name, and what
does not build so is tried with a few other numbers of layers and heads.
"""

import copy
from collections.abc import Iterator

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY, TOKENS, MOST_ELEMENTS = 211, 12, 3_000_000
SIZES = {
    64: "hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim hidden_dim "
        "emb_dim max_position_embeddings n_positions max_seq_len mamba_d_ssm",
    96: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff d_inner "
        "ffn_hidden_size intermediate_size_mlp feed_forward_size block_ff_dim dim_ff",
    48: "moe_intermediate_size shared_expert_intermediate_size",
    24: "q_lora_rank",
    16: "head_dim dim_head kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim "
        "mamba_d_head mamba_d_state mamba_head_dim ssm_state_size state_size linear_key_head_dim "
        "linear_value_head_dim index_head_dim",
    8: "rotary_dim sliding_window index_topk",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
       "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
       "num_local_experts num_experts n_routed_experts moe_num_experts mamba_n_heads "
       "mamba_num_heads linear_num_value_heads",
    2: "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers "
       "num_decoder_layers num_encoder_layers num_key_value_heads num_experts_per_tok moe_topk "
       "n_mamba_heads linear_num_key_heads index_n_heads eos_token_id",
    1: "n_group topk_group first_k_dense_replace n_shared_experts mamba_n_groups mamba_expand "
       "n_groups expand mamba_ngroups bos_token_id",
    0: "pad_token_id",
    VOCABULARY: "vocab_size",
}  # fmt: skip
OTHERS = ({}, {"num_key_value_heads": 4}, {"num_hidden_layers": 4}, {"num_hidden_layers": 6},
          {"num_hidden_layers": 8})  # fmt: skip


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


def _built(name: str, others: dict[str, int]) -> nn.Module:
    configuration = CONFIG_MAPPING[name]
    known = {*configuration().to_dict(), *configuration.attribute_map}
    sizes = {name: size for size, names in SIZES.items() for name in names.split()} | others
    config = configuration(**{name: size for name, size in sizes.items() if name in known})
    config.is_decoder = True
    architecture = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
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


def ids_of(seed: int = 2) -> torch.Tensor:
    """Token ids (2, TOKENS), none of them special."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (2, TOKENS), generator=draw)


def loss_and_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """By name; of parameters that nothing reaches none."""
    model.zero_grad()
    torch.manual_seed(3)
    ids = ids_of()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    reached = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **reached}


def outputs(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Logits, and the tokens that greedy decoding adds."""
    model.eval()
    with torch.no_grad():
        torch.manual_seed(3)
        yield "logits", model(input_ids=ids_of()).logits
        torch.manual_seed(3)
        yield "generated", model.generate(ids_of(), max_new_tokens=4, do_sample=False)
    model.train()


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
