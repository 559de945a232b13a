"""What is counted of an MLP: by hand, and against every allocation of the CPU's allocator."""

import re
from dataclasses import replace

import pytest
import torch

from fusedlib import reference
from fusedlib.bench.attempt import Attempt
from fusedlib.ops.mlp import function as functional
from study import calculator, ledger, memory, rivals
from study.allocator import OF_PASS, mib_of, passed
from study.errors import SizesError
from study.lean import LeanMLP
from study.ledger import LEDGERS, D, W
from study.mlp import PLAIN_PATH, TASK, SwiGLUProblem, draw
from study.models.transformer import SIZES
from study.rivals import Workload
from study.rows import load

LLM = SwiGLUProblem(8192, 4096, 14336)
# MiB at 8192·4096·14336 in bf16: F is 224, D is 64, W is 112; sums worked by hand.
BY_HAND = {
    "eager": (4 * 224, 3 * 224 + 64 + 112 + 224 + 2 * 224),
    "inductor": (3 * 224, 3 * 224 + 64 + 112 + 224),
    "liger": (3 * 224, 3 * 224 + 64 + 112 + 224),
    "quack": (2 * 224, 2 * 224 + 64 + 2 * 224 + 224 + 112),
    "fused": (2 * 224, 2 * 224 + 64 + 112 + 64 + 2 * 112),
    "fused-input": (0, 64 + 2 * 224 + 112 + 64 + 2 * 112),
}
TOKENS_DECIDE, WEIGHTS_DECIDE = "512·128·512", "64·128·128"


def alone(shape, name="eager"):
    """What is kept, and one step, of an MLP in fp32 on the CPU."""
    tokens, width, inner = map(int, shape.split("·"))
    fields = {"tokens": tokens, "hidden_size": width, "intermediate_size": inner}
    shared = {**fields, "dtype": "float32", "device": "cpu", "provider": name}
    return [{"experiment": experiment, **shared} for experiment in ("saved", "step")]


def stacks(shape, layers):
    """Stacks in fp32 on the CPU, of each depth without gradients and with them."""
    cases = memory.cases(stack_fp32=shape, layers=layers, everywhere=["eager"], device="cpu")
    return [c for c in cases if c["experiment"] == "stack" and c["dtype"] == "float32"]


@pytest.mark.parametrize("name", LEDGERS)
def test_kept_and_peak_by_hand(name):
    book = ledger.of(name)
    kept, peak = BY_HAND[name]
    assert book.kept().mib(LLM) == kept
    assert ledger.total(book.peak(LLM)[1]).mib(LLM) == peak


@pytest.mark.parametrize("shape", [TOKENS_DECIDE, WEIGHTS_DECIDE])
def test_eager_on_the_cpu_holds_what_is_counted(shape):
    saved, step = (memory.figures(c) for c in alone(shape))
    problem = SwiGLUProblem.of(alone(shape)[0])
    kept, counted = ledger.EAGER.kept().mib(problem), ledger.EAGER.peak(problem)[1]
    assert saved["saved_mib"] == kept
    assert step["peak_mib"] == ledger.total(counted).mib(problem)
    for name in OF_PASS:
        assert step[f"peak_{name}_mib"] == counted[name].mib(problem), name
    assert step["gradients_mib"] == (W * 3 + D).mib(problem)


@pytest.mark.parametrize("save", ["gate_up", "input"])
def test_fused_without_kernels_holds_what_is_counted(save):
    problem = SwiGLUProblem(512, 128, 512, "float32")
    inputs = draw(problem, "cpu")
    w_gate_up = torch.cat([inputs.w_gate, inputs.w_up]).detach().requires_grad_()
    peak = passed(
        lambda: functional.swiglu_mlp(inputs.x, w_gate_up, inputs.w_down, save=save), inputs.dy
    ).figures()["peak_mib"]
    book = ledger.of({"gate_up": "fused", "input": "fused-input"}[save], PLAIN_PATH)
    # torch's checkpoint keeps the state of the generator, 5 KiB, beside.
    assert peak == pytest.approx(ledger.total(book.peak(problem)[1]).mib(problem), rel=2e-3)


@pytest.mark.parametrize("shape", [TOKENS_DECIDE, WEIGHTS_DECIDE])
def test_a_stack_holds_at_least_what_is_counted(shape):
    for case in stacks(shape, [1, 3]):
        actual, counted = memory.figures(case)["total_peak_mib"], memory.counted_mib(case)
        assert 1 <= actual / counted < 1.7


def test_what_a_backward_leaves_behind_is_no_gradient():
    left = []

    class Leaves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.T

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            left.append(torch.ones(64, 1024))
            return dy @ w, dy.T @ x

    x, w = (torch.randn(64, 128, requires_grad=True) for _ in range(2))
    held = passed(lambda: Leaves.apply(x, w), torch.ones(64, 64)).figures()
    assert held["gradients_mib"] == mib_of([x.grad, w.grad]) == 0.0625
    assert held["peak_gradients_mib"] <= 0.0625 and held["peak_temporaries_mib"] >= 0.25


# --- who is measured -----------------------------------------------------------------------------


def test_a_rival_without_a_gradient_is_wrong_and_has_no_figures(monkeypatch):
    def forgetful(inputs):
        return Workload(
            lambda: inputs.x @ inputs.w_down.detach().mT, {"x": inputs.x, "w_down": inputs.w_down}
        )

    forged = replace(rivals.get(TASK, "eager"), name="liger", build=forgetful)
    monkeypatch.setitem(rivals.RIVALS, (TASK, "liger"), forged)
    actual = Attempt.at(memory.figures, alone("8·16·16", "liger")[0])
    assert actual.status == "wrong" and "no gradient arrived at w_down" in actual.reason
    assert "saved_mib" not in actual.figures


def test_what_cannot_fit_is_not_tried_and_says_so():
    case = stacks("16384·8192·28672", [4096])[0]
    actual = Attempt.at(memory.figures, case)
    assert actual.status == "oom (predicted)" and "not tried" in actual.reason


# --- what a notebook shows -----------------------------------------------------------------------


def test_the_calculator_gives_the_four_parts_of_every_recorded_model_within_a_thousandth():
    recorded = load("model_memory").query("experiment == 'pass' and status == 'ok'")
    seen = set()
    for row in recorded.to_dict("records"):
        model, attention = SIZES[row["model"]], {"sdpa": "fused"}.get(row["attention"], "plain")
        counted = calculator.parts(
            row["precision"], attention, hidden=model.d_model, layers=model.num_layers,
            inner=model.d_ff, heads=model.num_heads, tokens=int(row["context_length"]),
            batch=int(row["batch_size"]),
        )  # fmt: skip
        measured = {"weights": row["weights_bytes"]}
        if row["mode"] == "step":
            measured |= {"gradients": row["gradients_bytes"], "optimizer": row["state_bytes"]}
        if row["mode"] == "forward":
            saved = [n for n in row if re.fullmatch(r"saved_\w+_bytes", n)]
            measured["activations"] = sum(row[n] for n in saved if row[n] == row[n])
            there = counted["weights"] + counted["activations"]
            assert there == pytest.approx(row["asked_gib"], rel=1e-2), "all but the logits"
        for part, nbytes in measured.items():
            seen.add((part, row["precision"], attention))
            assert nbytes / 2**30 == pytest.approx(counted[part], rel=1e-3), (part, row["mode"])
    assert len(seen) == 4 * 3 * 2


def test_the_calculator_knows_shared_heads_and_a_large_vocabulary():
    shape = {"hidden": 4096, "layers": 32, "inner": 14336, "heads": 32, "tokens": 8192}
    llama = calculator.parts(**shape, kv_heads=8, vocabulary=128_256)
    assert llama["weights"] * 2**30 == 2 * 8_030_261_248, "Llama-3-8B, as its authors count it"
    all_heads, few = (
        calculator.parts(**shape, vocabulary=v)["activations"] for v in (128_256, 10_000)
    )
    n, gib = 8192, 2**30
    assert (all_heads - few) * gib == pytest.approx(4 * n * 118_256)
    kept = (all_heads - llama["activations"]) * gib
    assert kept == pytest.approx(32 * 2 * 2 * n * 24 * 128), "k and v of 24 heads, 32 blocks"
    with pytest.raises(SizesError, match="kv_heads must divide heads.* not 5 of 32 heads of 4096"):
        calculator.parts(**shape, kv_heads=5)


def test_the_calculator_s_larger_moment_is_the_peak_that_was_asked_for():
    steps = load("model_memory").query("mode == 'step' and status == 'ok'")
    for row in steps.to_dict("records"):
        model = SIZES[row["model"]]
        held = calculator.moments(
            row["precision"], {"sdpa": "fused"}.get(row["attention"], "plain"),
            hidden=model.d_model, layers=model.num_layers, inner=model.d_ff,
            heads=model.num_heads, tokens=int(row["context_length"]), batch=int(row["batch_size"]),
        )  # fmt: skip
        loss, update = (sum(sizes.values()) for sizes in held.values())
        assert max(loss, update) == pytest.approx(row["counted_gib"], rel=1e-3)
        assert update == pytest.approx(row["asked_gib"], rel=2e-3) and update > loss
        passing = row["peak_in_backward_mib"] / 1024
        assert loss == pytest.approx(passing, rel=0.02) or loss < passing
    assert len(steps) > 20


def test_the_calculator_knows_tied_embeddings_wide_heads_masters_and_a_chunked_loss():
    qwen = {"hidden": 1536, "layers": 28, "inner": 8960, "heads": 12, "kv_heads": 2, "tokens": 8}
    tied, apart = (
        calculator.parts(**qwen, vocabulary=151_936, tied=tied)["weights"] * 2**29
        for tied in (True, False)
    )
    biases = 28 * (12 + 2 * 2) * 128
    assert tied == 1_543_714_304 - biases, "Qwen2.5-1.5B"
    assert apart - tied == 151_936 * 1536
    wide = {"hidden": 1024, "layers": 28, "inner": 3072, "heads": 16, "kv_heads": 8, "head": 128}
    found = calculator.parts(**wide, tokens=8, vocabulary=151_936, tied=True)["weights"] * 2**29
    assert found == 596_049_920 - 28 * 2 * 128, "Qwen3-0.6B, without the norms of its heads"
    pure, master = (calculator.parts(name, **qwen) for name in ("bf16", "bf16, fp32 master"))
    assert master["optimizer"] == 3 * pure["optimizer"] == 6 * pure["weights"]
    assert {n: master[n] for n in pure if n != "optimizer"} == {
        n: pure[n] for n in pure if n != "optimizer"
    }
    of = {"hidden": 4096, "layers": 32, "inner": 14336, "heads": 32, "kv_heads": 8, "tokens": 8192}
    whole, chunked = (
        calculator.moments(**of, vocabulary=128_256, loss=loss, adamw="fused")["at the loss"]
        for loss in calculator.LOSSES
    )
    assert whole["logits"] * 2**30 == 8 * 8192 * 128_256 and "logits" not in chunked
    saved = (whole["activations"] - chunked["activations"]) * 2**30
    assert saved == pytest.approx(4 * 8192 * 128_256 - 2 * 4096 * (8192 + 128_256))
    update = calculator.moments(**of, adamw="fused")["in the update"]
    assert set(update) == {"weights", "optimizer", "gradients"}


def test_one_more_layer_costs_what_is_counted():
    """Its weights P and what it keeps, S with its x, or its gradients if larger; where gradients
    are held, both: P + max(S, P), and 2 P + S.
    """
    rows = load("memory").query("experiment == 'stack' and dtype == 'bfloat16'")
    deepest = rows[rows["layer_mib"].notna()].sort_values("layers")
    deepest = deepest.groupby(["machine", "held", "provider"]).tail(1)
    assert len(deepest) > 12
    for row in deepest.to_dict("records"):
        problem, book = SwiGLUProblem.of(row), ledger.of(row["provider"], row["path"])
        saved, weights = (book.at(problem).kept() + D).mib(problem), (W * 3).mib(problem)
        counted = weights + (weights + saved if row["held"] else max(saved, weights))
        assert row["layer_mib"] == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize("only_x", [False, True])
def test_the_solution_of_the_exercise_is_right_and_peaks_below_pytorch(only_x):
    torch.manual_seed(0)
    shapes = ((128, 32), (112, 32), (112, 32), (32, 112))
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(
        lambda *few: LeanMLP.apply(*few, only_x),
        [leaf[: 5 if at else 7, : 5].detach().requires_grad_() for at, leaf in enumerate(leaves)],
    )  # fmt: skip
    ways = {"lean": lambda: LeanMLP.apply(*leaves, only_x),
            "pytorch": lambda: reference.swiglu_mlp(*leaves)}  # fmt: skip
    held = {n: passed(way, torch.ones_like(leaves[0])).figures() for n, way in ways.items()}
    assert held["lean"]["peak_mib"] < held["pytorch"]["peak_mib"]
