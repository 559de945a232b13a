"""AdamW's step alone: time, its state, and what it takes for a moment."""

from typing import Any

import torch

from fusedlib.bench import timing
from fusedlib.bench.end_to_end import running
from fusedlib.bench.end_to_end.cases import Case
from fusedlib.bench.end_to_end.watching import MIB
from fusedlib.bench.statistics import summarize
from fusedlib.models.transformer import Transformer, config

# Reads weight, gradient and both moments, writes weight and moments.
PASSES = 7


def measure(case: Case) -> dict[str, Any]:
    """Steps on random gradients.

    Returns `optimizer_…` times, `least_bytes` that a step must move, `state_mib`, `weights_mib`,
    and on CUDA `transient_mib`: what a settled step allocates at its peak and gives back.
    """
    device = case["device"]
    model = Transformer(config(case["model"]), device=device)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = running.adamw(parameters, case["optimizer"])

    def step() -> dict[str, float]:
        timing.synchronize(device)
        sections = timing.Sections(device)
        with sections.section("optimizer"):
            optimizer.step()
        return {"optimizer": sections.elapsed_ms()["optimizer"]}

    for _ in range(case["warmup"]):
        step()
    on_cuda = device == "cuda"
    base = torch.cuda.memory_allocated() if on_cuda else 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    found = running.collect(step, case)
    row = summarize(found["optimizer"], "optimizer")
    if on_cuda:
        row["transient_mib"] = (torch.cuda.max_memory_allocated() - base) / MIB
    weights = running.nbytes(parameters)
    state = running.nbytes(running.state_of(optimizer))
    return row | {
        "least_bytes": PASSES * weights, "tensors": len(parameters),
        "weights_mib": weights / MIB, "state_mib": state / MIB,
    }  # fmt: skip
