"""Jobs of several processes: what their rows say, and that none outlives its study."""

import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

from outcomes import outcome
from processes import wait_for
from study import distributed, liger, patched, paths, rivals

SMALL = {
    "model": "two layers", "batch_sizes": [1], "context_length": 16, "dtype": "float32",
    "warmup_steps": 1, "steps": 3, "device": "cpu",
}  # fmt: skip


def a_case(strategy="fsdp2-2", provider="fused", processes=2, **more):
    (case,) = distributed.cases([strategy], [provider], processes=[processes], **SMALL | more)
    return case


# --- cases and rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss", "gradient norm"])
def test_what_differs_from_one_process_is_wrong(name):
    true = {"reference_losses": [8.0, 7.9], "reference_gradient_norm": 2.0}
    case = a_case(dtype="bfloat16")
    assert distributed.compared(case, true, [8.001, 7.9, 1.0], 2.01) == []
    losses = [8.0, 7.8] if name == "loss" else [8.0, 7.9]
    norm = 2.0 if name == "loss" else 2.2
    (wrong,) = distributed.compared(case, true, losses, norm)
    assert f"the {name} differs" in wrong
    (late,) = distributed.compared(case, true, [8.0, 7.9, 7.8, float("nan")], 2.0)
    assert "by nan" in late


def test_liger_runs_its_triton_kernels_whoever_calls_the_model(monkeypatch, one_thread):
    """Where CuTe is installed Liger gives RoPE to it, and DeepSpeed drops what an arm is called
    by, as this one does.
    """
    backends = pytest.importorskip("liger_kernel.backends")
    seen = []

    def arm(model):
        model.register_forward_hook(lambda *_: seen.append(backends.get_impl()))
        return model

    made = rivals.Rival(patched.TASK, "liger-seen", arm, "for a test")
    monkeypatch.setitem(rivals.RIVALS, (patched.TASK, "liger-seen"), made)
    monkeypatch.setattr(liger, "has_cute", lambda: True)
    monkeypatch.setattr(liger, "path", lambda work: work() and None)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_NVLS_ENABLE",
             "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR")  # fmt: skip
    for name in names:
        monkeypatch.setenv(name, "")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        figures = distributed.train(a_case(provider="liger-seen", processes=1), 0, port)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert {*seen} == {liger.TRITON} == {figures["path"]} and figures["median_ms"] > 0


# --- real jobs -----------------------------------------------------------------------------------


def training(strategy, optimizer):
    return a_case(strategy, optimizer=optimizer, checkpointing=optimizer == "adamw")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [("fsdp2-3", "adamw"), ("zero-2", "sgd"), ("offload", "adamw")],
)
def test_two_processes_train_as_one_does(strategy, optimizer):
    case = training(strategy, optimizer)
    if distributed.is_deepspeed(case) and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install '.[llama]'")
    figures, status, reason = outcome(distributed.measure, case)
    assert (status, reason) == ("ok", None)
    assert figures["losses"][-1] < figures["losses"][0] - 1e-3
    assert len(figures["losses"]) == 4
    assert figures["n"] == len(figures["samples_ms"]) == 3
    assert figures["tokens_per_s"] == pytest.approx(2 * 16 / figures["median_ms"] * 1e3)


@pytest.mark.slow
def test_no_process_outlives_its_study():
    case = a_case(steps=10**6)
    run = f"from study import distributed as d; d.measure({case})"
    study = subprocess.Popen([sys.executable, "-c", run], cwd=paths.ROOT)

    def spawned():
        children = Path(f"/proc/{study.pid}/task/{study.pid}/children").read_text().split()
        commands = {Path(f"/proc/{child}"): b"" for child in children}
        for process in commands:
            with suppress(OSError):  # it may not have begun
                commands[process] = (process / "cmdline").read_bytes()
        return [process for process, command in commands.items() if b"study.fresh" in command]

    wait_for(lambda: len(spawned()) == 2)
    processes = spawned()
    study.send_signal(signal.SIGKILL)
    study.wait()
    wait_for(lambda: not any((process / "stat").exists() for process in processes))
