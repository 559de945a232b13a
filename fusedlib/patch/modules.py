"""What `apply_to` makes of a model's modules: classes whose `forward` is fused. How a module is
recognized stands in `families.py`.

Where a call asks for what is not fused, or someone has put something else in a child's place, the
module's old `forward` runs.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from functools import partial as bind
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from fusedlib.ops.fused_class import (
    BRING_TO_READERS,
    LINEAR_FORWARDS,
    Fused,
    has_global_hooks,
    has_hooks,
    has_value_hooks,
    plain_weights,
)
from fusedlib.ops.loss.function import linear_cross_entropy
from fusedlib.ops.matmul import function as linear_function
from fusedlib.ops.mlp.activation import activation_of
from fusedlib.ops.mlp.function import gated_mlp
from fusedlib.ops.norm.function import rms_norm
from fusedlib.ops.qkv.function import projections
from fusedlib.ops.recomputed import recompute_in_backward
from fusedlib.ops.rope.function import rope
from fusedlib.patch.cache_argument import CACHE, takes_cache, update


class FusedRMSNorm(Fused):
    """RMSNorm that also adds the residual stream: `norm(x, residual)` gives the sum as well."""

    _eps, _cast = "variance_epsilon", "hf"

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        """weight ⊙ s / √(mean(s²) + eps) of s = x, or of s = x + residual and s."""
        x = hidden_states
        if residual is not None and residual.dtype != x.dtype:  # added as torch adds
            wide = torch.promote_types(x.dtype, residual.dtype)
            x, residual = x.to(wide), residual.to(wide)
        weight = self._weight()
        return rms_norm(x, weight, getattr(self, self._eps), residual=residual, cast=self._cast)

    def _weight(self) -> Tensor | None:
        weight: Tensor = self.weight
        return weight


class FusedBareNorm(FusedRMSNorm):
    """RMSNorm without a weight, as Llama 4's of q and k and nanochat's."""

    _eps = "eps"

    def _weight(self) -> Tensor | None:
        return None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """weight ⊙ s / √(mean(s²) + eps): the same under the argument's name of these classes."""
        return super().forward(x, residual)


class FusedWideNorm(FusedRMSNorm):
    """Multiplies by the weight in fp32, as OLMo 2's."""

    _cast = "litgpt"


class FusedLitGPTNorm(FusedWideNorm):
    """litgpt's RMSNorm, which multiplies by the weight in fp32."""

    _eps = "eps"

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """weight ⊙ s / √(mean(s²) + eps): the same under litgpt's name of the argument."""
        return super().forward(x, residual)


class FusedCenteredNorm(FusedLitGPTNorm):
    """Gemma's multiplies by 1 + weight."""

    def _weight(self) -> Tensor:
        return 1.0 + self.weight.float()


class FusedMLP(Fused):
    """The whole MLP as one operation, by the weights of its projections."""

    # Names of the projections of gate and up, or of both in one, and of down; of the activation.
    _gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    _down, _activation = "down_proj", "act_fn"

    def forward(self, x: Tensor) -> Tensor:
        """(act(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ."""
        activation, weights = self.activation, self.weights()
        if activation is None or weights is None:
            return super().forward(x)
        return recompute_in_backward(x, gated_mlp(activation, "gate_up", x, *weights))

    @property
    def activation(self) -> str | None:
        """The activation's name in ACTIVATIONS; None where a call of it may be something else."""
        module = self._modules.get(self._activation)  # a function may stand there now
        if module is None or "forward" in module.__dict__ or has_hooks(module, BRING_TO_READERS):
            return None
        return activation_of(module)

    def weights(self) -> tuple[Any, Tensor] | None:
        """The weights of gate and up, a pair or one above the other, and that of down.

        None where a call of the projections is more than what they compute.
        """
        children: Any = self._modules
        down, gate_up = children.get(self._down), [children.get(name) for name in self._gate_up]
        weights = plain_weights(*gate_up, down, biased=False)  # as adapters may make them
        if weights is None:
            return None
        *gate_and_up, w_down = weights
        return (gate_and_up[0] if len(gate_and_up) == 1 else tuple(gate_and_up)), w_down


class FusedPhi3MLP(FusedMLP):
    """gate and up are one product already."""

    _gate_up: tuple[str, ...] = ("gate_up_proj",)
    _activation = "activation_fn"

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(act(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ: the same under Phi-3's name of the argument."""
        return super().forward(hidden_states)


class FusedLitGPTMLP(FusedMLP):
    """litgpt's, which calls torch's silu."""

    _gate_up: tuple[str, ...] = ("fc_1", "fc_2")
    _down, _activation = "proj", ""
    activation = "silu"


# A mask of this shape, which hides nothing, says that attention is causal and no more.
CAUSAL = (0, 0, 0, 0)
HEAD_MULTIPLE = 8  # attention's kernels in 16 bits take multiples of it


class FusedAttention(Fused):
    """Llama's attention with q, k and v as one operation, and q and k turned in one launch."""

    _norms = False  # of q and k

    @takes_cache
    def forward(
        self, hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None, past_key_values: Any = None, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attention's output (batch, tokens, hidden), and its weights where they are computed."""
        source = sys.modules[self._base.__module__]
        heads = *hidden_states.shape[:-1], -1, self.head_dim
        q, k, v = (x.view(heads) for x in self._projected(hidden_states))
        if self._norms:
            q, k = self.q_norm(q), self.k_norm(k)
        turn = source.apply_rotary_pos_emb
        if "rope" in self._fusion.switches:
            width = self._padded_width(v) if past_key_values is None else None
            turn = bind(rope, width=width)
            v = v if width is None else pad(v, (0, width - self.head_dim))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self._rotates():
            assert position_embeddings is not None
            q, k = turn(q, k, *position_embeddings)
        attended, weights = self.attend(q, k, v, attention_mask, past_key_values, kwargs)
        return self.o_proj(attended), weights

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, past_key_values: Any,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """What the model's attention function gives.

        Args:
            q: (batch, heads, tokens, head_dim), as k and v with as many heads as these have.
            k: rotated, as q.
            v: of head_dim or wider, as the others.
            attention_mask: what attention takes for one.
            past_key_values: a cache, or None.
            kwargs: what the model hands on to attention.

        Returns:
            (batch, tokens, heads · head_dim), and attention's weights where they are computed.
        """
        if attention_mask is not None and attention_mask.shape == CAUSAL:
            attention_mask = None
        if past_key_values is not None:
            k, v = update(past_key_values, k, v, self.layer_idx, kwargs)
        source = sys.modules[self._base.__module__]
        function = source.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, source.eager_attention_forward
        )
        attended, weights = function(
            self, q, k, v, attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling, **self._windowed(), **kwargs,
        )  # fmt: skip
        if q.shape[-1] > self.head_dim:  # heads that were padded here; own functions join them
            attended = attended[..., : self.head_dim]
        attended = attended.reshape(q.shape[0], q.shape[2], -1)
        return attended.contiguous(), weights

    def _padded_width(self, x: Tensor) -> int | None:
        """The width to which heads are padded that torch would pad for its kernels; else None."""
        head_dim: int = self.head_dim
        padded = (
            head_dim % HEAD_MULTIPLE and x.is_cuda and x.element_size() == 2 and self._rotates()
            and self.config._attn_implementation == "sdpa" and not torch.compiler.is_compiling()
            and not has_global_hooks()  # who counts operations expects heads of one width
        )  # fmt: skip
        return -(-head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE if padded else None

    def _windowed(self) -> dict[str, Any]:
        """What attention is told of how many tokens back it looks; Llama's is told nothing."""
        return {}

    def sees_all(self, tokens: int) -> bool:
        """Whether no window of attention is shorter than the tokens."""
        window = self._windowed().get("sliding_window")
        return window is None or tokens <= window

    def _rotates(self) -> bool:
        """Whether positions turn q and k."""
        return True

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        children, switches = self.projected(), self._fusion.switches
        weights = None
        if "attention" in switches and all(type(child) is nn.Linear for child in children):
            weights = plain_weights(*children)
        if weights is None:
            return tuple(child(x) for child in children)
        biases = [child.bias for child in children]
        return projections(x, weights, biases, split="linear" in switches)

    def projected(self) -> list[Any]:
        """The layers of q, k and v."""
        children = self._modules
        # A function may stand there, which is no module.
        return [children.get(n) or getattr(self, n) for n in ("q_proj", "k_proj", "v_proj")]


class FusedMistralAttention(FusedAttention):
    """Mistral's attention, whose window stands in the configuration."""

    def _windowed(self) -> dict[str, Any]:
        return {"sliding_window": getattr(self.config, "sliding_window", None)}


class FusedQwen2Attention(FusedAttention):
    """Qwen2's attention, whose window is an attribute."""

    def _windowed(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window}


class FusedQwen3Attention(FusedQwen2Attention):
    """Qwen3's attention, which normalises each head of q and k."""

    _norms = True


class FusedGemma2Attention(FusedQwen2Attention):
    """Tells attention a softcap besides."""

    def _windowed(self) -> dict[str, Any]:
        return super()._windowed() | {"softcap": self.attn_logit_softcapping}


class FusedSmolLM3Attention(FusedQwen2Attention):
    """Some layers know no positions."""

    def _rotates(self) -> bool:
        return self.use_rope


class FusedOlmo2Attention(FusedAttention):
    """OLMo 2's attention, which normalises q and k as a whole."""

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super()._projected(x)
        return self.q_norm(q), self.k_norm(k), v


class FusedOlmo3Attention(FusedOlmo2Attention, FusedQwen2Attention):
    """OLMo 3's attention, which has a window besides OLMo 2's norms."""


class FusedPhi3Attention(FusedMistralAttention):
    """q, k and v are one product already."""

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        qkv, size = self.qkv_proj(x), self.head_dim
        keys = self.num_key_value_heads * size
        return qkv.split([self.config.num_attention_heads * size, keys, keys], dim=-1)


class FusedLitGPTAttention(Fused):
    """litgpt's attention, whose q, k and v are one product already."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None,
        input_pos: Tensor | None = None, input_pos_maxp1: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention's output (batch, tokens, hidden)."""
        config, (batch, tokens, _) = self.config, x.shape
        heads, groups = config.n_head, config.n_query_groups
        packed = self.qkv(x).view(batch, tokens, -1, config.head_size).transpose(1, 2)
        q, k, v = packed.split([heads, groups, groups], dim=1)
        if self.norm_q is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        q, k = rope(q, k, cos, sin)
        if input_pos is not None:
            if self.kv_cache is None:
                raise TypeError("You need to call `gpt.set_kv_cache()`")
            k, v = self.kv_cache(input_pos, k, v)
            k, v = k[..., :input_pos_maxp1, :], v[..., :input_pos_maxp1, :]
        if groups != heads and (input_pos is None or groups != 1):
            k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        attended = self.scaled_dot_product_attention(q, k, v, mask)
        return self.proj(attended.reshape(batch, tokens, -1))


def has_fused_forward(cls: Any) -> bool:
    """Whether a class's forward is ours: others may derive a class of their own."""
    fused = getattr(cls, "_fused", None)
    return fused is not None and cls.forward is fused.forward


class FusedLinear(Fused):
    """A `torch.nn.Linear` by `fusedlib.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """x Wᵀ + b."""
        return linear_function.linear(input, self.weight, self.bias)


LINEAR_FORWARDS.add(FusedLinear.forward)


class FusedHead(Fused):
    """A linear layer that gives its cross entropy, where it gets targets, instead of logits.

    As a call of the module, for FSDP, ZeRO-3 and offloading bring its weight by hooks.
    """

    def forward(self, input: Tensor, target: Tensor | None = None, **settings: Any) -> Tensor:
        """Logits; or the loss with the settings of `fusedlib.linear_cross_entropy`."""
        if target is None:
            product = linear_function.linear if "linear" in self._fusion.switches else linear
            return product(input, self.weight, self.bias)
        return linear_cross_entropy(input, self.weight, target, bias=self.bias, **settings)


class FusedCausalLM(Fused):
    """A model with a head: in training with labels, or with `skip_logits=True`, the loss alone."""

    @takes_cache
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: Any = None,
        inputs_embeds: Tensor | None = None, labels: Tensor | None = None,
        use_cache: bool | None = None, logits_to_keep: int | Tensor = 0, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """transformers' output; where the loss is fused its logits are None.

        That is in training with labels, but not where a tuple is asked for, whose places others
        count, and with `skip_logits=True`. With `skip_logits=False` there always are logits.
        """
        given = {
            "input_ids": input_ids, "attention_mask": attention_mask,
            "position_ids": position_ids, CACHE: past_key_values,
            "inputs_embeds": inputs_embeds, "use_cache": use_cache,
        }  # fmt: skip
        if self._needs_no_mask(given):
            given["attention_mask"] = self.lm_head.weight.new_empty(CAUSAL)
        return_dict = kwargs.get("return_dict")
        as_dict = self.config.return_dict if return_dict is None else return_dict
        skip_logits = kwargs.pop("skip_logits", None)
        fuses = self.training and as_dict if skip_logits is None else skip_logits
        if not (fuses and self._fuses(labels, logits_to_keep)):
            return super().forward(**given, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
        kwargs.pop("return_dict", None)
        outputs = self.model(**given, **kwargs)
        hidden = outputs.last_hidden_state
        loss = _causal_loss(self.lm_head, hidden, labels, self._softcap(), **kwargs)
        output = self._output(outputs, loss, attention_mask, **kwargs)
        return output if as_dict else output.to_tuple()

    def _output(self, outputs: Any, loss: Tensor, attention_mask: Any, **_: Any) -> Any:
        """What the model returns of what its decoder returned."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return CausalLMOutputWithPast(
            loss=loss, hidden_states=outputs.hidden_states, attentions=outputs.attentions,
            **{CACHE: getattr(outputs, CACHE)},
        )  # fmt: skip

    def _softcap(self) -> float | None:
        """What bounds the logits."""
        return None

    def _fuses(self, labels: Tensor | None, logits_to_keep: int | Tensor) -> bool:
        """Whether the loss of a call is the usual one, over all of its tokens."""
        # Others put a head, hooks or a loss here: PEFT, resized embeddings, `loss_function = `.
        head, own_loss = self.lm_head, sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss
        if labels is not None and type(head) is nn.Linear:
            self._tell_of_another_head(head)
        return (
            labels is not None and isinstance(logits_to_keep, int) and logits_to_keep == 0
            and isinstance(head, FusedHead) and has_fused_forward(type(head))
            and ("forward" not in vars(head) or "_hf_hook" in vars(head))  # accelerate's calls ours
            and not has_value_hooks(head)
            and self.loss_function is own_loss
        )  # fmt: skip

    def _tell_of_another_head(self, head: nn.Linear) -> None:
        """Warn where a plain head stands in the place of the one that was fused; once, for the
        model's loss is then not among what is fused.
        """
        switches = self._fusion.switches
        if torch.compiler.is_compiling() or "loss" not in switches or plain_weights(head) is None:
            return
        self._fusion = replace(self._fusion, switches=switches - {"loss"})
        warnings.warn(
            f"lm_head of {type(self).__name__} was exchanged since apply_to, as by "
            "resize_token_embeddings: its loss is computed from stored logits; call "
            "fusedlib.apply_to(model) again to fuse it",
            stacklevel=2,
        )

    def _needs_no_mask(self, given: dict[str, Any]) -> bool:
        """Whether a call whose attention is causal and no more is compiled or captured in a graph.

        transformers then makes a mask all the same, with which attention takes three times as long.
        """
        compiling = torch.compiler.is_compiling()  # which cannot trace the question about graphs
        if not compiling and not (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        ):
            return False
        if not self._fusion.causal or has_hooks(self.model) or "forward" in vars(self.model):
            return False
        masked = "attention_mask", "position_ids", CACHE
        tokens = given["inputs_embeds"] if given["input_ids"] is None else given["input_ids"]
        attentions = [layer.self_attn for layer in self.model.layers]
        return (
            tokens is not None
            and all(given[name] is None for name in masked)
            and self.config._attn_implementation == "sdpa"
            and all(isinstance(a, FusedAttention) for a in attentions)
            and all(a.sees_all(tokens.shape[1]) for a in attentions)
        )


class FusedSoftcappedCausalLM(FusedCausalLM):
    """A model with a head whose logits are bounded, as Gemma 2's."""

    def _softcap(self) -> float | None:
        softcap: float | None = self.config.final_logit_softcapping
        return softcap


class FusedRoutedCausalLM(FusedCausalLM):
    """A model with experts whose balance is no part of the loss, as DeepSeek's.

    Newer ones give what their routers compute.
    """

    def _output(self, outputs: Any, loss: Tensor, attention_mask: Any, **options: Any) -> Any:
        if not hasattr(outputs, "router_logits"):
            return super()._output(outputs, loss, attention_mask, **options)
        return _moe_output(outputs, loss, None)


class FusedMoeCausalLM(FusedCausalLM):
    """A model with experts, whose balance is part of the loss where it is asked for."""

    @takes_cache
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: Any = None,
        inputs_embeds: Tensor | None = None, labels: Tensor | None = None,
        use_cache: bool | None = None, output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """transformers' output, with the experts' logits and balance where they are asked for."""
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        return super().forward(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, labels,
            use_cache, logits_to_keep, output_router_logits=output_router_logits, **kwargs,
        )  # fmt: skip

    def _output(
        self, outputs: Any, loss: Tensor, attention_mask: Any, output_router_logits: bool = False,
        **_: Any,
    ) -> Any:  # fmt: skip
        balance = None
        if output_router_logits:
            balance = sys.modules[self._base.__module__].load_balancing_loss_func(
                outputs.router_logits, self.num_experts, self.num_experts_per_tok,
                attention_mask,
            )  # fmt: skip
            loss = loss + self.router_aux_loss_coef * balance.to(loss.device)
        return _moe_output(outputs, loss, balance)


def _moe_output(outputs: Any, loss: Tensor, balance: Tensor | None) -> Any:
    """What a model with experts returns of what its decoder returned."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    return MoeCausalLMOutputWithPast(
        loss=loss, aux_loss=balance, hidden_states=outputs.hidden_states,
        attentions=outputs.attentions, router_logits=outputs.router_logits,
        **{CACHE: getattr(outputs, CACHE)},
    )  # fmt: skip


def _causal_loss(
    head: nn.Module, hidden: Tensor, labels: Tensor | None, softcap: float | None,
    num_items_in_batch: Tensor | int | None = None, ignore_index: int = -100,
    shift_labels: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """The loss of transformers' ForCausalLMLoss: token i is to predict label i + 1."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(hidden.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss: Tensor = head(
        hidden.reshape(-1, hidden.shape[-1]), target, ignore_index=ignore_index,
        reduction=reduction, softcap=softcap,
    )  # fmt: skip
    loss = loss.float()  # theirs is fp32 of a model in float64 too
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch
