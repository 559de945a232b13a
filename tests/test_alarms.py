"""What is too good to be true is refused with a reason, and gets no time."""

from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fusedlib.bench import alarms, check, machine, timing
from fusedlib.bench.attempt import Wrong
from fusedlib.bench.problem import Operands, Problem
from fusedlib.bench.turns import Checked
from played_clock import PlayedClock
from study import rivals
from study.rivals import Workload

H100 = 4096 * 132 * 1980e6  # FLOP/s of its tensor cores at its highest clock


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))


def operation(x: Tensor, reference) -> Problem:
    """A problem of one operand."""
    dy = torch.ones_like(reference(x), dtype=x.dtype)
    return Problem(Operands({"x": x}, dy), lambda x: reference(x))


def hold(problem: Problem, compute) -> Checked:
    """Check a function of no arguments on a problem's operands."""
    return problem.admit("mine", Workload(compute, problem.inputs.leaves()))


HONEST = {
    "maximum of rows": lambda x: x.amax(0),
    "maximum": lambda x: x.amax(),
    "sum of rows": lambda x: x.sum(0),
    "sorted": lambda x: x.sort(0).values,
    "statistics of a softmax": lambda x: torch.stack([x.amax(0), x.logsumexp(0)]),
    "how many are positive": lambda x: (x > 0).sum(0),
    "normalised": lambda x: x / x.norm(),
    "rows normalised": lambda x: x / x.norm(dim=-1, keepdim=True),
    "where the largest is": lambda x: x.argmax(0),
    "itself": lambda x: x * 1,
}


SHAPES = [(64, 48), (1, 48), (48,), (2, 3, 48), (48, 1)]
CONSTANT = {("where the largest is", (1, 48)), ("rows normalised", (48, 1))}


@pytest.mark.parametrize(
    ("name", "shape"), [case for case in product(HONEST, SHAPES) if case not in CONSTANT], ids=str
)
def test_an_honest_function_is_not_refused_and_one_that_keeps_is(name, shape):
    """Also where the order of rows makes no difference, and where there is one."""
    x = torch.randn(shape)
    old, compute = x.clone(), HONEST[name]
    hold(operation(x, compute), lambda: compute(x))
    result = compute(x)
    with pytest.raises(Wrong, match="once operands were rewritten in place, the results stay"):
        hold(operation(x, compute), lambda: result.clone())
    assert torch.equal(x, old)


@pytest.mark.parametrize(("times", "accepted"), [(3.0, True), (5.0, False)])
def test_once_operands_were_rewritten_four_times_the_rule_s_error_is_accepted(times, accepted):
    """They are other in every run: a split product's worst element was 1.1 times what the rule
    allows, once in two runs.
    """
    x = torch.randn(64, 48)
    problem, drawn = operation(x, torch.exp), x.clone()

    def compute() -> Tensor:
        if torch.equal(x, drawn):
            return x.exp()
        most = check.allowed(problem.rewritten.baseline["y"].norm, torch.float32)
        true = x.double().exp()
        off = times * most * true.square().mean().sqrt()
        return (true + off * torch.sign(torch.randn(x.shape))).float()

    with nullcontext() if accepted else pytest.raises(Wrong, match="y: norm error"):
        hold(problem, compute)


@pytest.fixture
def on_h100(monkeypatch):
    """This machine's card is an H100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    facts = SimpleNamespace(max_sm_clock_mhz=1980)
    monkeypatch.setattr(machine, "describe", lambda: facts)
    monkeypatch.setattr(machine, "memory_bytes_per_s", lambda: None)


@pytest.mark.usefixtures("on_h100")
def test_more_flops_than_the_card_can_do_are_refused_and_fewer_are_not():
    assert alarms.most_flops_per_s("cuda") == pytest.approx(H100)
    assert alarms.most_flops_per_s("cpu") is None
    alarms.require_possible_time(1.0, 0.7 * H100 / 1e3, "cuda")
    alarms.require_possible_time(1e-9, 1e15, "cpu")
    with pytest.raises(Wrong, match=r"1.39e\+12 FLOPs in 1 ms are 1.39e\+03 TFLOP/s, more than"):
        alarms.require_possible_time(1.0, 1.3 * H100 / 1e3, "cuda")


@pytest.mark.parametrize("holdups", [1, timing.TRIES])
def test_work_on_another_stream_is_refused_and_a_host_held_up_once_is_not(monkeypatch, holdups):
    left = [0.02] * holdups  # seconds that the device works on, a try
    late = []

    def call() -> None:
        late.append(left.pop() if left else 0.0)

    clock = PlayedClock()
    monkeypatch.setattr(timing, "time", clock)
    wait = lambda device: clock.sleep(late.pop() if late else 0)  # noqa: E731
    monkeypatch.setattr(timing, "synchronize", wait)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    if holdups == 1:
        timing.require_current_stream(call, "cuda", lambda: None)
    else:
        with pytest.raises(Wrong, match="ms after the current stream was done"):
            timing.require_current_stream(call, "cuda", lambda: None)


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [True, False])
def test_a_clock_on_another_stream_is_refused(waits):
    side = torch.cuda.Stream()
    x = torch.randn(4096, 4096, device="cuda")

    def call() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(8):
                torch.mm(x, x)
        if waits:
            torch.cuda.current_stream().wait_stream(side)

    clocked = {"device": "cuda", "warmup": 1, "repetitions": 3, "flush_l2": False}
    if waits:
        timing.in_turns({"mine": call}, **clocked)
    else:
        with pytest.raises(Wrong, match="runs on another stream"):
            timing.in_turns({"mine": call}, **clocked)
