"""Decoder layers that `apply_to` has fused, as a whole or module by module.

A layer in half precision is computed as a whole, by `fusedlib.patch.decoder_layer`, where a call of
each of its modules would compute what its class does and nothing else. Hooks, adapters, a replaced
`forward`, torch.compile, autocast and transforms of torch.func send it the other way, module by
module. Nothing is kept of a layer: `operands_of` reads its modules at every call. With few tokens
the host decides how long a step takes, so that function is straight code.
"""

from __future__ import annotations

from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fusedlib.compat import calls_more_than_its_class, has_global_hooks
from fusedlib.launch import has_kernels
from fusedlib.ops.arguments import HALF_DTYPES
from fusedlib.ops.fused_class import LINEAR_FORWARDS, Fused, has_value_hooks
from fusedlib.ops.mlp.activation import activation_of
from fusedlib.patch.cache_argument import CACHE, takes_cache
from fusedlib.patch.modules import FusedAttention, FusedMLP, FusedRMSNorm, has_fused_forward

PARTS = itemgetter("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
HEAD_NORMS = itemgetter("q_norm", "k_norm")
ATTENTION_LINEARS = itemgetter("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = itemgetter("gate_proj", "up_proj", "down_proj")
SWITCHES = {"attention", "rope"}


def operands_of(
    layer: Any,
) -> tuple[list[Any], tuple[Any, Any, Any], list[float], int, str] | None:
    """What a layer is computed from as a whole; None where a module may compute something else.

    Returns:
        The weights of q, k, v, o, gate, up, down, of both norms, and of those of q and k where
        heads have them; the biases of q, k and v, each or None; what the norms add to a mean of
        squares; the width of a head; the activation of the MLP.

    Raises:
        KeyError: a child or a weight is not stored under its name.
    """
    norm, attention, norm_2, mlp = PARTS(layer._modules)
    if not (isinstance(attention, FusedAttention) and isinstance(mlp, FusedMLP)):
        return None
    norms = [norm, norm_2]
    if attention._norms:
        norms += HEAD_NORMS(attention._modules)
    linears = *ATTENTION_LINEARS(attention._modules), *MLP_LINEARS(mlp._modules)
    modules = attention, mlp, *linears, *norms
    if not _are_supported((type(layer), *map(type, modules))):
        return None
    if not (attention._fusion.switches >= SWITCHES and attention._rotates()):
        return None
    act = mlp._modules["act_fn"]
    activation = activation_of(act)
    if activation is None or has_global_hooks():
        return None
    for module in (act, *modules):
        if calls_more_than_its_class(module):
            return None
    q, k, v, o, gate, up, down = [linear._parameters["bias"] for linear in linears]
    if not (o is gate is up is down is None):
        return None
    weights = [module._parameters["weight"] for module in (*linears, *norms)]
    eps = [norm.variance_epsilon for norm in norms]
    return weights, (q, k, v), eps, attention.head_dim, activation


@cache
def _are_supported(classes: tuple[Any, ...]) -> bool:
    """Whether modules of these classes compute as `fusedlib.patch.decoder_layer` does."""
    layer, attention, mlp, *others = classes
    linears, norms = others[:7], others[7:]
    return (
        layer._dropped is FusedLayer._dropped
        and attention._projected is FusedAttention._projected
        and all(map(has_fused_forward, (attention, mlp, *norms)))
        and all(norm._fused is FusedRMSNorm for norm in norms)
        and all(getattr(linear, "forward", None) in LINEAR_FORWARDS for linear in linears)
    )


def run_layer(
    layer: Any, x: Tensor, attention_mask: Tensor | None, past_key_values: Any,
    position_embeddings: tuple[Tensor, Tensor] | None, kwargs: dict[str, Any],
) -> Tensor | None:  # fmt: skip
    """The stream behind the layer, or None where it goes module by module."""
    if torch.compiler.is_compiling() or x.dtype not in HALF_DTYPES or not has_kernels(x.device):
        return None
    if position_embeddings is None:
        return None
    try:
        operands = operands_of(layer)
    except KeyError:  # a function is a child; a parametrization, DataParallel or FSDP has a weight
        return None
    if operands is None:
        return None
    kernels = _decoder_layer()
    plan = kernels.plan_for_call(x, position_embeddings, *operands)
    if plan is None:
        return None
    cos, sin = position_embeddings
    [w_q, w_k, w_v, w_o, w_gate, w_up, w_down, w_norm, w_norm_2, *head_norms], biases, *_ = operands
    n_q, n_k = head_norms or (None, None)
    q, k, v, x = kernels.apply_attention_input(
        plan, x, w_norm, w_q, w_k, w_v, *biases, n_q, n_k, cos, sin
    )
    attention = layer._modules["self_attn"]
    attended, _ = attention.attend(q, k, v, attention_mask, past_key_values, kwargs)
    output: Tensor = kernels.apply_layer_output(
        plan, attended, x, w_o, w_norm_2, w_gate, w_up, w_down, torch.is_grad_enabled()
    )
    return output


@cache
def _decoder_layer() -> Any:
    """Imported late, for Triton need not be there."""
    from fusedlib.patch import decoder_layer

    return decoder_layer


def _adds_residual(norm: Any) -> bool:
    """Whether the norm is still ours: others put adapters, norms or a `forward` in its place."""
    ours = isinstance(norm, FusedRMSNorm) and has_fused_forward(type(norm))
    return ours and "forward" not in vars(norm)


def _added_and_normalised(norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum; hooks see what the unpatched norm gets and gives."""
    if not has_value_hooks(norm):
        return norm(x, residual)
    stream = residual + x
    return norm(stream), stream


class FusedLayer(Fused):
    """Hugging Face's layer, where attention's output is added inside the norm that follows."""

    @takes_cache
    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """The residual stream behind this layer."""
        kwargs |= {"position_ids": position_ids, "use_cache": use_cache}
        whole = run_layer(
            self, hidden_states, attention_mask, past_key_values, position_embeddings, kwargs
        )
        if whole is not None:
            return whole
        kwargs |= {
            "attention_mask": attention_mask, CACHE: past_key_values,
            "position_embeddings": position_embeddings,
        }  # fmt: skip
        if not _adds_residual(self.post_attention_layernorm):
            return super().forward(hidden_states, **kwargs)
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        attended = self._dropped(attended, "attn")
        normed, residual = _added_and_normalised(
            self.post_attention_layernorm, attended, hidden_states
        )
        return residual + self._dropped(self.mlp(normed), "mlp")

    def _dropped(self, x: Tensor, source: str) -> Tensor:
        """The result of attention or the MLP after dropout, of which Llama has none."""
        return x


class FusedPhi3Layer(FusedLayer):
    """Phi-3's layer, which drops out before both additions."""

    def _dropped(self, x: Tensor, source: str) -> Tensor:
        return getattr(self, f"resid_{source}_dropout")(x)


class FusedLitGPTLayer(Fused):
    """litgpt's block, where attention's output is added inside the norm that follows."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None,
        input_pos: Tensor | None = None, input_pos_maxp1: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The residual stream behind this block."""
        if not _adds_residual(self.norm_2):
            return super().forward(x, cos, sin, mask, input_pos, input_pos_maxp1)
        attended = self.attn(self.norm_1(x), cos, sin, mask, input_pos, input_pos_maxp1)
        attended = self.post_attention_norm(attended)
        normed, residual = _added_and_normalised(self.norm_2, attended, x)
        return self.post_mlp_norm(self.mlp(normed)) + residual
