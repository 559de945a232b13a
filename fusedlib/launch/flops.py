"""FLOPs of our operators for `torch.utils.flop_counter.FlopCounterMode`: 2 m n k a product.

Products alone, as torch counts them of its own operators, and all that are computed: where a
backward computes gate|up or logits again (save="input", losses by token), those count again.
Gradients that a forward computes count there.

Registered with the operators, so that no import of `fusedlib` waits for the counter's module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch.utils.flop_counter import flop_registry, register_flop_formula

from fusedlib.launch.internals import dispatch_modes

Shape = tuple[int, ...]


def _mlp(
    x: Shape, w_gate: Shape, w_up: Shape | None, w_down: Shape | None, *_: Any, **__: Any
) -> int:
    return 2 * x[0] * sum(prod(w) for w in (w_gate, w_up, w_down) if w is not None)


def _mlp_backward(
    upstream: Shape, x: Shape | None, w_gate: Shape | None, w_up: Shape | None,
    w_down: Shape | None, gate_up: Shape | None, wants: Sequence[bool], sizes: Sequence[int],
    pair: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    wants_x, wants_w_gate, wants_w_up, wants_w_down = wants
    of_gate_up = wants_w_gate + wants_w_up if pair else 2 * wants_w_gate
    dh = w_down is not None and any(wants[:3])
    products = dh + 2 * (gate_up is None) + 2 * wants_x + of_gate_up + wants_w_down
    return 2 * upstream[0] * prod(sizes) * products


def _product(a: Shape, b: Shape, **_: Any) -> int:
    return 2 * prod(a) * b[1]


def _product_by_pair(a: Shape, w_gate: Shape, w_up: Shape, *_: Any, **__: Any) -> int:
    return 2 * a[0] * (prod(w_gate) + prod(w_up))


def _linear(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(x) * weight[0]


def _loss(
    hidden: Shape, weight: Shape, bias: Shape | None, target: Shape, class_weights: Shape | None,
    token_weights: Shape | None, total: Shape | None, wants: Sequence[bool], *_: Any, **__: Any,
) -> int:  # fmt: skip
    wants_hidden, wants_weight, _of_bias = wants
    return _linear(hidden, weight) * (1 + wants_hidden + wants_weight)


FORMULAS: dict[str, Callable[..., int]] = {
    "swiglu_mlp_forward": _mlp,
    "swiglu_mlp_backward": _mlp_backward,
    "split_mm": _product,
    "split_mm_gate_up": _product_by_pair,
    "linear_forward": _linear,
    "linear_cross_entropy_forward": _loss,
    "linear_cross_entropy_by_token_forward": _linear,
    "linear_cross_entropy_by_token_backward": _loss,
}


def count(name: str, packet: Any) -> None:
    """Have operators of that name counted, by counters that run already too."""
    if name not in FORMULAS:
        return
    register_flop_formula(packet)(FORMULAS[name])
    for mode in dispatch_modes():
        counter: Any = getattr(mode, "counter", None)
        if hasattr(counter, "flop_registry"):  # a copy
            counter.flop_registry[packet] = flop_registry[packet]
