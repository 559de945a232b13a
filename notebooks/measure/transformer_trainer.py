"""A Transformer's training step, and series of steps from the very first one of a process.

Such a series answers for all warm-up settings at once: steps 1 to 10 are what "no warm-up"
measures, steps 2 to 11 "one warm-up step", and so on. `step_clock` times settled steps.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedlib.bench.attempt import free_memory, is_out_of_memory
from fusedlib.bench.cases import require_known
from fusedlib.bench.timing import Sections, synchronize
from models.transformer import Transformer, config, loss

# What a direction runs, and which of its sections is its time.
DIRECTIONS = {
    "forward": ("forward",),
    "backward": ("forward", "backward"),
    "forward+backward": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer"),
}
TIMED = {"forward": "forward", "backward": "backward"}
LEARNING_RATE = 1e-4


def adamw(parameters: Iterable[Parameter], kind: str = "foreach") -> torch.optim.AdamW:
    """AdamW as all studies of the Transformer have it: "foreach", torch's default on GPUs; or
    "fused", or "single" for a loop over the parameters.
    """
    return torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, foreach=kind == "foreach", fused=kind == "fused"
    )


class Trainer:
    """A model with everything one training step needs, made before any clock starts.

    Args:
        model: name of the size.
        direction: one of `DIRECTIONS`; "step" is a full step with AdamW.
        device: where it runs.
        dtype: dtype of the weights, such as "float32".
        batch_size: sequences a step.
        context_length: tokens a sequence.
        attention: "plain" or "sdpa".
        provider: "eager", or "inductor" for `torch.compile`.

    Raises:
        ValueError: unknown direction, dtype or provider.
    """

    def __init__(
        self, model: str, direction: str, device: str, dtype: str, batch_size: int,
        context_length: int, attention: str, provider: str = "eager",
    ) -> None:  # fmt: skip
        require_known("direction", direction, DIRECTIONS)
        require_known("provider", provider, ("eager", "inductor"))
        weights = getattr(torch, dtype, None)
        if not isinstance(weights, torch.dtype):
            raise ValueError(f"unknown dtype {dtype!r}; give torch's name, such as 'float32'")
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.direction = direction
        shape = config(model, context_length=context_length, attention=attention)
        self.model = Transformer(shape, device=self.device, dtype=weights)
        self.call: Callable[[Tensor], Tensor] = (
            torch.compile(self.model) if provider == "inductor" else self.model
        )
        self.tokens = self._draw(shape.vocab_size, batch_size, context_length)
        self.targets = self._draw(shape.vocab_size, batch_size, context_length)
        # Only where it steps: making one imports torch._dynamo, which takes over a second.
        self.optimizer = (
            adamw(self.model.parameters()) if "optimizer" in DIRECTIONS[direction] else None
        )

    def _draw(self, vocab_size: int, *shape: int) -> Tensor:
        return torch.randint(vocab_size, shape, device=self.device)

    def issue(self, part: tuple[int, int] | None = None) -> Sections:
        """One step, not waited for, with marks at the borders of its sections.

        `part` takes a corner of the batch, (sequences, tokens), to run every kernel on little work.
        """
        rows, columns = part or self.tokens.shape
        tokens, targets = self.tokens[:rows, :columns], self.targets[:rows, :columns]
        self.model.zero_grad(set_to_none=True)
        sections = Sections(self.device)
        with sections.section("forward"):
            value = loss(self.call(tokens), targets)
        if "backward" in DIRECTIONS[self.direction]:
            with sections.section("backward"):
                value.backward()
        if self.optimizer is not None:
            with sections.section("optimizer"):
                self.optimizer.step()
        return sections

    def step(self, part: tuple[int, int] | None = None) -> dict[str, float]:
        """One step from an idle device; ms of each section and of all (`total`)."""
        synchronize(self.device)
        return self.issue(part).elapsed_ms()


def record(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Run `steps` steps, each from an idle device, and keep every one's times in ms."""
    times = [trainer.step() for _ in range(steps)]
    sections = [*DIRECTIONS[trainer.direction], "total"]
    samples = {f"{name}_samples_ms": [round(t[name], 5) for t in times] for name in sections}
    return {
        "samples_ms": samples[f"{TIMED.get(trainer.direction, 'total')}_samples_ms"],
        **samples,
        "num_parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


def in_one_process(models: list[str], steps: int, start: dict[str, float], **problem: Any) -> Any:
    """Entry of a fresh process: steps of each size, one after the other.

    Returns one dictionary a size: the samples and the size's `position` in this process, or `oom`
    with the reason, after which the next size is tried.
    """
    runs = []
    for position, model in enumerate(models, 1):
        try:
            figures = record(Trainer(model=model, **problem), steps)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            figures = {"oom": str(error).splitlines()[0]}
        runs.append({**figures, "position": position, **start})
        free_memory()
    return runs
