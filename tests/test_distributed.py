"""Jobs of several processes: what their rows say, and that none outlives its study."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from fusedlib.bench import paths, sweep
from fusedlib.bench.attempt import Unavailable
from measure import distributed, distributed_worker
from measure.profiles.trace import Piece

SMALL = {
    "model": "two layers", "batch_sizes": [1], "context_length": 16, "dtype": "float32",
    "warmup": 1, "steps": 3, "device": "cpu",
}  # fmt: skip


def a_case(strategy="fsdp2-2", provider="fused", processes=2, **more):
    (case,) = distributed.cases([strategy], [provider], processes=[processes], **SMALL | more)
    return case


def outcome(case):
    with distributed.Jobs() as jobs:
        return sweep.outcome(jobs.measure, case)


# --- cases and rows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"strategy": "fsdp2-4"}, r"unknown strategy 'fsdp2-4'; known: fsdp2-2, "),
        ({"optimizer": "lion"}, r"unknown optimizer 'lion'; known: sgd, adamw"),
        ({"model": "gpt"}, r"unknown model 'gpt'; known: "),
        ({"provider": "nobody"}, r"unknown rival 'nobody'"),
        ({"processes": 0}, "processes must be at least 1, got 0"),
        ({"warmup": -1}, "warmup must be at least 0, got -1"),
        ({"strategy": "offload"}, r"give optimizer='adamw', not 'sgd'"),
    ],
)
def test_a_wrong_case_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        a_case(**wrong)


def ends_badly(rank, first, port, study, log):
    """A process that ends as its case says: instead of `distributed_worker.serve`."""
    how = study.recv()["provider"]
    if how == "killed" and rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits" and rank:
        Path(log).write_text("a\n\nTypeError: b\n")
        os._exit(3)
    status, at = ("oom", 1.0) if rank else ("failed", 2.0)
    if how != "answers" or rank == 0:
        time.sleep(1)
    reply = {"rank": rank, "status": status, "reason": f"of {rank}", "figures": {"losses": [1.0]}}
    study.send(reply | {"value": None, "at": at, "goes_on": False})
    study.recv()


@pytest.mark.parametrize(
    ("how", "status", "reason", "figures"),
    [
        ("answers", "oom", r"of 1$", {"losses": [1.0]}),
        ("exits", "failed", r"a process ended with status 3: a \| TypeError: b$", {}),
        ("killed", "oom", "the system killed a process of the job", {}),
    ],
)
def test_the_first_process_that_fails_gives_the_reason(monkeypatch, how, status, reason, figures):
    monkeypatch.setattr(distributed_worker, "serve", ends_badly)
    monkeypatch.setattr(distributed, "_check_available", lambda case: None)
    with distributed.Jobs() as jobs:
        found = sweep.outcome(jobs.measure, a_case() | {"provider": how})
        assert not jobs.processes, "a job that failed is over"
    assert found[:2] == (figures, status)
    assert re.match(reason, found[2])


@pytest.mark.parametrize("name", ["loss", "gradient norm"])
def test_what_differs_from_one_process_is_wrong(name):
    true = {"reference_losses": [8.0, 7.9], "reference_gradient_norm": 2.0}
    case = a_case(dtype="bfloat16")
    good = distributed_worker.compared(case, true, [8.001, 7.9, 1.0], 2.01)
    assert "why" not in good
    losses = [8.0, 7.8] if name == "loss" else [8.0, 7.9]
    bad = distributed_worker.compared(case, true, losses, 2.0 if name == "loss" else 2.2)
    assert f"the {name} differs" in bad["why"]
    late = distributed_worker.compared(case, true, [8.0, 7.9, 7.8, float("nan")], 2.0)
    assert "by nan" in late["why"]


def test_what_is_not_there_is_unavailable(monkeypatch):
    measure = distributed.Jobs().measure
    with pytest.raises(Unavailable, match="needs 99 GPUs, one a process"):
        measure(a_case(processes=99) | {"device": "cuda"})
    with pytest.raises(Unavailable, match="needs a CUDA GPU"):
        measure(a_case(provider="liger"))
    with pytest.raises(Unavailable, match="CUDA graph"):
        measure(a_case(provider="fused-graph"))
    for whole in ("inductor", "inductor-causal", "fused-inductor"):
        with pytest.raises(Unavailable, match="take inductor-layers or fused-inductor-layers"):
            measure(a_case(provider=whole))
    monkeypatch.setattr(distributed, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pip install '.\[llama\]'"):
        measure(a_case("zero-2"))


# --- communication, and more processes -----------------------------------------------------------


def piece(name, start, end):
    return Piece(name, end - start, start, end, start, 1)


def test_hidden_communication_is_what_runs_beside_computing():
    pieces = [
        piece("ncclDevKernel_AllGather", 0, 4000), piece("ncclDevKernel_Reduce", 3000, 6000),
        piece("gemm", 1000, 2000), piece("gemm", 1500, 3500), piece("silu", 7000, 8000),
    ]  # fmt: skip
    assert distributed_worker.overlap(pieces) == {
        "communication_ms": 6.0, "compute_ms": 3.5, "hidden_ms": 2.5, "hidden_share": 2.5 / 6,
    }  # fmt: skip
    assert distributed_worker.overlap([piece("gemm", 0, 5)])["hidden_share"] is None


def test_the_model_of_more_processes_by_hand():
    bandwidths = {"all_gather_gb_s": 2.0, "reduce_scatter_gb_s": 1.0}
    weights_mib = 8e9 / 2**20
    # Of 8 GB a process of two sends 4: twice at 2 GB/s and once at 1 GB/s.
    sent = distributed.communication_ms("fsdp2-3", weights_mib, 2, **bandwidths)
    assert sent == pytest.approx(8000)
    assert distributed.communication_ms("zero-2", weights_mib, 8, **bandwidths) == pytest.approx(
        7000 / 2 + 7000
    )
    assert distributed.communication_ms("fsdp2-3", weights_mib, 1, **bandwidths) == 0
    assert distributed.step_time_ms(1000, sent, hidden_share=0.75) == pytest.approx(3000)
    memory = partial(distributed.memory_mib, regathered_mib=100)
    assert memory("fsdp2-2", 1000, 300, 1) == memory("fsdp2-3", 1000, 300, 1) == 1000
    assert memory("fsdp2-2", 1000, 300, 4) == pytest.approx(775)
    assert memory("fsdp2-3", 1000, 300, 4) == pytest.approx(675)
    with pytest.raises(ValueError, match="'offload'"):
        distributed.communication_ms("offload", 1, 2, **bandwidths)
    for strategy, processes in (("fsdp2-2", 0), ("zero-3", 2)):
        with pytest.raises(ValueError, match=f"'{strategy}', processes={processes}: need fsdp2"):
            memory(strategy, 1000, 300, processes)


# --- real jobs -----------------------------------------------------------------------------------


def training(strategy, optimizer):
    return a_case(strategy, optimizer=optimizer, checkpointing=optimizer == "adamw")


BY_FSDP2 = [("fsdp2-2", "sgd"), ("fsdp2-3", "adamw")]


@pytest.fixture(scope="module")
def in_one_job():
    """Outcomes of two trainings, a third that fails and one more; the processes that are left after
    each.
    """
    cases = [*(training(*by) for by in BY_FSDP2), a_case() | {"learning_rate": "much"}, a_case()]
    with distributed.Jobs() as jobs:
        return [
            (sweep.outcome(jobs.measure, case), [p.pid for p in jobs.processes.values()])
            for case in cases
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "optimizer"), [*BY_FSDP2, ("zero-2", "sgd"), ("offload", "adamw")]
)
def test_two_processes_train_as_one_does(request, strategy, optimizer):
    case = training(strategy, optimizer)
    if not distributed_worker.is_deepspeed(case):
        at = BY_FSDP2.index((strategy, optimizer))
        (figures, status, reason), _ = request.getfixturevalue("in_one_job")[at]
    elif find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install '.[llama]'")
    else:
        figures, status, reason = outcome(case)
    assert (status, reason) == ("ok", None)
    assert figures["losses"][-1] < figures["losses"][0] - 1e-3
    assert len(figures["losses"]) == 4
    assert figures["n"] == len(figures["samples_ms"]) == 3
    assert len(figures["steady_samples_ms"]) == 2  # the one that begins on an idle device is out
    assert figures["tokens_per_s"] == pytest.approx(2 * 16 / figures["median_ms"] * 1e3)
    assert figures["all_gather_gb_s"] > 0
    assert figures["path"] == "plain PyTorch"


@pytest.mark.slow
def test_a_process_that_fails_leaves_its_reason(in_one_job):
    (figures, status, reason), _ = in_one_job[2]
    assert status == "failed"
    assert "TypeError" in reason
    assert "median_ms" not in figures


@pytest.mark.slow
def test_processes_go_on_to_the_next_case_until_one_fails(in_one_job):
    first, second, third, last = [(found[1], processes) for found, processes in in_one_job]
    assert first == second == ("ok", second[1]) and third == ("failed", [])
    assert last[0] == "ok" and len(last[1]) == 2 and not set(last[1]) & set(first[1])


def test_a_job_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr(distributed, "TIMEOUT_S", 0.5)
    figures, status, reason = outcome(a_case())
    assert (figures, status) == ({}, "failed")
    assert "stopped after 0.5 s" in reason


@pytest.mark.slow
def test_no_process_outlives_its_study():
    case = a_case(steps=10**6)
    run = f"from measure import distributed as d; d.Jobs().measure({case})"
    study = subprocess.Popen([sys.executable, "-c", run], cwd=paths.ROOT)

    def spawned():
        children = Path(f"/proc/{study.pid}/task/{study.pid}/children").read_text().split()
        commands = {Path(f"/proc/{child}"): b"" for child in children}
        for process in commands:
            with suppress(OSError):  # it may not have begun
                commands[process] = (process / "cmdline").read_bytes()
        return [process for process, command in commands.items() if b"spawn_main" in command]

    wait(lambda: len(spawned()) == 2)
    processes = spawned()
    study.send_signal(signal.SIGKILL)
    study.wait()
    wait(lambda: not any((process / "stat").exists() for process in processes))


def wait(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
