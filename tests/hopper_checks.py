"""What the kernels with fixed roles must give, and ways to break it: `tests/test_hopper_gpu.py`."""

import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import silu

from fusedlib import reference
from fusedlib.bench import check
from fusedlib.bench.problems import SwiGLUProblem, draw

# Ragged in every direction; more K blocks than the ring has stages; more tiles than programs, with
# a last round of halves; fewer tiles than programs; a long sum.
SHAPES = [
    (37, 64, 96), (300, 208, 272), (1000, 1040, 2000), (2064, 80, 2016), (5, 16, 16),
    (2064, 2320, 2016),
]  # fmt: skip
K_BLOCK = 64


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
