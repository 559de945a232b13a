"""What a fresh process runs for the topic warmup, from its very first step on."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from fusedlib.bench.attempt import Unavailable, free_memory, is_out_of_memory
from fusedlib.bench.timing import synchronize
from study.trainer import DIRECTIONS, Trainer

# A corner of the batch: every kernel of the step runs, on next to no data.
CORNER = (1, 16)
SETTLING, SETTLED = 5, 5
# Which of a direction's sections is its time; of others all are.
TIMED = {"forward": "forward", "backward": "backward"}


def in_one_process(models: list[str], steps: int, **problem: Any) -> list[dict[str, Any]]:
    """Steps of each size, one after the other, each from an idle device.

    Such a series answers for all warm-up settings at once: steps 1 to 10 are what "no warm-up"
    measures, steps 2 to 11 "one warm-up step", and so on.

    Returns one dictionary a size: the samples and the size's `position` in this process, or `oom`
    with the reason, after which the next size is tried.
    """
    runs = []
    for position, model in enumerate(models, 1):
        try:
            figures = series(Trainer(model=model, **problem), steps)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            figures = {"oom": str(error).splitlines()[0]}
        runs.append({**figures, "position": position})
        free_memory()
    return runs


def series(trainer: Trainer, steps: int) -> dict[str, Any]:
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
    """What a first step does all at once, done one by one and timed.

    Wall times in ms: `gemm_ms` (first matrix product: library load, handle, workspace) beside
    `gemm_again_ms`, `corner_ms` (first run of every kernel on a corner of the batch) beside
    `corner_again_ms`, then `first_ms` and `settled_ms` of whole steps.
    """
    trainer = Trainer(**problem)
    device, dtype = trainer.device, next(trainer.model.parameters()).dtype
    square = torch.randn(128, 128, device=device).to(dtype)
    synchronize(device)
    works = {"gemm": lambda: square @ square, "corner": lambda: trainer.step(part=CORNER)}
    figures: dict[str, Any] = {}
    for name, work in works.items():
        figures |= {f"{name}_ms": _timed(device, work), f"{name}_again_ms": _timed(device, work)}
    return figures | _whole(trainer)


def compilation(**problem: Any) -> dict[str, Any]:
    """Wall times in ms of the first steps through `torch.compile`.

    The compile cache on disk is turned off, so that the first step really compiles.
    """
    torch.compiler.config.force_disable_caches = True
    trainer = Trainer(**problem)
    try:
        return _whole(trainer)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        first = str(error).strip().splitlines()[0]
        raise Unavailable(f"torch.compile does not work here: {first}") from error


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    """Wall time of `work` and the device's work it starts, in ms."""
    begin = time.perf_counter()
    work()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def _whole(trainer: Trainer) -> dict[str, float]:
    """The first step, and `settled_ms`: the median of this very process's late ones."""
    whole = [_timed(trainer.device, trainer.step) for _ in range(SETTLING + SETTLED)]
    return {"first_ms": whole[0], "settled_ms": median(whole[SETTLING:])}
