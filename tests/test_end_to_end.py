"""Whole steps: their parts, who takes turns in a model, who is rejected, what compiles again."""

import pandas as pd
import pytest
import torch
from torch import nn

from fusedlib.ops.matmul import function as projection
from fusedlib.patch import apply
from study import end_to_end, mlp, rivals, trainers
from study.models import transformer
from study.models.transformer import SwiGLU, Transformer
from study.race import free
from study.trainers import WEIGHTS

TINY = end_to_end.setting("cpu", batch_size=2, seconds=0.0, repetitions=3)


@pytest.fixture(autouse=True)
def small_models(monkeypatch, one_thread):
    tiny = transformer.config("nano", d_model=16, d_ff=32, num_heads=2, vocab_size=32)
    monkeypatch.setitem(transformer.SIZES, "nano", tiny)
    yield
    free()


@pytest.fixture
def entrants(monkeypatch):
    """Rivals of the test's own: a task's registry is theirs and eager's alone."""

    def register(task, **builders):
        for key in [k for k in rivals.RIVALS if k[0] == task and k[1] != "eager"]:
            monkeypatch.delitem(rivals.RIVALS, key)
        for name, build in builders.items():
            key, made = (task, name), rivals.Rival(task, name, build, "for a test")
            monkeypatch.setitem(rivals.RIVALS, key, made)

    return register


def step(precision="fp32", **options):
    [case] = end_to_end.steps(TINY, ["nano"], [8], [precision], **options)
    return case


def raced(experiment, names=("all",)):
    race = end_to_end.races(TINY, experiment, ["nano"], [8], ["fp32"], names)
    return {row.case["provider"]: row.as_dict() for row in end_to_end.measure(race)}


@pytest.mark.parametrize("precision", list(WEIGHTS))
def test_a_step_has_its_parts_and_its_work(precision):
    row = end_to_end.figures(step(precision))
    for part in ("forward", "backward", "optimizer", "both", "step"):
        assert row[f"{part}_median_ms"] > 0 and len(row[f"{part}_samples_ms"]) >= trainers.BLOCKS
    both = zip(row["forward_samples_ms"], row["backward_samples_ms"], strict=True)
    assert row["both_samples_ms"] == pytest.approx([f + b for f, b in both], abs=2e-6)
    shape = transformer.config("nano", context_length=8, attention="plain")
    assert (row["flops"], row["tokens"]) == (transformer.flops(shape, 2, 8), 16)


def test_the_optimizer_alone():
    row = end_to_end.figures(end_to_end.optimizers(TINY, ["nano"])[0])
    weights = Transformer(transformer.config("nano")).state_dict().values()
    nbytes = sum(w.untyped_storage().nbytes() for w in weights)
    assert row["least_bytes"] == 7 * nbytes and row["optimizer_median_ms"] > 0


def test_rivals_share_weights_and_take_turns(entrants):
    entrants("mlp", fused=mlp.FusedMLP)
    rows = raced("mlp")
    assert set(rows) == {"eager", "fused"}
    assert rows["eager"]["session"] == rows["fused"]["session"]
    for row in rows.values():
        assert row["status"] == "ok" and row["gradients_error"] < 1e-5
        assert len(row["both_samples_ms"]) == len(rows["eager"]["samples_ms"]) >= 3


def test_what_one_rival_trains_all_have(entrants):
    entrants("mlp", fused=mlp.FusedMLP)
    eager, packed = end_to_end.races(TINY, "mlp", ["nano"], [8], ["fp32"])
    shared = end_to_end.Setup(eager)
    turns = [shared.check(case).turn(case) for case in (eager, packed)]
    own = shared.own[0].gate_proj.weight
    for turn in turns:
        before = own.clone()
        turn.prepare(1)
        turn.run()
        assert not torch.equal(own, before)
        turn.reset()
    weights = {id(p) for p in shared.trainer.optimizer.state}
    assert id(own) in weights


def test_linear_computes_every_projection_of_the_same_weights(monkeypatch):
    model = Transformer(transformer.config("nano"))
    ours = end_to_end.by_linear(model)
    linear = [m for m in ours.modules() if isinstance(m, nn.Linear)]
    assert linear and all(isinstance(m, apply.FusedLinear) for m in linear)
    assert not any(isinstance(m, apply.FusedLinear) for m in model.modules())
    assert list(map(id, ours.parameters())) == list(map(id, model.parameters()))
    calls, real = [], projection.linear
    monkeypatch.setattr(projection, "linear", lambda *a: calls.append(1) or real(*a))
    rows = raced("model", ["eager", "linear"])
    assert {row["status"] for row in rows.values()} == {"ok"} and rows["linear"]["graphs"] == 0
    assert rows["linear"]["gradients_error"] < 1e-5 and len(calls) >= 4 * len(linear)
    assert "linear" not in rivals.chosen("compile", ["all"])


class Halved(SwiGLU):
    def __init__(self, own):
        nn.Module.__init__(self)
        self.gate_proj, self.up_proj, self.down_proj = own.gate_proj, own.up_proj, own.down_proj

    def forward(self, x):
        return 0.5 * super().forward(x)


class Frozen(Halved):
    def forward(self, x):
        gate = nn.functional.silu(nn.functional.linear(x, self.gate_proj.weight.detach()))
        return self.down_proj(gate * self.up_proj(x))


class Falling(Halved):
    def forward(self, x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")


def test_who_is_wrong_or_falls_has_a_row_without_times_and_the_others_have_theirs(entrants):
    entrants("mlp", halved=Halved, frozen=Frozen, falling=Falling)
    rows = raced("mlp")
    status = {name: row["status"] for name, row in rows.items()}
    assert status == {"eager": "ok", "halved": "wrong", "frozen": "wrong", "falling": "oom"}
    assert "logits: norm error" in rows["halved"]["reason"]
    assert "no gradient arrived at blocks.0.mlp.gate_proj.weight" in rows["frozen"]["reason"]
    assert rows["halved"]["gradients_error"] > 0.01
    assert [name for name, row in rows.items() if "step_median_ms" in row] == ["eager"]


def by_dynamo(call):
    return torch.compile(call, dynamic=False, backend="eager")


def test_compilation_is_timed_once(entrants):
    entrants("compile", inductor=by_dynamo)
    rows = raced("model")
    assert [rows[name]["status"] for name in ("eager", "inductor")] == ["ok", "ok"]
    assert rows["inductor"]["graphs"] == 1 and rows["inductor"]["compile_s"] > 0
    assert (rows["eager"]["graphs"], rows["eager"]["compile_s"]) == (0, 0)


def test_a_compiler_that_fails_says_why_and_eager_has_its_row(entrants):
    entrants("compile", broken=lambda call: torch.compile(call, backend="no such backend"))
    rows = raced("model")
    assert [rows[name]["status"] for name in ("eager", "broken")] == ["ok", "failed"]
    assert "no such backend" in rows["broken"]["reason"]


def step_row(provider, precision, both_ms, step_ms, experiment="model", **more):
    return {
        "machine": "here", "set": "first", "experiment": experiment, "provider": provider,
        "precision": precision, "model": "nano", "context_length": 16, "attention": "plain",
        "device": "cpu", "device_type": "cpu", "device_name": "a CPU", "session": precision,
        "both_median_ms": both_ms, "step_median_ms": step_ms, "flops": 2e9, **more,
    }  # fmt: skip


def test_rows_have_their_gains_and_their_share_of_the_peak():
    rows = end_to_end.derive(pd.DataFrame([
        step_row("eager", "fp32", 20.0, 30.0, "step"),
        step_row("eager", "bf16 autocast", 5.0, 8.0, "step"),
        step_row("eager", "fp32", 20.0, 30.0),
        step_row("inductor", "fp32", 10.0, 20.0, compile_s=5),
        {"machine": "here", "set": "first", "experiment": "ceiling", "ceiling": "gemm",
         "dtype": "float32", "flops_per_s": 4e11, "device": "cpu", "device_type": "cpu"},
    ]))  # fmt: skip
    alone, cast, beside, compiled, _ = rows.to_dict("records")
    assert (alone["execution"], compiled["execution"]) == ("eager", "inductor")
    assert pd.isna(beside["execution"]), "it ran interleaved: another time than alone"
    assert alone["mfu"] == pytest.approx(0.25), "of the product that was measured here"
    assert cast["cast_gain"] == 4.0 and pd.isna(alone["cast_gain"])
    assert compiled["repaid"] == 500 and pd.isna(beside["repaid"])
    parts = end_to_end.by_section(rows)
    both, step = (parts[parts["section"] == name] for name in ("both passes", "step"))
    assert [*both["median_ms"]] == [20.0, 5.0, 20.0, 10.0]
    assert not {*both["session"]} & {*step["session"]}, "a ratio is of the same section"
