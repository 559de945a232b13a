"""Which tiles a launch gets on a card that the table was not measured on.

On the cards of `swiglu_configs.MEASURED` the table decides, and nothing is ever tuned. On others
the table's entry for the architecture is the default, and the first call of a class of sizes times
it against the few of `candidates`, most of which is compiling them. A class is the kernel and its
variant, the dtype, the sizes, and the tokens up to a power of two. The choice is kept in memory and
in a file (`store`), under the card, the versions of torch and triton and a digest of the kernel's
source, so that a later process only reads it.

Two choices can order a sum differently: results then differ by roundoff between a process that
tuned and one that did not, and between cards. `FUSEDLIB_AUTOTUNE=0` keeps to the table, as
`torch.use_deterministic_algorithms(True)` does. While a CUDA graph is captured nothing is timed: a
size first met there keeps the default, or what is stored, in this process. A call that tunes
allocates the operands and results twice more; where that does not fit it takes the default.

Under DDP each rank tunes by itself, and the first to store its choice decides for all that share
the file (`FUSEDLIB_CACHE` may name a folder that several hosts share). `python -m
fusedlib.kernels.autotune` tunes ahead.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import cache

import torch
import triton
from torch import Tensor

from fusedlib.kernels.autotune import candidates, store, trials
from fusedlib.kernels.launch import Launch
from fusedlib.kernels.swiglu_configs import MEASURED, POINTWISE, UNALIGNED, Config, architecture

LOG = logging.getLogger(__name__)
SWITCH = "FUSEDLIB_AUTOTUNE"
# fp32 comes to the tuned kernels from no public function.
DTYPES = (torch.bfloat16, torch.float16)
# Not products, and products whose tile is bounded by registers on every card.
UNTUNED = (POINTWISE, UNALIGNED)
FEWEST = 16  # tokens of the smallest class: the shortest tile

_CHOSEN: dict[str, Config] = {}
_LOCK = threading.RLock()


def tuned(make: Callable[..., Launch], matrices: Sequence[Tensor]) -> Launch:
    """The launch with the best configuration known, which is found out here if it may be.

    Args:
        make: `make()` is the launch with the table's configuration, `make(config)` with another.
        matrices: what it will be called with: two factors, then what else is read or written. They
            are not touched. With `ahead.Looks` it takes what is known by now.

    Raises:
        ValueError: `FUSEDLIB_AUTOTUNE` is neither 0 nor 1.
    """
    launch, first = make(), matrices[0]
    found = card(first.device)
    if found is None or found[0] in MEASURED or first.dtype not in DTYPES:
        return launch
    name, tokens = launch.kernel.__name__, first.shape[0]
    options = candidates.of(name, architecture(first.device), tokens)
    default = launch.config
    if not options or not isinstance(default, Config) or default in UNTUNED or not enabled():
        return launch
    key = key_of(launch, options, matrices)
    with _LOCK:  # two threads do not time at once
        config = _CHOSEN.get(key)
        if config is None:
            config = _stored_or_tuned(key, make, default, options, matrices)
    return launch if config == launch.config else make(config)


def chosen() -> dict[str, Config]:
    """What this process has looked up or tuned so far, by key."""
    return dict(_CHOSEN)


def enabled() -> bool:
    """Whether other tiles than the table's may be taken."""
    given = os.environ.get(SWITCH) or "1"
    if given not in ("0", "1"):
        raise ValueError(f"{SWITCH} is {given!r}; it must be 0 (keep to the table) or 1 (tune)")
    return given == "1" and not torch.are_deterministic_algorithms_enabled()


def may_time() -> bool:
    """Whether kernels can be started and waited for."""
    return not (torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing())


@cache
def card(device: torch.device) -> tuple[str, tuple[int, int]] | None:
    """Name and compute capability; None off NVIDIA GPUs."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)


def key_of(launch: Launch, options: Sequence[Config], matrices: Sequence[Tensor]) -> str:
    """All that a choice depends on, readable: card, versions, source, variant, dtype, sizes."""
    a, b = matrices[:2]
    found = card(a.device)
    assert found is not None
    name, (major, minor) = found
    source = launch.kernel.cache_key + repr((launch.config, options))
    cut = {*launch.config.launch(), "FLATTEN"}
    variant = [n for n, value in launch.constants.items() if value is True and n not in cut]
    tokens = max(FEWEST, 1 << (a.shape[0] - 1).bit_length())
    parts = (
        f"{name} {major}.{minor}",
        f"torch {torch.__version__}",
        f"triton {triton.__version__}",
        f"source {hashlib.sha256(source.encode()).hexdigest()[:12]}",
        " ".join([launch.kernel.__name__, *variant]),
        str(a.dtype).removeprefix("torch."),
        f"≤{tokens} tokens",
        f"{a.shape[1]} × {tuple(b.shape)}",
    )
    return " | ".join(parts)


def _stored_or_tuned(
    key: str, make: Callable[..., Launch], default: Config, options: tuple[Config, ...],
    matrices: Sequence[Tensor],
) -> Config:  # fmt: skip
    entry = store.read(key)
    config = _config_of(entry, (default, *options))
    if config is None:
        if hasattr(matrices[0], "listed") or not may_time():
            return default
        began = time.perf_counter()
        try:
            config, figures = trials.fastest(make, default, options, matrices)
        except torch.OutOfMemoryError:
            LOG.warning("no memory to tune %s; the default tiles are used for this size", key)
            return default
        LOG.info("tuned %s in %.1f s: %s", key, time.perf_counter() - began, config)
        kept = store.put(key, {"config": asdict(config), **figures}, entry)
        config = _config_of(kept, (default, *options)) or config
    _CHOSEN[key] = config
    return config


def _config_of(entry: store.Entry | None, allowed: Sequence[Config]) -> Config | None:
    """An entry's configuration if it is one of those; fields that `Config` lacks are ignored."""
    given = entry.get("config") if entry is not None else None
    if not isinstance(given, dict):
        return None
    known = {f.name: given.get(f.name) for f in fields(Config)}
    return next((c for c in allowed if asdict(c) == known), None)
