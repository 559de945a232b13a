"""Whole steps: their parts, who takes turns in a model, who is rejected, what compiles again."""

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
def small_models(monkeypatch, one_thread, no_warm_compiler):
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


def test_rivals_share_weights_and_take_turns(entrants):
    entrants("mlp", fused=mlp.FusedMLP)
    rows = raced("mlp")
    assert set(rows) == {"eager", "fused"}
    assert rows["eager"]["session"] == rows["fused"]["session"]
    for row in rows.values():
        assert row["status"] == "ok" and row["gradients_error"] < 1e-5
        assert len(row["both_samples_ms"]) == len(rows["eager"]["samples_ms"]) >= 3


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
