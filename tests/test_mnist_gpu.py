"""Training on a GPU: a CUDA graph's steps are the plain ones, and every arm is right."""

import pytest
import torch
from digits import drawn

from fusedlib.bench.results import Unavailable
from fusedlib.bench.training import arms, batches, cases, layer_check, measure, trainer

pytestmark = pytest.mark.gpu
ARMS = [f"{arm} {precision}" for precision in arms.PRECISIONS for arm in arms.ARMS]


def needed(arm, precision):
    try:
        arms.ARMS[arm].check_available("cuda", precision)
    except Unavailable as error:
        pytest.skip(str(error))
    return arms.ARMS[arm]


@pytest.mark.parametrize(("arm", "precision"), cases.named(ARMS))
def test_the_layer_is_right(arm, precision):
    chosen = needed(arm, precision)
    with arms.settings(precision):
        found = layer_check.verdict(chosen, precision, 784, 192, 64, "cuda")
    assert "status" not in found, found["reason"]


@pytest.mark.parametrize(("arm", "precision"), cases.named(["eager fp32", "fused bf16"]))
def test_an_epoch_in_a_graph_gives_the_losses_and_weights_of_plain_steps(arm, precision):
    data = batches.prepare(drawn(64 * 5 + 32, 64), 64 * 5 + 32, 64, "cuda")
    with arms.settings(precision):
        runs = []
        for graph in (False, True):
            one = trainer.Trainer(needed(arm, precision), precision, "convolutions", 128, 3, "cuda")
            losses = []
            for epoch in range(2):  # the second begins with state and another learning rate
                shown = batches.on_device(data.train, batches.order(len(data.train), 3, epoch), 64)
                losses.append(one.train(shown, 2, graph=graph).losses)
            runs.append((torch.cat(losses), one.model.state_dict()))
    (plain, weights), (graphed, others) = runs
    assert len(plain) == 12 and torch.equal(plain, graphed)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_run_by_graph_is_recorded_like_any_other():
    setting = cases.Setting(256, 64, 128, "cuda")
    [case] = cases.runs(
        setting, ["eager fp32"], network="swiglu only", seeds=1, epochs=2, launch="graph"
    )
    figures = measure.Measure(data=drawn(256, 64))(case)
    assert len(figures["losses"]) == 8 and figures["losses"][-1] < figures["losses"][0]
