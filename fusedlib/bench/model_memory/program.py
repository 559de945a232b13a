"""What is watched: a Transformer that runs forward, or full steps with AdamW, in one precision."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from fusedlib.models import activations, checkpointed, transformer
from fusedlib.models.checkpointed import Plan
from fusedlib.models.transformer import Transformer, TransformerConfig, config

MODES = ("forward, no_grad", "forward", "step")
LEARNING_RATE = 1e-4
WHOLE = Plan("none")


class Program:
    """A model with its data, its precision and, for a step, its optimizer.

    Args:
        model: name of the size.
        context_length: tokens a sequence.
        batch_size: sequences.
        attention: "plain" or "sdpa".
        precision: "fp32", "bf16 autocast" (fp32 weights) or "bf16" (weights and all).
        device: where it runs.
        optimizer: with AdamW, whose state the first step makes.

    Raises:
        ValueError: unknown size, attention or precision.
    """

    def __init__(
        self, model: str, context_length: int, batch_size: int, attention: str, precision: str,
        device: str, *, optimizer: bool = False,
    ) -> None:  # fmt: skip
        self.shape: TransformerConfig = config(
            model, context_length=context_length, attention=attention
        )
        self.precision, self.device = precision, torch.device(device)
        activations.widths(precision)  # refuses what is unknown
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        torch.manual_seed(0)
        self.model = Transformer(self.shape, device=self.device, dtype=dtype)
        drawn = (self.shape.vocab_size, (batch_size, context_length))
        self.tokens = torch.randint(*drawn, device=self.device)
        self.targets = torch.randint(*drawn, device=self.device)
        self.optimizer = (
            torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE) if optimizer else None
        )

    def precise(self) -> AbstractContextManager[object]:
        """Autocast where the precision asks for it."""
        if self.precision == "bf16 autocast":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def forward(self, plan: Plan = WHOLE) -> Tensor:
        """The loss, a scalar; the logits are given up with it."""
        with self.precise():
            logits = checkpointed.forward(self.model, self.tokens, plan)
            return transformer.loss(logits, self.targets)

    def weights(self) -> list[nn.Parameter]:
        """All parameters."""
        return list(self.model.parameters())

    def others(self) -> list[Tensor]:
        """What is there besides the parameters: RoPE's tables, tokens and targets."""
        return [*self.model.buffers(), self.tokens, self.targets]

    def gradients(self) -> list[Tensor]:
        """The gradients that exist now."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def state(self) -> list[Tensor]:
        """AdamW's moments that exist now."""
        if self.optimizer is None:
            return []
        held = self.optimizer.state.values()
        return [t for one in held for t in one.values() if isinstance(t, Tensor) and t.dim()]


def nbytes(tensors: list[Tensor] | list[nn.Parameter]) -> int:
    """Bytes that tensors take, without any allocator's rounding."""
    return sum(t.numel() * t.element_size() for t in tensors)
