"""Compilers: both samplers draw from one distribution, what is wrong or late gets no time."""

import signal
import time
from functools import partial

import pandas as pd
import pytest
import torch

import fusedlib
from fusedlib.bench.attempt import Attempt
from study import compiled_llama, compilers, compiling, patched, rivals
from study.compiled_llama import SAMPLERS, Arm

pytest.importorskip("transformers")
SMALL = {"model": "two small layers", "trained": "two small layers", "context_length": 24,
         "batch_size": 1, "iterations": 3, "device": "cpu"}  # fmt: skip
PARTS = ("forward", "inference", "generation", "training", "changing")


pytestmark = pytest.mark.usefixtures("one_thread")


def cases(part, arms, **sizes):
    parts = {name: [] for name in PARTS} | {part: arms}
    listed = compilers.cases(**SMALL | parts | sizes)
    return [case for case in listed if case["experiment"] != "ceiling"]


# --- samplers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLERS)
def test_what_a_sampler_draws_fits_its_probabilities(name):
    torch.manual_seed(0)
    misfit = compiled_llama.misfit(SAMPLERS[name], 64, torch.float32, "cpu")
    assert misfit < 24.3  # chi-square of 7 degrees: one in a thousand


def drawn_by_product(logits):
    p = torch.softmax(logits / compiled_llama.TEMPERATURE, -1)
    return torch.argmax(p * torch.empty_like(p).exponential_(1.0), -1, keepdim=True)


def drawn_too_hot(logits):
    return torch.multinomial(torch.softmax(logits / 3, -1), 1)


def drawn_outside(logits):
    return torch.full((1, 1), 1)


@pytest.mark.parametrize("sample", [drawn_by_product, drawn_too_hot, drawn_outside])
def test_a_sampler_of_another_distribution_is_seen(sample):
    torch.manual_seed(0)
    misfit = compiled_llama.misfit(sample, 64, torch.float32, "cpu")
    assert not misfit < compiled_llama.MOST_MISFIT


# --- arms ----------------------------------------------------------------------------------------


@pytest.fixture
def arm():
    """Registers an arm for the length of a test."""
    names = []

    def register(compile_, *, fused=False, traits=()):
        def build():
            """Of a test."""
            return Arm(fused, compile_)

        names.append("test arm")
        rivals.rival(compiled_llama.TASK, "test arm", traits=frozenset(traits))(build)

    yield register
    for name in names:
        del rivals.RIVALS[compiled_llama.TASK, name]


@pytest.mark.parametrize("experiment", ["forward", "inference", "training"])
def test_an_arm_whose_results_miss_is_wrong_and_gets_no_time(arm, experiment):
    def compile_(call):
        def off(*args, **kwargs):
            actual = call(*args, **kwargs)
            actual.logits, actual.loss = 1.05 * actual.logits, actual.loss and 1.05 * actual.loss
            return actual

        return off

    arm(compile_)
    rows = compilers.measure(cases(experiment, ["test arm"]))
    plain, wrong = sorted(rows, key=lambda row: row.case["provider"])
    assert (plain.status, wrong.status) == ("ok", "wrong")
    assert "median_ms" not in wrong.figures and wrong.figures["error"] > 0.04


def test_what_cannot_run_here_says_so_and_has_no_partner():
    actual = cases("forward", ["all"])
    attempts = {c["against"]: Attempt.at(compilers.available, c) for c in actual
                if c["provider"] == "huggingface"}  # fmt: skip
    for name in ("inductor-graphs", "fused-inductor-graphs"):
        assert attempts[name].status == "unavailable" and "CUDA GPU" in attempts[name].reason
    assert attempts["fused"].ok and attempts["inductor"].ok


@pytest.mark.parametrize(
    ("name", "masked"),
    [("inductor", True), ("inductor-causal", False), ("inductor-layers", False),
     ("fused-inductor-layers", False)],
)  # fmt: skip
def test_a_llama_compiled_as_a_whole_gets_a_mask_from_transformers_unless_its_arm_forbids_one(
    monkeypatch, name, masked
):
    """What scaled_dot_product_attention is called with in the graphs that Dynamo makes."""
    calls, made = [], []

    def backend(graph, example):
        calls.extend(n.kwargs for n in graph.graph.nodes if "scaled_dot_prod" in str(n.target))
        made.append(graph)
        return graph

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **_: compile_(call, backend=backend))
    model = patched.build(SMALL["model"], "float32", "cpu")
    ids = patched.tokens(SMALL["model"], 2, 24, "cpu")
    logits = model(ids).logits
    torch.compiler.reset()
    arm = rivals.get(compiled_llama.TASK, name).build()
    if arm.fused:
        fusedlib.apply_to(model)
    names = list(model.state_dict())
    actual = arm.compile(model)(ids).logits
    assert len(made) == 1, "one graph serves all layers"
    assert len(calls) == (1 if "layers" in name else 2)
    assert {c["is_causal"] for c in calls} == {not masked}
    assert {c["attn_mask"] is not None for c in calls} == {masked}
    torch.testing.assert_close(actual, logits)
    assert model.config._attn_implementation == "sdpa" and list(model.state_dict()) == names


@pytest.mark.parametrize("fused", [False, True])
def test_layers_compiled_as_the_notebook_says_share_a_graph_and_see_padding(fused):
    plain = patched.build(SMALL["model"], "float32", "cpu").eval()
    model, graphs = patched.copy_of(plain, weights=True), []
    if fused:
        fusedlib.apply_to(model)

    def backend(graph, example):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=backend)
    ids, padding = (
        patched.tokens(SMALL["model"], 2, 24, "cpu"),
        torch.ones(2, 24, dtype=torch.int64),
    )
    padding[0, :5] = 0
    for number, mask in enumerate((None, padding), 1):
        actual, wanted = (m(ids, attention_mask=mask).logits for m in (model, plain))
        there = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(actual[there], wanted[there])
        assert len(graphs) == number


@pytest.mark.gpu
def test_what_an_arm_holds_is_the_same_for_the_first_graph_of_a_process_as_for_later_ones():
    x, weight = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def held(compile_):
        torch.compiler.reset()
        call = compile_(lambda: torch.relu(x @ weight))

        def run():
            torch.compiler.cudagraph_mark_step_begin()
            return call()

        return compiling.call_until_compiled(run, "cuda")["held_mib"]

    graph = partial(torch.compile, mode="reduce-overhead")
    (x @ weight.requires_grad_()).sum().backward()  # workspaces of two threads
    weight.requires_grad_(False)
    first, plain, again = held(graph), held(lambda call: call), held(graph)
    assert first == again >= 0
    assert plain == pytest.approx(first, abs=1)  # each with one workspace of cuBLAS


# --- time that is over ---------------------------------------------------------------------------


def test_an_arm_that_is_not_ready_in_time_is_stopped(arm):
    ready = []

    def compile_(call):
        def slow(*args, **kwargs):
            time.sleep(60)
            ready.append(True)

        return slow

    arm(compile_, traits=["compiles"])
    handler = signal.getsignal(signal.SIGALRM)
    rows = compilers.measure(cases("forward", ["test arm"], limit_s=0.3))
    row = next(r for r in rows if r.case["provider"] == "test arm")
    assert row.status == "unavailable" and "not ready after 0.3 s" in row.reason
    assert not ready
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_dynamic_training_is_stopped_and_its_row_says_when(arm):
    def compile_(call):
        def slow(*args, **kwargs):
            time.sleep(0.2)
            return call(*args, **kwargs)

        return slow

    arm(compile_)
    (case,) = cases("changing", ["test arm"], iterations=40, limit_s=0.7)
    actual = compiled_llama.changing(case)
    assert actual["n"] < 40 and actual["total_s"] is None
    assert actual["lengths"] == compiled_llama.lengths(case)[: actual["n"]]


# --- what follows from the rows ------------------------------------------------------------------

PEAKS = {"experiment": "ceiling", "flops_per_s": 1e12, "bytes_per_s": 1e9}


def described(*lines):
    shared = {"machine": "m", "set": "r", "status": "ok", "session": "s"}
    return compilers.derive(pd.DataFrame([shared | line for line in (PEAKS, *lines)])).iloc[1:]


def a_call(provider, experiment, subject, **more):
    return {"provider": provider, "experiment": experiment, "subject": subject,
            "model": SMALL["model"], "tokens": 64, **more}  # fmt: skip


def test_a_token_s_least_time_is_that_of_reading_weights_and_cache_once():
    made = {"sampler": "race", "weights_bytes": 3e6, "cache_bytes": 1e6, "median_ms": 20 * 8.0}
    [row] = described(a_call("fused-inductor", "generation", "decoding", **made)).to_dict("records")
    assert row["call_ms"] == 8 and row["over_least"] == pytest.approx(2)  # 4 MB at 1 GB/s: 4 ms
    assert row["published_as"] == 125  # tokens/s
    assert (row["work"], row["compiler"], row["operations"]) == (
        "generation race", "inductor", "fused"
    )  # fmt: skip


def test_a_training_step_computes_three_times_a_forward_pass_s_products():
    forward = described(a_call("inductor", "forward", "forward", median_ms=1.0))
    step = described(a_call("inductor", "training", "training", optimizer="sgd", median_ms=1.0))
    fields = patched.CONFIGS[SMALL["model"]]
    hidden, inner = fields["hidden_size"], fields["intermediate_size"]
    weights = 2 * (4 * hidden**2 + 3 * hidden * inner) + hidden * fields["vocab_size"]
    least_ms = 2 * 64 * weights / 1e12 * 1e3
    assert forward["over_least"].iloc[0] == pytest.approx(1 / least_ms)
    assert step["over_least"].iloc[0] == pytest.approx(1 / (3 * least_ms))
    assert step["published_as"].iloc[0] == pytest.approx(0.045)  # s of 45 steps


@pytest.mark.parametrize(("ms", "calls"), [(5.0, 400), (9.95, None)])
def test_compiling_has_paid_when_what_it_saves_is_what_it_took(ms, calls):
    rows = described(
        a_call("huggingface", "forward", "forward", median_ms=10.0, compile_s=0.1),
        a_call("inductor", "forward", "forward", median_ms=ms, compile_s=2.0),
    )
    eager, compiled = rows["pays_after"].fillna(-1)
    assert eager == -1 and compiled == (calls or -1), "a saving below 2 % does not count"


def test_steps_of_changing_lengths_tell_how_far_they_are_behind_eager():
    rows = pd.DataFrame([
        {"provider": "huggingface", "lengths": [8, 9, 10], "samples_ms": [100.0, 200.0, 300.0]},
        {"provider": "inductor", "lengths": [8, 9, 10], "samples_ms": [5000.0, 50.0]},
    ]).assign(machine="H200", experiment="dynamic")  # fmt: skip
    steps = compilers.by_iteration(rows)
    assert steps["length"].tolist() == [8, 9, 10, 8, 9]
    assert steps["behind_s"].round(6).tolist() == [0.0, 0.0, 0.0, 4.9, 4.75]
