"""One model whose MLPs are computed by several providers in turns, step by step.

All share weights and memory (see `fusedlib.models.mlps`), so that drift hits all alike and the
model stands in memory once. The optimizer's moments are per parameter: of the weights that only one
layout has, each layout's own.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from fusedlib.bench import timing
from fusedlib.bench.end_to_end import compiling, gate, running
from fusedlib.bench.end_to_end.watching import Watch
from fusedlib.bench.results import Unavailable
from fusedlib.bench.statistics import paired_ratio
from fusedlib.bench.steps import Trainer
from fusedlib.bench.sweep import outcome
from fusedlib.models import mlps

BASELINE, COMPILED = "eager", "inductor"
# Rounds: the range of six pairs covers their median at 97 %, that of five at 94 %; and ratios near
# one want more samples than a time does.
PAIRS, LONGER = 6, 4


@dataclass
class _Arm:
    """A provider that takes its turns: its MLPs, what it showed so far, and why it ended."""

    modules: list[nn.Module]
    figures: dict[str, Any]
    samples: running.Samples = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    recompiled: int = 0


class Turns:
    """Measures a model's providers together, and gives each case its own figures."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._found: dict[str, dict[str, Any]] = {}

    def figures(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Figures of the case's provider, with `status` and `reason` where it has no times."""
        key = tuple((k, v) for k, v in case.items() if k != "mlp")
        if key != self._key:
            together, status, reason = outcome(_session, case)
            if status != "ok":
                lost = {"status": status, "reason": reason}
                together = dict.fromkeys(case["together"].split(","), lost)
            self._key, self._found = key, together
        found = dict(self._found[case["mlp"]])
        if found.get("status") == "unavailable":
            raise Unavailable(found["reason"])
        return found


def _session(case: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures of all providers by name."""
    names = case["together"].split(",")
    with compiling.cold() if COMPILED in names else nullcontext():
        checked = {name: _attempt(_checked, {**case, "mlp": name}) for name in names}
        trainer = running.trainer(case)
        # Made in the list's order: fused's packed rows are what the others' weights become views of
        arms = {
            name: _Arm(mlps.make(trainer.model, name), figures)
            for name, figures in checked.items() if "status" not in figures
        }  # fmt: skip
        told = {name: figures for name, figures in checked.items() if name not in arms}
        trainer.optimizer = _shared_optimizer(trainer, arms)
        trainer.call = running.autocast(case, trainer.model)
        for name, arm in list(arms.items()):
            found = _attempt(partial(_warm, trainer, arm), {**case, "mlp": name})
            if "status" in found:
                told[name] = found
                del arms[name]
                running.clear(case["device"])
        _rounds(trainer, arms, case)
    return told | {name: _figures(case, name, arms) for name in arms}


def _attempt(work: Any, case: Mapping[str, Any]) -> dict[str, Any]:
    """What the work gives, or its status and reason."""
    figures, status, reason = outcome(work, case)
    return figures if status == "ok" else {**figures, "status": status, "reason": reason}


def _checked(case: Mapping[str, Any]) -> dict[str, Any]:
    try:
        mlps.check_available(case["mlp"], case["device"])
    except mlps.ProviderUnavailableError as error:
        raise Unavailable(str(error)) from error
    return gate.verdict(dict(case))


def _shared_optimizer(trainer: Trainer, arms: Mapping[str, _Arm]) -> torch.optim.AdamW:
    every = chain(
        trainer.model.parameters(),
        *(module.parameters() for arm in arms.values() for module in arm.modules),
    )
    return running.adamw(list(dict.fromkeys(every)))


def _warm(trainer: Trainer, arm: _Arm, case: Mapping[str, Any]) -> dict[str, Any]:
    _enter(trainer, arm)
    try:
        if case["mlp"] == COMPILED:  # the gate has compiled most of it, so its time says nothing
            compiling.settle(trainer.step, case["device"])
        for _ in range(case["warmup"]):
            trainer.step()
    finally:
        trainer.model.zero_grad(set_to_none=True)
    return {}


def _enter(trainer: Trainer, arm: _Arm) -> None:
    """Gradients of whoever went before are dropped while their MLPs are still in the model."""
    trainer.model.zero_grad(set_to_none=True)
    mlps.place(trainer.model, arm.modules)


def _rounds(trainer: Trainer, arms: dict[str, _Arm], case: Mapping[str, Any]) -> None:
    """A step each in turns, until seconds and steps are enough."""
    budget = case["seconds"] * len(arms) * LONGER
    least = max(case["least"], PAIRS) if len(arms) > 1 else case["least"]
    clock = timing.clock_for("cpu")
    begin = clock.mark()
    watch = Watch(trainer)
    for count in range(case["most"]):
        for arm in arms.values():
            _turn(trainer, arm, watch)
        if count + 1 >= least and clock.elapsed_ms(begin, clock.mark()) > 1e3 * budget:
            return


def _turn(trainer: Trainer, arm: _Arm, watch: Watch) -> None:
    _enter(trainer, arm)
    before = compiling.events()
    running.keep(arm.samples, watch.step(arm.peaks))
    arm.recompiled += compiling.events() - before
    trainer.model.zero_grad(set_to_none=True)


def _figures(case: Mapping[str, Any], name: str, arms: Mapping[str, _Arm]) -> dict[str, Any]:
    """Times, peak, and the baseline's time over this provider's from the pairs."""
    arm = arms[name]
    row = {**arm.figures, **running.figures(case, arm.samples), **arm.peaks}
    row["recompiled"] = arm.recompiled
    if BASELINE in arms:
        for part in ("forward", "backward", "both", "step"):
            ratio = paired_ratio(arms[BASELINE].samples[part], arm.samples[part])
            row |= {
                f"{part}_speedup": ratio.value, f"{part}_speedup_low": ratio.low,
                f"{part}_speedup_high": ratio.high,
            }  # fmt: skip
    return row
