"""No speed without correctness, like against like: the gate, the turns and the rows."""

import gc
import time

import pandas as pd
import pytest
import torch
from torch import Tensor

from fusedlib import reference
from fusedlib.bench import check, cuda_graphs, turns
from study import kernels, rivals
from study.mlp import Inputs, SwiGLUProblem, draw
from study.race import free
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


def not_a_number(x, w_gate, w_up, w_down) -> Tensor:
    return reference.swiglu_mlp(x, w_gate, w_up, w_down) * float("nan")


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


@pytest.mark.parametrize("compute", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_rival_gets_its_errors_and_no_time(compute):
    frame = run(["eager", rival(compute)])
    row = frame.set_index("provider").loc["rival"]
    assert row["status"] == "wrong"
    assert "error" in row["reason"]
    assert row.get("median_ms") != row.get("median_ms"), "a wrong rival has no time"
    assert frame.set_index("provider").loc["eager", "status"] == "ok"


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


def test_who_runs_out_of_memory_in_the_heat_goes_and_the_others_are_timed():
    calls = []

    def hungry(x, w_gate, w_up, w_down):
        calls.append(1)
        if len(calls) > 1:  # the check passes
            raise torch.OutOfMemoryError("out of memory")
        return reference.swiglu_mlp(x, w_gate, w_up, w_down)

    frame = run([rival(hungry), "eager"])
    assert frame.set_index("provider")["status"].to_dict() == {"rival": "oom", "eager": "ok"}


def test_of_turns_that_know_their_peaks_the_one_that_holds_most_is_out_of_memory():
    """As steps of a whole model, whose peak is known only when their turn is made."""
    full = True

    def run():
        if full:
            raise torch.OutOfMemoryError("out of memory")

    entrants = {
        name: (
            {},
            turns.Checked({}, lambda case, mib=mib: turns.Turn(run, figures={"peak_mib": mib})),
        )
        for name, mib in (("small", 100.0), ("large", 130.0))
    }
    tried = turns.timed_together(entrants, turns.Sampling("cpu", rounds=3))
    (name, outcome), full = next(tried), False
    assert (name, outcome.status) == ("large", "oom")
    assert [(name, outcome.status) for name, outcome in tried] == [("small", "ok")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_direction_and_dtype_is_measured_on_ragged_shapes(dtype):
    options = {"shape": (19, 24, 40), "dtype": dtype, "repetitions": 2}
    options["directions"] = kernels.DIRECTIONS
    frame = run(["eager", "products"], **options)
    assert frame["status"].tolist() == ["ok"] * 6
    assert frame["session"].nunique() == 3
    whole = frame.set_index("direction")["flops"]
    assert whole["backward"].tolist() == [6 * 2 * 19 * 24 * 40] * 2


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
def test_a_graph_is_captured_though_an_earlier_backward_lies_in_a_cycle(request):
    gc.disable()
    request.addfinalizer(gc.enable)
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    kept = [(weight * 2).sum()]
    kept.append(kept)
    del kept
    work = Workload(lambda: (weight * 3).sum(), {"w": weight})
    dy = torch.ones((), device="cuda")
    graph = cuda_graphs.capture(work, dy, "forward+backward")
    graph.replay()
    torch.testing.assert_close(graph.results["d_w"], torch.full_like(weight, 3))


def test_flops_agree_with_torch():
    from torch.utils.flop_counter import FlopCounterMode

    inputs = draw(RAGGED, "cpu")
    with FlopCounterMode(display=False) as counter:
        check.results_of(rivals.get("swiglu", "eager").build(inputs), inputs.dy)
    assert counter.get_total_flops() == RAGGED.flops


@pytest.mark.parametrize("held", [True, False])
def test_who_is_held_against_nothing_was_not_seen_in_the_clock(held):
    looks = []
    turn = turns.Turn(lambda: time.sleep(1e-3), again=(lambda: looks.append(1)) if held else None)
    entrant = turns.Checked({}, lambda case: turn)
    [(_, timed)] = turns.timed_together({"one": ({}, entrant)}, turns.Sampling("cpu", rounds=3))
    assert timed.ok and entrant.seen_in_clock is held and bool(looks) is held
