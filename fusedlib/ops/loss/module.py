"""Modules in place of `torch.nn.CrossEntropyLoss` or a log-softmax and the projection before it."""

from __future__ import annotations

from torch import Tensor, nn

from fusedlib.ops.loss.function import (
    TokenScores,
    checked_settings,
    linear_cross_entropy,
    linear_log_probs,
)


class _WithSettings(nn.Module):
    """A module whose settings are attributes of these names."""

    _settings: tuple[str, ...] = ()

    def extra_repr(self) -> str:
        """The settings, for print."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self._settings)


class LinearCrossEntropyLoss(_WithSettings):
    """`fusedlib.linear_cross_entropy` with its settings, in place of `torch.nn.CrossEntropyLoss`.

    It has no parameters: the weight, a model's output embedding, comes with the call. Its settings
    are attributes, read at each call.

    Args:
        ignore_index: the target of tokens that have no loss and no gradient.
        label_smoothing: ε from 0 to 1.
        z_loss: weight of the squared logsumexp.
        softcap: κ of logits κ tanh(logits / κ).
        reduction: "mean", "sum" or "none".
        class_weights: (vocabulary,), a buffer of the module, as torch's `weight`.
        memory: "least", "balanced" or bytes, what the kernels may take beside the gradients.

    Raises:
        ValueError: an unknown reduction or plan of memory, or a number out of range.
    """

    _settings = "ignore_index", "label_smoothing", "z_loss", "softcap", "reduction", "memory"

    def __init__(
        self, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
        softcap: float | None = None, reduction: str = "mean",
        class_weights: Tensor | None = None, memory: str | int = "balanced",
    ) -> None:  # fmt: skip
        super().__init__()
        checked_settings(ignore_index, label_smoothing, z_loss, softcap, reduction, memory)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.z_loss, self.softcap = z_loss, softcap
        self.reduction, self.memory = reduction, memory
        self.register_buffer("class_weights", class_weights)

    def forward(
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        token_weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The loss of hidden (..., hidden) and weight (vocabulary, hidden) at target (...)."""
        settings = {name: getattr(self, name) for name in (*self._settings, "class_weights")}
        return linear_cross_entropy(
            hidden, weight, target, bias=bias, token_weights=token_weights, **settings
        )


class LinearLogProbs(_WithSettings):
    """`fusedlib.linear_log_probs` with its settings.

    It has no parameters: the weight, a model's output embedding, comes with the call. Its settings
    are attributes, read at each call.

    Args:
        temperature: what logits are divided by.
        softcap: κ of logits κ tanh(logits / κ).
        logit_scale: what logits are multiplied by, before the softcap.
        entropy, logsumexp, is_largest: whether these are computed.
        ignore_index: the token of places of which all is 0, without a gradient.

    Raises:
        ValueError: a number out of range.
    """

    _settings = (
        "temperature", "softcap", "logit_scale", "entropy", "logsumexp", "is_largest",
        "ignore_index",
    )  # fmt: skip

    def __init__(
        self, *, temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
        entropy: bool = True, logsumexp: bool = False, is_largest: bool = False,
        ignore_index: int = -100,
    ) -> None:  # fmt: skip
        super().__init__()
        checked_settings(ignore_index, softcap=softcap, temperature=temperature)
        self.temperature, self.softcap, self.logit_scale = temperature, softcap, logit_scale
        self.entropy, self.logsumexp, self.is_largest = entropy, logsumexp, is_largest
        self.ignore_index = ignore_index

    def forward(
        self, hidden: Tensor, weight: Tensor, tokens: Tensor, bias: Tensor | None = None
    ) -> TokenScores:
        """What `fusedlib.linear_log_probs` gives of tokens (...)."""
        settings = {name: getattr(self, name) for name in self._settings}
        return linear_log_probs(hidden, weight, tokens, bias=bias, **settings)
