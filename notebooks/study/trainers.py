"""Training steps, and the one clock of them: settled, back to back, the host's pace beside them.

A step of many short kernels may wait for the host, whose pace differs from minute to minute. So a
row says how long it takes until a step is issued.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fusedlib.bench import timing
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.statistics import summarize
from fusedlib.bench.turns import Turn
from study.allocator import Watch, watching
from study.cases import Case
from study.fits import require_memory
from study.models.transformer import Transformer, TransformerConfig, config, loss
from study.settings import MIB

AGREE = 0.02  # two blocks show the same pace when their medians differ by no more
# Share of a step for which kernels run: 33 recorded steps lie below 0.71 or above 0.87.
CARD_BUSY = 0.8
DISCARDED = 3
BLOCKS, SETTLING = 3, 12  # at least for good; before at most, until two in a row agree
VERY_SLOW_MS = 1000.0  # alone in its block
Section = Callable[[str], AbstractContextManager[object]]


class Sections:
    """Times the parts of one step by marks inside that step, never by subtracting averages."""

    def __init__(self, device: torch.device | str) -> None:
        self._clock = timing.clock_for(device)
        self._marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time what is done inside under `name`."""
        start = self._clock.mark()
        yield
        self._marks.append((name, start, self._clock.mark()))

    def elapsed_ms(self) -> dict[str, float]:
        """ms of each section, and `total` from the first one's start to the last one's end."""
        times = {name: self._clock.elapsed_ms(a, b) for name, a, b in self._marks}
        times["total"] = self._clock.elapsed_ms(self._marks[0][1], self._marks[-1][2])
        return times


class Trainer:
    """A model and its training step: a subclass says what its loss is, and what else it does.
    `loss` is that of the last step, without its graph.
    """

    goes_backward = True

    def __init__(
        self, model: nn.Module, device: torch.device | str,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:  # fmt: skip
        self.model, self.device, self.optimizer = model, torch.device(device), optimizer
        self.loss: Tensor

    def forward(self) -> Tensor:
        """The loss, with its graph."""
        raise NotImplementedError

    def around_forward(self) -> AbstractContextManager[object]:
        """What a forward runs in; its end belongs to no section."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Gradients of all parameters."""
        loss.backward()

    def update(self) -> None:
        """The optimizer's step."""
        assert self.optimizer is not None
        self.optimizer.step()

    def clear(self) -> None:
        """Drop the gradients."""
        self.model.zero_grad(set_to_none=True)

    def issue(self, section: Section | None = None) -> Sections:
        """One step, not waited for, with marks at the borders of its sections, or a `section`
        around each.
        """
        sections = Sections(self.device)
        around = section or sections.section
        self.clear()
        with self.around_forward(), around("forward"):
            loss = self.forward()
        if self.goes_backward:
            with around("backward"):
                self.backward(loss)
        if self.optimizer is not None:
            with around("optimizer"):
                self.update()
        self.loss = loss.detach()
        return sections


def measure(trainer: Trainer, *, seconds: float, steps: int) -> dict[str, Any]:
    """Time a trainer's steps: first until they are settled, then for so many seconds at least and
    three blocks of so many steps, of one where it is slow.

    A row has each section, `both` forward and backward, and `step`, from a step's begin to the next
    one's; `issue_ms`, until the host has issued a step from an idle device, with its waits for the
    device; and `settled`, whether two blocks agreed before these samples.
    """
    for done in range(1, DISCARDED + 1):
        pace = _Block(trainer, 1).step_ms
        if done > 1 and pace > VERY_SLOW_MS:  # the first one loads and compiles
            break
    count = 1 if pace > VERY_SLOW_MS else 1 + steps
    medians = [_Block(trainer, count).step_ms]
    while not (settled := _agree(medians)) and len(medians) < SETTLING:
        medians.append(_Block(trainer, count).step_ms)
    timed: list[_Block] = []
    begin = time.perf_counter()
    while len(timed) < BLOCKS or time.perf_counter() - begin < seconds:
        timed.append(_Block(trainer, count))
    row: dict[str, Any] = {}
    for name in timed[0].samples_ms:
        row |= summarize([ms for block in timed for ms in block.samples_ms[name]], name)
    return row | {"issue_ms": median(block.issue_ms for block in timed), "settled": settled}


def turn(
    trainer: Trainer, prepare: Callable[[], object] = lambda: None, *, steps: int
) -> Turn:  # fmt: skip
    """A rival's turns in a race (`bursts=False`): each a short block of the same clock, of which
    the median is a sample. `prepare` is called before each turn, outside the clock, and puts the
    rival's parts into the model.
    """
    figures: dict[str, Any] = {}
    issued: list[float] = []
    paces: list[float] = []

    def run() -> dict[str, float]:
        is_quick = bool(paces) and paces[-1] <= VERY_SLOW_MS
        block = _Block(trainer, 1 + steps if is_quick else 1)
        paces.append(block.step_ms)
        issued.append(block.issue_ms)
        figures["issue_ms"] = median(issued)
        medians = {name: median(samples) for name, samples in block.samples_ms.items()}
        return medians | {"total": block.step_ms}

    return Turn(run, lambda calls: prepare(), trainer.clear, figures, trainer.issue)


def pace_setter(kernels_ms: float, step_ms: float) -> str:
    """Who sets the pace of a step, "card" or "host": by how much of it kernels run. The time to
    issue a step says less: it was 0.88 to 0.97 of steps of which kernels filled a fifth.
    """
    return "card" if kernels_ms > CARD_BUSY * step_ms else "host"


def peaks(trainer: Trainer) -> dict[str, float]:
    """The allocator's peaks in MiB over a step; nothing is known elsewhere than on CUDA.

    `peak_mib` is the whole step's, `both_peak_mib` that before the optimizer, whose temporaries can
    be larger than all activations; `held_mib` is the latter over what there was before the step.
    """
    if trainer.device.type != "cuda":
        return {}
    before_optimizer: list[int] = []
    hook = trainer.optimizer and trainer.optimizer.register_step_pre_hook(
        lambda *_: before_optimizer.append(torch.cuda.max_memory_allocated())
    )
    trainer.clear()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    trainer.issue()
    if hook:
        hook.remove()
    peak = torch.cuda.max_memory_allocated()
    both = before_optimizer[0] if before_optimizer else peak
    sizes = {"both_peak_mib": both, "peak_mib": peak, "held_mib": both - held}
    return {name: size / MIB for name, size in sizes.items()}


class _Block:
    """Some steps back to back after an idle device, waited for once.

    The first one's launches lie bare, and later ones may wait in a full queue: so `issue_ms` is the
    first one's, and the samples are the others' unless it is alone.
    """

    def __init__(self, trainer: Trainer, steps: int) -> None:
        on_device = timing.clock_for(trainer.device)
        timing.synchronize(trainer.device)
        begin = time.perf_counter()
        marks, parts = [on_device.mark()], [trainer.issue()]
        self.issue_ms = (time.perf_counter() - begin) * 1e3
        marks.append(on_device.mark())
        for _ in range(steps - 1):
            parts.append(trainer.issue())
            marks.append(on_device.mark())
        timing.synchronize(trainer.device)
        self.samples_ms: dict[str, list[float]] = {}
        spans = list(zip(parts, pairwise(marks), strict=True))
        for sections, (start, end) in spans[1:] or spans:
            times = sections.elapsed_ms()
            times.pop("total")
            times["step"] = on_device.elapsed_ms(start, end)
            if "backward" in times:
                times["both"] = times["forward"] + times["backward"]
            for name, ms in times.items():
                self.samples_ms.setdefault(name, []).append(ms)
        self.step_ms = median(self.samples_ms["step"])


def _agree(medians: list[float]) -> bool:
    return len(medians) > 1 and abs(medians[-1] / medians[-2] - 1) <= AGREE


# --- steps of a Transformer -----------------------------------------------------------------------

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


class TransformerTrainer(Trainer):
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
        timing.synchronize(self.device)
        return self.issue().elapsed_ms()


# --- its memory ----------------------------------------------------------------------------------


def gradients_of(trainer: Trainer) -> list[Tensor]:
    """The gradients that exist now."""
    return [p.grad for p in trainer.model.parameters() if p.grad is not None]


def moments_of(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """The optimizer's moments that exist now; numbers of steps are none."""
    held = optimizer.state.values() if optimizer else ()
    return [t for state in held for t in state.values() if isinstance(t, Tensor) and t.dim()]


def watched_steps(
    make: Callable[[], Trainer], device: torch.device, count: int
) -> tuple[Trainer, Watch]:
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
    trainer: Trainer, watch: Watch, number: int, name: str
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
