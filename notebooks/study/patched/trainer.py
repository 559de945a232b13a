"""One step of an arm: forward, backward and, where asked, AdamW."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusedlib.bench import cuda_graphs
from study import allocator, step_clock
from study import trainer as transformer_trainer
from study.patched.models import Call
from study.rivals import Workload
from study.step_clock import Sections


class LlamaTrainer(step_clock.Trainer):
    """An arm's model with its tokens, as `step_clock` runs it; with AdamW where asked.

    Args:
        call: what is called with tokens and labels.
        ids: tokens and labels (batch, context).
        optimizer: whether AdamW, torch's fused one, ends a step.
        graph: whether forward and backward are one CUDA graph.
    """

    def __init__(
        self, model: nn.Module, call: Call, ids: Tensor, *, optimizer: bool = False,
        graph: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(model, ids.device)
        self.call, self.ids = call, ids
        if optimizer:
            self.optimizer = transformer_trainer.adamw(model.parameters(), "fused")
        self.captured = capture(model, call, ids) if graph else None

    def forward(self) -> Tensor:
        """The model's own loss."""
        loss: Tensor = self.call(self.ids, labels=self.ids).loss
        return loss

    def issue(self, section: step_clock.Section | None = None) -> Sections:
        """One step, not waited for; where it is captured, forward and backward are one section."""
        if self.captured is None:
            return super().issue(section)
        self.clear()
        sections = Sections(self.device)
        with sections.section("graph"):
            self.captured.replay()
        self.loss = self.captured.results["y"]
        assign_gradients(self.model, self.captured.results)
        if self.optimizer is not None:
            with sections.section("optimizer"):
                self.update()
        return sections

    def activations(self) -> dict[str, float]:
        """MiB that forward and backward hold at their peak over weights and gradients, which are
        there before, as in accumulation; nothing is known elsewhere than on CUDA.

        A CUDA graph holds its memory all the time: what it took when it was captured.
        """
        if self.device.type != "cuda" or self.captured is not None:
            return {}
        held = allocator.peak(lambda: self.backward(self.forward()), self.device)
        return {"activations_mib": held or 0.0}


def capture(model: nn.Module, call: Call, ids: Tensor) -> cuda_graphs.Captured:
    """Forward and backward of a model as one CUDA graph."""
    work = Workload(lambda: call(ids, labels=ids).loss, dict(model.named_parameters()))
    one = torch.ones((), device=ids.device, dtype=work.forward().dtype)
    return cuda_graphs.capture(work, one, "forward+backward")


def assign_gradients(model: nn.Module, results: Mapping[str, Tensor]) -> None:
    """Give parameters the gradients that a graph writes."""
    for name, parameter in model.named_parameters():
        parameter.grad = results[f"d_{name}"]
