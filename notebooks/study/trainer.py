"""A Transformer's training step, and its memory; `step_clock` times settled steps."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.timing import synchronize
from study import step_clock
from study.allocator import Watch, watching
from study.cases import Case
from study.fits import require_memory
from study.models.transformer import Transformer, TransformerConfig, config, loss

# The sections of a direction.
DIRECTIONS = {
    "forward": ("forward",),
    "backward": ("forward", "backward"),
    "forward+backward": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer"),
}
WEIGHTS = {"fp32": "float32", "bf16 autocast": "float32", "bf16": "bfloat16"}
"""Dtype of the weights by precision; fp32 products are IEEE's, not TF32's."""
LEARNING_RATE = 1e-4


def shape_of(case: Mapping[str, Any]) -> TransformerConfig:
    """The configuration that a case or a row speaks of."""
    context, attention = int(case["context_length"]), str(case["attention"])
    return config(str(case["model"]), context_length=context, attention=attention)


def require_possible(case: Case) -> None:
    """Raise `Unavailable` where a case's device is not here, and `TooLarge` where what a step
    cannot do without is far above the memory: weights, gradients, two moments, and in plain
    attention what softmax gives, L matrices of B·H·T² numbers, which the backward pass reads.
    """
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not here.get(case["device"], True):
        raise Unavailable(f"this machine has no {case['device']} device")
    if "precision" in case and "context_length" in case:
        model, size = shape_of(case), getattr(torch, WEIGHTS[case["precision"]]).itemsize
        pairs = case["batch_size"] * model.num_heads * model.context_length**2
        matrices = model.num_layers * pairs if model.attention == "plain" else 0
        least_bytes = (4 * model.num_parameters + matrices) * size
        require_memory(least_bytes / 2**30, case["device"])


def adamw(parameters: Iterable[Parameter], kind: str = "foreach") -> torch.optim.AdamW:
    """AdamW as all studies of the Transformer have it: "foreach", torch's default on GPUs; or
    "fused", or "single" for a loop over the parameters.
    """
    return torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, foreach=kind == "foreach", fused=kind == "fused"
    )


def autocast_bf16(device: torch.device | str) -> torch.autocast:
    """bf16 autocast on a device."""
    return torch.autocast(torch.device(device).type, torch.bfloat16)


class Trainer(step_clock.Trainer):
    """A Transformer with everything one training step needs, made before any clock starts."""

    def __init__(
        self, model: str, direction: str, device: str, precision: str, batch_size: int,
        context_length: int, attention: str, provider: str = "eager", adam: str = "foreach",
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.direction, self.goes_backward = direction, "backward" in DIRECTIONS[direction]
        self.precision = precision
        self.shape = config(model, context_length=context_length, attention=attention)
        self.model: Transformer
        weights = getattr(torch, WEIGHTS[precision])
        super().__init__(Transformer(self.shape, device=device, dtype=weights), device)
        self.call: Callable[[Tensor], Tensor] = (
            torch.compile(self.model) if provider == "inductor" else self.model
        )
        drawn = self.shape.vocab_size, (batch_size, context_length)
        self.tokens = torch.randint(*drawn, device=self.device)
        self.targets = torch.randint(*drawn, device=self.device)
        if "optimizer" in DIRECTIONS[direction]:  # only there: it imports torch._dynamo, a second
            self.optimizer = adamw(self.model.parameters(), adam)

    @classmethod
    def of(cls, case: Case, direction: str = "step", **options: Any) -> Self:
        """The trainer of a case."""
        names = ("model", "device", "precision", "batch_size", "context_length", "attention")
        return cls(direction=direction, **{n: case[n] for n in names}, **options)

    def precise(self) -> AbstractContextManager[object]:
        """Autocast, where the precision asks for it."""
        return autocast_bf16(self.device) if self.precision == "bf16 autocast" else nullcontext()

    def forward(self) -> Tensor:
        """The mean cross entropy of the batch."""
        with self.precise():
            logits = self.call(self.tokens)
        return loss(logits, self.targets)

    def step(self) -> dict[str, float]:
        """One step from an idle device; ms of each section and of all (`total`)."""
        synchronize(self.device)
        return self.issue().elapsed_ms()


# --- its memory ----------------------------------------------------------------------------------


def gradients_of(trainer: step_clock.Trainer) -> list[Tensor]:
    """The gradients that exist now."""
    return [p.grad for p in trainer.model.parameters() if p.grad is not None]


def moments_of(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """The optimizer's moments that exist now; numbers of steps are none."""
    held = optimizer.state.values() if optimizer else ()
    return [t for state in held for t in state.values() if isinstance(t, Tensor) and t.dim()]


def watched_steps(
    make: Callable[[], step_clock.Trainer], device: torch.device, count: int
) -> tuple[step_clock.Trainer, Watch]:
    """Make a trainer and let it make so many steps, with a moment at each border of a section: the
    trainer is watched from before it is made, so that every block that its steps hold is known.

    Moments are "built", then "begin 1", "forward 1", "backward 1", "step 1", "begin 2" and so on.
    """
    with watching(device) as watch:
        trainer = make()
        watch.mark("built", "weights", trainer.model.parameters())
        for number in range(1, count + 1):
            trainer.clear()
            watch.mark(f"begin {number}")
            trainer.issue(partial(_section, trainer, watch, number))
            del trainer.loss
    return trainer, watch


@contextmanager
def _section(
    trainer: step_clock.Trainer, watch: Watch, number: int, name: str
) -> Iterator[None]:  # fmt: skip
    """A section whose end is a moment at which it is known whose memory is whose."""
    yield
    moment = f"{'step' if name == 'optimizer' else name} {number}"
    if name == "forward":
        watch.mark(moment)
        watch.forward(f"begin {number}", moment)
    elif name == "backward":
        watch.mark(moment, "gradients", gradients_of(trainer))
    else:
        watch.mark(moment, "optimizer", moments_of(trainer.optimizer))
