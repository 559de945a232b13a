"""The one clock of whole training steps: settled, back to back, the host's pace beside them.

A step of many short kernels may wait for the host, whose pace differs from minute to minute. So a
row says how long it takes until a step is issued.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fusedlib.bench import timing
from fusedlib.bench.statistics import summarize
from fusedlib.bench.turns import Turn
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
