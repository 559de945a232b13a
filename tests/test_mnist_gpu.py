"""Training on a GPU: a CUDA graph's steps are the plain ones, and every arm is right."""

import pytest
import torch

from digits import drawn
from fusedlib.bench.attempt import Unavailable
from measure.racing import rivals
from measure.training import batches, mnist, network, study, trainer

pytestmark = pytest.mark.gpu
SETTING = study.setting(256, 64, 128, "cuda")
RUN = {"seed": 0, "epochs": 2, "source": "device", "launch": "graph", "network": "swiglu only"}


@pytest.fixture(autouse=True)
def data(monkeypatch):
    monkeypatch.setattr(mnist, "load", lambda: drawn(256, 64))
    study.prepared.cache_clear(), study.checked.cache_clear()


@pytest.mark.parametrize("precision", network.PRECISIONS)
@pytest.mark.parametrize("arm", rivals.names(network.TASK))
def test_the_layer_is_right(arm, precision):
    [case] = study.cases("run", [f"{arm} {precision}"], SETTING, **RUN)
    try:
        study.available(case)
    except Unavailable as error:
        pytest.skip(str(error))
    with network.settings(precision):
        assert "wrong" not in study.checked(arm, precision, 784, 192, 64, "cuda")


@pytest.mark.parametrize(("arm", "precision"), [("eager", "fp32"), ("fused", "bf16")])
def test_an_epoch_in_a_graph_gives_the_losses_and_weights_of_plain_steps(arm, precision):
    made = batches.prepare(drawn(64 * 5 + 32, 64), 64 * 5 + 32, 64, "cuda")
    with network.settings(precision):
        runs = []
        for graph in (False, True):
            one = trainer.Trainer(arm, precision, "convolutions", 128, 3, "cuda")
            losses = []
            for epoch in range(2):  # the second begins with state and another learning rate
                shown = batches.on_device(made.train, batches.order(len(made.train), 3, epoch), 64)
                losses.append(one.train(shown, 2, graph=graph)[0])
            runs.append((torch.cat(losses), one.model.state_dict()))
    (plain, weights), (graphed, others) = runs
    assert len(plain) == 12 and torch.equal(plain, graphed)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_run_by_graph_is_measured_like_any_other():
    [case] = study.cases("run", ["eager fp32"], SETTING, **RUN)
    figures = study.measure(case)
    assert len(figures["losses"]) == 8 and figures["losses"][-1] < figures["losses"][0]


def test_turns_of_a_graph_tell_of_data_and_replay():
    fields = {"source": "device", "launch": "graph", "rounds": 2, "steps": 3}
    [case] = study.cases("pace", ["eager fp32"], SETTING, **fields)
    with network.settings("fp32"):
        turn = study.turn(case)
        turn.prepare(1)
        times = turn.run()
    assert set(times) == {"data", "replay", "total"}
    assert 0.5 * times["total"] < times["data"] + times["replay"] <= 1.001 * times["total"]
