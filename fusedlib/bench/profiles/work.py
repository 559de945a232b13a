"""One training step to be profiled: its sections named, its clock without the profiler."""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fusedlib.bench import timing
from fusedlib.bench.profiles.cases import PRECISIONS
from fusedlib.bench.steps import Trainer
from fusedlib.models.ranges import Tracer, named_ranges, span
from fusedlib.models.transformer import loss

# The parts of a step, and the forward pass alone without anything kept for a backward pass.
SECTIONS = ("forward", "backward", "optimizer")
STEP, INFERENCE = "step", "inference"
WARMUP = 2
# A case's timed steps may take so long; FEWEST are timed however long they take.
BUDGET_MS = 2500.0
FEWEST = 3


def affordable(asked: int, step_ms: float) -> int:
    """Steps to time: as many of the `asked` as `BUDGET_MS` allows, `FEWEST` at least."""
    return min(asked, max(FEWEST, int(BUDGET_MS / step_ms)))


class Work:
    """A model, its data and its optimizer as a case wants them, warm after `warm_up`."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        dtype, autocast = PRECISIONS[case["precision"]]
        self.trainer = Trainer(
            case["model"], "step", case["device"], dtype, case["batch_size"],
            case["context_length"], case["attention"], case["provider"],
        )  # fmt: skip
        self.device = self.trainer.device
        self.eager = case["provider"] == "eager"
        self._autocast = getattr(torch, autocast) if autocast else None

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self._autocast)

    def inference(self) -> None:
        """The forward pass alone, to the logits."""
        with torch.no_grad(), span(INFERENCE), self._precision():
            self.trainer.call(self.trainer.tokens)

    def step(self, tracer: Tracer | None = None) -> None:
        """Forward pass and loss, backward pass, AdamW; nothing waits for the device.

        `tracer`, of `named_ranges`, gives the loss its range.
        """
        self.trainer.model.zero_grad(set_to_none=True)
        with span(STEP):
            with span("forward"), self._precision():
                logits = self.trainer.call(self.trainer.tokens)
                with tracer.within("loss") if tracer else contextlib.nullcontext():
                    value = loss(logits, self.trainer.targets)
            del logits
            with span("backward"):
                value.backward()
            with span("optimizer"):
                assert self.trainer.optimizer is not None
                self.trainer.optimizer.step()

    def named_step(self) -> None:
        """A step with the names of all modules; a compiled model has only those of its sections."""
        if not self.eager:
            self.step()
            return
        with named_ranges(self.trainer.model) as tracer:
            self.step(tracer)

    def warm_up(self) -> float:
        """Run everything once and more, so that what follows is settled; ms of the last step."""
        if self.eager:
            self.inference()
        for _ in range(WARMUP - 1):
            self.step()
        timing.synchronize(self.device)
        [settled] = self.times_ms(1)
        return settled

    def times_ms(self, repetitions: int) -> list[float]:
        """ms of each of so many steps, back to back as a training loop runs them."""
        clock = timing.clock_for(self.device)
        marks = [clock.mark()]
        for _ in range(repetitions):
            self.step()
            marks.append(clock.mark())
        return [clock.elapsed_ms(a, b) for a, b in pairwise(marks)]


def record(device: torch.device, work: Callable[[], object]) -> bytes:
    """The trace of what `work` starts, a JSON document."""
    # Kineto otherwise says on stderr that it starts and stops; read before its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with warnings.catch_warnings():
        # There is one cycle. With `acc_events`, which also silences this, torch makes an object
        # of every event before it returns, and nobody reads them.
        warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")
        with torch.profiler.profile(activities=kinds) as profile:
            work()
            timing.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return path.read_bytes()
