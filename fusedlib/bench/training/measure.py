"""Measures study 10's runs: checks the layer, trains, tests each epoch, and keeps what it saw."""

import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import machine, timing
from fusedlib.bench.progress import Progress, progress
from fusedlib.bench.results import Recorder, Unavailable
from fusedlib.bench.statistics import summarize
from fusedlib.bench.sweep import outcome
from fusedlib.bench.training import arms, batches, layer_check, mnist
from fusedlib.bench.training.arms import Arm
from fusedlib.bench.training.cases import BATCH_SIZE, Case, label
from fusedlib.bench.training.network import NETWORKS
from fusedlib.bench.training.trainer import Epoch, Trainer, Verdict

# A worker makes its first batches while nobody waits for them.
WARM_BATCHES = 5
# Before a timed epoch: kernels are compiled and libraries set up by then.
WARM_STEPS = 3
PROTOCOL = "published_protocol_"
_Row = Mapping[str, Any]


class Told:
    """Says how a run goes: its epochs are the bar's units, loss and accuracy its text."""

    EVERY_S = 1.0

    def __init__(self, shown: Progress, case: Case) -> None:
        self._shown, self._label, self._left = shown, label(case), case.get("epochs", 1)
        self._last = time.monotonic()
        shown.case(self._label)

    def loss(self, value: Tensor) -> None:
        """The loss of a step; waits for the device, so once a second at most."""
        if time.monotonic() - self._last >= self.EVERY_S:
            self._shown.case(f"{self._label}: loss {value.item():.3f}")
            self._last = time.monotonic()

    def epoch(self, epoch: Epoch, verdict: Verdict, images: int) -> None:
        """An epoch has ended."""
        share = 100 * verdict.correct / images
        self._shown.case(f"{self._label}: loss {epoch.losses[-50:].mean():.3f}, {share:.1f} %")
        self._shown.done()
        self._left -= 1

    def end(self) -> None:
        """The case has ended, as it may be before its epochs."""
        for _ in range(self._left):
            self._shown.done()


class Measure:
    """Measures a case; `others` are the arms that the notebook hands over.

    MNIST is loaded at the first case that needs it. `data` replaces it in tests.
    """

    def __init__(self, others: Iterable[Arm] = (), data: mnist.Arrays | None = None) -> None:
        self._others = {arm.name: arm for arm in others}
        self._arrays = data
        self._data: dict[tuple[Any, ...], batches.Data] = {}
        self._checked: dict[tuple[Any, ...], dict[str, Any]] = {}

    def __call__(self, case: Case, told: Told | None = None) -> dict[str, Any]:
        """The row's figures."""
        if case["experiment"] == "data":
            return self._data_alone(case)
        arm = self.available(case)
        with arms.settings(case["precision"]):
            figures = self.checked(arm, case)
            if figures.get("status") == "wrong" and not arm.wrong:
                return figures
            if case["experiment"] == "repeat":
                return figures | self._repeat(case, arm)
            return figures | _protocol(self._run(case, arm, told), arm)

    def available(self, case: Case) -> Arm:
        """The case's arm.

        Raises:
            Unavailable: it cannot run here, or MNIST is not to be had.
        """
        arm = arms.get(case["arm"], self._others)
        arm.check_available(case["device"], case["precision"])
        if case.get("launch") == "graph" and torch.device(case["device"]).type != "cuda":
            raise Unavailable("CUDA graphs need a CUDA GPU")
        self.prepared(case)
        return arm

    def prepared(self, case: Case) -> batches.Data:
        """The case's images on its device, kept for the next case."""
        key = (case["train_images"], case["test_images"], case["device"])
        if key not in self._data:
            if self._arrays is None:
                self._arrays = mnist.load()
            self._data = {key: batches.prepare(self._arrays, *key)}
        return self._data[key]

    def checked(self, arm: Arm, case: Case) -> dict[str, Any]:
        """What the reference says of this arm's layer at this size, found out once."""
        sizes = NETWORKS[case["network"]], case["width"], BATCH_SIZE, case["device"]
        key = (arm.name, case["precision"], *sizes)
        if key not in self._checked:
            self._checked[key] = layer_check.verdict(arm, case["precision"], *sizes)
        return {"version": arm.version(), **self._checked[key]}

    def trainer(self, arm: Arm, case: Case) -> Trainer:
        """A fresh one; seed 0 where the case names none."""
        return Trainer(
            arm, case["precision"], case["network"], case["width"], case.get("seed", 0),
            case["device"],
        )  # fmt: skip

    # --- the experiments -------------------------------------------------------------------------

    def _run(self, case: Case, arm: Arm, told: Told | None) -> dict[str, Any]:
        if case["experiment"] == "epoch":
            self._warm_up(case, arm)
        data, trainer = self.prepared(case), self.trainer(arm, case)
        seen: list[dict[str, Any]] = []
        losses: list[float] = []
        for number in range(case["epochs"]):
            chosen = batches.order(len(data.train), case["seed"], number)
            shown = (
                batches.loader(data, chosen, BATCH_SIZE, case["device"])
                if case["source"] == "loader"
                else batches.on_device(data.train, chosen, BATCH_SIZE)
            )
            work = partial(
                trainer.train, shown, case["window"], told.loss if told else None,
                graph=case["launch"] == "graph",
            )  # fmt: skip
            epoch, train_s = _clocked(case, work)
            verdict, test_s = _clocked(case, partial(trainer.test, data.test))
            losses += _means(epoch.losses, case["window"])
            seen.append(
                {
                    "train_s": train_s, "test_s": test_s, "test_loss": verdict.loss,
                    "correct": verdict.correct, **_layer(trainer, epoch),
                }
            )  # fmt: skip
            if told:
                told.epoch(epoch, verdict, len(data.test))
        figures = {f"epoch_{name}": [one[name] for one in seen] for name in seen[0]}
        counts = _parameters(trainer)
        return {
            **figures, "losses": losses, "confusion": verdict.confusion.flatten().tolist(), **counts
        }  # fmt: skip

    def _warm_up(self, case: Case, arm: Arm) -> None:
        """A few steps and a test by a trainer that is then thrown away."""
        data, trainer = self.prepared(case), self.trainer(arm, case)
        chosen = batches.order(len(data.train), 0, 0)[: WARM_STEPS * BATCH_SIZE]
        trainer.train(batches.on_device(data.train, chosen, BATCH_SIZE), WARM_STEPS)
        trainer.test(data.test)

    def _repeat(self, case: Case, arm: Arm) -> dict[str, Any]:
        """Largest difference of the losses between two runs, and between a run and its graph's."""
        plain = [self._losses(case, arm, graph=False) for _ in range(2)]
        found = {
            "repeat_difference": float((plain[0] - plain[1]).abs().max()),
            "last_loss": float(plain[0][-1]),
        }
        if torch.device(case["device"]).type == "cuda":
            graph = self._losses(case, arm, graph=True)
            found["graph_difference"] = float((plain[0] - graph).abs().max())
        return found

    def _losses(self, case: Case, arm: Arm, *, graph: bool) -> Tensor:
        """Losses of the first full batches of an epoch, from Python or by a CUDA graph."""
        data, trainer = self.prepared(case), self.trainer(arm, case)
        full = min(case["steps"], len(data.train) // BATCH_SIZE)
        chosen = batches.order(len(data.train), 0, 0)[: full * BATCH_SIZE]
        shown = batches.on_device(data.train, chosen, BATCH_SIZE)
        return trainer.train(shown, full, graph=graph).losses

    def _data_alone(self, case: Case) -> dict[str, Any]:
        """ms a batch, each sample the wait for one batch."""
        data, device = self.prepared(case), case["device"]
        count = (case["batches"] + WARM_BATCHES) * BATCH_SIZE
        chosen = torch.cat(
            [batches.order(len(data.train), 0, n) for n in range(-(-count // len(data.train)))]
        )[:count]
        source = (
            batches.loader(data, chosen, BATCH_SIZE, device) if case["source"] == "loader"
            else batches.on_device(data.train, chosen, BATCH_SIZE)
        )  # fmt: skip
        samples = []
        for _ in range(case["batches"] + WARM_BATCHES):
            part = timing.Sections(device)
            with part.section("data"):
                next(source)
            samples.append(part.elapsed_ms()["data"])
        return summarize(samples[WARM_BATCHES:])


def sweep(recorder: Recorder, cases: Iterable[Case], measure: Measure) -> None:
    """Measure the cases that have no row yet, each recorded as soon as it is done.

    As `fusedlib.bench.sweep.sweep`, with a bar that counts epochs and shows loss and accuracy.
    """
    todo = recorder.missing(cases)
    with progress(recorder.study, sum(case.get("epochs", 1) for case in todo)) as shown:
        for case in todo:
            told = Told(shown, case)
            before = machine.conditions()
            figures, status, reason = outcome(partial(measure, told=told), case)
            state = machine.before_and_after(before, machine.conditions())
            recorder.append(case, {**figures, **state}, status=status, reason=reason)
            told.end()
    print(recorder.summary())


def _protocol(figures: dict[str, Any], arm: Arm) -> dict[str, Any]:
    """Times of a wrong arm under names of their own: they compare nothing."""
    if not arm.wrong:
        return figures
    return {(PROTOCOL if n.endswith(("_s", "_ms")) else "") + n: v for n, v in figures.items()}


def _clocked(case: Case, work: Any) -> tuple[Any, float]:
    """What the work gives, and the seconds that a user waits for it."""
    timing.synchronize(case["device"])
    begin = time.perf_counter()
    found = work()
    timing.synchronize(case["device"])
    return found, time.perf_counter() - begin


def _means(losses: Tensor, window: int) -> list[float]:
    """Mean of each whole window of steps; the steps of an unfinished one count to no mean."""
    whole = losses[: len(losses) // window * window].double().reshape(-1, window)
    return [round(float(mean), 6) for mean in whole.mean(1)]


def _layer(trainer: Trainer, epoch: Epoch) -> dict[str, float | None]:
    """Change of the layer's weights so far, and mean norm of their gradients over the epoch."""
    change = trainer.change()
    norms = {name: float(seen.mean()) for name, seen in epoch.gradient_norms.items()}
    found: dict[str, float | None] = {f"{name}_change": value for name, value in change.items()}
    return found | {f"{name}_gradient_norm": norms.get(name) for name in change}


def _parameters(trainer: Trainer) -> dict[str, int]:
    """All weights, those that received a gradient, and the layer's own."""
    every = list(trainer.model.parameters())
    return {
        "parameters": sum(p.numel() for p in every),
        "trained_parameters": sum(p.numel() for p in every if p.grad is not None),
        "layer_parameters": sum(p.numel() for p in trainer.model.layer.parameters()),
    }
