"""Study 07's counting against what is seen, its truth, its statuses, its resume."""

import gc
import math
import warnings
import weakref

import pytest
import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fusedlib.bench import check, results
from fusedlib.bench.attention import cases, footprint, held, measure, problem, truth, ways
from fusedlib.bench.attention.problem import AttentionProblem, draw
from fusedlib.bench.providers import Workload
from fusedlib.models.transformer import plain_attention

MIB = 2**20
ON_CPU = ("plain", "math", "flash")
SHAPES = [(96, 16, 3), (33, 24, 2), (16, 128, 2)]


def prepared(name, shape, dtype="float32"):
    one = AttentionProblem(*shape, dtype)
    operands = draw(one, "cpu")
    return one, operands, ways.get(name).build(operands)


# --- counting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ON_CPU)
def test_kept_bytes_are_those_of_the_formula(name, shape, dtype):
    one, operands, work = prepared(name, shape, dtype)
    seen = footprint.measure(work, operands.dout)
    assert seen["kept_mib"] * MIB == sum(held.kept(name, one).values())
    assert seen["operands_mib"] * MIB == held.operands(one)
    assert len(seen["kept"]) == len(held.kept(name, one))


@pytest.mark.parametrize("shape", [*SHAPES, (64, 64, 2), (32, 96, 2), (256, 16, 1)])
def test_plain_attentions_peak_is_that_of_the_formula(shape):
    one, operands, work = prepared("plain", shape)
    check.results_of(work, operands.dout)
    seen = footprint.measure(work, operands.dout)
    # The host allocates the scalars of a kernel too, some bytes each.
    assert seen["peak_mib"] * MIB == pytest.approx(held.plain_peak(one, "cpu"), abs=64)
    assert seen["after_forward_mib"] * MIB == pytest.approx(
        sum(held.kept("plain", one).values()) + one.linear * one.itemsize, abs=64
    )
    assert seen["forward_peak_mib"] <= seen["peak_mib"]


def test_on_cuda_the_softmax_backward_writes_a_square_more():
    one = AttentionProblem(4096, 64, 8, "bfloat16")
    more = held.plain_peak(one, "cuda") - held.plain_peak(one, "cpu")
    assert more == one.square * one.itemsize


def test_flash_keeps_nothing_that_grows_with_the_square():
    small, large = (held.kept("flash", AttentionProblem(n, 64, 8, "bfloat16")) for n in (512, 1024))
    assert sum(large.values()) == 2 * sum(small.values())
    assert held.kept("inductor", AttentionProblem(64, 16, 1, "float32")) is None


@pytest.mark.parametrize(("width", "batch", "dtype"), [(64, 8, "float32"), (16, 1, "bfloat16")])
def test_the_longest_context_fits_and_the_next_does_not(width, batch, dtype):
    capacity = 10**9 + 7
    fits = held.longest(capacity, width, batch, dtype, "cpu")
    total = [
        held.plain_peak(p, "cpu") + held.operands(p)
        for p in (AttentionProblem(n, width, batch, dtype) for n in (fits, fits + 1))
    ]
    assert total[0] <= capacity < total[1]


def test_where_the_kept_bytes_cross_they_are_equal():
    crossing = held.crossing(64, 8, "float32")
    below, above = (
        [sum(held.kept(way, AttentionProblem(n, 64, 8, "float32")).values())
         for way in ("plain", "flash")]
        for n in (math.floor(crossing), math.ceil(crossing))
    )  # fmt: skip
    assert below[0] <= below[1] and above[0] >= above[1]


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
    assert forward.bytes == one.traffic("forward", fused=False)
    y = work.forward()
    inputs = list(operands.leaves().values())
    with Traffic() as backward:
        torch.autograd.grad(y, inputs, operands.dout)
    assert backward.bytes == one.traffic("backward", fused=False)


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_those_of_torchs_counter(shape):
    one, operands, plain = prepared("plain", shape)
    with FlopCounterMode(display=False) as forward:
        y = plain.forward()
    with FlopCounterMode(display=False) as backward:
        y.backward(operands.dout)
    assert one.flops("forward", fused=False) == forward.get_total_flops()
    assert one.flops("backward", fused=False) == backward.get_total_flops()
    # Of a fused kernel torch counts the whole square; below the diagonal are (T + 1) / 2T of it.
    shapes = [operands.query.shape] * 4
    whole = {
        "forward": flop_counter.sdpa_flop_count(*shapes[:3]),
        "backward": flop_counter.sdpa_backward_flop_count(*shapes),
    }
    for direction, flops in whole.items():
        below = flops * (one.context_length + 1) // (2 * one.context_length)
        assert one.flops(direction, fused=True) == below


@pytest.mark.parametrize(
    ("field", "value"),
    [("context_length", 0), ("head_dim", 2.5), ("batch_size", -1), ("dtype", "int8")],
)
def test_bad_problems_are_refused_with_the_value(field, value):
    good = {"context_length": 8, "head_dim": 8, "batch_size": 1, "dtype": "float32"}
    with pytest.raises(ValueError, match=repr(value)):
        AttentionProblem(**good | {field: value})


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
    monkeypatch.setattr(truth, "BLOCK", block)
    operands = draw(AttentionProblem(13, 6, 2, "float32"), "cpu")
    true = truth.truth(operands)
    doubles = [t.detach().double() for t in operands.leaves().values()]
    for index in range(2):
        y = looped(*(t[index, 0] for t in doubles))
        torch.testing.assert_close(true.values["y"][index, 0], y)
    leaves = [t.requires_grad_() for t in doubles]
    plain_attention(*leaves).backward(operands.dout.double())
    for name, leaf in zip(("query", "key", "value"), leaves, strict=True):
        torch.testing.assert_close(true.values[f"d_{name}"], leaf.grad)
    assert true.values["d_query"][:, :, 0].abs().max() < 1e-15 < true.sizes["d_query"].min()
    first = (operands.value[:, :, 0].double().square().mean(-1)).sqrt()
    torch.testing.assert_close(true.sizes["y"][:, :, 0, 0], first)


def test_an_error_counts_relative_to_its_tokens_terms_where_they_are_large():
    values = {"y": torch.ones(1, 1, 100, 4, dtype=torch.float64)}
    sizes = {"y": torch.ones(1, 1, 100, 1, dtype=torch.float64)}
    sizes["y"][0, 0, 0] = 100.0
    worst = []
    for token in (0, 50):
        off = values["y"].clone()
        off[0, 0, token, 0] += 1.0
        worst.append(truth.errors({"y": off}, truth.Truth(values, sizes))["y"].worst)
    assert worst[1] == pytest.approx(100 * worst[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["math", "flash"])
def test_backends_are_right(name, dtype):
    one, operands, work = prepared(name, (128, 64, 4), dtype)
    true = truth.truth(operands)
    errors = truth.errors(check.results_of(work, operands.dout), true)
    found = truth.verdict(errors, truth.usual_errors(operands, true), one.torch_dtype)
    assert "status" not in found, found
    assert set(found) == {"y_error", "d_query_error", "d_key_error", "d_value_error"}


# --- a sweep -------------------------------------------------------------------------------------


def recorded(tmp_path, **more):
    return results.Recorder(cases.STUDY, "quick", "code", fresh=False, directory=tmp_path, **more)


def asked(*names, contexts=(24, 40)):
    return cases.grid(
        "course", contexts, [8], ["float32"], names, batch_size=2, repetitions=2, device="cpu"
    )


def swept(tmp_path, *names, contexts=(24, 40)):
    measure.sweep(recorded(tmp_path), asked(*names, contexts=contexts))
    rows = results.load(cases.STUDY, directory=tmp_path)
    return rows.set_index(["context_length", "provider"])


def added(monkeypatch, name, build, fused=True):
    monkeypatch.setitem(ways.WAYS, name, ways.Way(name, build, name, fused, False))


def test_a_sweep_measures_what_runs_and_says_what_does_not(tmp_path):
    rows = swept(tmp_path, *ON_CPU, "efficient", "flex")
    assert len(rows) == 10
    good = rows[rows["status"] == "ok"]
    assert set(good.index.get_level_values(1)) == set(ON_CPU)
    for column in ("median_ms", "forward_median_ms", "backward_median_ms", "kept_mib", "peak_mib"):
        assert (good[column] > 0).all(), column
    assert (good["speedup"].xs("plain", level=1) == 1).all()
    assert good["session"].groupby(level=0).nunique().eq(1).all()
    reasons = rows[rows["status"] == "unavailable"]["reason"]
    assert reasons.xs("efficient", level=1).str.contains("No viable backend").all()
    assert reasons.xs("flex", level=1).str.contains("CUDA only").all()
    again = recorded(tmp_path)
    measure.sweep(again, asked(*ON_CPU, "efficient", "flex"))
    assert again.measured == 0


def test_a_device_that_is_not_there_is_unavailable(tmp_path):
    lacking = [case | {"device": "xpu"} for case in asked("plain", contexts=(24,))]
    measure.sweep(recorded(tmp_path), lacking)
    [row] = results.load(cases.STUDY, directory=tmp_path).to_dict("records")
    assert (row["status"], row["reason"]) == ("unavailable", "this machine has no XPU device")


def test_what_forgets_the_mask_is_wrong_and_gets_no_time(tmp_path, monkeypatch):
    def unmasked(operands):
        leaves = operands.leaves()
        attend = torch.nn.functional.scaled_dot_product_attention
        return Workload(lambda: attend(*leaves.values()), leaves)

    added(monkeypatch, "unmasked", unmasked)
    rows = swept(tmp_path, "plain", "unmasked", contexts=(24,))
    row = rows.loc[(24, "unmasked")]
    assert row["status"] == "wrong" and "y: norm error" in row["reason"]
    assert math.isnan(row["median_ms"]) and row["y_error"] > 0.1
    assert rows.loc[(24, "plain"), "status"] == "ok"


def test_running_out_of_memory_is_a_status_and_the_next_shape_is_measured(tmp_path, monkeypatch):
    def greedy(operands):
        if operands.query.shape[-2] == 24:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        return ways.get("plain").build(operands)

    added(monkeypatch, "greedy", greedy)
    rows = swept(tmp_path, "plain", "greedy")
    assert rows.loc[(24, "greedy"), "status"] == "oom"
    assert "Tried to allocate" in rows.loc[(24, "greedy"), "reason"]
    others = rows.drop((24, "greedy"))
    assert (others["status"] == "ok").all() and len(others) == 3


def test_when_timing_does_not_fit_whoever_holds_most_goes(tmp_path, monkeypatch):
    real = measure._Clock.run

    def crowded(clock):
        if "math" in clock.ready:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(clock)

    monkeypatch.setattr(measure._Clock, "run", crowded)
    rows = swept(tmp_path, *ON_CPU, contexts=(40,)).loc[40]
    assert dict(rows["status"]) == {"plain": "ok", "math": "oom", "flash": "ok"}
    assert rows.loc["math", "kept_mib"] > 0 and math.isnan(rows.loc["math", "median_ms"])


def test_what_is_counted_far_above_the_memory_is_not_tried(tmp_path, monkeypatch):
    small = measure.machine.describe().__class__(
        **measure.machine.describe().as_dict() | {"memory_gib": 1e-6}
    )
    monkeypatch.setattr(measure.machine, "describe", lambda: small)
    rows = swept(tmp_path, *ON_CPU, contexts=(40,))
    assert dict(rows.loc[40, "status"]) == {
        "plain": "oom (predicted)", "math": "oom (predicted)", "flash": "ok"
    }  # fmt: skip
    assert rows.loc[(40, "plain"), "reason"].startswith("not tried: ")


def test_who_fails_under_the_clock_takes_nobody_along(tmp_path, monkeypatch):
    def brittle(operands):
        work, calls = ways.get("plain").build(operands), []

        def forward():
            calls.append(1)
            if len(calls) > 5:
                raise RuntimeError("device-side assert")
            return work.forward()

        return Workload(forward, work.leaves)

    added(monkeypatch, "brittle", brittle)
    rows = swept(tmp_path, "plain", "brittle", "flash", contexts=(24,)).loc[24]
    assert dict(rows["status"]) == {"plain": "ok", "brittle": "failed", "flash": "ok"}
    assert "device-side assert" in rows.loc["brittle", "reason"]


def test_a_probe_that_fails_leaves_it_to_the_case(tmp_path, monkeypatch):
    def broken(operands):
        raise RuntimeError("no such kernel image")

    added(monkeypatch, "broken", broken)
    measure._refusal.cache_clear()
    rows = swept(tmp_path, "plain", "broken", contexts=(24,)).loc[24]
    assert dict(rows["status"]) == {"plain": "ok", "broken": "failed"}


def test_what_the_hooks_saw_is_freed():
    one = draw(AttentionProblem(16, 8, 1, "float32"), "cpu")
    leaves, seen = one.leaves(), []

    def forward():
        p = (leaves["query"] @ leaves["key"].mT).softmax(-1)
        seen.append(weakref.ref(p))
        return p @ leaves["value"]

    footprint.measure(Workload(forward, leaves), one.dout)
    gc.collect()
    assert seen and all(p() is None for p in seen)


@pytest.mark.parametrize(("slow_ms", "rounds"), [(1e9, 7), (0.0, 5)])
def test_slow_rounds_are_fewer(slow_ms, rounds, monkeypatch):
    monkeypatch.setattr(measure, "SLOW_MS", slow_ms)
    monkeypatch.setattr(measure._Clock, "_calls", lambda clock, direction: (1, 1.0))
    _, operands, work = prepared("plain", (16, 8, 1))
    found = measure._Clock({"plain": work}, operands.dout, 7).run()["plain"]
    assert found["n"] == found["forward_n"] == rounds


def test_a_stopped_run_keeps_its_rows_and_measures_the_rest(tmp_path, monkeypatch):
    real, seen = truth.truth, []

    def stopped(operands):
        if seen:
            raise KeyboardInterrupt
        seen.append(True)
        return real(operands)

    monkeypatch.setattr(truth, "truth", stopped)
    with pytest.raises(KeyboardInterrupt):
        measure.sweep(recorded(tmp_path), asked("plain", "flash"))
    kept = results.load(cases.STUDY, directory=tmp_path)
    assert list(kept["context_length"]) == [24, 24]
    monkeypatch.setattr(truth, "truth", real)
    again = recorded(tmp_path)
    measure.sweep(again, asked("plain", "flash"))
    assert again.measured == 2


def test_a_refusal_keeps_the_reasons_of_the_backend_asked_for():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for text in (
            "Flash attention kernel not used because: (Triggered internally at /a/b.cpp:1.)",
            "Expected query, key and value to all be of dtype: {Half, BFloat16}. Got float "
            "instead. (Triggered internally at /a/b.h:2.)",
            "cuDNN attention has been runtime disabled. (Triggered internally at /a/c.cpp:3.)",
        ):
            warnings.warn(text, stacklevel=1)
    error = RuntimeError("No available kernel. Aborting execution.")
    said = ways._refusal(error, told)
    assert said.startswith("Expected query") and said.endswith("Got float instead.")
    assert ways._refusal(error, []) == "No available kernel. Aborting execution."


# --- cases ---------------------------------------------------------------------------------------


def test_compiled_ways_come_at_their_width_and_dtype_alone():
    found = cases.grid(
        "course", [64], [16, 64], ["float32", "bfloat16"], ["plain"], batch_size=8, repetitions=1,
        device="cpu", compiled=["inductor float32 64"],
    )  # fmt: skip
    assert [(c["provider"], c["head_dim"], c["dtype"]) for c in found if c["provider"] != "plain"] \
        == [("inductor", 64, "float32")]  # fmt: skip
    assert cases.problem_of(found[0]) == AttentionProblem(64, 16, 8, "float32")
    found = cases.grid(
        "course", [64, 32], [8], ["float32"], ["plain"], batch_size=8, repetitions=1,
        device="cpu", compiled=["flex float32 8 32"],
    )  # fmt: skip
    assert [(c["provider"], c["context_length"]) for c in found] \
        == [("plain", 64), ("plain", 32), ("flex", 32)]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "mine"}, "unknown grid 'mine'; known: course"),
        ({"ways": ["fast"]}, "unknown way 'fast'"),
        ({"repetitions": 0}, "repetitions must be at least 1, got 0"),
        ({"contexts": [0]}, "context_length must be a whole number from 1, got 0"),
        ({"compiled": ["inductor 64"]}, "got 'inductor 64'"),
    ],
)
def test_bad_cases_are_refused(change, message):
    good = {
        "name": "course", "contexts": [8], "widths": [8], "dtypes": ["float32"], "ways": ["plain"],
        "batch_size": 1, "repetitions": 1, "device": "cpu",
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        cases.grid(**good | change)


def test_one_product_more_makes_two_and_a_half_times_the_forward_pass():
    one = AttentionProblem(1024, 64, 8, "bfloat16")
    assert one.flops("forward", fused=False) == 4 * 8 * 1024**2 * 64
    assert one.flops("backward", fused=False) == 2 * one.flops("forward", fused=False)
    assert one.flops("backward", fused=True) == 2.5 * one.flops("forward", fused=True)
    assert problem.SQUARE_PASSES == {"forward": 8, "backward": 11}
