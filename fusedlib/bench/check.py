"""The gate before the clock: output and every gradient against the reference in float64.

One tolerance rule for tests and sweeps: at most twice the error that plain PyTorch makes in the
same dtype on the same inputs, plus a floor of a few unit roundoffs, because where PyTorch happens
to be exact, nobody else need be. It holds in norm and for the worst element.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fusedlib import reference
from fusedlib.bench.problems import Inputs
from fusedlib.bench.providers import Workload

TIMES_EAGER = 2.0
FLOOR_ROUNDOFFS = 4.0


@dataclass(frozen=True)
class Errors:
    """Distance of one tensor from the truth, relative to its root mean square.

    `norm` is ‖t − ref‖ / ‖ref‖, `worst` max|t − ref| / rms(ref).
    """

    norm: float
    worst: float


def truth(inputs: Inputs) -> dict[str, Tensor]:
    """y and all gradients by name, in float64 on the inputs' own device."""
    leaves = {n: t.detach().double().requires_grad_() for n, t in inputs.leaves().items()}
    return results_of(Workload(lambda: reference.swiglu_mlp(**leaves), leaves), inputs.dy.double())


def results_of(workload: Workload, dy: Tensor) -> dict[str, Tensor]:
    """y and the gradients that a workload gives.

    Raises:
        ValueError: an operand that wants a gradient received none.
    """
    workload.reset()
    y = workload.forward()
    y.backward(dy)
    found = {"y": y.detach(), **workload.gradients()}
    workload.reset()
    return found


def errors(found: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, Errors]:
    """Errors by name; the truth's gate and up are packed where the provider's are."""
    if "d_w_gate_up" in found:
        true = {**true, "d_w_gate_up": torch.cat([true["d_w_gate"], true["d_w_up"]])}
    return {name: _distance(tensor, true[name], name) for name, tensor in found.items()}


def _distance(tensor: Tensor, true: Tensor, name: str) -> Errors:
    if tensor.shape != true.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(true.shape)}")
    off = tensor.double() - true
    rms = true.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    norm = (off.square().mean().sqrt() / rms).item()
    worst = (off.abs().max() / rms).item()
    return Errors(norm, worst)


def misses(found: dict[str, Errors], eager: dict[str, Errors], dtype: torch.dtype) -> list[str]:
    """What the rule rejects, one line a tensor; empty when all is right. NaN is never right."""
    floor = FLOOR_ROUNDOFFS * torch.finfo(dtype).eps / 2
    apart = {"d_w_gate", "d_w_up"} <= eager.keys()
    packed = eager | ({"d_w_gate_up": _larger(eager, "d_w_gate", "d_w_up")} if apart else {})
    wrong = []
    for name, error in found.items():
        for measure in ("norm", "worst"):
            value, usual = getattr(error, measure), getattr(packed[name], measure)
            allowed = TIMES_EAGER * usual + floor
            if not value <= allowed:
                wrong.append(f"{name}: {measure} error {value:.2e}, allowed {allowed:.2e}")
    return wrong


def _larger(eager: dict[str, Errors], *names: str) -> Errors:
    chosen = [eager[n] for n in names]
    return Errors(max(e.norm for e in chosen), max(e.worst for e in chosen))
