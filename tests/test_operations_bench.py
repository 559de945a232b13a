"""Study 10's operations alone: who is wrong gets no time, and what bounds them is counted right."""

from dataclasses import replace

import pytest
import torch

from fusedlib.bench import cuda_graphs
from measure import llama
from measure.llama import operations
from measure.racing import operation, rivals
from measure.recording import results

SMALL = {"widths": [64], "vocabulary": 200, "batch_size": 2, "context_length": 16,
         "dtype": "float32", "device": "cpu", "repetitions": 2}  # fmt: skip
LARGE = {**SMALL, "widths": [2048], "vocabulary": 128256, "batch_size": 4,
         "context_length": 2048, "dtype": "bfloat16"}  # fmt: skip
BROKEN = {"loud": "d_x: norm error 1.00e-02", "frozen": "no gradient arrived at weight",
          "lazy": "once operands were rewritten in place, the results stay those of before",
          "greedy": "wrote over x", "hasty": "wrote over the gradient of y"}  # fmt: skip


def raced(folder, cases):
    own = results.Recorder("10_llama", profile="quick", directory=folder)
    own.race(replace(operations.RACE, seconds=0.0, most=2), cases)
    return results.read_rows(own.path)


@pytest.fixture
def graphed(monkeypatch):
    """On the host: what is captured runs again at each replay, in cases that say "graph"."""

    def capture(call):
        call()
        return cuda_graphs.Captured(call, {})

    for module in (operation, operations):  # of bounds, and of what is judged
        monkeypatch.setattr(module, "capture_call", capture)
    return lambda *given: [c | {"launch": "graph"} for c in operations.cases(*given, **SMALL)]


def register(monkeypatch, name, *traits, task="norm", compute=None):
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))
    options = {"settings": "a test", "traits": frozenset(traits)}
    operations.operation(task, name, **options)(compute or broken(name))


class Spoilt(torch.autograd.Function):
    """The norm's output as it is; backward writes over the gradient that comes in."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        actual = dy.clone()
        dy.zero_()
        return actual


def broken(name):
    kept = {}

    def forward(x, residual, weight):
        if name == "loud":
            x = 1.01 * x - 0.01 * x.detach()
        y, s = operations.plain_norm(x, residual, weight.detach() if name == "frozen" else weight)
        if name == "lazy":
            y, s = (
                one + (kept.setdefault((x.data_ptr(), at), one.detach().clone()) - one).detach()
                for at, one in enumerate((y, s))
            )
        if name == "greedy":
            x.data.mul_(0.5)
        return Spoilt.apply(y) if name == "hasty" else y, s

    return forward


def test_the_quick_cases_have_a_row_each(tmp_path):
    cases = [c for task in operations.TASKS for c in operations.cases(task, ["all"], **SMALL)]
    rows = raced(tmp_path, cases)
    assert len(rows) == len(cases) == 28
    for row in rows:
        if row["provider"].startswith(("liger", "cut", "quack")):
            assert row["status"] == "unavailable"
            assert "CUDA" in row["reason"] or "not installed" in row["reason"]
        elif row["provider"] == "torch-chunked" and not hasattr(
            torch.nn, "LinearCrossEntropyOptions"
        ):
            assert row["status"] == "unavailable" and "has no linear_cross_entropy" in row["reason"]
        elif row["provider"] != llama.BASELINE or row["status"] == "ok":
            assert row["status"] == "ok" and row["median_ms"] > 0 and row["tokens"] == 32
    ours = {row["experiment"]: row for row in rows if row["provider"] == "fused"}
    errors = {task: {n for n in row if n.endswith("_error")} for task, row in ours.items()}
    assert errors == {
        "loss": {"loss_error", "d_hidden_error", "d_weight_error"},
        "norm": {"y_error", "s_error", "d_x_error", "d_residual_error", "d_weight_error"},
        "rope": {"q_out_error", "k_out_error", "d_q_error", "d_k_error"},
    }
    assert all(row[n] < 1e-6 for task, row in ours.items() for n in errors[task])
    assert len({row["session"] for row in rows if row["status"] == "ok"}) == 5


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_gradient_gets_no_time_and_harms_nobody(name, tmp_path, monkeypatch, graphed):
    register(monkeypatch, name)
    rows = raced(tmp_path, graphed("norm", [name, "fused", "copy"]))
    assert [row["status"] for row in rows if row["provider"] != name] == ["ok"] * 4
    for row in (row for row in rows if row["provider"] == name):
        assert row["status"] == "wrong" and "median_ms" not in row
        assert BROKEN[name] in row["reason"]


def test_what_says_that_it_writes_in_place_has_operands_of_its_own(tmp_path, monkeypatch, graphed):
    register(monkeypatch, "greedy", "in place")
    seeds, draw = [], operations.draw
    monkeypatch.setattr(operations, "draw", lambda *of: seeds.append(of[1]) or draw(*of))
    rows = raced(tmp_path, graphed("norm", ["greedy", "fused"]))
    assert {row["status"] for row in rows} == {"ok"}
    assert all(row["d_x_error"] < 1e-6 for row in rows)
    assert seeds == [*range(operations.SETS), *range(operations.SETS)]


def test_a_rival_may_read_one_half_of_cos_and_sin_alone(tmp_path, monkeypatch):
    def by_halves(q, k, cos, sin):
        cos, sin = (torch.cat(2 * [table.chunk(2, -1)[0]], -1) for table in (cos, sin))
        return operations.plain_rope(q, k, cos, sin)

    register(monkeypatch, "halves", task="rope", compute=by_halves)
    rows = raced(tmp_path, operations.cases("rope", ["halves"], **SMALL))
    assert [row["status"] for row in rows] == ["ok", "ok"]


def test_work_by_hand():
    def work(task):
        return [operations.work(case) for case in operations.cases(task, ["fused"], **LARGE)]

    assert work("loss") == [{"tokens": 8192, "flops": 12_910_671_691_776}]
    tensor, row = 8192 * 2048 * 2, 2048 * 2  # bytes
    norm = [actual["compulsory_bytes"] for actual in work("norm")]
    assert norm == [4 * tensor + row, 8 * tensor + 3 * row]
    once = 2 * 8192 * (32 + 8) * 64 * 2 + 2 * 2048 * 64 * 2
    assert [actual["compulsory_bytes"] for actual in work("rope")] == [once, 2 * once]
