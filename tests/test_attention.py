"""Attention: its counts against what is seen, its truth, its cases and its races."""

import json
import math
import re

import pytest
import torch
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from fusedlib import rope
from fusedlib.bench import check
from fusedlib.bench.attempt import Wrong
from study import attention, calls, causal, paths, race, rivals
from study.allocator import peak
from study.causal import AttentionProblem, draw, flops
from study.models.transformer import plain_attention
from study.rivals import Workload

MIB = 2**20
ON_CPU = ("plain", "math", "flash")
SHAPES = [(96, 16, 3), (33, 24, 2), (16, 128, 2)]


def prepared(name, shape, dtype="float32"):
    one = AttentionProblem(*shape, dtype)
    operands = draw(one, "cpu")
    return one, operands, rivals.get(causal.TASK, name).build(operands)


# --- counting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES, (64, 64, 2), (32, 96, 2), (256, 16, 1)])
def test_plain_attentions_peak_is_that_of_the_formula(shape):
    one, operands, work = prepared("plain", shape)
    check.results_of(work, operands.dy)
    work.reset()
    held = peak(lambda: work.forward().backward(operands.dy), "cpu")
    # The host allocates the scalars of a kernel too, some bytes each.
    assert held * MIB == pytest.approx(causal.plain_peak(one, "cpu"), abs=64)


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_those_of_torchs_counter(shape):
    one, operands, plain = prepared("plain", shape)
    with FlopCounterMode(display=False) as forward:
        y = plain.forward()
    with FlopCounterMode(display=False) as backward:
        y.backward(operands.dy)
    assert flops(one, "forward", fused=False) == forward.get_total_flops()
    assert flops(one, "backward", fused=False) == backward.get_total_flops()
    # Of a fused kernel torch counts the whole square; below the diagonal are (T + 1) / 2T of it.
    shapes = [operands.dy.shape] * 4
    whole = {
        "forward": flop_counter.sdpa_flop_count(*shapes[:3]),
        "backward": flop_counter.sdpa_backward_flop_count(*shapes),
    }
    for direction, counted in whole.items():
        below = counted * (one.context_length + 1) // (2 * one.context_length)
        assert flops(one, direction, fused=True) == below


# --- the truth -----------------------------------------------------------------------------------


def looped(query, key, value):
    """Attention a query at a time, with Python's own exponential."""
    rows = []
    for t, q in enumerate(query):
        scores = [float(q @ k) / math.sqrt(len(q)) for k in key[: t + 1]]
        weights = [math.exp(s - max(scores)) for s in scores]
        parts = [w / sum(weights) * v for w, v in zip(weights, value, strict=False)]
        rows.append(sum(parts))
    return torch.stack(rows)


@pytest.mark.parametrize("block", [1, 50, 2**25])
def test_truth_is_attention_and_its_gradients(block, monkeypatch):
    monkeypatch.setattr(causal, "BLOCK", block)
    operands = draw(AttentionProblem(13, 6, 2, "float32"), "cpu")
    true = causal.exact(operands)
    doubles = [t.detach().double() for t in operands.leaves().values()]
    for index in range(2):
        y = looped(*(t[index, 0] for t in doubles))
        torch.testing.assert_close(true.values["y"][index, 0], y)
    leaves = [t.requires_grad_() for t in doubles]
    plain_attention(*leaves).backward(operands.dy.double())
    for name, leaf in zip(("query", "key", "value"), leaves, strict=True):
        torch.testing.assert_close(true.values[f"d_{name}"], leaf.grad)
    assert true.values["d_query"][:, :, 0].abs().max() < 1e-15 < true.sizes["d_query"].min()
    first = (operands.tensors["value"][:, :, 0].double().square().mean(-1)).sqrt()
    torch.testing.assert_close(true.sizes["y"][:, :, 0, 0], first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["math", "flash"])
def test_backends_are_right(name, dtype):
    _, operands, work = prepared(name, (128, 64, 4), dtype)
    true = causal.exact(operands)
    actual, baseline = check.results_of(work, operands.dy), causal.baseline_errors(operands, true)
    figures = check.require(causal.errors(actual, true), baseline, operands.dy.dtype)
    assert set(figures) == {"y_error", "d_query_error", "d_key_error", "d_value_error"}
    del actual["d_key"]
    with pytest.raises(Wrong, match="no gradient arrived at key"):
        check.require(causal.errors(actual, true), baseline, operands.dy.dtype)


def test_a_wrong_measure_is_refused(monkeypatch):
    _, operands, _ = prepared("plain", (64, 16, 2), "float32")
    true = causal.exact(operands)

    def without_mask(query, key, value):
        return (query @ key.mT / 4).softmax(-1) @ value

    monkeypatch.setattr(causal, "plain_attention", without_mask)
    with pytest.raises(ValueError, match="float64 in y"):
        causal.baseline_errors(operands, true)


# --- the races -----------------------------------------------------------------------------------


def raced(*names, context=24, direction="forward", **more):
    """The rows of one race at width 8 in fp32 on the host, by provider."""
    shared = {"experiment": "race", "batch_size": 2, "repetitions": 2, "device": "cpu", **more}
    cases = attention.races(shared, "course", [context], [8], ["float32"], names)
    rows = attention.measure([case for case in cases if case["direction"] == direction])
    race.free()
    return {row.case["provider"]: row for row in rows}


@pytest.fixture
def added(monkeypatch):
    """Registers a rival for one test; what was asked of former ones is forgotten."""
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))
    attention._refusal.cache_clear()
    yield rivals.rival
    attention._refusal.cache_clear()


@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
def test_all_that_runs_is_timed_in_turns_and_the_rest_says_why_not(direction):
    rows = raced("all", "flex", "sdpa", direction=direction)
    good = {name: row.figures for name, row in rows.items() if row.status == "ok"}
    assert set(good) == {*ON_CPU, "sdpa"}
    assert len({figures["session"] for figures in good.values()}) == 1
    for figures in good.values():
        assert all(figures[f] > 0 for f in ("median_ms", "kept_mib", "peak_mib"))
    assert good["sdpa"]["backend"] == "flash", "what torch takes on a host"
    assert all(row.status == "unavailable" and row.reason for name, row in rows.items()
               if name not in good)  # fmt: skip


def test_a_backend_is_chosen_outside_the_clock_and_torch_has_all_of_them_afterwards(monkeypatch):
    """An audit: some ways entered sdpa_kernel in each call that was timed, others did not."""
    attend, enter = causal.F.scaled_dot_product_attention, causal.sdpa_kernel
    entered, seen, counts, enabled = [], [], [], torch.backends.cuda

    def logged(*given, **more):
        seen.append((enabled.math_sdp_enabled(), enabled.flash_sdp_enabled()))
        return attend(*given, **more)

    monkeypatch.setattr(causal.F, "scaled_dot_product_attention", logged)
    monkeypatch.setattr(causal, "sdpa_kernel", lambda one: entered.append(one) or enter(one))
    for repetitions in (2, 2, 9):  # who can run at all is asked once
        entered.clear()
        rows = raced("math", "flash", "sdpa", repetitions=repetitions)
        assert [row.status for row in rows.values()] == ["ok"] * 3
        assert set(seen[-3 * repetitions :]) == {(True, False), (False, True), (True, True)}
        assert enabled.math_sdp_enabled() and enabled.flash_sdp_enabled()
        counts.append(len(entered))
    assert counts[1] == counts[2], "as often, however many calls are timed"


def test_what_forgets_the_mask_is_wrong_and_gets_no_time(added):
    @added(causal.TASK, "unmasked")
    def unmasked(operands):
        """Attention to the future."""
        leaves = operands.leaves()
        attend = torch.nn.functional.scaled_dot_product_attention
        return Workload(lambda: attend(*leaves.values()), leaves)

    rows = raced("all")
    wrong = rows["unmasked"]
    assert wrong.status == "wrong" and "median_ms" not in wrong.figures
    assert "y: norm error" in wrong.reason and wrong.figures["y_error"] > 0.1
    assert rows["plain"].status == "ok"


@pytest.mark.parametrize("mask", attention.MASKS)
def test_torch_tells_which_backend_it_takes_by_itself(mask):
    sizes = {"default_widths": [24], "dtypes": ["bfloat16"], "device": "cpu"}
    asked = [c for c in attention.cases(**sizes) if c.get("mask") == mask]
    [row] = attention.measure(asked)
    assert row.status == "ok" and row.figures["backend"] == "flash"


def test_the_notebook_asks_torch_without_gradients_inside_a_model_and_with_shared_heads():
    cells = json.loads((paths.NOTEBOOKS / "06_attention.ipynb").read_text(encoding="utf-8"))[
        "cells"
    ]
    [text] = ["".join(cell["source"]) for cell in cells if cell["id"] == "which"]
    attend = torch.nn.functional.scaled_dot_product_attention
    names = {"torch": torch, "re": re, "sdpa": attend}
    exec(text[: text.index("\n\nmask = ")], names)
    which, query, few = names["which"], torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8)
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            assert which(torch.randn(1, 4, 16, 8), query, query) == "flash"
    assert which(query, few, few, enable_gqa=True) == "flash"
    leaf = query.clone().requires_grad_()
    earlier = attend(leaf, leaf, leaf, is_causal=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert which(earlier, earlier, earlier) == "math"


# --- ways to call it -----------------------------------------------------------------------------


def called(context=24, head_dim=12, **more):
    """The rows of one race of ways to call it, in fp32 on the host, by provider."""
    shared = {"batch_size": 2, "repetitions": 2, "device": "cpu"}
    axes = {"context_length": [context], "head_dim": [head_dim], "dtype": ["float32"]}
    rows = attention.measure(calls.cases(shared, **axes, launch=["python"], **more))
    race.free()
    return {row.case["provider"]: row for row in rows}


def test_every_way_to_call_it_is_right_and_one_pads_where_there_is_something_to_pad():
    rows = called()
    assert [*rows] == ["causal-flag", "mask-tensor", "padded-heads"]
    for row in rows.values():
        assert row.status == "ok" and row.figures["backend"] == "flash"
        assert row.figures["median_ms"] > 0 and row.figures["d_query_error"] < 1e-5
    assert [*called(head_dim=16)] == ["causal-flag", "mask-tensor"]


def test_the_truth_of_a_call_is_attention_of_what_was_rotated():
    case = {"context_length": 13, "head_dim": 6, "batch_size": 2, "dtype": "float32"}
    setup = calls.Setup(case | {"device": "cpu"})
    leaves = [t.detach().double().requires_grad_() for t in setup.operands.leaves().values()]
    y = calls.Setup.plain(*leaves)
    y.backward(setup.operands.dy.double())
    torch.testing.assert_close(setup.true.values["y"], y.detach())
    for name, leaf in zip(("query", "key", "value"), leaves, strict=True):
        torch.testing.assert_close(setup.true.values[f"d_{name}"], leaf.grad)


@pytest.mark.parametrize("flaw", ["no rotation", "the scale of the padded width"])
def test_a_wrong_call_gets_no_time(added, flaw):
    @added(calls.TASK, "flawed")
    def flawed(operands):
        """One thing less."""
        q, k, v = operands.leaves().values()
        attend = torch.nn.functional.scaled_dot_product_attention
        cos, sin = calls.tables(q)

        def forward():
            turned = (q, k) if flaw == "no rotation" else rope(q, k, cos, sin, width=16)
            padded = torch.nn.functional.pad(v, (0, turned[0].shape[-1] - v.shape[-1]))
            return attend(*turned, padded, is_causal=True)[..., : v.shape[-1]]

        return Workload(forward, operands.leaves())

    rows = called()
    assert rows["flawed"].status == "wrong" and "median_ms" not in rows["flawed"].figures
    assert rows["causal-flag"].status == "ok"
