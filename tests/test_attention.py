"""Study 07: its counts against what is seen, its truth, its cases and its race."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fusedlib.bench import check
from fusedlib.bench.attempt import Wrong
from measure.attention import exact, footprint, problem, races, study
from measure.attention.problem import AttentionProblem, draw, flops, kept, traffic
from measure.racing import rivals
from measure.racing.rivals import Workload
from measure.recording import results
from models.transformer import plain_attention

MIB = 2**20
ON_CPU = ("plain", "math", "flash")
SHAPES = [(96, 16, 3), (33, 24, 2), (16, 128, 2)]


def prepared(name, shape, dtype="float32"):
    one = AttentionProblem(*shape, dtype)
    operands = draw(one, "cpu")
    return one, operands, rivals.get(races.TASK, name).build(operands)


# --- counting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ON_CPU)
def test_kept_bytes_are_those_of_the_formula(name, shape, dtype):
    one, operands, work = prepared(name, shape, dtype)
    seen = footprint.measure(work, operands.dy)
    assert seen["kept_mib"] * MIB == sum(kept(races.counted_form(name), one).values())
    assert seen["operands_mib"] * MIB == problem.operands_bytes(one)
    assert len(seen["kept"]) == len(kept(races.counted_form(name), one))


@pytest.mark.parametrize("shape", [*SHAPES, (64, 64, 2), (32, 96, 2), (256, 16, 1)])
def test_plain_attentions_peak_is_that_of_the_formula(shape):
    one, operands, work = prepared("plain", shape)
    check.results_of(work, operands.dy)
    seen = footprint.measure(work, operands.dy)
    # The host allocates the scalars of a kernel too, some bytes each.
    assert seen["peak_mib"] * MIB == pytest.approx(problem.plain_peak(one, "cpu"), abs=64)
    assert seen["after_forward_mib"] * MIB == pytest.approx(
        sum(kept("plain", one).values()) + one.linear, abs=64
    )


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
    monkeypatch.setattr(exact, "BLOCK", block)
    operands = draw(AttentionProblem(13, 6, 2, "float32"), "cpu")
    true = exact.results(operands)
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
        worst.append(exact.errors({"y": off}, exact.Exact(values, sizes))["y"].worst)
    assert worst[1] == pytest.approx(100 * worst[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["math", "flash"])
def test_backends_are_right(name, dtype):
    one, operands, work = prepared(name, (128, 64, 4), dtype)
    true = exact.results(operands)
    actual, baseline = check.results_of(work, operands.dy), exact.baseline_errors(operands, true)
    figures = check.require(exact.errors(actual, true), baseline, one.torch_dtype)
    assert set(figures) == {"y_error", "d_query_error", "d_key_error", "d_value_error"}
    del actual["d_key"]
    with pytest.raises(Wrong, match="no gradient arrived at key"):
        check.require(exact.errors(actual, true), baseline, one.torch_dtype)


def test_a_wrong_measure_is_refused(monkeypatch):
    _, operands, _ = prepared("plain", (64, 16, 2), "float32")
    true = exact.results(operands)

    def without_mask(query, key, value):
        return (query @ key.mT / 4).softmax(-1) @ value

    monkeypatch.setattr(exact, "plain_attention", without_mask)
    with pytest.raises(ValueError, match="float64 in y"):
        exact.baseline_errors(operands, true)


# --- the race ------------------------------------------------------------------------------------

SHAPE = {"batch_size": 2, "repetitions": 2, "device": "cpu"}


def raced(tmp_path, *names, contexts=(24,)):
    """Rows of a race at width 8 in fp32, and the recorder that wrote them."""
    recorder = results.Recorder("07_attention", "quick", fresh=False, directory=tmp_path)
    recorder.race(races.RACE, races.cases("course", contexts, [8], ["float32"], names, **SHAPE))
    return recorder.rows().set_index(["context_length", "provider", "direction"]), recorder


@pytest.fixture
def added(monkeypatch):
    """Registers a rival for one test; what was asked of former ones is forgotten."""
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))
    races._refusal.cache_clear()
    yield rivals.rival
    races._refusal.cache_clear()


def test_all_that_runs_is_timed_in_each_direction_and_the_rest_says_why_not(tmp_path):
    rows, _ = raced(tmp_path, "all", "flex", contexts=(24, 40))
    assert len(rows) == 2 * 3 * len([*rivals.chosen(races.TASK, ["all"]), "flex"])
    good = rows[rows["status"] == "ok"]
    assert set(good.index.get_level_values("provider")) == set(ON_CPU)
    assert (good[["median_ms", "kept_mib", "peak_mib", "operands_mib"]] > 0).all(axis=None)
    assert good["session"].groupby(["context_length", "direction"]).nunique().eq(1).all()
    assert rows[rows["status"] == "unavailable"]["reason"].notna().all()
    _, again = raced(tmp_path, "all", "flex", contexts=(24, 40))
    assert again.measured == 0


def test_what_forgets_the_mask_is_wrong_and_gets_no_time(tmp_path, added):
    @added(races.TASK, "unmasked")
    def unmasked(operands):
        """Attention to the future."""
        leaves = operands.leaves()
        attend = torch.nn.functional.scaled_dot_product_attention
        return Workload(lambda: attend(*leaves.values()), leaves)

    rows, _ = raced(tmp_path, "all")
    wrong = rows.xs("unmasked", level="provider")
    assert set(wrong["status"]) == {"wrong"} and wrong["median_ms"].isna().all()
    assert wrong["reason"].str.contains("y: norm error").all() and (wrong["y_error"] > 0.1).all()
    assert set(rows.xs("plain", level="provider")["status"]) == {"ok"}


def test_what_is_counted_far_above_the_memory_is_not_tried(tmp_path, monkeypatch):
    small = replace(races.machine.describe(), memory_gib=1e-6)
    monkeypatch.setattr(races.machine, "describe", lambda: small)
    rows, _ = raced(tmp_path, *ON_CPU)
    status = rows["status"].groupby("provider").unique().map(list)
    assert dict(status) == {
        "plain": ["oom (predicted)"], "math": ["oom (predicted)"], "flash": ["ok"]
    }  # fmt: skip


# --- what follows from rows ----------------------------------------------------------------------


def test_rows_have_what_is_counted_of_them_at_the_ceilings_of_their_recording():
    one = AttentionProblem(256, 64, 8, "bfloat16")
    shape = {"context_length": 256, "head_dim": 64, "batch_size": 8, "direction": "forward"}
    shared = {"machine": "here", "recording": "first", "device": "cuda", "dtype": "bfloat16"}
    ran = [shape | {"provider": name, "peak_mib": 8.0, "median_ms": 1.0}
            for name in ("plain", "cudnn", "inductor")]  # fmt: skip
    ceilings = [{"dtype": "int8", "bytes_per_s": 1e12}, {"flops_per_s": 1e14}]
    rows = pd.DataFrame([shared | row for row in (*ran, *ceilings)])
    plain, cudnn, inductor, *_ = study.described(rows).to_dict("records")
    assert (plain["fused"], cudnn["fused"], inductor["fused"]) == (False, True, False)
    assert plain["peak_squares"] == inductor["peak_squares"] == 8.0
    assert plain["peak_counted"] == problem.plain_peak(one, "cuda") / one.square
    assert plain["traffic_ms"] == pytest.approx(traffic(one, "forward", fused=False) / 1e9)
    assert cudnn["products_ms"] == pytest.approx(flops(one, "forward", fused=True) / 1e11)
    assert plain["bound_share"] == max(plain["products_ms"], plain["traffic_ms"])
    counted = [inductor[name] for name in ("kept_counted", "products_ms", "bound_share")]
    assert all(map(math.isnan, counted)), "what torch chose was not counted"
