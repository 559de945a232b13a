"""The published network around one SwiGLU layer: who computes that layer, and how it is trained.

    images [n, 1, 28, 28] → conv 32, ReLU, conv 64, ReLU, max-pool 2, dropout 0.25
                          → flatten [n, 9216] → SwiGLU [n, width] → dropout 0.5
                          → linear [n, 10] → log-softmax

Without the convolutions the flattened image [n, 784] is what the layer sees. Providers are rivals
of `TASK`: from hidden size, width and device to a `Layer`. The same seed draws the same weights for
all. The published kernel is wrong: `notebooks/flawed_layer.py` registers it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax, nll_loss

from fusedlib import reference
from fusedlib.bench.arguments import require_known
from fusedlib.bench.cuda_graphs import side_stream
from fusedlib.ops.mlp import function as functional
from study import trainers
from study.digits import Batch, Split
from study.rivals import Task, get, rival
from study.settings import matmul_settings
from study.trainers import Section

BASELINE = "eager"
FROZEN, WRONG = "frozen", "wrong"
"""Traits: gate and up weights are not trained; wrong on purpose, trained as the study's subject."""
NETWORKS = {"convolutions": 9216, "swiglu only": 784}
"""What the layer sees of an image: its input's width."""
CLASSES = 10
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""IEEE products and convolutions, or bf16 autocast; with the dtype whose roundoff is theirs."""
RECOMPILATIONS = 64  # shapes of batch, precisions and seeds of a process; Dynamo's limit is eight
LEARNING_RATE, DECAY = 1.0, 0.7
TEST_BATCH = 1000


class Layer(nn.Module):
    """h (n, width) of x (n, hidden) by `function(x, w_gate, w_up)`, or by `function(x, w_gate_up)`
    where gate rows lie above up rows in one parameter.
    """

    def __init__(
        self, hidden: int, width: int, device: torch.device | str | None,
        function: Callable[..., Tensor], *, packed: bool = False, trained: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.function = function
        drawn = [nn.Linear(hidden, width, bias=False, device=device).weight for _ in range(2)]
        rows = {name: w.detach() for name, w in zip(("gate", "up"), drawn, strict=True)}
        for name, w in ({"gate_up": torch.cat(list(rows.values()))} if packed else rows).items():
            self.register_parameter(name, nn.Parameter(w, requires_grad=trained))

    def forward(self, x: Tensor) -> Tensor:
        """h (n, width)."""
        return self.function(x, *self._parameters.values())

    def weights(self) -> dict[str, Tensor]:
        """The weights by name, `gate` and `up`."""
        return self._by_name([p.detach() for p in self.parameters()])

    def gradients(self) -> dict[str, Tensor]:
        """Those of their gradients that arrived."""
        return self._by_name([p.grad for p in self.parameters()])

    def _by_name(self, tensors: list[Tensor | None]) -> dict[str, Tensor]:
        if len(self._parameters) == 1:
            tensors = [None, None] if tensors[0] is None else list(tensors[0].chunk(2))
        return {n: t for n, t in zip(("gate", "up"), tensors, strict=True) if t is not None}


TASK = Task[[int, int, str], Layer]("mnist")


class Network(nn.Module):
    """One of `NETWORKS` around the layer of a provider."""

    def __init__(self, kind: str, provider: str, width: int, device: str) -> None:
        super().__init__()
        require_known("network", kind, NETWORKS)
        before: list[nn.Module] = []
        if kind == "convolutions":
            before = [
                nn.Conv2d(1, 32, 3, device=device), nn.ReLU(),
                nn.Conv2d(32, 64, 3, device=device), nn.ReLU(),
                nn.MaxPool2d(2), nn.Dropout(0.25),
            ]  # fmt: skip
        self.before = nn.Sequential(*before, nn.Flatten())
        self.layer = get(TASK, provider).build(NETWORKS[kind], width, device)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, CLASSES, device=device)

    def forward(self, images: Tensor) -> Tensor:
        """Log-probabilities (n, 10), fp32, of images (n, 1, 28, 28)."""
        h = self.layer(self.before(images))
        return log_softmax(self.head(self.dropout(h)).float(), dim=1)


# --- providers -----------------------------------------------------------------------------------

rival(TASK, BASELINE, settings="Plain PyTorch, an operation at a time")(
    partial(Layer, function=reference.swiglu)
)


@rival(TASK, "inductor")
def inductor(hidden: int, width: int, device: str) -> Layer:
    """The layer by torch.compile, default mode, fullgraph=True, dynamic=False."""
    torch._dynamo.config.recompile_limit = RECOMPILATIONS
    return Layer(hidden, width, device, _compiled())


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(reference.swiglu, fullgraph=True, dynamic=False)


@rival(TASK, "liger")
def liger(hidden: int, width: int, device: str) -> Layer:
    """Liger's silu(gate) · up behind two products, as its `LigerSwiGLUMLP` has it."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def function(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        return LigerSiLUMulFunction.apply(linear(x, w_gate), linear(x, w_up))

    return Layer(hidden, width, device, function)


rival(
    TASK, "fused",
    settings="fusedlib.swiglu: our kernels, or plain PyTorch where they do not run",
)(partial(Layer, function=functional.swiglu, packed=True))  # fmt: skip
rival(
    TASK, "frozen", traits=frozenset({FROZEN}),
    settings="Plain PyTorch; gate and up weights stay as they were drawn",
)(partial(Layer, function=reference.swiglu, trained=False))  # fmt: skip


# --- precisions ----------------------------------------------------------------------------------


@contextmanager
def settings(precision: str) -> Iterator[None]:
    """torch as this precision wants it, and convolutions by deterministic algorithms."""
    require_known("precision", precision, PRECISIONS)
    cudnn: Any = torch.backends.cudnn
    before = cudnn.conv.fp32_precision, cudnn.deterministic
    with matmul_settings("highest" if precision == "fp32" else "high", True):
        cudnn.conv.fp32_precision = "ieee" if precision == "fp32" else "tf32"
        cudnn.deterministic = True
        try:
            yield
        finally:
            cudnn.conv.fp32_precision, cudnn.deterministic = before


def autocast(precision: str, device: torch.device | str) -> torch.autocast:
    """bf16 autocast, or none; weights are cast anew each step, in a CUDA graph they must be."""
    return torch.autocast(
        torch.device(device).type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    )


# --- training ------------------------------------------------------------------------------------


class Trainer(trainers.Trainer):
    """A network with Adadelta, as one training step needs it; call it within `settings`."""

    model: Network

    def __init__(
        self, provider: str, precision: str, kind: str, width: int, seed: int, device: str
    ) -> None:
        torch.manual_seed(seed)
        self.precision, self.model = precision, Network(kind, provider, width, device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        # `capturable` costs one small kernel, and lets the same optimizer run in a CUDA graph.
        adadelta = torch.optim.Adadelta(
            trained, lr=LEARNING_RATE, capturable=torch.device(device).type == "cuda"
        )
        super().__init__(self.model, device, adadelta)
        self.schedule = torch.optim.lr_scheduler.StepLR(adadelta, 1, DECAY)
        self.first = {name: w.clone() for name, w in self.model.layer.weights().items()}

    def forward(self) -> Tensor:
        """The loss of the step's batch."""
        with autocast(self.precision, self.device):
            return nll_loss(self.model(self.images), self.labels)

    def step(
        self, images: Tensor, labels: Tensor, section: Section = lambda name: nullcontext()
    ) -> Tensor:
        """One step; the loss as a tensor on the device, of which nobody has waited yet."""
        self.images, self.labels = images, labels
        self.issue(section)
        return self.loss

    def train(
        self, batches: Iterable[Batch], window: int, *, graph: bool = False
    ) -> tuple[Tensor, Tensor]:
        """All batches once: each step's loss, fp32 on the CPU, and the norms of the gradient of the
        layer's gate at the end of each window, none where it has none.

        With `graph` the batches of the first one's size are steps of a CUDA graph, captured anew
        each epoch, for it holds the learning rate.
        """
        self.model.train()
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        captured: GraphStep | None = None
        for at, (images, labels) in enumerate(batches, 1):
            if graph and captured is None:
                captured = GraphStep(self, images, labels)
            fits = captured is not None and captured.takes(labels)
            step = captured if captured is not None and fits else self.step
            losses.append(step(images, labels))
            if at % window == 0 and (gate := self.model.layer.gradients().get("gate")) is not None:
                norms.append(torch.linalg.vector_norm(gate))
        self.schedule.step()
        return torch.stack(losses).cpu(), torch.tensor([norm.item() for norm in norms])

    def change(self) -> dict[str, float]:
        """‖W − W₀‖ / ‖W₀‖ of the layer's gate and up weights since the run began."""
        return {
            name: float((w - self.first[name]).norm() / self.first[name].norm())
            for name, w in self.model.layer.weights().items()
        }

    @torch.no_grad()
    def test(self, split: Split) -> tuple[float, int]:
        """Mean loss on all images of a split, without dropout, and how many answers are right."""
        self.model.eval()
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        correct = torch.zeros((), device=self.device, dtype=torch.int64)
        parts = split.images.split(TEST_BATCH), split.labels.split(TEST_BATCH)
        for images, labels in zip(*parts, strict=True):
            with autocast(self.precision, self.device):
                answers = self.model(images)
            total += nll_loss(answers, labels, reduction="sum")
            correct += (answers.argmax(1) == labels).sum()
        return float(total) / len(split), int(correct)


class GraphStep:
    """The same step captured in a CUDA graph, for batches of one size. The steps that warm it up
    are undone, so that it goes on where the trainer was; each replay writes the gradients anew.
    """

    WARMUP = 3

    def __init__(self, trainer: Trainer, images: Tensor, labels: Tensor) -> None:
        trainer.model.train()
        self._images, self._labels = images.clone(), labels.clone()
        with _undone(trainer):
            side = side_stream(torch.cuda.current_device())
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(self.WARMUP):
                    trainer.step(self._images, self._labels)
            torch.cuda.current_stream().wait_stream(side)
            trainer.clear()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._loss = trainer.step(self._images, self._labels)

    def takes(self, labels: Tensor) -> bool:
        """Whether a batch has the size that was captured."""
        return labels.shape == self._labels.shape

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """One step on this batch; its loss."""
        self._images.copy_(images)
        self._labels.copy_(labels)
        self._graph.replay()
        return self._loss.clone()


@contextmanager
def _undone(trainer: Trainer) -> Iterator[None]:
    """Afterwards a trainer on a CUDA device is as it was before."""
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    optimizer = trainer.optimizer
    assert optimizer is not None
    states = {
        p: {name: tensor.clone() for name, tensor in state.items()}
        for p, state in optimizer.state.items()
    }
    generator = torch.cuda.get_rng_state(trainer.device)
    yield
    with torch.no_grad():
        for p, weight in zip(trainer.model.parameters(), weights, strict=True):
            p.copy_(weight)
        for held, state in optimizer.state.items():
            before = states.get(held)
            for name, tensor in state.items():
                # What the warm-up made began as zeros.
                tensor.copy_(before[name]) if before else tensor.zero_()
    torch.cuda.set_rng_state(generator, trainer.device)
