"""Compilers: both samplers draw from one distribution, what is wrong or late gets no time."""

import signal
import time
from functools import partial

import pytest
import torch

import fusedlib
from study import compiled_llama, compilers, compiling, patched, rivals
from study.compiled_llama import SAMPLERS, Arm

pytest.importorskip("transformers")
SMALL = {"model": "two small layers", "trained": "two small layers", "context_length": 24,
         "batch_size": 1, "iterations": 3, "device": "cpu"}  # fmt: skip
PARTS = ("forward", "inference", "generation", "training", "changing")


pytestmark = pytest.mark.usefixtures("one_thread", "no_warm_compiler")


def cases(part, arms, **sizes):
    parts = {name: [] for name in PARTS} | {part: arms}
    listed = compilers.cases(**SMALL | parts | sizes)
    return [c | {"dtype": "float32"} for c in listed if c["experiment"] != "ceiling"]


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


@pytest.mark.parametrize(
    ("name", "masked"),
    [("inductor", True), ("inductor-causal", False), ("inductor-causal-searched", False),
     ("inductor-layers", False), ("fused-inductor-layers", False)],
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
