"""A Transformer's training step, and its memory; `step_clock` times settled steps."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedlib.bench.arguments import require_known
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
    """Whether a case is worth a try.

    Raises:
        Unavailable: its device is not here.
        TooLarge: weights, gradients, moments and attention matrices are far above the memory.
    """
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not here.get(case["device"], True):
        raise Unavailable(f"this machine has no {case['device']} device")
    if "precision" in case and "context_length" in case:
        require_memory(least_bytes(case) / 2**30, case["device"])


def least_bytes(case: Case) -> int:
    """What a step cannot do without: weights, gradients, two moments, and what softmax gives.

    The last in plain attention alone: L matrices of B·H·T² numbers, which the backward pass reads.
    """
    model, size = shape_of(case), getattr(torch, WEIGHTS[case["precision"]]).itemsize
    pairs = case["batch_size"] * model.num_heads * model.context_length**2
    matrices = model.num_layers * pairs if model.attention == "plain" else 0
    return (4 * model.num_parameters + matrices) * size


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
    """A Transformer with everything one training step needs, made before any clock starts.

    Args:
        direction: one of `DIRECTIONS`; "step" is a full step with AdamW.
        attention: "plain" or "sdpa".
        provider: "eager", or "inductor" for `torch.compile`.
        adam: AdamW's form, as of `adamw`.
    """

    def __init__(
        self, model: str, direction: str, device: str, dtype: str, batch_size: int,
        context_length: int, attention: str, provider: str = "eager", autocast: bool = False,
        adam: str = "foreach",
    ) -> None:  # fmt: skip
        require_known("direction", direction, DIRECTIONS)
        require_known("provider", provider, ("eager", "inductor"))
        weights = getattr(torch, dtype, None)
        if not isinstance(weights, torch.dtype):
            raise ValueError(f"unknown dtype {dtype!r}; give torch's name, such as 'float32'")
        torch.manual_seed(0)
        self.direction, self.goes_backward = direction, "backward" in DIRECTIONS[direction]
        self.autocast = autocast
        self.shape = config(model, context_length=context_length, attention=attention)
        self.model: Transformer
        super().__init__(Transformer(self.shape, device=device, dtype=weights), device)
        self.call: Callable[[Tensor], Tensor] = (
            torch.compile(self.model) if provider == "inductor" else self.model
        )
        drawn = self.shape.vocab_size, (batch_size, context_length)
        self.tokens = torch.randint(*drawn, device=self.device)
        self.targets = torch.randint(*drawn, device=self.device)
        self.part = self.tokens.shape
        if "optimizer" in DIRECTIONS[direction]:  # only there: it imports torch._dynamo, a second
            self.optimizer = adamw(self.model.parameters(), adam)

    @classmethod
    def of(cls, case: Case, direction: str = "step", **options: Any) -> Self:
        """The trainer of a case with one of the precisions in `WEIGHTS`."""
        names = ("model", "device", "batch_size", "context_length", "attention")
        return cls(
            direction=direction, dtype=WEIGHTS[case["precision"]],
            autocast=case["precision"] == "bf16 autocast", **{n: case[n] for n in names}, **options,
        )  # fmt: skip

    def precise(self) -> AbstractContextManager[object]:
        """Autocast, where the trainer was made with it."""
        return autocast_bf16(self.device) if self.autocast else nullcontext()

    def logits(self) -> Tensor:
        """Of `part` of the batch."""
        rows, columns = self.part
        with self.precise():
            return self.call(self.tokens[:rows, :columns])

    def forward(self) -> Tensor:
        """The mean cross entropy of `part` of the batch."""
        rows, columns = self.part
        return loss(self.logits(), self.targets[:rows, :columns])

    def step(self, part: tuple[int, int] | None = None) -> dict[str, float]:
        """One step from an idle device; ms of each section and of all (`total`).

        `part` takes a corner of the batch, (sequences, tokens), to run every kernel on little work.
        """
        self.part = torch.Size(part) if part else self.tokens.shape
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

    Raises:
        Unavailable: a device whose allocator keeps no history.
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
