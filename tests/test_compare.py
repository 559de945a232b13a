"""No speed without correctness, like against like: the gate, the turns and the rows."""

import pytest
import torch
from torch import Tensor, nn

from fusedlib import reference
from fusedlib.bench import check, compare, providers
from fusedlib.bench.problems import Inputs, SwiGLUProblem, draw
from fusedlib.bench.providers import Workload
from fusedlib.bench.results import Recorder, load

RAGGED = SwiGLUProblem(37, 45, 83, "float32")


@pytest.fixture
def rivals(monkeypatch):
    """Registers wrong and broken rivals for one test."""
    monkeypatch.setattr(providers, "PROVIDERS", dict(providers.PROVIDERS))

    def rival(name, compute):
        @providers.provider(name)
        def build(inputs: Inputs) -> Workload:
            leaves = inputs.leaves()
            return Workload(lambda: compute(**leaves), leaves)

        return name

    return rival


def dropped_k_tile(x, w_gate, w_up, w_down) -> Tensor:
    return reference.swiglu_mlp(x[:, :32], w_gate[:, :32], w_up[:, :32], w_down)


def swapped(x, w_gate, w_up, w_down) -> Tensor:
    return reference.swiglu_mlp(x, w_up, w_gate, w_down)


def no_weight_gradient(x, w_gate, w_up, w_down) -> Tensor:
    return reference.swiglu_mlp(x, w_gate.detach() + 0 * w_gate, w_up, w_down)


def one_wrong_element(x, w_gate, w_up, w_down) -> Tensor:
    y = reference.swiglu_mlp(x, w_gate, w_up, w_down)
    mask = torch.zeros_like(y)
    mask[-1, -1] = 1e-3
    return y + mask


def missing_gradient(x, w_gate, w_up, w_down) -> Tensor:
    return reference.swiglu_mlp(x, w_gate.detach(), w_up, w_down)


def not_a_number(x, w_gate, w_up, w_down) -> Tensor:
    return reference.swiglu_mlp(x, w_gate, w_up, w_down) * float("nan")


def right(x, w_gate, w_up, w_down) -> Tensor:
    gate, up = nn.functional.linear(x, w_gate), nn.functional.linear(x, w_up)
    return nn.functional.linear(gate * torch.sigmoid(gate) * up, w_down)


WRONG = [dropped_k_tile, swapped, no_weight_gradient, one_wrong_element, not_a_number]


def run(tmp_path, names, problems=(RAGGED,), **options):
    recorder = Recorder("03_x", profile="quick", code="c", directory=tmp_path)
    options = {"device": "cpu", "warmup": 1, "repetitions": 5} | options
    compare.compare(recorder, list(problems), names, **options)
    return load("03_x", directory=tmp_path), recorder


@pytest.mark.parametrize("compute", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_rival_gets_its_errors_and_no_time(tmp_path, rivals, compute):
    frame, _ = run(tmp_path, ["eager", rivals("rival", compute)])
    row = frame.set_index("provider").loc["rival"]
    assert row["status"] == "wrong"
    assert "error" in row["reason"]
    assert row.get("median_ms") != row.get("median_ms"), "a wrong rival has no time"
    assert frame.set_index("provider").loc["eager", "status"] == "ok"


def test_a_right_rival_is_timed_in_turns_beside_the_baseline(tmp_path, rivals):
    frame, _ = run(tmp_path, ["eager", rivals("rival", right)])
    row = frame.set_index("provider").loc["rival"]
    assert row["status"] == "ok"
    assert row["n"] == 5
    assert row["baseline"] == "eager"
    assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
    for name in ("y", "d_x", "d_w_gate", "d_w_up", "d_w_down"):
        assert 0 < row[f"{name}_error"] < 1e-5


def test_a_gradient_that_never_arrives_is_a_failure_by_name(tmp_path, rivals):
    frame, _ = run(tmp_path, ["eager", rivals("rival", missing_gradient)])
    row = frame.set_index("provider").loc["rival"]
    assert row["status"] == "failed"
    assert "no gradient arrived at w_gate" in row["reason"]


def test_a_rival_that_is_not_installed_says_so(tmp_path, rivals):
    @providers.provider("absent", requires=("no_such_package",))
    def build(inputs):
        raise AssertionError

    frame, _ = run(tmp_path, ["eager", "absent"])
    row = frame.set_index("provider").loc["absent"]
    assert (row["status"], row["reason"]) == (
        "unavailable", "the package no_such_package is not installed",
    )  # fmt: skip


def test_a_problem_too_large_gives_all_its_rivals_that_row(tmp_path, monkeypatch):
    def too_large(problem, device):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(compare, "draw", too_large)
    frame, _ = run(tmp_path, ["eager", "inductor"])
    assert frame["status"].tolist() == ["oom", "oom"]


@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_direction_and_dtype_is_measured_on_ragged_shapes(tmp_path, direction, dtype):
    problem = SwiGLUProblem(19, 24, 40, dtype, direction)
    frame, recorder = run(tmp_path, ["eager"], [problem], repetitions=2)
    assert frame["status"].tolist() == ["ok"]
    assert recorder.missing([]) == []
    _, second = run(tmp_path, ["eager"], [problem], repetitions=2)
    assert (second.measured, second.skipped) == (0, 1)


def test_an_unknown_provider_lists_the_known(tmp_path):
    known = ", ".join(sorted(providers.PROVIDERS))
    with pytest.raises(ValueError, match=f"unknown provider 'ligr'; known: {known}"):
        run(tmp_path, ["ligr"])


def test_a_name_is_registered_once(rivals):
    with pytest.raises(ValueError, match="a provider named 'eager' already"):
        rivals("eager", right)


def test_packed_gradients_are_held_against_both_halves():
    inputs = draw(RAGGED, "cpu")
    true = check.truth(inputs)
    packed = torch.cat([inputs.w_gate, inputs.w_up]).detach().requires_grad_()
    leaves = {"x": inputs.x, "w_gate_up": packed, "w_down": inputs.w_down}

    def forward():
        gate, up = packed.chunk(2)
        return reference.swiglu_mlp(inputs.x, gate, up, inputs.w_down)

    found = check.errors(check.results_of(Workload(forward, leaves), inputs.dy), true)
    usual = check.errors(check.results_of(providers.get("eager").set_up(inputs), inputs.dy), true)
    assert set(found) == {"y", "d_x", "d_w_gate_up", "d_w_down"}
    assert check.misses(found, usual, torch.float32) == []


def test_work_and_traffic_agree_with_sums_by_hand():
    # x 2·3, weights 3·(3·5): forward reads 6 + 45 and writes 6 numbers of two bytes.
    problem = SwiGLUProblem(2, 3, 5, "bfloat16", "forward")
    assert problem.flops == 3 * 2 * 2 * 3 * 5
    assert problem.compulsory_bytes == 2 * (6 + 45 + 6)
    backward = SwiGLUProblem(2, 3, 5, "float32", "backward")
    assert backward.flops == 2 * problem.flops
    assert backward.compulsory_bytes == 4 * (6 + 45 + 6 + 6 + 45)
    both = SwiGLUProblem(2, 3, 5, "float32", "forward+backward")
    assert both.compulsory_bytes == 4 * (6 + 45 + 6 + 6 + 6 + 45)


def test_flops_agree_with_torch():
    from torch.utils.flop_counter import FlopCounterMode

    inputs = draw(RAGGED, "cpu")
    with FlopCounterMode(display=False) as counter:
        check.results_of(providers.get("eager").set_up(inputs), inputs.dy)
    assert counter.get_total_flops() == RAGGED.flops


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 0}, "tokens must be a whole number from 1, got 0"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; known: float32"),
        ({"direction": "up"}, "unknown direction 'up'; known: forward"),
    ],
)
def test_impossible_problems_are_told(change, message):
    options = {"tokens": 1, "hidden_size": 1, "intermediate_size": 1} | change
    with pytest.raises(ValueError, match=message):
        SwiGLUProblem(**options)
