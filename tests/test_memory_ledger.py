"""What is counted for study 04: by hand, and against every allocation of the CPU's allocator."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from fusedlib import functional
from fusedlib.bench import allocations, ledger, memory
from fusedlib.bench.ledger import CATEGORIES, LEDGERS, D, F, W
from fusedlib.bench.problems import SwiGLUProblem, draw

LLM = SwiGLUProblem(8192, 4096, 14336)
# MiB at 8192·4096·14336 in bf16: F is 224, D is 64, W is 112; sums worked by hand.
BY_HAND = {
    "eager": (4 * 224, 3 * 224 + 64 + 112 + 224 + 2 * 224),
    "inductor": (3 * 224, 3 * 224 + 64 + 112 + 224),
    "liger": (3 * 224, 3 * 224 + 64 + 112 + 224),
    "quack": (2 * 224, 2 * 224 + 64 + 2 * 224 + 224 + 112),
    "fused": (2 * 224, 2 * 224 + 64 + 112 + 64 + 2 * 112),
    "fused (input)": (0, 64 + 2 * 224 + 112 + 64 + 2 * 112),
}
TOKENS_DECIDE, WEIGHTS_DECIDE = "512·128·512", "64·128·128"


@pytest.mark.parametrize("name", LEDGERS)
def test_kept_and_peak_by_hand(name):
    book = ledger.of(name)
    kept, peak = BY_HAND[name]
    assert book.kept().mib(LLM) == kept
    assert ledger.total(book.peak(LLM)[1]).mib(LLM) == peak


def test_units_in_bytes_and_words():
    problem = SwiGLUProblem(3, 5, 7, "float32")
    assert (F * 2 + D + W).mib(problem) * 2**20 == 4 * (2 * 21 + 15 + 35)
    assert str(F * 2 + D) == "2 F + D" and str(F * 0) == "0"


@pytest.mark.parametrize("path", ["kernels", "plain", "split"])
@pytest.mark.parametrize("name", LEDGERS)
def test_every_ledger_ends_with_y_and_all_gradients(name, path):
    *_, (what, held) = ledger.of(name, path).moments()
    assert what == "end"
    assert ledger.total(held) == D * 2 + W * 3


def test_an_unbalanced_ledger_is_refused():
    lost = replace(ledger.FUSED, backward=ledger.FUSED.backward[:1])
    with pytest.raises(ValueError, match=r"never freed: .*gate\|up"):
        list(lost.moments())
    twice = replace(ledger.FUSED, backward=(*ledger.FUSED.backward, ledger.FUSED.backward[1]))
    with pytest.raises(ValueError, match="which nobody holds"):
        list(twice.moments())


def test_limits_are_ratios_of_counts():
    width = Fraction(14336, 4096)
    assert ledger.LIGER.limit(width) == 4 * width + 1
    assert ledger.FUSED.limit(width) == 3 * width + 1
    # Both hold three weights and three gradients: 1, not the published 6/4.
    assert ledger.LIGER.limit(base=True) == ledger.FUSED.limit(base=True) == 6


@pytest.mark.parametrize("shape", [TOKENS_DECIDE, WEIGHTS_DECIDE])
@pytest.mark.parametrize("experiment", ["saved", "step"])
def test_eager_on_the_cpu_holds_what_is_counted(experiment, shape):
    problem = memory.shape(shape, "float32")
    saved, step = memory.mlp_cases([problem], ["eager"], "cpu")
    assert (saved["experiment"], step["experiment"]) == ("saved", "step")
    kept = ledger.EAGER.kept().mib(problem)
    if experiment == "saved":
        found = memory.measure(saved)
        assert found["saved_mib"] == kept
        assert len(found["kept"]) == 4
        return
    found, counted = memory.measure(step), ledger.EAGER.peak(problem)[1]
    assert found["saved_mib"] == kept
    assert found["peak_mib"] == ledger.total(counted).mib(problem)
    for name in CATEGORIES:
        assert found[f"peak_{name}_mib"] == counted[name].mib(problem), name
    assert max(found["live_saved_mib"]) == kept
    assert found["gradients_mib"] == (W * 3 + D).mib(problem)


@pytest.mark.parametrize("save", ["gate_up", "input"])
def test_fused_without_kernels_holds_what_is_counted(save):
    problem = memory.shape(TOKENS_DECIDE, "float32")
    inputs = draw(problem, "cpu")
    w_gate_up = torch.cat([inputs.w_gate, inputs.w_up]).detach().requires_grad_()
    found = allocations.trace(
        lambda: functional.swiglu_mlp(inputs.x, w_gate_up, inputs.w_down, save=save), inputs.dy
    ).live_mib()
    book = ledger.of({"gate_up": "fused", "input": "fused (input)"}[save], "plain")
    peak = max(sum(parts) for parts in zip(*found.values(), strict=True))
    # torch's checkpoint keeps the state of the generator, 5 KiB, beside.
    assert peak == pytest.approx(ledger.total(book.peak(problem)[1]).mib(problem), rel=2e-3)


@pytest.mark.parametrize("shape", [TOKENS_DECIDE, WEIGHTS_DECIDE])
def test_a_stack_holds_what_is_counted_with_and_without_gradients(shape):
    problem = memory.shape(shape, "float32")
    for case in memory.stack_cases(problem, [1, 3], ["eager"], "cpu"):
        found = memory.measure(case)
        counted = ledger.stack_peak_mib(ledger.EAGER, case["layers"], problem, held=case["held"])
        assert found["peak_mib"] == sum(counted.values())
        for name in CATEGORIES:
            assert found[f"peak_{name}_mib"] == counted[name], name
        assert found["total_peak_mib"] == pytest.approx(memory.counted_mib(case))


def test_a_rival_without_a_gradient_is_wrong_and_has_no_figures(monkeypatch):
    from fusedlib.bench import providers

    def forgetful(inputs):
        return providers.Workload(
            lambda: inputs.x @ inputs.w_down.detach().mT, {"x": inputs.x, "w_down": inputs.w_down}
        )

    forged = replace(providers.get("eager"), build=forgetful)
    problem = SwiGLUProblem(8, 16, 16, "float32")
    monkeypatch.setitem(providers.PROVIDERS, "liger", forged)
    memory._misses.cache_clear()
    found = memory.measure(memory.mlp_cases([problem], ["liger"], "cpu")[0])
    memory._misses.cache_clear()
    assert found["status"] == "wrong" and "no gradient arrived at w_down" in found["reason"]
    assert "saved_mib" not in found


def test_what_cannot_fit_is_not_tried_and_says_so():
    case = memory.stack_cases(memory.shape("16384·8192·28672", "float32"), [4096], ["eager"], "cpu")
    found = memory.measure(case[0])
    assert found["status"] == "oom" and found["reason"].startswith("not tried: ")


@pytest.mark.parametrize("text", ["64·128", "64x128x128", "64·0·128", "a·b·c"])
def test_a_bad_shape_is_refused(text):
    with pytest.raises(ValueError, match=r"tokens·hidden·intermediate|whole number from 1"):
        memory.shape(text, "bfloat16")


def test_bad_lists_are_refused():
    problem = memory.square(4, 8)
    with pytest.raises(ValueError, match="at least one layer, got 0"):
        memory.stack_cases(problem, [0], ["eager"], "cpu")
    with pytest.raises(ValueError, match="no module of 'quack'"):
        memory.stack_cases(problem, [1], ["quack"], "cpu")
    with pytest.raises(ValueError, match="no ledger for 'thunder'; counted: eager"):
        memory.mlp_cases([problem], ["thunder"], "cpu")


def test_a_block_whose_release_was_not_told_ends_where_its_address_comes_again():
    changes = [(1, 8), (2, 4), (1, 8), (1, -8)]
    trace = allocations._classified(changes, done=2, output=2)
    assert [(b.start, b.end, name) for b, name in trace.blocks] == [
        (0, 2, "saved"), (1, None, "output"), (2, 3, "temporaries"),
    ]  # fmt: skip
