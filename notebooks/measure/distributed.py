"""Training runs on several processes: FSDP2, and DeepSpeed.

    cases = distributed.cases(
        ["fsdp2-2", "fsdp2-3", "zero-2", "zero-3"], ["huggingface", "fused"],
        model="open_llama_3b", processes=[1, 2], batch_sizes=[2], context_length=2048,
        dtype="bfloat16", optimizer="sgd", warmup=5, steps=45,
    )
    with distributed.Jobs() as jobs:
        sweep(recorder, cases, jobs.measure)

The processes of a job run `measure.distributed_worker`: one case after the other, as long as they
give all memory back, which DeepSpeed's do not. `provider` names an arm, and `model` a
configuration, of `measure.llama`.

`strategy` (how the model is divided; `STRATEGIES`):

    fsdp2-2              `fully_shard` of each layer, weights stay whole from forward to backward
    fsdp2-3              weights are gathered anew in backward
    zero-2, zero-3       DeepSpeed's stages, its defaults, all on the device
    offload              ZeRO-3, weights and optimizer in the host's memory, CPU Adam, defaults
    offload-throttled    the same as seed 002 set it: no prefetch, no live weights, buckets of 1e5

Columns of a row, besides the case (experiment, strategy, provider, model, processes, batch_size
(of one process), context_length, dtype, optimizer, learning_rate, checkpointing, warmup, steps,
device):

    samples_ms, median_ms, p10_ms, ...   a step from an idle device, the slowest process of each
    forward_median_ms, backward_..., optimizer_...   parts of the step, likewise
    steady_samples_ms, steady_median_ms, ...   a step among others that follow without a wait: as
                                         training runs, where the host may be ahead
    first_ms                             the very first step, compilation included
    tokens_per_s                         of all processes together, at the median step
    peak_mib, state_mib                  device memory a process: most in a step, between steps
    host_mib, pinned_mib                 host memory of all processes after the last step: resident,
                                         and page-locked (in blocks of powers of two)
    weights_mib                          of the whole model
    losses                               of every step, warm-up first, mean of the processes
    reference_losses, loss_error, loss_band
    gradient_norm, reference_gradient_norm, gradient_norm_error, gradient_norm_band
    communication_ms, hidden_ms, hidden_share, compute_ms    of one profiled step of process 0
    all_gather_gb_s, reduce_scatter_gb_s   measured bandwidth, bytes sent by a process a second
    version, settings, path              packages; what the strategy sets; which code of ours ran

None are device memory without a GPU, hidden communication without two, and bandwidths of one
process. Every job first trains the plain Hugging Face model in one process, on the sequences of all
processes one by one; losses or the first gradient's norm outside the band are `wrong`. Other rows
without a time: `unavailable` (package or GPUs missing), `oom`, and `failed` with the last lines of
the job (`TIMEOUT_S` for a case). DeepSpeed compiles CPU Adam in its first job.

`step_time_ms` and `memory_mib` are a model of more processes, from the rows of one and two.
"""

import multiprocessing
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from fusedlib.bench import machine, rivals
from fusedlib.bench.attempt import Refused, Unavailable
from fusedlib.bench.cases import Case, device_of, grid, require_known, require_least
from measure import distributed_worker, llama
from measure.distributed_worker import OPTIMIZERS, STRATEGIES, is_deepspeed

EXPERIMENT = "distributed"
TIMEOUT_S = 540.0
LAST_LINES = 6
# How often a step gathers all weights: stage 3 does so for the backward pass once more.
GATHERS = {"fsdp2-2": 1, "fsdp2-3": 2, "zero-2": 1, "zero-3": 2}
Reply = dict[str, Any]


def cases(
    strategies: Sequence[str], providers: Sequence[str], *, model: str, processes: Sequence[int],
    batch_sizes: Sequence[int], context_length: int, dtype: str = "bfloat16",
    optimizer: str = "sgd", checkpointing: bool = False, warmup: int = 5, steps: int = 45,
    device: str = "auto",
) -> list[dict[str, Any]]:  # fmt: skip
    """Training runs of each provider under each strategy, on each number of processes.

    Args:
        strategies: of `STRATEGIES`.
        providers: arms of `measure.llama`, or "all".
        model: of `llama.CONFIGS`.
        processes: numbers of processes, one GPU each.
        batch_sizes: sequences a step and process.
        context_length: tokens a sequence.
        dtype: of weights and products; DeepSpeed keeps fp32 copies of 16-bit weights.
        optimizer: "sgd" or "adamw", which is DeepSpeed's CPU Adam where the optimizer is in the
            host's memory.
        checkpointing: whether backward computes each layer's activations anew.
        warmup: steps before the clock counts.
        steps: steps that are timed.
        device: "cuda" or "cpu"; "auto" takes the best there is.

    Raises:
        ValueError: an unknown strategy, arm, model or optimizer, CPU Adam asked to be SGD, or a
            number below 1 (below 0 for the warm-up).
    """
    require_known("strategy", strategies, STRATEGIES)
    require_known("optimizer", optimizer, OPTIMIZERS)
    require_known("model", model, llama.CONFIGS)
    require_least(
        1, processes=processes, batch_sizes=batch_sizes, context_length=context_length, steps=steps
    )
    require_least(0, warmup=warmup)
    if optimizer != "adamw" and (offloaded := [s for s in strategies if s.startswith("offload")]):
        raise ValueError(
            f"{offloaded[0]} runs DeepSpeed's CPU Adam: give optimizer='adamw', not {optimizer!r}"
        )
    shared = {
        "experiment": EXPERIMENT, "model": model, "context_length": context_length, "dtype": dtype,
        "optimizer": optimizer, "learning_rate": OPTIMIZERS[optimizer],
        "checkpointing": checkpointing, "warmup": warmup, "steps": steps,
        "device": device_of(device),
    }  # fmt: skip
    return grid(
        shared, strategy=strategies, processes=processes, batch_size=batch_sizes,
        provider=rivals.chosen(llama.TASK, providers),
    )  # fmt: skip


class Jobs:
    """Runs cases in processes that go on from one to the next where both are of one kind.

    The processes are spawned, so that each has a CUDA context of its own, and their output goes
    into a log. Starting them takes half a minute.
    """

    def __init__(self) -> None:
        self.kind: tuple[Any, ...] = ()
        self.processes: dict[Connection, SpawnProcess] = {}
        self.log = tempfile.NamedTemporaryFile(prefix="fusedlib-distributed-")  # noqa: SIM115

    def __enter__(self) -> "Jobs":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def measure(self, case: Case) -> dict[str, Any]:
        """The row's figures of one case, with `status` and `reason` where it is not ok.

        Raises:
            Refused: a package or GPUs are missing, the time was up, or a process ended.
            MemoryError: the system killed a process.
        """
        _check_available(case)
        kind = is_deepspeed(case), case["processes"], case["device"]
        if not self.processes or kind != self.kind:
            self.end()
            self._start(case)
            self.kind = kind
        replies: list[Reply] = []
        try:
            return self._run(case, replies)
        finally:
            if not all(reply["goes_on"] for reply in replies) or len(replies) < case["processes"]:
                self.end()

    def _start(self, case: Case) -> None:
        spawn = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.log.truncate(0)
        for rank in range(case["processes"]):
            own, theirs = spawn.Pipe()
            arguments = (rank, dict(case), port, theirs, self.log.name)
            process = spawn.Process(target=distributed_worker.serve, args=arguments)
            process.start()
            theirs.close()  # so that `own` is at its end when the process is
            self.processes[own] = process

    def _run(self, case: Case, replies: list[Reply]) -> dict[str, Any]:
        """The figures of process 0; `replies` gets what all processes answered.

        The first one that fails tells why: the others fail because of it.
        """
        deadline = time.monotonic() + TIMEOUT_S
        waiting = dict(self.processes)
        for connection in waiting:
            connection.send(dict(case))
        while waiting:
            ready = wait(list(waiting), deadline - time.monotonic())
            if not ready:
                raise self._refused(f"stopped after {TIMEOUT_S:g} s, the most that a case may take")
            for connection in (own for own in self.processes if own in ready):
                process = waiting.pop(connection)
                try:
                    replies.append(connection.recv())
                except EOFError:
                    process.join()
                    if process.exitcode == -signal.SIGKILL:
                        raise MemoryError(
                            "the system killed a process of the job: most likely out of memory"
                        ) from None
                    ended = f"a process ended with status {process.exitcode}"
                    raise self._refused(ended) from None
            if broken := [reply for reply in replies if reply["status"] != "ok"]:
                first = min(broken, key=lambda reply: reply["at"])
                return {**first["figures"], "status": first["status"], "reason": first["reason"]}
        return next(dict(reply["value"]) for reply in replies if reply["rank"] == 0)

    def _refused(self, why: str) -> Refused:
        text = Path(self.log.name).read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()][-LAST_LINES:]
        return Refused(f"{why}: {' | '.join(lines) or 'no message'}")

    def end(self) -> None:
        """End the processes."""
        for connection, process in self.processes.items():
            process.kill()
            process.join()
            connection.close()
        self.processes = {}


def _check_available(case: Case) -> None:
    if is_deepspeed(case) and find_spec("deepspeed") is None:
        raise Unavailable("the package deepspeed is not installed: pip install '.[llama]'")
    arm = rivals.get(llama.TASK, case["provider"])
    if "graph" in arm.traits:
        raise Unavailable("a step that waits for other processes is not captured in a CUDA graph")
    if "whole" in arm.traits:
        raise Unavailable(
            "hooks that gather weights stand between the layers of a divided model, so it is not "
            "compiled as a whole: take inductor-layers or fused-inductor-layers"
        )
    facts = machine.describe()
    there = facts.device_count if facts.device_type == "cuda" else 0
    if case["device"] == "cuda" and case["processes"] > there:
        raise Unavailable(
            f"needs {case['processes']} GPUs, one a process; this machine has {there}"
        )
    arm.check_available(case["device"], case["dtype"])


# --- communication, and a model of more processes -----------------------------------------------


def communication_ms(
    strategy: str, weights_mib: float, processes: int, *, all_gather_gb_s: float,
    reduce_scatter_gb_s: float,
) -> float:  # fmt: skip
    """Time of a step's communication if nothing else ran: s · (g / A + 1 / R).

    s = weights · (N - 1) / N is what each of N processes sends to gather all weights once, or to
    reduce all gradients (of the weights' dtype); g is how often a step gathers (`GATHERS`); A and R
    are the bandwidths measured for the two, in 1e9 bytes a second.

    Raises:
        ValueError: a strategy whose step has no such formula, or less than one process.
    """
    if strategy not in GATHERS or processes < 1:
        raise ValueError(
            f"strategy={strategy!r}, processes={processes}: need one of {', '.join(GATHERS)} and "
            "at least 1"
        )
    sent = weights_mib * 2**20 * (processes - 1) / processes
    return sent * (GATHERS[strategy] / all_gather_gb_s + 1 / reduce_scatter_gb_s) / 1e6


def step_time_ms(single_ms: float, communication: float, hidden_share: float) -> float:
    """Step time of N processes: T(1) + (1 - h) · communication(N).

    T(1) is the step of one process under the same strategy, h the share of communication that
    computing hides. Both are taken not to change with N, for a process keeps its own batch: a
    prediction beyond the processes that were measured holds as far as bandwidth and h do.
    """
    return single_ms + (1 - hidden_share) * communication


def memory_mib(
    strategy: str, peak_mib: float, state_mib: float, processes: int, *, regathered_mib: float
) -> float:
    """Device memory of each of N processes under FSDP2: M(1) - (1 - 1/N) · state - regathered.

    M(1) is one process's peak under "fsdp2-2", where gathered weights stay. It is reached at the
    loss, where there are no gradients yet, so that only the state between steps (weights,
    optimizer) is divided by N. "fsdp2-3" has by then given back the weights that it gathers anew
    for the backward pass, all layers but one: `regathered_mib`, with more than one process.

    Raises:
        ValueError: another strategy, or less than one process.
    """
    if not strategy.startswith("fsdp2") or processes < 1:
        raise ValueError(
            f"strategy={strategy!r}, processes={processes}: need fsdp2-2 or fsdp2-3 and at least 1"
        )
    given_back = regathered_mib if strategy == "fsdp2-3" and processes > 1 else 0.0
    return peak_mib - (1 - 1 / processes) * state_mib - given_back
