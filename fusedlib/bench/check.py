"""The gate before the clock: output and every gradient against the reference in float64.

One tolerance rule for tests and races: at most twice the error that plain PyTorch makes in the same
dtype on the same inputs, plus a floor of a few unit roundoffs, because where PyTorch happens to be
exact, nobody else need be. It holds in norm and for the worst element. What is compared is what the
problem asks for: a gradient that does not arrive is an error, whatever a rival says it wants.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import alarms
from fusedlib.bench.attempt import Wrong
from fusedlib.bench.workload import Outputs, Workload, go_backward, named

TIMES_EAGER = 2.0
FLOOR_ROUNDOFFS = 4.0


@dataclass(frozen=True)
class Errors:
    """Distance of one tensor from the truth, relative to its root mean square.

    `norm` is ‖t − ref‖ / ‖ref‖, `worst` max|t − ref| / rms(ref); of whole numbers, which are equal
    or not, the root of the share that is not, and 1 where there is one.
    """

    norm: float
    worst: float


def results_of(
    workload: Workload, dy: Outputs, *, backward: bool = True,
    handed_out: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """y, or y1, y2 and so on, as they are at the return, and the gradients that a workload gives.

    Args:
        backward: False for the outputs alone, as where nothing wants a gradient.
        handed_out: gets the outputs themselves, where the results have copies.

    Raises:
        Wrong: an output is no plain tensor, or changes after the return (`alarms`).
    """
    workload.reset()
    for device in {leaf.device for leaf in workload.leaves.values()}:
        alarms.hold_back(device)
    outputs = workload.forward()
    by_name = named(outputs)
    results = alarms.as_returned(by_name)
    if handed_out is not None:
        handed_out |= {name: y.detach() for name, y in by_name.items()}
    if backward and any(y.requires_grad for y in by_name.values()):
        go_backward(outputs, dy)
        results |= workload.gradients()
    workload.reset()
    return results


def errors(results: Mapping[str, Tensor], true: Mapping[str, Tensor]) -> dict[str, Errors]:
    """Errors by name, of what arrived of what is true.

    Raises:
        ValueError: a tensor of another shape, or one that the truth does not know.
    """
    if unknown := set(results) - set(true):
        raise ValueError(f"{sorted(unknown)} are no results of this problem: {sorted(true)}")
    return {name: _distance(tensor, true[name], name) for name, tensor in results.items()}


def _distance(tensor: Tensor, true: Tensor, name: str) -> Errors:
    if tensor.shape != true.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(true.shape)}")
    if not (tensor.is_floating_point() or true.is_floating_point()):
        unequal = (tensor != true).double()  # above 2**53 float64 does not tell them apart
        return Errors(unequal.mean().sqrt().item(), unequal.max().item())
    true = true.double()
    off = tensor.double() - true
    if not math.isfinite(rms := true.square().mean().sqrt().item()):
        # Where the truth is no number or infinite, the same is right and nothing else.
        strange = ~true.isfinite()
        right = (tensor == true) | (tensor.isnan() & true.isnan())
        off = off.masked_fill(strange & right, 0.0).masked_fill(strange & ~right, math.nan)
        rms = true.masked_fill(strange, 0.0).square().mean().sqrt().item()
    rms = max(rms, torch.finfo(torch.float64).tiny)
    norm = off.square().mean().sqrt().item() / rms
    worst = off.abs().max().item() / rms
    return Errors(norm, worst)


def allowed(own: float, dtype: torch.dtype) -> float:
    """The largest error that the rule accepts where plain PyTorch makes the error `own`."""
    return TIMES_EAGER * own + FLOOR_ROUNDOFFS * roundoff(dtype)


def roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff; 0 of whole numbers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def misses(
    rival_errors: Mapping[str, Errors], baseline: Mapping[str, Errors], dtype: torch.dtype,
    required: Iterable[str] | None = None, times: float = 1.0,
) -> list[str]:  # fmt: skip
    """What the rule rejects, one line a tensor; empty when all is right. NaN is never right.

    Args:
        dtype: whose roundoff the floor is made of.
        required: names that the problem asks for; by default all of `baseline`.
        times: how many times the rule's error is accepted; a study accepts the rule's.
    """
    wrong = []
    for name in baseline if required is None else required:
        if name not in rival_errors:
            wrong.append(f"no gradient arrived at {name.removeprefix('d_')}")
            continue
        for measure in ("norm", "worst"):
            value = getattr(rival_errors[name], measure)
            most = times * allowed(getattr(baseline[name], measure), dtype)
            if not value <= most:
                wrong.append(f"{name}: {measure} error {value:.2e}, allowed {most:.2e}")
    return wrong


def share(
    rival_errors: Mapping[str, Errors], baseline: Mapping[str, Errors], dtype: torch.dtype,
    required: Iterable[str], times: float = 1.0,
) -> float:  # fmt: skip
    """The largest error over what the rule allows, above 1 where `misses` has lines; infinite where
    it is NaN or nothing arrived. Arguments as of `misses`.
    """
    largest = 0.0
    for name in required:
        of_rival = rival_errors.get(name, Errors(math.inf, math.inf))
        for measure in ("norm", "worst"):
            value = getattr(of_rival, measure)
            most = times * allowed(getattr(baseline[name], measure), dtype)
            own = value / most if most else math.inf if value else 0.0
            largest = max(largest, math.inf if math.isnan(own) else own)
    return largest


def require(
    rival_errors: Mapping[str, Errors], baseline: Mapping[str, Errors], dtype: torch.dtype,
    required: Iterable[str] | None = None, figures: Mapping[str, Any] | None = None,
    times: float = 1.0,
) -> dict[str, Any]:  # fmt: skip
    """The figures of a row whose errors the rule accepts; arguments as of `misses`.

    Args:
        figures: by default each error in norm, as `NAME_error`.

    Raises:
        Wrong: the rule rejects one; the reason names the first nine, and the figures are the row's
            all the same.
    """
    if figures is None:
        figures = {f"{name}_error": error.norm for name, error in rival_errors.items()}
    if wrong := misses(rival_errors, baseline, dtype, required, times):
        raise Wrong("; ".join(wrong[:9]), figures)
    return dict(figures)
