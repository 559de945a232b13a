"""Does an arm train as Hugging Face does? Trainings, gradients along one, and two rules that tell.

Losses that are compared where they fall say nothing: there the rounding of one step becomes a fall
some steps earlier or later, in a second run of the same code too. What tells is the same weights,
or the steps before the fall, held against gradients in float64.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedlib.bench import check
from fusedlib.bench.attempt import free_memory
from study import rivals
from study.cases import Case
from study.patched import (
    BASELINE,
    CONFIGS,
    EXACT,
    OTHER_ATTENTION,
    TASK,
    ExactModel,
    LlamaTrainer,
    alone,
)

FIRST_STEPS, SEEDS = 30, 5
"""Of trainings beside exact gradients: steps before the loss falls, and seeds."""
MOMENTS, MOMENT_SEEDS = (0, 20, 36, 50), 2
"""Steps of a Hugging Face training after which gradients are compared, and its seeds."""
DECIMALS = 8
"""Of losses in rows: finer than fp32 itself for any loss above 0.1."""


class Training(LlamaTrainer):
    """An arm in training; weights and data of a seed are the same for every arm. `ids` are those of
    the next step, `done` the number of steps made.
    """

    def __init__(self, case: Case) -> None:
        self.batches, self.done = batches(case), 0
        super().__init__(*alone(case), next(self.batches), optimizer=True)
        assert self.optimizer is not None
        self.optimizer.param_groups[0]["lr"] = case["learning_rate"]

    def step(self) -> Tensor:
        """Forward, backward and AdamW; the loss, a scalar without a graph."""
        self.issue()
        self.ids, self.done = next(self.batches), self.done + 1
        return self.loss


def batches(case: Case) -> Iterator[Tensor]:
    """Endless tokens (batch, context), int64, of the case's seed.

    A token is followed by its successor four times of five, else by any of the first 1024.
    """
    alphabet = min(1024, CONFIGS[case["model"]]["vocab_size"])
    generator = torch.Generator().manual_seed(case["seed"])
    successor = torch.randperm(alphabet, generator=generator)
    size = case["batch_size"], case["context_length"]
    while True:
        ids = torch.randint(alphabet, size, generator=generator)
        follows = torch.rand(size, generator=generator) < 0.8
        for at in range(1, size[1]):
            ids[:, at] = torch.where(follows[:, at], successor[ids[:, at - 1]], ids[:, at])
        yield ids.to(case["device"])


def train(case: Case) -> dict[str, Any]:
    """`losses` of the first `steps` of a training."""
    training = Training(case)
    losses = [training.step() for _ in range(case["steps"])]
    return {"losses": [round(loss.item(), DECIMALS) for loss in losses]}


class Trajectory:
    """Arms at the same weights: those of a Hugging Face training after some steps.

    It keeps one training, and what is true at the weights it has come to, so cases should come in
    the order of their seeds and steps.
    """

    def __init__(self) -> None:
        self.shared: Case = {}
        self.training: Training | None = None
        self.exact: ExactModel | None = None
        self.baseline: dict[str, float] = {}

    def forget(self) -> None:
        """Give back the training and what is known of it."""
        self.shared, self.training, self.exact = {}, None, None

    def measure(self, case: Case) -> dict[str, Any]:
        """Errors of an arm's gradients after `step` steps, on the tokens of the next one: relative,
        in norm, against float64, None where no gradient arrived. `usual_errors` are the larger of
        Hugging Face's own and its own with another attention.
        """
        free_memory()
        exact = self._at(case)
        errors = exact.errors_of(rivals.get(TASK, case["provider"]))
        norms = {name: error.norm for name, error in errors.items()}
        return {
            "parameters": exact.names, "gradient_errors": [norms.get(n) for n in exact.names],
            "usual_errors": [self.baseline[n] for n in exact.names],
        }  # fmt: skip

    def _at(self, case: Case) -> ExactModel:
        """What is true at the weights of a case."""
        shared = {name: case[name] for name in case if name not in ("provider", "step")}
        training = self.training
        if training is None or shared != self.shared or training.done > case["step"]:
            self.forget()
            self.training = training = Training({**shared, "provider": BASELINE})
            self.shared = shared
        if self.exact is not None and training.done == case["step"]:
            return self.exact
        self.exact = None  # its gradients in float64 go before others come
        while training.done < case["step"]:
            training.step()
        self.exact = exact = ExactModel(training.model, training.ids)
        other = exact.errors_of(rivals.get(TASK, OTHER_ATTENTION))
        self.baseline = {n: max(exact.baseline[n].norm, other[n].norm) for n in exact.names}
        return exact


def wrong_gradients(row: Mapping[str, Any]) -> list[str]:
    """The first rule: parameters whose gradient errs more than rounding explains, at given weights.

    Allowed are `check.TIMES_EAGER` times the usual error and `check.FLOOR_ROUNDOFFS` roundoffs of
    the row's dtype. A gradient that is missing or not finite is wrong; where one was not finite,
    `gradient_errors` is no list.
    """
    dtype = getattr(torch, row["dtype"])
    names, baseline = row["parameters"], row["usual_errors"]
    errors = row["gradient_errors"]
    if not isinstance(errors, list):
        return list(names)
    return [
        name for name, error, own in zip(names, errors, baseline, strict=True)
        if error is None or not error <= check.allowed(own, dtype)
    ]  # fmt: skip


def loss_distances(rows: Iterable[Mapping[str, Any]]) -> tuple[dict[str, float], float]:
    """The second rule: by arm, how far its loss is off that of exact gradients, and how far it may
    be: `check.TIMES_EAGER` times Hugging Face's and `check.FLOOR_ROUNDOFFS` roundoffs of fp32,
    which losses have in every dtype of weights. NaN is too far.

    A distance is the root mean square over all steps of the seeds that every arm has. Where exact
    gradients, Hugging Face or such a seed are lacking, there is none.
    """
    runs: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        runs.setdefault(row["provider"], {})[row["seed"]] = row["losses"]
    seeds = set.intersection(*map(set, runs.values())) if runs else set()
    if not seeds or not {EXACT, BASELINE} <= set(runs):
        return {}, float("nan")
    losses = {arm: np.array([by_seed[s] for s in seeds], float) for arm, by_seed in runs.items()}
    exact = losses.pop(EXACT)
    off = {arm: float(np.sqrt(np.mean((own - exact) ** 2))) for arm, own in losses.items()}
    floor = check.FLOOR_ROUNDOFFS * 2.0**-24 * float(np.mean(exact))
    return off, check.TIMES_EAGER * off[BASELINE] + floor
