"""Training steps of a Transformer, each timed from the very first one of its process.

One run with every step kept answers for all warm-up settings at once: steps 1-10 are what "no
warm-up" measures, steps 2-11 "one warm-up step", and so on.
"""

import gc
import resource
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench.sweep import is_out_of_memory
from fusedlib.bench.timing import Sections, synchronize
from fusedlib.models.transformer import Transformer, config, loss

# What a direction runs, and which of its sections is its time.
DIRECTIONS = {
    "forward": ("forward",),
    "backward": ("forward", "backward"),
    "forward+backward": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer"),
}
TIMED = {"forward": "forward", "backward": "backward"}
LEARNING_RATE = 1e-4


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
        if direction not in DIRECTIONS:
            raise ValueError(f"unknown direction {direction!r}; known: {', '.join(DIRECTIONS)}")
        if provider not in ("eager", "inductor"):
            raise ValueError(f"unknown provider {provider!r}; known: eager, inductor")
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
            torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
            if "optimizer" in DIRECTIONS[direction]
            else None
        )

    def _draw(self, vocab_size: int, *shape: int) -> Tensor:
        return torch.randint(vocab_size, shape, device=self.device)

    def step(self, part: tuple[int, int] | None = None) -> dict[str, float]:
        """One step; ms of each section and of all (`total`), by marks inside this very step.

        `part` takes a corner of the batch, (sequences, tokens), to run every kernel on little work.
        """
        rows, columns = part or self.tokens.shape
        tokens, targets = self.tokens[:rows, :columns], self.targets[:rows, :columns]
        self.model.zero_grad(set_to_none=True)
        synchronize(self.device)
        sections = Sections(self.device)
        with sections.section("forward"):
            value = loss(self.call(tokens), targets)
        if "backward" in DIRECTIONS[self.direction]:
            with sections.section("backward"):
                value.backward()
        if self.optimizer is not None:
            with sections.section("optimizer"):
                self.optimizer.step()
        return sections.elapsed_ms()

    @property
    def timed(self) -> str:
        """The section that is this direction's time."""
        return TIMED.get(self.direction, "total")


def peak_memory_mib(device: torch.device) -> float | None:
    """Peak of the memory that tensors held on a CUDA device since the process began, in MiB."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / 2**20


def page_faults() -> int:
    """Pages this process has touched for the first time so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def record(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Run `steps` steps and keep each one's times in ms: the row's samples."""
    times: list[dict[str, float]] = []
    faults = []
    for _ in range(steps):
        before = page_faults()
        times.append(trainer.step())
        faults.append(page_faults() - before)
    sections = [*DIRECTIONS[trainer.direction], "total"]
    samples = {f"{name}_samples_ms": [round(t[name], 5) for t in times] for name in sections}
    return {
        "samples_ms": samples[f"{trainer.timed}_samples_ms"],
        **samples,
        "page_faults_samples": faults,
        "peak_memory_mib": peak_memory_mib(trainer.device),
        "num_parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


def in_one_process(models: list[str], steps: int, start: dict[str, float], **problem: Any) -> Any:
    """Entry of a fresh process: steps of each size, one after the other.

    Returns one dictionary a size: the samples and the position of the size in this process, or
    `status` and `reason` of a size that did not fit, after which the next one is tried.
    """
    runs = []
    for position, model in enumerate(models, 1):
        try:
            outcome = record(Trainer(model=model, **problem), steps)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            outcome = {"status": "oom", "reason": str(error).splitlines()[0]}
        runs.append({**outcome, "position": position, **start})
        _give_back_memory(problem["device"])
    return runs


def _give_back_memory(device: str) -> None:
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
