"""`apply_to`: the library's operations in a whole model, put into each module of it by itself.

No class is patched: a module that is replaced stays the object that it was, with the parameters,
hooks and attributes that it had, and gets a class of its own whose `forward` is fused
(`fusedlib.packed.Fused`). Where a call asks for what is not fused, its old `forward` runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from functools import partial as bind
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fusedlib import projection
from fusedlib.functional import swiglu_mlp
from fusedlib.kernels.route import LEAST_CAPABILITY, has_kernels
from fusedlib.loss import linear_cross_entropy
from fusedlib.modules import Linear
from fusedlib.norms import rms_norm
from fusedlib.packed import (
    Fused,
    Hookable,
    Packed,
    PackedLinear,
    base_of,
    changeable,
    fuse,
    hooked,
    loosen,
    pack,
    packable,
)
from fusedlib.recomputed import compute_again, forget
from fusedlib.rotary import rope

# --- what modules become -------------------------------------------------------------------------


class FusedRMSNorm(Hookable, Fused):
    """Also adds the residual stream: `norm(x, residual)` gives what is normalised as well."""

    _eps, _cast = "variance_epsilon", "hf"

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """weight ⊙ s / √(mean(s²) + eps) of s = x, or of s = x + residual and s."""
        eps = getattr(self, self._eps)
        weight: Any = self.weight
        found = rms_norm(x, weight, eps, residual=residual, cast=self._cast)
        y, s = (found, x) if isinstance(found, Tensor) else found
        compute_again(y, bind(rms_norm, eps=eps, cast=self._cast), s, weight)
        return found


class FusedLitGPTNorm(FusedRMSNorm):
    """litgpt multiplies by the weight in fp32."""

    _eps, _cast = "eps", "litgpt"


class FusedMLP(Packed):
    """gate and up as one product, and the whole MLP as one operation."""

    w_gate_up: Tensor
    w_down: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """(silu(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ."""
        if not self.is_packed():
            y: Tensor = super().forward(x)
            return y
        return forget(x, swiglu_mlp(x, self.w_gate_up, self.w_down))


# A mask of this shape, which hides nothing, says that attention is causal and no more.
CAUSAL = (0, 0, 0, 0)


class FusedAttention(Packed):
    """Hugging Face's attention with q, k and v as one product, and q and k turned in one launch."""

    _parts: frozenset[str]

    def forward(
        self, hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None, past_key_values: Any = None, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attention's output (batch, tokens, hidden), and its weights where they are computed."""
        module: Any = self
        source = sys.modules[self._base.__module__]
        heads = *hidden_states.shape[:-1], -1, module.head_dim
        q, k, v = (x.view(heads) for x in self._projected(hidden_states))
        if hasattr(self, "q_norm"):
            q, k = module.q_norm(q), module.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        turn = rope if "rope" in self._parts else source.apply_rotary_pos_emb
        assert position_embeddings is not None
        q, k = turn(q, k, *position_embeddings)
        if attention_mask is not None and attention_mask.shape == CAUSAL:
            attention_mask = None
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, module.layer_idx)
        attend = source.ALL_ATTENTION_FUNCTIONS.get_interface(
            module.config._attn_implementation, source.eager_attention_forward
        )
        attended, weights = attend(
            self, q, k, v, attention_mask,
            dropout=module.attention_dropout if self.training else 0.0,
            scaling=module.scaling, sliding_window=self._window(), **kwargs,
        )  # fmt: skip
        attended = attended.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return module.o_proj(attended), weights

    def _window(self) -> int | None:
        """Qwen's; Llama has none."""
        return getattr(self, "sliding_window", None)

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        module: Any = self
        children = module.q_proj, module.k_proj, module.v_proj
        if not self.is_packed():
            return tuple(child(x) for child in children)
        packed = forget(x, self._linear(x, module.w_qkv, getattr(self, "bias_qkv", None)))
        q, k, v = packed.split([child.out_features for child in children], dim=-1)
        # q and k are turned into tensors of their own; v alone would keep all three in memory.
        return q, k, v.clone() if v.requires_grad else v


class FusedMistralAttention(FusedAttention):
    """Its window stands in the configuration."""

    def _window(self) -> int | None:
        return getattr(self.config, "sliding_window", None)


class FusedLitGPTAttention(Fused):
    """litgpt's attention, whose q, k and v are one product already."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None,
        input_pos: Tensor | None = None, input_pos_maxp1: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention's output (batch, tokens, hidden)."""
        module: Any = self
        config, (batch, tokens, _) = module.config, x.shape
        heads, groups = config.n_head, config.n_query_groups
        packed = module.qkv(x).view(batch, tokens, -1, config.head_size).transpose(1, 2)
        q, k, v = packed.split([heads, groups, groups], dim=1)
        if module.norm_q is not None:
            q, k = module.norm_q(q), module.norm_k(k)
        q, k = rope(q, k, cos, sin)
        if input_pos is not None:
            if module.kv_cache is None:
                raise TypeError("You need to call `gpt.set_kv_cache()`")
            k, v = module.kv_cache(input_pos, k, v)
            k, v = k[..., :input_pos_maxp1, :], v[..., :input_pos_maxp1, :]
        if groups != heads and (input_pos is None or groups != 1):
            k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        attended = module.scaled_dot_product_attention(q, k, v, mask)
        y: Tensor = module.proj(attended.reshape(batch, tokens, -1))
        return y


def _apart(norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """As the norm's own call, but what hooks see is the sum that goes in and what is normalised."""
    if not hooked(norm):
        both: tuple[Tensor, Tensor] = norm(x, residual)
        return both
    stream = residual + x
    return norm(stream), stream


class FusedLayer(Fused):
    """Hugging Face's layer, where attention's output is added inside the norm that follows."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """The residual stream behind this layer."""
        module: Any = self
        attended, _ = module.self_attn(
            hidden_states=module.input_layernorm(hidden_states), attention_mask=attention_mask,
            position_ids=position_ids, past_key_values=past_key_values, use_cache=use_cache,
            position_embeddings=position_embeddings, **kwargs,
        )  # fmt: skip
        norm = module.post_attention_layernorm
        call = bind(_apart, norm) if norm._noted else norm
        normed, residual = call(attended, hidden_states)
        stream: Tensor = residual + module.mlp(normed)
        return stream


class FusedLitGPTLayer(Fused):
    """litgpt's block likewise."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None,
        input_pos: Tensor | None = None, input_pos_maxp1: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The residual stream behind this block."""
        module: Any = self
        attended = module.attn(module.norm_1(x), cos, sin, mask, input_pos, input_pos_maxp1)
        norm = module.norm_2
        call = bind(_apart, norm) if norm._noted else norm
        normed, residual = call(module.post_attention_norm(attended), x)
        stream: Tensor = module.post_mlp_norm(module.mlp(normed)) + residual
        return stream


class FusedLinear(Fused):
    """A `torch.nn.Linear` by `fusedlib.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """x Wᵀ + b."""
        module: Any = self
        return projection.linear(input, module.weight, module.bias)


class FusedHead(Hookable, Fused):
    """A linear layer that gives its cross entropy, where it gets targets, instead of logits.

    As a call of the module, for FSDP, ZeRO-3 and offloading bring its weight by hooks.
    """

    def forward(self, input: Tensor, target: Tensor | None = None, **settings: Any) -> Tensor:
        """Logits; or the loss with the settings of `fusedlib.linear_cross_entropy`."""
        module: Any = self
        if target is None:
            return self._linear(input, module.weight, module.bias)
        return linear_cross_entropy(input, module.weight, target, bias=module.bias, **settings)


class FusedCausalLM(Fused):
    """In training with labels the loss without logits; else, as in evaluation, both as ever."""

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: Any = None,
        inputs_embeds: Tensor | None = None, labels: Tensor | None = None,
        use_cache: bool | None = None, logits_to_keep: int | Tensor = 0, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """transformers' output; where the loss is fused its logits are None."""
        module: Any = self
        given = {
            "input_ids": input_ids, "attention_mask": attention_mask,
            "position_ids": position_ids, "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds, "use_cache": use_cache,
        }  # fmt: skip
        if self._needs_no_mask(given):
            given["attention_mask"] = module.lm_head.weight.new_empty(CAUSAL)
        all_logits = isinstance(logits_to_keep, int) and logits_to_keep == 0
        fused = labels is not None and self.training and all_logits
        # Others put a head, hooks or a loss here: PEFT, resized embeddings, `loss_function = `.
        head = module.lm_head
        fused = fused and isinstance(head, FusedHead) and not (head._noted and hooked(head))
        theirs = sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss
        if not fused or module.loss_function is not theirs:
            return super().forward(**given, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return_dict = kwargs.pop("return_dict", None)
        outputs = module.model(**given, **kwargs)
        output = CausalLMOutputWithPast(
            loss=_causal_loss(module.lm_head, outputs.last_hidden_state, labels, **kwargs),
            past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )  # fmt: skip
        as_dict = module.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def _needs_no_mask(self, given: dict[str, Any]) -> bool:
        """Whether a call whose attention is causal and no more is compiled or captured in a graph.

        transformers then makes a mask all the same, with which attention takes three times as long.
        """
        compiling = torch.compiler.is_compiling()  # which cannot trace the question about graphs
        if not compiling and not (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        ):
            return False
        module: Any = self
        masked = "attention_mask", "position_ids", "past_key_values"
        attentions = [layer.self_attn for layer in module.model.layers]
        return (
            all(given[name] is None for name in masked)
            and module.config._attn_implementation == "sdpa"
            and all(isinstance(a, FusedAttention) and a._window() is None for a in attentions)
        )


def _causal_loss(
    head: nn.Module, hidden: Tensor, labels: Tensor | None,
    num_items_in_batch: Tensor | int | None = None, ignore_index: int = -100,
    shift_labels: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """As transformers' ForCausalLMLoss: token i is to predict label i + 1."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(hidden.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss: Tensor = head(
        hidden.reshape(-1, hidden.shape[-1]), target, ignore_index=ignore_index,
        reduction=reduction,
    )  # fmt: skip
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


# What packs, and gives the loss.
LINEARS = nn.Linear, Linear
# Their forward does not call the old one, and relies on what that one takes.
REWRITTEN = FusedAttention, FusedLitGPTAttention, FusedLayer, FusedLitGPTLayer, FusedCausalLM

# --- where they lie ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What a switch replaces.

    Attributes:
        switch: the argument of `apply_to`.
        owner: name of the class that is looked for.
        fused: what it becomes.
        refuse: why this one cannot become that; None where it can.
        prepare: what is done besides.
    """

    switch: str
    owner: str
    fused: type[Fused]
    refuse: Callable[[Any], str | None] = lambda module: None
    prepare: Callable[[Any], None] = lambda module: None


@dataclass(frozen=True)
class Family:
    """The models of one architecture: a row of the table below.

    Attributes:
        package: where its classes come from.
        model: name of a class that all of them descend from.
        parts: by the last name of a module's path; "" is the model itself.
        layer: class of a layer, what it becomes, and its norm that follows attention.
    """

    package: str
    model: str
    parts: dict[str, tuple[Part, ...]]
    layer: tuple[str, type[Fused], str]


def _mlp(owner: str, gate: str, up: str, down: str) -> tuple[Part, ...]:
    def refuse(mlp: Any) -> str | None:
        activation = type(getattr(mlp, "act_fn", nn.SiLU())).__name__
        if activation not in ("SiLU", "SiLUActivation"):
            return f"its activation is {activation}, not SiLU"
        if hasattr(mlp, "act_fn") and hooked(mlp.act_fn):
            return "act_fn has hooks, which the fused MLP would not call"
        why = packable(mlp, (gate, up), LINEARS) or packable(mlp, (down,), LINEARS)
        biased = any(getattr(mlp, child).bias is not None for child in (gate, up, down) if not why)
        return why or ("its projections have biases" if biased else None)

    def prepare(mlp: Packed) -> None:
        pack(mlp, "gate_up", (gate, up))
        pack(mlp, "down", (down,))

    return (Part("mlp", owner, FusedMLP, refuse, prepare),)


def _prepare_head(model: Any) -> None:
    if isinstance(model.lm_head, FusedLinear):  # of an earlier call
        loosen(model.lm_head)
    fuse(model.lm_head, FusedHead)


def _hugging_face(name: str) -> Family:
    norm = (Part("rms_norm", f"{name}RMSNorm", FusedRMSNorm),)
    projections = "q_proj", "k_proj", "v_proj"
    fused = FusedMistralAttention if name == "Mistral" else FusedAttention
    attend = bind(Part, owner=f"{name}Attention", fused=fused)
    attention = (
        attend(
            "attention",
            refuse=lambda module: packable(module, projections, LINEARS),
            prepare=lambda module: pack(module, "qkv", projections),
        ),
        attend("rope", refuse=lambda module: _other_rotation(module, "apply_rotary_pos_emb")),
    )
    norms = "input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm"
    parts = dict.fromkeys(norms, norm) | {
        "self_attn": attention,
        "mlp": _mlp(f"{name}MLP", "gate_proj", "up_proj", "down_proj"),
        "": (
            Part(
                "loss",
                f"{name}ForCausalLM",
                FusedCausalLM,
                refuse=lambda model: changeable(model, "lm_head", LINEARS),
                prepare=_prepare_head,
            ),
        ),
    }
    layer = f"{name}DecoderLayer", FusedLayer, "post_attention_layernorm"
    return Family("transformers", f"{name}PreTrainedModel", parts, layer)


def _litgpt() -> Family:
    def unlike(attention: Any) -> str | None:
        config = attention.config
        odd = {
            "rope_interleave": config.rope_interleave,
            "norm_qk_type": config.norm_qk and config.norm_qk_type != "default",
            "sliding_window_size": attention.apply_sliding_window_attention,
        }
        names = [name for name, value in odd.items() if value]
        why = f"its {names[0]} is not Llama's" if names else None
        return why or _other_rotation(attention, "apply_rope")

    norm = (
        Part(
            "rms_norm", "RMSNorm", FusedLitGPTNorm,
            lambda m: "it adds 1 to its weight" if m.add_unit_offset else None,
        ),
    )  # fmt: skip
    norms = "norm_1", "norm_2", "ln_f", "norm_q", "norm_k"
    packed, outside = (
        lambda module: "litgpt holds q, k and v as one product already",
        lambda module: "litgpt computes it outside: use fusedlib.linear_cross_entropy there",
    )
    attention = "CausalSelfAttention", FusedLitGPTAttention
    parts = dict.fromkeys(norms, norm) | {
        "attn": (Part("rope", *attention, unlike), Part("attention", *attention, packed)),
        "mlp": _mlp("LLaMAMLP", "fc_1", "fc_2", "proj"),
        "": (Part("loss", "GPT", Fused, outside),),
    }
    return Family("litgpt", "GPT", parts, ("Block", FusedLitGPTLayer, "norm_2"))


FAMILIES = (*map(_hugging_face, ("Llama", "Mistral", "Qwen2", "Qwen3")), _litgpt())
SWITCHES = ("mlp", "rms_norm", "rope", "attention", "loss", "linear")
OFF = "switched off"


# --- the function and its report -----------------------------------------------------------------


@dataclass
class Report:
    """What `apply_to` did to a model; `print` shows it as a table.

    Attributes:
        model: name of the model's class.
        replaced: paths of modules by switch.
        already: those that an earlier call had replaced, and every `fusedlib.Linear`.
        left: by switch, pairs of a path and the reason why it is as it was.
        plain: why what was replaced runs plain PyTorch where the model lies now; None where it runs
            kernels.
    """

    model: str
    replaced: dict[str, list[str]] = field(default_factory=lambda: {s: [] for s in SWITCHES})
    already: dict[str, list[str]] = field(default_factory=lambda: {s: [] for s in SWITCHES})
    left: dict[str, list[tuple[str, str]]] = field(
        default_factory=lambda: {s: [] for s in SWITCHES}
    )
    plain: str | None = None

    def __str__(self) -> str:
        lines = [f"fusedlib in {self.model}"]
        for switch in SWITCHES:
            said = [
                f"{len(done[switch])} {word}"
                for word, done in (("replaced", self.replaced), ("replaced before", self.already))
                if done[switch]
            ]
            reasons: dict[str, list[str]] = {}
            for path, why in self.left[switch]:
                reasons.setdefault(why, []).append(path or "the model")
            for why, paths in reasons.items():
                more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
                said.append(f"not {paths[0]}{more}: {why}" if why != OFF else why)
            first, *others = said or ["nothing found"]
            lines += [f"  {switch:<10}{first}", *(f"  {'':<10}{line}" for line in others)]
        if self.replaced["mlp"] or self.replaced["attention"]:
            lines += [
                "  Packed weights are new parameters (w_gate_up, w_down, w_qkv, bias_qkv): make",
                "  optimizers, DDP and FSDP after this. state_dict has the names that it had.",
                "  Muon, Adafactor and others that treat a matrix as a whole train another model",
                "  with them: use attention=False, mlp=False there.",
            ]
        if self.plain and any(self.replaced.values()):
            lines.append(f"  All that was replaced runs plain PyTorch: {self.plain}.")
        return "\n".join(lines)


def apply_to(
    model: nn.Module, *, mlp: bool = True, rms_norm: bool = True, rope: bool = True,
    attention: bool = True, loss: bool = True, linear: bool = True,
) -> Report:  # fmt: skip
    """Put the library's operations into a model, in place; a second call finds nothing to do.

    Takes transformers' Llama, Mistral, Qwen2 (2.5 too) and Qwen3, with or without a head, and
    litgpt's GPT of the Llama kind, before an optimizer, DDP, FSDP or torch.compile see it. What it
    computes, `state_dict` and all attributes stay. Two things change: `parameters()` has packed
    weights under new names, and a `...ForCausalLM` in training mode with labels gives
    `logits=None`. PEFT's LoRA works on packed projections: where one of them is wrapped, its MLP or
    its attention's q, k, v run unfused.

    Hooks go on working, and what they watch runs unfused: one on a packed projection, on the norm
    behind attention or on `lm_head` has its MLP, its projections, the addition or the loss computed
    as before. One set on `act_fn` afterwards is not called. What someone put in the place of a
    `forward` or a function of the model's library is left and reported; what is put there
    afterwards is not seen.

    Under torch.compile transformers makes an explicit mask, with which attention takes longer. A
    Llama's, Qwen2's or Qwen3's `...ForCausalLM` without a sliding window, patched with the parts
    `attention`, `rope` and `loss` and compiled as a whole, asks for none where `attention_mask`,
    `position_ids` and a cache are left away; ones in `attention_mask` ask for one too. Of other
    models compile each layer: `for layer in model.model.layers: layer.compile()`.

    Packed weights w_gate_up, w_down, w_qkv and bias_qkv stand in `parameters()` for gate, up, down,
    q, k and v. So with them (`attention=False, mlp=False` packs nothing)

    - Muon, Adafactor and others that treat a matrix as a whole train another model; AdamW and SGD
      do not.
    - choosing by name, as `"q_proj" in name` over `named_parameters()`, finds nothing.
    - `q_proj.weight` is a view: `torch.autograd.grad` for it, `get_parameter`, PEFT's
      `target_parameters`, pruning and parametrizations raise.
    - `torch.func.functional_call` takes the names of `named_parameters()`, not of `state_dict()`.
    - an optimizer's state saved with the plain model cannot be loaded.
    - `torch.ao.quantization.quantize_dynamic` goes by a module's exact type, and leaves all linear
      layers that were replaced as they are, `linear=True` alone too.
    - accelerate's `cpu_offload` and `disk_offload` come first, and leave most modules as they are;
      afterwards they raise KeyError.

    Args:
        model: changed in place.
        mlp: gate and up as one product, and the MLP as one operation.
        rms_norm: every RMSNorm, and the residual stream added inside the one behind attention.
        rope: q and k turned in one launch.
        attention: q, k and v as one product.
        loss: the cross entropy computed from hidden states, its logits never stored as a whole.
        linear: every other projection of fp32 weights by `fusedlib.linear`: on tensor cores where
            torch's matmul precision is "highest", and as ever at others. Weights of other dtypes
            are left alone.

    Returns:
        What was replaced, and what was not and why.

    Raises:
        TypeError: what is given is no `torch.nn.Module`.
        ValueError: a model of another kind, one that is wrapped already, or one whose weights to be
            packed have several dtypes or devices. Nothing is changed then.
    """
    family = _family(model)
    wanted = dict(zip(SWITCHES, (mlp, rms_norm, rope, attention, loss, linear), strict=True))
    report = Report(type(model).__name__, plain=why_plain(model.parameters()))
    own = {module for module in model.modules() if _is_ours(module)}
    shared = _shared(model)
    todo: list[tuple[str, nn.Module, Part]] = []
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        for part in family.parts.get(name, ()):
            switch = part.switch
            if not wanted[switch]:
                report.left[switch].append((path, OFF))
            elif switch in vars(module).get("_parts", ()):
                report.already[switch].append(path)
            elif why := _refusal(module, part, family) or _sharing(module, part, shared):
                report.left[switch].append((path, why))
            else:
                todo.append((path, module, part))
    for path, module, part in todo:
        fuse(module, part.fused)
        part.prepare(module)
        module.__dict__["_parts"] = vars(module).get("_parts", frozenset()) | {part.switch}
        report.replaced[part.switch].append(path)
    _fuse_projections(model, own, wanted["linear"], report)
    owner, fused, norm = family.layer
    for module in model.modules():
        after = getattr(module, norm, None)
        adds = isinstance(after, FusedRMSNorm) and not hooked(after)
        if adds and _is(module, owner, family) and not _changed(module, fused):
            fuse(module, fused)
    return report


def why_plain(parameters: Iterable[Tensor]) -> str | None:
    """Why no kernel runs for a model with such parameters as they lie now."""
    weights = [p for p in parameters if p.is_floating_point() and not p.is_meta]
    if not weights:
        return None
    if all(p.dtype == torch.float64 for p in weights):
        return "it is in float64"
    devices = {p.device for p in weights}
    if any(map(has_kernels, devices)):
        return None
    if find_spec("triton") is None:
        return "triton is not installed"
    kinds = ", ".join(sorted({d.type for d in devices}))
    if kinds != "cuda":
        return f"it lies on {kinds}, the kernels are for NVIDIA GPUs"
    if torch.version.cuda is None:
        return "the kernels are for NVIDIA GPUs"
    least = ".".join(map(str, LEAST_CAPABILITY))
    return f"the kernels are for GPUs of compute capability {least} and higher"


def _fuse_projections(
    model: nn.Module, own: Set[nn.Module], wanted: bool, report: Report
) -> None:  # fmt: skip
    """Have `fusedlib.linear` compute the linear layers, and what others pack them into.

    `own` were `fusedlib.Linear`s: whatever is wanted they go on by it.
    """
    for path, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        owner = module._owner[0] if isinstance(module, PackedLinear) else module
        why = None if module in own else _no_projection(module) if wanted else OFF
        if why is None:
            if not isinstance(owner, Fused | Linear):
                fuse(owner, FusedLinear)
            owner.__dict__["_linear"] = projection.linear
        if isinstance(owner, FusedMLP) and owner.is_packed():
            continue  # one operation with others
        parts = vars(module).get("_parts", frozenset())
        if why is not None:
            report.left["linear"].append((path, why))
            continue
        done = report.already if "linear" in parts or module in own else report.replaced
        done["linear"].append(path)
        module.__dict__["_parts"] = parts | {"linear"}


def _is_ours(module: nn.Module) -> bool:
    """Whether it is a `fusedlib.Linear`."""
    forward = getattr(base_of(module), "forward", None)
    return forward is Linear.forward and "forward" not in vars(module)


def _no_projection(module: nn.Linear) -> str | None:
    """Why a linear layer stays as it is."""
    kind = type(module)
    own = nn.Linear.forward, PackedLinear.forward, FusedLinear.forward, FusedHead.forward
    if kind.forward not in own or "forward" in vars(module):
        return f"a {kind.__module__}.{kind.__qualname__} with a forward of its own"
    weight = module._whole("weight") if isinstance(module, PackedLinear) else module.weight
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__qualname__}"
    return None if weight.dtype == torch.float32 else f"{weight.dtype}; only fp32 is split"


def _family(model: nn.Module) -> Family:
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply_to changes a torch.nn.Module, got {type(model).__name__}")
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    for family in FAMILIES:
        if not _descends(type(model), family):
            continue
        config: Any = model.config
        if family.package == "litgpt" and not _of_llama_kind(config):
            raise ValueError(
                f"{kind} named {config.name!r} is not of the Llama kind: looked for are RMSNorm, "
                f"LLaMAMLP and no parallel_residual, found {config.norm_class_name}, "
                f"{config.mlp_class_name} and parallel_residual={config.parallel_residual}"
            )
        for name, parameter in model.named_parameters():
            for mark, splitter in (("device_mesh", "FSDP"), ("ds_id", "DeepSpeed")):
                if hasattr(parameter, mark):
                    raise ValueError(
                        f"{name} is split by {splitter} already: call apply_to on the whole model, "
                        f"before {splitter}"
                    )
        return family
    message = (
        f"{kind} is no model that apply_to knows; looked for are transformers' Llama, Mistral, "
        "Qwen2 and Qwen3 and litgpt's GPT"
    )
    for path, module in model.named_modules():
        if any(_descends(type(module), family) for family in FAMILIES):
            name = type(module).__qualname__
            message += f". It holds a {name} as .{path}: give that one, before others wrap it"
            break
    raise ValueError(message)


def _descends(kind: type, family: Family) -> bool:
    names = {(c.__module__.partition(".")[0], c.__name__) for c in kind.__mro__}
    return (family.package, family.model) in names


def _of_llama_kind(config: Any) -> bool:
    known = config.norm_class_name, config.mlp_class_name, config.parallel_residual
    return known == ("RMSNorm", "LLaMAMLP", False)


def _is(module: nn.Module, owner: str, family: Family) -> bool:
    base = base_of(module)
    return (base.__module__.partition(".")[0], base.__name__) == (family.package, owner)


def _refusal(module: nn.Module, part: Part, family: Family) -> str | None:
    if not _is(module, part.owner, family):
        kind = type(module)
        return f"a {kind.__module__}.{kind.__qualname__}, no {part.owner} of {family.package}"
    if why := _changed(module, part.fused):
        return why
    return part.refuse(module)


def _changed(module: nn.Module, fused: type[Fused]) -> str | None:
    """Whether its forward is another than the one that our class takes the place of."""
    if "forward" in vars(module):
        return "its forward was replaced by someone else's"
    base = base_of(module)
    if issubclass(fused, REWRITTEN):
        theirs, ours = ([*signature(c.forward).parameters] for c in (base, fused))
        if theirs != ours:
            return f"its forward takes {theirs}; known is one with {ours}"
    return _patched(base.forward, base.__module__)


def _other_rotation(attention: nn.Module, name: str) -> str | None:
    source = base_of(attention).__module__
    return _patched(getattr(sys.modules[source], name), source)


def _patched(function: Any, module: str) -> str | None:
    """Whether someone put a function of theirs in the place of this module's."""
    found = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", repr(function))
    return None if found == module else f"{found}.{name} stands in the place of {module}'s own"


def _shared(model: nn.Module) -> set[int]:
    """Parameters that several modules hold."""
    seen: set[int] = set()
    return {
        id(p)
        for module in model.modules()
        for p in module._parameters.values()
        if p is not None and (id(p) in seen or seen.add(id(p)))  # type: ignore[func-returns-value]
    }


def _sharing(module: nn.Module, part: Part, shared: set[int]) -> str | None:
    """Tied weights that packing would untie."""
    if part.switch not in ("mlp", "attention"):
        return None
    tied = [name for name, p in module.named_parameters() if id(p) in shared]
    return f"{tied[0]} is tied to another module's" if tied else None
