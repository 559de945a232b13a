"""What study 10 asks of an arm on the CPU: h and gradients of float64, and a loss that falls.

Images are drawn, not MNIST's.
"""

from functools import cache

import torch
from digits import drawn

from fusedlib.bench.training import arms, batches, cases, layer_check, trainer
from fusedlib.bench.training.arms import Arm

WIDTH = 128
SETTING = cases.Setting(320, 50, WIDTH, "cpu")
DATA = drawn(320, 50)


def trained(arm, network="swiglu only", seed=0, *, passes=2, images=320, batch_size=64):
    """A trainer after an epoch of some passes over the images, and what it showed."""
    one = trainer.Trainer(arm, "fp32", network, WIDTH, seed, "cpu")
    data = batches.prepare(DATA, images, 50, "cpu")
    chosen = torch.cat([batches.order(images, seed, number) for number in range(passes)])
    return one, one.train(batches.on_device(data.train, chosen, batch_size), 1)


def check_layer(arm: Arm, precision: str) -> dict[str, object]:
    """h and every gradient agree with float64; gives the verdict's figures."""
    with arms.settings(precision):
        found = layer_check.verdict(arm, precision, 784, WIDTH, 64, "cpu")
    assert "status" not in found, found["reason"]
    weights = {"d_w_gate_error", "d_w_up_error"} if arm.trained else set()
    errors = {name for name in found if name.endswith("_error")}
    assert errors == {"h_error", "d_x_error"} | weights, f"errors of {sorted(errors)}"
    return found


def check_learning(
    arm: Arm, network: str, *, passes: int = 4, images: int = 320, batch_size: int = 64
) -> None:
    """The first five losses are eager's, the loss falls, and all that is trained moves.

    A frozen arm has other losses than eager, and its weights stay. What is trained on is as in
    `trained`.
    """
    with arms.settings("fp32"):
        one, epoch = trained(arm, network, passes=passes, images=images, batch_size=batch_size)
    losses, moved = epoch.losses, one.change()
    usual = _losses_of_eager(network, images, batch_size)
    same = torch.allclose(losses[:5], usual, rtol=1e-3)
    assert same is arm.trained, f"first losses {losses[:5].tolist()}, eager's {usual.tolist()}"
    assert losses[-3:].mean() < losses[:3].mean() - 0.02, f"the loss does not fall: {losses}"
    if arm.trained:
        assert min(moved.values()) > 1e-3, f"weights hardly moved: {moved}"
        assert all(norms.min() > 0 for norms in epoch.gradient_norms.values())
    else:
        assert moved == {"gate": 0.0, "up": 0.0} and not epoch.gradient_norms


@cache
def _losses_of_eager(network: str, images: int, batch_size: int) -> torch.Tensor:
    with arms.settings("fp32"):
        _, epoch = trained(
            arms.ARMS["eager"], network, passes=1, images=images, batch_size=batch_size
        )
    return epoch.losses[:5]
