"""What the topic mnist asks of a layer on the CPU: h and gradients of float64, a loss that falls.

Images are drawn, not MNIST's.
"""

from functools import cache

import torch

from digits import drawn
from study import digits, mnist, mnist_network, rivals

WIDTH = 128
SETTING = {
    "train_images": 320,
    "test_images": 50,
    "width": WIDTH,
    "device": "cpu",
    "batch_size": 64,
}
DATA = drawn(320, 50)


def trained(name, kind="swiglu only", seed=0, *, passes=2, images=320, batch_size=64):
    """A trainer after an epoch of some passes over the images, and what it showed."""
    one = mnist_network.Trainer(name, "fp32", kind, WIDTH, seed, "cpu")
    data = digits.prepare(DATA, images, 50, "cpu")
    chosen = torch.cat([digits.order(images, seed, number) for number in range(passes)])
    return one, one.train(digits.on_device(data.train, chosen, batch_size), 1)


def is_frozen(name: str) -> bool:
    return mnist_network.FROZEN in rivals.get(mnist_network.TASK, name).traits


def check_layer(name: str, precision: str) -> dict[str, object]:
    """h and every gradient agree with float64; gives the check's figures."""
    mnist.checked.cache_clear()
    with mnist_network.settings(precision):
        actual = mnist.checked(name, precision, 784, WIDTH, 64, "cpu")
    weights = set() if is_frozen(name) else {"d_w_gate_error", "d_w_up_error"}
    errors = {name for name in actual if name.endswith("_error")}
    assert errors == {"h_error", "d_x_error"} | weights, f"errors of {sorted(errors)}"
    return actual


def check_learning(
    name: str, kind: str, *, passes: int = 4, images: int = 320, batch_size: int = 64
) -> None:
    """The first five losses are eager's, the loss falls, and all that is trained moves.

    A frozen layer has other losses than eager, and its weights stay. What is trained on is as in
    `trained`.
    """
    with mnist_network.settings("fp32"):
        one, epoch = trained(name, kind, passes=passes, images=images, batch_size=batch_size)
    losses, norms = epoch
    moved = one.change()
    usual = _losses_of_eager(kind, images, batch_size)
    same = torch.allclose(losses[:5], usual, rtol=1e-3)
    assert same is not is_frozen(name), f"first losses {losses[:5].tolist()}, eager's {usual}"
    assert losses[-3:].mean() < losses[:3].mean() - 0.02, f"the loss does not fall: {losses}"
    if is_frozen(name):
        assert moved == {"gate": 0.0, "up": 0.0} and not len(norms)
    else:
        assert min(moved.values()) > 1e-3, f"weights hardly moved: {moved}"
        assert norms.min() > 0


@cache
def _losses_of_eager(kind: str, images: int, batch_size: int) -> torch.Tensor:
    with mnist_network.settings("fp32"):
        _, (losses, _) = trained("eager", kind, passes=1, images=images, batch_size=batch_size)
    return losses[:5]
