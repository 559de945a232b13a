"""What is counted of an MLP: by hand, and against every allocation of the CPU's allocator."""

from dataclasses import replace

import pytest
import torch

from fusedlib import reference
from fusedlib.bench.attempt import Attempt
from fusedlib.ops.mlp import function as functional
from measure.racing import rivals
from measure.racing.rivals import Workload
from study import ledger, memory, mlp
from study.allocator import OF_PASS, kept, passed, peak
from study.ledger import LEDGERS, D, W
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


@pytest.mark.parametrize(
    ("path", "dtype"), [("kernels", "bfloat16"), ("kernels", "float32"), (PLAIN_PATH, "float32")]
)
@pytest.mark.parametrize("name", LEDGERS)
def test_every_ledger_ends_with_y_and_all_gradients(name, path, dtype):
    *_, (what, held) = ledger.of(name, path, dtype).moments()
    assert what == "end"
    assert ledger.total(held) == D * 2 + W * 3


@pytest.mark.parametrize("shape", [TOKENS_DECIDE, WEIGHTS_DECIDE])
def test_eager_on_the_cpu_holds_what_is_counted(shape):
    saved, step = (memory.figures(c) for c in alone(shape))
    problem = SwiGLUProblem.of(alone(shape)[0])
    kept, counted = ledger.EAGER.kept().mib(problem), ledger.EAGER.peak(problem)[1]
    assert saved["saved_mib"] == step["saved_mib"] == max(step["live_saved_mib"]) == kept
    assert len(saved["kept"]) == 4
    assert step["peak_mib"] == ledger.total(counted).mib(problem)
    for name in OF_PASS:
        assert step[f"peak_{name}_mib"] == counted[name].mib(problem), name
    assert step["gradients_mib"] == (W * 3 + D).mib(problem)


@pytest.mark.parametrize("save", ["gate_up", "input"])
def test_fused_without_kernels_holds_what_is_counted(save):
    problem = SwiGLUProblem(512, 128, 512, "float32")
    inputs = draw(problem, "cpu")
    w_gate_up = torch.cat([inputs.w_gate, inputs.w_up]).detach().requires_grad_()
    actual = passed(
        lambda: functional.swiglu_mlp(inputs.x, w_gate_up, inputs.w_down, save=save), inputs.dy
    ).live_mib()
    book = ledger.of({"gate_up": "fused", "input": "fused-input"}[save], PLAIN_PATH)
    peak = max(sum(parts) for parts in zip(*actual.values(), strict=True))
    # torch's checkpoint keeps the state of the generator, 5 KiB, beside.
    assert peak == pytest.approx(ledger.total(book.peak(problem)[1]).mib(problem), rel=2e-3)


@pytest.mark.parametrize("shape", [TOKENS_DECIDE, WEIGHTS_DECIDE])
def test_a_stack_holds_what_is_counted_with_and_without_gradients(shape):
    for case in stacks(shape, [1, 3]):
        actual, problem = memory.figures(case), SwiGLUProblem.of(case)
        counted = ledger.stack_peak_mib(ledger.EAGER, case["layers"], problem, held=case["held"])
        assert actual["peak_mib"] == sum(counted.values())
        for name in OF_PASS:
            assert actual[f"peak_{name}_mib"] == counted[name], name
        assert actual["total_peak_mib"] == pytest.approx(memory.counted_mib(case))


def test_what_is_kept_and_the_peak_of_work_on_a_host_are_those_of_its_tensors():
    x, w = torch.randn(64, 128, requires_grad=True), torch.randn(256, 128, requires_grad=True)
    found = kept(lambda: torch.relu(x @ w.mT), [x, w], lambda tensor: f"{tensor.dim()} axes")
    assert [(one.nbytes, one.tensor, one.part) for one in found] == [
        (64 * 256 * 4, "64·256 float32", "2 axes")
    ]

    def work():
        one = torch.empty(1 << 20)
        del one
        return torch.empty(1 << 18)

    assert peak(work, "cpu") == 4.0


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


def test_a_stack_of_layers_that_compute_something_else_is_wrong(monkeypatch):
    def build(own):
        return mlp.FunctionMLP(own, lambda x, *weights: reference.swiglu_mlp(x, *weights) + x)

    forged = replace(rivals.get(MODULE, "eager"), build=build)
    monkeypatch.setitem(rivals.RIVALS, (MODULE, "eager"), forged)
    case = stacks(WEIGHTS_DECIDE, [2])[0]
    assert Attempt.at(memory.figures, case).status == "wrong"


def test_what_cannot_fit_is_not_tried_and_says_so():
    case = stacks("16384·8192·28672", [4096])[0]
    actual = Attempt.at(memory.figures, case)
    assert actual.status == "oom (predicted)" and "not tried" in actual.reason
