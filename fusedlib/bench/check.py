"""The gate before the clock: output and every gradient against the reference in float64.

One tolerance rule for tests and races: at most twice the error that plain PyTorch makes in the same
dtype on the same inputs, plus a floor of a few unit roundoffs, because where PyTorch happens to be
exact, nobody else need be. It holds in norm and for the worst element. What is compared is what the
problem asks for: a gradient that does not arrive is an error, whatever a rival says it wants.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench.attempt import Wrong
from fusedlib.bench.rivals import Workload

TIMES_EAGER = 2.0
FLOOR_ROUNDOFFS = 4.0


@dataclass(frozen=True)
class Errors:
    """Distance of one tensor from the truth, relative to its root mean square.

    `norm` is ‖t − ref‖ / ‖ref‖, `worst` max|t − ref| / rms(ref).
    """

    norm: float
    worst: float


def results_of(workload: Workload, dy: Tensor) -> dict[str, Tensor]:
    """y and the gradients that a workload gives; y alone where nothing wants a gradient."""
    workload.reset()
    y = workload.forward()
    if y.requires_grad:
        y.backward(dy)
    results = {"y": y.detach(), **workload.gradients()}
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
    off = tensor.double() - true
    rms = true.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    norm = (off.square().mean().sqrt() / rms).item()
    worst = (off.abs().max() / rms).item()
    return Errors(norm, worst)


def allowed(own: float, dtype: torch.dtype) -> float:
    """The largest error that the rule accepts where plain PyTorch makes the error `own`."""
    return TIMES_EAGER * own + FLOOR_ROUNDOFFS * torch.finfo(dtype).eps / 2


def misses(
    rival_errors: Mapping[str, Errors], baseline: Mapping[str, Errors], dtype: torch.dtype,
    required: Iterable[str] | None = None,
) -> list[str]:  # fmt: skip
    """What the rule rejects, one line a tensor; empty when all is right. NaN is never right.

    Args:
        dtype: whose roundoff the floor is made of.
        required: names that the problem asks for; by default all of `baseline`.
    """
    wrong = []
    for name in baseline if required is None else required:
        if name not in rival_errors:
            wrong.append(f"no gradient arrived at {name.removeprefix('d_')}")
            continue
        for measure in ("norm", "worst"):
            value = getattr(rival_errors[name], measure)
            most = allowed(getattr(baseline[name], measure), dtype)
            if not value <= most:
                wrong.append(f"{name}: {measure} error {value:.2e}, allowed {most:.2e}")
    return wrong


def require(
    rival_errors: Mapping[str, Errors], baseline: Mapping[str, Errors], dtype: torch.dtype,
    required: Iterable[str] | None = None, figures: Mapping[str, Any] | None = None,
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
    if wrong := misses(rival_errors, baseline, dtype, required):
        raise Wrong("; ".join(wrong[:9]), figures)
    return dict(figures)
