"""Training on MNIST: does the layer learn, do runs repeat, and where an epoch's time goes.

Before anybody trains or is timed, h and every gradient of the layer are held against float64. The
published kernel is wrong and is the subject, so it is trained all the same: its row is "wrong", and
its times are named `published_protocol_*`. A provider is named with its precision, "fused bf16".
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache, partial
from itertools import count
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import flawed_layer  # noqa: F401  (registers the published kernel)
from fusedlib import reference
from fusedlib.bench import timing
from fusedlib.bench.attempt import Unavailable, Wrong
from fusedlib.bench.problem import Operands
from fusedlib.bench.turns import Checked, Figures, Turn
from study import digits, mnist_network, rivals, trainers
from study.cases import Case, Row, device_of, grid
from study.digits import Batch, Data
from study.mnist_network import (
    BASELINE,
    FROZEN,
    NETWORKS,
    PRECISIONS,
    TASK,
    WRONG,
    GraphStep,
    Layer,
    Trainer,
)
from study.operation import Operation
from study.race import each, timed
from study.rivals import Workload
from study.run import sized

QUICK: dict[str, Any] = {
    "device": "auto",  # cuda, cpu, or auto for the best there is
    "whole": ["eager fp32", "frozen fp32", "published-kernel fp32"],  # trained for all epochs
    "once": ["liger fp32"],  # trained for one epoch
    "alone": ["eager fp32", "frozen fp32", "published-kernel fp32"],  # without convolutions
    "clocked": [],  # whose whole epoch is timed, data on the device
    "fed": [],  # whose whole epoch is timed with a DataLoader
    "epochs": 1,  # of `whole` and `alone`
    "seeds": 1,  # of weights, order of images and dropout
    "train_images": 320,  # the first so many of 60,000
    "alone_images": 3200,  # the same without convolutions
    "test_images": 200,  # the first so many of 10,000
    "width": 128,  # of the layer after convolutions, a multiple of 64
    "rounds": 2,  # turns in which steps are timed
    "steps": 1,  # a turn
}
FULL: dict[str, Any] = QUICK | {
    "whole": ["eager fp32", "fused bf16", "frozen fp32", "published-kernel fp32", "liger fp32",
              "fused fp32", "eager bf16"],
    "once": ["liger bf16", "inductor bf16"],
    "alone": ["eager fp32", "fused bf16", "frozen fp32", "published-kernel fp32"],
    "clocked": ["eager fp32", "liger fp32", "fused bf16", "frozen fp32", "published-kernel fp32"],
    "fed": ["liger fp32", "frozen fp32", "published-kernel fp32"],
    "epochs": 4, "seeds": 5, "train_images": 60_000, "alone_images": 60_000,
    "test_images": 10_000, "width": 4096, "rounds": 7, "steps": 20,
}  # fmt: skip
PROFILES = {"quick": QUICK, "full": FULL}
BATCH_SIZE = 64
WINDOWS = 67  # an epoch's 938 steps in windows of 14; a subset has as many steps or fewer
WARM_STEPS = 3  # before a timed epoch: kernels are compiled and libraries set up by then
WIDEST_ALONE = 768  # of 784 pixels, for the published kernel takes no wider layer


def cases(profile: str = "quick", **sizes: Any) -> list[dict[str, Any]]:
    """What is measured: a step by its parts ("pace"), runs of training ("run"), a timed "epoch"."""
    s = sized(PROFILES, profile, sizes)
    device = device_of(s.device).replace("mps", "cpu")
    shared = {"test_images": s.test_images, "device": device, "batch_size": BATCH_SIZE}
    layer = {"train_images": s.train_images, "width": s.width, **shared}
    bare = {"train_images": s.alone_images, "width": min(s.width, WIDEST_ALONE), **shared}
    everyone = [*s.whole, *s.once]
    turns = {"rounds": s.rounds, "steps": s.steps}
    python, loader = {"data_source": "device", "launch": "python"}, {"data_source": "loader"}
    listed = [
        *of("pace", everyone, layer, **python, **turns),
        *of("pace", everyone, layer, data_source="device", launch="graph", **turns),
        *of("epoch", s.clocked, layer, seed=0, epochs=1, **python),
        *of("epoch", s.fed, layer, seed=0, epochs=1, **python | loader),
    ]
    long = python | {"launch": "graph" if device == "cuda" else "python"}
    for seed in range(s.seeds):
        listed += of("run", s.whole, layer, seed=seed, epochs=s.epochs, **long)
        listed += of("run", s.alone, bare, "swiglu only", seed=seed, epochs=s.epochs, **long)
        listed += of("run", s.once, layer, seed=seed, epochs=1, **long)
    return listed


def of(
    experiment: str, names: Iterable[str], shared: Case, network: str = "convolutions",
    **fields: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """A case of each of these providers; losses are kept as means of windows of steps."""
    fields["window"] = max(1, -(-shared["train_images"] // BATCH_SIZE) // WINDOWS)
    fields = {"experiment": experiment, "network": network, **fields, **shared}
    return grid(fields, of=map(named, names))


def named(text: str) -> dict[str, str]:
    """Provider and precision of a text such as "fused bf16"."""
    name, _, precision = text.partition(" ")
    if precision not in PRECISIONS:
        raise ValueError(f"{text!r}: give a provider and one of {', '.join(PRECISIONS)}")
    return {"provider": rivals.get(TASK, name).name, "precision": precision}


# --- the layer before it trains ------------------------------------------------------------------


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here, or where MNIST is not to be had."""
    device = case["device"]
    dtype = "bfloat16" if case["precision"] == "bf16" else "float32"
    rivals.get(TASK, case["provider"]).check_available(device, dtype)
    if case["launch"] == "graph" and torch.device(device).type != "cuda":
        raise Unavailable("CUDA graphs need a CUDA GPU")
    _data(case)


@lru_cache(maxsize=1)
def prepared(train_images: int, test_images: int, device: str) -> Data:
    """The images on their device, kept for the next case."""
    return digits.prepare(digits.load(), train_images, test_images, device)


def _data(case: Case) -> Data:
    return prepared(case["train_images"], case["test_images"], case["device"])


@cache
def checked(
    name: str, precision: str, hidden: int, width: int, batch_size: int, device: str
) -> Figures:
    """Errors of a provider's h and gradients; call it within `settings`.

    x and dh are normal, weights as a layer draws them. What is asked for is what the network needs:
    h, dx, and both weights' gradients unless they are frozen.
    """
    one, generator = rivals.get(TASK, name), torch.Generator(device=device).manual_seed(0)
    x, dh = (
        torch.randn(batch_size, n, generator=generator, device=device) for n in (hidden, width)
    )

    def weights_of(layer: Layer) -> dict[str, Tensor]:
        return {f"w_{name}": weight for name, weight in layer.named_parameters()}

    def under_autocast(function: Callable[..., Tensor], **operands: Tensor) -> Tensor:
        with mnist_network.autocast(precision, device):  # which leaves float64 as it is
            return function(**operands)

    layers = []
    for drawn in (one, rivals.get(TASK, BASELINE)):
        torch.manual_seed(0)
        layers.append(drawn.build(hidden, width, device))
    layer, plain = layers
    inputs = Operands({"x": x.requires_grad_(), **weights_of(plain)}, dh)
    truth = Operation(TASK, inputs, partial(under_autocast, reference.swiglu), "h")
    truth.dtype = PRECISIONS[precision]
    work = Workload(partial(under_autocast, layer, x=x), {"x": x, **weights_of(layer)})
    figures = one.facts()
    required = [n for n in truth.drawn.true if not (FROZEN in one.traits and n.startswith("d_w"))]
    try:
        return figures | truth.figures_of(one, work, required)
    except Wrong as refusal:
        if WRONG not in one.traits:
            raise Wrong(str(refusal), figures | refusal.figures) from None
        return figures | refusal.figures | {"wrong": str(refusal)}


def _checked(case: Case) -> Figures:
    sizes = NETWORKS[case["network"]], case["width"], case["batch_size"], case["device"]
    return checked(case["provider"], case["precision"], *sizes)


# --- what is measured ----------------------------------------------------------------------------


def measure(race: list[Case]) -> list[Row]:
    """A row a case: times of a step's parts in turns, or what a run by itself shows."""
    if race[0]["experiment"] != "pace":
        return each(race, figures)
    return timed(
        race, Setup, warmup=1, rounds=race[0]["rounds"], bursts=False, available=available,
        same=("network", "precision", "width", "batch_size", "train_images", "test_images",
              "device"),
        settings=lambda case: mnist_network.settings(case["precision"]),
    )  # fmt: skip


def figures(case: Case) -> Figures:
    """Figures of a case that runs by itself."""
    available(case)
    with mnist_network.settings(case["precision"]):
        return _checked(case) | trained(case)


def trained(case: Case) -> Figures:
    """Train, test after each epoch, and keep what was seen; lists hold a figure an epoch."""
    data, one = _data(case), _trainer(case)
    if case["experiment"] == "epoch":  # by a trainer that is then thrown away
        chosen = digits.order(len(data.train), 0, 0)[: WARM_STEPS * BATCH_SIZE]
        one.train(digits.on_device(data.train, chosen, BATCH_SIZE), WARM_STEPS)
        one.test(data.test)
        one = _trainer(case)
    seen: list[Figures] = []
    losses: list[float] = []
    for number in range(case["epochs"]):
        chosen = digits.order(len(data.train), case["seed"], number)
        if case["data_source"] == "loader":
            shown = digits.loader(data, chosen, BATCH_SIZE, case["device"])
        else:
            shown = digits.on_device(data.train, chosen, BATCH_SIZE)
        timing.synchronize(case["device"])
        begin = time.perf_counter()
        step_losses, norms = one.train(shown, case["window"], graph=case["launch"] == "graph")
        timing.synchronize(case["device"])
        epoch: Figures = {"train_s": time.perf_counter() - begin}
        epoch["test_loss"], epoch["correct"] = one.test(data.test)
        whole = step_losses[: len(step_losses) // case["window"] * case["window"]]
        means = whole.double().reshape(-1, case["window"]).mean(1)
        losses += [round(float(mean), 6) for mean in means]
        epoch |= {f"{name}_change": change for name, change in one.change().items()}
        epoch["gate_gradient_norm"] = float(norms.mean()) if len(norms) else None
        seen.append(epoch)
    return {f"epoch_{name}": [epoch[name] for epoch in seen] for name in seen[0]} | {
        "losses": losses
    }


def _trainer(case: Case) -> Trainer:
    """A fresh one; of steps that are timed by seed 0."""
    return Trainer(
        case["provider"], case["precision"], case["network"], case["width"], case.get("seed", 0),
        case["device"],
    )  # fmt: skip


def _drawn(case: Case, number: int, seed: int) -> Tensor:
    """Images of so many full batches, from as many epochs as that takes."""
    images = len(_data(case).train)
    epochs = range(-(-number * BATCH_SIZE // images))
    drawn = [digits.order(images, seed, epoch) for epoch in epochs]
    return torch.cat(drawn)[: number * BATCH_SIZE]


class Setup:
    """The providers of one precision: each is checked once and has a trainer for each case."""

    def __init__(self, case: Case) -> None:
        self.images = _data(case)

    def check(self, case: Case) -> Checked:
        """Hold a provider's layer against float64."""
        return Checked(_checked(case), turn)


def turn(case: Case) -> Turn:
    """So many steps on images drawn for the turn, given as means over them. From Python each step's
    parts are timed by marks inside it.
    """
    one, device, train = _trainer(case), case["device"], _data(case).train
    graph = None
    if case["launch"] == "graph":
        graph = GraphStep(one, *next(digits.on_device(train, torch.arange(BATCH_SIZE), BATCH_SIZE)))
    turns, waiting = count(), list[Iterator[Batch]]()

    def prepare(calls: int) -> None:
        one.model.train()
        drawn = _drawn(case, case["steps"], next(turns))
        waiting[:] = [digits.on_device(train, drawn, BATCH_SIZE)]

    def run() -> dict[str, float]:
        timing.synchronize(device)
        whole, parts = trainers.Sections(device), []
        with whole.section("step"):
            for batch in waiting[0]:
                if graph is None:
                    parts.append(trainers.Sections(device))
                    one.step(*batch, parts[-1].section)
                else:
                    graph(*batch)
        timing.synchronize(device)
        times = [sections.elapsed_ms() for sections in parts]
        means = {name: sum(t[name] for t in times) / len(times) for name in (times or [{}])[0]}
        return means | {"total": whole.elapsed_ms()["step"] / case["steps"]}

    return Turn(run, prepare)


# --- rows ----------------------------------------------------------------------------------------

EPOCH = ("correct", "test_loss", "gate_change", "gate_gradient_norm", "train_s")
"""Figures of an epoch; a run has a list of each, `epoch_correct` and so on."""
TRAIN_S, BY_PROTOCOL = "epoch_train_s", "published_protocol_epoch_train_s"
USED = [*(f"epoch_{name}" for name in EPOCH), BY_PROTOCOL, "losses", "epochs", "test_images",
        "median_ms"]  # fmt: skip


def derive(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the figures of a run's last epoch: `epoch`, those in `EPOCH`, `test_error`, and
    `late_loss`, the mean training loss. A wrong kernel's times stand beside the others'.
    """
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *USED])))
    rows = rows.assign(**{TRAIN_S: rows[TRAIN_S].where(rows[TRAIN_S].notna(), rows[BY_PROTOCOL])})
    last = {
        name: [each[-1] if isinstance(each, list) else None for each in rows[f"epoch_{name}"]]
        for name in EPOCH
    }
    lists = zip(rows["losses"], rows["epochs"], strict=True)
    late = [np.mean(v[-len(v) // int(n) :]) if isinstance(v, list) else None for v, n in lists]
    rows = rows.assign(**last, late_loss=late, epoch=rows["epochs"])
    return _shares(rows.astype(dict.fromkeys([*EPOCH, "late_loss", "epoch"], float)).copy())


def _shares(rows: pd.DataFrame) -> pd.DataFrame:
    correct = rows["correct"] / rows["test_images"].astype(float)
    return rows.assign(correct=correct, test_error=1 - correct)


def by_epoch(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each run a row an epoch: `epoch` and the figures of its end."""
    runs = rows[[isinstance(v, list) for v in rows["epoch_correct"]]]
    numbers = [range(1, len(v) + 1) for v in runs["epoch_correct"]]
    runs = runs.assign(**{name: runs[f"epoch_{name}"] for name in EPOCH}, epoch=numbers)
    columns = [*EPOCH, "epoch"]
    return _shares(runs.explode(columns).astype(dict.fromkeys(columns, float)))
