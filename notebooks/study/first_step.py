"""What a fresh process runs for the topic warmup, from its very first step on."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from fusedlib.bench.attempt import free_memory, is_out_of_memory
from fusedlib.bench.timing import synchronize
from study.trainers import DIRECTIONS, TransformerTrainer

SETTLING, SETTLED = 5, 5
# Which of a direction's sections is its time; of others all are.
TIMED = {"forward": "forward", "backward": "backward"}


def in_one_process(models: list[str], steps: int, **problem: Any) -> list[dict[str, Any]]:
    """Steps of each size, one after the other, each from an idle device.

    A dictionary a size: the samples and the size's `position` in this process, or `oom` with the
    reason, after which the next size is tried.
    """
    runs = []
    for position, model in enumerate(models, 1):
        try:
            figures = series(TransformerTrainer(model=model, **problem), steps)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            figures = {"oom": str(error).splitlines()[0]}
        runs.append({**figures, "position": position})
        free_memory()
    return runs


def series(trainer: TransformerTrainer, steps: int) -> dict[str, Any]:
    """Run `steps` steps, and keep every one's times in ms."""
    times = [trainer.step() for _ in range(steps)]
    sections = [*DIRECTIONS[trainer.direction], "total"]
    samples = {f"{name}_samples_ms": [round(t[name], 5) for t in times] for name in sections}
    return {
        "samples_ms": samples[f"{TIMED.get(trainer.direction, 'total')}_samples_ms"],
        **samples,
        "num_parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


def stages(**problem: Any) -> dict[str, Any]:
    """What a first step does all at once, done one by one, by the wall: the first matrix product
    and the first run of every kernel on a corner of the batch, each again, and whole steps.
    """
    trainer = TransformerTrainer(**problem)
    device, dtype = trainer.device, next(trainer.model.parameters()).dtype
    square = torch.randn(128, 128, device=device).to(dtype)
    synchronize(device)
    works = {"gemm": lambda: square @ square, "corner": trainer.step}
    whole = trainer.tokens, trainer.targets
    trainer.tokens, trainer.targets = (batch[:1, :16] for batch in whole)
    figures: dict[str, Any] = {}
    for name, work in works.items():
        figures |= {f"{name}_ms": _timed(device, work), f"{name}_again_ms": _timed(device, work)}
    trainer.tokens, trainer.targets = whole
    return figures | _whole(trainer)


def compilation(**problem: Any) -> dict[str, Any]:
    """First steps through `torch.compile`, its cache on disk turned off, so that the first
    compiles.
    """
    torch.compiler.config.force_disable_caches = True
    return _whole(TransformerTrainer(**problem))


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    """Wall time of `work` and the device's work it starts, in ms."""
    begin = time.perf_counter()
    work()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def _whole(trainer: TransformerTrainer) -> dict[str, float]:
    """The first step, and `settled_ms`: the median of this very process's late ones."""
    whole = [_timed(trainer.device, trainer.step) for _ in range(SETTLING + SETTLED)]
    return {"first_ms": whole[0], "settled_ms": median(whole[SETTLING:])}
