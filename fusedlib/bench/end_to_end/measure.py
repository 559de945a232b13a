"""Measures study 06's cases, each by its experiment."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from fusedlib.bench import roofline, sweep
from fusedlib.bench.end_to_end import compiling, optimizers, profiled, running
from fusedlib.bench.end_to_end.cases import Case
from fusedlib.bench.end_to_end.turns import Turns
from fusedlib.bench.end_to_end.watching import MIB, Watch
from fusedlib.bench.results import Recorder
from fusedlib.bench.steps import Trainer
from fusedlib.bench.timing import Sections

INFERENCES = 3


class Measure:
    """Measures a case; MLPs that take turns are measured once together.

    Args:
        backend: of torch.compile; another than Inductor for tests.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self._backend, self._turns = backend, Turns()
        self._prepared: set[str] = set()

    def __call__(self, case: Case) -> dict[str, Any]:
        """The row's figures; `status` and `reason` where a case is not tried or wrong."""
        running.check_device(case["device"])
        running.clear(case["device"])
        if case["experiment"] == "ceiling":
            return roofline.measure(case)
        if case["experiment"] != "optimizer" and (reason := running.hopeless(case)):
            return {"status": "oom (predicted)", "reason": reason}
        with running.settings():
            return self._by_experiment(case)

    def _by_experiment(self, case: Case) -> dict[str, Any]:
        if case["experiment"] == "optimizer":
            return optimizers.measure(case)
        if case["experiment"] == "profile":
            return profiled.measure(case)
        if case["experiment"] == "mlp":
            return self._turns.figures(case)
        if case["mode"] == "eager":
            return _eager(case)
        if case["device"] not in self._prepared:
            compiling.prepare(case["device"], self._backend)
            self._prepared.add(case["device"])
        with compiling.cold():
            return _compiled(case, self._backend)


def _eager(case: Case) -> dict[str, Any]:
    trainer = running.trainer(case)
    trainer.call = running.autocast(case, trainer.model)
    for _ in range(case["warmup"]):
        trainer.step()
    figures = _measured(case, trainer)
    return figures | (_inference(case, trainer) if case["inference"] else {})


def _compiled(case: Case, backend: str) -> dict[str, Any]:
    trainer = running.trainer(case)
    call = compiling.compiled(trainer.model, case["mode"], backend)
    trainer.call = running.autocast(case, call)
    found = compiling.settle(trainer.step, case["device"])
    for _ in range(case["warmup"] - 1):  # the step that settled was one
        trainer.step()
    before = compiling.events()
    figures = _measured(case, trainer)
    return figures | found | {"recompiled": compiling.events() - before}


def _measured(case: Case, trainer: Trainer) -> dict[str, Any]:
    """Times, rates and memory of whole steps; what the peak is made of by count."""
    assert trainer.optimizer is not None
    watch, peaks = Watch(trainer), dict[str, float]()
    found = running.collect(partial(watch.step, peaks), case)
    parameters = list(trainer.model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    held = {
        "weights_mib": running.nbytes(parameters), "gradients_mib": running.nbytes(gradients),
        "state_mib": running.nbytes(running.state_of(trainer.optimizer)),
    }  # fmt: skip
    sizes = {name: size / MIB for name, size in held.items()}
    return running.figures(case, found) | peaks | sizes


def _inference(case: Case, trainer: Trainer) -> dict[str, Any]:
    """The model alone without gradients, no loss: what the forward of a training step adds to."""

    @torch.no_grad()
    def infer() -> dict[str, float]:
        sections = Sections(case["device"])
        with sections.section("inference"):
            trainer.call(trainer.tokens)
        return {"inference": sections.elapsed_ms()["inference"]}

    infer()
    samples = [infer()["inference"] for _ in range(INFERENCES)]
    return running.summarize(samples, "inference")


def sweep_cases(
    recorder: Recorder, cases: Iterable[Case], measure: Callable[[Mapping[str, Any]], Any],
    label: Callable[[Mapping[str, Any]], str],
) -> None:  # fmt: skip
    """`sweep.sweep`, and the memory of the last case given back."""
    sweep.sweep(recorder, cases, measure, label)
    if torch.cuda.is_available():
        running.clear("cuda")
