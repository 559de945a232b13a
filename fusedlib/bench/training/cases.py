"""Study 10's cases: training runs, whether they repeat, and where a step's time goes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from fusedlib import functional, reference
from fusedlib.bench import check, results, sources, timing
from fusedlib.bench.training.arms import ARMS, FLAWED, PRECISIONS
from fusedlib.bench.training.network import NETWORKS

STUDY = "10_mnist"
BATCH_SIZE = 64
WINDOWS = 67  # an epoch's 938 steps in windows of 14; a subset has as many steps or fewer
SOURCES = ("device", "loader")
LAUNCHES = ("python", "graph")
Case = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What all cases of a run share.

    Attributes:
        train_images: the first so many of MNIST's training images.
        test_images: the first so many of its test images.
        width: of the layer.
        device: where it trains.
    """

    train_images: int
    test_images: int
    width: int
    device: str

    def fields(self) -> Case:
        """As fields of a case."""
        return {**asdict(self), "batch_size": BATCH_SIZE}


def code(*modules: ModuleType) -> str:
    """Fingerprint of all that measures this study and of the kernels; `modules` are the others."""
    own, shared = sources.modules_of(__package__), (check, functional, reference, timing)
    return results.code_fingerprint(*own, *shared, *modules, *sources.kernel_modules())


def named(names: Iterable[str]) -> list[tuple[str, str]]:
    """(arm, precision) of texts such as "fused bf16".

    Raises:
        ValueError: an unknown arm or precision.
    """
    found = []
    for text in names:
        arm, _, precision = text.partition(" ")
        if arm not in (*ARMS, FLAWED) or precision not in PRECISIONS:
            raise ValueError(
                f"unknown arm {text!r}: give one of {', '.join((*ARMS, FLAWED))} and one of "
                f"{', '.join(PRECISIONS)}, such as 'fused bf16'"
            )
        found.append((arm, precision))
    return found


def runs(
    setting: Setting, names: Sequence[str], *, network: str, seeds: int, epochs: int,
    launch: str = "python",
) -> list[Case]:  # fmt: skip
    """A training run of each arm from each seed; a seed's runs follow one another.

    Raises:
        ValueError: an unknown arm, precision, network or launch; no seed or no epoch.
    """
    if network not in NETWORKS:
        raise ValueError(f"unknown network {network!r}; known: {', '.join(NETWORKS)}")
    if seeds < 1 or epochs < 1:
        raise ValueError(f"seeds and epochs must be at least 1, got {seeds} and {epochs}")
    shared = {"network": network, "epochs": epochs, **_fed(setting, "device", launch)}
    return [
        {"experiment": "run", "arm": arm, "precision": precision, "seed": seed, **shared}
        for seed in range(seeds) for arm, precision in named(names)
    ]  # fmt: skip


def epochs(setting: Setting, names: Sequence[str], *, source: str) -> list[Case]:
    """One epoch of each arm as a loop makes it from Python, for its time and that of its test."""
    shared = {"network": "convolutions", "epochs": 1, **_fed(setting, source, "python")}
    return [
        {"experiment": "epoch", "arm": arm, "precision": precision, "seed": 0, **shared}
        for arm, precision in named(names)
    ]


def _fed(setting: Setting, source: str, launch: str) -> Case:
    """How a run gets its data and launches its steps, and the windows of its losses."""
    if source not in SOURCES or launch not in LAUNCHES:
        raise ValueError(
            f"unknown source {source!r} or launch {launch!r}; known: {', '.join(SOURCES)}; "
            f"{', '.join(LAUNCHES)}"
        )
    steps = -(-setting.train_images // BATCH_SIZE)
    window = max(1, steps // WINDOWS)
    return {"source": source, "launch": launch, "window": window, **setting.fields()}


def repeats(setting: Setting, names: Sequence[str], *, steps: int) -> list[Case]:
    """The first steps of a run again, and again by a CUDA graph: are the losses the same?"""
    return [
        {
            "experiment": "repeat", "network": "convolutions", "arm": arm, "precision": precision,
            "steps": steps, **setting.fields(),
        }
        for arm, precision in named(names)
    ]  # fmt: skip


def data_cases(setting: Setting, *, batches: int) -> list[Case]:
    """Batches of training images from each source, with nobody to train."""
    return [
        {"experiment": "data", "source": source, "batches": batches, **setting.fields()}
        for source in SOURCES
    ]


def paces(
    setting: Setting, names: Sequence[str], *, source: str, launch: str, rounds: int, steps: int
) -> list[Case]:
    """Steps of these arms, timed in turns by precision.

    Raises:
        ValueError: an unknown source or launch; no round or step.
    """
    if rounds < 1 or steps < 1:
        raise ValueError(f"rounds and steps must be at least 1, got {rounds} and {steps}")
    return [
        {
            "experiment": "pace", "network": "convolutions", "arm": arm, "precision": precision,
            "rounds": rounds, "steps": steps, **_fed(setting, source, launch),
        }
        for arm, precision in named(names)
    ]  # fmt: skip


def label(case: Mapping[str, Any]) -> str:
    """A case in a few words."""
    if case["experiment"] == "data":
        return f"data from {case['source']}"
    who = f"{case['arm']} {case['precision']}"
    if case["experiment"] == "epoch":
        return f"{who}, one epoch, data from {case['source']}"
    if case["experiment"] == "run":
        short = "" if case["network"] == "convolutions" else f", {case['network']}"
        return f"{who}, seed {case['seed']}{short}"
    return f"{case['experiment']} {who}"
