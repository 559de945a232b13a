"""A training whose every step has another length, from the very first on."""

import time
from typing import Any

import torch

from fusedlib.bench import timing
from fusedlib.bench.attempt import Unavailable, free_memory
from fusedlib.bench.statistics import summarize
from measure import llama
from measure.compilers.arms import TASK
from measure.compilers.case import OPTIMIZERS, require_possible
from measure.compilers.subjects import Training
from measure.compiling import TooLong, empty_compile_cache, graphs_compiled, limited
from measure.racing import rivals
from measure.racing.cases import Case

SHORTEST = 16


def lengths(case: Case) -> list[int]:
    """Tokens a sequence of each iteration, the same for all arms."""
    generator = torch.Generator().manual_seed(0)
    size = (case["repetitions"],)
    longest = case["context_length"]
    drawn: list[int] = torch.randint(
        min(SHORTEST, longest), longest + 1, size, generator=generator
    ).tolist()
    return drawn


def dynamic(case: Case) -> dict[str, Any]:
    """Iterations of a training from its very first step, each with a length of its own.

    Returns:
        Wall times of the iterations, their sum (`total_s`, None where it was stopped) and graphs
        compiled by then; `stopped` says after which the time was up. The first one makes no update,
        so that its gradients can be compared.

    Raises:
        Unavailable: not even the first iteration was done in time.
        Wrong: its results miss.
    """
    require_possible(case)
    torch.compiler.reset()
    free_memory()
    context_lengths, device, one = lengths(case), case["device"], rivals.get(TASK, case["provider"])
    setup = Training({**case, "context_length": context_lengths[0]})
    arm, limit = one.build(), case["limit_s"] or 1e6
    model = setup.model_of(arm)
    program: Any = llama.LlamaTrainer(model, arm.compile(model), setup.ids)
    batches = [llama.tokens(case["model"], case["batch_size"], n, device) for n in context_lengths]
    times: list[float] = []
    graphs: list[int] = []
    checked: dict[str, Any] = {}
    with empty_compile_cache(device):
        start = graphs_compiled()
        for program.ids in batches:
            begin = time.perf_counter()
            try:
                with limited(limit - sum(times) / 1e3):
                    program.issue()
                    timing.synchronize(device)
            except TooLong:
                break
            times.append((time.perf_counter() - begin) * 1e3)
            graphs.append(graphs_compiled() - start)
            if len(times) == 1:
                gradients = llama.gradients(model, setup.names)
                checked = setup.error_figures({"loss": program.loss} | gradients)
                program.optimizer = OPTIMIZERS[case["optimizer"]](model.parameters())
    if not times:
        raise Unavailable(f"not one iteration was done in {limit:g} s")
    done = len(times) == len(context_lengths)
    stopped = (
        None
        if done
        else f"after {len(times)} of {len(context_lengths)}, when {limit:g} s were over"
    )
    return {
        **one.facts(), **checked, **summarize(times), "lengths": context_lengths[: len(times)],
        "graphs_by_then": graphs, "graphs": graphs[-1], "stopped": stopped,
        "total_s": sum(times) / 1e3 if done else None, "path": llama.path_of(case),
    }  # fmt: skip
