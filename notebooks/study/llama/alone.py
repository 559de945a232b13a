"""One arm alone: what fills its memory, and how far it reaches."""

from collections.abc import Callable
from typing import Any

import torch

from fusedlib.bench.attempt import free_memory, is_out_of_memory
from study.allocator import CATEGORIES, Watch, at_peak, live
from study.cases import Case
from study.patched import CONFIGS, LlamaTrainer, alone, tokens
from study.settings import MIB
from study.trainer import watched_steps

GROWING = {"batch": 1, "context": 256}
"""What a limit looks for, and the unit that it is told in."""
TRIES = 6


def memory(case: Case) -> dict[str, Any]:
    """What fills memory in the second of two whole steps, by the allocator's history.

    `logits` are blocks as wide as the vocabulary that are no weight, gradient or moment.
    """

    def make() -> LlamaTrainer:
        model, call = alone(case)
        size = case["batch_size"], case["context_length"]
        ids = tokens(case["model"], *size, case["device"])
        return LlamaTrainer(model, call, ids, optimizer=True)

    _, watch = watched_steps(make, torch.device(case["device"]), 2)
    figures = _split(watch, CONFIGS[case["model"]]["vocab_size"])
    return figures | {"tokens": case["batch_size"] * case["context_length"]}


def _split(watch: Watch, vocabulary: int) -> dict[str, float]:
    """The peak of the second step, and its parts by category."""
    odd = vocabulary // (vocabulary & -vocabulary)
    every, moments = watch.blocks(), watch.history.moments
    for block in every:
        passes = block.category in ("activations", "temporaries", "other")
        if passes and not block.nbytes % odd:
            block.category = "logits"
    held = live(every, len(watch.history.changes), (*CATEGORIES, "logits"))
    begin, end = moments["begin 2"], moments["step 2"]
    return at_peak({name: series[begin:end] for name, series in held.items()})


def limit(case: Case) -> dict[str, Any]:
    """The largest batch, or the longest context, whose whole step fits, on a CUDA card."""
    model, call = alone(case)
    program = LlamaTrainer(model, call, tokens(case["model"], 1, 2, "cuda"), optimizer=True)
    grows, unit = case["grows"], GROWING[case["grows"]]
    at = ("batch", "context").index(grows)

    def peak_mib(count: int) -> float | None:
        size = [case["batch_size"], case["context_length"]]
        size[at] = count * unit
        free_memory()
        try:
            program.ids = tokens(case["model"], size[0], size[1], "cuda")
            torch.cuda.reset_peak_memory_stats()
            program.issue()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() / MIB
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        model.zero_grad(set_to_none=True)
        return None

    first = max(1, (case["batch_size"], case["context_length"])[at] // unit)
    peak_mib(first)  # makes the moments
    capacity = torch.cuda.get_device_properties(0).total_memory / MIB
    return {"largest": furthest(peak_mib, first, capacity) * unit}


def furthest(peak: Callable[[int], float | None], first: int, capacity: float) -> int:
    """The largest count that fits.

    The first guess continues the line through `first` and twice as many. From there steps double
    until one count fits and one does not, then the gap is halved, for `TRIES` tries in all.

    Args:
        peak: memory of a count, None where it does not fit.
        first: a small count.
        capacity: all the memory there is.

    Raises:
        MemoryError: twice the small count does not fit.
    """
    low, high = 2 * first, None
    small, large = peak(first), peak(low)
    if small is None or large is None:
        raise MemoryError(f"out of memory at {first} or {low} already")
    slope = (large - small) / first
    guess = max(low + 1, int(low + (capacity - large) / slope)) if slope > 0 else 2 * low
    step = max(1, guess // 50)
    for _ in range(TRIES):
        low, high = (low, guess) if peak(guess) is None else (guess, high)
        if high is None:
            guess += step
        else:
            middle = (low + high) // 2
            guess = middle if low > 2 * first else max(middle, guess - step)
        if guess == low:
            break
        step *= 2
    return low
