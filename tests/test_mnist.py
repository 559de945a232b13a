"""The topic mnist on the CPU: every provider learns, all learn the same, and who is wrong is told.

Liger's, which needs Triton's interpreter for it, in `test_mnist_liger.py`.
"""

import pandas as pd
import pytest
import torch

from fusedlib import reference
from fusedlib.bench.attempt import Unavailable
from study import digits, mnist, mnist_network, rivals, run
from study.mnist_network import TASK, Layer
from study.race import free
from training_checks import DATA, SETTING, WIDTH, check_layer, check_learning, trained

slow = pytest.mark.slow
RUN = {"network": "swiglu only", "seed": 0, "epochs": 1, "data_source": "device",
       "launch": "python"}  # fmt: skip
PACE = {"network": "swiglu only", "data_source": "device", "launch": "python", "rounds": 2,
        "steps": 1}  # fmt: skip


@pytest.fixture
def with_data(monkeypatch):
    """MNIST is drawn, and nothing is kept from or for another test."""
    monkeypatch.setattr(digits, "load", lambda: DATA)

    def forget():
        mnist.prepared.cache_clear(), mnist.checked.cache_clear(), free()

    forget()
    yield
    forget()


@pytest.fixture
def register(monkeypatch):
    """Registers a provider for one test: a function of (x, w_gate, w_up)."""
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))
    return lambda name, function: rivals.rival(TASK, name)(
        lambda hidden, width, device: Layer(hidden, width, device, function)
    )


def measured(*listed):
    """Rows of these cases, a line of figures each."""
    races = run.grouped("mnist", [case for cases in listed for case in cases])
    return [row.as_dict() for race in races.values() for row in mnist.measure(race)]


# --- the layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision"),
    [("eager", "fp32"), ("eager", "bf16"), ("fused", "fp32"), ("fused", "bf16"),
     ("frozen", "fp32"), pytest.param("inductor", "bf16", marks=pytest.mark.long)],
)  # fmt: skip
def test_h_and_every_gradient_agree_with_float64(name, precision):
    check_layer(name, precision)


BROKEN = {
    "swapped": (lambda x, g, u: reference.swiglu(x, u, g), "h: norm error"),
    "short": (lambda x, g, u: reference.swiglu(x[:, :-1], g[:, :-1], u[:, :-1]), "h: norm error"),
    "no gate gradient": (
        lambda x, g, u: reference.swiglu(x, g.detach(), u), "no gradient arrived at w_gate"
    ),
    "no dx": (lambda x, g, u: reference.swiglu(x.detach(), g, u), "no gradient arrived at x"),
    "off by 1e-4": (lambda x, g, u: reference.swiglu(x, g, u).mul(1 + 1e-4), "h: norm"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_layer_is_rejected_and_neither_trained_nor_timed(name, with_data, register):
    function, reason = BROKEN[name]
    register("broken", function)
    asked = [mnist.of("run", ["broken fp32"], SETTING, **RUN)]
    rows = measured(*asked, mnist.of("pace", ["broken fp32"], SETTING, **PACE))
    assert [row["status"] for row in rows] == ["wrong", "wrong"]
    for row in rows:
        assert reason in row["reason"]
        assert not [n for n in row if n == "losses" or n.endswith(("_s", "_ms"))]


def test_the_published_kernel_is_wrong_in_output_and_gradients():
    mnist.checked.cache_clear()
    with mnist_network.settings("fp32"):
        actual = mnist.checked("published-kernel", "fp32", 784, WIDTH, 64, "cpu")
    assert actual["h_error"] > 0.5 and "d_w_gate_error" not in actual
    for weight in ("w_gate", "w_up"):
        assert f"no gradient arrived at {weight}" in actual["wrong"]
    with pytest.raises(ValueError, match="blocks of 64"):
        rivals.get(TASK, "published-kernel").build(784, 100, "cpu")(torch.zeros(2, 784))


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [("fused", "swiglu only"), ("frozen", "swiglu only"),
     pytest.param("inductor", "swiglu only", marks=pytest.mark.long),
     pytest.param("fused", "convolutions", marks=slow)],
)  # fmt: skip
def test_the_loss_of_each_provider_falls(name, kind):
    check_learning(name, kind, passes=8 if name == "frozen" else 4)  # what is frozen learns slowly


def test_the_test_counts_every_image_once():
    one, _ = trained("eager")
    split = digits.prepare(DATA, 320, 50, "cpu").train
    loss, correct = one.test(split)
    one.model.eval()
    with torch.no_grad():
        answers = one.model(split.images)
    true = torch.nn.functional.nll_loss(answers, split.labels)
    assert loss == pytest.approx(float(true), rel=1e-5)
    assert correct == int((answers.argmax(1) == split.labels).sum()) > 100


# --- rows -----------------------------------------------------------------------------------------


def test_a_run_tells_all_that_was_seen_and_who_is_wrong_trains_all_the_same(with_data):
    names = ["eager fp32", "frozen fp32", "published-kernel fp32", "liger fp32", "liger bf16"]
    rows = measured(mnist.of("run", names, SETTING, **RUN | {"epochs": 2}))
    assert [r["status"] for r in rows] == ["ok"] * 3 + ["unavailable"] * 2
    eager, frozen, wrong = rows[:3]
    assert len(eager["losses"]) == len(wrong["losses"]) == 10
    assert eager["epoch_gate_change"][1] > eager["epoch_gate_change"][0] > 0
    assert frozen["epoch_gate_gradient_norm"] == [None, None]
    assert "no gradient arrived" in wrong["wrong"] and len(wrong["epoch_train_s"]) == 2
    shown = mnist.derive(pd.DataFrame(rows))
    assert shown["correct"][0] == eager["epoch_correct"][1] / 50 == 1 - shown["test_error"][0]
    assert shown["late_loss"][0] == pytest.approx(sum(eager["losses"][5:]) / 5)
    by_epoch = mnist.by_epoch(shown)
    assert len(by_epoch) == 6, "nobody who did not run has an epoch"
    last = by_epoch[by_epoch["epoch"] == 2]
    assert last["test_loss"].tolist() == shown["test_loss"][:3].tolist()


def test_without_mnist_every_row_says_so(with_data, monkeypatch):
    def none():
        raise Unavailable("MNIST is nowhere")

    monkeypatch.setattr(digits, "load", none)
    rows = measured(mnist.cases(device="cpu", once=[], rounds=1))
    said = {(r["status"], r["reason"]) for r in rows if r.get("launch") != "graph"}
    assert said == {("unavailable", "MNIST is nowhere")}
