"""Hugging Face's Llamas and models of other families with random weights, and their tokens."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fusedlib.bench.arguments import require_known
from study.models.transformer import sharing_copy

Call = Callable[..., Any]
_LLAMA_32 = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
             "num_key_value_heads": 8}  # fmt: skip
_ROPE = {"rope_type": "default"}
_LLAMA_2 = {"num_attention_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
            "rope_parameters": _ROPE | {"rope_theta": 10000.0}}  # fmt: skip
_QWEN_3 = {"family": "Qwen3", "rms_norm_eps": 1e-6, "rope_parameters": _ROPE | {"rope_theta": 1e6}}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": _LLAMA_32 | {"num_hidden_layers": 16, "vocab_size": 128256},
    "four layers": _LLAMA_32 | {"num_hidden_layers": 4, "vocab_size": 32000},
    # 4096 + 16: an odd factor tells what is as wide as the vocabulary by its size alone.
    "two layers": {
        "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 4112,
    },
    "Llama-2-7B": _LLAMA_2 | {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "max_position_embeddings": 4096,
    },
    "open_llama_3b": _LLAMA_2 | {
        "hidden_size": 3200, "intermediate_size": 8640, "num_hidden_layers": 26,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    },
    "two small layers": _LLAMA_2 | {
        "hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4,
        "num_hidden_layers": 2, "vocab_size": 1024,
    },
    "Qwen3-0.6B": _QWEN_3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28, "vocab_size": 151936,
    },
    "Gemma-2-2B, 8 layers": {
        "family": "Gemma2", "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256,
        "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8,
        "vocab_size": 256000, "rms_norm_eps": 1e-6, "rope_parameters": _ROPE | {"rope_theta": 1e4},
    },
    "Phi-3-mini, 8 layers": {
        "family": "Phi3", "hidden_size": 3072, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 8,
        "vocab_size": 32064, "tie_word_embeddings": False, "max_position_embeddings": 4096,
        "rope_parameters": _ROPE | {"rope_theta": 1e4},
    },
    "Mistral-7B, 6 layers": {
        "family": "Mistral", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 6,
        "vocab_size": 32768, "tie_word_embeddings": False, "sliding_window": None,
    },
    "two Qwen3 layers": _QWEN_3 | {
        "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 1024,
    },
}  # fmt: skip
"""Fields of a `family`'s configuration, Llama's by default, by the model's name, over those of
`build`.
"""


def build(
    config: str, dtype: torch.dtype | str, device: torch.device | str, seed: int = 0,
    layers: int | None = None,
) -> nn.Module:  # fmt: skip
    """A Hugging Face model for causal language modelling with random weights, in training mode.

    Args:
        layers: instead of the configuration's.

    Raises:
        ValueError: an unknown name.
        ModuleNotFoundError: transformers is not installed.
    """
    require_known("model", config, CONFIGS)
    import transformers

    fields = CONFIGS[config] | ({"num_hidden_layers": layers} if layers else {})
    defaults: dict[str, Any] = {
        "tie_word_embeddings": True, "use_cache": False, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "pad_token_id": None,
        "rope_parameters": _ROPE | {"rope_theta": 500000.0},
    }  # fmt: skip
    fields = defaults | fields
    configuration = getattr(transformers, f"{fields.pop('family', 'Llama')}Config")(**fields)
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    torch.manual_seed(seed)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(configuration, dtype=kind).train()


def copy_of(model: nn.Module, *, weights: bool = False) -> nn.Module:
    """A model of the same layers; its parameters are the given one's unless `weights` says copy."""
    return copy.deepcopy(model) if weights else sharing_copy(model)


def tokens(config: str, batch_size: int, context_length: int, device: Any, seed: int = 1) -> Tensor:
    """Random token ids (batch, context), the same ones for the same seed and device."""
    generator = torch.Generator(device).manual_seed(seed)
    size = batch_size, context_length
    return torch.randint(CONFIGS[config]["vocab_size"], size, generator=generator, device=device)
