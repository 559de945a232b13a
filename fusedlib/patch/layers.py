"""Decoder layers that `apply_to` has fused, and the modules that they consist of.

A layer in half precision is computed as a whole, by `fusedlib.patch.decoder_layer`, where its
modules are what they were when `apply_to` fused them. Hooks, adapters, a replaced `forward`,
torch.compile, autocast and transforms of torch.func send it the other way, module by module. With
few tokens the host decides how long a step takes, so `LayerModules` reads a layer's modules once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from itertools import repeat
from operator import contains, is_not, itemgetter
from typing import Any

import torch
from torch import Tensor

from fusedlib import compat
from fusedlib.launch import has_kernels
from fusedlib.ops.arguments import HALF_DTYPES
from fusedlib.ops.fused_class import LINEAR_FORWARDS, Fused, fusion_state, has_value_hooks
from fusedlib.patch.cache_argument import CACHE, takes_cache
from fusedlib.patch.modules import FusedAttention, FusedMLP, FusedRMSNorm, has_fused_forward

WEIGHT, BIAS, EPS = map(itemgetter, ("weight", "bias", "variance_epsilon"))


class LayerModules:
    """The modules that a layer consists of, each read once.

    Attributes:
        are_supported: `fusedlib.patch.decoder_layer` computes what these modules do.
        attention: the attention, where they are supported.
        activation: of the MLP, likewise.
    """

    def __init__(self, layer: Any) -> None:
        # Which holds this: a cycle would keep a dropped model.
        self._layer: Callable[[], Any] = weakref.ref(layer)
        self._owners = [*map(vars, layer.children())]
        self._children = self._read(layer)
        self._types = [*map(type, self._children)]
        self._fusions = [*map(fusion_state, (layer, *layer.children()))]
        self._with_settings: tuple[dict[str, Any], ...] = ({}, {})
        self.are_supported = False
        self._find(layer)
        self._settings = self._read_settings()

    def _read(self, layer: Any) -> list[Any]:
        owners = (layer.__dict__, *self._owners)
        return [child for owner in owners for child in owner["_modules"].values()]

    def _read_settings(self) -> tuple[Any, ...]:
        """Attributes that decide what attention and the activation compute, and may change."""
        attention, activation = self._with_settings
        return attention.get("use_rope"), activation.get("approximate")

    def _find(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        # A function may stand there, torch's own without attributes.
        set_by_users = attention, getattr(mlp, "act_fn", None)
        self._with_settings = tuple(getattr(holder, "__dict__", {}) for holder in set_by_users)
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        if not (isinstance(attention, FusedAttention) and isinstance(mlp, FusedMLP)):
            return
        head_norms = [attention.q_norm, attention.k_norm] if attention._norms else []
        linears = [
            owner._modules.get(f"{name}_proj")
            for owner, names in ((attention, "qkvo"), (mlp, ("gate", "up", "down")))
            for name in names
        ]
        if (
            any(getattr(n, "_fused", None) is not FusedRMSNorm for n in norms + head_norms)
            or not all(map(has_fused_forward, (attention, mlp, *norms, *head_norms)))
            or type(layer)._dropped is not FusedLayer._dropped
            or any(getattr(type(m), "forward", None) not in LINEAR_FORWARDS for m in linears)
            or mlp.activation is None
            or type(attention)._projected is not FusedAttention._projected
            or not attention._rotates()
            or not {"attention", "rope"} <= attention._fusion.switches
        ):
            return
        self.activation = mlp.activation
        self.attention, self._norms = attention, [vars(n) for n in norms + head_norms]
        self._modules = [vars(m) for m in self._children if m is not None]
        owners: list[Any] = [norms[0], *linears[:4], norms[1], *linears[4:], *head_norms]
        self._parameters = [vars(m)["_parameters"] for m in owners]
        self._may_have_bias, self._without_bias = (
            [vars(m)["_parameters"] for m in some] for some in (linears[:3], linears[3:])
        )
        self.are_supported = True

    def are_current(self, layer: Any) -> bool:
        """Whether the layer still consists of these modules."""
        return (
            self._layer() is layer
            and self._read(layer) == self._children
            and self._read_settings() == self._settings
            and [*map(type, self._children)] == self._types
            and [*map(fusion_state, (layer, *layer._modules.values()))] == self._fusions
        )

    def are_plain(self) -> bool:
        """Whether calls of all modules would compute what their classes do and nothing else.

        Raises:
            KeyError: a bias is no parameter of its module.
        """
        modules = self._modules
        return not (
            any(map(any, map(compat.own_hooks, modules)))
            or any(map(contains, modules, repeat("forward")))
            or any(map(contains, modules, repeat(compat.COMPILED_CALL)))
            or any(map(is_not, map(BIAS, self._without_bias), repeat(None)))
            or compat.has_global_hooks()
        )

    def weights(self) -> tuple[list[Any], list[Any]]:
        """The weights of norm, q, k, v, o, norm, gate, up, down, and of the norms of q and k where
        heads have them; and the biases of q, k and v, each or None.

        Raises:
            KeyError: one is no parameter of its module.
        """
        return [*map(WEIGHT, self._parameters)], [*map(BIAS, self._may_have_bias)]

    def epsilons(self) -> list[float]:
        """What both norms, and those of q and k, add to a mean of squares."""
        return [*map(EPS, self._norms)]


def run_layer(
    layer: Any, x: Tensor, attention_mask: Tensor | None, past_key_values: Any,
    position_embeddings: tuple[Tensor, Tensor] | None, kwargs: dict[str, Any],
) -> Tensor | None:  # fmt: skip
    """The stream behind the layer, or None where it goes module by module."""
    modules = layer.__dict__.get("_layer_modules")
    if modules is None or not modules.are_current(layer):
        modules = layer.__dict__["_layer_modules"] = LayerModules(layer)
    if not modules.are_supported or position_embeddings is None:
        return None
    try:
        if not modules.are_plain():
            return None
        weights, biases = modules.weights()
    except KeyError:  # a parametrization, DataParallel or FSDP computes it
        return None
    kernels, attention = _decoder_layer(), modules.attention
    plan = kernels.plan_for_call(
        x, position_embeddings, weights, biases, modules.epsilons(), attention.head_dim,
        modules.activation,
    )  # fmt: skip
    if plan is None:
        return None
    cos, sin = position_embeddings
    w_norm, w_q, w_k, w_v, w_o, w_norm_2, w_gate, w_up, w_down, *head_norms = weights
    n_q, n_k = head_norms or (None, None)
    q, k, v, x = kernels.apply_attention_input(
        plan, x, w_norm, w_q, w_k, w_v, *biases, n_q, n_k, cos, sin
    )
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


def _may_run_as_a_whole(x: Tensor) -> bool:
    """Whether a layer on such an x may be computed as a whole."""
    return x.dtype in HALF_DTYPES and not torch.compiler.is_compiling() and has_kernels(x.device)


def _adds_residual(norm: Any) -> bool:
    """Whether the norm is still ours: others put adapters, norms or a `forward` in its place."""
    ours = isinstance(norm, FusedRMSNorm) and has_fused_forward(norm)
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
        if _may_run_as_a_whole(hidden_states):
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

    def __getstate__(self) -> dict[str, Any]:
        """The layer's state for pickle and copies, without what was read of its modules."""
        state: dict[str, Any] = super().__getstate__()
        state.pop("_layer_modules", None)
        return state


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
