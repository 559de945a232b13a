"""The published network around one SwiGLU layer, and the arms: who computes that layer.

    images [n, 1, 28, 28] → conv 32, ReLU, conv 64, ReLU, max-pool 2, dropout 0.25
                          → flatten [n, 9216] → SwiGLU [n, width] → dropout 0.5
                          → linear [n, 10] → log-softmax

Without the convolutions the flattened image [n, 784] is what the layer sees. Arms are rivals of the
task `TASK`: from hidden size, width and device to a `Layer`. The same seed draws the same weights
for all. The published kernel is wrong and may not be imported here: `notebooks/flawed_layer.py`
registers it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax

from fusedlib import reference
from fusedlib.bench.arguments import require_known
from fusedlib.ops.mlp import function as functional
from measure.racing.rivals import Task, get, rival
from measure.racing.settings import matmul_settings

BASELINE = "eager"
FROZEN, WRONG = "frozen", "wrong"
"""Traits: gate and up weights are not trained; wrong on purpose, trained as the study's subject."""

NETWORKS = {"convolutions": 9216, "swiglu only": 784}
"""What the layer sees of an image: its input's width."""

CLASSES = 10
PRECISIONS = {"fp32": torch.float32, "tf32": torch.float16, "bf16": torch.bfloat16}
"""IEEE products and convolutions, both in TF32, or bf16 autocast; with the dtype whose roundoff is
theirs: TF32 has fp16's 11 bits."""

# Three shapes of batch and three precisions a process; Dynamo's own limit is eight.
RECOMPILATIONS = 64


class Layer(nn.Module):
    """h (n, width) of x (n, hidden) by `function(x, w_gate, w_up)`, or by `function(x, w_gate_up)`
    where gate rows lie above up rows in one parameter.
    """

    def __init__(
        self, hidden: int, width: int, device: torch.device | str | None,
        function: Callable[..., Tensor], *, packed: bool = False, trained: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.function = function
        drawn = [nn.Linear(hidden, width, bias=False, device=device).weight for _ in range(2)]
        rows = {name: w.detach() for name, w in zip(("gate", "up"), drawn, strict=True)}
        for name, w in ({"gate_up": torch.cat(list(rows.values()))} if packed else rows).items():
            self.register_parameter(name, nn.Parameter(w, requires_grad=trained))

    def forward(self, x: Tensor) -> Tensor:
        """h (n, width)."""
        return self.function(x, *self._parameters.values())

    def weights(self) -> dict[str, Tensor]:
        """The weights by name, `gate` and `up`."""
        return self._by_name([p.detach() for p in self.parameters()])

    def gradients(self) -> dict[str, Tensor]:
        """Those of their gradients that arrived."""
        return self._by_name([p.grad for p in self.parameters()])

    def _by_name(self, tensors: list[Tensor | None]) -> dict[str, Tensor]:
        if len(self._parameters) == 1:
            tensors = [None, None] if tensors[0] is None else list(tensors[0].chunk(2))
        return {n: t for n, t in zip(("gate", "up"), tensors, strict=True) if t is not None}


TASK = Task[[int, int, str], Layer]("mnist")


class Network(nn.Module):
    """One of `NETWORKS` around the layer of an arm."""

    def __init__(self, kind: str, arm: str, width: int, device: str) -> None:
        super().__init__()
        require_known("network", kind, NETWORKS)
        before: list[nn.Module] = []
        if kind == "convolutions":
            before = [
                nn.Conv2d(1, 32, 3, device=device), nn.ReLU(),
                nn.Conv2d(32, 64, 3, device=device), nn.ReLU(),
                nn.MaxPool2d(2), nn.Dropout(0.25),
            ]  # fmt: skip
        self.before = nn.Sequential(*before, nn.Flatten())
        self.layer = get(TASK, arm).build(NETWORKS[kind], width, device)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, CLASSES, device=device)

    def forward(self, images: Tensor) -> Tensor:
        """Log-probabilities (n, 10), fp32, of images (n, 1, 28, 28)."""
        h = self.layer(self.before(images))
        return log_softmax(self.head(self.dropout(h)).float(), dim=1)


# --- arms ----------------------------------------------------------------------------------------


rival(TASK, BASELINE, settings="Plain PyTorch, an operation at a time")(
    partial(Layer, function=reference.swiglu)
)


@rival(TASK, "inductor")
def inductor(hidden: int, width: int, device: str) -> Layer:
    """The layer by torch.compile, default mode, fullgraph=True, dynamic=False."""
    torch._dynamo.config.recompile_limit = RECOMPILATIONS
    return Layer(hidden, width, device, _compiled())


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(reference.swiglu, fullgraph=True, dynamic=False)


@rival(TASK, "liger")
def liger(hidden: int, width: int, device: str) -> Layer:
    """Liger's silu(gate) · up behind two products, as its `LigerSwiGLUMLP` has it."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def function(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        return LigerSiLUMulFunction.apply(linear(x, w_gate), linear(x, w_up))

    return Layer(hidden, width, device, function)


rival(
    TASK, "fused",
    settings="fusedlib.swiglu: our kernels, or plain PyTorch where `layer_backward` is "
    "PyTorch's own",
)(partial(Layer, function=functional.swiglu, packed=True))  # fmt: skip
rival(
    TASK, "frozen", label="PyTorch, frozen", slot=13, traits=frozenset({FROZEN}),
    settings="Plain PyTorch; gate and up weights stay as they were drawn",
)(partial(Layer, function=reference.swiglu, trained=False))  # fmt: skip


# --- precisions ----------------------------------------------------------------------------------


@contextmanager
def settings(precision: str) -> Iterator[None]:
    """torch as this precision wants it, and convolutions by deterministic algorithms."""
    require_known("precision", precision, PRECISIONS)
    cudnn: Any = torch.backends.cudnn
    before = cudnn.conv.fp32_precision, cudnn.deterministic
    with matmul_settings("highest" if precision == "fp32" else "high", True):
        cudnn.conv.fp32_precision = "ieee" if precision == "fp32" else "tf32"
        cudnn.deterministic = True
        try:
            yield
        finally:
            cudnn.conv.fp32_precision, cudnn.deterministic = before


def autocast(precision: str, device: torch.device | str) -> torch.autocast:
    """bf16 autocast, or none; weights are cast anew each step, in a CUDA graph they must be."""
    return torch.autocast(
        torch.device(device).type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    )
