"""No speed without correctness, like against like: the gate, the turns and the rows."""

from itertools import pairwise

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from fusedlib import reference
from fusedlib.bench import check, cuda_graphs, turns
from fusedlib.bench.problem import Operands, exact_results
from fusedlib.bench.turns import Checked, Turn
from study import kernels, mlp, rivals
from study.mlp import Inputs, SwiGLUProblem, draw
from study.operation import Operation
from study.race import free, timed
from study.rivals import Workload
from study.run import grouped

RAGGED = SwiGLUProblem(37, 45, 83, "float32")


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))


def rival(compute):
    """Registers a computation of y as a rival of its own."""

    @rivals.rival("swiglu", "rival")
    def build(inputs: Inputs) -> Workload:
        """As the test has it."""
        leaves = inputs.leaves()
        return Workload(lambda: compute(**leaves), leaves)

    return "rival"


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


def run(names, shape=(37, 45, 83), directions=("forward+backward",), **options) -> pd.DataFrame:
    """Rows of the races of a shape."""
    options = {"dtype": "float32", "device": "cpu", "repetitions": 5, "group": ""} | options
    cases = kernels.races([shape], names, directions=directions, **options)
    races = grouped("kernels", cases).values()
    rows = [row.as_dict() for race in races for row in kernels.measure(race)]
    free()
    return pd.DataFrame(rows)


def test_torch_s_settings_are_the_case_s_while_it_is_measured():
    before, seen = torch.get_float32_matmul_precision(), []

    def seeing(x, w_gate, w_up, w_down):
        seen.append(torch.get_float32_matmul_precision())
        return reference.swiglu_mlp(x, w_gate, w_up, w_down)

    other = "high" if before == "highest" else "highest"
    assert {*run([rival(seeing)], shape=(5, 6, 7), precision=other)["status"]} == {"ok"}
    assert {*seen} == {other} and torch.get_float32_matmul_precision() == before


def test_a_setup_is_made_once_for_all_races_that_differ_in_nothing_of_it(monkeypatch):
    made = []
    monkeypatch.setattr(mlp, "draw", lambda *args: made.append(args) or draw(*args))
    rows = run(["eager"], directions=("forward", "forward+backward"), repetitions=2)
    assert rows["session"].nunique() == 2 and len(made) == 1


@pytest.mark.parametrize("compute", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_rival_gets_its_errors_and_no_time(compute):
    frame = run(["eager", rival(compute)])
    row = frame.set_index("provider").loc["rival"]
    assert row["status"] == "wrong"
    assert "error" in row["reason"]
    assert row.get("median_ms") != row.get("median_ms"), "a wrong rival has no time"
    assert frame.set_index("provider").loc["eager", "status"] == "ok"


def test_a_right_rival_is_timed_in_turns_beside_the_baseline():
    frame = run(["eager", rival(right)])
    row = frame.set_index("provider").loc["rival"]
    assert row["status"] == "ok"
    assert row["n"] == 5
    assert frame["session"].nunique() == 1, "rows timed together are pairs, sample by sample"
    for name in ("y", "d_x", "d_w_gate", "d_w_up", "d_w_down"):
        assert 0 < row[f"{name}_error"] < 1e-5


def test_a_gradient_that_never_arrives_is_wrong_by_name():
    frame = run(["eager", rival(missing_gradient)])
    row = frame.set_index("provider").loc["rival"]
    assert row["status"] == "wrong"
    assert row["reason"] == "no gradient arrived at w_gate"


def test_a_rival_whose_packed_weights_want_no_gradient_is_wrong():
    """Issue 18: it forgot `requires_grad_()`, got `ok`, and a speed-up of 1.29."""

    @rivals.rival("swiglu", "forgetful")
    def build(inputs):
        """Packs its weights and forgets that they are leaves."""
        packed = torch.cat([inputs.w_gate, inputs.w_up]).detach()

        def forward():
            gate, up = packed.chunk(2)
            return reference.swiglu_mlp(inputs.x, gate, up, inputs.w_down)

        return Workload(
            forward, {"x": inputs.x, "w_gate_up": packed, "w_down": inputs.w_down}
        )  # fmt: skip

    frame = run(["eager", "forgetful"], directions=("forward", "forward+backward"))
    rows = frame[frame["provider"] == "forgetful"]
    assert rows["status"].tolist() == ["wrong"] * 2, "also where only the forward is timed"
    assert set(rows["reason"]) == {"no gradient arrived at w_gate; no gradient arrived at w_up"}
    assert "median_ms" not in rows or rows["median_ms"].isna().all()


def test_a_rival_that_is_not_installed_says_so():
    @rivals.rival("swiglu", "absent", requires=("no_such_package",))
    def build(inputs):
        raise AssertionError

    frame = run(["eager", "absent"])
    row = frame.set_index("provider").loc["absent"]
    assert (row["status"], row["reason"]) == (
        "unavailable", "the package no_such_package is not installed",
    )  # fmt: skip


def test_a_problem_too_large_gives_all_its_rivals_that_row(monkeypatch):
    def too_large(problem, device):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(mlp, "draw", too_large)
    frame = run(["eager", "inductor"])
    assert frame["status"].tolist() == ["oom", "oom"]


def test_who_runs_out_of_memory_in_the_heat_goes_and_the_others_are_timed():
    calls = []

    def hungry(x, w_gate, w_up, w_down):
        calls.append(1)
        if len(calls) > 1:  # the check passes
            raise torch.OutOfMemoryError("out of memory")
        return reference.swiglu_mlp(x, w_gate, w_up, w_down)

    frame = run([rival(hungry), "eager"])
    assert frame.set_index("provider")["status"].to_dict() == {"rival": "oom", "eager": "ok"}


def test_where_memory_runs_out_together_the_one_that_holds_most_goes():
    held, calls = {"small": 10.0, "large": 1000.0}, []

    def call():
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")

    class Setup:
        def check(self, case):
            return Checked({"peak_mib": held[case["provider"]]}, lambda timed: Turn(call))

    cases = [{"provider": name, "device": "cpu"} for name in held]
    rows = timed(cases, lambda case: Setup(), same=("device",), rounds=2)
    free()
    assert {r.case["provider"]: r.status for r in rows} == {"small": "ok", "large": "oom"}


def test_a_sample_begins_on_an_idle_device(monkeypatch):
    """A host that ran ahead while a slow rival computed would launch the next one for nothing."""
    seen = []
    monkeypatch.setattr(turns.timing, "synchronize", seen.append)
    ready = {"a": Turn(lambda: None, prepare=seen.append)}
    turns._Clock(turns.Sampling("cpu", 1), ready)._prepare(3, "a")
    assert seen[-2:] == [3, "cpu"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_direction_and_dtype_is_measured_on_ragged_shapes(dtype):
    options = {"shape": (19, 24, 40), "dtype": dtype, "repetitions": 2}
    options["directions"] = kernels.DIRECTIONS
    frame = run(["eager", "products"], **options)
    assert frame["status"].tolist() == ["ok"] * 6
    assert frame["session"].nunique() == 3
    whole = frame.set_index("direction")["flops"]
    assert whole["backward"].tolist() == [6 * 2 * 19 * 24 * 40] * 2


def test_a_graph_without_a_gpu_is_unavailable_and_a_backward_has_none():
    both = ("forward", "backward")
    frame = run(["eager"], directions=both, launches=("graph",))
    assert frame[["status", "direction"]].values.tolist() == [["unavailable", "forward"]]


def by_turns(inputs: Inputs, is_labelled: bool = True) -> Workload:
    """Plain PyTorch over weights whose gate and up rows alternate, and whether it says so."""
    pair = [inputs.w_gate.detach(), inputs.w_up.detach()]
    packed = torch.stack(pair, dim=1).flatten(0, 1).requires_grad_()
    leaves = {"x": inputs.x, "w_gate_up": packed, "w_down": inputs.w_down}

    def forward():
        return reference.swiglu_mlp(inputs.x, packed[0::2], packed[1::2], inputs.w_down)

    return Workload(forward, leaves, alternating=is_labelled)


def test_alternating_rows_are_checked_in_their_order():
    rivals.rival("swiglu", "turns")(by_turns)
    rivals.rival("swiglu", "mislabelled")(lambda inputs: by_turns(inputs, is_labelled=False))
    frame = run(["eager", "turns", "mislabelled"])
    assert frame.set_index("provider")["status"].to_dict() == {
        "eager": "ok", "turns": "ok", "mislabelled": "wrong",
    }  # fmt: skip


def test_plain_products_are_those_of_the_reference():
    inputs = draw(RAGGED, "cpu")
    bound = mlp.products(inputs)
    bound.run("forward+backward")
    true = exact_results(inputs, reference.swiglu_mlp)
    true["d_w_gate_up"] = torch.cat([true["d_w_gate"], true["d_w_up"]])
    for name in ("y", "d_x", "d_w_gate_up", "d_w_down"):
        torch.testing.assert_close(bound.results[name], true[name].float())


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ["eager", "inductor", "liger", "fused"])
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_a_replay_gives_the_same_results_and_writes_gradients_anew(provider, direction):
    inputs = draw(SwiGLUProblem(64, 128, 256, "bfloat16"), "cuda")
    work = rivals.get("swiglu", provider).build(inputs)
    graph = cuda_graphs.capture(work, inputs.dy, direction)
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
    actual = check.errors(
        cuda_graphs.capture(work, inputs.dy, "forward+backward").results,
        exact_results(inputs, reference.swiglu_mlp),
    )
    assert max(actual["d_w_gate"].norm, actual["d_w_up"].norm) < 1e-5


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
        check.results_of(rivals.get("swiglu", "eager").build(inputs), inputs.dy)
    assert counter.get_total_flops() == RAGGED.flops


def test_operands_are_drawn_anew_and_keep_their_signs_where_results_do_not_depend_on_them_alone():
    x = torch.randn(64, 48)
    for compute, signs_stay in ((torch.exp, True), (torch.sign, False)):
        operation = Operation("any", Operands({"x": x.clone()}, torch.ones_like(x)), compute)
        draws = [operation.rewritten.values["x"], operation.anew().values["x"], x]
        assert all((one != other).double().mean() > 0.99 for one, other in pairwise(draws))
        assert [torch.equal(draw > 0, x > 0) for draw in draws] == [signs_stay, signs_stay, True]
        assert all(draw.abs().amax() <= x.abs().amax() for draw in draws)
