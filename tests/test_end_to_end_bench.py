"""Study 06's measuring: statuses, resume, turns, and a recompilation that does not go unseen."""

import dataclasses

import pytest
import torch

from fusedlib.bench import machine, results, sweep
from fusedlib.bench.end_to_end import cases, compiling, gate, measure, running, turns, watching
from fusedlib.models import mlps, transformer
from fusedlib.models.transformer import Transformer

TINY = cases.Setting("cpu", batch_size=2, warmup=1, seconds=0.0, least=2, most=2)


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    tiny = transformer.config("nano", d_model=16, d_ff=32, num_heads=2, vocab_size=32)
    monkeypatch.setitem(transformer.SIZES, "nano", tiny)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def one(made):
    assert len(made) == 1
    return made[0]


def step(precision="fp32", **options):
    return one(cases.steps(TINY, ["nano"], [8], [precision], **options))


def recorder(folder):
    return results.Recorder(cases.STUDY, profile="quick", code="c", fresh=False, directory=folder)


@pytest.mark.parametrize("precision", list(cases.PRECISIONS))
def test_a_step_has_its_parts_rates_and_memory(precision):
    row = measure.Measure()(step(precision, inference=True))
    for part in ("forward", "backward", "optimizer", "both", "step"):
        assert len(row[f"{part}_samples_ms"]) == 2 and row[f"{part}_median_ms"] > 0
    both = zip(row["forward_samples_ms"], row["backward_samples_ms"], strict=True)
    assert row["both_samples_ms"] == pytest.approx([f + b for f, b in both], abs=2e-6)
    assert row["inference_n"] == measure.INFERENCES
    model = row["forward_flops"] + row["backward_flops"]
    assert row["flops_per_s"] == pytest.approx(1e3 * model / row["both_median_ms"])
    assert row["tokens_per_s"] == pytest.approx(1e3 * 16 / row["step_median_ms"])
    size = running.shape(step()).num_parameters * (2 if precision == "bf16" else 4) / 2**20
    assert row["weights_mib"] == row["gradients_mib"] == pytest.approx(size)
    assert row["state_mib"] == pytest.approx(2 * size, rel=0.05)


def test_autocast_computes_in_bf16_on_fp32_weights():
    case = step("bf16 autocast")
    trainer = running.trainer(case)
    logits = running.autocast(case, trainer.model)(trainer.tokens)
    assert logits.dtype == torch.bfloat16
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_steps_end_with_the_time_but_not_before_enough():
    case = step() | {"least": 3, "most": 50}
    assert len(running.collect(lambda: {"forward": 1.0}, case)["forward"]) == 3
    endless = case | {"seconds": 60.0, "most": 4}
    assert len(running.collect(lambda: {"forward": 1.0}, endless)["forward"]) == 4


def test_of_long_steps_few_are_enough(monkeypatch):
    now = iter(range(0, 1000, 2))  # two seconds a step
    monkeypatch.setattr(running.time, "perf_counter", lambda: float(next(now)))
    case = step() | {"least": 5, "few": 3, "most": 20}
    assert len(running.collect(lambda: {"forward": 1.0}, case)["forward"]) == 3
    assert running.fewest(case, running.LONG_S) == 5
    assert running.fewest(case | {"least": 2}, 9.0) == 2


def test_blocks_share_a_graph_and_compile_time_is_that_of_the_steps_that_compiled():
    row = measure.Measure(backend="eager")(step(mode="compiled blocks"))
    assert (row["graphs"], row["recompiled"]) == (1, 0), "a graph for both layers"
    assert row["compile_steps"] == 1 and row["compile_s"] > 0
    assert "inference_median_ms" not in row, "it would compile a second graph"


def test_compile_time_leaves_out_what_a_step_takes_anyway(monkeypatch):
    graphs, now = iter([0, 0, 1, 1, 1, 1]), iter([0.0, 5.0, 5.0, 7.0])  # before and after each step
    monkeypatch.setattr(compiling, "events", lambda: next(graphs))
    monkeypatch.setattr(compiling.time, "perf_counter", lambda: next(now))
    found = compiling.settle(lambda: None, "cpu")
    assert found == {"compile_s": 3.0, "compile_steps": 1, "graphs": 1}


def test_each_device_is_prepared_once(monkeypatch):
    prepared = []
    monkeypatch.setattr(compiling, "prepare", lambda *given: prepared.append(given))
    run = measure.Measure(backend="eager")
    for _ in range(2):
        run(step(mode="compiled blocks"))
    assert prepared == [("cpu", "eager")]


def test_a_recompilation_in_a_measured_step_marks_the_row(monkeypatch):
    collect = running.collect

    def shorter(work, case):
        def step():
            trainer = work.func.__self__._trainer
            trainer.tokens, trainer.targets = trainer.tokens[:, :-1], trainer.targets[:, :-1]
            return work()

        return collect(step, case)

    monkeypatch.setattr(running, "collect", shorter)
    row = measure.Measure(backend="eager")(step(mode="compiled"))
    assert row["recompiled"] == 2


def test_what_never_settles_is_unavailable(monkeypatch):
    count = iter(range(100))
    monkeypatch.setattr(compiling, "events", lambda: next(count))
    with pytest.raises(results.Unavailable, match="still compiles after 8 steps"):
        compiling.settle(lambda: None, "cpu")


def test_a_compiler_that_fails_is_unavailable_and_memory_is_not():
    def fails():
        raise RuntimeError("no compiler\nfound")

    with pytest.raises(results.Unavailable, match="does not work here: no compiler$"):
        compiling.settle(fails, "cpu")
    with pytest.raises(results.Unavailable, match="does not work here"):
        compiling.prepare("cpu", "no such backend")

    def runs_out():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        compiling.settle(runs_out, "cpu")


def test_a_device_that_is_not_there_is_unavailable():
    for name in ("mps", "cuda"):
        if machine.device_type() != name:
            case = step() | {"device": name}
            _, status, reason = sweep.outcome(measure.Measure(), case)
            assert (status, reason) == ("unavailable", f"this machine has no {name} device")


def test_only_what_is_far_above_the_memory_is_not_tried(monkeypatch):
    case = one(cases.steps(TINY, ["2.7b"], [1024], ["fp32"]))
    shape = running.shape(case)
    matrices = 32 * 2 * 32 * 1024**2 * 4
    assert running.least_bytes(case) == 16 * shape.num_parameters + matrices
    need = running.least_bytes(case) / 2**30
    described = machine.describe()
    for total, status in ((need / 1.4, None), (need / 1.6, "oom (predicted)")):
        facts = {**described.as_dict(), "memory_gib": total}
        monkeypatch.setattr(machine, "describe", lambda f=facts: machine.Machine(**f))
        assert (running.hopeless(case) is None) == (status is None)
    figures = measure.Measure()(case)
    assert figures["status"] == "oom (predicted)"
    assert "more than 1.5 times the" in figures["reason"]


def test_a_case_out_of_memory_leaves_the_next_one(monkeypatch, tmp_path):
    real = running.trainer

    def trainer(case, direction="step"):
        if case["precision"] == "fp32":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return real(case, direction)

    monkeypatch.setattr(running, "trainer", trainer)
    todo = cases.steps(TINY, ["nano"], [8], ["fp32", "bf16"])
    measure.sweep_cases(recorder(tmp_path), todo, measure.Measure(), cases.label)
    rows = results.load(cases.STUDY, directory=tmp_path)
    assert rows["status"].tolist() == ["oom", "ok"]


def test_a_stopped_run_goes_on_where_it_was(tmp_path):
    todo = cases.steps(TINY, ["nano"], [8], ["fp32", "bf16"])
    todo += cases.optimizer_cases(TINY, ["nano"])
    seen = []

    def stops(case):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(case)
        return {"both_median_ms": 1.0}

    with pytest.raises(KeyboardInterrupt):
        measure.sweep_cases(recorder(tmp_path), todo, stops, cases.label)
    again = []
    resumed = recorder(tmp_path)
    measure.sweep_cases(resumed, todo, lambda case: again.append(case) or {}, cases.label)
    assert again == todo[2:] and resumed.skipped == 2


def test_mlps_take_turns_and_each_gets_its_own_row(monkeypatch):
    made = mlps.make

    def make(model, provider):
        if provider == "fused":
            return [mlps._packed(block.mlp) for block in model.blocks]
        return made(model, provider)

    monkeypatch.setattr(mlps, "make", make)
    monkeypatch.setattr(mlps, "check_available", lambda *_: None)
    setting = dataclasses.replace(TINY, most=9)
    todo = cases.mlp_cases(setting, ["nano"], [8], ["fp32"], ["eager", "fused"])
    run = measure.Measure()
    rows = [run(case) for case in todo]
    assert rows[0]["both_speedup"] == 1.0
    assert rows[1]["both_speedup_low"] <= rows[1]["both_speedup"] <= rows[1]["both_speedup_high"]
    for row in rows:
        assert len(row["step_samples_ms"]) == turns.PAIRS and row["gradients_error"] < 1e-5


def test_a_provider_that_is_missing_has_no_times_and_the_others_have():
    todo = cases.mlp_cases(TINY, ["nano"], [8], ["fp32"], ["eager", "fused"])
    run = measure.Measure()
    found = [sweep.outcome(run, case) for case in todo]
    if machine.device_type() != "cuda":
        assert [status for _, status, _ in found] == ["ok", "unavailable"]
        assert found[1][2] and not found[1][0]


def test_a_model_too_large_for_turns_is_tried_once(monkeypatch):
    tries = []

    def runs_out(case, direction="step"):
        tries.append(case)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(running, "trainer", runs_out)
    run = turns.Turns()
    todo = cases.mlp_cases(TINY, ["nano"], [8], ["fp32"], ["eager", "fused"])
    assert [run.figures(case)["status"] for case in todo] == ["oom", "oom"]
    assert len(tries) == 1


class Halved(transformer.SwiGLU):
    def forward(self, x):
        return 0.5 * super().forward(x)


def test_a_wrong_mlp_is_rejected_before_the_clock(monkeypatch):
    def make(model, provider):
        wrong = [Halved(16, 32) for _ in model.blocks]
        for block, one_of in zip(model.blocks, wrong, strict=True):
            one_of.load_state_dict(block.mlp.state_dict())
        return wrong

    monkeypatch.setattr(mlps, "make", make)
    case = one(cases.mlp_cases(TINY, ["nano"], [8], ["fp32"], ["eager"]))
    figures = gate.verdict(case)
    assert figures["status"] == "wrong" and "logits: norm error" in figures["reason"]
    told = turns.Turns().figures(case)
    assert told["status"] == "wrong" and "step_median_ms" not in told


def test_a_gradient_that_does_not_arrive_is_wrong():
    error = gate.check.Errors(0.0, 0.0)
    usual = dict.fromkeys(("logits", "loss", "w"), error)
    assert gate.misses({"logits": error}, usual, torch.float32) == ["no gradient arrived at w"]
    nan = gate.check.Errors(float("nan"), 0.0)
    assert gate.misses(usual | {"w": nan}, usual, torch.float32)


def test_the_optimizer_alone_and_the_profile():
    row = measure.Measure()(cases.optimizer_cases(TINY, ["nano"])[0])
    weights = Transformer(transformer.config("nano")).state_dict().values()
    nbytes = sum(w.untyped_storage().nbytes() for w in weights)
    assert row["least_bytes"] == 7 * nbytes and row["tensors"] == len(weights)
    plain, cast = (
        measure.Measure()(case)
        for case in cases.profile_cases(TINY, ["nano"], 8, ["fp32", "bf16 autocast"])
    )
    assert cast["casts"] > plain["casts"] and cast["operators"] > plain["operators"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: cases.steps(TINY, ["huge"], [8], ["fp32"]), "unknown model size 'huge'"),
        (lambda: cases.steps(TINY, ["nano"], [0], ["fp32"]), "at least one token, got 0"),
        (lambda: cases.steps(TINY, ["nano"], [8], ["fp8"]), "unknown precision 'fp8'"),
        (lambda: step(mode="traced"), "unknown mode 'traced'; known: eager, compiled"),
        (lambda: cases.mlp_cases(TINY, ["nano"], [8], ["fp32"], ["x"]), "unknown MLP 'x'"),
        (lambda: cases.Setting("cpu", least=3, most=2), "1 <= least <= most"),
        (lambda: cases.Setting("cpu", few=0), "few must be at least 1"),
        (lambda: compiling.compiled(None, "eager"), "mode must be 'compiled' or"),
    ],
)
def test_bad_input_is_told(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_peaks_are_told_apart_at_the_optimizers_step(monkeypatch):
    trainer = running.trainer(step())
    trainer.device = torch.device("cuda")
    monkeypatch.setattr(trainer, "step", lambda: trainer.optimizer.step() or {"total": 1.0})
    seen = iter([700, 900, 600, 950])  # at the optimizer's step and after it, twice
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(seen) * watching.MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 500 * watching.MIB)
    resets = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
    watch, peaks = watching.Watch(trainer), {}
    assert watch.step(peaks) == watch.step(peaks) == {"total": 1.0}
    assert peaks == {"both_peak_mib": 700, "peak_mib": 950, "held_mib": 200}
    assert len(resets) == 2
