"""No speed without correctness, like against like: the gate, the turns and the rows."""

import re

import pytest
import torch
from torch import Tensor, nn

from fusedlib import reference
from fusedlib.bench import check, compare, graphs, providers
from fusedlib.bench.plain_products import PlainProducts
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


def test_the_truth_is_made_once_a_problem_whatever_its_directions(tmp_path, monkeypatch):
    made = []
    truth = check.truth
    monkeypatch.setattr(check, "truth", lambda inputs: made.append(1) or truth(inputs))
    problems = [
        SwiGLUProblem(19, 24, 40, "float32", direction, trained)
        for direction, trained in (
            ("forward", True), ("backward", True), ("backward", False), ("forward+backward", True),
        )
    ]  # fmt: skip
    frame, _ = run(tmp_path, ["eager"], problems, repetitions=2, plain_products=True)
    assert made == [1]
    assert frame["status"].tolist() == ["ok"] * 8
    assert frame["session"].nunique() == 4, "products and rivals of a group are pairs"
    frozen = frame[~frame["weight_gradients"].astype(bool) & (frame["experiment"] == "swiglu")]
    assert frozen["d_x_error"].notna().all()
    assert frozen["d_w_gate_error"].isna().all(), "frozen weights have no gradient to check"
    whole = frame[(frame["direction"] == "backward") & (frame["experiment"] == "products")]
    assert whole["flops"].tolist() == [6 * 2 * 19 * 24 * 40, 3 * 2 * 19 * 24 * 40]


def test_what_cannot_run_is_told_without_measuring_the_others_again(tmp_path, rivals):
    @providers.provider("absent", requires=("no_such_package",))
    def build(inputs):
        raise AssertionError

    _, first = run(tmp_path, ["eager", "absent"])
    assert first.measured == 2
    _, second = run(tmp_path, ["eager", "absent"])
    assert second.measured == 0


def test_a_graph_without_a_gpu_is_unavailable_and_a_backward_has_none(tmp_path):
    problems = [SwiGLUProblem(4, 8, 8, "float32", d) for d in ("forward", "backward")]
    frame, _ = run(tmp_path, ["eager"], problems, launches=("graph",))
    assert frame[["status", "reason", "direction"]].values.tolist() == [
        ["unavailable", "CUDA graphs need a CUDA GPU", "forward"]
    ]


def test_an_unknown_launch_is_told(tmp_path):
    with pytest.raises(ValueError, match="unknown launch 'rocket'; known: python, graph"):
        run(tmp_path, ["eager"], launches=("rocket",))


def by_turns(inputs: Inputs, told: bool = True) -> Workload:
    """Plain PyTorch over weights whose gate and up rows alternate, and whether it says so."""
    pair = [inputs.w_gate.detach(), inputs.w_up.detach()]
    packed = torch.stack(pair, dim=1).flatten(0, 1).requires_grad_()
    leaves = {"x": inputs.x, "w_gate_up": packed, "w_down": inputs.w_down}

    def forward():
        return reference.swiglu_mlp(inputs.x, packed[0::2], packed[1::2], inputs.w_down)

    return Workload(forward, leaves, alternating=told)


def test_alternating_rows_are_checked_in_their_order(tmp_path, rivals):
    providers.provider("turns")(by_turns)
    providers.provider("mislabelled")(lambda inputs: by_turns(inputs, told=False))
    frame, _ = run(tmp_path, ["eager", "turns", "mislabelled"])
    assert frame.set_index("provider")["status"].to_dict() == {
        "eager": "ok", "turns": "ok", "mislabelled": "wrong",
    }  # fmt: skip


def test_plain_products_are_those_of_the_reference():
    inputs = draw(RAGGED, "cpu")
    products = PlainProducts.of(inputs)
    products.run("forward+backward", weight_gradients=True)
    true = check.truth(inputs)
    true["d_w_gate_up"] = torch.cat([true["d_w_gate"], true["d_w_up"]])
    for name in ("y", "d_x", "d_w_gate_up", "d_w_down"):
        torch.testing.assert_close(getattr(products, name), true[name].float())


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ["eager", "inductor", "liger", "fused"])
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_a_replay_gives_the_same_results_and_writes_gradients_anew(provider, direction):
    inputs = draw(SwiGLUProblem(64, 128, 256, "bfloat16"), "cuda")
    work = providers.get(provider).set_up(inputs)
    graph = graphs.capture(work, inputs.dy, direction)
    graph.replay()
    torch.cuda.synchronize()
    once = check.results_of(work, inputs.dy)
    assert set(graph.results) == (set(once) if direction == "forward+backward" else {"y"})
    for name, tensor in graph.results.items():
        torch.testing.assert_close(tensor, once[name])


@pytest.mark.gpu
def test_a_replay_s_alternating_rows_are_read_after_it():
    inputs = draw(SwiGLUProblem(64, 128, 256, "float32"), "cuda")
    work = by_turns(inputs)
    found = check.errors(
        graphs.capture(work, inputs.dy, "forward+backward").results, check.truth(inputs)
    )
    assert found["d_w_gate_up"].norm < 1e-5


def test_a_backward_alone_is_not_captured():
    work = providers.get("eager").set_up(draw(RAGGED, "cpu"))
    with pytest.raises(ValueError, match="not 'backward'"):
        graphs.capture(work, draw(RAGGED, "cpu").dy, "backward")


def test_an_unknown_provider_lists_the_known(tmp_path):
    known = ", ".join(sorted(providers.PROVIDERS))
    with pytest.raises(ValueError, match=re.escape(f"unknown provider 'ligr'; known: {known}")):
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
    frozen = SwiGLUProblem(2, 3, 5, "float32", "backward", weight_gradients=False)
    assert frozen.flops == problem.flops
    assert frozen.compulsory_bytes == 4 * (6 + 45 + 6 + 6)
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
        ({"precision": "low"}, "unknown precision 'low'; known: highest, high"),
    ],
)
def test_impossible_problems_are_told(change, message):
    options = {"tokens": 1, "hidden_size": 1, "intermediate_size": 1} | change
    with pytest.raises(ValueError, match=message):
        SwiGLUProblem(**options)
