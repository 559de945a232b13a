"""What is counted for study 04: by hand, and against every allocation of the CPU's allocator."""

from dataclasses import replace

import pytest
import torch

from fusedlib import reference
from fusedlib.bench.attempt import Attempt
from fusedlib.ops.mlp import function as functional
from measure import mlp_ledger, mlp_memory, pass_memory
from measure.mlp_ledger import LEDGERS, D, W
from measure.pass_memory import CATEGORIES
from measure.racing import rivals
from measure.racing.rivals import Workload
from study import mlp
from study.mlp import MODULE, PLAIN_PATH, TASK, SwiGLUProblem, draw

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
FP32_CPU = {"dtype": "float32", "device": "cpu"}


@pytest.mark.parametrize("name", LEDGERS)
def test_kept_and_peak_by_hand(name):
    book = mlp_ledger.of(name)
    kept, peak = BY_HAND[name]
    assert book.kept().mib(LLM) == kept
    assert mlp_ledger.total(book.peak(LLM)[1]).mib(LLM) == peak


@pytest.mark.parametrize(
    ("path", "dtype"), [("kernels", "bfloat16"), ("kernels", "float32"), (PLAIN_PATH, "float32")]
)
@pytest.mark.parametrize("name", LEDGERS)
def test_every_ledger_ends_with_y_and_all_gradients(name, path, dtype):
    *_, (what, held) = mlp_ledger.of(name, path, dtype).moments()
    assert what == "end"
    assert mlp_ledger.total(held) == D * 2 + W * 3


@pytest.mark.parametrize("shape", [TOKENS_DECIDE, WEIGHTS_DECIDE])
def test_eager_on_the_cpu_holds_what_is_counted(shape):
    saved, step = (mlp_memory.measure(c) for c in mlp_memory.cases([shape], ["eager"], **FP32_CPU))
    problem = SwiGLUProblem.of(mlp_memory.cases([shape], ["eager"], **FP32_CPU)[0])
    kept, counted = mlp_ledger.EAGER.kept().mib(problem), mlp_ledger.EAGER.peak(problem)[1]
    assert saved["saved_mib"] == step["saved_mib"] == max(step["live_saved_mib"]) == kept
    assert len(saved["kept"]) == 4
    assert step["peak_mib"] == mlp_ledger.total(counted).mib(problem)
    for name in CATEGORIES:
        assert step[f"peak_{name}_mib"] == counted[name].mib(problem), name
    assert step["gradients_mib"] == (W * 3 + D).mib(problem)


@pytest.mark.parametrize("save", ["gate_up", "input"])
def test_fused_without_kernels_holds_what_is_counted(save):
    problem = SwiGLUProblem(512, 128, 512, "float32")
    inputs = draw(problem, "cpu")
    w_gate_up = torch.cat([inputs.w_gate, inputs.w_up]).detach().requires_grad_()
    actual = pass_memory.trace(
        lambda: functional.swiglu_mlp(inputs.x, w_gate_up, inputs.w_down, save=save), inputs.dy
    ).live_mib()
    book = mlp_ledger.of({"gate_up": "fused", "input": "fused-input"}[save], PLAIN_PATH)
    peak = max(sum(parts) for parts in zip(*actual.values(), strict=True))
    # torch's checkpoint keeps the state of the generator, 5 KiB, beside.
    assert peak == pytest.approx(mlp_ledger.total(book.peak(problem)[1]).mib(problem), rel=2e-3)


@pytest.mark.parametrize("shape", [TOKENS_DECIDE, WEIGHTS_DECIDE])
def test_a_stack_holds_what_is_counted_with_and_without_gradients(shape):
    for case in mlp_memory.stack_cases(shape, [1, 3], ["eager"], **FP32_CPU):
        actual, problem = mlp_memory.measure(case), SwiGLUProblem.of(case)
        counted = mlp_ledger.stack_peak_mib(
            mlp_ledger.EAGER, case["layers"], problem, held=case["held"]
        )
        assert actual["peak_mib"] == sum(counted.values())
        for name in CATEGORIES:
            assert actual[f"peak_{name}_mib"] == counted[name], name
        assert actual["total_peak_mib"] == pytest.approx(mlp_memory.counted_mib(case))


# --- who is measured -----------------------------------------------------------------------------


def test_a_rival_without_a_gradient_is_wrong_and_has_no_figures(monkeypatch):
    def forgetful(inputs):
        return Workload(
            lambda: inputs.x @ inputs.w_down.detach().mT, {"x": inputs.x, "w_down": inputs.w_down}
        )

    forged = replace(rivals.get(TASK, "eager"), name="liger", build=forgetful)
    monkeypatch.setitem(rivals.RIVALS, (TASK, "liger"), forged)
    actual = Attempt.at(mlp_memory.measure, mlp_memory.cases(["8·16·16"], ["liger"], **FP32_CPU)[0])
    assert actual.status == "wrong" and "no gradient arrived at w_down" in actual.reason
    assert "saved_mib" not in actual.figures


def test_a_stack_of_layers_that_compute_something_else_is_wrong(monkeypatch):
    def build(own):
        return mlp.FunctionMLP(own, lambda x, *weights: reference.swiglu_mlp(x, *weights) + x)

    forged = replace(rivals.get(MODULE, "eager"), build=build)
    monkeypatch.setitem(rivals.RIVALS, (MODULE, "eager"), forged)
    case = mlp_memory.stack_cases(WEIGHTS_DECIDE, [2], ["eager"], **FP32_CPU)[0]
    assert Attempt.at(mlp_memory.measure, case).status == "wrong"


def test_what_cannot_fit_is_not_tried_and_says_so():
    case = mlp_memory.stack_cases("16384·8192·28672", [4096], ["eager"], **FP32_CPU)[0]
    actual = Attempt.at(mlp_memory.measure, case)
    assert actual.status == "oom (predicted)" and "not tried" in actual.reason
