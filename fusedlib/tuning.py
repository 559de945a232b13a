"""The numbers that choose between kernels and cut them into tiles: one way to try others.

    from fusedlib import tuning

    with tuning.override(norm_tile=1024):
        ...  # calls are prepared anew, by these numbers

For whoever tunes a card, and for tests, which must reach every kernel at small sizes. What each
number does and what was measured stands where it is defined, as `PLACES` says. No result depends on
them but by the order of sums.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

# By name, the module and the constant.
PLACES = {
    "norm_tile": ("ops.norm.function", "TILE"),
    "norm_widest": ("ops.norm.function", "WIDEST"),
    "norm_torch_rows": ("ops.norm.function", "MAX_TORCH_ROWS"),
    "rope_pairs": ("ops.rope.function", "PAIRS"),
    "loss_logits_bytes": ("ops.loss.function", "LOGITS_BYTES"),
    "loss_rows": ("ops.loss.function", "ROWS"),
    "loss_block_bytes": ("ops.loss.function", "BLOCK_BYTES"),
    "loss_scaled_block": ("ops.loss.function", "SCALED_BLOCK"),
    "loss_skip_from": ("ops.loss.function", "SKIP_FROM"),
    "loss_invariant_classes": ("ops.loss.function", "INVARIANT_CLASSES"),
    "split_least_size": ("ops.matmul.function", "MIN_SPLIT_SIZE"),
    "split_least_results": ("ops.matmul.function", "MIN_SPLIT_RESULTS"),
    "split_least_work": ("ops.matmul.function", "MIN_SPLIT_WORK"),
    "split_span": ("ops.matmul.function", "SPAN"),
    "split_interpreter_config": ("ops.matmul.function", "INTERPRETER"),
    "mlp_interpreter_config": ("ops.blocks", "INTERPRETER"),
    "mlp_fuses_fp32": ("ops.mlp.route", "FUSES_FP32"),
    "mlp_unfused_tokens": ("ops.mlp.route", "MAX_UNFUSED_TOKENS"),
    "mlp_warp_specialized": ("ops.mlp.route", "WARP_SPECIALIZED_KERNELS"),
    "qkv_joined_elements": ("ops.qkv.function", "MOST_JOINED"),
}


@contextmanager
def override(**values: Any) -> Iterator[None]:
    """Use these numbers, and what is prepared by them, until the block ends.

    Raises:
        TypeError: an unknown name; the message has those there are.
    """
    if unknown := values.keys() - PLACES.keys():
        raise TypeError(f"no such number: {', '.join(unknown)}; there are {', '.join(PLACES)}")
    places = {name: (_module(PLACES[name][0]), PLACES[name][1]) for name in values}
    before = {name: getattr(module, constant) for name, (module, constant) in places.items()}
    try:
        _set(places, values)
        yield
    finally:
        _set(places, before)


def forget() -> None:
    """Drop all that calls have prepared for the next ones like them."""
    for name in ("launch", "ops.mlp.route"):
        if module := sys.modules.get(f"{__package__}.{name}"):
            module.forget()


def _module(name: str) -> Any:
    return import_module(f"{__package__}.{name}")


def _set(places: dict[str, tuple[Any, str]], values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(*places[name], value)
    forget()
