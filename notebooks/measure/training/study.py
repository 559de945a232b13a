"""Study 13: training runs, whether they repeat, and where an epoch's and a step's time goes.

Before an arm trains or is timed, h and every gradient of its layer are held against float64. The
published kernel is wrong and the subject of the study, so it is trained all the same, as
`measure.recording.results.Recorder.append` has it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache, partial
from itertools import count
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fusedlib import reference
from fusedlib.bench import timing
from fusedlib.bench.arguments import require_known, require_least
from fusedlib.bench.attempt import Unavailable, Wrong
from fusedlib.bench.problem import Operands
from fusedlib.bench.statistics import summarize
from fusedlib.bench.turns import LAUNCHES, Checked, Figures, Turn
from measure import study
from measure.racing import rivals, step_clock
from measure.racing.cases import Case, grid
from measure.racing.operation import Operation
from measure.racing.race import Race
from measure.racing.rivals import Workload
from measure.study import Experiment, Study
from measure.training import batches, mnist, network
from measure.training.batches import Batch, Data
from measure.training.columns import COLUMNS, described
from measure.training.network import BASELINE, FROZEN, NETWORKS, PRECISIONS, TASK, WRONG
from measure.training.trainer import GraphStep, Trainer

BATCH_SIZE = 64
WINDOWS = 67  # an epoch's 938 steps in windows of 14; a subset has as many steps or fewer
# A worker makes its first batches while nobody waits for them.
WARM_BATCHES = 5
# Before a timed epoch: kernels are compiled and libraries set up by then.
WARM_STEPS = 3
SOURCES = ("device", "loader")
Cases = list[dict[str, Any]]


# --- cases ---------------------------------------------------------------------------------------


def setting(train_images: int, test_images: int, width: int, device: str) -> dict[str, Any]:
    """What all cases of a run share: the first so many images, and the layer's width."""
    return {
        "train_images": train_images, "test_images": test_images, "width": width,
        "device": device, "batch_size": BATCH_SIZE,
    }  # fmt: skip


def named(names: Iterable[str]) -> list[tuple[str, str]]:
    """(arm, precision) of texts such as "fused bf16"."""
    arms = []
    for text in names:
        arm, _, precision = text.partition(" ")
        if precision not in PRECISIONS:
            raise ValueError(f"{text!r}: give an arm and one of {', '.join(PRECISIONS)}")
        arms.append((rivals.get(TASK, arm).name, precision))
    return arms


def cases(experiment: str, names: Iterable[str], shared: Case, **fields: Any) -> Cases:
    """A case of each of these arms, with fields of its experiment.

    - "run": training by `network`, `seed`, `epochs`, `source` and `launch`.
    - "epoch": one as a loop makes it, for its time and its test's; the same fields.
    - "repeat": the first `steps` of a run again, and again by a CUDA graph.
    - "pace": where a step's time goes, in turns: `rounds` of so many `steps`.
    """
    for name, choices in (("network", NETWORKS), ("source", SOURCES), ("launch", LAUNCHES)):
        require_known(name, fields.get(name, ()), choices)
    require_least(1, **{name: fields.get(name, 1) for name in ("epochs", "rounds", "steps")})
    if "launch" in fields:  # steps whose losses are kept as means of windows
        steps = -(-shared["train_images"] // BATCH_SIZE)
        fields["window"] = max(1, steps // WINDOWS)
    fields = {"experiment": experiment, "network": "convolutions", **fields, **shared}
    arms = [{"provider": arm, "precision": kind} for arm, kind in named(names)]
    return grid(fields, arm=arms)


def data_cases(shared: Case, number: int) -> Cases:
    """So many batches of training images from each source, with nobody to train."""
    return grid({"experiment": "data", "batches": number, **shared}, source=SOURCES)


# --- the layer before it trains ------------------------------------------------------------------


def available(case: Case) -> None:
    """Whether a case can run here.

    Raises:
        Unavailable: a package, a CUDA GPU or TF32 is missing, or MNIST is not to be had.
    """
    device, precision = case["device"], case["precision"]
    on_cuda = torch.device(device).type == "cuda"
    dtype = "bfloat16" if precision == "bf16" else "float32"
    rivals.get(TASK, case["provider"]).check_available(device, dtype)
    if precision == "tf32" and not (on_cuda and torch.cuda.get_device_capability() >= (8, 0)):
        raise Unavailable("TF32 needs a CUDA GPU of compute capability 8.0 or later")
    if case.get("launch") == "graph" and not on_cuda:
        raise Unavailable("CUDA graphs need a CUDA GPU")
    prepared(case["train_images"], case["test_images"], device)


@lru_cache(maxsize=1)
def prepared(train_images: int, test_images: int, device: str) -> Data:
    """The images on their device, kept for the next case."""
    return batches.prepare(mnist.load(), train_images, test_images, device)


def _data(case: Case) -> Data:
    return prepared(case["train_images"], case["test_images"], case["device"])


@cache
def checked(
    arm: str, precision: str, hidden: int, width: int, batch_size: int, device: str
) -> Figures:
    """Errors of an arm's h and gradients, and which backward ran; call it within `settings`.

    x and dh are normal, weights as a layer draws them. What is asked for is what the network needs:
    h, dx, and both weights' gradients unless they are frozen.

    Raises:
        Wrong: it errs more than `check` allows; an arm that is wrong on purpose says it in `wrong`.
    """
    one, generator = rivals.get(TASK, arm), torch.Generator(device=device).manual_seed(0)
    x, dh = (
        torch.randn(batch_size, n, generator=generator, device=device) for n in (hidden, width)
    )

    def weights_of(layer: network.Layer) -> dict[str, Tensor]:
        return {f"w_{name}": weight for name, weight in layer.named_parameters()}

    def under_autocast(function: Callable[..., Tensor], **operands: Tensor) -> Tensor:
        with network.autocast(precision, device):  # which leaves float64 as it is
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
    output = work.forward()  # kept: without it the node that made it is gone
    backward = output.grad_fn.name() if output.grad_fn else "none"
    figures = {**one.facts(), "layer_backward": backward}
    required = [n for n in truth.drawn.true if not (FROZEN in one.traits and n.startswith("d_w"))]
    try:
        return figures | truth.figures_of(one, work, required)
    except Wrong as refusal:
        if WRONG not in one.traits:
            raise Wrong(str(refusal), figures | refusal.figures) from None
        return figures | refusal.figures | {"wrong": str(refusal)}


def _checked(case: Case) -> Figures:
    hidden = NETWORKS[case["network"]]
    sizes = hidden, case["width"], case["batch_size"], case["device"]
    return checked(case["provider"], case["precision"], *sizes)


# --- experiments ---------------------------------------------------------------------------------


def measure(case: Case) -> Figures:
    """Figures of a case that runs by itself."""
    if case["experiment"] == "data":
        return wait(case)
    available(case)
    with network.settings(case["precision"]):
        figures = _checked(case)
        return figures | (repeat if case["experiment"] == "repeat" else run)(case)


def run(case: Case) -> Figures:
    """Train, test after each epoch, and keep what was seen; lists hold a figure an epoch."""
    data, one = _data(case), _trainer(case)
    if case["experiment"] == "epoch":  # by a trainer that is then thrown away
        warm = _trainer(case)
        chosen = batches.order(len(data.train), 0, 0)[: WARM_STEPS * BATCH_SIZE]
        warm.train(batches.on_device(data.train, chosen, BATCH_SIZE), WARM_STEPS)
        warm.test(data.test)
        one = _trainer(case)
    seen: list[Figures] = []
    losses: list[float] = []
    for number in range(case["epochs"]):
        shown = _source(case, batches.order(len(data.train), case["seed"], number))
        work = partial(one.train, shown, case["window"], graph=case["launch"] == "graph")
        (step_losses, norms), train_s = _clocked(case, work)
        (test_loss, confusion), test_s = _clocked(case, partial(one.test, data.test))
        losses += _means(step_losses, case["window"])
        seen.append(
            {
                "train_s": train_s, "test_s": test_s, "test_loss": test_loss,
                "correct": int(confusion.trace()), **_layer(one, norms),
            }
        )  # fmt: skip
    figures = {f"epoch_{name}": [epoch_figures[name] for epoch_figures in seen] for name in seen[0]}
    figures |= {"losses": losses, "confusion": confusion.flatten().tolist()}
    return figures | _parameters(one)


def repeat(case: Case) -> Figures:
    """Largest difference of the losses between two runs, and between a run and its graph's."""
    first, again = (_losses(case, graph=False) for _ in range(2))
    differences = {
        "repeat_difference": float((first - again).abs().max()), "last_loss": float(first[-1])
    }  # fmt: skip
    if torch.device(case["device"]).type == "cuda":
        graph = _losses(case, graph=True)
        differences["graph_difference"] = float((first - graph).abs().max())
    return differences


def wait(case: Case) -> Figures:
    """ms a batch with nobody to train, each sample the wait for one batch."""
    total = case["batches"] + WARM_BATCHES
    source = _source(case, _drawn(case, total, 0))
    samples = []
    for _ in range(total):
        part = step_clock.Sections(case["device"])
        with part.section("data"):
            next(source)
        samples.append(part.elapsed_ms()["data"])
    return summarize(samples[WARM_BATCHES:])


def _trainer(case: Case) -> Trainer:
    """A fresh one; seed 0 where the case names none."""
    return Trainer(
        case["provider"], case["precision"], case["network"], case["width"], case.get("seed", 0),
        case["device"],
    )  # fmt: skip


def _source(case: Case, chosen: Tensor) -> Iterator[Batch]:
    data = _data(case)
    if case["source"] == "loader":
        return batches.loader(data, chosen, BATCH_SIZE, case["device"])
    return batches.on_device(data.train, chosen, BATCH_SIZE)


def _drawn(case: Case, number: int, seed: int) -> Tensor:
    """Images of so many full batches, from as many epochs as that takes."""
    images = len(_data(case).train)
    epochs = -(-number * BATCH_SIZE // images)
    drawn = [batches.order(images, seed, epoch) for epoch in range(epochs)]
    return torch.cat(drawn)[: number * BATCH_SIZE]


def _clocked(case: Case, work: Callable[[], Any]) -> tuple[Any, float]:
    """What the work gives, and the seconds that a user waits for it."""
    timing.synchronize(case["device"])
    begin = time.perf_counter()
    result = work()
    timing.synchronize(case["device"])
    return result, time.perf_counter() - begin


def _losses(case: Case, *, graph: bool) -> Tensor:
    """Losses of the first full batches of an epoch, from Python or by a CUDA graph."""
    data = _data(case)
    full = min(case["steps"], len(data.train) // BATCH_SIZE)
    chosen = batches.order(len(data.train), 0, 0)[: full * BATCH_SIZE]
    shown = batches.on_device(data.train, chosen, BATCH_SIZE)
    return _trainer(case).train(shown, full, graph=graph)[0]


def _means(losses: Tensor, window: int) -> list[float]:
    """Mean of each whole window of steps; the steps of an unfinished one count to no mean."""
    whole = losses[: len(losses) // window * window].double().reshape(-1, window)
    return [round(float(mean), 6) for mean in whole.mean(1)]


def _layer(one: Trainer, gradient_norms: dict[str, Tensor]) -> dict[str, float | None]:
    """Change of the layer's weights so far, and mean norm of their gradients over the epoch."""
    change = one.change()
    norms = {name: float(seen.mean()) for name, seen in gradient_norms.items()}
    figures: dict[str, float | None] = {f"{name}_change": value for name, value in change.items()}
    return figures | {f"{name}_gradient_norm": norms.get(name) for name in change}


def _parameters(one: Trainer) -> dict[str, int]:
    """All weights, those that received a gradient, and the layer's own."""
    every = list(one.model.parameters())
    return {
        "parameters": sum(p.numel() for p in every),
        "trained_parameters": sum(p.numel() for p in every if p.grad is not None),
        "layer_parameters": sum(p.numel() for p in one.model.layer.parameters()),
    }


# --- a step in turns -----------------------------------------------------------------------------


class Setup:
    """The arms of one precision: each is checked once and has a trainer for each case."""

    def __init__(self, case: Case) -> None:
        self.images = _data(case)

    def check(self, case: Case) -> Checked:
        """Hold an arm's layer against float64."""
        return Checked(_checked(case), turn)


def turn(case: Case) -> Turn:
    """So many steps on images drawn for the turn. Each step's parts are timed by marks inside it,
    and given as means over the steps; with a DataLoader the turn has a worker of its own.
    """
    one, device, steps = _trainer(case), case["device"], case["steps"]
    warm = WARM_BATCHES if case["source"] == "loader" else 0
    graph = None
    if case["launch"] == "graph":
        first = torch.arange(BATCH_SIZE)
        graph = GraphStep(one, *next(batches.on_device(_data(case).train, first, BATCH_SIZE)))
    turns, waiting = count(), list[Iterator[Batch]]()

    def prepare(calls: int) -> None:
        source = _source(case, _drawn(case, steps + warm, next(turns)))
        one.model.train()
        for _ in range(warm):
            one.step(*next(source))
        waiting[:] = [source]

    def run() -> dict[str, float]:
        timing.synchronize(device)
        whole, parts = step_clock.Sections(device), []
        with whole.section("step"):
            for _ in range(steps):
                sections = step_clock.Sections(device)
                with sections.section("data"):
                    batch = next(waiting[0])
                if graph is None:
                    one.step(*batch, sections.section)
                else:
                    with sections.section("replay"):
                        graph(*batch)
                parts.append(sections)
        timing.synchronize(device)
        times = [sections.elapsed_ms() for sections in parts]
        times_ms = {name: sum(t[name] for t in times) / steps for name in times[0]}
        return times_ms | {"total": whole.elapsed_ms()["step"] / steps}

    return Turn(run, prepare)


RACE = Race(
    setup=Setup, available=available, warmup=1, rounds=lambda case: case["rounds"], bursts=False,
    fields=("network", "precision", "width", "batch_size", "train_images", "test_images", "device"),
    settings=lambda case: network.settings(case["precision"]),
)  # fmt: skip


# --- the study -----------------------------------------------------------------------------------


Arms = list[str]
Count = Annotated[int, Field(ge=1, le=100)]
Images = Annotated[int, Field(ge=64, le=60_000)]


class Sizes(study.Sizes):
    """Arms, images and epochs of study 13. An arm is named with its precision, "fused bf16"."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cuda, cpu, or auto for the best there is"""
    whole: Arms = ["eager fp32", "frozen fp32", "published-kernel fp32"]
    """trained for all epochs"""
    once: Arms = ["liger fp32"]
    """trained for one epoch"""
    alone: Arms = ["eager fp32", "frozen fp32", "published-kernel fp32"]
    """trained without convolutions"""
    clocked: Arms = []
    """whole epochs, data on the device"""
    fed: Arms = []
    """epochs and steps with a DataLoader"""
    epochs: Count = 1
    """of `whole` and `alone`"""
    seeds: Count = 1
    """of weights, order of images and dropout"""
    train_images: Images = 320
    """the first so many of 60,000"""
    alone_images: Images = 3200
    """the same without convolutions"""
    test_images: Annotated[int, Field(ge=1, le=10_000)] = 200
    """the first so many of 10,000"""
    width: Annotated[int, Field(ge=64, le=9216)] = 128
    """of the layer after convolutions, a multiple of 64"""
    rounds: Annotated[int, Field(ge=1, le=1000)] = 2
    """turns that each arm's steps are timed in"""
    steps: Annotated[int, Field(ge=1, le=10_000)] = 1
    """a turn, and in which repeated runs are compared"""

    @property
    def where(self) -> str:
        """The device's type; MNIST trains on a CPU where there is an Apple GPU."""
        return super().where.replace("mps", "cpu")

    @property
    def layer_after_convolutions(self) -> dict[str, Any]:
        """What the runs with convolutions share."""
        return setting(self.train_images, self.test_images, self.width, self.where)


def _pace_cases(sizes: Sizes) -> Cases:
    turns = {"rounds": sizes.rounds, "steps": sizes.steps}
    everyone, python = [*sizes.whole, *sizes.once], {"launch": "python", **turns}
    return [
        *cases("pace", everyone, sizes.layer_after_convolutions, source="device", **python),
        *cases("pace", sizes.fed, sizes.layer_after_convolutions, source="loader", **python),
        *cases(
            "pace",
            everyone,
            sizes.layer_after_convolutions,
            source="device",
            launch="graph",
            **turns,
        ),
    ]


def _training_cases(sizes: Sizes) -> Cases:
    layer, everyone = sizes.layer_after_convolutions, [*sizes.whole, *sizes.once]
    narrow = min(sizes.width, 768)  # of 784 pixels
    bare = setting(sizes.alone_images, sizes.test_images, narrow, sizes.where)
    clock: dict[str, Any] = {"seed": 0, "epochs": 1, "launch": "python"}
    listed = cases("epoch", sizes.clocked, layer, source="device", **clock)
    listed += cases("epoch", sizes.fed, layer, source="loader", **clock)
    listed += cases("repeat", everyone, layer, steps=sizes.steps)
    listed += data_cases(layer, 10 * sizes.steps)
    launch = "graph" if sizes.where == "cuda" else "python"
    for seed in range(sizes.seeds):
        each: dict[str, Any] = {"seed": seed, "source": "device", "launch": launch}
        convolved = {"network": "convolutions", **each}
        listed += cases("run", sizes.whole, layer, epochs=sizes.epochs, **convolved)
        listed += cases(
            "run", sizes.alone, bare, network="swiglu only", epochs=sizes.epochs, **each
        )  # fmt: skip
        listed += cases("run", sizes.once, layer, epochs=1, **convolved)
    return listed


STUDY = Study(
    "13_mnist", Sizes,
    [Experiment("steps", RACE, _pace_cases), Experiment("training", measure, _training_cases)],
    COLUMNS, described, shown=("ok", "wrong"), registers="flawed_layer",
)  # fmt: skip
