"""Study 13's measuring on the CPU: every arm learns, and all of them learn the same.

Liger's, which needs Triton's interpreter for it, in `test_mnist_liger.py`.
"""

import importlib

import pytest
import torch

from fusedlib import reference
from fusedlib.bench.attempt import Unavailable, Wrong
from measure.racing import rivals
from measure.recording import paths, results
from measure.training import batches, columns, mnist, network, study
from measure.training.network import TASK, Layer
from training_checks import DATA, SETTING, WIDTH, check_layer, check_learning, trained

slow = pytest.mark.slow
RUN = {"network": "swiglu only", "seed": 0, "epochs": 1, "source": "device", "launch": "python"}
PACE = {"source": "device", "launch": "python", "rounds": 2, "steps": 1}


@pytest.fixture
def flawed(monkeypatch):
    monkeypatch.syspath_prepend(str(paths.NOTEBOOKS))
    return importlib.import_module("flawed_layer")


@pytest.fixture
def with_data(monkeypatch):
    """MNIST is drawn, and nothing is kept from or for another test."""
    monkeypatch.setattr(mnist, "load", lambda: DATA)
    study.prepared.cache_clear(), study.checked.cache_clear()
    yield
    study.prepared.cache_clear(), study.checked.cache_clear()


@pytest.fixture
def recorder(tmp_path, with_data):
    return results.Recorder("13_mnist", "quick", False, tmp_path)


def by(function):
    """A function of (x, w_gate, w_up) as what builds an arm's layer."""
    return lambda hidden, width, device: Layer(hidden, width, device, function)


@pytest.fixture
def register(monkeypatch):
    """Registers an arm for one test."""
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))
    return lambda name, build, **options: rivals.rival(TASK, name, **options)(build)


def rows_of(recorder):
    return results.read_rows(recorder.path)


# --- the layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "precision"),
    [("eager", "fp32"), ("eager", "bf16"), ("fused", "fp32"), ("fused", "bf16"),
     ("frozen", "fp32"), pytest.param("inductor", "bf16", marks=slow)],
)  # fmt: skip
def test_h_and_every_gradient_agree_with_float64(arm, precision):
    check_layer(arm, precision)


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
def test_a_broken_arm_is_rejected_and_neither_trained_nor_timed(name, recorder, register):
    function, reason = BROKEN[name]
    register("broken", by(function))
    recorder.sweep(study.cases("run", ["broken fp32"], SETTING, **RUN), study.measure)
    paces = study.cases("pace", ["broken fp32"], SETTING, **PACE | {"network": "swiglu only"})
    recorder.race(study.RACE, paces)
    rows = rows_of(recorder)
    assert [row["status"] for row in rows] == ["wrong", "wrong"]
    for row in rows:
        assert reason in row["reason"] and row["layer_backward"]
        assert not [
            n for n in {*row} - {*results.HEAD} if n == "losses" or n.endswith(("_s", "_ms"))
        ]


def test_an_arm_cannot_excuse_itself_by_freezing_one_weight(register):
    def frozen_gate(hidden, width, device):
        layer = Layer(hidden, width, device, reference.swiglu)
        layer.gate.requires_grad_(False)
        return layer

    register("half", frozen_gate)
    with pytest.raises(Wrong, match="no gradient arrived at w_gate"):
        check_layer("half", "fp32")


def test_the_published_kernel_is_wrong_in_output_and_gradients(flawed):
    study.checked.cache_clear()
    with network.settings("fp32"):
        actual = study.checked("published-kernel", "fp32", 784, WIDTH, 64, "cpu")
    assert actual["h_error"] > 0.5 and "d_w_gate_error" not in actual
    for weight in ("w_gate", "w_up"):
        assert f"no gradient arrived at {weight}" in actual["wrong"]
    with pytest.raises(ValueError, match="blocks of 64"):
        rivals.get(TASK, "published-kernel").build(784, 100, "cpu")(torch.zeros(2, 784))


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "kind"),
    [("fused", "swiglu only"), ("frozen", "swiglu only"),
     pytest.param("inductor", "swiglu only", marks=slow),
     pytest.param("fused", "convolutions", marks=slow)],
)  # fmt: skip
def test_the_loss_of_each_arm_falls(arm, kind):
    check_learning(arm, kind, passes=8 if arm == "frozen" else 4)  # what is frozen learns slowly


def test_the_published_kernel_trains_the_rest_and_not_its_own_weights(flawed):
    with network.settings("fp32"):
        one, (losses, norms) = trained("published-kernel", passes=40)
    assert losses[-3:].mean() < losses[:3].mean() - 0.02, "its last layer learns"
    assert one.change() == {"gate": 0.0, "up": 0.0}
    assert not norms and one.model.head.weight.grad is not None


def test_a_run_is_that_of_its_seed():
    losses = [trained("eager", seed=seed, passes=1)[1][0] for seed in (0, 0, 1)]
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])


def test_the_test_counts_every_image_once():
    one, _ = trained("eager")
    split = batches.prepare(DATA, 320, 50, "cpu").train
    loss, confusion = one.test(split)
    assert confusion.sum() == 320
    one.model.eval()
    with torch.no_grad():
        answers = one.model(split.images)
    true = torch.nn.functional.nll_loss(answers, split.labels)
    assert loss == pytest.approx(float(true), rel=1e-5)
    assert confusion.trace() == int((answers.argmax(1) == split.labels).sum()) > 100


# --- rows -----------------------------------------------------------------------------------------


def test_runs_are_recorded_once_with_all_that_was_seen(recorder, flawed):
    names = ["eager fp32", "frozen fp32", "published-kernel fp32", "liger fp32", "eager tf32"]
    asked = [
        case
        for seed in range(2)
        for case in study.cases("run", names, SETTING, **RUN | {"seed": seed, "epochs": 2})
    ]
    recorder.sweep(asked, study.measure)
    rows = rows_of(recorder)
    assert [r["status"] for r in rows] == 2 * ["ok", "ok", "wrong", "unavailable", "unavailable"]
    eager, frozen, wrong = rows[:3]
    assert eager["provider"] == "eager"
    assert len(eager["losses"]) == 10 and sum(eager["confusion"]) == 50
    assert eager["epoch_gate_change"][1] > eager["epoch_gate_change"][0] > 0
    assert frozen["epoch_gate_gradient_norm"] == [None, None]
    assert len(wrong["losses"]) == 10 and "epoch_train_s" not in wrong
    assert len(wrong["published_protocol_epoch_train_s"]) == 2
    recorder.sweep(asked, study.measure)
    assert len(rows_of(recorder)) == len(rows)
    assert set(recorder.rows()["provider"]) == {"eager", "frozen", "published-kernel", "liger"}


def test_without_mnist_every_row_says_so(recorder, monkeypatch):
    def none():
        raise Unavailable("MNIST is nowhere")

    monkeypatch.setattr(mnist, "load", none)
    asked = study.cases("run", ["eager fp32"], SETTING, **RUN) + study.data_cases(SETTING, 2)
    recorder.sweep(asked, study.measure)
    recorder.race(study.RACE, study.cases("pace", ["eager fp32"], SETTING, **PACE))
    assert {(r["status"], r["reason"]) for r in rows_of(recorder)} == {
        ("unavailable", "MNIST is nowhere")
    }


@pytest.mark.parametrize("source", ["device", pytest.param("loader", marks=slow)])
def test_a_steps_parts_make_up_the_step(source, recorder, flawed):
    fields = PACE | {"network": "swiglu only", "source": source}
    names = ["eager fp32", "fused fp32", "published-kernel fp32"]
    recorder.race(study.RACE, study.cases("pace", names, SETTING, **fields))
    eager, fused, wrong = rows_of(recorder)
    for row in (eager, fused):
        parts = [row[f"{part}_samples_ms"] for part in columns.STEP]
        for whole, *times in zip(row["samples_ms"], *parts, strict=True):
            assert 0.5 * whole < sum(times) <= 1.001 * whole
    assert eager["session"] == fused["session"] == wrong["session"] and eager["n"] == 2
    assert fused["layer_backward"] == "MulBackward0", "plain PyTorch ran, and the row says so"
    assert wrong["status"] == "wrong" and wrong["published_protocol_optimizer_median_ms"] > 0
    assert not [n for n in wrong if n.endswith("_ms") and not n.startswith(results.PROTOCOL)]


def test_a_repeated_run_gives_the_same_losses_and_another_order_does_not(monkeypatch, with_data):
    [case] = study.cases("repeat", ["eager fp32"], SETTING, steps=2, network="swiglu only")
    assert study.measure(case)["repeat_difference"] == 0.0
    seeds = iter([0, 1])
    monkeypatch.setattr(batches, "order", lambda n, *_: torch.randperm(n, generator=(
        torch.Generator().manual_seed(next(seeds)))))  # fmt: skip
    assert study.measure(case)["repeat_difference"] > 0.0


def test_settings_are_as_before_afterwards():
    before = torch.backends.cudnn.conv.fp32_precision, torch.get_float32_matmul_precision()
    with network.settings("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    assert before == (
        torch.backends.cudnn.conv.fp32_precision, torch.get_float32_matmul_precision()
    )  # fmt: skip
