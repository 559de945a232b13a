"""What a patched model gives of a loss without logits: its logits, where somebody reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from fusedlib.ops.fused_class import is_plain_tensor


class UnreadLogits:
    """Logits that nobody has read: what they are computed from, in forward's modes.

    It stands among an output's items, which accelerate and others walk through without reading.
    """

    def __init__(self, head: nn.Module, hidden: Tensor, softcap: float | None) -> None:
        self._head, self._hidden, self._softcap = head, hidden, softcap
        self._sample = _sample_of(head)
        kind = hidden.device.type
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._gradients = torch.is_grad_enabled()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"these logits, whose {name} is asked for, are not computed: read them as "
            "output.logits, or call the model with skip_logits=False"
        )

    def compute(self) -> Tensor:
        """The logits (..., tokens, vocabulary), with a graph where forward had one.

        Raises:
            RuntimeError: the head's weight was changed since.
        """
        before, now = self._sample, _sample_of(self._head)
        if len(before) == len(now) and not torch.equal(before, now.to(before.device)):
            raise RuntimeError(
                "the logits are computed where they are read, and the weight of lm_head has "
                "changed since forward: read output.logits before optimizer.step(), or call the "
                "model with skip_logits=False"
            )
        kind, dtype, enabled = self._autocast
        with torch.set_grad_enabled(self._gradients), torch.autocast(kind, dtype, enabled):
            logits: Tensor = self._head(self._hidden)
            cap = self._softcap
            return logits if cap is None else torch.tanh(logits / cap) * cap


def _sample_of(head: Any) -> Tensor:
    """Bytes of the head's first row, which every optimizer changes: fused ones raise no version.

    None of a weight that is in parts.
    """
    weight = head.weight.detach()
    if not is_plain_tensor(weight) or not weight.numel():
        return torch.empty(0, dtype=torch.uint8)
    return weight[0, :64].clone().view(torch.uint8)


class _LogitsWhenRead(ModelOutput):
    """An output with `UnreadLogits` in the place of its logits, until they are read."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "logits" and isinstance(value, UnreadLogits):
            value = self.logits = value.compute()
        return value

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.logits if key == "logits" and key in self else super().__getitem__(key)
        names = [*self.keys()][key]  # of the others none is read
        return self[names] if isinstance(names, str) else tuple(self[name] for name in names)

    def get(self, key: str, default: Any = None) -> Any:
        """The item of that name."""
        return self[key] if key in self.keys() else default

    def __reduce__(self) -> Any:
        self.logits  # noqa: B018  (a copy has no model to compute them)
        return super().__reduce__()


@dataclass
class CausalLMOutput(_LogitsWhenRead, CausalLMOutputWithPast):
    """The output of a model with a head."""


@dataclass
class MoeCausalLMOutput(_LogitsWhenRead, MoeCausalLMOutputWithPast):
    """The output of a model with experts."""
