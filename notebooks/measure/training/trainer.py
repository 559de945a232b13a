"""One training run: a network around an arm's layer, Adadelta, and what is seen on the way."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from measure.racing import step_clock
from measure.racing.step_clock import Section
from measure.training.batches import Batch, Split
from measure.training.network import CLASSES, Network, autocast

LEARNING_RATE, DECAY = 1.0, 0.7
TEST_BATCH = 1000


class Trainer(step_clock.Trainer):
    """A network with everything one training step needs; call it within `network.settings`.

    Args:
        arm: who computes the layer.
        seed: of weights and dropout.
    """

    model: Network

    def __init__(
        self, arm: str, precision: str, kind: str, width: int, seed: int, device: str
    ) -> None:
        torch.manual_seed(seed)
        self.precision, self.model = precision, Network(kind, arm, width, device)
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
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All batches once: each step's loss, fp32 on the CPU, and by name the norms of the layer's
        gate and up gradients at the end of each window.

        With `graph` the batches of the first one's size are steps of a CUDA graph, captured anew
        each epoch, for it holds the learning rate.
        """
        self.model.train()
        losses: list[Tensor] = []
        norms: dict[str, list[Tensor]] = {}
        captured: GraphStep | None = None
        for at, (images, labels) in enumerate(batches, 1):
            if graph and captured is None:
                captured = GraphStep(self, images, labels)
            fits = captured is not None and captured.takes(labels)
            step = captured if captured is not None and fits else self.step
            losses.append(step(images, labels))
            if at % window == 0:
                for name, gradient in self.model.layer.gradients().items():
                    norms.setdefault(name, []).append(torch.linalg.vector_norm(gradient))
        self.schedule.step()
        seen = {name: torch.stack(samples).cpu() for name, samples in norms.items()}
        return torch.stack(losses).cpu(), seen

    def change(self) -> dict[str, float]:
        """‖W − W₀‖ / ‖W₀‖ of the layer's gate and up weights since the run began."""
        return {
            name: float((w - self.first[name]).norm() / self.first[name].norm())
            for name, w in self.model.layer.weights().items()
        }

    @torch.no_grad()
    def test(self, split: Split) -> tuple[float, Tensor]:
        """Mean loss on all images of a split, without dropout, and how often each true digit (row)
        got each answer (column).
        """
        self.model.eval()
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        counts = torch.zeros(CLASSES**2, device=self.device, dtype=torch.int64)
        for images, labels in zip(
            split.images.split(TEST_BATCH), split.labels.split(TEST_BATCH), strict=True
        ):
            with autocast(self.precision, self.device):
                answers = self.model(images)
            total += nll_loss(answers, labels, reduction="sum")
            pairs = CLASSES * labels + answers.argmax(1)
            counts += torch.bincount(pairs, minlength=CLASSES**2)
        confusion = counts.reshape(CLASSES, CLASSES).cpu()
        return float(total) / len(split), confusion


class GraphStep:
    """The same step captured in a CUDA graph, for batches of one size.

    The steps that warm it up are undone: weights, the optimizer's state and the generator are as
    before, so that it goes on where the trainer was. Gradients lie in the graph's memory and are
    written anew by each replay.
    """

    WARMUP = 3

    def __init__(self, trainer: Trainer, images: Tensor, labels: Tensor) -> None:
        trainer.model.train()
        self._images, self._labels = images.clone(), labels.clone()
        undo = _undo(trainer)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.WARMUP):
                trainer.step(self._images, self._labels)
        torch.cuda.current_stream().wait_stream(side)
        trainer.clear()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = trainer.step(self._images, self._labels)
        undo()

    def takes(self, labels: Tensor) -> bool:
        """Whether a batch has the size that was captured."""
        return labels.shape == self._labels.shape

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """One step on this batch; its loss."""
        self._images.copy_(images)
        self._labels.copy_(labels)
        self._graph.replay()
        return self._loss.clone()


def _undo(trainer: Trainer) -> Callable[[], None]:
    """What puts a trainer on a CUDA device back in place, as it is now."""
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    optimizer = trainer.optimizer
    assert optimizer is not None
    states = {
        p: {name: tensor.clone() for name, tensor in state.items()}
        for p, state in optimizer.state.items()
    }
    generator = torch.cuda.get_rng_state(trainer.device)

    @torch.no_grad()
    def put_back() -> None:
        for p, weight in zip(trainer.model.parameters(), weights, strict=True):
            p.copy_(weight)
        for held, state in optimizer.state.items():
            before = states.get(held)
            for name, tensor in state.items():
                # What the warm-up made began as zeros.
                tensor.copy_(before[name]) if before else tensor.zero_()
        torch.cuda.set_rng_state(generator, trainer.device)

    return put_back
