"""What the kernels with fixed roles must give, and ways to break it: `tests/test_hopper_gpu.py`."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import silu

from fusedlib import reference
from fusedlib.bench import check
from measure.mlp_problem import SwiGLUProblem, draw

hopper = pytest.importorskip("fusedlib.ops.mlp.hopper")

# Ragged in every direction; more K blocks than the ring has stages; more tiles than programs, with
# a last round of halves; fewer tiles than programs; a long sum.
SHAPES = [
    (37, 64, 96), (300, 208, 272), (1000, 1040, 2000), (2064, 80, 2016), (5, 16, 16),
    (2064, 2320, 2016),
]  # fmt: skip
K_BLOCK = 64
_KEPT: dict[Any, Any] = {}


def forward(
    x: Tensor, w_gate_up: Tensor, h: Tensor, gate_up: Tensor | None, pair: bool = False
) -> None:
    """Fill h and, where it is given, gate_up, by a launch that serves all calls like this.

    `pair`: gate and up have a weight each, w_up the one at the lower address, so that rows past the
    end of one are not those of the other.
    """
    store, inner = gate_up is not None, h.shape[1]
    key = "forward", x.shape, h.shape, x.dtype, store, pair
    launch = _KEPT.get(key)
    if launch is None:
        launch = _KEPT[key] = hopper.forward_launch(
            x.device, *x.shape, inner, 0 if pair else inner, store
        )
    w_gate = w_up = w_gate_up
    if pair:
        w_up, w_gate = w_gate_up.roll(inner, 0).chunk(2)
    launch(x, w_gate, w_up, h if gate_up is None else gate_up, h)


def backward(
    dy: Tensor, w_down: Tensor, gate_up: Tensor, d_gate_up: Tensor, h: Tensor | None
) -> None:
    """The same of d_gate_up, which may be gate_up, and, where it is given, h."""
    store, inner = h is not None, w_down.shape[1]
    key = "backward", dy.shape, inner, dy.dtype, store
    launch = _KEPT.get(key)
    if launch is None:
        launch = _KEPT[key] = hopper.backward_launch(dy.device, *dy.shape, inner, store)
    launch(dy, w_down, gate_up, d_gate_up, d_gate_up if h is None else h)


def drawn(shape: tuple[int, int, int], dtype: str, device: str) -> dict[str, Tensor]:
    """x, w_gate_up, w_down and dy."""
    inputs = draw(SwiGLUProblem(*shape, dtype=dtype), device)
    operands = {
        "x": inputs.x, "w_gate_up": torch.cat([inputs.w_gate, inputs.w_up]),
        "w_down": inputs.w_down, "dy": inputs.dy,
    }  # fmt: skip
    return {name: t.detach() for name, t in operands.items()}


def plain(x: Tensor, w_gate_up: Tensor, w_down: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The results of both kernels in plain PyTorch, in the dtype of the operands."""
    gate_up = (x @ w_gate_up.mT).requires_grad_()
    gate, up = gate_up.chunk(2, dim=1)
    h = silu(gate) * up
    (d_gate_up,) = grad(h, gate_up, dy @ w_down)
    found = {"h": h, "gate_up": gate_up, "d_gate_up": d_gate_up, "h again": h}
    return {name: t.detach() for name, t in found.items()}


def misses(found: dict[str, Tensor], operands: dict[str, Tensor]) -> list[str]:
    """What the one tolerance rule rejects."""
    wide = {name: t.double() for name, t in operands.items()}
    true = plain(**wide)
    true["h"] = reference.swiglu(wide["x"], *wide["w_gate_up"].chunk(2))
    usual = check.errors(plain(**operands), true)
    return check.misses(check.errors(found, true), usual, operands["x"].dtype, found)


def without_a_block(operands: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sum over hidden lacks its last K block."""
    fewer = {name: operands[name][:, :-K_BLOCK] for name in ("x", "w_gate_up", "dy")}
    return operands | fewer | {"w_down": operands["w_down"][:-K_BLOCK]}


def exchanged(operands: dict[str, Tensor]) -> dict[str, Tensor]:
    """Up's rows where gate's belong."""
    weight = operands["w_gate_up"]
    return operands | {"w_gate_up": weight.roll(weight.shape[0] // 2, 0)}


BROKEN_OPERANDS = {"a dropped K block": without_a_block, "gate and up exchanged": exchanged}


def wrong_corner(name: str, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """One element of the last ragged tile is off by twice the tensor's root mean square."""
    tensor = found[name].clone()
    tensor[-1, -1] += 2 * tensor.float().square().mean().sqrt()
    return found | {name: tensor}


def unwritten_row(name: str, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The last row was not stored."""
    tensor = found[name].clone()
    tensor[-1] = 7.0
    return found | {name: tensor}


BROKEN_RESULTS = {"a wrong element": wrong_corner, "an unwritten row": unwritten_row}
