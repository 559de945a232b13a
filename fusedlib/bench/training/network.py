"""The published network around one SwiGLU layer, and the layer in its two layouts.

    images [n, 1, 28, 28] → conv 32, ReLU, conv 64, ReLU, max-pool 2, dropout 0.25
                          → flatten [n, 9216] → SwiGLU [n, width] → dropout 0.5
                          → linear [n, 10] → log-softmax

Without the convolutions the flattened image [n, 784] is what the layer sees. Whoever computes the
layer, its state dict speaks of `layer.gate_proj.weight` and `layer.up_proj.weight`, (width, hidden)
each, so that what one arm saved another one loads; and the same seed draws the same weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

NETWORKS = {"convolutions": 9216, "swiglu only": 784}
"""What the layer sees of an image: its input's width."""

CLASSES = 10


class Separate(nn.Module):
    """h (n, width) of x (n, hidden) by `function(x, w_gate, w_up)`, one parameter a weight."""

    def __init__(
        self, hidden: int, width: int, function: Callable[..., Tensor], *,
        trained: bool = True, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.function = function
        self.gate_proj = nn.Linear(hidden, width, bias=False, device=device)
        self.up_proj = nn.Linear(hidden, width, bias=False, device=device)
        self.requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        """h (n, width)."""
        return self.function(x, self.gate_proj.weight, self.up_proj.weight)

    def weights(self) -> dict[str, Tensor]:
        """The weights by name, `gate` and `up`."""
        return {"gate": self.gate_proj.weight.detach(), "up": self.up_proj.weight.detach()}

    def gradients(self) -> dict[str, Tensor | None]:
        """Their gradients; None where none arrived."""
        return {"gate": self.gate_proj.weight.grad, "up": self.up_proj.weight.grad}


class Packed(nn.Module):
    """The same by `function(x, w_gate_up)`, the gate rows above the up rows."""

    _NAMES = ("gate_proj.weight", "up_proj.weight")

    def __init__(
        self, hidden: int, width: int, function: Callable[[Tensor, Tensor], Tensor], *,
        trained: bool = True, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.function = function
        # The draws of `Separate`, in its order.
        rows = [nn.Linear(hidden, width, bias=False, device=device).weight for _ in range(2)]
        self.w_gate_up = nn.Parameter(torch.cat([w.detach() for w in rows]), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        """h (n, width)."""
        return self.function(x, self.w_gate_up)

    def weights(self) -> dict[str, Tensor]:
        """The weights by name, `gate` and `up`, as views."""
        gate, up = self.w_gate_up.detach().chunk(2)
        return {"gate": gate, "up": up}

    def gradients(self) -> dict[str, Tensor | None]:
        """Their gradients, as views; None where none arrived."""
        whole = self.w_gate_up.grad
        gate, up = (None, None) if whole is None else whole.chunk(2)
        return {"gate": gate, "up": up}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name, rows in zip(self._NAMES, self.w_gate_up.chunk(2), strict=True):
            destination[prefix + name] = rows if keep_vars else rows.detach()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any],
        strict: bool, missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        found = [state_dict.get(prefix + name) for name in self._NAMES]
        missing = [prefix + n for n, w in zip(self._NAMES, found, strict=True) if w is None]
        missing_keys.extend(missing if strict else [])
        for rows, name, given in zip(self.w_gate_up.chunk(2), self._NAMES, found, strict=True):
            if given is not None and given.shape != rows.shape:
                error_msgs.append(
                    f"size mismatch for {prefix + name}: {tuple(given.shape)} in the checkpoint, "
                    f"{tuple(rows.shape)} here"
                )
            elif given is not None:
                rows.detach().copy_(given)
        known = [prefix + name for name in self._NAMES]
        others = [key for key in state_dict if key.startswith(prefix) and key not in known]
        unexpected_keys.extend(others if strict else [])


class Network(nn.Module):
    """One of `NETWORKS` around a layer, which is made by `layer(hidden)` after what precedes it."""

    def __init__(
        self, kind: str, width: int, layer: Callable[[int], Separate | Packed], *,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        """Raises ValueError for an unknown kind."""
        super().__init__()
        if kind not in NETWORKS:
            raise ValueError(f"unknown network {kind!r}; known: {', '.join(NETWORKS)}")
        before: list[nn.Module] = []
        if kind == "convolutions":
            before = [
                nn.Conv2d(1, 32, 3, device=device), nn.ReLU(),
                nn.Conv2d(32, 64, 3, device=device), nn.ReLU(),
                nn.MaxPool2d(2), nn.Dropout(0.25),
            ]  # fmt: skip
        self.before = nn.Sequential(*before, nn.Flatten())
        self.layer = layer(NETWORKS[kind])
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, CLASSES, device=device)

    def forward(self, images: Tensor) -> Tensor:
        """Log-probabilities (n, 10), fp32, of images (n, 1, 28, 28)."""
        h = self.layer(self.before(images))
        return log_softmax(self.head(self.dropout(h)).float(), dim=1)
