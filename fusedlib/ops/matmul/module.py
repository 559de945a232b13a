"""A module in place of `torch.nn.Linear`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusedlib.ops.arguments import require_size
from fusedlib.ops.fused_class import LINEAR_FORWARDS, Fused, full_name, has_hooks
from fusedlib.ops.matmul.function import linear


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
