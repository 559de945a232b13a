"""Modules in place of torch's `Linear`, transformers' `LlamaMLP` and `LlamaRMSNorm`, Liger's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedlib.ops.arguments import require_number, require_size, require_tensors
from fusedlib.ops.mlp.function import SAVES, gated_mlp, gelu_name
from fusedlib.ops.fused_class import LINEAR_FORWARDS, Fused, full_name, has_hooks, plain_weights
from fusedlib.ops.mlp.problem import ACTIVATIONS
from fusedlib.ops.operands import CASTS
from fusedlib.ops.loss.function import _check_numbers, linear_cross_entropy
from fusedlib.ops.norm.function import rms_norm
from fusedlib.ops.linear.function import linear


class SwiGLUMLP(nn.Module):
    """y = (silu(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ, x (..., hidden_size).

    Its three projections are `torch.nn.Linear`s of the names that Llama's have: `gate_proj`,
    `up_proj` and `down_proj`. So checkpoints, adapters, optimizers and parallel wrappers take it as
    they take the modules it replaces; where one of them has changed a projection, or hooks it, the
    module runs plain PyTorch.

    Args:
        hidden_size: width of x and y.
        intermediate_size: width of gate and up.
        save: what is kept for backward, "gate_up" or "input"; see `fusedlib.swiglu_mlp`.
        device: where the weights lie.
        dtype: the weights' dtype.

    Raises:
        ValueError: a size that is no whole number of at least 1, or an unknown `save`.
    """

    activation = "silu"

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, save: str = "gate_up",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        require_size("hidden_size", hidden_size)
        require_size("intermediate_size", intermediate_size)
        if save not in SAVES:
            raise ValueError(f"save must be one of {', '.join(SAVES)}, got {save!r}")
        self.hidden_size, self.intermediate_size, self.save = hidden_size, intermediate_size, save
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights uniform within 1/√(row length), as `torch.nn.Linear` does."""
        for projection in (self.gate_proj, self.up_proj, self.down_proj):
            bound = projection.in_features**-0.5
            nn.init.uniform_(projection.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """y (..., hidden_size) of x (..., hidden_size)."""
        weights = self.weights()
        if weights is None:
            activated = ACTIVATIONS[self.activation](self.gate_proj(x))
            y: Tensor = self.down_proj(activated * self.up_proj(x))
            return y
        require_tensors(x=x)
        return gated_mlp(self.activation, self.save, x, *weights)

    def weights(self) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
        """Those of gate and up, and that of down; None where a call of them would be more."""
        weights = plain_weights(self.gate_proj, self.up_proj, self.down_proj, biased=False)
        return None if weights is None else ((weights[0], weights[1]), weights[2])

    def extra_repr(self) -> str:
        """The sizes and what is saved, for print."""
        sizes = f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}"
        return f"{sizes}, save={self.save!r}"


class GeGLUMLP(SwiGLUMLP):
    """y = (gelu(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ: all else is `SwiGLUMLP`'s.

    Args:
        hidden_size: width of x and y.
        intermediate_size: width of gate and up.
        approximate: "tanh" or "none"; see `fusedlib.geglu_mlp`.
        options: those of `SwiGLUMLP`.

    Raises:
        ValueError: an unknown `approximate`, and what `SwiGLUMLP` refuses.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, approximate: str = "tanh", **options: Any
    ) -> None:
        super().__init__(hidden_size, intermediate_size, **options)
        self.activation = gelu_name(approximate)

    def extra_repr(self) -> str:
        """The sizes, what is saved and the activation, for print."""
        return f"{super().extra_repr()}, activation={self.activation!r}"


class Linear(nn.Linear):
    """y = x Wᵀ + b by `fusedlib.linear`; all else is `torch.nn.Linear`'s: weights, checkpoints.

    Args:
        in_features: width of x.
        out_features: width of y.
        bias: whether there is a b.
        device: where the weights lie.
        dtype: the weights' dtype.

    Raises:
        ValueError: a width that is no whole number of at least 1.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        require_size("in_features", in_features)
        require_size("out_features", out_features)
        super().__init__(in_features, out_features, bias, device, dtype)

    @classmethod
    def from_torch(cls, module: nn.Linear) -> Linear:
        """A layer with the very parameters of a `torch.nn.Linear`, in its mode.

        Raises:
            TypeError: a module of another kind, one that computes something else or runs hooks, or
                one whose weight or bias is no plain parameter.
            ValueError: a layer without inputs or outputs.
        """
        module_class, forwards = type(module), (nn.Linear.forward, cls.forward)
        if isinstance(module, Fused):
            raise TypeError("from_torch takes a torch.nn.Linear; apply_to has changed this one")
        if not isinstance(module, nn.Linear) or module_class.forward not in forwards:
            name = full_name(module_class)
            raise TypeError(f"from_torch takes a torch.nn.Linear with its own forward, got {name}")
        for name in ("weight", "bias"):
            held = getattr(module, name)
            if type(held) is not nn.Parameter and (held is not None or name == "weight"):
                raise TypeError(
                    f"the {name} is a {type(held).__qualname__}, not a torch.nn.Parameter"
                )
        if "forward" in vars(module) or has_hooks(module):
            raise TypeError("the layer has hooks or a forward of its own, which would be lost")
        layer = cls(module.in_features, module.out_features, module.bias is not None, "meta")
        layer.weight, layer.bias = module.weight, module.bias
        return layer.train(module.training)

    def forward(self, input: Tensor) -> Tensor:
        """y (..., out_features) of x (..., in_features)."""
        return linear(input, self.weight, self.bias)


LINEAR_FORWARDS.add(Linear.forward)


class LinearCrossEntropyLoss(nn.Module):
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
        _check_numbers(ignore_index, label_smoothing, z_loss, softcap, reduction, memory)
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

    def extra_repr(self) -> str:
        """The settings, for print."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self._settings)


class RMSNorm(nn.Module):
    """y = weight ⊙ s / √(mean(s²) + eps), s = x or x + residual, over the last dimension.

    Its checkpoints have `weight`, as those of the modules it replaces.

    Args:
        hidden_size: width of x and y.
        eps: added to the mean of squares.
        cast: "hf" or "litgpt"; see `fusedlib.rms_norm`.
        elementwise_affine: whether there is a weight.
        device: where the weight lies.
        dtype: the weight's dtype.

    Raises:
        ValueError: a size that is no whole number of at least 1, an eps that is no number, or an
            unknown `cast`.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, *, cast: str = "hf",
        elementwise_affine: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        require_size("hidden_size", hidden_size)
        require_number("eps", eps)
        if cast not in CASTS:
            raise ValueError(f"cast must be one of {', '.join(CASTS)}, got {cast!r}")
        self.hidden_size, self.eps, self.cast = hidden_size, eps, cast
        self.weight: nn.Parameter | None
        ones = torch.ones(hidden_size, device=device, dtype=dtype) if elementwise_affine else None
        self.register_parameter("weight", None if ones is None else nn.Parameter(ones))

    def reset_parameters(self) -> None:
        """Fill the weight with ones."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """y of x (..., hidden_size); with a residual also the stream x + residual."""
        return rms_norm(x, self.weight, self.eps, residual=residual, cast=self.cast)

    def extra_repr(self) -> str:
        """The size, eps and order of casts, for print."""
        affine = "" if self.weight is not None else ", elementwise_affine=False"
        return f"{self.hidden_size}, eps={self.eps}, cast={self.cast!r}{affine}"
