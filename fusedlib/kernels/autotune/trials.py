"""Which of some configurations is fastest and right, on random matrices of a call's sizes.

Times are medians of `triton.testing.do_bench`, which empties the L2 cache before each launch; a
launch of a few µs includes some of what it costs the host.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import median
from typing import Any

import torch
import triton
from torch import Tensor

from fusedlib.kernels.launch import Launch, current_device
from fusedlib.kernels.swiglu_configs import Config

LOG = logging.getLogger(__name__)
WARMUP_MS, MEASURED_MS = 5, 30
ROUNDS = 3  # of the fastest and the default in turns
MARGIN = 0.97  # of the default's time, below which another is worth other roundoff
Make = Callable[..., Launch]


def fastest(
    make: Make, default: Config, options: Sequence[Config], matrices: Sequence[Tensor]
) -> tuple[Config, dict[str, Any]]:
    """The default, or the option that is right and takes less than MARGIN of its time.

    Args:
        make: the launch of a configuration.
        default: what the results of the others are held against.
        options: those to try; one that does not compile, fit or agree, or that spills, is left out.
        matrices: of the call's sizes, strides, dtype and device; they are not touched.

    Returns:
        The configuration, and its `ms`, the default's `default_ms` and how many were `tried`.

    Raises:
        torch.OutOfMemoryError: the matrices do not fit twice more.
    """
    with torch.no_grad(), current_device(matrices[0]):
        wanted, own = _drawn_like(matrices), _drawn_like(matrices)
        launch = make(default)
        others = {option: make(option) for option in options if option != default}
        _compile([launch, *others.values()], own)
        launch(*wanted)
        right = {o: each for o, each in others.items() if _runs_right(each, own, wanted)}
        times = {option: _time(each, own) for option, each in right.items()}
        best = min(times, key=lambda option: times[option], default=default)
        fast = others.get(best, launch)
        rounds = [(_time(fast, own), _time(launch, own)) for _ in range(ROUNDS)]
    ms, default_ms = map(median, zip(*rounds, strict=True))
    if ms >= MARGIN * default_ms:
        best, ms = default, default_ms
    return best, {"ms": ms, "default_ms": default_ms, "tried": len(times)}


def milliseconds(call: Callable[[], None]) -> float:
    """Median time of a call on the current device."""
    ms = triton.testing.do_bench(call, WARMUP_MS, MEASURED_MS, return_mode="median")
    return float(ms)


def _time(launch: Launch, matrices: Sequence[Tensor]) -> float:
    return milliseconds(lambda: launch(*matrices))


def _drawn_like(matrices: Sequence[Tensor]) -> list[Tensor]:
    """New matrices of these sizes and strides; what was one matrix is one again."""
    new = {
        id(m): torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device=m.device)
        for m in matrices
    }
    drawn = [new[id(m)] for m in matrices]
    _draw(drawn)
    return drawn


def _draw(matrices: Sequence[Tensor]) -> None:
    """Normal numbers, always the same: the factors such that their product has variance 1."""
    # A generator of its own leaves the user's random numbers as they are.
    generator = torch.Generator(matrices[0].device).manual_seed(0)
    for index, matrix in enumerate({id(m): m for m in matrices}.values()):
        scale = matrices[0].shape[1] ** -0.25 if index < 2 else 1.0
        matrix.normal_(std=scale, generator=generator)


def _runs_right(launch: Launch, own: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether it compiles, fits, spills nothing, and gives the default's results."""
    _draw(own)
    try:
        launch(*own)
        spilled = getattr(launch.compiled(*own), "n_spills", 0)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's and the driver's errors share no base
        LOG.debug("%s does not run: %s", launch.config, error)
        return False
    return not spilled and _agree(own, wanted)


def _compile(launches: Sequence[Launch], matrices: Sequence[Tensor]) -> None:
    """All at once, by several threads; one that does not compile says so when it is run."""
    threads = min(len(launches), os.cpu_count() or 1)
    with (
        ThreadPoolExecutor(threads) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for launch in launches:
            with suppress(Exception):
                launch.compiled(*matrices)


def _agree(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Equal but for where the last rounding goes; a number that is not one agrees with none."""
    return all(
        bool((f - w).abs().max() <= 2 * torch.finfo(w.dtype).eps * w.abs().max())
        for f, w in zip(found, wanted, strict=True)
    )
