"""Study 10's measuring on the CPU: every arm learns, and all of them learn the same.

Liger's, which needs Triton's interpreter for it, in `test_mnist_liger.py`.
"""

import io
import subprocess
import sys

import pytest
import torch
from training_checks import DATA, SETTING, WIDTH, check_layer, check_learning, trained

from fusedlib import paths, reference
from fusedlib.bench import results
from fusedlib.bench.results import Unavailable
from fusedlib.bench.training import arms, batches, cases, layer_check, measure, mnist, pace, trainer
from fusedlib.bench.training.arms import Arm
from fusedlib.bench.training.network import Network

slow = pytest.mark.slow
OURS = ["eager", "fused", "frozen", pytest.param("inductor", marks=slow)]


@pytest.fixture
def flawed(monkeypatch):
    monkeypatch.syspath_prepend(str(paths.NOTEBOOKS))
    import flawed_layer

    return arms.published(flawed_layer.swiglu)


@pytest.fixture
def recorder(tmp_path):
    return results.Recorder("study", "quick", "code", directory=tmp_path, fresh=False)


def rows_of(recorder):
    return results.read_rows(recorder.path)


# --- the layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("arm", OURS)
def test_h_and_every_gradient_agree_with_float64(arm, precision):
    check_layer(arms.ARMS[arm], precision)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda x, g, u: reference.swiglu(x, u, g), "h: norm error"),
        (lambda x, g, u: reference.swiglu(x[:, :-1], g[:, :-1], u[:, :-1]), "h: norm error"),
        (lambda x, g, u: reference.swiglu(x, g.detach(), u), "no gradient arrived at w_gate"),
        (lambda x, g, u: reference.swiglu(x, g, u + 0 * g.square()).mul(1 + 1e-4), "h: norm"),
    ],
    ids=["swapped", "short", "no gate gradient", "off by 1e-4"],
)
def test_a_broken_arm_is_found_and_not_trained(broken, said):
    arm = Arm("broken", broken)
    [case] = cases.runs(SETTING, ["eager fp32"], network="swiglu only", seeds=1, epochs=1)
    figures = measure.Measure([arm], DATA)({**case, "arm": "broken"})
    assert figures["status"] == "wrong" and said in figures["reason"]
    assert "losses" not in figures


def test_the_published_kernel_is_wrong_in_output_and_gradients(flawed):
    with arms.settings("fp32"):
        found = layer_check.verdict(flawed, "fp32", 784, WIDTH, 64, "cpu")
    assert found["status"] == "wrong" and found["h_error"] > 0.5
    assert found["missing_gradients"] == [
        "no gradient arrived at w_gate", "no gradient arrived at w_up",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="blocks of 64"):
        flawed.layer(784, 100)(torch.zeros(2, 784))


def test_the_published_kernel_reads_the_first_columns_alone(flawed):
    layer = flawed.layer(784, WIDTH)
    x = torch.randn(3, 784)
    before = layer(x)
    assert torch.equal(before, layer(torch.cat([x[:, :WIDTH], torch.randn(3, 656)], dim=1)))
    assert not torch.equal(before, layer(torch.cat([-x[:, :WIDTH], x[:, WIDTH:]], dim=1)))


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["swiglu only", pytest.param("convolutions", marks=slow)])
@pytest.mark.parametrize("arm", OURS)
def test_the_loss_of_each_arm_falls(arm, network):
    passes = 8 if arm == "frozen" else 4  # what is frozen learns slowly
    check_learning(arms.ARMS[arm], network, passes=passes)


def test_the_published_kernel_trains_the_rest_and_not_its_own_weights(flawed):
    with arms.settings("fp32"):
        one, epoch = trained(flawed, passes=40)
    assert epoch.losses[-3:].mean() < epoch.losses[:3].mean() - 0.02, "its last layer learns"
    assert one.change() == {"gate": 0.0, "up": 0.0}
    assert not epoch.gradient_norms and one.model.head.weight.grad is not None


def test_a_run_is_that_of_its_seed():
    losses = [trained(arms.ARMS["eager"], seed=seed, passes=1)[1].losses for seed in (0, 0, 1)]
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])


def test_the_learning_rate_decays_by_the_epoch():
    one, _ = trained(arms.ARMS["eager"])
    assert one.optimizer.param_groups[0]["lr"] == pytest.approx(0.7)


def test_the_test_counts_every_image_once():
    one, _ = trained(arms.ARMS["eager"])
    split = batches.prepare(DATA, 320, 50, "cpu").train
    found = one.test(split)
    assert found.confusion.sum() == 320 and found.confusion.trace() == found.correct
    one.model.eval()
    with torch.no_grad():
        answers = one.model(split.images)
    true = torch.nn.functional.nll_loss(answers, split.labels)
    assert found.loss == pytest.approx(float(true), rel=1e-5)
    assert found.correct == int((answers.argmax(1) == split.labels).sum()) > 100


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["eager", "fused", "frozen"])
@pytest.mark.parametrize("target", ["eager", "fused", "frozen"])
def test_what_one_arm_saved_another_one_loads(source, target):
    one, _ = trained(arms.ARMS[source])
    file = io.BytesIO()
    torch.save(one.model.state_dict(), file)
    other = trainer.Trainer(arms.ARMS[target], "fp32", "swiglu only", WIDTH, 7, "cpu")
    file.seek(0)
    other.model.load_state_dict(torch.load(file, weights_only=True))
    assert list(one.model.state_dict()) == list(other.model.state_dict())
    one.model.eval(), other.model.eval()
    images = torch.randn(5, 1, 28, 28)
    assert torch.allclose(one.model(images), other.model(images), atol=1e-5)


def test_every_arm_s_state_loads_into_every_other(flawed):
    """Liger's too, without its package: what a layer holds does not hang on who computes."""
    every = [
        trainer.Trainer(arm, "fp32", "swiglu only", WIDTH, seed, "cpu").model
        for seed, arm in enumerate([*arms.ARMS.values(), flawed])
    ]
    saved = [{name: t.clone() for name, t in one.state_dict().items()} for one in every]
    for state in saved:
        for target in every:
            target.load_state_dict(state)
            assert all(torch.equal(target.state_dict()[name], t) for name, t in state.items())


@pytest.mark.parametrize("arm", ["eager", "fused"])
def test_the_same_seed_draws_the_same_weights(arm):
    torch.manual_seed(5)
    layer = arms.ARMS[arm].layer(20, 8)
    torch.manual_seed(5)
    gate, up = (torch.nn.Linear(20, 8, bias=False).weight for _ in range(2))
    assert torch.equal(layer.weights()["gate"], gate) and torch.equal(layer.weights()["up"], up)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("layer.up_proj.weight"), "Missing.*layer.up_proj.weight"),
        (lambda state: state.update({"layer.w": torch.zeros(1)}), "Unexpected.*layer.w"),
        (
            lambda state: state.update({"layer.gate_proj.weight": torch.zeros(3, 3)}),
            "size mismatch for layer.gate_proj.weight",
        ),
    ],
)
@pytest.mark.parametrize("arm", ["eager", "fused"])
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(arm, change, said):
    model = Network("swiglu only", 8, lambda hidden: arms.ARMS[arm].layer(hidden, 8))
    state = model.state_dict()
    change(state)
    with pytest.raises(RuntimeError, match="(?s)" + said):
        model.load_state_dict(state)


# --- rows -----------------------------------------------------------------------------------------


def test_runs_are_recorded_once_with_all_that_was_seen(recorder, flawed):
    names = ["eager fp32", "frozen fp32", "flawed fp32", "liger fp32", "eager tf32"]
    asked = cases.runs(SETTING, names, network="swiglu only", seeds=2, epochs=2)
    measure.sweep(recorder, asked, measure.Measure([flawed], DATA))
    rows = rows_of(recorder)
    assert [r["status"] for r in rows] == 2 * ["ok", "ok", "wrong", "unavailable", "unavailable"]
    eager, frozen, wrong = rows[:3]
    assert len(eager["losses"]) == 10 and sum(eager["confusion"]) == 50
    assert eager["epoch_gate_change"][1] > eager["epoch_gate_change"][0] > 0
    assert frozen["epoch_gate_gradient_norm"] == [None, None]
    assert len(wrong["losses"]) == 10 and "epoch_train_s" not in wrong
    assert len(wrong["published_protocol_epoch_train_s"]) == 2
    measure.sweep(recorder, asked, measure.Measure([flawed], DATA))
    assert len(rows_of(recorder)) == len(rows)


def test_without_mnist_every_row_says_so(recorder, monkeypatch):
    def none():
        raise Unavailable("MNIST is nowhere")

    monkeypatch.setattr(mnist, "load", none)
    asked = cases.runs(SETTING, ["eager fp32"], network="swiglu only", seeds=1, epochs=1)
    asked += cases.data_cases(SETTING, batches=2)
    measure.sweep(recorder, asked, measure.Measure())
    pace.sweep(recorder, _paces(["eager fp32"]), measure.Measure())
    assert {(r["status"], r["reason"]) for r in rows_of(recorder)} == {
        ("unavailable", "MNIST is nowhere")
    }


def _paces(names, launch="python"):
    return cases.paces(SETTING, names, source="device", launch=launch, rounds=2, steps=1)


@slow
def test_a_steps_parts_make_up_the_step(recorder, flawed):
    sweeper = measure.Measure([flawed], DATA)
    pace.sweep(recorder, _paces(["eager fp32", "fused fp32", "flawed fp32"]), sweeper)
    eager, fused, wrong = rows_of(recorder)
    for row in (eager, fused):
        parts = [row[f"{part}_samples_ms"] for part in trainer.PARTS]
        for whole, *times in zip(row["samples_ms"], *parts, strict=True):
            assert 0.5 * whole < sum(times) <= 1.001 * whole
    assert eager["session"] == fused["session"] and eager["speedup"] == 1.0
    assert "median_ms" not in wrong and wrong["published_protocol_median_ms"] > 0


def test_graphs_need_a_gpu_and_say_so(recorder):
    pace.sweep(recorder, _paces(["eager fp32"], "graph"), measure.Measure(data=DATA))
    assert [r["reason"] for r in rows_of(recorder)] == ["CUDA graphs need a CUDA GPU"]


def test_a_repeated_run_gives_the_same_losses_and_another_order_does_not(monkeypatch):
    [case] = cases.repeats(SETTING, ["eager fp32"], steps=2)
    sweeper = measure.Measure(data=DATA)
    case = {**case, "network": "swiglu only"}
    assert sweeper(case)["repeat_difference"] == 0.0
    seeds = iter([0, 1])
    monkeypatch.setattr(batches, "order", lambda n, *_: torch.randperm(n, generator=(
        torch.Generator().manual_seed(next(seeds)))))  # fmt: skip
    assert sweeper(case)["repeat_difference"] > 0.0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: cases.named(["eagre fp32"]), "unknown arm 'eagre fp32'"),
        (lambda: cases.named(["eager"]), "such as 'fused bf16'"),
        (lambda: cases.runs(SETTING, [], network="deep", seeds=1, epochs=1), "unknown network"),
        (lambda: cases.runs(SETTING, [], network="swiglu only", seeds=0, epochs=1), "at least 1"),
        (lambda: cases.epochs(SETTING, [], source="disk"), "unknown source 'disk'"),
        (lambda: arms.get("thunder", {}), "unknown arm 'thunder'"),
        (lambda: Network("deep", 8, lambda _: None), "unknown network 'deep'"),
    ],
)
def test_what_is_unknown_is_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_settings_are_as_before_afterwards():
    before = torch.backends.cudnn.conv.fp32_precision, torch.get_float32_matmul_precision()
    with arms.settings("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    assert before == (
        torch.backends.cudnn.conv.fp32_precision, torch.get_float32_matmul_precision()
    )  # fmt: skip
    with pytest.raises(ValueError, match="unknown precision 'fp8'"), arms.settings("fp8"):
        pass


def test_the_fingerprint_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None\nfrom fusedlib.bench.training import cases\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print(cases.code())"], capture_output=True, text=True,
        cwd=paths.ROOT, check=True, env={"PYTHONPATH": str(paths.ROOT), "PATH": ""},
    )  # fmt: skip
    assert len(done.stdout.strip()) == 12
