"""Training on a GPU: a CUDA graph's steps are the plain ones, and every provider is right."""

import pytest
import torch

from digits import drawn
from fusedlib.bench.attempt import Unavailable
from study import digits, mnist, mnist_network, rivals

pytestmark = pytest.mark.gpu
TASK = mnist_network.TASK
RIGHT = [name for name in rivals.names(TASK) if name not in rivals.names(TASK, "wrong")]
SETTING = {"train_images": 256, "test_images": 64, "width": 128, "device": "cuda", "batch_size": 64}
RUN = {"seed": 0, "epochs": 2, "data_source": "device", "launch": "graph", "network": "swiglu only"}


@pytest.fixture(autouse=True)
def data(monkeypatch):
    monkeypatch.setattr(digits, "load", lambda: drawn(256, 64))
    mnist.prepared.cache_clear(), mnist.checked.cache_clear()


@pytest.mark.parametrize("precision", mnist_network.PRECISIONS)
@pytest.mark.parametrize("name", RIGHT)
def test_the_layer_is_right(name, precision):
    [case] = mnist.of("run", [f"{name} {precision}"], SETTING, **RUN)
    try:
        mnist.available(case)
    except Unavailable as error:
        pytest.skip(str(error))
    with mnist_network.settings(precision):
        assert "wrong" not in mnist.checked(name, precision, 784, 192, 64, "cuda")


@pytest.mark.parametrize(("name", "precision"), [("eager", "fp32"), ("fused", "bf16")])
def test_an_epoch_in_a_graph_gives_the_losses_and_weights_of_plain_steps(name, precision):
    made = digits.prepare(drawn(64 * 5 + 32, 64), 64 * 5 + 32, 64, "cuda")
    with mnist_network.settings(precision):
        runs = []
        for graph in (False, True):
            one = mnist_network.Trainer(name, precision, "convolutions", 128, 3, "cuda")
            losses = []
            for epoch in range(2):  # the second begins with state and another learning rate
                shown = digits.on_device(made.train, digits.order(len(made.train), 3, epoch), 64)
                losses.append(one.train(shown, 2, graph=graph)[0])
            runs.append((torch.cat(losses), one.model.state_dict()))
    (plain, weights), (graphed, others) = runs
    assert len(plain) == 12 and torch.equal(plain, graphed)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
