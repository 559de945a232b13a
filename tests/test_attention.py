"""Attention: its counts against what is seen, its truth, its cases and its races."""

import json
import math
import re
from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fusedlib import rope
from fusedlib.bench import check
from fusedlib.bench.attempt import Wrong
from study import attention, calls, causal, fits, paths, race, rivals
from study.allocator import peak
from study.causal import AttentionProblem, draw, flops, traffic
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


class Traffic(TorchDispatchMode):
    """Bytes of the operands and results of every operation that is no view."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        viewed = func.is_view or func.overloadpacket.__name__ in ("_unsafe_view", "detach")
        if not viewed:
            tensors = [t for t in (*args, out) if isinstance(t, torch.Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return out


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_traffic_is_that_of_its_operations(shape):
    one, operands, work = prepared("plain", shape, "bfloat16")
    leaves = [t.detach() for t in operands.leaves().values()]
    with Traffic() as forward:
        plain_attention(*leaves)
    assert forward.bytes == traffic(one, "forward", fused=False)
    y = work.forward()
    inputs = list(operands.leaves().values())
    with Traffic() as backward:
        torch.autograd.grad(y, inputs, operands.dy)
    assert backward.bytes == traffic(one, "backward", fused=False)


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


def test_an_error_counts_relative_to_its_tokens_terms_where_they_are_large():
    values = {"y": torch.ones(1, 1, 100, 4, dtype=torch.float64)}
    sizes = {"y": torch.ones(1, 1, 100, 1, dtype=torch.float64)}
    sizes["y"][0, 0, 0] = 100.0
    worst = []
    for token in (0, 50):
        off = values["y"].clone()
        off[0, 0, token, 0] += 1.0
        worst.append(causal.errors({"y": off}, causal.Exact(values, sizes))["y"].worst)
    assert worst[1] == pytest.approx(100 * worst[0])


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


def test_what_gives_no_gradient_is_wrong(added):
    @added(causal.TASK, "frozen")
    def frozen(operands):
        """The right output, and a gradient that arrives nowhere."""
        query, key, value = (leaf.detach() for leaf in operands.leaves().values())
        one = torch.ones((), requires_grad=True)
        return Workload(lambda: plain_attention(query, key, value) * one, operands.leaves())

    assert "no gradient arrived at query" in raced("plain", "frozen")["frozen"].reason


def test_what_is_counted_far_above_the_memory_is_not_tried(monkeypatch):
    small = replace(fits.machine.describe(), memory_gib=1e-6)
    monkeypatch.setattr(fits.machine, "describe", lambda: small)
    rows = raced(*ON_CPU)
    assert {name: row.status for name, row in rows.items()} == {
        "plain": "oom (predicted)", "math": "oom (predicted)", "flash": "ok"
    }  # fmt: skip
    assert rows["plain"].reason.startswith(
        "not tried: 0 GiB counted, more than 0.7 times the 0 GiB"
    )


def test_short_contexts_are_launched_both_ways_and_a_backward_alone_in_no_graph():
    sizes = {"short_contexts": [16], "device": "cuda", "dtypes": ["bfloat16"]}
    short = [c for c in attention.cases(**sizes) if c.get("grid") == "short"]
    ways = {(c["launch"], c["direction"]) for c in short}
    assert ways == {(launch, d) for launch in ("python", "graph") for d in causal._PRODUCTS} - {
        ("graph", "backward")} | {("python", causal.BOTH), ("graph", causal.BOTH)}  # fmt: skip
    assert {"plain", "sdpa", "flash", "cudnn"} <= {c["provider"] for c in short}


@pytest.mark.parametrize("mask", attention.MASKS)
def test_torch_tells_which_backend_it_takes_by_itself(mask):
    sizes = {"default_widths": [24], "dtypes": ["bfloat16"], "device": "cpu"}
    asked = [c for c in attention.cases(**sizes) if c.get("mask") == mask]
    [row] = attention.measure(asked)
    assert row.status == "ok" and row.figures["backend"] == "flash"


def test_a_backend_is_found_by_its_node_and_math_has_none():
    query, key, value = draw(AttentionProblem(16, 8, 1, "float32"), "cpu").leaves().values()
    assert causal.backend_of(plain_attention(query, key, value)) == "math"
    attend = torch.nn.functional.scaled_dot_product_attention
    sliced = attend(query, key, value, is_causal=True)[..., :4].clone()
    assert causal.backend_of(sliced) == "flash", "as where torch pads heads"


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


def test_flex_runs_in_fp32_at_the_first_context_alone():
    sizes = {"contexts": [512, 256], "dtypes": ["float32", "bfloat16"]}
    course = [c for c in attention.cases(device="cpu", also=["flex"], **sizes)
              if c.get("provider") == "flex"]  # fmt: skip
    assert {(c["head_dim"], c["dtype"], c["context_length"]) for c in course} == {
        (64, "float32", 512), (64, "bfloat16", 512), (64, "bfloat16", 256),
    }  # fmt: skip


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


def test_ways_to_call_it_have_nothing_counted():
    row = {"experiment": "call", "context_length": 256, "head_dim": 100, "batch_size": 8}
    row |= {"dtype": "bfloat16", "device": "cuda", "provider": "padded-heads", "peak_mib": 8.0}
    frame = attention.derive(pd.DataFrame([row | {"machine": "here", "set": "first"}]))
    assert frame[["peak_squares", "peak_counted", "bound_share"]].isna().all(axis=None)


# --- what follows from rows ----------------------------------------------------------------------


def test_rows_have_what_is_counted_of_them_at_the_ceilings_of_their_recording():
    one = AttentionProblem(256, 64, 8, "bfloat16")
    shape = {"context_length": 256, "head_dim": 64, "batch_size": 8, "direction": "forward"}
    shared = {"machine": "here", "set": "first", "device": "cuda", "dtype": "bfloat16"}
    ran = [shape | {"provider": name, "peak_mib": 8.0, "median_ms": 1.0}
            for name in ("plain", "cudnn", "inductor")]  # fmt: skip
    ceilings = [{"ceiling": "copy", "dtype": "int8", "bytes_per_s": 1e12},
                {"ceiling": "gemm", "flops_per_s": 1e14}]  # fmt: skip
    rows = pd.DataFrame([shared | row for row in (*ran, *ceilings)])
    plain, cudnn, inductor, *_ = attention.derive(rows).to_dict("records")
    assert (plain["fused"], cudnn["fused"], inductor["fused"]) == (False, True, False)
    assert plain["peak_squares"] == inductor["peak_squares"] == 8.0
    assert plain["peak_counted"] == causal.plain_peak(one, "cuda") / one.square
    assert plain["traffic_ms"] == pytest.approx(traffic(one, "forward", fused=False) / 1e9)
    assert cudnn["products_ms"] == pytest.approx(flops(one, "forward", fused=True) / 1e11)
    assert plain["bound_share"] == max(plain["products_ms"], plain["traffic_ms"])
    counted = [inductor[name] for name in ("peak_counted", "products_ms", "bound_share")]
    assert all(map(math.isnan, counted)), "what torch chose was not counted"
